"""When a frame is refused but the engine shall go on: which requests pay for it, and what is applied in its place.

A frame of another step, slot, kind, layout or epoch says nothing about any row here, so every row of the slot is
affected. A frame with the right header speaks for the rows whose identity and counts are right; the others are
affected. An affected request gets no token from the frame and is ended on every stage before it could be launched
again (``RefusalPolicy``); its row is replaced by a degenerate one, so that nothing wrong is read on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .frame import FrameKind, begin_frame, count_problem, row_counts
from .layout import HEADER_FIELDS, NUM_ACCEPTED, FrameLayout
from .ledger import Launch


def affected_rows(frame: Tensor, launch: Launch, layout: FrameLayout) -> tuple[int, ...]:
    """The launched rows that ``frame`` (host tensor) must not be applied to; empty if it is the right frame."""
    num_rows = launch.header.num_rows
    if tuple(frame.shape) != layout.size or frame.dtype != torch.int64:
        return tuple(range(num_rows))
    view = frame[: 1 + num_rows].numpy()
    if view[0, : len(HEADER_FIELDS)].tolist() != launch.header.words(layout):
        return tuple(range(num_rows))
    body = view[1 : 1 + num_rows]
    counts = row_counts(body, launch.samples)
    return tuple(
        row
        for row, (words, identity) in enumerate(zip(body[:, :NUM_ACCEPTED].tolist(), launch.identities, strict=True))
        if tuple(words) != identity.words or count_problem(*counts[row], launch.header.kind, layout)
    )


def degenerate(frame: Tensor, launch: Launch, layout: FrameLayout, rows: Sequence[int]) -> Tensor:
    """A frame for ``launch``, on ``frame``'s device: ``rows`` degenerate, the others as ``frame`` has them."""
    safe = degenerate_frame(launch, layout).to(frame.device)
    keep = [1 + row for row in range(launch.header.num_rows) if row not in set(rows)]
    if keep:
        index = torch.tensor(keep, dtype=torch.int64).to(frame.device)
        safe[index] = frame[index]
    return safe


def degenerate_frame(launch: Launch, layout: FrameLayout) -> Tensor:
    """A host frame for ``launch`` that says as little as a right one can: one token 0 per sampling row, no drafts."""
    frame = begin_frame(
        launch.header,
        launch.identities,
        layout,
        num_accepted=[int(samples) for samples in launch.samples],
        num_drafts=[0] * launch.header.num_rows,
    )
    if launch.header.kind is FrameKind.VERIFY and not layout.shape.is_chain:
        body = frame[1 : 1 + launch.header.num_rows, layout.accept_index]
        body.fill_(-1)
        body[:, 0] = 0  # the root alone is accepted
    return frame
