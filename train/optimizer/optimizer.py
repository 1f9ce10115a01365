"""The declaration of an optimizer: its update, its state per parameter, and what it needs whole. No torch."""

# ruff: noqa: RUF009  later() makes fields
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..fields import Count9, Exponent, NotNegative, Positive, Share, later

if TYPE_CHECKING:
    from torch import Tensor

MATRICES = ("first", "latent", "last")  # roles of the matrices inside blocks, see `model/shape.py`


@dataclass
class Options:
    """Options of an optimizer with decoupled weight decay, whose learning rates follow muP for Adam.

    muP: Yang et al. 2022, Table 8, see `model/parametrization.py`.
    """

    learning_rate: Positive = 6e-3  # at base_width
    base_width: Count9 = 64
    width_exponent: Exponent = 1.0  # matrices' rate ~ (base_width / width)^exponent; 0: the same at every width
    base_depth: Count9 | None = later(None)  # if set, learning rates serve every depth, too (CompleteP)
    embedding_multiplier: Positive = 4.0  # learning rate of embeddings and norms, as a multiple of learning_rate
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8  # at base_width and base_depth
    weight_decay: NotNegative = 0.1  # decoupled; times the current learning rate; never on norms or embeddings
    gradient_clip: NotNegative = 1.0  # global norm; 0 turns clipping off
    z_loss: NotNegative = 0.0  # times the squared logarithm of the softmax's normaliser, added to the training loss
    batch_size: Count9 = 8  # sequences a step, over all ranks


class Step(NamedTuple):
    """The numbers of one update. Tensors are () on the device, so that no step waits for them."""

    rate: Tensor
    decay: float
    eps: float
    number: Tensor  # of this update, from 1
    divisor: Tensor | None  # of the gradient: loss scale and clipping
    skipped: Tensor  # 1.0: weights and state must not change; else 0.0


class State(NamedTuple):
    """A tensor that an optimizer stores per parameter, initially zero; in a checkpoint `<parameter>.<name>`."""

    name: str
    # (rows, columns) -> elements per whole matrix, stored on the rank that updates it (`WholeMatrices`); None: one
    # element per element of the parameter, stored with it.
    size: Callable[[int, int], int] | None = None
    dtype: str = "fp32"  # fp32 (as master weights) | bf16

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2


class WholeMatrices(NamedTuple):
    """The part of an update that needs whole matrices, between gradient and weights."""

    # Vectors (gradient, elementwise state, options, divisor, skipped) -> the vector that `transform` gets as matrices.
    direction: Callable[..., Tensor]
    # (matrices (k, rows, columns), their states (k, size), options, skipped), in place; the update then uses the result
    # instead of the gradient.
    transform: Callable[..., None]
    flops: Callable[[int, int], int]  # (rows, columns) -> FLOPs of a matrix's products in one update
    itemsize: Callable[[Any], int] = lambda options: 4  # options -> bytes per element of the directions
    scratch: int = 0  # maximum elements that `transform` allocates in addition to a copy of its matrices


class Optimizer(NamedTuple):
    # Vectors (weight, gradient, elementwise state, step, options), in place.
    update: Callable[..., None]
    states: tuple[State, ...] = ()
    roles: tuple[str, ...] = ()  # roles that it updates, see `model/shape.py`; AdamW updates all others
    whole: WholeMatrices | None = None
    rate: Callable[[Any], float] | None = None  # options -> rate of matrices at every width; None: muP's rule

    @property
    def elementwise(self) -> tuple[State, ...]:
        return tuple(state for state in self.states if state.size is None)

    @property
    def of_matrices(self) -> tuple[State, ...]:
        return tuple(state for state in self.states if state.size is not None)
