"""The last toy stage: verify a tree against the oracle, then draft the next one."""

from __future__ import annotations

from typing import Any

import torch
from oracle import POISON, WRONG, mixed
from torch import Tensor
from toy_requests import Forward, Request, ToyBatch

from sglang_pp_spec.core.frame import FrameKind, FramePayload
from sglang_pp_spec.core.stage_loop import Turn
from sglang_pp_spec.core.tree_rows import TreeRows


class Sampling:
    """A part of ``ToyEngine``."""

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
            assert req.finished or req.grammar_position + ahead == position, (
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
