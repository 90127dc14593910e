"""A block of cores for each stage of a server: processes that wander over a virtual machine slow each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

STAGE_TITLE = "sglang::scheduler"  # how SGLang names the processes that launch forwards


def pin_stages(group: int) -> dict[int, list[int]]:
    """Give every stage in the process group ``group`` equally many cores of its own; {pid: cores}, empty if too few.

    All threads of a stage move; the server's other processes stay where they are.
    """
    stages = sorted(pid for pid in _processes(group) if _title(pid).startswith(STAGE_TITLE))
    placed = dict(zip(stages, blocks(sorted(os.sched_getaffinity(0)), len(stages)), strict=False))
    for pid, cores in placed.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
    return placed


def blocks(cores: Sequence[int], count: int) -> list[list[int]]:
    """``count`` equal blocks of neighbouring ``cores``; none if a block would have less than two."""
    size = len(cores) // max(1, count)
    return [list(cores[i * size : (i + 1) * size]) for i in range(count)] if size >= 2 else []


def _processes(group: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if _group(pid) == group]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
