"""A whole toy pipeline: P stages, their links, one list of events, and what must hold at every step and at the end.

A stage's state depends only on what its turns take in (requests, proxies, frames, each matched by turn), never on
when other stages run. ``run`` therefore walks the stages turn by turn in one thread; ``run_threads`` interleaves
them with a baton and bounded links and must come out the same (``test_interleaving``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from baton import Baton
from links import Link, Stuck, wait_in_vain
from oracle import Oracle, token
from toy_engine import ToyEngine
from toy_requests import ToyBatch
from toy_scheduling import Event
from toy_transport import FrameLink, ToyTransport

from sglang_pp_spec.core.layout import FrameLayout, TreeShape
from sglang_pp_spec.core.ring import Overlap
from sglang_pp_spec.core.stage_loop import StageLoop

CHAIN = TreeShape(num_steps=2, topk=1, num_draft_tokens=3)
TREE = TreeShape(num_steps=2, topk=2, num_draft_tokens=4)


class World:
    """``num_stages`` toy stages with ``num_stages + depth`` slots."""

    overlap = Overlap.OFF  # the mode of all loops; conftest runs every test in every one
    strict = True  # stages are compared with each other; off where the frame check must find a difference alone

    def __init__(
        self,
        num_stages: int,
        events: Sequence[Event] = (),
        *,
        depth: int = 0,
        shape: TreeShape = CHAIN,
        capacity: int = 6,
        link_capacity: int | None = None,
        seed: int | None = None,
        oracle: Oracle | None = None,
        engine: type[ToyEngine] = ToyEngine,
        loop: type[StageLoop] = StageLoop,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.num_stages, self.num_slots = num_stages, num_stages + depth
        self.layout = FrameLayout(shape, capacity)
        self.oracle = oracle or Oracle(shape.num_steps)
        self.baton = None if seed is None else Baton(seed)
        wait = self.baton.wait if self.baton else wait_in_vain
        stages = range(num_stages)
        self.proxies = [Link(f"proxy {s}->{s + 1}", capacity=link_capacity, wait=wait) for s in stages[:-1]]
        self.requests = [Link(f"requests {s}->{s + 1}", wait=wait) for s in stages[:-1]]
        self.frames = [FrameLink(f"frames to {s}", capacity=link_capacity, wait=wait) for s in stages[:-1]]
        self.states: dict[tuple[int, str], dict[int, tuple]] = {}
        self.engines = [self._engine(engine, stage, options) for stage in stages]
        self.loops = [self._loop(loop, stage) for stage in stages]
        self.engines[0].events = list(events)
        self.arrivals = [event for event in events if event.name == "arrive"]

    def _engine(self, engine: type[ToyEngine], stage: int, options: dict) -> ToyEngine:
        first, last = stage == 0, stage == self.num_stages - 1
        return engine(
            stage,
            self.num_stages,
            self.num_slots,
            self.layout,
            self.oracle,
            proxies_in=None if first else self.proxies[stage - 1],
            proxies_out=None if last else self.proxies[stage],
            requests_in=None if first else self.requests[stage - 1],
            requests_out=None if last else self.requests[stage],
            note=lambda step, side, state: self._note(stage, (step, side), state),
            **options,
        )

    def _loop(self, loop: type[StageLoop], stage: int) -> StageLoop[ToyBatch]:
        engine, last = self.engines[stage], stage == self.num_stages - 1
        transport = ToyTransport(
            engine.clock, outgoing=self.frames if last else (), incoming=None if last else self.frames[stage]
        )
        made = loop(
            engine,
            transport,
            self.layout,
            stage=stage,
            num_stages=self.num_stages,
            num_slots=self.num_slots,
            epoch=7,
            overlap=self.overlap,
        )
        engine.loop = made
        return made

    def _note(self, stage: int, step: tuple[int, str], state: tuple) -> None:
        """After a frame is adopted or accounted for: its requests look the same on all stages, own tokens only."""
        others = self.states.setdefault(step, {})
        for other, seen in others.items():
            assert _look_the_same(seen, state) or not self.strict, (
                f"step {step}: stage {stage} has {state}, stage {other} has {seen}"
            )
        others[stage] = state
        engine = self.engines[stage]
        for req in engine.everything:
            expected = [token(req.rid, req.life, position) for position in range(len(req.tokens))]
            assert req.tokens == expected or not self.strict, (
                f"{req.rid} life {req.life} on stage {stage}: {req.tokens}, not {expected}"
            )
        engine.loop.ledger.check_integrity()

    def run(self, max_turns: int = 400) -> World:
        """All stages, turn by turn, until everything is done."""
        for turn in range(max_turns):
            busy = [loop.take_turn(turn % self.num_slots) for loop in self.loops]
            assert len(set(busy)) == 1 or not self.strict, (
                f"turn {turn}: some stages launched, others did not: {busy}"
            )
            if not any(busy) and self.is_done:
                return self
        raise Stuck(f"not done after {max_turns} turns")

    def run_threads(self, num_turns: int) -> World:
        """Every stage in a thread of its own for ``num_turns`` turns; which one goes on is the seed's choice."""
        assert self.baton is not None

        def stage_main(loop: StageLoop[ToyBatch]) -> None:
            for turn in range(num_turns):
                loop.take_turn(turn % self.num_slots)

        self.baton.run([lambda loop=loop: stage_main(loop) for loop in self.loops])
        return self

    @property
    def is_done(self) -> bool:
        nothing_left = not self.engines[0].events and all(loop.ledger.is_idle for loop in self.loops)
        return nothing_left and all(req.finished for engine in self.engines for req in engine.everything)

    def check_end(self) -> World:
        """Exact sequences, each position once, nothing held anywhere."""
        for engine, loop in zip(self.engines, self.loops, strict=True):
            for req in engine.everything:
                assert req.finished
                if not req.aborted:
                    assert len(req.out) == req.max_new, f"{req.rid}: {len(req.out)} tokens of {req.max_new}"
                assert req.frames_in_flight == 0 and req.chunks_in_flight == 0
            loop.ledger.check_integrity()
            assert loop.ledger.is_idle and not loop.ledger._in_flight
            left = {life.owner() for life in loop.ledger._lives.values()}
            between_steps = {req for req in engine.everything if req.aborted_between_steps}
            assert left <= between_steps, f"a request that ended in a step was not retired: {loop.ledger._lives}"
            assert engine.pool.at_baseline, f"stage {engine.stage} lost KV slots"
        for same in zip(*(engine.everything for engine in self.engines), strict=True):
            assert len({(req.rid, req.life) for req in same}) == 1
            if (same[0].rid, same[0].life) not in self.oracle.suspect:
                assert all(req.out == same[0].out for req in same)
        self._check_accepted()
        return self

    def _check_accepted(self) -> None:
        """Accepted drafts equal the good drafts the oracle made: text alone would hide lost drafts."""
        for engine in self.engines:
            for what, *rest in engine.log:
                if what == "accepted":
                    rid, life, position, drafts = rest
                    right = self.oracle.drafted[rid, life, position]
                    assert drafts == right, f"{rid} at {position}: {drafts} drafts accepted, {right} were right"

    def happened(self, what: str, stage: int = 0) -> list[tuple]:
        """The log entries of a kind: every test shows that its hazard really occurred."""
        return [entry for entry in self.engines[stage].log if entry[0] == what]


def _look_the_same(one: tuple, other: tuple) -> bool:
    """Row by row; of a request that is over or suspect on one of the stages only the id is compared."""
    return len(one) == len(other) and all(
        a[0] == b[0] if 1 in (len(a), len(b)) else a == b for a, b in zip(one, other, strict=True)
    )


def arrive(rid: str, turn: int = 0, **options: Any) -> Event:
    return Event.of(turn, "arrive", rid, **options)
