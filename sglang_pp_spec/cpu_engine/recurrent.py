"""Gated delta rule and causal convolution on the CPU: prefill, and the verify of a draft tree.

A request's state is ``h`` [num_v_heads, v_dim, k_dim] and the last ``width - 1`` inputs of the convolution. With
``decay = exp(g)`` and keys and queries of length 1, per token::

    h = decay * h;   h += beta * (v - h k) k^T;   out = h q / sqrt(k_dim)

A verify leaves ``h`` as it is and writes the state *after* every node of the tree to the request's row of a scratch
buffer, from which the accepted one is taken later. The convolution's own state it does overwrite, as SGLang's GPU
kernel does: whoever does not take the accepted one back goes on from a wrong one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

CHUNK = 64  # tokens between the states a prefill hands out, as SGLang's kernels do


def gating(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta), both [1, num_tokens, num_v_heads] float32, of projections ``a`` and ``b`` [num_tokens, heads]."""
    g = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def delta_rule_extend(
    q: Tensor,  # [1, num_tokens, num_k_heads, k_dim]
    k: Tensor,
    v: Tensor,  # [1, num_tokens, num_v_heads, v_dim]
    g: Tensor,  # [1, num_tokens, num_v_heads] float32, logarithm of the decay
    beta: Tensor,  # [1, num_tokens, num_v_heads] float32
    states: Tensor,  # [num_slots, num_v_heads, v_dim, k_dim], in and out
    slots: Tensor,  # [bs]
    starts: Tensor,  # [bs + 1] first token of each request
) -> tuple[Tensor, Tensor]:
    """Requests go on from their slots' states and leave their new ones there.

    Returns the outputs, [1, num_tokens, num_v_heads, v_dim], and the states before every ``CHUNK`` tokens of every
    request, [1, num_chunks, num_v_heads, v_dim, k_dim].
    """
    out, before_chunks = torch.empty_like(v), []
    bounds = starts.tolist()
    for i, slot in enumerate(slots.tolist()):
        state = states[slot].float()
        for token in range(bounds[i], bounds[i + 1]):
            if (token - bounds[i]) % CHUNK == 0:
                before_chunks.append(state)
            state, out[0, token] = delta_step(
                state, q[0, token], k[0, token], v[0, token], g[0, token], beta[0, token]
            )
        states[slot] = state.to(states.dtype)
    return out, torch.stack(before_chunks).unsqueeze(0)


def delta_rule_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,  # [num_slots, num_v_heads, v_dim, k_dim], only read
    slots: Tensor,
    starts: Tensor,
    after: Tensor,  # [num_scratch_rows, num_nodes, num_v_heads, v_dim, k_dim], out: the state after every node
    scratch_rows: Tensor,  # [bs or more]
    parents: Tensor | None,  # [bs, num_nodes], None: a chain
) -> Tensor:
    """The outputs for the nodes of every request's tree, each from its parent's state."""
    out = torch.empty_like(v)
    bounds = starts.tolist()
    for i, (slot, row) in enumerate(zip(slots.tolist(), scratch_rows.tolist(), strict=False)):
        for node in range(bounds[i + 1] - bounds[i]):
            parent = node - 1 if parents is None else int(parents[i, node])
            state = states[slot] if node == 0 else after[row, parent]
            token = bounds[i] + node
            state, out[0, token] = delta_step(
                state.float(), q[0, token], k[0, token], v[0, token], g[0, token], beta[0, token]
            )
            after[row, node] = state.to(after.dtype)
    return out


def delta_step(
    state: Tensor,  # [num_v_heads, v_dim, k_dim] float32
    q: Tensor,  # [num_k_heads, k_dim]
    k: Tensor,
    v: Tensor,  # [num_v_heads, v_dim]
    g: Tensor,  # [num_v_heads]
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """(state after one token, its output [num_v_heads, v_dim]); consecutive value heads share a key head."""
    shared = v.shape[0] // k.shape[0]
    q, k = (_unit(x.float()).repeat_interleave(shared, dim=0).unsqueeze(-1) for x in (q, k))
    state = state * g.float().exp()[:, None, None]
    change = beta.float()[:, None, None] * (v.float().unsqueeze(-1) - state @ k)
    state = state + change @ k.transpose(1, 2)
    return state, (state @ q).squeeze(-1).to(v.dtype) * k.shape[1] ** -0.5


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolve_extend(
    x: Tensor,  # [dim, num_tokens]
    weight: Tensor,  # [dim, width]
    bias: Tensor | None,  # [dim]
    activation: str | None,
    states: Tensor,  # [num_slots, dim, width - 1], in and out: the last inputs of each request
    has_state: Tensor,  # [bs] bool, False: the request starts from zeros
    slots: Tensor,  # [bs]
    starts: Tensor,  # [bs + 1]
) -> Tensor:
    """[dim, num_tokens] depthwise causal convolution of every request's tokens behind its earlier ones."""
    out = torch.empty_like(x)
    bounds = starts.tolist()
    for i, slot in enumerate(slots.tolist()):
        before = states[slot].to(x.dtype) if has_state[i] else torch.zeros_like(states[slot], dtype=x.dtype)
        inputs = torch.cat((before, x[:, bounds[i] : bounds[i + 1]]), dim=1)
        windows = inputs.unfold(1, weight.shape[1], 1)  # [dim, tokens, width]
        out[:, bounds[i] : bounds[i + 1]] = _activated((windows * weight[:, None]).sum(-1), bias, activation)
        states[slot] = inputs[:, inputs.shape[1] - states.shape[2] :].to(states.dtype)
    return out


def convolve_nodes(
    x: Tensor,  # [bs, dim, num_nodes]
    states: Tensor,  # [num_slots, dim, width - 1], in and out
    weight: Tensor,  # [dim, width]
    bias: Tensor | None,
    activation: str | None,
    slots: Tensor,  # [bs]
    windows: Tensor | None = None,  # [num_scratch_rows, num_nodes, dim, width - 1], out: last inputs after every node
    scratch_rows: Tensor | None = None,  # [bs]
    parents: Tensor | None = None,  # [bs, num_nodes], None: a chain
) -> Tensor:
    """[bs, dim, num_nodes]: every node behind its ancestors. The slots' own states end behind the last node."""
    out = torch.empty_like(x)
    num_nodes, kept = x.shape[2], states.shape[2]
    for i, slot in enumerate(slots.tolist()):
        before = states[slot].to(x.dtype)
        after: list[Tensor] = []
        for node in range(num_nodes):
            parent = node - 1 if parents is None else int(parents[i, node])
            window = torch.cat((before if node == 0 else after[parent], x[i, :, node : node + 1]), dim=1)
            out[i, :, node] = _activated((window * weight).sum(-1), bias, activation)
            after.append(window[:, 1:])
            if windows is not None and scratch_rows is not None:
                windows[scratch_rows[i], node] = after[node].to(windows.dtype)
        states[slot] = torch.cat((before, x[i]), dim=1)[:, -kept:].to(states.dtype)
    return out


def _activated(x: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        x = x + (bias if x.dim() == 1 else bias[:, None])
    return silu(x) if activation in ("silu", "swish") else x


def parents_of_nodes(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """[bs, num_nodes]: the parent of every node of trees given as links; -1 = none. The root's is 0."""
    parents = torch.zeros_like(first_child)
    rows = torch.arange(first_child.shape[0])
    for node in range(first_child.shape[1]):
        child, sibling = first_child[:, node], next_sibling[:, node]
        parents[rows[child >= 0], child[child >= 0]] = node
        parents[rows[sibling >= 0], sibling[sibling >= 0]] = parents[sibling >= 0, node]
    return parents


def take_steps(
    kept: Tensor,  # [num_layers, num_slots, ...], in and out
    per_step: Tensor,  # [num_layers, num_scratch_rows, num_nodes, ...]
    slots: Tensor,  # [bs]
    steps: Tensor,  # [bs] node whose state is kept, -1 = none
    scratch_rows: Tensor | None,  # [bs], None: the batch's rows
) -> None:
    """Copy each request's state after its last accepted node over the one it keeps.

    A slot below 0 is always passed over here; SGLang's kernel does so where it is asked to.
    """
    rows = torch.arange(len(steps)) if scratch_rows is None else scratch_rows.to(torch.int64)
    valid = (steps >= 0) & (slots >= 0)
    rows, steps, slots = rows[valid], steps.to(torch.int64)[valid], slots.to(torch.int64)[valid]
    kept[:, slots] = per_step[:, rows, steps].to(kept.dtype)
