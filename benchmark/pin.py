"""A block of cores for each stage of a server: processes that wander over a virtual machine slow each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import psutil

STAGE_TITLE = "sglang::scheduler"  # how SGLang names the processes that launch forwards


def pin_stages(leader: int) -> dict[int, list[int]]:
    """Give every stage under the process ``leader`` equally many cores of its own; {pid: cores}, empty if too few.

    All threads of a stage move; the server's other processes stay where they are.
    """
    children = psutil.Process(leader).children(recursive=True)
    stages = sorted((child for child in children if _is_stage(child)), key=lambda child: child.pid)
    cores = blocks(sorted(os.sched_getaffinity(0)), len(stages))
    for stage, own in zip(stages, cores, strict=False):
        for thread in stage.threads():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(thread.id, own)
    return {stage.pid: own for stage, own in zip(stages, cores, strict=False)}


def blocks(cores: Sequence[int], count: int) -> list[list[int]]:
    """``count`` equal blocks of neighbouring ``cores``; none if a block would have less than two."""
    size = len(cores) // max(1, count)
    return [list(cores[i * size : (i + 1) * size]) for i in range(count)] if size >= 2 else []


def _is_stage(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith(STAGE_TITLE)
    except psutil.NoSuchProcess:
        return False
