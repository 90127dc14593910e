"""Which server: command line and environment of one arm of a comparison."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..core.settings import COLOCATED, CPU_ENGINE, ENABLE, Settings
from ..cpu_engine.environment import cpu_environment, cpu_server_args

Mode = Literal["plain", "plugin", "builtin", "nospec"]

LOOPBACK = "127.0.0.1"
PLUGINS = "SGLANG_PLUGINS"  # SGLang's allow-list of plugins
PLUGIN_NAME = "pp_spec"
CPU_PLUGIN_NAME = "pp_spec_cpu_engine"
COLOCATED_PLUGIN_NAME = "pp_spec_colocated"
# The leading process would outlive a crashed scheduler by a minute of diagnostics.
_CRASH_DIAGNOSES = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")

# float32: in bf16 another batch shape may flip a tie between two tokens. Room for 16 requests of 1000 tokens.
_CPU_DEFAULTS = (("--dtype", "float32"), ("--max-running-requests", "16"), ("--max-total-tokens", "16384"))


@dataclass(frozen=True)
class ServerSpec:
    """Which server: its command line and environment follow from this alone, and from the machine."""

    model: str
    draft: str | None = None
    pp: int = 1
    tp: int = 1
    mode: Mode = "plain"
    topk: int = 1
    steps: int = 2
    num_draft_tokens: int | None = None  # steps + topk by default: 3 for a chain of 2 steps, 4 for a topk=2 tree
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode {self.mode!r}; choose one of {', '.join(get_args(Mode))}")
        if min(self.pp, self.tp, self.topk, self.steps) < 1:
            raise ValueError(f"pp, tp, topk and steps start at 1: {self}")

    def command(self, port: int) -> list[str]:
        """The full command line of a server on this machine."""
        arguments = [
            *("--model-path", str(self.model)),
            *("--pp-size", str(self.pp)),
            *("--tp-size", str(self.tp)),
            *self._speculative_args(),
            *self.extra_args,
        ]
        if self.on_cpu:
            for default in _CPU_DEFAULTS:
                if not is_given(default[0], arguments):
                    arguments += default
            arguments += cpu_server_args(arguments)
        address = ["--host", LOOPBACK, "--port", str(port)]
        return [sys.executable, "-m", "sglang.launch_server", *arguments, *address]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (this process's environment) without its plugin switches, plus this server's."""
        env = {k: v for k, v in (os.environ if base is None else base).items() if k not in (ENABLE, PLUGINS)}
        if self.on_cpu:
            env = cpu_environment(self.pp * self.tp, env) | {CPU_ENGINE: "1"}
        if self.mode in ("plugin", "builtin"):
            env[ENABLE] = "1"
        allowed = [PLUGIN_NAME] if self.mode == "plugin" else []
        if self.on_cpu:
            allowed.append(CPU_PLUGIN_NAME)
        if self.extra_env.get(COLOCATED):
            allowed.append(COLOCATED_PLUGIN_NAME)
        env[PLUGINS] = ",".join(allowed) or "none-such"  # an empty list would allow every plugin
        for diagnosis in _CRASH_DIAGNOSES:
            env.setdefault(diagnosis, "0")
        # SGLang asks itself over HTTP at start-up; a proxy in the environment would take those requests.
        env["no_proxy"] = env["NO_PROXY"] = ",".join(filter(None, [env.get("NO_PROXY"), LOOPBACK, "localhost"]))
        return env | dict(self.extra_env)

    @property
    def on_cpu(self) -> bool:
        """Whether this server runs on the CPU engine."""
        return uses_cpu_engine({**os.environ, **self.extra_env})

    def _speculative_args(self) -> list[str]:
        if self.mode == "nospec":
            return []
        given = {
            "--speculative-algorithm": "EAGLE",
            "--speculative-draft-model-path": self.draft,
            "--speculative-num-steps": self.steps,
            "--speculative-eagle-topk": self.topk,
            "--speculative-num-draft-tokens": self.num_draft_tokens or self.steps + self.topk,
        }
        defaults = {k: v for k, v in given.items() if v is not None and not is_given(k, self.extra_args)}
        return [str(part) for pair in defaults.items() for part in pair]


def is_given(flag: str, arguments: Sequence[str]) -> bool:
    """Whether a command line sets `flag`, as `--flag value` or `--flag=value`."""
    return any(argument.partition("=")[0] == flag for argument in arguments)


def uses_cpu_engine(environ: Mapping[str, str]) -> bool:
    """What SGLANG_PP_SPEC_CPU_ENGINE says, and without it whether the machine has no GPU."""
    if CPU_ENGINE in environ:
        return Settings.from_environment({CPU_ENGINE: environ[CPU_ENGINE]}).cpu_engine
    return not has_gpu(environ)


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Whether a GPU's device file is there and visible, without loading a driver into this process."""
    return num_gpus(environ) > 0


def num_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs are visible, by their device files; of AMD's perhaps too many, as other cards render, too."""
    files = len(glob.glob("/dev/nvidia[0-9]*"))
    if not files and glob.glob("/dev/kfd"):
        files = max(1, len(glob.glob("/dev/dri/renderD*")))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return files
    return min(files, len([one for one in chosen.split(",") if one.strip() not in ("", "-1")]))
