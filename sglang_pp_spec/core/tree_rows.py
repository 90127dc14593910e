"""The draft trees requests carry between rounds: one row per request, all parts of a row moving together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .frame import FrameRows
from .identity import RowIdentity
from .layout import TreeShape
from .upload import index_tensor


@dataclass
class TreeRows:
    """Rows of proposed tokens, aligned with ``identities``. For a chain the topology is a constant, not data.

    A row without drafts (``num_drafts`` 0) is degenerate: its bonus token alone is verified. What stands in its
    draft columns is filler and must not be accepted, even where the target happens to agree with it.
    """

    shape: TreeShape
    identities: list[RowIdentity]
    tokens: Tensor  # [rows, num_draft_tokens] int64, column 0 = bonus token
    parents: Tensor | None  # [rows, num_parents] int64, None for a chain
    selected: Tensor | None  # [rows, num_draft_tokens - 1] int64, None for a chain
    num_drafts: Tensor  # [rows] int64, 0 or shape.num_drafts

    @classmethod
    def of_frame(cls, rows: FrameRows, shape: TreeShape, identities: Sequence[RowIdentity]) -> TreeRows:
        """The trees a frame proposes, copied out so that the frame's buffer can be used again.

        The bonus token is the last accepted one. A row that sampled nothing has no tree; it gets token 0 and is
        dropped by the batch filter before anything is built from it.
        """
        last = (rows.num_accepted - 1).clamp(min=0)
        bonus = rows.tokens.gather(1, last.unsqueeze(1))
        return cls(
            shape=shape,
            identities=list(identities),
            tokens=torch.cat([bonus, rows.drafts], dim=1),
            parents=None if rows.parents is None else rows.parents.clone(),
            selected=None if rows.selected is None else rows.selected.clone(),
            num_drafts=rows.num_drafts.clone(),
        )

    def filter(self, keep: Sequence[int], keep_device: Tensor) -> None:
        """Keep the rows ``keep`` ([n] host indices, ``keep_device`` the same on the rows' device), in that order."""
        self.identities = [self.identities[i] for i in keep]
        self._gather(keep_device)

    def merge(self, other: TreeRows) -> None:
        """Append the rows of ``other``."""
        if other.shape != self.shape:
            raise ValueError(f"rows of {other.shape} cannot join rows of {self.shape}")
        self.identities = self.identities + other.identities
        self.tokens = torch.cat([self.tokens, other.tokens])
        self.num_drafts = torch.cat([self.num_drafts, other.num_drafts])
        if self.parents is not None:
            self.parents = torch.cat([self.parents, other.parents])
            self.selected = torch.cat([self.selected, other.selected])

    def fold(self, newer: TreeRows) -> None:
        """Take the newer row of every request that has one; a request ``newer`` does not name keeps its row.

        A row of ``newer`` whose request is not here, or is here in another incarnation, goes nowhere.
        """
        if newer.identities == self.identities:
            self.tokens, self.parents, self.selected = newer.tokens, newer.parents, newer.selected
            self.num_drafts = newer.num_drafts
            return
        own = len(self.identities)
        position = {identity: own + i for i, identity in enumerate(newer.identities)}
        take = [position.get(identity, i) for i, identity in enumerate(self.identities)]
        identities = self.identities
        self.merge(newer)
        self.identities = identities
        self._gather(index_tensor(take, self.tokens.device))

    def aligned(self, identities: Sequence[RowIdentity]) -> TreeRows:
        """These rows in the order of ``identities``; KeyError names the requests that have none."""
        if list(identities) == self.identities:
            return self
        position = {identity: i for i, identity in enumerate(self.identities)}
        missing = [str(i) for i in identities if i not in position]
        if missing:
            raise KeyError(f"no tree for {missing}; trees here: {[str(i) for i in self.identities]}")
        rows = TreeRows(
            self.shape, list(identities), self.tokens, self.parents, self.selected, num_drafts=self.num_drafts
        )
        rows._gather(index_tensor([position[i] for i in identities], self.tokens.device))
        return rows

    def topology(self) -> tuple[Tensor, Tensor]:
        """(parent list [rows, num_parents], selected indices [rows, num_drafts]), int64, on the rows' device."""
        if self.parents is not None and self.selected is not None:
            return self.parents, self.selected
        return _chain_topology(len(self.identities), self.shape, self.tokens.device)

    def _gather(self, index: Tensor) -> None:
        self.tokens, self.num_drafts = self.tokens[index], self.num_drafts[index]
        if self.parents is not None and self.selected is not None:
            self.parents, self.selected = self.parents[index], self.selected[index]


@lru_cache(maxsize=512)
def _chain_topology(num_rows: int, shape: TreeShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """``TreeRows.topology`` of ``num_rows`` chains: a constant, to be read only."""
    parents = torch.arange(-1, shape.num_parents - 1, dtype=torch.int64, device=device)
    selected = torch.arange(shape.num_drafts, dtype=torch.int64, device=device)
    return parents.repeat(num_rows, 1), selected.repeat(num_rows, 1)
