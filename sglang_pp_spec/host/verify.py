"""The verify input of a round, rebuilt on every stage from the trees its requests carry.

All stages hold the same rows, so all build the same mask, positions and links with SGLang's own
``build_tree_kernel_efficient``; no stage but the last needs a draft model for it.
"""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode, build_tree_kernel_efficient, default_tree_mask_mode
from torch import Tensor

from ..core.tree_rows import TreeRows


def rebuild_verify_input(batch: ScheduleBatch, rows: TreeRows, *, attn_backend, context_len: int) -> EagleVerifyInput:
    """The ``EagleVerifyInput`` of ``batch`` whose row i proposes ``rows`` row i.

    ``attn_backend`` is the target's: it may own the mask buffer. ``context_len`` bounds the mask when no host
    copy of the lengths is there.
    """
    shape = rows.shape
    mask_mode, mask_buffer, fill_prefix = _mask_target(attn_backend, len(batch.reqs))
    parents, selected = rows.topology()
    tree_mask, positions, retrieve_index, next_token, next_sibling, draft_token = build_tree_kernel_efficient(
        rows.tokens[:, 0].contiguous(),
        parents,
        selected,
        rows.tokens[:, 1:].contiguous(),
        batch.seq_lens,
        _mask_length(batch, mask_mode, mask_buffer, context_len),
        shape.topk,
        shape.num_steps,
        shape.num_draft_tokens,
        mask_mode,
        mask_buffer,
        fill_prefix_mask=fill_prefix,
    )
    # A row without drafts verifies its bonus token alone: a filler token must not be accepted, even a right one.
    empty = (rows.num_drafts == 0).unsqueeze(1)
    next_token.masked_fill_(empty, -1)
    next_sibling.masked_fill_(empty, -1)
    return EagleVerifyInput(
        draft_token=draft_token,
        custom_mask=tree_mask,
        positions=positions,
        retrieve_index=retrieve_index,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        retrieve_cum_len=None,
        spec_steps=shape.num_steps,
        topk=shape.topk,
        draft_token_num=shape.num_draft_tokens,
        capture_hidden_mode=None,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )


def _mask_target(attn_backend, num_rows: int) -> tuple[TreeMaskMode, Tensor | None, bool]:
    """(mask layout, the backend's own buffer if this batch fits it, whether the prefix columns are ever read)."""
    owned = attn_backend.verify_mask
    if owned is None:
        return default_tree_mask_mode(), None, True
    return owned.mode, owned.buffer if owned.fits(num_rows) else None, owned.is_read


def _mask_length(batch: ScheduleBatch, mode: TreeMaskMode, buffer: Tensor | None, context_len: int) -> int:
    """Sum of sequence lengths for sizing a mask that spans the prefix; an upper bound is enough."""
    if buffer is not None or mode == TreeMaskMode.QLEN_ONLY:
        return 0
    if batch.seq_lens_cpu is not None:
        return int(torch.sum(batch.seq_lens_cpu))
    return len(batch.reqs) * context_len
