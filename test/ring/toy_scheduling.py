"""What a toy stage does about events from outside, and how it chooses batches: the same on every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toy_requests import Request, ToyBatch, chain_of, right_prompt

from sglang_pp_spec.core.frame import FrameKind


@dataclass(frozen=True)
class Event:
    """Something from outside; ``turn`` is the turn of stage 0 that takes it in."""

    turn: int
    name: str  # a method of ``Scheduling``: arrive, abort, retract, permute, pause, resume
    rid: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, turn: int, name: str, rid: str = "", **options: Any) -> Event:
        return cls(turn, name, rid, tuple(options.items()))


class Scheduling:
    """A part of ``ToyEngine``."""

    # Events.

    def arrive(self, rid: str, prompt: int = 3, max_new: int = 4, grammar: bool = False, cached: int = 0) -> None:
        self.lives[rid] = life = self.lives.get(rid, 0) + 1
        req = Request(rid, life, right_prompt(rid, life, prompt), max_new, grammar, cached)
        req.grammar_position = prompt
        self.requests[rid] = req
        self.everything.append(req)
        self.waiting.append(req)

    def abort(self, rid: str) -> None:
        req = self.requests.get(rid)
        if req is None or req.finished:
            return
        self.log.append(("aborted", self.num_turns - 1, rid, req.frames_in_flight))
        req.finished = req.aborted = True
        if req in self.waiting:
            self.waiting.remove(req)
        if self.chunked is req:
            self.chunked = None
        if not req.frames_in_flight:
            self._release(req)
            req.aborted_between_steps = True

    def retract(self, rid: str) -> None:
        """Give up a request's KV and queue it again, whatever it has in flight."""
        req = self.requests.get(rid)
        if req is None or req.finished or req.waiting:
            return
        self.log.append(("retracted", self.num_turns - 1, rid, req.frames_in_flight, req.chunks_in_flight))
        self._release(req)
        req.rebuilds += 1
        req.frames_in_flight = req.chunks_in_flight = 0
        req.committed = req.accounted = req.chain = 0
        req.out_on_device = list(req.out)
        req.waiting = True
        self.waiting.insert(0, req)
        if self.chunked is req:
            self.chunked = None
        for batch in self.running:
            if batch is not None and any(other is req for other in batch.reqs):
                batch.keep([row for row, other in enumerate(batch.reqs) if other is not req])

    def permute(self) -> None:
        """Recompose every decode batch, in flight or not."""
        for batch in self.running:
            if batch is not None:
                batch.keep(list(range(len(batch.reqs)))[::-1])

    def pause(self) -> None:
        """Drain, then retract everything."""
        assert self.loop is not None
        in_flight = sum(turn is not None and not turn.is_settled for turn in self.loop.turns)
        self.log.append(("paused", self.num_turns - 1, in_flight))
        self.loop.drain()
        assert self.loop.ledger.is_idle
        for req in list(self.requests.values()):
            self.retract(req.rid)
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    # Scheduling: the same on every stage.

    @property
    def reserve(self) -> int:
        """KV past what the host knows to be written: a verify, and one more for a frame it has not accounted for."""
        return self.shape.num_draft_tokens * self.loop.ledger.max_unaccounted

    def _settle_into_running(self, slot: int) -> None:
        last, run, self.last[slot] = self.last[slot], self.running[slot], None
        if run is not None:
            run.keep(run.alive_rows())
        if last is None or last.kind is not FrameKind.PREFILL:
            return
        last.keep(last.alive_rows())
        if run is None or not run.reqs:
            last.kind = FrameKind.VERIFY
            self.running[slot] = last
        elif last.reqs:
            run.merge(last)

    def _prefill(self, slot: int) -> ToyBatch | None:
        run = self.running[slot]
        room = self.max_running - (len(run.reqs) if run else 0)
        budget, reqs, ranges, samples = self.chunk, [], [], []
        while budget > 0:
            req = self.chunked or self._admit(room - len(reqs))
            if req is None:
                break
            end = min(req.committed + budget, len(req.tokens))
            reqs.append(req)
            ranges.append((req.committed, end))
            samples.append(end == len(req.tokens))
            budget -= end - req.committed
            req.committed = req.accounted = end
            self.chunked = None if samples[-1] else req
        if not reqs:
            return None
        kind = FrameKind.PREFILL if any(samples) else FrameKind.MIDDLE
        return ToyBatch.of(kind, reqs, ranges, samples)

    def _admit(self, room: int) -> Request | None:
        if room <= 0 or not self.waiting:
            return None
        req = self.waiting[0]
        needed = len(req.tokens) + self.reserve
        if len(self.pool.free) < needed:
            return None
        self.waiting.pop(0)
        req.waiting = False
        req.slots = self.pool.take(needed)
        req.committed = req.accounted = min(req.cached, len(req.tokens) - 1)
        for position in range(req.committed):
            self.pool.content[req.slots[position]] = req.tokens[position]
        req.chain = chain_of(req.tokens[: req.committed])
        return req

    def _decode(self, slot: int) -> ToyBatch | None:
        run = self.running[slot]
        if run is not None:
            run.keep([row for row, req in enumerate(run.reqs) if not self._finishes_unaccounted(req)])
        while run is not None and run.reqs:
            needed = [max(0, req.accounted + self.reserve - len(req.slots)) for req in run.reqs]
            if sum(needed) <= len(self.pool.free):
                for req, num in zip(run.reqs, needed, strict=True):
                    req.slots += self.pool.take(num)
                run.samples = [True] * len(run.reqs)
                return run
            assert len(run.reqs) > 1 or len(self.pool.free) < self.pool.size, "the pool is too small for one request"
            self.retract(run.reqs[-1].rid)
        return None

    def _finishes_unaccounted(self, req: Request) -> bool:
        """With overlap: the frame that is not accounted for holds the request's last token by length."""
        previous = self.loop.previous
        unaccounted = previous is not None and not previous.is_settled and req in previous.forward.reqs
        return unaccounted and len(req.out) + 1 >= req.max_new
