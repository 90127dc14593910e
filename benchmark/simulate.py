"""How would the loop behave with more stages, other stage times, a slower host or link than this machine has?

    python -m benchmark.simulate --pp 2 4 8 16 32 64 --stage-ms 20 --draft-ms 5 --host-ms 2 --hop-ms 0.1
    python -m benchmark.simulate --pp 3 --stage-ms 20 30 25 --slots 3
    python -m benchmark.simulate --pp 2 --slots 1 --device --stage-ms 2 --host-ms 4 --account-ms 2      # a GPU
    python -m benchmark.simulate --published                        # overlap on the published machine

Virtual time, no server. Every stage walks the operations of ``core.ring.turn_operations``, slot by slot, on a clock
of its own; a receive moves the clock to the arrival of its message. A schedule that cannot go on is a hang.
Held fixed: the order of operations, slots as the real loop has them (one per stage), every slot with the same rounds.
Without ``--device`` the forward runs on the host's clock, as on the CPU engine. With it every stage has a second
clock: a forward starts when it was launched, its inputs have arrived and the device is free, and the host does not
wait for it. What this cannot show: contention between stages for cores or links. ``benchmark.check_simulation`` holds
the model against what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_pp_spec.core.ring import Operation, Overlap, turn_operations

from .occupancy import floor_seconds
from .report import emit, provenance, table

MEASURED_HOST_S = 0.006  # host time of a turn on the CPU engine before its forward: schedule, rebuild trees, pack
MEASURED_ACCOUNT_S = 0.002  # and after a frame was read: tokens to requests, finish, stream


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
    host: float = 0.0  # per turn with a batch and stage, before its forward
    account: float = 0.0  # per frame and stage, after it was read
    hop: float = 0.0  # a message's way to another stage
    overlap: Overlap = Overlap.OFF  # what comes behind the slot's next launch
    device: bool = False  # forwards run beside the host

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
    """One stage's clocks and its walk through the turns."""

    def __init__(self, pipeline: Pipeline, number: int, arrivals: dict[tuple, float]) -> None:
        self.pipeline = pipeline
        self.number = number
        self.host = 0.0  # where the host is
        self.device = 0.0  # when the device is free; without ``Pipeline.device`` never ahead of the host
        self.inputs = 0.0  # when the inputs of the next forward are there
        self.busy = 0.0
        self.waits_for: tuple = ()
        self._arrivals = arrivals
        self._launches: list[float] = []  # starts of decode steps

    @property
    def clock(self) -> float:
        """When everything this stage has done is done."""
        return max(self.host, self.device)

    def walk(self) -> Iterator[bool]:
        """Go through all turns; yields True while blocked on a message, False after each operation."""
        pipeline = self.pipeline
        last = pipeline.num_stages - 1
        steps = [pipeline.steps(slot) for slot in range(pipeline.num_stages)]
        operations = turn_operations(self.number, pipeline.num_stages, overlap=pipeline.overlap)
        in_flight: dict[int, int] = {}  # slot -> turn of its step that was not accounted for
        for turn in range((max(map(len, steps)) + 1) * pipeline.num_stages):
            slot = turn % pipeline.num_stages
            previous, prefill, has_batch = in_flight.pop(slot, None), False, bool(steps[slot])
            for operation in operations:
                if operation is Operation.TAKE_REQUESTS:
                    if self.number:
                        yield from self._receive("requests", self.number, turn)
                    if self.number < last:
                        self._send("requests", self.number + 1, turn, self.host)
                elif operation is Operation.READ_FRAME and previous is not None:
                    yield from self._receive("frame", self.number, previous)
                elif operation is Operation.ADOPT_FRAME and previous is not None:
                    yield from self._receive("frame", self.number, previous, on_device=pipeline.device)
                elif operation is Operation.ACCOUNT_FRAME and previous is not None:
                    self.host += pipeline.account
                elif operation is Operation.SCHEDULE and has_batch:
                    prefill = steps[slot].pop(0)
                    in_flight[slot] = turn
                    self.host += pipeline.host
                elif operation is Operation.RECEIVE_PROXY and has_batch:
                    yield from self._receive("proxy", self.number, turn, on_device=pipeline.device)
                elif operation is Operation.LAUNCH and has_batch:
                    self._launch(prefill)
                elif operation is Operation.SEND_PROXY and has_batch:
                    self._send("proxy", self.number + 1, turn, self.device)
                elif operation is Operation.SEND_FRAME and has_batch:
                    for stage in range(last + 1):
                        self._send("frame", stage, turn, self.device)
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
        start = max(self.host, self.device, self.inputs)
        if not prefill:
            self._launches.append(start)
        self.device = start + seconds
        self.busy += seconds
        if not pipeline.device:
            self.host = self.device

    def _send(self, kind: str, to_stage: int, turn: int, ready: float) -> None:
        self._arrivals[kind, to_stage, turn] = ready + (self.pipeline.hop if to_stage != self.number else 0.0)

    def _receive(self, kind: str, stage: int, turn: int, on_device: bool = False) -> Iterator[bool]:
        """The host goes on when the message is there; with ``on_device`` only the next forward waits for it."""
        self.waits_for = (kind, stage, turn)
        while self.waits_for not in self._arrivals:
            yield True
        arrival = self._arrivals[self.waits_for]
        if on_device:
            self.inputs = max(self.inputs, arrival)
        else:
            self.host = max(self.host, arrival)


def _floor(pipeline: Pipeline) -> float:
    prefill = [seconds * pipeline.prefill_steps for seconds in pipeline.prefill or pipeline.busy]
    return floor_seconds(pipeline.busy, prefill, pipeline.rounds, pipeline.slots)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate, print, return the result."""
    options = parse(argv)
    if options.published:
        return published(options)
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
            tuple(busy),
            slots=slots,
            rounds=options.rounds,
            host=options.host_ms / 1000,
            account=options.account_ms / 1000,
            hop=options.hop_ms / 1000,
            overlap=Overlap[options.overlap.upper()],
            device=options.device,
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


#: sglang #30775, 8x RTX PRO 6000 over PCIe, GLM-5.2-NVFP4, batch size 1 at 8K: ms per output token.
PUBLISHED_TPOT_MS = {"TP8+MTP": 8.73, "TP4xPP2+MTP": 9.87}
BEFORE_FORWARD = 2 / 3  # of the host's work in a turn; the rest follows the frame
HOST_SHARES = (0.1, 0.2, 0.3)  # of the built-in's round at batch size 1, both stages together; not published


def published(options: argparse.Namespace) -> dict[str, Any]:
    """What overlap should make of the published batch-size-1 latency, for several shares of the host in it.

    The measured time per token is taken apart into device time and host time, which the built-in pays one after the
    other: two thirds of each stage's before its forward, one after its frame. The accept length scales both alike and
    cancels out, so the loop is run on times per token.
    """
    measured = PUBLISHED_TPOT_MS["TP4xPP2+MTP"] / 1000
    rows = []
    for share in HOST_SHARES:
        host, device = share * measured / 2, (1 - share) * measured / 2
        pipeline = Pipeline(
            (device, device),
            slots=1,
            rounds=options.rounds,
            host=host * BEFORE_FORWARD,
            account=host * (1 - BEFORE_FORWARD),
            device=True,
        )
        sync, overlap = simulate(pipeline), simulate(replace(pipeline, overlap=Overlap.ON))
        rows.append(
            {"host share": share, "TPOT ms, sync": sync.cycle * 1000, "TPOT ms, overlap": overlap.cycle * 1000}
        )
    header = list(rows[0])
    print(table(header, [[row[key] for key in header] for row in rows]))
    result = provenance() | {"published_tpot_ms": PUBLISHED_TPOT_MS, "predictions": rows}
    emit(result, options.json)
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--slots", type=int, help="slots with requests (default: as many as stages)")
    parser.add_argument("--stage-ms", type=float, nargs="+", default=[20.0], help="one value, or one per stage")
    parser.add_argument("--draft-ms", type=float, default=0.0)
    parser.add_argument("--host-ms", type=float, default=MEASURED_HOST_S * 1000)
    parser.add_argument("--account-ms", type=float, default=MEASURED_ACCOUNT_S * 1000)
    parser.add_argument("--hop-ms", type=float, default=0.0)
    modes = [overlap.name.lower() for overlap in Overlap]
    parser.add_argument("--overlap", choices=modes, default="on", help="off: as with --disable-overlap-schedule")
    parser.add_argument("--device", action="store_true", help="forwards run beside the host, as on a GPU")
    parser.add_argument("--published", action="store_true", help="predict the published machine's latency")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", help="also write the result to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
