"""How long GPUs were busy, read from the PyTorch profiler's traces that SGLang writes, one file per stage."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_pp_spec.server import Server

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
INVISIBLE_MS = 0.01
Spans = list[tuple[float, float]]  # (begin, end) in milliseconds, ascending, disjoint


def start(server: Server, folder: Path) -> None:
    """Record what the GPUs of all stages run, until ``stop``."""
    folder.mkdir(parents=True, exist_ok=True)
    server.post("/start_profile", {"output_dir": str(folder), "activities": ["GPU"]})


def stop(server: Server, folder: Path, num_gpus: int, timeout_s: float = 120.0) -> list[Spans]:
    """End the recording; what every GPU ran, stage by stage and within a stage by tensor-parallel rank."""
    server.post("/stop_profile", {})
    deadline, read = time.monotonic() + timeout_s, dict[Path, Spans]()
    while len(read) < num_gpus:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(read)} of {num_gpus} traces in {folder} after {timeout_s:.0f} s")
        time.sleep(0.2)
        for trace in folder.rglob("*.trace.json.gz"):
            if trace not in read and (events := read_trace(trace)) is not None:
                read[trace] = spans_of(events)
    return [read[trace] for trace in sorted(read, key=rank_of)]


def rank_of(trace: Path) -> tuple[int, int]:
    """(stage, tensor-parallel rank) that a trace's name tells; SGLang leaves out what there is only one of."""
    stage, rank = (re.search(rf"-{kind}-(\d+)", trace.name) for kind in ("PP", "TP"))
    return int(stage[1]) if stage else 0, int(rank[1]) if rank else 0


def read_trace(path: Path) -> list[dict[str, Any]] | None:
    """The events of a trace; None while it is still being written."""
    try:
        with gzip.open(path, "rt") as file:
            return json.load(file)["traceEvents"]
    except (EOFError, ValueError, OSError):
        return None


def spans_of(events: Iterable[dict[str, Any]]) -> Spans:
    """When a device ran anything: the union of its kernels and copies, whatever their streams.

    Without NCCL's kernels: one that receives runs from when it is queued until its sender has come.
    """
    return _union(
        (event["ts"] / 1000, (event["ts"] + event.get("dur", 0)) / 1000)
        for event in events
        if event.get("cat") in DEVICE_CATEGORIES and not event.get("name", "").startswith("nccl")
    )


def shared(stages: Sequence[Spans]) -> Spans:
    """When a device that all ``stages`` share ran anything; a kernel that another stage's interrupts counts once."""
    return _union(span for spans in stages for span in spans)


def _union(parts: Iterable[tuple[float, float]], gap_ms: float = 0.0) -> Spans:
    spans: Spans = []
    for begin, end in sorted(parts):
        if spans and begin <= spans[-1][1] + gap_ms:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans


def round_floor_ms(per_gpu: Sequence[float], tp: int, busy_slots: int) -> float:
    """The shortest a round can be whose GPUs are busy for ``per_gpu`` milliseconds in it, in the order of ``stop``.

    A stage is as long as the slowest of its ``tp`` GPUs. Stages work at the same time on different slots, but for one
    slot they work in turn: no stage's share can be shortened, nor one slot's way through all stages.
    """
    stages = [max(per_gpu[i : i + tp]) for i in range(0, len(per_gpu), tp)]
    return max(*stages, sum(stages) / busy_slots)


def busy_ms(spans: Spans) -> float:
    """Milliseconds in which the device ran anything."""
    return sum(end - begin for begin, end in spans)


def excerpt(stages: Sequence[Spans], length_ms: float) -> list[Spans]:
    """``length_ms`` from the middle of a recording, on a clock that starts there; all stages' traces share one.

    Gaps too short to be seen in a picture (``INVISIBLE_MS``) are closed.
    """
    begins, ends = [spans[0][0] for spans in stages], [spans[-1][1] for spans in stages]
    start = (max(begins) + min(ends) - length_ms) / 2
    return [
        [
            (round(a - start, 4), round(b - start, 4))
            for a, b in _union(spans, INVISIBLE_MS)
            if b > start and a < start + length_ms
        ]
        for spans in stages
    ]
