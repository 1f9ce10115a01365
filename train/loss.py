"""Cross-entropy of the next token from the head's input: the head's matrix product and the loss in one.

PaLM's z-loss: Chowdhery et al. 2022, arXiv 2204.02311, section 5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, reduction: str = "mean", z_loss: float = 0.0
) -> Tensor:
    """-log softmax(x W^T)[target] + z_loss * lse^2, in nats and fp32 whatever the type of x.

    Args:
        x: (n, width), what the head reads.
        weight: (padded vocabulary, width); rows from `vocab_size` on are padding, are never predicted, and get no
            gradient.
        targets: (n,) ids below `vocab_size`.
        vocab_size: tokens that can be predicted.
        reduction: mean | none.
        z_loss: factor of the squared logarithm of the softmax's normaliser.

    Returns:
        A scalar, or with reduction `none` (n,).
    """
    logits = F.linear(x, weight)[:, :vocab_size].to(torch.promote_types(x.dtype, torch.float32))
    losses = F.cross_entropy(logits, targets, reduction="none")
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(1).square()
    return losses if reduction == "none" else losses.mean()
