"""Chinchilla's parametric law (approach 3) and its optimum.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3 and appendix D.3; Besiroglu et al. 2024 (arXiv:2404.10102).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import EqualLoss, optimum
from ..errors import Array, Columns, Constants
from ..solver.forms import LogSumExp
from .law import OffsetLaw, Problem, amplitude, centred, projected_starts

EXPONENT_GRID = np.geomspace(0.03, 1.5, 8)
EXPONENT_BOUNDS = (0.0, 3.0)
VANISHED = 12.0  # a term below exp(-12) of the smallest loss is stored as zero
FLAT_EXPONENT = 0.01  # over three decades such a term changes by 7 %, so it is indistinguishable from E


class ChinchillaLaw(OffsetLaw):
    """L(N, D) = E + A / N^alpha + B / D^beta.

    After `fit`: E_, A_, B_, alpha_, beta_ and what `Law` lists; `degenerate_` also names exponents near zero.

    >>> N, D = [1e7, 1e7, 1e7, 1e8, 1e8, 1e8, 1e9, 1e9, 1e9], [1e9, 1e10, 1e11] * 3
    >>> loss = [1.7 + 400 / n**0.34 + 410 / d**0.28 for n, d in zip(N, D)]
    >>> law = ChinchillaLaw().fit(N, D, loss)
    >>> law
    L(N, D) = 1.7 + 400 / N^0.34 + 410 / D^0.28   (9 points, 64 of 64 starts agree)
    >>> law.optimal(5.76e23)
    C (6ND) = 5.76e23, N = 31.5B, D = 3.05T, D/N = 97.0, loss = 1.9388
    >>> round(law.predict(N=70e9, D=1.4e12), 4)
    1.9451

    Parameters
    ----------
    objective : {"huber", "l1", "squares", "se"}
        Objective in log loss; see laws/law.py. "se" needs `loss_se`.
    delta
        Residual in log loss beyond which Huber's function is linear. Hoffmann et al. use 1e-3.
    tied
        Hold alpha = beta, as a constant D/N implies (Muennighoff et al. 2023; Gadre et al. 2024).
    E
        Fix the irreducible loss, in the unit of the loss; zero leaves the term out.
    """

    form = "chinchilla"
    title = "the law E + A/N^alpha + B/D^beta"
    names = ("E", "A", "B", "alpha", "beta")
    formula = "L(N, D) = {E} + {A} / N^{alpha} + {B} / D^{beta}"
    exponent_names = ("alpha", "beta")
    vanishing = MappingProxyType({"A": "the term in N", "B": "the term in D"})
    power_optimum = True
    probed = True
    resample_starts = 1  # on 4000 resamples of published runs no other start of 64 ended lower
    A_: float
    B_: float
    alpha_: float
    beta_: float

    def __init__(
        self, objective: str = "huber", delta: float = 1e-3, tied: bool = False, E: float | None = None
    ) -> None:
        super().__init__(objective, delta, E)
        self.tied = bool(tied)

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        N, D = inputs
        c = constants
        return c["E"] + c["A"] * np.power(N, -c["alpha"]) + c["B"] * np.power(D, -c["beta"])

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        """Return the best N and D and their loss for `flops` = flops_per_token N D (Hoffmann et al., equation 4)."""
        return optimum(flops, constants, flops_per_token)

    def equal_loss(self, constants: Constants, loss: Array) -> EqualLoss:
        """Return the curve of all N and D that reach `loss`."""
        return EqualLoss(constants, loss)

    def size_exponent(self, constants: Constants) -> Any:
        """Return a = beta / (alpha + beta), where the best N grows as (FLOPs)^a."""
        with np.errstate(invalid="ignore"):
            return np.divide(constants["beta"], np.add(constants["alpha"], constants["beta"]))

    # The law as the solver sees it.

    def _accept(self, solution: Any) -> None:
        super()._accept(solution)
        exponents = self.exponent_names[: 1 if self.tied else 2]
        self._mark_degenerate(*(name for name in exponents if self.constants_[name] < FLAT_EXPONENT))

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        return two_power_laws(inputs, observed, self.tied, self.E)


def two_power_laws(inputs: tuple[Array, ...], observed: Array, tied: bool, fixed: float | None) -> Problem:
    """Build the `Problem` of E + A / N^alpha + B / D^beta; alpha = beta if `tied`, E = `fixed` unless this is None."""
    (x, x0), (y, y0) = (centred(column) for column in inputs)
    target = np.log(observed)
    names = ["A", "alpha", "B"] + ([] if tied else ["beta"]) + (["E"] if fixed is None else [])
    at = {name: i for i, name in enumerate(names)}
    at.setdefault("beta", at["alpha"])
    low, high = float(target.min()) - VANISHED, float(target.max()) + 2.0

    def constants(theta: Array) -> Columns:
        alpha, beta = (theta[:, at[name]].copy() for name in ("alpha", "beta"))
        A, B = amplitude(theta[:, at["A"]], low, x0 * alpha), amplitude(theta[:, at["B"]], low, y0 * beta)
        E = np.full(len(theta), fixed) if fixed is not None else amplitude(theta[:, at["E"]], low)
        return {"A": A, "B": B, "E": E, "alpha": alpha, "beta": beta}

    def starts(weights: Array, keep: int | None) -> Array:
        alpha, beta = (grid.ravel() for grid in np.meshgrid(EXPONENT_GRID, EXPONENT_GRID, indexing="ij"))
        if tied:
            alpha = beta = np.geomspace(EXPONENT_GRID[0], EXPONENT_GRID[-1], len(alpha))
        columns = [np.exp(-alpha[:, None] * x), np.exp(-beta[:, None] * y), np.ones((len(alpha), len(x)))]
        basis = np.stack(columns if fixed is None else columns[:2], axis=2) / observed[None, :, None]

        def coordinates(log: Array) -> dict[str, Array]:
            amplitudes = dict(zip("ABE", np.moveaxis(log, 2, 0), strict=False))
            return amplitudes | {"alpha": alpha, "beta": beta}

        floor = 0.02 * observed.min()
        return projected_starts(at, coordinates, basis, weights, keep, 1.0 - (fixed or 0.0) / observed, 1.0, floor)

    bounds = {name: (low, high) if name in "ABE" else EXPONENT_BOUNDS for name in names}
    form = LogSumExp(len(names), power_terms(at, x, y, fixed))
    return Problem(form, target, bounds, np.log(np.stack(inputs)), starts, constants)


def power_terms(at: Mapping[str, int], x: Array, y: Array, fixed: float | None) -> list[tuple[Any, ...]]:
    """Return the terms A - alpha x, B - beta y and, unless it is fixed at zero, E of a `LogSumExp`; x and y (n,)."""
    ones = np.ones_like(x)
    lines = [((at[a], at[slope]), np.stack([ones, -v], 1)) for a, slope, v in (("A", "alpha", x), ("B", "beta", y))]
    if fixed is None:
        return [*lines, ((at["E"],), ones[:, None])]
    return [*lines, ((), np.zeros((len(x), 0)), np.full(len(x), np.log(fixed)))] if fixed > 0 else lines
