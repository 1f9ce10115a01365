"""AdamW, element by element: Loshchilov and Hutter 2019 (arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .optimizer import Optimizer, Options, State, Step

if TYPE_CHECKING:
    from torch import Tensor


def adamw(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Step, options: Options) -> None:
    """Update a vector by its gradient over `step.divisor`."""
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
        [step.number],
        lr=step.rate,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=step.decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=step.divisor,
        found_inf=step.skipped,
    )


ADAMW = Optimizer(adamw, (State("exp_avg"), State("exp_avg_sq")))
