"""Tensor parallelism: every matrix is split over the tp ranks; norms and residuals may be split by tokens.

Special here:
- A block's first matrices are split by rows and its last ones by columns, so heads and hidden units stay on a rank.
- Collectives are PyTorch's functional operators: `torch.compile` traces them, and code before `wait` overlaps with
  them.
- No rank holds the logits of the whole vocabulary: ranks exchange two numbers per token.

Column and row products: Megatron-LM, arXiv 1909.08053, section 3. Sequence parallelism, which splits the residual
stream as (batch * time / tp, width): Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..hardware import on_gpu
from ..model.block import table_gradient
from ..model.shape import LOGITS_AT_A_TIME
from .layout import Shape

_collectives = torch.ops._c10d_functional


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to stack x (n, …) of all ranks to (tp * n, …). Call `wait` before reading the result."""
    return _collectives.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to sum x (tp * n, …) over ranks; each gets (n, …) rows. Call `wait` before reading them."""
    return _collectives.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to sum x over ranks in place; nothing else may read x. Call `wait` before reading the result."""
    if torch.compiler.is_compiling():  # the compiler decides what it does in place
        return _collectives.all_reduce(x, "sum", group.group_name)
    return _collectives.all_reduce_(x.contiguous(), "sum", group.group_name)


def wait(x: Tensor) -> Tensor:
    """Wait for a collective's result and return it; on GPUs the stream waits, not the host."""
    return _collectives.wait_tensor(x)


def _sum(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    return wait(reduce_scatter(x, group) if sequence_parallel else all_reduce(x, group))


class _Column(torch.autograd.Function):
    """Y_r = X W_r^T: a rank has some rows of W and columns of Y, and needs the whole X.

    With n tokens, i inputs, o outputs and tp ranks, of which this is r:

        forward   Y_r (n, o/tp) = X (n, i) W_r^T (i, o/tp)
        dgrad     dX (n, i)     = sum over ranks of dY_r (n, o/tp) W_r (o/tp, i)
        wgrad     dW_r (o/tp, i) = dY_r^T (o/tp, n) X (n, i)

    The sum is an all-reduce. With sequence parallelism a rank has X_r, dX_r (n/tp, i): X is an all-gather, repeated in
    the backward pass, and the sum is a reduce-scatter; both overlap with the products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        # With sequence parallelism only this rank's rows, gathered again in the backward pass.
        ctx.save_for_backward(x, weight)
        return F.linear(wait(all_gather(x, group)) if sequence_parallel else x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            x = all_gather(x, ctx.group)
            dx = reduce_scatter(dy @ weight, ctx.group)  # x arrives during this product, dx during that of dw
            x = wait(x)
        else:
            dx = all_reduce(dy @ weight, ctx.group)
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
        return wait(dx), dw, None, None


class _Row(torch.autograd.Function):
    """Y = sum over ranks of X_r W_r^T, with the columns of W and X split.

        forward   Y (n, o)        = sum over ranks of X_r (n, i/tp) W_r^T (i/tp, o)
        dgrad     dX_r (n, i/tp)  = dY (n, o) W_r (o, i/tp)
        wgrad     dW_r (o, i/tp)  = dY^T (o, n) X_r (n, i/tp)

    The sum is an all-reduce; with sequence parallelism it is a reduce-scatter to Y_r (n/tp, o), and dY an all-gather of
    dY_r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, weight)
        return _sum(F.linear(x, weight), group, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = wait(all_gather(dy, ctx.group))
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), None, None


class Enter(torch.autograd.Function):
    """The input X (n, w) that all ranks share; each rank has one term of its gradient.

    With sequence parallelism X is an all-gather of X_r (n/tp, w), and dX_r a reduce-scatter; else dX is an all-reduce.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.ranks = group, sequence_parallel
        return wait(all_gather(x, group)) if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _sum(dx.clone(), *ctx.ranks), None, None


class Leave(torch.autograd.Function):
    """The sum of every rank's term, (n, w), or with sequence parallelism this rank's rows of it, (n/tp, w)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.ranks = group, sequence_parallel
        return _sum(y.clone(), group, sequence_parallel)  # a clone, because the all-reduce works in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        group, sequence_parallel = ctx.ranks
        return wait(all_gather(dy, group)) if sequence_parallel else dy, None, None


class SplitWeight(nn.Module):
    def __init__(self, shape: Shape, group: ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.group, self.sequence_parallel = group, sequence_parallel


class ColumnLinear(SplitWeight):
    """x W_r^T with this rank's rows of W: (…, i) -> (…, o/tp), or with sequence parallelism (n/tp, i) -> (n, o/tp)."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return _Column.apply(x, self.weight if weight is None else weight, self.group, self.sequence_parallel)


class RowLinear(SplitWeight):
    """Sum of x_r W_r^T: (…, i/tp) -> (…, o), or with sequence parallelism (n, i/tp) -> (n/tp, o)."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return _Row.apply(x, self.weight if weight is None else weight, self.group, self.sequence_parallel)


class _Embedding(torch.autograd.Function):
    """Y = sum over ranks of E_r[tokens], where a rank has zeros for tokens of other ranks.

        forward   Y (n, w)       = sum over ranks of onehot_r (n, V/tp) E_r (V/tp, w)
        wgrad     dE_r (V/tp, w) = onehot_r^T (V/tp, n) dY (n, w)

    Collectives as in `_Row`.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        rows = weight.shape[0]
        index = tokens - group.rank() * rows
        foreign = (index < 0) | (index >= rows)
        # Any valid row serves for tokens of other ranks: it is overwritten by zeros.
        y = F.embedding(index.masked_fill(foreign, 0), weight).masked_fill_(foreign[..., None], 0.0)
        ctx.group, ctx.sequence_parallel, ctx.rows = group, sequence_parallel, rows
        ctx.save_for_backward(index.masked_fill_(foreign, rows))
        return _sum(y, group, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        (index,) = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = wait(all_gather(dy, ctx.group))
        # Other ranks' tokens have the index after the last row, which is left out.
        return None, table_gradient(dy, index, ctx.rows, left_out=ctx.rows), None, None


class VocabularyEmbedding(SplitWeight):
    """Embeddings from a table split over ranks, with sequence parallelism (batch * time / tp, w)."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.sequence_parallel:
            tokens = tokens.flatten()
            if len(tokens) % self.group.size():
                raise ValueError(f"{len(tokens)} tokens cannot be divided evenly over {self.group.size()} ranks")
        return _Embedding.apply(tokens, self.weight, self.group, self.sequence_parallel)


class _CrossEntropy(torch.autograd.Function):
    """L = lse - z_t + c lse^2, with z (n, V) the logits and c the z-loss.

    A rank has v of the V/tp columns that are not padding:

        forward   lse_r (n,)    = log sum over this rank's columns of exp(z)     (-inf if all are padding)
                  t_r (n,)      = z of the target, or 0 if another rank has it
                  lse (n,)      = log sum over ranks of exp(lse_r),  L (n,) = lse - sum over ranks of t_r + c lse^2
        dgrad     dz_r (n, V/tp) = dL ((1 + 2 c lse) exp(z - lse) - onehot_r), and 0 for padding
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, valid: int, group: ProcessGroup, z_loss: float
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        # The first dimension is where `all_gather` stacks the ranks.
        terms = logits.new_empty((1, 2, len(logits)), dtype=wide)
        index = targets - first
        foreign = (index < 0) | (index >= valid)
        index.masked_fill_(foreign, 0)
        for rows in _chunks(logits):  # a wide copy of all logits would need twice their memory
            torch.logsumexp(logits[rows, :valid].to(wide), dim=1, out=terms[0, 0, rows])
        terms[0, 1] = logits.gather(1, index[:, None])[:, 0].masked_fill_(foreign, 0.0)
        gathered = wait(all_gather(terms, group))
        lse = gathered[:, 0].logsumexp(0)
        ctx.valid, ctx.z_loss = valid, z_loss
        ctx.save_for_backward(logits, index, foreign, lse)
        losses = lse - gathered[:, 1].sum(0)
        return losses.add_(lse.square(), alpha=z_loss) if z_loss else losses

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, index, foreign, lse = ctx.saved_tensors
        hit = dloss.masked_fill(foreign, 0.0)[:, None]
        pull = dloss * (1 + 2 * ctx.z_loss * lse) if ctx.z_loss else dloss
        for rows in _chunks(logits) if ctx.valid else ():
            valid = logits[rows, : ctx.valid]
            # In fp32 this is the logits' own memory, which the slopes overwrite.
            slope = valid.to(lse.dtype).sub_(lse[rows, None]).exp_().mul_(pull[rows, None])
            slope.scatter_add_(1, index[rows, None], -hit[rows])
            if slope.dtype != valid.dtype:
                valid.copy_(slope)
        logits[:, ctx.valid :] = 0.0
        return logits, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    count, columns = logits.shape
    step = max(1, LOGITS_AT_A_TIME["cuda" if on_gpu(logits) else "cpu"] // columns)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class VocabularyHead(ColumnLinear):
    """Logits of this rank's columns: (…, w) -> (…, V/tp), or with sequence parallelism (n/tp, w) -> (n, V/tp)."""

    def __init__(self, shape: Shape, group: ProcessGroup, sequence_parallel: bool, vocab_size: int) -> None:
        super().__init__(shape, group, sequence_parallel)
        self.vocab_size = vocab_size

    def whole(self, logits: Tensor) -> Tensor:
        """Gather all ranks' columns of logits, (…, V/tp) -> (…, V), padding at -inf, without a gradient."""
        columns = logits.detach().movedim(-1, 0)
        logits = wait(all_gather(columns, self.group)).movedim(0, -1).contiguous()
        logits[..., self.vocab_size :] = float("-inf")
        return logits

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: str = "mean", z_loss: float = 0.0) -> Tensor:
        """Return this rank's columns of logits, or with `targets` (…) the loss in nats, fp32, the same on every rank.

        The loss is the mean, or with reduction `none` per token. The backward pass overwrites the logits.
        """
        logits = super().forward(x)
        if targets is None:
            return logits
        columns = logits.shape[-1]
        first = self.group.rank() * columns
        valid = min(max(self.vocab_size - first, 0), columns)
        losses = _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), first, valid, self.group, z_loss)
        return losses.view(targets.shape) if reduction == "none" else losses.mean()
