"""Environment and arguments of an SGLang server on the CPU engine. Standard library only.

SGLang decides at import time, in every process, whether it runs on a CPU. So a launcher builds the
environment first and starts a new process with it; setting it in a running process is too late.
"""

import os
import site
from collections.abc import Mapping
from pathlib import Path

_HERE = Path(__file__).resolve().parent
SHIM_DIR = _HERE / "shim"
PACKAGE_ROOT = _HERE.parent.parent

_DEFAULT_ARGS = (
    ("--device", "cpu"),
    ("--attention-backend", "intel_amx"),
    ("--max-total-tokens", "4096"),
    ("--mem-fraction-static", "0.2"),
)


def cpu_environment(num_ranks: int, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` plus what every process of a server with ``num_ranks`` ranks (TP x PP) needs.

    Thread and compile settings that ``base`` already carries are kept; the rest is set.
    """
    env = dict(base)
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    env["SGLANG_PP_SPEC_CPU_ENGINE"] = "1"  # the plugin entry registers the hooks of this package
    env["CUDA_VISIBLE_DEVICES"] = ""  # a visible GPU would make SGLang choose CUDA kernels
    env["PYTHONPATH"] = os.pathsep.join(_python_path(base.get("PYTHONPATH", "")))
    # One entry per rank: without it SGLang refuses more ranks than the machine has NUMA nodes.
    env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cpu_binding(num_ranks))
    # Compiling SGLang's small helpers costs 20 s at the first request on two cores.
    env.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Ranks share the cores; a thread pool per rank would make them fight.
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def cpu_binding(num_ranks: int) -> str:
    """One usable core per rank, round robin: ``"0|1|0"`` for three ranks on two cores."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))


def cpu_server_args(given: tuple[str, ...] | list[str] = ()) -> list[str]:
    """Flags that a CPU server needs, less those that ``given`` already sets."""
    flags = {argument.partition("=")[0] for argument in given}
    return [part for default in _DEFAULT_ARGS if default[0] not in flags for part in default]


def _python_path(current: str) -> list[str]:
    """The shim first, then the user's entries, then this package if it is not installed."""
    entries = [entry for entry in current.split(os.pathsep) if entry and entry != str(SHIM_DIR)]
    root = str(PACKAGE_ROOT)
    if root not in site.getsitepackages() and root not in entries:
        entries.append(root)
    return [str(SHIM_DIR), *entries]
