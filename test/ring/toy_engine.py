"""The toy ``Engine``: a scheduler with chunked prefill, fake KV, a recurrent state and a grammar on every stage.

It keeps the habits of a real one: a decode batch lives on in its slot, a finished prompt joins it one turn later,
the decode batch may be recomposed while its step is in flight, KV is reserved before a step and rejected KV is
worthless after it. What a frame does is ``core.apply``; the methods of ``StageState`` are below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from links import Link
from oracle import POISON, Oracle, mixed
from torch import Tensor
from toy_requests import Forward, Pool, Request, ToyBatch, chain_of
from toy_sampling import Sampling, parents_of, signature
from toy_scheduling import Event, Scheduling
from toy_transport import Clock

from sglang_pp_spec.core import apply as core_apply
from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import FrameKind, FramePayload, FrameRows, fill_rows
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import FrameLayout
from sglang_pp_spec.core.stage_loop import BatchRow, StageLoop, Turn
from sglang_pp_spec.core.tree_rows import TreeRows


class ToyEngine(Scheduling, Sampling):
    """One stage."""

    compares = True  # whether a stage looks at the input of the stage before it; off where frames must find it alone

    def __init__(
        self,
        stage: int,
        num_stages: int,
        num_slots: int,
        layout: FrameLayout,
        oracle: Oracle,
        *,
        proxies_in: Link | None = None,
        proxies_out: Link | None = None,
        requests_in: Link | None = None,
        requests_out: Link | None = None,
        note: Callable[[int, str, tuple], None] = lambda step, side, state: None,
        pool_size: int = 400,
        chunk: int = 1_000,
        max_running: int = 4,
        cost: float = 1.0,
    ) -> None:
        self.stage, self.num_slots = stage, num_slots
        self.is_last_stage = stage == num_stages - 1
        self.layout, self.shape, self.oracle = layout, layout.shape, oracle
        self.proxies_in, self.proxies_out = proxies_in, proxies_out
        self.requests_in, self.requests_out = requests_in, requests_out
        self.note = note
        self.chunk, self.max_running, self.cost = chunk, max_running, cost
        self.clock = Clock()
        self.loop: StageLoop[ToyBatch] | None = None
        self.pool = Pool(pool_size)
        self.requests: dict[str, Request] = {}
        self.lives: dict[str, int] = {}
        self.everything: list[Request] = []
        self.waiting: list[Request] = []
        self.chunked: Request | None = None
        self.running: list[ToyBatch | None] = [None] * num_slots
        self.last: list[ToyBatch | None] = [None] * num_slots
        self.events: list[Event] = []
        self.num_turns = 0
        self.paused = False
        self.log: list[tuple] = []  # (what, ...) in order: launched, applied, dropped, accepted, retracted
        self._proxy: list[tuple[str, int]] = []

    # The Engine of core.stage_loop.

    def enter(self, slot: int) -> None:
        pass

    def take_requests(self) -> None:
        if self.requests_in is None:
            now = [event for event in self.events if event.turn <= self.num_turns]
            self.events = [event for event in self.events if event.turn > self.num_turns]
        else:
            _, now = self.requests_in.take()
        self.num_turns += 1
        for event in now:
            getattr(self, event.name)(**({"rid": event.rid} if event.rid else {}), **dict(event.options))
        if self.requests_out is not None:
            self.requests_out.put(now, self.clock.now)

    def schedule(self, slot: int) -> ToyBatch | None:
        if self.paused:
            return None
        self._settle_into_running(slot)
        batch = self._prefill(slot) or self._decode(slot)
        if batch is not None:
            self.log.append(("launched", self.num_turns - 1, slot, batch.kind, [req.rid for req in batch.reqs]))
        return batch

    def rows(self, batch: ToyBatch) -> list[BatchRow]:
        return [
            BatchRow(req.rid, owner=req, rebuilds=req.rebuilds, samples=samples)
            for req, samples in zip(batch.reqs, batch.samples, strict=True)
        ]

    def kind(self, batch: ToyBatch) -> FrameKind:
        return batch.kind

    def receive_proxy(self) -> list:
        assert self.proxies_in is not None
        time, proxy = self.proxies_in.take()
        self.clock.until(time)
        return proxy

    def run(self, turn: Turn[ToyBatch], proxy: Any) -> tuple[FramePayload, list[int]] | None:
        batch = turn.batch
        record = turn.forward = Forward(list(batch.reqs), list(batch.rebuilds), batch.lengths)
        self.clock.spend(self.cost)
        verify = batch.kind is FrameKind.VERIFY
        self._proxy = self._forward_trees(turn, record) if verify else self._forward_prompts(batch)
        if proxy is not None:
            self._compare(turn, proxy)
        outcome = self._sample(turn, record) if self.is_last_stage else None
        for req, samples in zip(batch.reqs, batch.samples, strict=True):
            req.frames_in_flight += 1
            req.chunks_in_flight += not samples
        batch.lengths = torch.full_like(batch.lengths, POISON)  # whoever reads live lengths now is found out
        return outcome

    def fill_frame(self, started: Tensor, payload: FramePayload) -> Tensor:
        """Padding rows and unused columns hold poison, as reused buffers hold old data."""
        frame = started.clone()
        num_rows = int(started[0, 5])
        frame[1 + num_rows :] = POISON
        frame[1 : 1 + num_rows, self.layout.tokens.start + 1 : self.layout.tokens.stop] = POISON
        fill_rows(frame, self.layout, payload)
        return frame

    def send_proxy(self, turn: Turn[ToyBatch]) -> None:
        assert self.proxies_out is not None
        self.proxies_out.put(self._proxy, self.clock.now)

    def needs_account(self, batch: ToyBatch) -> bool:
        return self.is_last_stage and any(req.grammar for req in batch.reqs)

    def adopt(self, turn: Turn[ToyBatch], live: Sequence[RowIdentity]) -> None:
        if list(live) != list(turn.launch.identities):
            self.log.append(("recomposed", turn.launch.header.step))
        self._note_guarded_rows(turn)
        core_apply.adopt_frame(self, turn, self.layout, live)
        if turn.launch.header.kind is not FrameKind.VERIFY:
            turn.batch.lengths = turn.forward.lengths
            self._adopt_first_tokens(turn)
        self.last[turn.launch.header.slot] = turn.batch if turn.batch.kind is not FrameKind.VERIFY else None
        self.log.append(("adopted", turn.launch.header.step))
        self.note(turn.launch.header.step, "device", self._device_state(turn.batch))

    def account(self, turn: Turn[ToyBatch]) -> list[bool]:
        self.log.append(("accounted", turn.launch.header.step))
        core_apply.account_frame(self, turn, self.layout)
        record: Forward = turn.forward
        for req, rebuilds in zip(record.reqs, record.rebuilds, strict=True):
            if req.rebuilds == rebuilds:
                req.frames_in_flight -= 1
                if req.finished and (not req.aborted or not req.frames_in_flight):
                    self._release(req)
        self.note(turn.launch.header.step, "host", self._host_state(turn))
        return [req.finished for req in record.reqs]

    def idle(self) -> None:
        pass

    # The StageState of core.apply.

    def owns_row(self, turn: Turn[ToyBatch], row: int) -> bool:
        req, rebuilds = turn.forward.reqs[row], turn.forward.rebuilds[row]
        owns = core_apply.owns_row(
            launched_rebuilds=rebuilds,
            rebuilds=req.rebuilds,
            is_retracted=req.waiting,
            is_finished=req.finished,
            chunks_in_flight=req.chunks_in_flight,
        )
        if not owns:
            self.log.append(("dropped", turn.launch.header.step, req.rid))
        return owns

    def commit_cache(self, turn: Turn[ToyBatch], rows: FrameRows, owned: Sequence[int]) -> None:
        record: Forward = turn.forward
        for row in owned:
            path = self._path(rows, row)
            slots, tree, req = record.slots[row], record.trees[row], record.reqs[row]
            for place, slot in enumerate(slots):
                self.pool.content[slot] = tree[path[place]] if place < len(path) else POISON
            req.chain = record.states[row][path[-1]]
            req.out_on_device += rows.tokens[row, : len(path)].tolist()

    def advance(
        self, turn: Turn[ToyBatch], device: FrameRows, host: FrameRows | None, live: Sequence[RowIdentity]
    ) -> None:
        batch, record = turn.batch, turn.forward
        batch.lengths = core_apply.advanced_lengths(
            batch.lengths, record.lengths, device.num_accepted, turn.launch.identities, live
        )
        for row, length in enumerate(batch.lengths.tolist()):
            batch.reqs[row].committed = length

    def fold(self, turn: Turn[ToyBatch], newer: TreeRows) -> None:
        if turn.batch.trees is None:
            turn.batch.trees = newer
        else:
            turn.batch.trees.fold(newer)

    def deliver(self, turn: Turn[ToyBatch], rows: FrameRows, owned: Sequence[int]) -> None:
        record: Forward = turn.forward
        for row in owned:
            req = record.reqs[row]
            if not turn.launch.samples[row]:
                req.chunks_in_flight -= 1
            if req.finished:
                continue
            accepted = int(rows.num_accepted[row])
            if turn.launch.header.kind is FrameKind.VERIFY:
                self.log.append(("accepted", req.rid, req.life, len(req.tokens) - 1, accepted - 1))
                req.accounted += accepted
            self._append(req, rows.tokens[row, :accepted].tolist())

    def _note_guarded_rows(self, turn: Turn[ToyBatch]) -> None:
        """With overlap a wrong row runs on, made harmless, until its frame is read: nothing about it is right."""
        for row, req in enumerate(turn.forward.reqs):
            if not torch.equal(turn.adoptable[1 + row], turn.arrived.device[1 + row]):
                self.oracle.suspect.add((req.rid, req.life))
                self.log.append(("guarded", turn.launch.header.step, req.rid))

    def _adopt_first_tokens(self, turn: Turn[ToyBatch]) -> None:
        rows = FrameRows.of(turn.adoptable, self.layout, turn.launch.header.num_rows)
        for row in core_apply.owned_rows(self, turn):
            if turn.launch.samples[row]:
                turn.forward.reqs[row].out_on_device.append(int(rows.tokens[row, 0]))

    # The forward.

    def _forward_prompts(self, batch: ToyBatch) -> list[tuple]:
        for req, (start, end) in zip(batch.reqs, batch.ranges, strict=True):
            assert req.chain == chain_of(req.tokens[:start]), f"{req.rid}: recurrent state before a prompt is wrong"
            for position in range(start, end):
                self.pool.content[req.slots[position]] = req.tokens[position]
            req.chain = chain_of(req.tokens[:end])
        return [self._input_of(req, []) for req in batch.reqs]

    def _forward_trees(self, turn: Turn[ToyBatch], record: Forward) -> list[tuple]:
        assert turn.batch.trees is not None
        trees = turn.batch.trees.aligned(turn.launch.identities)
        for row, req in enumerate(record.reqs):
            start = int(record.lengths[row])
            tree = trees.tokens[row].tolist()
            record.trees.append(tree)
            record.slots.append(req.slots[start : start + self.shape.num_draft_tokens])
            record.states.append(self._node_states(req, trees, row))
            # Of a request that ended between scheduling and launch (a grammar's barrier) the slots are gone.
            for slot, value in zip(record.slots[row], tree, strict=not req.finished):
                self.pool.content[slot] = value
        return [self._input_of(req, tree) for req, tree in zip(record.reqs, record.trees, strict=True)]

    def _node_states(self, req: Request, trees: TreeRows, row: int) -> list[int]:
        """Recurrent state after each node of the row's tree; also checks that topology belongs to tokens."""
        tree, parents = trees.tokens[row].tolist(), parents_of(trees, row)
        drafted = bool(trees.num_drafts[row])
        if trees.parents is not None and drafted:
            assert trees.parents[row, 0] == signature(tree[0]), f"{req.rid}: tokens with another row's topology"
        states: list[int] = []
        for node, value in enumerate(tree):
            states.append(mixed(req.chain if node == 0 else states[parents[node]], value))
        return states

    def _input_of(self, req: Request, tree: list[int]) -> tuple:
        """What this stage computes a row from; equal on every stage or found at the next one."""
        if req.finished or (req.rid, req.life) in self.oracle.suspect:
            return (req.rid,)
        context = [self.pool.content[slot] for slot in req.slots[: req.committed]]
        assert context == req.tokens_on_device[: req.committed], f"{req.rid} on stage {self.stage}: context {context}"
        assert req.chain == chain_of(context), f"{req.rid} on stage {self.stage}: recurrent state is wrong"
        if tree:
            assert tree[0] == req.tokens_on_device[-1], f"{req.rid} on stage {self.stage}: another first token"
        return req.rid, req.life, req.rebuilds, req.committed, req.chain, tuple(tree)

    def _compare(self, turn: Turn[ToyBatch], proxy: list) -> None:
        if not self.compares:
            return
        assert len(proxy) == len(self._proxy), f"stage {self.stage}: {len(proxy)} rows came, {len(self._proxy)} run"
        for came, own in zip(proxy, self._proxy, strict=True):
            shorter = min(len(came), len(own))  # a request that has ended on one of the two stages already
            same = came[:shorter] == own[:shorter]
            assert same, f"stage {self.stage} step {turn.launch.header.step}: {came}, {own}"

    # Odds and ends of applying.

    def _path(self, rows: FrameRows, row: int) -> list[int]:
        accepted = int(rows.num_accepted[row])
        return list(range(accepted)) if rows.accept_index is None else rows.accept_index[row, :accepted].tolist()

    def _append(self, req: Request, tokens: list[int]) -> None:
        """Append up to the request's limit; what follows the end of a request is neither committed nor emitted."""
        for value in tokens:
            if req.finished:
                return
            assert value != POISON, f"{req.rid} on stage {self.stage}: padding was read as a token"
            req.out.append(value)
            if req.grammar:
                req.grammar_position += 1
            if len(req.out) >= req.max_new:
                req.finished = True

    def _release(self, req: Request) -> None:
        self.pool.give_back(req.slots)
        req.slots = []

    def _device_state(self, batch: ToyBatch) -> tuple:
        trees = batch.trees.tokens.tolist() if batch.trees is not None else [None] * len(batch.reqs)
        return tuple(
            (*req.state_on_device(), tuple(tree or ())) if self._is_comparable(req) else (req.rid,)
            for req, tree in zip(batch.reqs, trees, strict=True)
        )

    def _host_state(self, turn: Turn[ToyBatch]) -> tuple:
        return tuple(req.state() if self._is_comparable(req) else (req.rid,) for req in turn.forward.reqs)

    def _is_comparable(self, req: Request) -> bool:
        return not req.finished and (req.rid, req.life) not in self.oracle.suspect


class AbortingEngine(ToyEngine):
    """A toy engine with ``on_mismatch=abort``: stage 0 puts the abort among the requests of the same turn."""

    def refused(self, turn: Turn[ToyBatch], rows: Sequence[int], reason: FrameRefused) -> bool:
        if self.requests_in is not None:
            return False
        for row in rows:
            req = turn.forward.reqs[row]
            self.oracle.suspect.add((req.rid, req.life))
            self.events.append(Event.of(self.num_turns, "abort", req.rid))
            self.log.append(("refused", turn.launch.header.step, req.rid, str(reason)))
        return True
