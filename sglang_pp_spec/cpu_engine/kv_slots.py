"""Bookkeeping of KV slots and token ids on the CPU: small gathers and scatters over request rows.

``req_to_token`` [num_requests, max_len] int32 is the slot table: the KV slot of each position of each
request. A *segment* is a half-open range ``[start, end)`` of positions of one request; the segments of
a batch are packed one after the other.
"""

import ctypes

import torch


def _segments(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every cell of the packed segments, each ``[sum(ends - starts)]`` int64."""
    lengths = (ends - starts).to(torch.int64)
    first = lengths.cumsum(0) - lengths
    row = rows.to(torch.int64).repeat_interleave(lengths)
    offset = torch.arange(row.shape[0]) - first.repeat_interleave(lengths)
    return row, starts.to(torch.int64).repeat_interleave(lengths) + offset


def write_slots(
    req_pool_indices: torch.Tensor,  # [bs] row of each request
    req_to_token: torch.Tensor,  # slot table, out
    start_offset: torch.Tensor,  # [bs]
    end_offset: torch.Tensor,  # [bs]
    out_cache_loc: torch.Tensor,  # [>= sum(end - start)] slots, packed
    pool_len: int,
) -> None:
    """Enter freshly allocated slots into the table."""
    row, column = _segments(req_pool_indices, start_offset, end_offset)
    req_to_token[row, column] = out_cache_loc[: row.shape[0]].to(req_to_token.dtype)


def read_slots(
    req_pool_indices: torch.Tensor,  # [bs]
    req_to_token: torch.Tensor,  # slot table
    start_offset: torch.Tensor,  # [bs]
    end_offset: torch.Tensor,  # [bs]
    out_cache_loc: torch.Tensor,  # [>= sum(end - start)], out: packed; cells beyond keep their value
    pool_len: int,
) -> None:
    """Copy the slots of each request's segment, packed."""
    row, column = _segments(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: row.shape[0]] = req_to_token[row, column].to(out_cache_loc.dtype)


def read_draft_slots(
    req_pool_indices: torch.Tensor,  # [bs]
    req_to_token: torch.Tensor,  # slot table
    seq_lens: torch.Tensor,  # [bs]
    out_cache_loc: torch.Tensor,  # [bs * topk * num_steps], out: viewed [bs, topk, num_steps]
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Copy the ``topk * num_steps`` slots reserved for drafting behind each committed sequence."""
    column = seq_lens.to(torch.int64)[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.to(torch.int64)[:, None], column]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def draft_slot_table(
    req_to_token: torch.Tensor,  # slot table
    req_pool_indices: torch.Tensor,  # [bs]
    seq_lens: torch.Tensor,  # [bs]
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A slot table with one row per beam: ``[bs * topk, max(seq_lens) + num_steps]`` like ``req_to_token``.

    Beam ``t`` sees the committed prefix and, behind it, its own ``num_steps`` draft slots, which lie at
    columns ``seq_len + t * num_steps`` of the request's row. The attention of draft step ``s`` reads the
    first ``seq_len + s + 1`` columns. Columns beyond a beam's last slot repeat it and are never read.
    """
    seq = seq_lens.to(torch.int64).repeat_interleave(topk)[:, None]
    row = req_pool_indices.to(torch.int64).repeat_interleave(topk)[:, None]
    beam = torch.arange(topk).repeat(seq_lens.shape[0])[:, None]
    width = (int(seq_lens.max()) if seq_lens.numel() else 0) + num_steps
    column = torch.minimum(torch.arange(width), seq + num_steps - 1)
    column = torch.where(column < seq, column, column + beam * num_steps)
    return req_to_token[row, column]


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,  # [bs * accept_stride] int32, accepted tokens of each request from 0
    accept_lens: torch.Tensor,  # [bs] bonus included, so at least 1
    bonus_tokens: torch.Tensor,  # [bs], out
    accept_stride: int,
) -> None:
    """The last accepted token of each request."""
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def pack_accepted_slots(
    accept_index: torch.Tensor,  # [any] flat node indices, -1 = not accepted
    out_cache_loc: torch.Tensor,  # [bs * n] slot of every node
    accept_out_cache_loc: torch.Tensor,  # out: accepted slots first, the rest keeps its value
) -> None:
    """Move the slots of accepted nodes to the front, in order."""
    flat = accept_index.flatten().to(torch.int64)
    slots = out_cache_loc[flat[flat >= 0]]
    accept_out_cache_loc[: slots.shape[0]] = slots.to(accept_out_cache_loc.dtype)


def rotate_input_ids(
    input_ids: torch.Tensor,  # [num_tokens], in and out
    extend_start_loc: torch.Tensor,  # [bs]
    extend_seq_lens: torch.Tensor,  # [bs], a length of 0 is skipped
    topk_index: torch.Tensor,  # [bs] or [bs, 1], the token that enters at the end
    select_index: torch.Tensor | None = None,  # [bs] cell of ``input_ids`` it enters at instead
) -> None:
    """Shift each request's tokens left by one and put the new token at the end."""
    entering = topk_index.flatten().to(input_ids.dtype)
    bounds = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, (start, length) in enumerate(bounds):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[row])
        input_ids[last] = entering[row]


def copy_kv_rows(
    data_ptrs: torch.Tensor,  # [num_buffers] addresses of the K and V buffers of every layer
    strides: torch.Tensor,  # [num_buffers] bytes of one slot
    tgt_loc: torch.Tensor,  # [num_moved]
    src_loc: torch.Tensor,  # [num_moved], may overlap ``tgt_loc``
) -> None:
    """Move KV rows inside every buffer; all sources are read before any target is written."""
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.to(torch.int64), src_loc.to(torch.int64)
    num_rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, row_bytes)
        buffer[target] = buffer[source]
