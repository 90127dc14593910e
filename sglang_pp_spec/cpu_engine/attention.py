"""Paged attention on the CPU, for prefill, draft-tree verify, draft extend and decode.

K and V of a token live in the slot that ``req_to_token`` names for its position. The *extend* part of a
request is the ``q_len`` tokens this forward computes, behind ``prefix_len`` cached ones:

    positions   [0, prefix_len)              [prefix_len, prefix_len + q_len)
    keys from   the KV buffer                the forward itself, or the buffer
    visible     to every query               causal, or by the ``[q_len, q_len]`` tree mask

Decode is the case ``q_len == 1``. Requests of equal ``q_len`` are computed together, with the prefix
padded to the longest one.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionRule:
    """What is the same for every request of a call."""

    scale: float
    logit_cap: float  # 0 = none; otherwise scores become cap * tanh(score / cap)
    window: int  # 0 or less = none; otherwise a query sees the last ``window`` keys, itself included
    sinks: torch.Tensor | None  # [num_heads], one extra score per head that takes weight and adds nothing
    causal: bool


def extend_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k_extend: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim], None: already in the buffer
    v_extend: torch.Tensor | None,  # [num_tokens, num_kv_heads, v_head_dim]
    out: torch.Tensor,  # [num_tokens, num_heads, v_head_dim], out
    k_buffer: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
    v_buffer: torch.Tensor,  # [num_slots, num_kv_heads, v_head_dim]
    req_to_token: torch.Tensor,  # [num_rows, max_len]
    req_pool_indices: torch.Tensor,  # [bs]
    seq_lens: torch.Tensor,  # [bs] prefix and extend part together
    extend_seq_lens: torch.Tensor,  # [bs]
    extend_start_loc: torch.Tensor,  # [bs] first token of the request in ``q``
    rule: AttentionRule,
    tree_mask: torch.Tensor | None = None,  # [bs * q_len * q_len] bool, all requests of equal q_len
) -> None:
    """Attention of the extend part of every request over its prefix and itself."""
    tree = _square_masks(tree_mask, extend_seq_lens)
    prefix_lens = (seq_lens - extend_seq_lens).to(torch.int64)
    for q_len in sorted(set(extend_seq_lens.tolist()) - {0}):
        rows = (extend_seq_lens == q_len).nonzero().flatten()
        tokens = extend_start_loc[rows].to(torch.int64)[:, None] + torch.arange(q_len)
        prefix = prefix_lens[rows]
        width = int(prefix.max()) + q_len
        slots = req_to_token[req_pool_indices[rows].to(torch.int64), :width].to(torch.int64)
        prefix_slots = _inside(slots[:, : width - q_len], prefix)
        if k_extend is None or v_extend is None:
            own_slots = slots.gather(1, prefix[:, None] + torch.arange(q_len))
            own_k, own_v = k_buffer[own_slots], v_buffer[own_slots]
        else:
            own_k, own_v = k_extend[tokens], v_extend[tokens]
        k = torch.cat((k_buffer[prefix_slots], own_k), dim=1)
        v = torch.cat((v_buffer[prefix_slots], own_v), dim=1)
        visible = visibility(prefix, q_len, rule, None if tree is None else tree[rows])
        out[tokens] = attend(q[tokens], k.to(q.dtype), v.to(q.dtype), visible, rule)


def decode_attention(
    q: torch.Tensor,  # [bs, num_heads, head_dim]
    k_buffer: torch.Tensor,  # [num_slots, num_kv_heads, head_dim], in and out
    v_buffer: torch.Tensor,  # [num_slots, num_kv_heads, v_head_dim], in and out
    out: torch.Tensor,  # [bs, num_heads, v_head_dim], out
    k_new: torch.Tensor | None,  # [bs, num_kv_heads, head_dim], None: already in the buffer
    v_new: torch.Tensor | None,
    loc: torch.Tensor,  # [bs] slot of the new token
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,  # [bs] the new token included
    rule: AttentionRule,
) -> None:
    """Store the new token's K and V, then attend to the whole sequence."""
    if k_new is not None and v_new is not None:
        k_buffer[loc] = k_new.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v_new.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    slots = req_to_token[req_pool_indices.to(torch.int64), : int(seq_lens.max())].to(torch.int64)
    slots = _inside(slots, seq_lens)
    visible = visibility(seq_lens - 1, 1, rule, None, num_keys=slots.shape[1])
    k, v = k_buffer[slots].to(q.dtype), v_buffer[slots].to(q.dtype)
    out.copy_(attend(q[:, None], k, v, visible, rule)[:, 0])


def visibility(
    prefix_lens: torch.Tensor, q_len: int, rule: AttentionRule, tree: torch.Tensor | None, num_keys: int = 0
) -> torch.Tensor:
    """Which key column each query sees, ``[bs, q_len, num_keys]`` bool.

    Columns are the padded prefix followed by the extend part. With ``num_keys`` given the columns are
    plain positions instead (decode, where the new token sits among the cached ones).
    """
    query = prefix_lens[:, None] + torch.arange(q_len)  # positions, [bs, q_len]
    if num_keys:
        key = torch.arange(num_keys).expand(len(prefix_lens), num_keys)
        visible = key[:, None, :] <= query[:, :, None]
    else:
        padded = torch.arange(int(prefix_lens.max()))
        key = torch.cat((padded.expand(len(prefix_lens), -1), query), dim=1)
        cached = (padded < prefix_lens[:, None])[:, None, :].expand(-1, q_len, -1)
        visible = torch.cat((cached, _own_part(len(prefix_lens), q_len, rule, tree)), dim=2)
    if rule.window > 0:
        visible = visible & (query[:, :, None] - key[:, None, :] < rule.window)
    return visible


def _own_part(batch_size: int, q_len: int, rule: AttentionRule, tree: torch.Tensor | None) -> torch.Tensor:
    if tree is not None:
        return tree
    square = torch.ones(q_len, q_len, dtype=torch.bool)
    return (square.tril() if rule.causal else square).expand(batch_size, -1, -1)


def attend(
    q: torch.Tensor,  # [bs, q_len, num_heads, head_dim]
    k: torch.Tensor,  # [bs, num_keys, num_kv_heads, head_dim]
    v: torch.Tensor,  # [bs, num_keys, num_kv_heads, v_head_dim]
    visible: torch.Tensor,  # [bs, q_len, num_keys] bool, at least one key per query
    rule: AttentionRule,
) -> torch.Tensor:
    """Grouped-query softmax attention, ``[bs, q_len, num_heads, v_head_dim]``."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = visible[:, None]
    if rule.logit_cap <= 0 and rule.sinks is None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=groups > 1
        )
        return attended.transpose(1, 2)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(2, 3)).float() * rule.scale
    if rule.logit_cap > 0:
        scores = rule.logit_cap * torch.tanh(scores / rule.logit_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        sink = rule.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2)


def _inside(slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``slots`` with the cells beyond each row's length set to slot 0, the host's padding slot.

    Cells beyond the length hold whatever an earlier request left there; gathered keys are masked, but a
    NaN left in a freed slot would survive the mask.
    """
    return torch.where(torch.arange(slots.shape[1]) < lengths[:, None], slots, 0)


def _square_masks(tree_mask: torch.Tensor | None, q_lens: torch.Tensor) -> torch.Tensor | None:
    if tree_mask is None:
        return None
    batch_size, q_len = q_lens.shape[0], int(q_lens[0])
    return tree_mask[: batch_size * q_len * q_len].view(batch_size, q_len, q_len).to(torch.bool)
