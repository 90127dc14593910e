"""How long GPUs were busy, read from the PyTorch profiler's traces that SGLang writes, one file per stage."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_pp_spec.server import Server

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
Spans = list[tuple[float, float]]  # (begin, end) in milliseconds, ascending, disjoint


def start(server: Server, folder: Path) -> None:
    """Record what the GPUs of all stages run, until ``stop``."""
    folder.mkdir(parents=True, exist_ok=True)
    server.post("/start_profile", {"output_dir": str(folder), "activities": ["GPU"]})


def stop(server: Server, folder: Path, num_stages: int, timeout_s: float = 120.0) -> list[Spans]:
    """End the recording; what every stage's GPU ran, in the order of the traces' names."""
    server.post("/stop_profile", {})
    deadline = time.monotonic() + timeout_s
    while len(traces := sorted(folder.rglob("*.trace.json.gz"))) < num_stages or not all(map(is_complete, traces)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(traces)} of {num_stages} traces in {folder} after {timeout_s:.0f} s")
        time.sleep(0.5)
    return [spans_of(read_trace(trace)) for trace in traces]


def is_complete(path: Path) -> bool:
    """Whether the writer is done with a trace."""
    try:
        read_trace(path)
    except (EOFError, ValueError, OSError):
        return False
    return True


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def spans_of(events: Iterable[dict[str, Any]]) -> Spans:
    """When a device ran anything: the union of its kernels and copies, whatever their streams.

    Without NCCL's kernels: one that receives runs from when it is queued until its sender has come.
    """
    spans: Spans = []
    for begin, end in sorted(
        (event["ts"] / 1000, (event["ts"] + event.get("dur", 0)) / 1000)
        for event in events
        if event.get("cat") in DEVICE_CATEGORIES and not event.get("name", "").startswith("nccl")
    ):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans


def busy_ms(spans: Spans) -> float:
    """Milliseconds in which the device ran anything."""
    return sum(end - begin for begin, end in spans)


def excerpt(stages: Sequence[Spans], length_ms: float) -> list[Spans]:
    """``length_ms`` from the middle of a recording, on a clock that starts there; all stages' traces share one."""
    begins, ends = [spans[0][0] for spans in stages], [spans[-1][1] for spans in stages]
    start = (max(begins) + min(ends) - length_ms) / 2
    return [
        [(round(a - start, 4), round(b - start, 4)) for a, b in spans if b > start and a < start + length_ms]
        for spans in stages
    ]
