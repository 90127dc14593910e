"""How long GPUs were busy, read from the PyTorch profiler's traces that SGLang writes, one file per stage."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_pp_spec.server import Server

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def start(server: Server, folder: Path) -> None:
    """Record what the GPUs of all stages run, until ``stop``."""
    folder.mkdir(parents=True, exist_ok=True)
    server.post("/start_profile", {"output_dir": str(folder), "activities": ["GPU"]})


def stop(server: Server, folder: Path, num_stages: int, timeout_s: float = 120.0) -> list[float]:
    """End the recording; busy milliseconds of every stage's GPU, in the order of the traces' names."""
    server.post("/stop_profile", {})
    deadline = time.monotonic() + timeout_s
    while len(traces := sorted(folder.rglob("*.trace.json.gz"))) < num_stages or not all(map(is_complete, traces)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(traces)} of {num_stages} traces in {folder} after {timeout_s:.0f} s")
        time.sleep(0.5)
    return [busy_ms(read_trace(trace)) for trace in traces]


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


def busy_ms(events: Iterable[dict[str, Any]]) -> float:
    """Milliseconds in which a device ran anything: the union of its kernels and copies, whatever their streams."""
    spans = sorted(
        (event["ts"], event["ts"] + event.get("dur", 0)) for event in events if event.get("cat") in DEVICE_CATEGORIES
    )
    busy, until = 0.0, float("-inf")
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1000
