"""How would the loop behave with more stages, other stage times, a slower host or link than this machine has?

    python -m benchmark.simulate --pp 2 4 8 16 32 64 --stage-ms 20 --draft-ms 5 --host-ms 2 --hop-ms 0.1
    python -m benchmark.simulate --pp 3 --stage-ms 20 30 25 --slots 3
    python -m benchmark.simulate --check benchmark/results/schedule-pp2.json      # against a measured point

Virtual time, no server. Every stage walks the operations of ``core.ring.turn_operations``, slot by slot, on a clock
of its own; a receive moves the clock to the arrival of its message. A schedule that cannot go on is a hang.
Held fixed: the order of operations, slots as the real loop has them (one per stage), every slot with the same rounds.
The forward is synchronous, as on the CPU engine: host time adds to the stage's. What this cannot show: anything a
device does while its host is elsewhere, and contention between stages for cores or links.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_spec.core.ring import Operation, turn_operations

from .occupancy import floor_seconds
from .report import emit, provenance, table

TOLERANCE = 0.10
MEASURED_HOST_S = 0.008  # host time of a turn on the CPU engine: apply, schedule, rebuild trees, pack


class Hang(RuntimeError):
    """No stage can go on: each waits for a message that nobody sends."""


@dataclass(frozen=True)
class Pipeline:
    """What is simulated; all times in seconds."""

    busy: tuple[float, ...]  # per stage: a decode step, on the last stage with draft extend and draft
    prefill: tuple[float, ...] = ()  # per stage: a prefill step; as ``busy`` if empty
    slots: int = 2  # slots with requests, at most one per stage
    rounds: int = 24  # decode rounds of every slot
    prefill_steps: int = 0  # over all slots
    host: float = 0.0  # per turn with a batch and stage
    hop: float = 0.0  # a message's way to another stage

    @property
    def num_stages(self) -> int:
        return len(self.busy)

    def steps(self, slot: int) -> list[bool]:
        """The slot's steps in order, True for prefill."""
        if slot >= self.slots:
            return []
        mine = self.prefill_steps // self.slots + (slot < self.prefill_steps % self.slots)
        return [True] * mine + [False] * self.rounds


@dataclass(frozen=True)
class Outcome:
    """What came out; seconds."""

    wall: float
    cycle: float  # one round of all slots in the middle of the decode phase
    utilisation: tuple[float, ...]  # per stage, over the whole run
    floor: float


def simulate(pipeline: Pipeline) -> Outcome:
    """Let all stages take turns until every slot has done its steps."""
    arrivals: dict[tuple, float] = {}
    stages = [_Stage(pipeline, stage, arrivals) for stage in range(pipeline.num_stages)]
    walks = {stage: stage.walk() for stage in stages}
    while walks:
        progress = False
        for stage, walk in list(walks.items()):
            for blocked in walk:
                progress = progress or not blocked
                if blocked:
                    break
            else:
                del walks[stage]
                progress = True
        if not progress:
            raise Hang(", ".join(f"stage {stage.number} waits for {stage.waits_for}" for stage in walks))
    wall = max(stage.clock for stage in stages)
    return Outcome(
        wall=wall,
        cycle=stages[0].cycle(),
        utilisation=tuple(stage.busy / wall for stage in stages),
        floor=_floor(pipeline),
    )


class _Stage:
    """One stage's clock and its walk through the turns."""

    def __init__(self, pipeline: Pipeline, number: int, arrivals: dict[tuple, float]) -> None:
        self.pipeline = pipeline
        self.number = number
        self.clock = 0.0
        self.busy = 0.0
        self.waits_for: tuple = ()
        self._arrivals = arrivals
        self._launches: list[float] = []  # of decode steps

    def walk(self) -> Iterator[bool]:
        """Go through all turns; yields True while blocked on a message, False after each operation."""
        pipeline = self.pipeline
        last = pipeline.num_stages - 1
        steps = [pipeline.steps(slot) for slot in range(pipeline.num_stages)]
        in_flight: dict[int, int] = {}  # slot -> turn of its unapplied step
        for turn in range(max(map(len, steps)) * pipeline.num_stages + pipeline.num_stages):
            slot = turn % pipeline.num_stages
            for operation in turn_operations(self.number, pipeline.num_stages):
                if operation is Operation.TAKE_REQUESTS:
                    if self.number:
                        yield from self._receive("requests", self.number, turn)
                    if self.number < last:
                        self._send("requests", self.number + 1, turn)
                elif operation is Operation.APPLY_FRAME:
                    if slot in in_flight:
                        yield from self._receive("frame", self.number, in_flight.pop(slot))
                elif operation is Operation.SCHEDULE:
                    if not steps[slot]:
                        break
                    prefill = steps[slot].pop(0)
                    in_flight[slot] = turn
                    self.clock += pipeline.host
                elif operation is Operation.RECEIVE_PROXY:
                    yield from self._receive("proxy", self.number, turn)
                elif operation is Operation.LAUNCH:
                    self._launch(prefill)
                elif operation is Operation.SEND_PROXY:
                    self._send("proxy", self.number + 1, turn)
                elif operation is Operation.SEND_FRAME:
                    for stage in range(last + 1):
                        self._send("frame", stage, turn)
                yield False

    def cycle(self) -> float:
        """Time of a round of all slots, around the middle."""
        slots, launches = self.pipeline.slots, self._launches
        if len(launches) <= slots:
            return self.clock
        middle = (len(launches) - slots) // 2
        return launches[middle + slots] - launches[middle]

    def _launch(self, prefill: bool) -> None:
        pipeline = self.pipeline
        seconds = (pipeline.prefill or pipeline.busy)[self.number] if prefill else pipeline.busy[self.number]
        if not prefill:
            self._launches.append(self.clock)
        self.clock += seconds
        self.busy += seconds

    def _send(self, kind: str, to_stage: int, turn: int) -> None:
        hop = self.pipeline.hop if to_stage != self.number else 0.0
        self._arrivals[kind, to_stage, turn] = self.clock + hop

    def _receive(self, kind: str, stage: int, turn: int) -> Iterator[bool]:
        self.waits_for = (kind, stage, turn)
        while self.waits_for not in self._arrivals:
            yield True
        self.clock = max(self.clock, self._arrivals.pop(self.waits_for))


def _floor(pipeline: Pipeline) -> float:
    prefill = [seconds * pipeline.prefill_steps for seconds in pipeline.prefill or pipeline.busy]
    return floor_seconds(pipeline.busy, prefill, pipeline.rounds, pipeline.slots)


def check(measured: dict[str, Any], host: float = MEASURED_HOST_S) -> dict[str, float]:
    """Simulated over measured, for a result of ``benchmark.schedule``: the cycle and the wall time."""
    ours, settings = measured["arms"]["ours"], measured["settings"]
    steps = ours["prefill_steps"]
    outcome = simulate(
        Pipeline(
            busy=tuple(ours["busy_per_step_s"]),
            prefill=tuple(seconds / max(1, steps) for seconds in ours["prefill_busy_s"]),
            slots=settings["slots"],
            rounds=ours["rounds"],
            prefill_steps=steps,
            host=host,
        )
    )
    return {"cycle": outcome.cycle / ours["cycle_s"], "wall": outcome.wall / ours["wall_s"]}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate or check, print, return the result."""
    options = parse(argv)
    if options.check:
        ratios = check(json.loads(Path(options.check).read_text()), options.host_ms / 1000)
        within = all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values())
        print(table(["", "simulated / measured"], list(ratios.items())))
        result = provenance() | {"check": options.check, "simulated_to_measured": ratios, "within_tolerance": within}
        emit(result, options.json)
        if not within:
            raise SystemExit(f"the model is more than {TOLERANCE:.0%} off: {ratios}")
        return result
    points = [point(options, num_stages) for num_stages in options.pp]
    header = ["stages", "slots", "wall s", "floor s", "/ floor", "cycle s", "least busy", "busiest"]
    print(table(header, [[p[key] for key in header] for p in points]))
    result = provenance() | {"points": points}
    emit(result, options.json)
    return result


def point(options: argparse.Namespace, num_stages: int) -> dict[str, Any]:
    """One simulated pipeline as a row."""
    times = options.stage_ms * num_stages if len(options.stage_ms) == 1 else options.stage_ms
    if len(times) != num_stages:
        raise SystemExit(f"{len(times)} stage times for {num_stages} stages; give one, or one per stage")
    busy = [ms / 1000 for ms in times]
    busy[-1] += options.draft_ms / 1000
    slots = min(options.slots or num_stages, num_stages)
    outcome = simulate(
        Pipeline(
            tuple(busy), slots=slots, rounds=options.rounds, host=options.host_ms / 1000, hop=options.hop_ms / 1000
        )
    )
    return {
        "stages": num_stages,
        "slots": slots,
        "wall s": outcome.wall,
        "floor s": outcome.floor,
        "/ floor": outcome.wall / outcome.floor,
        "cycle s": outcome.cycle,
        "least busy": min(outcome.utilisation),
        "busiest": max(outcome.utilisation),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--slots", type=int, help="slots with requests (default: as many as stages)")
    parser.add_argument("--stage-ms", type=float, nargs="+", default=[20.0], help="one value, or one per stage")
    parser.add_argument("--draft-ms", type=float, default=0.0)
    parser.add_argument("--host-ms", type=float, default=MEASURED_HOST_S * 1000)
    parser.add_argument("--hop-ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--check", help="a JSON file of benchmark.schedule")
    parser.add_argument("--json", help="also write the result to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
