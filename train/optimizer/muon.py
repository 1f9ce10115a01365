"""Muon: the momentum of every matrix, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

    M <- mu M + (1 - mu) G        U = (1 - mu) G + mu M (Nesterov)
    O = sqrt(rows / columns) * NewtonSchulz(U)        W <- W - rate (O + decay W)

The scale is the spectral condition, with which one rate serves all widths: the spectral norm of an update is about
sqrt(fan_out / fan_in), as is the weights' (Yang, Simon and Bernstein 2023, arXiv 2310.17813; Large et al. 2024, arXiv
2405.14813; Bernstein and Newhouse 2024, arXiv 2409.20325). Moonlight's 0.2 sqrt(max(rows, columns)) (arXiv 2502.16982)
fixes the size of an element instead, and its best rate falls with the width.
"""

# ruff: noqa: RUF009  later() makes fields
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..fields import Positive, Share, later
from .optimizer import MATRICES, Optimizer, State, Step, WholeMatrices

if TYPE_CHECKING:
    from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic a x + b x^3 + c x^5, steepest at 0 (Jordan et al. 2024)
ITERATIONS = 5  # as in Jordan et al. 2024
SMALLEST_NORM = 1e-7  # avoids a division by zero
AT_A_TIME = 2**20  # elements of the matrices in one batched product, which should fit in a cache; chosen by hand


@dataclass
class MuonOptions:
    """Options of Muon, for the matrices of the blocks; AdamW updates all other parameters."""

    matrix_multiplier: Positive = later(3.0)  # their rate at every width, as a multiple of learning_rate
    momentum: Share = later(0.95)
    iteration_precision: Annotated[str, ("fp32", "bf16")] = later("fp32")


def direction(
    gradient: Tensor, moments: Sequence[Tensor], options: MuonOptions, divisor: Tensor | None, skipped: Tensor
) -> Tensor:
    """Return the Nesterov momentum, shaped as the gradient, in `options.iteration_precision`.

    Divides the gradient by `divisor` (None: 1). Overwrites the gradient, and unless `skipped` is 1 also `moments`.
    """
    import torch  # not at the top, because planning imports the registry without torch

    (moment,) = moments
    result = torch.empty_like(gradient, dtype=torch.bfloat16) if options.iteration_precision == "bf16" else gradient
    share, is_skipped = 1 - options.momentum, skipped.bool()
    factor, keep = share if divisor is None else share / divisor, options.momentum + share * skipped.double()
    # Separate operations, because fused ones would round the last elements of a vector differently.
    for g, m, u in pieces(gradient, moment, result):
        g.mul_(factor).masked_fill_(is_skipped, 0.0)
        m.mul_(keep).add_(g)
        u.copy_(g.add_(m * options.momentum))
    return result


def orthogonalise(matrices: Tensor, *unused: Any) -> None:
    """Orthogonalise matrices (..., rows, columns) and multiply them by sqrt(rows / columns), in place."""
    rows, columns = matrices.shape[-2:]
    for batch in matrices.flatten(0, -3).split(max(1, AT_A_TIME // (rows * columns))):
        x = batch / batch.flatten(1).norm(dim=1).clamp(min=SMALLEST_NORM)[:, None, None]
        for _ in range(ITERATIONS):
            gram = x @ x.mT if rows <= columns else x.mT @ x  # the smaller one
            power = gram.baddbmm(gram, gram, beta=B, alpha=C)
            x = x.baddbmm(power, x, beta=A) if rows <= columns else x.baddbmm(x, power, beta=A)
        batch.copy_(x.mul_((rows / columns) ** 0.5))


def muon(weight: Tensor, direction: Tensor, states: Sequence[Tensor], step: Step, options: MuonOptions) -> None:
    rate = step.rate * (1 - step.skipped.double())
    keep = 1 - rate * step.decay
    for w, o in pieces(weight, direction):
        w.mul_(keep).sub_(o.to(w.dtype) * rate)


def pieces(*vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split equally long vectors at the same places; on CPUs a piece fits a core's L2 cache."""
    from ..hardware import on_gpu  # not at the top, because planning imports the registry without torch

    size = max(1, len(vectors[0])) if on_gpu(vectors[0]) else 2**15
    return zip(*(vector.split(size) for vector in vectors), strict=True)


def flops(rows: int, columns: int) -> int:
    """Return the FLOPs to orthogonalise one matrix."""
    n, m = sorted((rows, columns))
    return ITERATIONS * (4 * n * n * m + 2 * n**3)


MUON = Optimizer(
    muon,
    (State("exp_avg"),),
    MATRICES,
    WholeMatrices(
        direction,
        orthogonalise,
        flops,
        itemsize=lambda options: 2 if options.iteration_precision == "bf16" else 4,
        scratch=3 * AT_A_TIME,
    ),
    rate=lambda options: options.learning_rate * options.matrix_multiplier,
)
