"""The optimizers by `optimizer.kind`. No torch, so that planning knows what each keeps and costs.

To add one: its file, its line here, its name and `later` fields in `OptimizerConfig`, and its YAML.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .adamw import adamw
from .muon import direction, flops, muon, orthogonalise
from .sign import sign


class WholeMatrices(NamedTuple):
    """What an optimizer does that keeps one moment, and needs every matrix whole."""

    direction: Callable[..., Any]  # of vectors: gradient and moment to what `transform` gets as matrices of one shape
    transform: Callable[..., None]  # what it makes of them takes the gradient's place in the update
    flops: Callable[[int, int], int]  # rows and columns of a matrix to its products' FLOPs in one update


class Optimizer(NamedTuple):
    update: Callable[..., None]  # of a vector
    roles: tuple[str, ...] = ()  # of what it updates, see `model/shape.py`; all else is AdamW's
    whole: WholeMatrices | None = None


OPTIMIZERS = {
    "adamw": Optimizer(adamw),
    "sign": Optimizer(sign, ("balance",)),  # whatever the kind
    "muon": Optimizer(muon, ("first", "latent", "last"), WholeMatrices(direction, orthogonalise, flops)),
}
