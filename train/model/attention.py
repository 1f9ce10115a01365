"""Causal attention over (batch, heads, time, head_dim): PyTorch's fused kernel, or our own blocks on CPUs.

Special here:
- In bf16 on CPUs PyTorch's fused backward takes 4 times as long as batched products. So at short context the softmax
  is kept and the derivative written out (`_BlockAttention`).
- With a mask the fused kernel computes the whole square, so on CPUs it gets blocks of queries with the keys they see.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hardware import on_gpu
from .shape import LONGEST_KEPT, query_block, visible_blocks


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Return the position in its row where each token's document starts, (batch, time) int32.

    Args:
        tokens: (batch, time) ids.
        end: id of a document's last token. A row also starts a document.
    """
    position = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    begins = torch.zeros_like(tokens, dtype=torch.int32)
    begins[:, 1:] = (tokens[:, :-1] == end) * position[1:]
    return begins.cummax(dim=1).values


def first_visible(tokens: Tensor, first: Tensor | None, window: int | None) -> Tensor | None:
    """Return the first position that each query sees, (batch, time) int32, or None if all see from 0 on.

    Args:
        tokens: (batch, time, …); only its shape and device are read.
        first: (batch, time) int32 from `document_starts`; None: 0.
        window: maximum number of tokens that a query sees, itself included; None: no limit.
    """
    batch, time = tokens.shape[:2]
    if window is None or window >= time:
        return first
    begins = torch.arange(1 - window, time - window + 1, dtype=torch.int32, device=tokens.device).clamp_(min=0)
    return begins.expand(batch, time) if first is None else torch.maximum(first, begins)


def visible_mask(first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores, (batch, 1, time, time): 0 if query i sees key j (first[i] <= j <= i), else -inf.

    If all rows of `first` (batch, time) share memory, so do the mask's.
    """
    rows = first[:1] if first.stride(0) == 0 else first
    position = torch.arange(first.shape[1], dtype=first.dtype, device=first.device)
    hidden = (position < rows[:, :, None]) | (position > position[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype, device=first.device).masked_fill_(hidden, float("-inf"))
    return mask[:, None].expand(len(first), 1, -1, -1)


class _BlockAttention(torch.autograd.Function):
    """softmax(Q K^T) V in blocks of queries, each with the keys that it can see; Q is already scaled.

    Q, K and V are (batch * heads, time, head_dim). The mask, (batch, 1, time, time), is added to the scores. It
    must hide all keys before the window.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block: int,
        batch: int = 1,
        mask: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        time = query.shape[1]
        # Hides later keys in the block on the diagonal.
        ahead = torch.full((block, block), float("-inf"), dtype=query.dtype, device=query.device).triu_(1)
        out, weights = torch.empty_like(query), []
        blocks = visible_blocks(time, block, None if mask is None else window)
        for low, start, end in blocks:
            scores = torch.bmm(query[:, start:end], key[:, low:end].transpose(1, 2))
            if mask is None:
                scores[:, :, start:] += ahead[: end - start, : end - start]
            else:
                scores.view(batch, -1, end - start, end - low).add_(mask[:, :, start:end, low:end])
            weights.append(torch.softmax(scores, dim=-1))
            out[:, start:end] = torch.bmm(weights[-1], value[:, low:end])
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, *weights)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        query, key, value, *saved = ctx.saved_tensors
        grad = grad.contiguous()
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for (low, start, end), weights in zip(ctx.blocks, saved, strict=True):
            d_weights = torch.bmm(grad[:, start:end], value[:, low:end].transpose(1, 2))
            # One pass over memory instead of three.
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_query[:, start:end] = torch.bmm(d_scores, key[:, low:end])
            d_key[:, low:end].baddbmm_(d_scores.transpose(1, 2), query[:, start:end])
            d_value[:, low:end].baddbmm_(weights.transpose(1, 2), grad[:, start:end])
        return d_query, d_key, d_value, None, None, None, None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return softmax(Q K^T / sqrt(head_dim) + mask) V, (batch, heads, time, head_dim).

    Args:
        key, value: (batch, kv_heads, time, head_dim); each serves heads / kv_heads query heads.
        mask: (batch, 1, time, time) from `visible_mask`; None: a query sees all keys up to its own.
        window: the mask's window, used to skip hidden blocks of keys.
    """
    batch, heads, time, head_dim = query.shape
    on_cpu, keeps_softmax = not on_gpu(query), query.dtype == torch.bfloat16 and time <= LONGEST_KEPT
    if on_cpu and keeps_softmax and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        scaled = (query * head_dim**-0.5, _repeated(key, heads), _repeated(value, heads))
        flat = (x.reshape(batch * heads, time, head_dim) for x in scaled)
        return _BlockAttention.apply(*flat, query_block(time), batch, mask, window).view(query.shape)
    if mask is None or not on_cpu:
        return _fused(query, key, value, mask)
    blocks = visible_blocks(time, query_block(time), window)
    parts = [
        _fused(query[:, :, start:end], key[:, :, low:end], value[:, :, low:end], mask[:, :, start:end, low:end])
        for low, start, end in blocks
    ]
    # The kernel returns memory in (batch, time, heads) order; concatenating along time keeps it.
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], dim=1).transpose(1, 2)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    grouped = query.shape[1] > key.shape[1]
    # On GPUs fused kernels take fewer key/value heads than query heads only in bf16 and fp16 without a mask.
    if grouped and on_gpu(query) and (mask is not None or query.dtype not in (torch.bfloat16, torch.float16)):
        key, value, grouped = _repeated(key, query.shape[1]), _repeated(value, query.shape[1]), False
    causal = mask is None
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
