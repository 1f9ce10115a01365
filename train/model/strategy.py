"""What a rank does in a forward pass where one process would do everything; `parallel/parallelize.py` makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .backends import Backend


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Strategy:
    """The steps between which ranks communicate; the defaults are those of one process."""

    # Context parallelism: the rank's part of whole sequences, along a dimension; attention over the parts of all; and
    # the mean over the parts of each sequence.
    own: Callable[[Tensor, int], Tensor] = lambda x, dim: x
    attention: Callable[[Backend], Backend] | None = None
    mean: Callable[[Tensor], Tensor] = _same
    # Tensor parallelism: to the tokens of all its ranks, and back; and the share of penalties that is this rank's,
    # because its ranks work on the same tokens.
    enter: Callable[[Tensor], Tensor] = _same
    leave: Callable[[Tensor], Tensor] = _same
    share: float = 1.0
    # Expert parallelism: (experts, tokens, routing) to the sum over each token's rows.
    experts: Callable[[Any, Tensor, Any], Tensor] = lambda experts, x, routing: experts(x, routing)


ALONE = Strategy()
