"""Communication of ranks in a forward pass, which `parallel/parallelize.py` sets up."""

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
    """The steps of a forward pass where ranks communicate; the defaults are for one process."""

    # Context parallelism: take this rank's part of whole sequences along a dimension; wrap the backend so that it
    # attends over the parts of all ranks; average over the parts of each sequence.
    local_part: Callable[[Tensor, int], Tensor] = lambda x, dim: x
    attention: Callable[[Backend], Backend] | None = None
    mean: Callable[[Tensor], Tensor] = _same
    # Tensor parallelism: gather the tokens of all its ranks, and return to this rank's; and the rank's share of
    # penalties, because its ranks compute them for the same tokens.
    enter: Callable[[Tensor], Tensor] = _same
    leave: Callable[[Tensor], Tensor] = _same
    share: float = 1.0
    # Expert parallelism: (experts, tokens, routing) -> the sum over each token's rows.
    experts: Callable[[Any, Tensor, Any], Tensor] = lambda experts, x, routing: experts(x, routing)


ALONE = Strategy()
