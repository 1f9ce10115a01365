"""AdamW, element by element: Loshchilov and Hutter 2019 (arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor


def adamw(
    weight: Tensor,
    gradient: Tensor,
    *,
    moments: Sequence[Tensor],
    count: Tensor,
    rate: Tensor | float,
    decay: float,
    eps: float,
    options: OptimizerConfig,
    divisor: Tensor | None,
    skipped: Tensor,
) -> None:
    """One update of a vector, number `count` (), of the gradient over `divisor` (); `skipped` () 1.0: of nothing."""
    import torch  # not at the top: the registry is read by planning

    # What torch.optim.AdamW(fused=True) calls, without what it adds: a copy, a sum and a difference of `count` for
    # every call, each a kernel of its own.
    first, second = moments
    torch._fused_adamw_(
        [weight],
        [gradient],
        [first],
        [second],
        [],
        [count],
        lr=rate,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=skipped,
    )
