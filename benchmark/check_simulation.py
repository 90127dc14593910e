"""Does the model of ``benchmark.simulate`` agree with what was measured?

    python -m benchmark.check_simulation benchmark/results/schedule-pp2.json
    python -m benchmark.check_simulation benchmark/results/gpu_round_2gpu_tp1_round_large_overlap.json

A result of ``benchmark.schedule`` (CPU engine): cycle and wall time, simulated from its busy times and the constants
of ``benchmark.simulate``. A result of ``benchmark.gpu_round`` whose stages have GPUs of their own: the round of every
arm of ours, simulated from its device times. There the host's work per turn is read off one point, the request that
runs alone without overlap: its round less its device time. All other points are predictions. Exit status 1 if one is
further off than ``tolerance``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pp_spec.core.ring import Overlap

from .gpu_round import Arm, arms
from .report import emit, provenance, table
from .simulate import BEFORE_FORWARD, MEASURED_ACCOUNT_S, MEASURED_HOST_S, Pipeline, simulate

ROUNDS = 60


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print simulated over measured for every point of a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="JSON of benchmark.schedule or benchmark.gpu_round")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args(argv)
    measured = json.loads(options.measured.read_text())
    ratios = check(measured)
    print(table(["", "simulated / measured"], [[name, round(ratio, 3)] for name, ratio in ratios.items()]))
    result = provenance() | {"measured": str(options.measured), "simulated_to_measured": ratios}
    emit(result, options.json)
    if worst := [name for name, ratio in ratios.items() if abs(ratio - 1) > tolerance(measured)]:
        raise SystemExit(f"the model is more than {tolerance(measured):.0%} off at {', '.join(worst)}")
    return result


def check(measured: dict[str, Any]) -> dict[str, float]:
    """Point -> simulated over measured time, for a result of either benchmark."""
    return check_schedule(measured) if _is_schedule(measured) else check_rounds(measured)


def tolerance(measured: dict[str, Any]) -> float:
    """How far off the model may be: on GPUs it knows no way for messages and nothing of kernels that slow others."""
    return 0.10 if _is_schedule(measured) else 0.12


def _is_schedule(measured: dict[str, Any]) -> bool:
    return "settings" in measured


def check_schedule(measured: dict[str, Any]) -> dict[str, float]:
    """The cycle and the wall time of one measured run of ours."""
    ours, settings = measured["arms"]["ours"], measured["settings"]
    steps = ours["prefill_steps"]
    outcome = simulate(
        Pipeline(
            busy=tuple(ours["busy_per_step_s"]),
            prefill=tuple(seconds / max(1, steps) for seconds in ours["prefill_busy_s"]),
            slots=settings["slots"],
            rounds=ours["rounds"],
            prefill_steps=steps,
            host=MEASURED_HOST_S,
            account=MEASURED_ACCOUNT_S,
        )
    )
    return {"cycle": outcome.cycle / ours["cycle_s"], "wall": outcome.wall / ours["wall_s"]}


def check_rounds(measured: dict[str, Any]) -> dict[str, float]:
    """The round of every arm of ours at every batch size but the one that the host's work is read off."""
    found = measured["arms"]
    if "1" not in found.get("ours_sync", {}):
        raise ValueError("this result has no arm ours_sync at batch size 1, which the host's work is read off")
    alone = found["ours_sync"]["1"]
    host_ms = alone["ms_per_round"] - sum(alone["device_ms_per_gpu"])
    known = arms(num_gpus=len(alone["device_ms_per_gpu"]), tp=1)
    return {
        f"{name} {size}": round_ms(known[name], int(size), one["device_ms_per_gpu"], host_ms) / one["ms_per_round"]
        for name, sizes in found.items()
        for size, one in sizes.items()
        if known[name].mode == "plugin" and (name, size) != ("ours_sync", "1")
    }


def round_ms(arm: Arm, batch_size: int, device_ms: Sequence[float], host_ms: float) -> float:
    """A simulated round of all slots whose stages are busy for ``device_ms`` in it, over all slots."""
    slots = arm.busy_slots(batch_size)
    pipeline = Pipeline(
        busy=tuple(ms / 1000 / slots for ms in device_ms),
        slots=slots,
        rounds=ROUNDS,
        host=host_ms / 1000 * BEFORE_FORWARD,
        account=host_ms / 1000 * (1 - BEFORE_FORWARD),
        overlap=Overlap.OFF if "--disable-overlap-schedule" in arm.args else Overlap.ON,
        device=True,
    )
    return 1000 * simulate(pipeline).cycle


if __name__ == "__main__":
    main()
