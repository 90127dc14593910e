"""Layer kernels on the CPU: RMS norm, gated SiLU, rotary embedding."""

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
