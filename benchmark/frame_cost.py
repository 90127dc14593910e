"""What do identity and validation cost the host per frame?

    python -m benchmark.frame_cost
    python -m benchmark.frame_cost --rows 128 --json frame_cost.json

Times the calls of ``core`` that exist only so that a frame names itself and is checked, for one batch whose requests
stay the same, as in decode: ``identify`` (three times per turn: launch, rebuild, apply), ``launch`` and ``settle`` of
the ledger, ``begin_frame`` on the last stage, ``check_frame`` on every stage. The payload is not part of it: it
would be sent without identities as well. One thread, medians of many calls after a warm-up, no GPU.

Budget: 50 microseconds per frame and stage at 32 rows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_pp_spec.core.frame import FrameHeader, FrameKind, begin_frame, check_frame
from sglang_pp_spec.core.layout import FrameLayout, TreeShape
from sglang_pp_spec.core.ledger import Ledger

BUDGET_US = 50.0
IDENTIFY_CALLS = 3


class _Request:
    """Stands for the engine's request object."""


def median_us(function: Callable[[], object], repeats: int) -> float:
    """Median microseconds of one call, timer included; the first calls are discarded."""
    for _ in range(repeats // 10):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def measure(rows: int, repeats: int) -> dict[str, float]:
    """Microseconds per call, by name."""
    layout = FrameLayout(TreeShape(num_steps=3, topk=1, num_draft_tokens=4), capacity=rows + 1)
    ledger = Ledger(epoch=1, num_slots=4)
    requests = [(f"{i:032x}", _Request()) for i in range(rows)]
    samples, counts, drafts = [True] * rows, [1] * rows, [layout.shape.num_drafts] * rows

    def identify() -> list:
        return [ledger.identify(rid, owner=owner, rebuilds=0) for rid, owner in requests]

    identities = identify()
    header = FrameHeader(epoch=1, step=7, slot=1, kind=FrameKind.VERIFY, num_rows=rows)
    frame = begin_frame(header, identities, layout, num_accepted=counts, num_drafts=drafts)

    def launch_and_settle() -> None:
        launch = ledger.launch(step=7, slot=1, kind=FrameKind.VERIFY, identities=identities, samples=samples)
        ledger.adopt(launch)
        ledger.settle(launch)

    return {
        "identify": median_us(identify, repeats),
        "launch_and_settle": median_us(launch_and_settle, repeats),
        "begin_frame": median_us(
            lambda: begin_frame(header, identities, layout, num_accepted=counts, num_drafts=drafts), repeats
        ),
        "check_frame": median_us(lambda: check_frame(frame, header, identities, layout, samples=samples), repeats),
    }


def report(rows: int, repeats: int) -> dict[str, Any]:
    """The measured parts, their sums per stage, and what they were measured on."""
    parts = measure(rows, repeats)
    earlier = IDENTIFY_CALLS * parts["identify"] + parts["launch_and_settle"] + parts["check_frame"]
    last = earlier + parts["begin_frame"]
    return {
        "benchmark": "frame_cost",
        "rows": rows,
        "repeats": repeats,
        "us": {name: round(value, 2) for name, value in parts.items()},
        "earlier_stage_us": round(earlier, 2),
        "last_stage_us": round(last, 2),
        "budget_us": BUDGET_US,
        "within_budget": last <= BUDGET_US,
        "argv": sys.argv[1:],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=32, help="requests in the batch")
    parser.add_argument("--repeats", type=int, default=5000, help="calls per part")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = report(args.rows, args.repeats)
    for name, value in result["us"].items():
        print(f"{name:20} {value:8.2f} us")
    print(f"{'earlier stage':20} {result['earlier_stage_us']:8.2f} us")
    print(f"{'last stage':20} {result['last_stage_us']:8.2f} us   (budget {BUDGET_US:.0f} us)")
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
