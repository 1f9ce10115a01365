"""FlashAttention in Triton: causal, with packed documents and windows, for grouped queries, any length.

Special here:
- Query i sees the keys first[i] <= j <= i, or up to i + ahead if the keys are those of other tokens
  (`parallel/context.py`). `first` is the start of i's document, or the window's if that is later, so it never decreases
  along a row. Blocks that no query sees are never loaded.
- The kernels are `torch.library` custom ops: compile and recompute see one op that saves q, k, v, its output and one
  number per row.

FlashAttention-2 (Dao 2023, arXiv 2307.08691); grouped queries (Ainslie et al. 2023, arXiv 2305.13245).
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..hardware import on_gpu

HEAD_DIMS = (16, 32, 64, 96, 128, 256)  # multiples of 16, as tl.dot needs; `flash_blocks.py` has sizes for each
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, first: Tensor | None = None) -> Tensor:
    """Return softmax(Q K^T / sqrt(d)) V over the keys that each query sees: first[i] <= j <= i.

    Args:
        query: (batch, time, heads, d), bf16, fp16 or fp32, d in HEAD_DIMS, the last dimension contiguous.
        key, value: (batch, time, kv_heads, d), the same type; a KV head serves heads / kv_heads adjacent query heads.
        first: (batch, time) int32, the first position that each query sees: at most its own, and never decreasing along
            a row (unchecked). None: 0.

    Returns:
        (batch, time, heads, d), contiguous.

    Raises:
        UserError: a shape, type or device that the kernel does not support.
    """
    _check(query, key, value, first)
    out: Tensor = torch.ops.isoflop.flash_forward(query, key, value, first, query.shape[-1] ** -0.5)[0]
    return out


def _check(query: Tensor, key: Tensor, value: Tensor, first: Tensor | None) -> None:
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise UserError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must be (batch, time, "
            "heads, head size), with the same shape for key and value."
        )
    batch, time, heads, head_dim = query.shape
    if head_dim not in HEAD_DIMS:
        raise UserError(f"head size {head_dim} is not supported; it must be one of {', '.join(map(str, HEAD_DIMS))}.")
    if key.shape[:2] != (batch, time) or key.shape[3] != head_dim or not time:
        raise UserError(
            f"key {tuple(key.shape)} must have the batch, time and head size of query, {(batch, time, head_dim)}, with "
            "a time of at least 1."
        )
    if heads % key.shape[2]:
        raise UserError(f"heads {heads} must be a multiple of kv_heads {key.shape[2]}.")
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        raise UserError(
            f"query {query.dtype}, key {key.dtype} and value {value.dtype} must be of one type, bfloat16, float16 or "
            "float32."
        )
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise UserError("query, key and value must be contiguous in their last dimension.")
    if first is not None and (first.shape != (batch, time) or first.dtype != torch.int32):
        raise UserError(
            f"first {tuple(first.shape)} of {first.dtype} must be {(batch, time)} of torch.int32: one position per "
            "query."
        )


def _require_triton(x: Tensor) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError("attention ours needs the package triton, which is not installed; install it, or use sdpa.")
    if not on_gpu(x) and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"attention ours needs tensors on a CUDA device, not on {x.device}; sdpa runs on any device.")


def _by_rows(first: Tensor | None) -> Tensor | None:
    return first if first is None or first.stride(1) == 1 else first.contiguous()


@torch.library.custom_op("isoflop::flash_forward", mutates_args=())
def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor | None, scale: float, ahead: int = 0
) -> tuple[Tensor, Tensor]:
    """Return attention's output (batch, time, heads, d), contiguous, and log-sum-exp (batch, heads, time), fp32.

    Query i sees the keys from first[i] (None: 0) to i + ahead.
    """
    _require_triton(query)
    from .flash_forward import forward

    return forward(query, key, value, _by_rows(first), scale, ahead)


@flash_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, time, heads, _ = query.shape
    lse = query.new_empty((batch, heads, time), dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), lse


@torch.library.custom_op(
    "isoflop::flash_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor? first, float scale, int ahead=0) -> (Tensor, Tensor, Tensor)",
)
def flash_backward(grad: Tensor, *forward: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous derivatives of query, key and value, given that of the output, `grad`.

    `forward`: query, key, value, output, log-sum-exp, first, scale and ahead of `flash_forward`.
    """
    query, key, value, out, lse, first, scale, ahead = (*forward, 0)[:8]  # PyTorch omits an `ahead` of 0
    _require_triton(query)
    from .flash_backward import backward

    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    return backward(grad, query, key, value, out, lse, _by_rows(first), scale, ahead)


@flash_backward.register_fake
def _(grad: Tensor, *forward: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in forward[:3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, first, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, first)
    ctx.mark_non_differentiable(output[1])  # the log-sum-exp is only saved


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grads = torch.ops.isoflop.flash_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, None, *[None] * len(ctx.rest)


torch.library.register_autograd("isoflop::flash_forward", _backward, setup_context=_setup)
