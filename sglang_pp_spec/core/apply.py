"""What a frame changes on a stage, in order: the same functions for every engine and every mode.

``adopt_frame``, from the frame on the device:

1. ``commit_cache``   the stage's own KV and recurrent states go to the accepted path, at forward-time lengths;
2. ``advance``        lengths grow by the accepted counts;
3. ``fold``           the requests carry the next trees from now on.

``account_frame``, from the frame on the host:

4. ``deliver``        tokens reach the requests: output, grammar, finish, streaming.

Without overlap the frame was read and checked before 1, and 4 follows at once. With overlap the next round is
launched between 3 and 4; where nobody read the frame, what 1 to 3 are given is ``guarded`` (``core/guard.py``).

The frame's rows are labelled with the identities the step was launched with, never with those of the live batch. A
row whose request was aborted, finished or rebuilt since, or that the frame was refused for, is not owned: it reaches
neither 1 nor 4, and what 2 and 3 do to it is never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .frame import FrameKind, FrameRows
from .identity import RowIdentity
from .layout import FrameLayout, TreeShape
from .stage_loop import Turn
from .tree_rows import TreeRows
from .upload import index_tensor

Batch = TypeVar("Batch")


class StageState(Protocol[Batch]):
    """A stage's requests and caches, as applying a frame sees them."""

    def owns_row(self, turn: Turn[Batch], row: int) -> bool:
        """Whether the launched row's request still is the one the step ran for; see ``owns_row`` below."""

    def commit_cache(self, turn: Turn[Batch], rows: FrameRows, owned: Sequence[int]) -> None:
        """Keep the accepted path of the ``owned`` rows in the stage's own KV and recurrent states."""

    def advance(
        self, turn: Turn[Batch], on_device: FrameRows, on_host: FrameRows | None, live: Sequence[RowIdentity]
    ) -> None:
        """New length = forward-time length + accepted count for the rows ``live`` still has; ``advanced_lengths``.

        ``on_host`` is None where the host has not read the frame: it then knows no lengths until it has.
        """

    def fold(self, turn: Turn[Batch], newer: TreeRows) -> None:
        """Take the newer trees."""

    def deliver(self, turn: Turn[Batch], rows: FrameRows, owned: Sequence[int]) -> None:
        """Give the ``owned`` rows their tokens; drain what the other rows held. ``rows`` is on the host."""


def adopt_frame(
    state: StageState[Batch], turn: Turn[Batch], layout: FrameLayout, live: Sequence[RowIdentity]
) -> None:
    """Take the device values of ``turn``'s frame over; ``live`` names the batch's rows now."""
    header = turn.launch.header
    assert turn.adoptable is not None
    rows = FrameRows.of(turn.adoptable, layout, header.num_rows)
    on_host = None if turn.on_host is None else FrameRows.of(turn.on_host, layout, header.num_rows)
    if header.kind is FrameKind.VERIFY:
        state.commit_cache(turn, rows, owned_rows(state, turn))
        state.advance(turn, rows, on_host, live)
    if header.kind is not FrameKind.MIDDLE:
        state.fold(turn, TreeRows.of_frame(rows, layout.shape, turn.launch.identities))


def account_frame(state: StageState[Batch], turn: Turn[Batch], layout: FrameLayout) -> None:
    """Give the tokens of ``turn``'s checked frame to the requests that still own their rows."""
    assert turn.on_host is not None
    state.deliver(turn, FrameRows.of(turn.on_host, layout, turn.launch.header.num_rows), owned_rows(state, turn))


def owned_rows(state: StageState[Batch], turn: Turn[Batch]) -> list[int]:
    """Launched rows whose request still is the one the step ran for, less those the frame was refused for."""
    samples = turn.launch.samples
    refused = [row for row in turn.refused_rows if samples[row]]  # a middle chunk still drains its counter
    return [row for row in range(turn.launch.header.num_rows) if row not in refused and state.owns_row(turn, row)]


def owns_row(
    *, launched_rebuilds: int, rebuilds: int, is_retracted: bool, is_finished: bool, chunks_in_flight: int
) -> bool:
    """Whether a launched row still belongs to its request: not rebuilt or retracted since, not finished.

    An ended request whose middle chunk is still out owns the row, so that its chunk counter is drained.
    """
    if rebuilds != launched_rebuilds or is_retracted:
        return False
    return not is_finished or chunks_in_flight > 0


def advanced_lengths(
    current: Tensor,
    at_launch: Tensor,
    num_accepted: Tensor,
    launched: Sequence[RowIdentity],
    live: Sequence[RowIdentity],
) -> Tensor:
    """Lengths ([live rows] int64) after a verify: forward-time lengths plus accepted counts, matched by identity.

    ``at_launch`` and ``num_accepted`` are [launched rows]; a live row the step did not launch keeps ``current``.
    """
    advanced = at_launch + num_accepted
    if list(live) == list(launched):
        return advanced
    position = {identity: i for i, identity in enumerate(launched)}
    pairs = [(i, position[identity]) for i, identity in enumerate(live) if identity in position]
    index = index_tensor(pairs, current.device).reshape(-1, 2)
    lengths = current.clone()
    lengths[index[:, 0]] = advanced[index[:, 1]]
    return lengths


def nodes_of_batch(accept_index: Tensor, shape: TreeShape) -> Tensor:
    """``accept_index`` ([rows, max_accepted], node of the row's own tree or -1) numbered through the whole batch."""
    first = torch.arange(accept_index.shape[0], device=accept_index.device).unsqueeze(1) * shape.num_draft_tokens
    return torch.where(accept_index < 0, -1, accept_index + first)


def chain_nodes(num_accepted: Tensor, shape: TreeShape) -> Tensor:
    """``accept_index`` ([rows, max_accepted]) of chains, whose frames leave it out: the first nodes, then -1."""
    nodes = torch.arange(shape.max_accepted, device=num_accepted.device)
    return torch.where(nodes < num_accepted.unsqueeze(1), nodes, -1)
