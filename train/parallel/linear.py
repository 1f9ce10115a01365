"""Linear layers split over the tensor-parallel ranks, on plain local tensors, with their collectives written out.

Special here:
- the collectives are PyTorch's functional ones, called as operators: `torch.compile` traces them, they return at once,
  and `wait` is called where the result is first needed, so what stands between the two overlaps with them;
- with sequence parallelism the tokens of an activation are flattened and shared out in consecutive runs, so gathering
  and scattering work along dim 0, without a copy;
- a gathered activation is not kept for the backward pass, but gathered again there: it takes 1 / tp of the memory, for
  one more collective, which overlaps with a product (the compiler makes its own choice here, and keeps it).

Column and row products: Megatron-LM, arXiv 1909.08053, section 3. Sequence parallelism: Korthikanti et al., arXiv
2205.05198, section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .layout import Shape

_collectives = torch.ops._c10d_functional


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Starts (n, …) of every rank -> (tp * n, …), one below the other; `wait` before it is read."""
    return _collectives.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Starts the sum of (tp * n, …) over the ranks -> this rank's (n, …); `wait` before it is read."""
    return _collectives.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Starts the sum over the ranks, in the place of x, which nobody else may read; `wait` before it is read."""
    if torch.compiler.is_compiling():  # the compiler finds by itself what may be done in place
        return _collectives.all_reduce(x, "sum", group.group_name)
    return _collectives.all_reduce_(x.contiguous(), "sum", group.group_name)


def wait(x: Tensor) -> Tensor:
    """The result of a collective, ready to be read. On GPUs the stream waits, not the host."""
    return _collectives.wait_tensor(x)


class _Column(torch.autograd.Function):
    """Y_r = X W_r^T, the rows of W and so the columns of Y shared out; every rank needs the whole X.

    With n tokens, i inputs, o outputs and tp ranks, of which this is r:

        forward   Y_r (n, o/tp) = X (n, i) W_r^T (i, o/tp)
        dgrad     dX (n, i)     = sum over ranks of dY_r (n, o/tp) W_r (o/tp, i)
        wgrad     dW_r (o/tp, i) = dY_r^T (o/tp, n) X (n, i)

    Without sequence parallelism X and dX are the same on every rank, and the sum is an all-reduce. With it a rank has
    X_r, dX_r (n/tp, i): X is an all-gather of X_r, in the backward pass again, and the sum is a reduce-scatter. The
    second gather overlaps with the product of dgrad, and the sum with the product of wgrad.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, weight)
        return F.linear(wait(all_gather(x, group)) if sequence_parallel else x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            x = all_gather(x, ctx.group)
            dx = reduce_scatter(dy @ weight, ctx.group)
            x = wait(x)
        else:
            dx = all_reduce(dy @ weight, ctx.group)
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
        return wait(dx), dw, None, None


class _Row(torch.autograd.Function):
    """Y = sum over ranks of X_r W_r^T, the columns of W and of X shared out, as `_Column` leaves them.

    With n tokens, i inputs, o outputs and tp ranks, of which this is r:

        forward   Y (n, o)        = sum over ranks of X_r (n, i/tp) W_r^T (i/tp, o)
        dgrad     dX_r (n, i/tp)  = dY (n, o) W_r (o, i/tp)
        wgrad     dW_r (o, i/tp)  = dY^T (o, n) X_r (n, i/tp)

    Without sequence parallelism Y and dY are the same on every rank, and the sum is an all-reduce. With it a rank gets
    Y_r and gives dY_r (n/tp, o): the sum is a reduce-scatter, and dY an all-gather of dY_r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        return wait(reduce_scatter(y, group) if sequence_parallel else all_reduce(y, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = wait(all_gather(dy, ctx.group))
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), None, None


class SplitWeight(nn.Module):
    """A rank's part of a weight, and the ranks that hold the others."""

    def __init__(self, shape: Shape, group: ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.group, self.sequence_parallel = group, sequence_parallel


class ColumnLinear(SplitWeight):
    """x W_r^T with this rank's rows of W: (…, i) -> (…, o/tp), or with sequence parallelism (n/tp, i) -> (n, o/tp)."""

    def forward(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.weight, self.group, self.sequence_parallel)


class RowLinear(SplitWeight):
    """Sum of x_r W_r^T: (…, i/tp) -> (…, o), or with sequence parallelism (n, i/tp) -> (n/tp, o)."""

    def forward(self, x: Tensor) -> Tensor:
        return _Row.apply(x, self.weight, self.group, self.sequence_parallel)
