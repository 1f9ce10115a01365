"""Softmax, loss and its derivative by the logits, for some rows: the kernel for `loss.cross_entropy_reference`.

One program per row reads the vocabulary once for the maximum and the sum of exponentials (online), and once more to
overwrite the logits with the derivative.

Online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867. In place: Hsu et al. 2024 (Liger), arXiv 2410.10989.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import CUDA

LONGEST_BLOCK = 8192  # maximum columns that a program holds at a time; 16 per thread, chosen by hand


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, z_loss: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the losses (n,), and the logits, overwritten by `scale` times the losses' derivative unless `scale` is 0.

    The logits are (n, V) with contiguous rows.
    """
    return cross_entropy_(logits, targets, vocab_size, z_loss, scale), logits


@torch.library.custom_op("isoflop::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, z_loss: float, scale: float) -> Tensor:
    """Return losses (n,), fp32. Unless `scale` is 0, `scale` times their derivative overwrites the logits (n, V)."""
    count, columns = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(columns), LONGEST_BLOCK)
    arguments = (logits, logits.stride(0), targets, targets.stride(0), losses, vocab_size, columns, z_loss, scale)
    options = {"SLOPE": scale != 0, "BLOCK": block, "num_warps": max(1, block // 512)}
    CUDA.launch(_rows, count, logits, *arguments, **options)
    return losses


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, vocab_size: int, z_loss: float, scale: float) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    targets,
    target_stride,
    losses,
    vocab_size,
    columns,
    z_loss,
    scale,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row * target_stride)
    hit = tl.load(logits + target).to(tl.float32)  # before the derivative overwrites it
    lane = tl.arange(0, BLOCK)
    top, total = -float("inf"), 0.0
    for start in range(0, vocab_size, BLOCK):
        z = tl.load(logits + start + lane, mask=start + lane < vocab_size, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    lse = top + tl.log(total)
    tl.store(losses + row, lse - hit + z_loss * lse * lse)
    if SLOPE:
        pull = scale * (1.0 + 2.0 * z_loss * lse)
        for start in range(0, columns, BLOCK):
            column = start + lane
            z = tl.load(logits + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
            slope = tl.exp(z - lse) * pull - tl.where(column == target, scale, 0.0)
            # Explicit, because a NaN in lse must not reach the padding.
            slope = tl.where(column < vocab_size, slope, 0.0)
            tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < columns)
