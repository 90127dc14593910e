"""When each stage was busy, read from recorded spans; utilisation, cycle time and the floor that follow from it.

A span is one line of ``busy<stage>.jsonl`` (see ``sglang_pp_spec/cpu_engine/delays.py``).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DECODE_MODES = ("TARGET_VERIFY", "DECODE")


@dataclass(frozen=True)
class Span:
    """One busy interval of a stage; times are monotonic seconds."""

    stage: int
    name: str  # "forward" | "extend" | "draft"
    mode: str  # SGLang's forward mode of the batch
    requests: tuple[int, ...]  # request pool indices of the batch
    start: float
    end: float

    @property
    def is_decode(self) -> bool:
        return self.mode in DECODE_MODES

    @property
    def is_step(self) -> bool:
        """Whether the span is a step's forward through the target; every step has one on every stage."""
        return self.name == "forward"

    @property
    def seconds(self) -> float:
        return self.end - self.start


def read_spans(folder: str | Path, start: float = float("-inf"), end: float = float("inf")) -> list[Span]:
    """The spans within ``[start, end]`` that all stages wrote to ``folder``, by start time."""
    lines = [line for path in sorted(Path(folder).glob("busy*.jsonl")) for line in path.read_text().splitlines()]
    fields = [json.loads(line) for line in lines]
    spans = [Span(**f | {"requests": tuple(f["requests"])}) for f in fields]
    return sorted((s for s in spans if s.start >= start and s.end <= end), key=lambda s: s.start)


def write_spans(folder: str | Path, spans: Sequence[Span]) -> None:
    """The inverse of ``read_spans``, with times from the first span on."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    origin = min((span.start for span in spans), default=0.0)
    for stage in sorted({span.stage for span in spans}):
        lines = [
            json.dumps(asdict(span) | {"start": round(span.start - origin, 6), "end": round(span.end - origin, 6)})
            for span in spans
            if span.stage == stage
        ]
        (folder / f"busy{stage}.jsonl").write_text("\n".join(lines) + "\n")


def slots_of(spans: Sequence[Span]) -> dict[tuple[int, ...], int]:
    """Slot number per request set: requests that ever ran in one batch share a slot; numbered by first appearance."""
    groups: list[set[int]] = []
    for requests in {span.requests: None for span in spans}:
        touching = [group for group in groups if group & set(requests)]
        first = touching[0] if touching else set()
        if not touching:
            groups.append(first)
        first.update(requests, *touching[1:])
        groups = [group for group in groups if not any(group is other for other in touching[1:])]
    return {
        span.requests: next(i for i, group in enumerate(groups) if group & set(span.requests) or not span.requests)
        for span in spans
    }


def utilisation(spans: Sequence[Span]) -> list[float]:
    """Per stage: the share it was busy of the decode phase, from the first decode span to the last."""
    decode = [span for span in spans if span.is_decode]
    if not decode:
        return []
    start, end = min(s.start for s in decode), max(s.end for s in decode)
    return [
        sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in own) / (end - start) for own in _by_stage(spans)
    ]


def busy_per_step(spans: Sequence[Span]) -> list[float]:
    """Per stage: mean busy seconds of a decode step, all its spans together."""
    return [
        sum(s.seconds for s in own) / max(1, sum(s.is_step for s in own))
        for own in _by_stage(s for s in spans if s.is_decode)
    ]


def prefill_busy(spans: Sequence[Span], num_stages: int) -> list[float]:
    """Per stage: busy seconds of all prefill steps."""
    return [sum(s.seconds for s in spans if s.stage == stage and not s.is_decode) for stage in range(num_stages)]


def cycle_time(spans: Sequence[Span], slots: int) -> float | None:
    """Median time from a decode step on stage 0 to the one ``slots`` steps later: one round of all slots."""
    starts = [s.start for s in spans if s.stage == 0 and s.is_decode and s.is_step]
    gaps = [later - earlier for earlier, later in zip(starts, starts[slots:], strict=False)]
    return statistics.median(gaps) if gaps else None


def floor_seconds(busy: Sequence[float], prefill: Sequence[float], rounds: int, slots: int) -> float:
    """The least time a pipeline with these busy times can take::

        slots > 1:  max(prefill) + rounds * max(slots * max(busy), sum(busy)) + sum(busy) - max(busy)
        slots = 1:  sum(prefill) + rounds * sum(busy)

    ``busy``: per stage, mean of a decode step; ``prefill``: per stage, all prefill steps; ``rounds``: decode rounds
    of the slowest request. The last term is the fill: the way of the first step to the busiest stage and of the
    last one from it.
    """
    if slots == 1:
        return sum(prefill) + rounds * sum(busy)
    return max(prefill) + rounds * max(slots * max(busy), sum(busy)) + sum(busy) - max(busy)


def _by_stage(spans: Iterable[Span]) -> list[list[Span]]:
    spans = list(spans)
    stages = range(1 + max((s.stage for s in spans), default=-1))
    return [[s for s in spans if s.stage == stage] for stage in stages]
