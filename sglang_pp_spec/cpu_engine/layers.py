"""Layer kernels on the CPU: RMS norm, gates, rotary embedding."""

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension, computed in float32, in the dtype of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """In place: ``residual += x``, then ``x = rmsnorm(residual)``."""
    residual.add_(x)
    x.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[..., gate | up]``."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotary_embedding(
    positions: torch.Tensor,  # [num_tokens] int64
    query: torch.Tensor,  # [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size]
    key: torch.Tensor,  # the same with the KV heads
    head_size: int,
    cos_sin_cache: torch.Tensor,  # [max_positions, rotary_dim]: cosines, then sines
    is_neox: bool,  # pairs are (i, i + rotary_dim / 2); otherwise (2 i, 2 i + 1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``rotary_dim`` channels of every head; the others pass through."""
    cos, sin = cos_sin_cache[positions.flatten()].to(query.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin, head_size, is_neox), _rotate(key, cos, sin, head_size, is_neox)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int, is_neox: bool) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    heads = x.reshape(cos.shape[0], -1, head_size)
    turned, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if is_neox:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((turned, kept), dim=-1).reshape(x.shape)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """In place: ``x * sigmoid(gate)``."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def qk_norm(
    q: torch.Tensor,  # [num_tokens, num_heads * head_dim]
    k: torch.Tensor,  # [num_tokens, num_kv_heads * head_dim]
    q_weight: torch.Tensor,  # [head_dim], less 1
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of every head of queries and keys, [num_tokens * heads, head_dim]."""
    return (
        rmsnorm(q.reshape(-1, head_dim), 1 + q_weight.float(), eps),
        rmsnorm(k.reshape(-1, head_dim), 1 + k_weight.float(), eps),
    )


def qk_norm_with_gate(
    q_gate: torch.Tensor,  # [num_tokens, num_heads * 2 * head_dim], query and gate of each head
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qk_norm`` and the gates, [num_tokens * num_heads, head_dim]."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q, k = qk_norm(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def split_projections(
    qkvz: torch.Tensor,  # [num_tokens, q | k | v | z]
    ba: torch.Tensor,  # [num_tokens, b | a]
    num_k_heads: int,
    num_v_heads: int,
    k_dim: int,
    v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q | k | v, z [num_tokens, num_v_heads, v_dim], b, a), each contiguous."""
    qkv, z = qkvz.split([2 * num_k_heads * k_dim + num_v_heads * v_dim, num_v_heads * v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_v_heads, v_dim).contiguous(), b.contiguous(), a.contiguous()


def rmsnorm_gated(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """``rmsnorm(x) * silu(gate)``, computed in float32, in the dtype of ``x``."""
    normed = rmsnorm(x.float(), weight, eps)
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)
