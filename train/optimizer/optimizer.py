"""What an optimizer declares: its update, the state that it keeps of each parameter, and what it needs whole. No torch.

Everything that holds, saves or counts state follows the declaration: ZeRO, checkpoints, the memory estimate.
"""

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
    """An optimizer with decoupled weight decay, and the rule that gives every width its learning rate.

    Matrices whose fan-in grows with the width get `learning_rate * base_width / width`; embeddings and norms keep
    `learning_rate * embedding_multiplier` (muP for Adam, Yang et al. 2022, Table 8).
    """

    learning_rate: Positive = 6e-3  # at base_width
    base_width: Count9 = 64
    width_exponent: Exponent = 1.0  # matrices' rate ~ (base_width / width)^exponent; 0: fixed
    base_depth: Count9 | None = later(None)  # learning rates then serve every depth too (CompleteP); None: width alone
    embedding_multiplier: Positive = 4.0  # learning rate of embeddings and norms, as a multiple of learning_rate
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8  # at base_width and base_depth
    weight_decay: NotNegative = 0.1  # decoupled; times the current learning rate; never on norms or embeddings
    gradient_clip: NotNegative = 1.0  # global norm; 0 turns clipping off
    z_loss: NotNegative = 0.0  # times the squared logarithm of the softmax's normaliser, added to the training loss
    batch_size: Count9 = 8  # sequences a step, over all ranks


class Step(NamedTuple):
    """The numbers of one update. Tensors are () on the device, so that nothing waits for them."""

    rate: Tensor
    decay: float
    eps: float
    number: Tensor  # of this update, from 1
    divisor: Tensor | None  # of the gradient: loss scale and clipping
    skipped: Tensor  # 1.0: nothing may change, neither weights nor state; else 0.0


class State(NamedTuple):
    """A tensor of zeros that an optimizer keeps of a parameter; in a checkpoint it is `<parameter>.<name>`."""

    name: str
    # Elements for a matrix of so many rows and columns, kept where that is worked on whole (`WholeMatrices`); None: one
    # for each element of the parameter, kept where that is.
    size: Callable[[int, int], int] | None = None
    dtype: str = "fp32"  # fp32 (as master weights) | bf16

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2


class WholeMatrices(NamedTuple):
    """What an optimizer does that needs every matrix whole, between gradient and update."""

    # Of vectors: (gradient, elementwise state, options, divisor, skipped) to what `transform` gets as matrices.
    direction: Callable[..., Tensor]
    # (matrices (k, rows, columns), their own state (k, size) each, options, skipped), in place; the result takes the
    # gradient's place in the update.
    transform: Callable[..., None]
    flops: Callable[[int, int], int]  # rows and columns of a matrix to its products' FLOPs in one update
    itemsize: Callable[[Any], int] = lambda options: 4  # bytes of an element of the directions, by the options
    scratch: int = 0  # elements that `transform` allocates at a time, at most, beside a copy of its matrices


class Optimizer(NamedTuple):
    # Of vectors: (weight, gradient, elementwise state, step, options), in place.
    update: Callable[..., None]
    states: tuple[State, ...] = ()
    roles: tuple[str, ...] = ()  # of the parameters that it updates, see `model/shape.py`; all others are AdamW's
    whole: WholeMatrices | None = None
    rate: Callable[[Any], float] | None = None  # of matrices, one for every width; None: muP's

    @property
    def elementwise(self) -> tuple[State, ...]:
        return tuple(state for state in self.states if state.size is None)

    @property
    def of_matrices(self) -> tuple[State, ...]:
        return tuple(state for state in self.states if state.size is not None)
