"""Causal attention over (batch, heads, time, head_dim): PyTorch's fused kernel, or our own blocks for bf16 on CPUs.

PyTorch's fused backward for CPUs takes 4 times as long in bf16 as batched products do, so while a CPU trains in bf16 at
short context the softmax is kept and the derivative written out (`_BlockAttention`).

Rotary positions use the half-split layout (Su et al. 2021, as in GPT-NeoX and Llama checkpoints), in one autograd
Function: the backward of a rotation is the rotation by the opposite angle, so nothing but the angles is saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import LONGEST_KEPT, query_block


def rotary_angles(
    length: int, head_dim: int, theta: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each (length, head_dim / 2), fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows times (cos, cos), plus swapped rows times (-sin, sin): by halves CPUs take 2 to 3 times as long."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * torch.cat((cos, cos), dim=-1), swapped, torch.cat((-sin, sin), dim=-1))


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
    """Rotates x (batch, time, heads, head_dim) by its position; cos, sin (time, head_dim / 2), cast to x's type."""
    # The compiler fuses the plain expression and its derivative.
    return _rotate(x, cos, sin) if torch.compiler.is_compiling() else _Rotary.apply(x, cos, sin)


class _BlockAttention(torch.autograd.Function):
    """softmax(Q K^T) V in blocks of queries, each against the keys up to its own end; Q is scaled already.

    With P the weights of a block: dV += P^T dO, dP = dO V^T, dS = softmax'(dP), dQ = dS K, dK += dS^T Q.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, block: int) -> Tensor:  # type: ignore[no-untyped-def]
        time = query.shape[1]
        ahead = torch.full((block, block), float("-inf"), dtype=query.dtype, device=query.device).triu_(1)
        out, kept = torch.empty_like(query), []
        for start in range(0, time, block):
            end = min(start + block, time)
            scores = torch.bmm(query[:, start:end], key[:, :end].transpose(1, 2))
            scores[:, :, start:] += ahead[: end - start, : end - start]
            kept.append(torch.softmax(scores, dim=-1))
            out[:, start:end] = torch.bmm(kept[-1], value[:, :end])
        ctx.block = block
        ctx.save_for_backward(query, key, value, *kept)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        query, key, value, *kept = ctx.saved_tensors
        grad = grad.contiguous()
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for index, weights in enumerate(kept):
            start = index * ctx.block
            end = start + weights.shape[1]
            d_weights = torch.bmm(grad[:, start:end], value[:, :end].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_query[:, start:end] = torch.bmm(d_scores, key[:, :end])
            d_key[:, :end].baddbmm_(d_scores.transpose(1, 2), query[:, start:end])
            d_value[:, :end].baddbmm_(weights.transpose(1, 2), grad[:, start:end])
        return d_query, d_key, d_value, None


def _blocks_pay(query: Tensor) -> bool:
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and torch.is_grad_enabled()
        and query.shape[2] <= LONGEST_KEPT
        and not torch.compiler.is_compiling()
    )


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
    if not _blocks_pay(query):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    batch, heads, time, head_dim = query.shape
    query, key, value = (x.reshape(batch * heads, time, head_dim) for x in (query * head_dim**-0.5, key, value))
    return _BlockAttention.apply(query, key, value, query_block(time)).view(batch, heads, time, head_dim)
