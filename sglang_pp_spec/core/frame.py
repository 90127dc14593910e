"""RelayFrame: everything the last stage says about one executed batch, and nothing else.

Sender, once per launch: ``begin_frame`` lays out header and row identities (host data, known before the forward
ends), ``fill_rows`` adds what the forward produced. Receiver: ``check_frame`` on the host copy, before anything
is touched; then ``FrameRows`` gives named views of the columns. Padding rows and unused columns are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import FrameRefused
from .identity import RowIdentity
from .layout import HEADER_FIELDS, NUM_ACCEPTED, NUM_DRAFTS, FrameLayout, TreeShape


class FrameKind(IntEnum):
    """What kind of step a frame reports."""

    PREFILL = 1  # at least one prompt was finished by this step
    VERIFY = 2
    MIDDLE = 3  # only middle chunks of a prompt: no row samples


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
    _require_rows(header, identities, layout)
    if not len(num_accepted) == len(num_drafts) == header.num_rows:
        raise ValueError(f"{len(num_accepted)} and {len(num_drafts)} counts for a frame of {header.num_rows} rows")
    frame = torch.zeros(layout.size, dtype=torch.int64)
    view = frame.numpy()
    view[0, : len(HEADER_FIELDS)] = header.words(layout)
    body = view[1 : 1 + header.num_rows]
    body[:, :NUM_ACCEPTED] = _identity_block(tuple(identities))
    body[:, NUM_ACCEPTED] = num_accepted
    body[:, NUM_DRAFTS] = num_drafts
    return frame


def check_frame(
    frame: Tensor,
    expected: FrameHeader,
    identities: Sequence[RowIdentity],
    layout: FrameLayout,
    *,
    samples: Sequence[bool] | None = None,
) -> None:
    """Refuse ``frame`` (host tensor) unless it is exactly the one that the other arguments describe.

    ``samples`` says per row whether the step decides tokens of it; None: every row of the kind may.
    Touches nothing. Raises ``FrameRefused`` naming the first difference.
    """
    _require_rows(expected, identities, layout)
    if frame.device.type != "cpu":
        raise ValueError("frames are checked on their host copy")
    if tuple(frame.shape) != layout.size or frame.dtype != torch.int64:
        raise FrameRefused(
            f"{_name(expected)}: a tensor {tuple(frame.shape)} {frame.dtype} is no frame of layout {layout.size}"
        )
    view = frame[: 1 + expected.num_rows].numpy()  # padding is never looked at
    header, wanted = view[0, : len(HEADER_FIELDS)].tolist(), expected.words(layout)
    if header != wanted:
        differing = next(i for i in range(len(wanted)) if header[i] != wanted[i])
        raise FrameRefused(
            f"{_name(expected)}: the frame says {HEADER_FIELDS[differing]} {header[differing]}, "
            f"expected {wanted[differing]}"
        )
    body = view[1 : 1 + expected.num_rows]
    if not (body[:, :NUM_ACCEPTED] == _identity_block(tuple(identities))).all():
        raise FrameRefused(_identity_difference(body, expected, identities))
    counts = row_counts(body, samples)
    for count in set(counts):
        problem = count_problem(*count, expected.kind, layout)
        if problem:
            raise FrameRefused(f"{_name(expected)}: row {counts.index(count)} {problem}")


def row_counts(body: Any, samples: Sequence[bool] | None) -> list[tuple[int, int, bool | None]]:
    """(num_accepted, num_drafts, whether the row samples or None) of every row of ``body`` (host array)."""
    known = [None] * len(body) if samples is None else samples
    return list(zip(body[:, NUM_ACCEPTED].tolist(), body[:, NUM_DRAFTS].tolist(), known, strict=True))


def count_problem(accepted: int, drafts: int, samples: bool | None, kind: FrameKind, layout: FrameLayout) -> str:
    """What is wrong with a row's counts, "" if nothing; ``samples`` None: not known."""
    if kind is FrameKind.VERIFY:
        smallest, largest = 1, layout.shape.max_accepted
    elif kind is FrameKind.MIDDLE or samples is False:
        smallest, largest = 0, 0
    else:
        smallest, largest = int(samples is True), 1
    if not smallest <= accepted <= largest:
        return f"accepted {accepted} tokens, which is not within [{smallest}, {largest}]"
    if drafts and drafts != layout.shape.num_drafts:
        return f"carries {drafts} drafts, not 0 or {layout.shape.num_drafts}"
    if drafts and not accepted:
        return "carries drafts but sampled no token"
    return ""


def _require_rows(header: FrameHeader, identities: Sequence[RowIdentity], layout: FrameLayout) -> None:
    if len(identities) != header.num_rows:
        raise ValueError(f"{len(identities)} identities for a frame of {header.num_rows} rows")
    if header.num_rows > layout.capacity:
        raise ValueError(f"a batch of {header.num_rows} rows does not fit a frame of {layout.capacity}")


@lru_cache(maxsize=256)
def _identity_block(identities: tuple[RowIdentity, ...]) -> Any:
    """[rows, 2] int64 host array of what travels for ``identities``; built once per composition of a batch."""
    words = [identity.words for identity in identities]
    block = torch.tensor(words, dtype=torch.int64).reshape(-1, NUM_ACCEPTED).numpy()
    block.flags.writeable = False
    return block


def _name(header: FrameHeader) -> str:
    return f"step {header.step} slot {header.slot} ({header.kind.name.lower()}, {header.num_rows} rows)"


def _identity_difference(body: Any, expected: FrameHeader, identities: Sequence[RowIdentity]) -> str:
    known = {identity.words: str(identity) for identity in identities}
    words = [(digest, incarnation) for digest, incarnation in body[:, :NUM_ACCEPTED].tolist()]
    row = next(i for i, identity in enumerate(identities) if words[i] != identity.words)
    got = [known.get(word, f"?{word[0]:x}#{word[1]}") for word in words]
    return (
        f"{_name(expected)}: row {row} is not {identities[row]}; "
        f"expected rows {[str(i) for i in identities]}, received {got}"
    )


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
    """Write what the forward produced into ``frame`` ([1 + capacity, width] int64) on the frame's device.

    A part of another width than the layout's is a ValueError before anything is written: never cut, never spilled.
    """
    _check_widths(layout.shape, payload)
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


def _check_widths(shape: TreeShape, payload: FramePayload) -> None:
    if not 1 <= payload.tokens.shape[1] <= shape.max_accepted:
        raise ValueError(f"tokens are {payload.tokens.shape[1]} wide, at most {shape.max_accepted} fit: {shape}")
    for name, values, width in (
        ("drafts", payload.drafts, shape.num_drafts),
        ("parents", payload.parents, shape.num_parents),
        ("selected", payload.selected, shape.num_drafts),
        ("accept_index", payload.accept_index, shape.max_accepted),
    ):
        if values is None:
            continue
        if name != "drafts" and shape.is_chain:
            raise ValueError(f"a chain carries no {name}")
        if values.shape[1] != width:
            raise ValueError(f"{name} are {values.shape[1]} wide, not {width}: {shape}")
