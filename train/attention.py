"""Causal attention over (batch, heads, time, head_dim), through PyTorch's fused kernel.

Rotary positions use the half-split layout (Su et al. 2021, as in GPT-NeoX and Llama checkpoints), in one autograd
Function: the backward of a rotation is the rotation by the opposite angle, so nothing but the angles is saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_angles(
    length: int, head_dim: int, theta: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each (length, head_dim / 2), fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class _Rotary(torch.autograd.Function):
    """y = R(position) x; dx = R(-position) dy."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (batch, time, heads, head_dim) by its position; cos, sin (time, head_dim / 2)."""
    return _Rotary.apply(x, cos[:, None].to(x.dtype), sin[:, None].to(x.dtype))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax(Q K^T / sqrt(head_dim)) V under a causal mask.

    Args:
        query: (batch, heads, time, head_dim).
        key, value: (batch, kv_heads, time, head_dim); each serves heads / kv_heads query heads.

    Returns:
        (batch, heads, time, head_dim).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
