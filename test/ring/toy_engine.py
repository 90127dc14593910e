"""The toy ``Engine``: a scheduler with chunked prefill, fake KV, a recurrent state and a grammar on every stage.

It keeps the habits of a real one: a decode batch lives on in its slot, a finished prompt joins it one turn later,
the decode batch may be recomposed while its step is in flight, KV is reserved before a step and rejected KV is
worthless after it. What a frame does is ``core.apply``; the methods of ``StageState`` are below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from links import Link
from oracle import POISON, WRONG, Oracle, mixed
from torch import Tensor
from toy_requests import Pool, Request, ToyBatch, chain_of, right_prompt
from toy_transport import Clock

from sglang_pp_spec.core import apply as core_apply
from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import FrameKind, FramePayload, FrameRows
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import FrameLayout
from sglang_pp_spec.core.stage_loop import ArrivedFrame, BatchRow, StageLoop, Turn
from sglang_pp_spec.core.tree_rows import TreeRows


@dataclass
class Forward:
    """What a toy stage remembers of a forward until its frame is applied."""

    reqs: list[Request]
    rebuilds: list[int]
    lengths: Tensor  # [rows] int64, before this step's accepted tokens
    slots: list[list[int]] = field(default_factory=list)  # per row: KV slots of its verify nodes
    trees: list[list[int]] = field(default_factory=list)  # per row: tokens of its verify nodes
    states: list[list[int]] = field(default_factory=list)  # per row: recurrent state after each node
    paths: list[list[int]] = field(default_factory=list)  # last stage: accepted nodes


@dataclass(frozen=True)
class Event:
    """Something from outside; ``turn`` is the turn of stage 0 that takes it in."""

    turn: int
    name: str  # a method of ``ToyEngine``: arrive, abort, retract, permute, pause, resume
    rid: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, turn: int, name: str, rid: str = "", **options: Any) -> Event:
        return cls(turn, name, rid, tuple(options.items()))


class ToyEngine:
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
        note: Callable[[int, tuple], None] = lambda step, state: None,
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

    def device_frame(self, started: Tensor) -> Tensor:
        """Padding rows and unused columns hold poison, as reused buffers hold old data."""
        frame = started.clone()
        num_rows = int(started[0, 5])
        frame[1 + num_rows :] = POISON
        frame[1 : 1 + num_rows, self.layout.tokens.start + 1 : self.layout.tokens.stop] = POISON
        return frame

    def send_proxy(self, turn: Turn[ToyBatch]) -> None:
        assert self.proxies_out is not None
        self.proxies_out.put(self._proxy, self.clock.now)

    def apply(self, turn: Turn[ToyBatch], frame: ArrivedFrame, live: Sequence[RowIdentity]) -> None:
        if list(live) != list(turn.launch.identities):
            self.log.append(("recomposed", turn.launch.header.step))
        core_apply.apply_frame(self, turn, frame, self.layout, live)

    def settle(self, slot: int, turn: Turn[ToyBatch]) -> list[bool]:
        record: Forward = turn.forward
        self.last[slot] = turn.batch if turn.batch.kind is not FrameKind.VERIFY else None
        for req, rebuilds in zip(record.reqs, record.rebuilds, strict=True):
            if req.rebuilds == rebuilds:
                req.frames_in_flight -= 1
                if req.finished and not req.frames_in_flight:
                    self._release(req)
        self.note(turn.launch.header.step, self._state_of(turn.batch))
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

    def advance(self, turn: Turn[ToyBatch], device: FrameRows, host: FrameRows, live: Sequence[RowIdentity]) -> None:
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

    def account(self, turn: Turn[ToyBatch], rows: FrameRows, owned: Sequence[int]) -> None:
        record: Forward = turn.forward
        if turn.launch.header.kind is not FrameKind.VERIFY:
            turn.batch.lengths = record.lengths
        for row in owned:
            req = record.reqs[row]
            if not turn.launch.samples[row]:
                req.chunks_in_flight -= 1
            if req.finished:
                continue
            accepted = int(rows.num_accepted[row])
            if turn.launch.header.kind is FrameKind.VERIFY:
                self.log.append(("accepted", req.rid, req.life, len(req.tokens) - 1, accepted - 1))
            self._deliver(req, rows.tokens[row, :accepted].tolist())

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
        req.committed = req.chain = 0
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
        in_flight = sum(turn is not None for turn in self.loop.turns)
        self.log.append(("paused", self.num_turns - 1, in_flight))
        self.loop.drain()
        assert self.loop.ledger.is_idle
        for req in list(self.requests.values()):
            self.retract(req.rid)
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    # Scheduling: the same on every stage.

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
            req.committed = end
            self.chunked = None if samples[-1] else req
        if not reqs:
            return None
        kind = FrameKind.PREFILL if any(samples) else FrameKind.MIDDLE
        return ToyBatch.of(kind, reqs, ranges, samples)

    def _admit(self, room: int) -> Request | None:
        if room <= 0 or not self.waiting:
            return None
        req = self.waiting[0]
        needed = len(req.tokens) + self.shape.num_draft_tokens
        if len(self.pool.free) < needed:
            return None
        self.waiting.pop(0)
        req.waiting = False
        req.slots = self.pool.take(needed)
        req.committed = min(req.cached, len(req.tokens) - 1)
        for position in range(req.committed):
            self.pool.content[req.slots[position]] = req.tokens[position]
        req.chain = chain_of(req.tokens[: req.committed])
        return req

    def _decode(self, slot: int) -> ToyBatch | None:
        run = self.running[slot]
        while run is not None and run.reqs:
            needed = [max(0, req.committed + self.shape.num_draft_tokens - len(req.slots)) for req in run.reqs]
            if sum(needed) <= len(self.pool.free):
                for req, num in zip(run.reqs, needed, strict=True):
                    req.slots += self.pool.take(num)
                run.samples = [True] * len(run.reqs)
                run.lengths = torch.tensor([req.committed for req in run.reqs], dtype=torch.int64)
                return run
            assert len(run.reqs) > 1 or len(self.pool.free) < self.pool.size, "the pool is too small for one request"
            self.retract(run.reqs[-1].rid)
        return None

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
            for slot, value in zip(record.slots[row], tree, strict=True):
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
        context = [self.pool.content[slot] for slot in req.slots[: req.committed]]
        assert context == req.tokens[: req.committed], f"{req.rid} on stage {self.stage}: context {context}"
        assert req.chain == chain_of(context), f"{req.rid} on stage {self.stage}: recurrent state is wrong"
        if tree:
            assert tree[0] == req.tokens[-1], f"{req.rid} on stage {self.stage}: the round starts at another token"
        return (*req.state(), tuple(tree))

    def _compare(self, turn: Turn[ToyBatch], proxy: list) -> None:
        if not self.compares:
            return
        assert len(proxy) == len(self._proxy), f"stage {self.stage}: {len(proxy)} rows came, {len(self._proxy)} run"
        for came, own in zip(proxy, self._proxy, strict=True):
            assert came == own, f"stage {self.stage} step {turn.launch.header.step}: {came}, {own}"

    # The last stage: verify, then draft.

    def _sample(self, turn: Turn[ToyBatch], record: Forward) -> tuple[FramePayload, list[int]]:
        batch, shape, num_rows = turn.batch, self.shape, len(record.reqs)
        verify = batch.kind is FrameKind.VERIFY
        tokens = torch.full((num_rows, shape.max_accepted if verify else 1), POISON, dtype=torch.int64)
        accepted, nodes, drafts = [0] * num_rows, [], []
        trees = batch.trees.aligned(turn.launch.identities) if verify and batch.trees else None
        for row, req in enumerate(record.reqs):
            position = int(record.lengths[row]) + (1 if verify else 0)
            path, emitted = self._walk(req, position, trees, row) if verify else ([], [])
            if not verify and batch.samples[row]:
                emitted = [self._masked(req, position, 0)]
            tokens[row, : len(emitted)] = torch.tensor(emitted, dtype=torch.int64)
            accepted[row] = len(emitted)
            nodes.append(path + [-1] * (shape.max_accepted - len(path)))
            drafts.append(self._draft(turn, req, position + len(emitted) - 1, emitted))
        return self._payload(tokens, accepted if verify else None, nodes, drafts), [
            shape.num_drafts if draft else 0 for draft in drafts
        ]

    def _walk(self, req: Request, position: int, trees: TreeRows | None, row: int) -> tuple[list[int], list[int]]:
        """Accepted nodes and the tokens they decide; ``position`` is that of the first decided token."""
        assert trees is not None
        tree, parents, path, emitted = trees.tokens[row].tolist(), parents_of(trees, row), [0], []
        drafted = bool(trees.num_drafts[row])
        while True:
            emitted.append(self._masked(req, position + len(emitted), len(emitted)))
            children = [node for node in range(1, len(tree)) if drafted and parents[node] == path[-1]]
            following = [node for node in children if tree[node] == emitted[-1]]
            if not following:
                return path, emitted
            path.append(following[0])

    def _masked(self, req: Request, position: int, ahead: int) -> int:
        """The target's token under the grammar; the FSM stands at the round's first position, ``ahead`` further."""
        value = self.oracle.unmasked(req.rid, req.life, position, req.grammar)
        if req.grammar:
            assert req.grammar_position + ahead == position, (
                f"{req.rid}: FSM at {req.grammar_position}, not {position}"
            )
            value = self.oracle.unmasked(req.rid, req.life, position, False)
        return value

    def _draft(self, turn: Turn[ToyBatch], req: Request, bonus_at: int, emitted: list[int]) -> list[Any]:
        """[tokens of the drafts, parent of each] for the round that starts at ``bonus_at``; empty: no drafts."""
        step = turn.launch.header.step
        if not emitted or self.oracle.lost(step, req.rid):
            if emitted:
                self.oracle.drafted[req.rid, req.life, bonus_at] = 0
            return []
        right = min(self.oracle.right_drafts(step, req.rid), self.shape.num_steps)
        path, parents = path_in_tree(self.shape.num_drafts, self.shape.is_chain, mixed(step, req.life) % 2)
        values = [WRONG + 1 + node for node in range(self.shape.num_drafts)]
        legal = 0
        for ahead, node in enumerate(path[:right]):
            position = bonus_at + 1 + ahead
            values[node - 1] = self.oracle.unmasked(req.rid, req.life, position, req.grammar)
            legal += legal == ahead and not self.oracle.illegal_at(position, req.grammar)
        self.oracle.drafted[req.rid, req.life, bonus_at] = min(legal, len(path))
        return [values, parents, emitted[-1]]

    def _payload(self, tokens: Tensor, accepted: list[int] | None, nodes: list, drafts: list) -> FramePayload:
        shape, rows = self.shape, [row for row, draft in enumerate(drafts) if draft]
        tree = bool(rows) and not shape.is_chain
        index = torch.tensor(rows, dtype=torch.int64)
        parents = [[signature(drafts[row][2])] * shape.num_parents for row in rows]
        return FramePayload(
            tokens=tokens,
            num_accepted=None if accepted is None else torch.tensor(accepted),
            drafts=torch.tensor([drafts[row][0] for row in rows]) if rows else None,
            parents=torch.tensor(parents) if tree else None,
            selected=torch.tensor([drafts[row][1] for row in rows]) if tree else None,
            accept_index=torch.tensor(nodes) if accepted is not None and not shape.is_chain else None,
            draft_rows=None if len(rows) == len(drafts) else index,
        )

    # Odds and ends of applying.

    def _path(self, rows: FrameRows, row: int) -> list[int]:
        accepted = int(rows.num_accepted[row])
        return list(range(accepted)) if rows.accept_index is None else rows.accept_index[row, :accepted].tolist()

    def _deliver(self, req: Request, tokens: list[int]) -> None:
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

    def _state_of(self, batch: ToyBatch) -> tuple:
        suspect = [(req.rid, req.life) in self.oracle.suspect for req in batch.reqs]
        trees = batch.trees.tokens.tolist() if batch.trees is not None else [None] * len(batch.reqs)
        return tuple(
            (*req.state(), tuple(tree or ())) if not bad and not req.finished else (req.rid,)
            for req, tree, bad in zip(batch.reqs, trees, suspect, strict=True)
        )


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


def signature(bonus: int) -> int:
    """What the parent list holds: not a topology, but whose topology it is."""
    return mixed(bonus) & 0xFFFFFF


def path_in_tree(num_drafts: int, is_chain: bool, variant: int) -> tuple[list[int], list[int]]:
    """(the good path as node numbers, the parent of every draft node); in a tree half the paths are no prefix."""
    if is_chain:
        return list(range(1, num_drafts + 1)), list(range(num_drafts))
    if variant:
        return [2, *range(3, num_drafts + 1)], [0, 0, *range(2, num_drafts)]
    return [1, 2, *range(3, num_drafts)], [0, 1, *range(2, num_drafts - 1), 0]


def parents_of(trees: TreeRows, row: int) -> list[int]:
    """Parent node of every node of the row's tree, -1 for the root."""
    if trees.selected is None:
        return list(range(-1, trees.shape.num_drafts))
    return [-1, *trees.selected[row].tolist()]
