"""KV slots for the draft that follows a finished prompt, taken on every stage before the step is launched.

    [0, committed) prompt            written by this step (and the cached prefix)
    [committed, committed + 3A)      reserved here; the tail draft writes its first slots, the first verify its own

A is SGLang's allocation per decode step. The host takes the same slots at the request's first decode step; taking
them one step earlier changes no total. The pools of all stages stay equal, so all reserve or none does.
"""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens

from ..core.upload import index_tensor, on_device
from .rows import sampling_rows


def reserve_draft_slots(batch: ScheduleBatch) -> bool:
    """Reserve for the rows of an extend ``batch`` that finish their prompt; False (nothing taken) if KV is short.

    Without a reserve those requests get no drafts from this step, only their first token.
    """
    rows = [i for i, samples in enumerate(sampling_rows(batch)) if samples]
    if not rows or not batch.check_decode_mem(selected_indices=rows):
        return False
    reqs = [batch.reqs[i] for i in rows]
    current, wanted, missing = page_aligned_decode_alloc_lens(
        reqs, reserve=get_alloc_reserve_per_decode(), page_size=batch.token_to_kv_pool_allocator.page_size
    )
    current_cpu, wanted_cpu = (torch.tensor(lens, dtype=torch.int32) for lens in (current, wanted))
    device = torch.device(batch.device)
    take = index_tensor(rows, device)
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=reqs,
        req_pool_indices=batch.req_pool_indices[take],
        cur_kv_lens=on_device(current_cpu, device),
        cur_kv_lens_cpu=current_cpu,
        nxt_kv_lens=on_device(wanted_cpu, device),
        nxt_kv_lens_cpu=wanted_cpu,
        num_needed_tokens=missing,
        batch=batch,
    )
    return True
