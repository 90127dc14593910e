"""Preflight: can SGLang run with this plugin, on this machine, with these checkpoints?

    python -m sglang_pp_spec.check [--model FOLDER] [--draft FOLDER] [--pp N]

One `ok:` line per check, cheapest first. The first check that does not hold prints `FAILED: reason; fix` and
the exit status is 1. Nothing of SGLang is imported here: what needs its modules runs in a process of its own,
with a server's environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sglang_pp_spec.core.checkpoint import PreflightFailure, check_checkpoints
from sglang_pp_spec.core.settings import ENABLE, Settings
from sglang_pp_spec.cpu_engine.environment import cpu_environment
from sglang_pp_spec.server.spec import (
    COLOCATED_PLUGIN_NAME,
    CPU_PLUGIN_NAME,
    PLUGIN_NAME,
    PLUGINS,
    num_gpus,
    uses_cpu_engine,
)
from sglang_pp_spec.tiny import DRAFT_PATH, TARGET_PATH

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINTS = {
    PLUGIN_NAME: "sglang_pp_spec.plugin:load",
    CPU_PLUGIN_NAME: "sglang_pp_spec.plugin:load_cpu_engine",
    COLOCATED_PLUGIN_NAME: "sglang_pp_spec.plugin:load_colocated",
}
_INSTALL = "run scripts/setup.sh, or pip install -e . in the checkout"
_PROBE_TIMEOUT_S = 240
_HOST_PROBE = "import json; from sglang_pp_spec.host import symbols as s; print(json.dumps(s.check_host()))"
_KERNEL_PROBE = "import json, sgl_kernel; print(json.dumps(sgl_kernel.__file__))"

Check = Callable[[], str]


def check_versions() -> str:
    """Python, torch and SGLang are there. The host table, not the version, decides about SGLang."""
    return f"python {platform.python_version()}, torch {_version('torch')}, sglang {_version('sglang')}"


def check_not_shadowed() -> str:
    """`import sglang` finds the installed package, not a folder of that name earlier on the path."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        raise PreflightFailure("sglang cannot be imported", _INSTALL)
    installed = importlib.metadata.distribution("sglang")
    found = spec.origin or ", ".join(spec.submodule_search_locations or ())
    expected = Path(str(installed.locate_file("sglang/__init__.py")))
    # An editable SGLang lies elsewhere, but it is a package; a stray folder has no __init__.py.
    if spec.origin is None or (expected.exists() and not expected.samefile(spec.origin)):
        raise PreflightFailure(
            f"import sglang finds {found} instead of the installed package",
            "start from another folder, or take that one off PYTHONPATH",
        )
    return f"sglang is the installed package, in {Path(spec.origin).parent}"


def check_entry_points() -> str:
    """SGLang will find our entry points, and they name code that exists."""
    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    for name, value in ENTRY_POINTS.items():
        if name not in found:
            raise PreflightFailure(f"entry point {name} of group {ENTRY_POINT_GROUP} is not installed", _INSTALL)
        if found[name].value != value:
            raise PreflightFailure(f"entry point {name} is {found[name].value}, not {value}", _INSTALL)
    if importlib.util.find_spec("sglang_pp_spec.plugin") is None:
        raise PreflightFailure("entry points name sglang_pp_spec.plugin, which is not there", _INSTALL)
    dist = found[PLUGIN_NAME].dist
    owner = f"{dist.name} {dist.version}" if dist else "an unknown distribution"
    return f"entry points {', '.join(ENTRY_POINTS)} from {owner}"


def check_settings(environ: Mapping[str, str], enabled: bool | None = None) -> str:
    """The settings are valid, and SGLang's allow-list does not leave out what is switched on."""
    try:
        settings = Settings.from_environment(environ)
    except ValueError as error:
        raise PreflightFailure(str(error), "correct or unset it") from None
    wanted = [PLUGIN_NAME] if (settings.enabled if enabled is None else enabled) else []
    if uses_cpu_engine(environ):
        wanted.append(CPU_PLUGIN_NAME)
    allowed = [name.strip() for name in environ.get(PLUGINS, "").split(",") if name.strip()]
    for name in wanted:
        if allowed and name not in allowed:
            raise PreflightFailure(
                f"{PLUGINS}={environ[PLUGINS]} leaves out {name}, so SGLang would run without it",
                f"add {name} to {PLUGINS}, or unset {PLUGINS}",
            )
    if PLUGIN_NAME in wanted:
        return "the plugin is switched on and allowed"
    return f"the plugin is off until {ENABLE}=1"


def check_device(environ: Mapping[str, str], num_stages: int) -> str:
    """There is a GPU for every stage, or the CPU engine's kernels can be imported."""
    if not uses_cpu_engine(environ):
        colocated = Settings.from_environment(environ).colocated
        found, needed = num_gpus(environ), 1 if colocated else num_stages
        if found < needed:
            raise PreflightFailure(
                f"{found} GPU(s) for {num_stages} stages",
                "take fewer stages, or SGLANG_PP_SPEC_CPU_ENGINE=1 for the CPU engine",
            )
        return f"{found} GPU(s) for {num_stages} stages"
    found = probe(_KERNEL_PROBE, environ)
    if "cpu_engine" not in str(found):
        raise PreflightFailure(f"import sgl_kernel finds {found}, not the CPU engine's", "unset PYTHONPATH")
    return "no GPU: the CPU engine serves, its kernels can be imported"


def check_host_table(environ: Mapping[str, str]) -> str:
    """Every host symbol the plugin relies on has the parameters it was written against."""
    problems = probe(_HOST_PROBE, environ)
    if problems:
        version = _version("sglang")
        raise PreflightFailure(
            f"sglang {version} is not the host this plugin knows: {', '.join(problems)}",
            "pip install sglang==0.5.23",
        )
    return "every host symbol is as expected"


def check_tiny_model() -> str:
    """The checkpoints that demo and tests use are in the package."""
    try:
        check_checkpoints(TARGET_PATH, DRAFT_PATH, 2)
    except PreflightFailure as failure:
        raise PreflightFailure(f"tiny model: {failure.reason}", "install from a full checkout") from None
    return f"tiny model and its draft, in {TARGET_PATH.parent}"


def check_models(model: str, draft: str | None, num_stages: int) -> list[str]:
    """The checkpoints' own checks; what is not a folder here (a hub's name) is left to SGLang."""
    remote = [name for name in (model, draft) if name and not looks_like_folder(name)]
    if remote:
        return [f"{', '.join(remote)}: not a local folder, left to SGLang"]
    return check_checkpoints(Path(model), Path(draft) if draft else None, num_stages)


def looks_like_folder(name: str) -> bool:
    """Whether a model argument means a folder: it exists, or can be no `owner/name` of a hub."""
    return Path(name).exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def probe(code: str, environ: Mapping[str, str]) -> object:
    """The JSON that `code` prints last in a server's environment; its last error line if it fails."""
    env = cpu_environment(1, environ) if uses_cpu_engine(environ) else dict(environ)
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise PreflightFailure(
            f"no answer in {_PROBE_TIMEOUT_S} s to: {code}", "look at the machine's load"
        ) from None
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        raise PreflightFailure(last, f"see {sys.executable} -c {code!r}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def quick_checks(environ: Mapping[str, str], enabled: bool | None = None) -> Iterator[Check]:
    """The checks that take no process: a launcher runs them before every server."""
    yield check_versions
    yield check_not_shadowed
    yield check_entry_points
    yield lambda: check_settings(environ, enabled)


def all_checks(environ: Mapping[str, str], num_stages: int) -> Iterator[Check]:
    """Everything, cheapest first."""
    yield from quick_checks(environ)
    yield check_tiny_model
    yield lambda: check_device(environ, num_stages)
    yield lambda: check_host_table(environ)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sglang_pp_spec.check", description="Preflight of the plugin.")
    parser.add_argument("--model", help="target checkpoint to check as well")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default 2)")
    options = parser.parse_args(argv)
    if options.draft and not options.model:
        parser.error("--draft needs --model")
    try:
        if options.model:
            _say(*check_models(options.model, options.draft, options.pp))
        for check in all_checks(os.environ, options.pp):
            _say(check())
    except PreflightFailure as failure:
        print(f"FAILED: {failure}", flush=True)
        return 1
    return 0


def _say(*facts: str) -> None:
    for fact in facts:
        print(f"ok: {fact}", flush=True)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise PreflightFailure(f"{distribution} is not installed", _INSTALL) from None


if __name__ == "__main__":
    sys.exit(main())
