"""AdamW, element by element: Loshchilov and Hutter 2019 (arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .optimizer import Optimizer, Options, State, Step

if TYPE_CHECKING:
    from torch import Tensor


def adamw(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Step, options: Options) -> None:
    import torch  # not at the top, because planning imports the registry without torch

    # The op inside torch.optim.AdamW(fused=True), without its three extra kernels per call: a copy, a sum and a
    # difference of the step count.
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
