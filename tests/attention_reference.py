"""Attention in plain PyTorch: the definition with which kernels are compared."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention in the dtype of query: (output like `flash_attention`, lse (batch, heads, time))."""
    groups, time = query.shape[2] // key.shape[2], query.shape[1]
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    positions = torch.arange(time, device=query.device)
    visible = positions[None, :] <= positions[:, None]
    if window is not None:
        visible = visible & (positions[None, :] > positions[:, None] - window)
    if first is not None:
        visible = visible & (positions >= first[:, None, :, None])
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value), scores.logsumexp(-1)
