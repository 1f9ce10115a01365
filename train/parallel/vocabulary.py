"""Embedding, head and cross-entropy with the vocabulary shared out over the tensor-parallel ranks.

Special here:
- no rank ever holds the logits of the whole vocabulary: a rank tells the others two numbers a token, the logarithm of
  its own sum of exponentials and the target's logit, in one small all-gather (Megatron-LM, arXiv 1909.08053, section 3,
  takes three all-reduces);
- what is gathered is combined in the same order everywhere, so all ranks have the same loss to the bit;
- the gradient takes the place of the logits, some rows at a time: nothing else of their size exists, in fp32 either.
  Unlike on one rank (`loss.py`) all rows have their logits at once: a gradient needs the other ranks' sums, so some
  rows at a time would be a message each to wait for, and a rank's logits are 1 / tp of all as it is;
- padding of the vocabulary lies at its end, so it is all, some or none of a rank's columns, and is never looked at.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..model.activations import LOGITS_AT_A_TIME
from ..model.block import table_gradient
from .layout import Shape
from .linear import ColumnLinear, SplitWeight, all_gather, all_reduce, reduce_scatter, wait


class _Embedding(torch.autograd.Function):
    """Y = sum over ranks of E_r[tokens], where a rank gives zeros for the tokens of others.

    With n tokens, V rows of width w and tp ranks, of which this is r:

        forward   Y (n, w)       = sum over ranks of onehot_r (n, V/tp) E_r (V/tp, w)
        wgrad     dE_r (V/tp, w) = onehot_r^T (V/tp, n) dY (n, w)

    Without sequence parallelism Y and dY are the same on every rank, and the sum is an all-reduce. With it a rank gets
    Y_r and gives dY_r (n/tp, w): the sum is a reduce-scatter, and dY an all-gather of dY_r.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
        rows = weight.shape[0]
        index = tokens - group.rank() * rows
        foreign = (index < 0) | (index >= rows)
        y = F.embedding(index.masked_fill(foreign, 0), weight).masked_fill_(foreign[..., None], 0.0)
        ctx.group, ctx.sequence_parallel, ctx.rows = group, sequence_parallel, rows
        ctx.save_for_backward(index.masked_fill_(foreign, rows))
        return wait(reduce_scatter(y, group) if sequence_parallel else all_reduce(y, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        (index,) = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = wait(all_gather(dy, ctx.group))
        # The tokens of others have an index of their own, one past the last row.
        return None, table_gradient(dy, index, ctx.rows, left_out=ctx.rows), None, None


class VocabularyEmbedding(SplitWeight):
    """Rows of the whole table: (batch, time) -> (batch, time, w), or with sequence parallelism (batch * time / tp, w).

    Raises:
        ValueError: with sequence parallelism, the tokens cannot be shared out equally.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return _Embedding.apply(tokens, self.weight, self.group, False)
        if tokens.numel() % self.group.size():
            raise ValueError(f"{tokens.numel()} tokens cannot be shared out over {self.group.size()} ranks")
        return _Embedding.apply(tokens.flatten(), self.weight, self.group, True)


class _CrossEntropy(torch.autograd.Function):
    """L = lse - z_t + c lse^2, with z (n, V) the logits, of which a rank has v of the V/tp columns that are no padding,
    and c the z-loss.

        forward   lse_r (n,)    = log sum over own columns of exp(z)     (-inf where all is padding)
                  t_r (n,)      = z of the target, or 0 where another rank has it
                  lse (n,)      = log sum over ranks of exp(lse_r),  L (n,) = lse - sum over ranks of t_r + c lse^2
        dgrad     dz_r (n, V/tp) = dL ((1 + 2 c lse) exp(z - lse) - onehot_r), and 0 for padding

    lse_r and t_r of all ranks come in one all-gather, (tp, 2, n) in fp32. dz takes the place of z.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, valid: int, group: ProcessGroup, z_loss: float
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        terms = logits.new_empty((1, 2, len(logits)), dtype=wide)
        index = targets - first
        foreign = (index < 0) | (index >= valid)
        index.masked_fill_(foreign, 0)
        for rows in _chunks(logits):
            torch.logsumexp(logits[rows, :valid].to(wide), dim=1, out=terms[0, 0, rows])
        terms[0, 1] = logits.gather(1, index[:, None])[:, 0].masked_fill_(foreign, 0.0)
        every = wait(all_gather(terms, group))
        lse = every[:, 0].logsumexp(0)
        ctx.valid, ctx.z_loss = valid, z_loss
        ctx.save_for_backward(logits, index, foreign, lse)
        losses = lse - every[:, 1].sum(0)
        return losses.add_(lse.square(), alpha=z_loss) if z_loss else losses

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, index, foreign, lse = ctx.saved_tensors
        hit = dloss.masked_fill(foreign, 0.0)[:, None]
        pull = dloss * (1 + 2 * ctx.z_loss * lse) if ctx.z_loss else dloss
        for rows in _chunks(logits) if ctx.valid else ():
            own = logits[rows, : ctx.valid]
            slope = own.to(lse.dtype).sub_(lse[rows, None]).exp_().mul_(pull[rows, None])
            slope.scatter_add_(1, index[rows, None], -hit[rows])
            if slope.dtype != own.dtype:
                own.copy_(slope)
        logits[:, ctx.valid :] = 0.0
        return logits, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    count, columns = logits.shape
    step = max(1, LOGITS_AT_A_TIME["cpu" if logits.is_cpu else "cuda"] // columns)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class VocabularyHead(ColumnLinear):
    """Logits of this rank's columns: (…, w) -> (…, V/tp), or with sequence parallelism (n/tp, w) -> (n, V/tp)."""

    def __init__(self, shape: Shape, group: ProcessGroup, sequence_parallel: bool, vocab_size: int) -> None:
        super().__init__(shape, group, sequence_parallel)
        self.vocab_size = vocab_size

    def whole(self, logits: Tensor) -> Tensor:
        """Every rank's columns, (…, V/tp) -> (…, V), padding at -inf. For inspection: no gradient flows."""
        columns = logits.detach().movedim(-1, 0)
        logits = wait(all_gather(columns, self.group)).movedim(0, -1).contiguous()
        logits[..., self.vocab_size :] = float("-inf")
        return logits

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: str = "mean", z_loss: float = 0.0) -> Tensor:
        """Logits of this rank's columns; given targets (…) their losses in nats, fp32, the same on every rank: a
        scalar, or with reduction `none` (…).

        The backward pass overwrites the logits, (…, V/tp).
        """
        logits = super().forward(x)
        if targets is None:
            return logits
        columns = logits.shape[-1]
        first = self.group.rank() * columns
        valid = min(max(self.vocab_size - first, 0), columns)
        losses = _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), first, valid, self.group, z_loss)
        return losses.view(targets.shape) if reduction == "none" else losses.mean()
