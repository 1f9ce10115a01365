"""The head's matrix product and the cross-entropy of the next token in one.

With n rows of width w, a vocabulary of V, z = x W^T the logits, p their softmax and c the z-loss:

    lse (n,)   = log sum exp z          L (n,) = lse - z_target + c lse^2
    dz (n, V)  = (1 + 2 c lse) p - onehot,   dx (n, w) = dz W,   dW (V, w) = dz^T x

Logits exist for some rows at a time. In the forward pass dz overwrites them and goes into dx and dW, which the backward
pass only scales. dz is not divided by n, so it has the size of a probability; fp16 stores it times `SHIFT`.

Gradients in the forward pass: Hsu et al. 2024 (Liger), arXiv 2410.10989. z-loss: Chowdhery et al. 2022 (PaLM), arXiv
2204.02311, section 5.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hardware import on_gpu
from .shape import rows_at_a_time

# Factor on dz in fp16: its smallest number, 6e-8, becomes 2e-10, and dx = dz W stays finite for weights up to 127.
SHIFT = 2.0**8
# Types that the kernel accepts; others, which only tests use, go through PyTorch.
KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    reduction: str = "mean",
    z_loss: float = 0.0,
    fused: bool = True,
) -> Tensor:
    """Return -log softmax(x W^T)[target] + z_loss * logsumexp(x W^T)^2, in nats and fp32 (fp64 for fp64).

    Args:
        x: (n, width), the head's input.
        weight: (padded vocabulary, width); rows from `vocab_size` on are never predicted, and their gradient is zero.
        targets: (n,) ids below `vocab_size`.
        fused: use our kernel on GPUs.
        reduction: mean | none.

    Returns:
        A scalar, or with reduction `none` (n,). The mean's backward pass overwrites saved tensors: it works once.

    Raises:
        ValueError: reduction is `none` and a gradient is required.
    """
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if needs_gradient and reduction == "none":
        raise ValueError("reduction is none, which has no gradient; use mean, or torch.no_grad() to score")
    kernel = _kernel() if fused and on_gpu(x) and x.dtype in KERNEL_TYPES else cross_entropy_reference
    work = partial(kernel, vocab_size=vocab_size, z_loss=z_loss)
    if needs_gradient:
        return _LinearCrossEntropy.apply(x, weight, targets, work)
    losses = _in_chunks(x, weight, targets, work, None)
    return losses if reduction == "none" else losses.mean()


Work = Callable[..., tuple[Tensor, Tensor]]  # (logits, targets, scale) as `cross_entropy_reference`


class _LinearCrossEntropy(torch.autograd.Function):
    """The mean loss; saves dx and dW of the sum of the losses, times `SHIFT` in fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
        dx, dw = torch.empty_like(x), torch.empty_like(weight, dtype=_wide(weight.dtype))
        losses = _in_chunks(x, weight, targets, work, (dx, dw))
        ctx.dtype, ctx.divisor = weight.dtype, len(x) * _shift(x.dtype)
        ctx.save_for_backward(dx, dw)
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, dw = ctx.saved_tensors
        factor = dloss / ctx.divisor
        # As a matrix, factor takes part in type promotion; as a scalar, it would be rounded to dx's type first.
        torch.mul(dx, factor.view(1, 1), out=dx)
        return dx, dw.mul_(factor).to(ctx.dtype), None, None


def _in_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, work: Work, gradients: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute losses (n,) by `work`, some rows at a time. Fills any `gradients`, dx (n, w) and dW (V, w)."""
    losses = torch.empty(len(x), dtype=_wide(x.dtype), device=x.device)
    step = rows_at_a_time(len(weight), "cuda" if on_gpu(x) else "cpu")
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        logits = F.linear(x[rows], weight)
        losses[rows], slope = work(logits, targets[rows], scale=0.0 if gradients is None else _shift(x.dtype))
        del logits  # frees memory if dz is another tensor
        if gradients is not None:
            dx, dw = gradients
            torch.mm(slope, weight, out=dx[rows])
            _add_product(dw, slope, x[rows], fresh=start == 0)
        del slope  # before the next logits are allocated
    return losses


@cache
def _kernel() -> Work:
    if importlib.util.find_spec("triton") is None:
        return cross_entropy_reference
    from ..kernels.cross_entropy import fused_cross_entropy

    return fused_cross_entropy


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, vocab_size: int, z_loss: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return losses (n,) in at least fp32, and `scale` times their derivative by logits (n, V), in the logits' type.

    Overwrites the logits, and may return them as the derivative. With `scale` 0 no derivative is computed.
    """
    if vocab_size < logits.shape[1]:
        logits[:, vocab_size:] = float("-inf")
    wide, index = logits.to(_wide(logits.dtype)), targets[:, None]
    slope = wide.softmax(1)
    # Exponentials are taken once. The largest probability is 1/V or more, so its logarithm is always exact.
    lse = wide.amax(1, keepdim=True) - slope.amax(1, keepdim=True).log_()
    losses = lse - wide.gather(1, index)
    if z_loss:
        losses += z_loss * lse.square()
    if not scale:
        return losses[:, 0], logits
    if z_loss or scale != 1:
        slope.mul_(scale + 2 * z_loss * scale * lse)
    slope.scatter_add_(1, index, torch.full_like(lse, -scale))
    return losses[:, 0], slope if slope.dtype == logits.dtype else logits.copy_(slope)


def _add_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """Add left^T (V, n) times right (n, w) to `total` (V, w), or with `fresh` overwrite it."""
    add, keep = partial(torch.addmm, beta=0.0 if fresh else 1.0, out=total), total.dtype
    if left.dtype == keep:
        add(total, left.T, right)
    elif on_gpu(left):
        add(total, left.T, right, out_dtype=keep)
    elif left.dtype == torch.bfloat16:  # rounded once a chunk: on CPUs no product of bf16 gives fp32
        product = left.T @ right
        total.copy_(product) if fresh else total.add_(product)
    else:
        add(total, left.T.to(keep), right.to(keep))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _shift(dtype: torch.dtype) -> float:
    return SHIFT if dtype == torch.float16 else 1.0
