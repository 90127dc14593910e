"""RelayFrame: everything the last stage says about one executed batch, and nothing else.

Sender, once per launch: ``begin_frame`` lays out header and row identities (host data, known before the forward
ends), ``fill_rows`` adds what the forward produced. Receiver: ``check_frame`` on the host copy, before anything
is touched; then ``FrameRows`` gives named views of the columns. Padding rows and unused columns are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .errors import FrameRefused
from .identity import RowIdentity
from .layout import HEADER_FIELDS, NUM_ACCEPTED, NUM_DRAFTS, FrameLayout


class FrameKind(IntEnum):
    """What kind of step a frame reports. ``SKIPPED`` and ``IDLE`` name steps that send no frame at all."""

    PREFILL = 1  # at least one prompt was finished by this step
    VERIFY = 2
    MIDDLE = 3  # only middle chunks of a prompt: no row samples
    SKIPPED = 4
    IDLE = 5


@dataclass(frozen=True)
class FrameHeader:
    """Names the step a frame belongs to; equal on all stages because all launch the same steps."""

    epoch: int
    step: int
    slot: int
    kind: FrameKind
    num_rows: int

    def words(self, layout: FrameLayout) -> list[int]:
        return [layout.fingerprint, self.epoch, self.step, self.slot, int(self.kind), self.num_rows]


@dataclass(frozen=True)
class FrameRows:
    """Views into a frame, one per column group; ``rows`` = the header's ``num_rows``."""

    num_accepted: Tensor  # [rows] int64, bonus token included; 0 = the row sampled nothing
    num_drafts: Tensor  # [rows] int64, 0 or shape.num_drafts
    tokens: Tensor  # [rows, max_accepted] int64, valid up to num_accepted
    drafts: Tensor  # [rows, num_drafts] int64
    parents: Tensor | None  # [rows, num_parents] int64, topk > 1 only
    selected: Tensor | None  # [rows, num_drafts] int64, topk > 1 only
    accept_index: Tensor | None  # [rows, max_accepted] int64, node of the row's own tree or -1, topk > 1 only

    @classmethod
    def of(cls, frame: Tensor, layout: FrameLayout, num_rows: int) -> FrameRows:
        """Views of ``frame`` ([1 + capacity, width] int64, any device)."""
        body = frame[1 : 1 + num_rows]
        tree = not layout.shape.is_chain
        return cls(
            num_accepted=body[:, NUM_ACCEPTED],
            num_drafts=body[:, NUM_DRAFTS],
            tokens=body[:, layout.tokens],
            drafts=body[:, layout.drafts],
            parents=body[:, layout.parents] if tree else None,
            selected=body[:, layout.selected] if tree else None,
            accept_index=body[:, layout.accept_index] if tree else None,
        )


def begin_frame(
    header: FrameHeader,
    identities: Sequence[RowIdentity],
    layout: FrameLayout,
    *,
    num_accepted: Sequence[int],
    num_drafts: Sequence[int],
) -> Tensor:
    """A host tensor [1 + capacity, width] int64 with all that is known at launch; the rest is zero.

    ``num_accepted`` is final for prefill (1 for a row that samples, else 0) and overwritten by verify.
    """
    if len(identities) != header.num_rows:
        raise ValueError(f"{len(identities)} identities for a frame of {header.num_rows} rows")
    if header.num_rows > layout.capacity:
        raise ValueError(f"a batch of {header.num_rows} rows does not fit a frame of {layout.capacity}")
    frame = torch.zeros(layout.size, dtype=torch.int64)
    frame[0, : len(HEADER_FIELDS)] = torch.tensor(header.words(layout), dtype=torch.int64)
    if identities:
        words = [(*i.words, a, d) for i, a, d in zip(identities, num_accepted, num_drafts, strict=True)]
        frame[1 : 1 + header.num_rows, : NUM_DRAFTS + 1] = torch.tensor(words, dtype=torch.int64)
    return frame


def check_frame(frame: Tensor, expected: FrameHeader, identities: Sequence[RowIdentity], layout: FrameLayout) -> None:
    """Refuse ``frame`` (host tensor) unless it is exactly the one that ``expected`` and ``identities`` describe.

    Touches nothing. Raises ``FrameRefused`` naming the first difference.
    """
    if frame.device.type != "cpu":
        raise ValueError("frames are checked on their host copy")
    if tuple(frame.shape) != layout.size or frame.dtype != torch.int64:
        raise FrameRefused(
            f"{_name(expected)}: a tensor {tuple(frame.shape)} {frame.dtype} is no frame of layout {layout.size}"
        )
    view = frame.numpy()
    for field, got, want in zip(HEADER_FIELDS, view[0], expected.words(layout), strict=False):
        if got != want:
            raise FrameRefused(f"{_name(expected)}: the frame says {field} {got}, expected {want}")
    body = view[1 : 1 + expected.num_rows]
    _check_identities(body, expected, identities)
    _check_counts(body, expected, layout)


def _name(header: FrameHeader) -> str:
    return f"step {header.step} slot {header.slot} ({header.kind.name.lower()}, {header.num_rows} rows)"


def _check_identities(body, expected: FrameHeader, identities: Sequence[RowIdentity]) -> None:
    for row, identity in enumerate(identities):
        digest, incarnation = identity.words
        if body[row, 0] != digest or body[row, 1] != incarnation:
            known = {i.words: str(i) for i in identities}
            got = [known.get((int(r[0]), int(r[1])), f"?{int(r[0]):x}#{int(r[1])}") for r in body]
            raise FrameRefused(
                f"{_name(expected)}: row {row} is not {identity}; "
                f"expected rows {[str(i) for i in identities]}, received {got}"
            )


def _check_counts(body, expected: FrameHeader, layout: FrameLayout) -> None:
    accepted, drafts = body[:, NUM_ACCEPTED], body[:, NUM_DRAFTS]
    smallest = 1 if expected.kind is FrameKind.VERIFY else 0
    largest = layout.shape.max_accepted if expected.kind is FrameKind.VERIFY else 1
    for row in range(expected.num_rows):
        if not smallest <= accepted[row] <= largest:
            raise FrameRefused(
                f"{_name(expected)}: row {row} accepted {accepted[row]} tokens, "
                f"which is not within [{smallest}, {largest}]"
            )
        if drafts[row] not in (0, layout.shape.num_drafts):
            raise FrameRefused(
                f"{_name(expected)}: row {row} carries {drafts[row]} drafts, not 0 or {layout.shape.num_drafts}"
            )
        if drafts[row] and not accepted[row]:
            raise FrameRefused(f"{_name(expected)}: row {row} carries drafts but sampled no token")


@dataclass(frozen=True)
class FramePayload:
    """What a forward produced for its rows, on the device; ``None`` where a step has no such part."""

    tokens: Tensor  # [rows, <= max_accepted] integer, accepted tokens first
    num_accepted: Tensor | None  # [rows] integer; None: the host already wrote it
    drafts: Tensor | None  # [draft rows, num_drafts] integer
    parents: Tensor | None = None  # [draft rows, num_parents] integer, topk > 1
    selected: Tensor | None = None  # [draft rows, num_drafts] integer, topk > 1
    accept_index: Tensor | None = None  # [rows, max_accepted] integer, node of the row's own tree or -1, topk > 1
    draft_rows: Tensor | None = None  # [draft rows] int64, which rows were drafted for; None: all


def fill_rows(frame: Tensor, layout: FrameLayout, payload: FramePayload) -> None:
    """Write what the forward produced into ``frame`` ([1 + capacity, width] int64) on the frame's device."""
    body = frame[1 : 1 + payload.tokens.shape[0]]
    body[:, layout.tokens.start : layout.tokens.start + payload.tokens.shape[1]] = payload.tokens
    if payload.num_accepted is not None:
        body[:, NUM_ACCEPTED] = payload.num_accepted
    if payload.accept_index is not None:
        body[:, layout.accept_index] = payload.accept_index.to(torch.int64)
    for columns, values in (
        (layout.drafts, payload.drafts),
        (layout.parents, payload.parents),
        (layout.selected, payload.selected),
    ):
        if values is not None and payload.draft_rows is None:
            body[:, columns] = values
        elif values is not None:
            body[payload.draft_rows, columns] = values.to(torch.int64)
