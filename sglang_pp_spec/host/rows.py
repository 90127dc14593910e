"""Which rows of a batch decide tokens, and which are drafted for: asked on every stage of the same batch."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode

from ..core.frame import FrameKind


def sampling_rows(batch: ScheduleBatch) -> list[bool]:
    """Per row, whether this step decides tokens of it: all rows but the middle chunk of an unfinished prompt."""
    if not batch.forward_mode.is_extend():
        return [True] * len(batch.reqs)
    return [req is not batch.chunked_req for req in batch.reqs]


def drafted_rows(batch: ScheduleBatch) -> list[int]:
    """Sampling rows with draft slots reserved past their end: those the last stage drafts the next round for."""
    needed = get_alloc_len_per_decode()
    return [
        i
        for i, (req, samples) in enumerate(zip(batch.reqs, sampling_rows(batch), strict=True))
        if samples and req.kv.kv_allocated_len - req.kv.kv_committed_len >= needed
    ]


def kind_of(batch: ScheduleBatch) -> FrameKind:
    """The kind of frame this batch's step sends."""
    if not batch.forward_mode.is_extend():
        return FrameKind.VERIFY
    return FrameKind.PREFILL if any(sampling_rows(batch)) else FrameKind.MIDDLE
