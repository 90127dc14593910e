"""SGLang's server with this plugin on: `python -m sglang_pp_spec.launch --model-path ... --pp-size 2 ...`

Takes SGLang's own arguments. In order: what can be checked without SGLang (a `FAILED: reason; fix` line and
exit status 1 before any model loads), the environment, then this process becomes `python -m
sglang.launch_server`. Where there is no GPU the CPU engine's environment and the arguments it needs are added;
arguments that are given stay as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from sglang_pp_spec.check import check_models, quick_checks
from sglang_pp_spec.core.checkpoint import PreflightFailure
from sglang_pp_spec.core.settings import CPU_ENGINE, ENABLE, Settings
from sglang_pp_spec.cpu_engine.environment import cpu_environment, cpu_server_args
from sglang_pp_spec.server import uses_cpu_engine


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The few of SGLang's arguments that matter before it starts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", dest="model")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", dest="draft")
    parser.add_argument("--pp-size", "--pipeline-parallel-size", dest="pp", type=int, default=1)
    parser.add_argument("--tp-size", "--tensor-parallel-size", dest="tp", type=int, default=1)
    return parser.parse_known_args(list(argv))[0]


def check_launch(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """`PreflightFailure` for what would stop the server later, or would run another one under our name."""
    for check in quick_checks(environ, enabled=True):
        check()
    if ENABLE in environ and not Settings.from_environment(environ).enabled:
        raise PreflightFailure(
            f"{ENABLE}={environ[ENABLE]} says off and this command says on",
            f"unset {ENABLE}, or use python -m sglang.launch_server",
        )
    arguments = read_arguments(argv)
    if arguments.model:
        check_models(arguments.model, arguments.draft, arguments.pp)


def prepare(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of SGLang's server."""
    env = {**environ, ENABLE: "1"}
    server_args = list(argv)
    if uses_cpu_engine(environ):
        arguments = read_arguments(argv)
        env = cpu_environment(arguments.pp * arguments.tp, env) | {CPU_ENGINE: "1"}
        server_args += cpu_server_args(server_args)
    return [sys.executable, "-m", "sglang.launch_server", *server_args], env


def main(argv: Sequence[str] | None = None) -> int:
    """Check, then become the server; returns only when a check fails."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        check_launch(argv, os.environ)
    except PreflightFailure as failure:
        print(f"FAILED: {failure}", flush=True)
        return 1
    command, env = prepare(argv, os.environ)
    os.execve(command[0], command, env)


if __name__ == "__main__":
    sys.exit(main())
