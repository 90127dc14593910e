"""What every benchmark says about itself: versions, command line, commit, hardware; the result as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("sglang", "torch", "sglang-pp-spec")
_ROOT = Path(__file__).resolve().parent.parent


def provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, full command line, SGLang's and NCCL's variables, commit and hardware of this run."""
    return {
        "argv": [_relative(argument) for argument in (sys.argv if argv is None else argv)],
        "environment": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(("SGLANG_", "NCCL_"))},
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "hardware": hardware(),
    }


def commit() -> str | None:
    """The checkout's commit, ``+changes`` behind it if files differ; None outside git."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+changes" if _git("status", "--porcelain") else "")


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory."""
    return {
        "cpu": _first_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_kib("MemTotal") / 2**20, 1),
    }


def available_gib() -> float:
    """Memory that new processes could use now."""
    return _memory_kib("MemAvailable") / 2**20


def emit(result: dict[str, Any], json_path: str | None = None) -> None:
    """Write ``result`` to ``json_path``, if given, and as the last line of the standard output."""
    if json_path:
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def nvidia_smi(query: str) -> list[list[str]]:
    """The rows of one of its queries, numbers without units; none where there is no NVIDIA driver."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except FileNotFoundError:
        return []
    return [[field.strip() for field in line.split(",")] for line in out.splitlines() if line.strip()]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A plain text table: first column to the left, numbers to the right."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _relative(path: str) -> str:
    """A path inside the checkout without the checkout's own place."""
    return path.removeprefix(f"{_ROOT}/")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _memory_kib(key: str) -> float:
    field = _first_field("/proc/meminfo", key)
    return float(field.split()[0]) if field else 0.0


def _first_field(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
