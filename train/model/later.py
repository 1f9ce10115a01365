"""Gradients by weights that a backward pass leaves for later: what the split backward pass of a pipeline needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Products = list[tuple[Tensor, Callable[[], Tensor]]]  # parameters, and what gives the gradient of each


class Later:
    """Known to layers and gradients of one rank; at work in the block of `leave` alone."""

    products: Products | None = None
    ready: dict[Tensor, Tensor]

    @contextmanager
    def leave(self, ready: dict[Tensor, Tensor]) -> Iterator[Products]:
        """Every gradient by a parameter, of a backward pass within the block; those that are there all the same, such
        as a table's, are added to `ready`, for they would wait side by side.
        """
        products: Products = []
        self.products, self.ready = products, ready
        try:
            yield products
        finally:
            self.products = None


Keeper = tuple[Later, Tensor] | None  # where the gradient by a parameter may be left


def is_left(keeper: Keeper) -> bool:
    return keeper is not None and keeper[0].products is not None


def by_weight(gradient: Callable[[], Tensor], keeper: Keeper) -> Tensor | None:
    """The gradient by a weight, or None where it is left for later."""
    if keeper is None or keeper[0].products is None:
        return gradient()
    keeper[0].products.append((keeper[1], gradient))
    return None


def rows_product(dy: Tensor, x: Tensor) -> Tensor:
    """dY^T X of (…, o) and (…, i)."""
    return dy.flatten(0, -2).T @ x.flatten(0, -2)


class Linear(nn.Linear):
    later: Later | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.later is None else _Linear.apply(x, self.weight, (self.later, self.weight))


class _Linear(torch.autograd.Function):
    """Y = X W^T; dX = dY W, dW = dY^T X."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keeper: Keeper) -> Tensor:
        ctx.keeper = keeper
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return dy @ weight, by_weight(lambda: rows_product(dy, x), ctx.keeper), None
