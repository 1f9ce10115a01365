"""Gradients by weights that a backward pass leaves for later: what the split backward pass of a pipeline needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Left = list[tuple[Tensor, Tensor | Callable[[], Tensor]]]  # parameters, and the gradient of each or what gives it


class Later:
    """Known to layers and gradients of one rank; at work in the block of `leave` alone."""

    def __init__(self) -> None:
        self.left: Left | None = None

    @contextmanager
    def leave(self) -> Iterator[Left]:
        """Every gradient by a parameter, of a backward pass within the block."""
        left: Left = []
        self.left = left
        try:
            yield left
        finally:
            self.left = None


Keeper = tuple[Later, Tensor] | None  # where the gradient by a parameter may be left


def is_left(keeper: Keeper) -> bool:
    return keeper is not None and keeper[0].left is not None


def by_weight(gradient: Callable[[], Tensor], keeper: Keeper) -> Tensor | None:
    """The gradient by a weight, or None where it is left for later."""
    if keeper is None or keeper[0].left is None:
        return gradient()
    keeper[0].left.append((keeper[1], gradient))
    return None


def add_ready(older: Iterable[Left], newest: Left) -> None:
    """Adds gradients that are there, such as a table's, to those of a later pass: they would wait side by side."""
    sums = {id(parameter): gradient for parameter, gradient in newest if isinstance(gradient, Tensor)}
    for left in older:
        kept: Left = []
        for parameter, gradient in left:
            if isinstance(gradient, Tensor) and id(parameter) in sums:
                sums[id(parameter)].add_(gradient)
            else:
                kept.append((parameter, gradient))
        left[:] = kept


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
