"""Fixed-size steps against a gradient's sign, for the biases of routers (Wang et al. 2024, arXiv 2408.15664)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .optimizer import Optimizer, Options, Step

if TYPE_CHECKING:
    from torch import Tensor


def sign(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Step, options: Options) -> None:
    weight.sub_(gradient.sign() * (step.rate * (1 - step.skipped)))


SIGN = Optimizer(sign, roles=("balance",))
