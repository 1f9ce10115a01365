"""The parts of a decoder block, shared by training, inference and tensor parallelism.

PyTorch does not fuse norm, rotation and SwiGLU on CPUs, so their derivatives are here. The compiler gets expressions
that it fuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RopeScaling
from ..hardware import on_gpu

Turn = tuple[Tensor, Tensor]


def widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm (Zhang and Sennrich 2019), with weight (w,), along the last dimension of x."""
    if on_gpu(x) or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean x^2 + eps)^-1/2, computed in fp32 for any type of x.

    With u = x r: dw = sum dy u, dx = r (dy w - u mean(dy w u)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = widened(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit, grad, factor = widened(x) * scale, widened(grad), widened(weight)
        slopes = (grad * unit).reshape(-1, x.shape[-1])
        mean = torch.mv(slopes, factor).div_(x.shape[-1]).view(scale.shape)
        dx = (grad * factor).addcmul_(unit, mean, value=-1).mul_(scale)
        return dx.to(x.dtype), slopes.sum(0).to(weight.dtype), None


def rotary_angles(
    length: int,
    head_dim: int,
    theta: float,
    device: torch.device | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position times frequency theta^(-2 i / head_dim), each (length, head_dim / 2), fp32.

    With `scaling`, for long contexts, slow frequencies are lowered, and the results multiplied by `scaling.amplitude`.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    if scaling is not None:
        unscaled = _unscaled_share(frequencies, theta, scaling)
        frequencies = frequencies * (unscaled + (1 - unscaled) / scaling.factor)
    # float64: in fp32 the angle at position 131,072 would be off by up to 0.004 radians.
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequencies)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()


def _unscaled_share(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return per frequency (d / 2,) the share that is not divided by `scaling.factor`: 0 if slow, 1 if fast.

    In between it is linear: for llama3 in the turns within the original context (Llama 3.1), for yarn in the
    frequency's index (Peng et al. 2023, arXiv 2309.00071, section 3.2), with bounds rounded as in transformers.
    """
    if scaling.kind == "llama3":
        turns = frequencies * scaling.length / (2 * math.pi)
        return ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
    head_dim = 2 * len(frequencies)

    def pair(turns: float) -> float:
        return head_dim * math.log(scaling.length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(pair(scaling.fast)), 0), min(math.ceil(pair(scaling.slow)), head_dim - 1)
    numbers = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    # If the bounds are equal, the ramp is a step; 0.001 avoids a division by zero.
    return 1 - ((numbers - first) / (last - first if last != first else 0.001)).clamp(0, 1)


def rotary_turn(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Turn:
    """Return cos and sin (time, d / 2) in the form that `rotated` reads, each (time, 1, d)."""
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotated(x: Tensor, turn: Turn, sign: int = 1) -> Tensor:
    """Rotate x (…, time, heads, d) by the result of `rotary_turn`, in Llama's half-split layout (Su et al. 2021).

    `sign` -1 rotates back.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * turn[0], torch.cat((second, first), dim=-1), turn[1], value=sign)


class _Rotary(torch.autograd.Function):
    """y = R(position) x; dx = R(-position) dy, so only the angles are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, (cos, sin))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rotated(grad, ctx.saved_tensors, sign=-1), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x by cos and sin from `rotary_turn`, which all blocks share."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return rotated(x, (cos, sin))
    return _Rotary.apply(x, cos, sin)


def query_key_value(
    products: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Callable[[Tensor], Tensor], ...],
    rotate: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused product (…, heads + 2 kv_heads, d) into query, key and value, and rotate query and key.

    `norms`: for queries and keys, applied before the rotation; may be empty.
    """
    if norms:
        query, key, value = products.split((heads, kv_heads, kv_heads), dim=-2)
        return rotate(norms[0](query)), rotate(norms[1](key)), value
    # Queries and keys turn by the same angles: one rotation serves both.
    both, value = products.split((heads + kv_heads, kv_heads), dim=-2)
    query, key = rotate(both).split((heads, kv_heads), dim=-2)
    return query, key, value


def gated(x: Tensor) -> Tensor:
    """Return silu(gate) * up, (…, h), with gate and up the halves of x (…, 2 h); not differentiable."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # The compiler cannot trace writes into halves of a tensor.
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return gated(x) if torch.is_inference_mode_enabled() else SwiGLU.apply(x)


class SwiGLU(torch.autograd.Function):
    """y = silu(gate) * up; saves only x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gated(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, dim=-1)  # views, so both halves are written in place
        torch.mul(grad, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, up), gate, grad_input=d_gate)
        return dx


def lookup(tokens: Tensor, table: Tensor) -> Tensor:
    return _Lookup.apply(tokens, table)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.rows = len(table)
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, table_gradient(grad, tokens, ctx.rows)


def table_gradient(grad: Tensor, tokens: Tensor, rows: int, left_out: int = -1) -> Tensor:
    """Return an embedding table's gradient, (rows, width), from `grad` (…, width) of the output for `tokens` (…).

    Tokens equal to `left_out` are ignored. CPUs sum in at least fp32: in bf16 a sum would stop growing early.
    """
    wide = grad if on_gpu(grad) else widened(grad)
    return torch.ops.aten.embedding_dense_backward(wide, tokens, rows, left_out, False).to(grad.dtype)
