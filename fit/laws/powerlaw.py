"""Single power laws, y = k x^p, and with an offset, y = E + k x^p: N*(C), D*(C) and the best loss L*(C)."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ..errors import Array, Columns, Constants, InputError, Say, need_uneven
from ..solver.forms import LogSumExp
from ..solver.solver import variable_projection
from .law import LineLaw, Problem, amplitude, least_starts

OFFSET_GRID = np.geomspace(0.01, 1.0, 8)
STEEPEST = 3.0  # largest |p| of a law with an offset
VANISHED = 12.0  # a term below exp(-12) of the smallest y is stored as zero


class PowerLaw(LineLaw):
    """y = k x^p; with `offset`, y = E + k x^p with E >= 0 and p in [-3, 0].

    After `fit`: k_, p_, E_ (0 without an offset). After `bootstrap` or `fit_draws`: draws_.

    >>> PowerLaw().fit([1e18, 1e20, 1e22], [2e8, 2e9, 2e10])
    y = 0.2 x^0.5   (3 points, 1 of 1 starts agree)
    """

    form = "power"
    title = "the law y = k x^p"
    names = ("E", "k", "p")
    E_: float
    k_: float
    p_: float

    def __init__(self, offset: bool = False, objective: str = "squares", delta: float = 1e-3) -> None:
        super().__init__(objective, delta)
        self.offset = bool(offset)

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0, method: str | None = None) -> Self:
        self._fitted()
        if len(self.weight_) <= self.problem_.free:
            raise InputError(
                f"a power law through {len(self.weight_)} points has no residuals to resample; "
                f"it needs at least {self.problem_.free + 1} points."
            )
        return super().bootstrap(n, groups, seed, method)

    def fit_draws(self, y: Array) -> Self:
        """Refit to draws y (draws, n) of the n points, NaN where a draw lacks a point; store the constants in `draws_`.

        `draws_` keeps the order of y, with NaN for a draw with too few points or no converged fit.
        """
        self._fitted()
        present = np.isfinite(y) & (y > 0)
        keep = present.sum(axis=1) >= (4 if self.offset else 2)
        self.draws_ = {name: np.full(len(y), np.nan) for name in self.names}
        if keep.any():
            log_y, weights = np.log(np.where(present, y, 1.0))[keep], present[keep].astype(np.float64)
            if self.offset or self.objective in ("huber", "l1"):
                solution = self._refit(weights, log_y)
                theta, keep[keep] = solution.theta[solution.converged], solution.converged
            else:
                log_x = np.log(self.data_["x"])
                theta = _straight(log_x - log_x.mean(), log_y, weights * self.weight_ * self._precision)
            for name, values in self.problem_.constants(theta).items():
                self.draws_[name][keep] = values
        self.groups_ = np.arange(len(self.weight_)).astype(str)
        counts = {"resamples": int(keep.sum()), "redrawn": 0, "unconverged": int((~keep).sum())}
        self.bootstrap_ = counts | {"method": "draws", "seed": None}
        return self

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        with np.errstate(over="ignore", divide="ignore"):
            return constants["E"] + np.exp(np.log(constants["k"]) + constants["p"] * np.log(inputs[0]))

    def equation(self, say: Say) -> str:
        start = f"{say('E')} + " if self.offset else ""
        return f"y = {start}{say('k')} x^{say('p')}"

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        needed = 4 if self.offset else 2
        distinct = len(np.unique(np.round(np.log(inputs[0]), 6)))
        if distinct < needed:
            form = "y = E + k x^p" if self.offset else "y = k x^p"
            raise InputError(f"{form} needs at least {needed} different values of x; there are {distinct}.")
        if self.offset:  # without one, equal values are the law p = 0
            need_uneven(self.output, observed)

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        log_x, target = np.log(inputs[0]), np.log(observed)
        x0 = float(log_x.mean())
        u = log_x - x0
        ones = np.ones_like(u)
        floor, ceiling = float(target.min()) - VANISHED, float(target.max()) + 2.0
        terms: list[tuple[Any, ...]] = [((0, 1), np.stack([ones, u], 1))]
        bounds = dict.fromkeys("kp", (-np.inf, np.inf))
        if self.offset:
            terms.append(((2,), ones[:, None]))
            bounds = {"k": (floor, ceiling), "p": (-STEEPEST, 0.0), "E": (floor, ceiling)}

        def constants(theta: Array) -> Columns:
            E = amplitude(theta[:, 2], floor) if self.offset else np.zeros(len(theta))
            with np.errstate(over="ignore"):
                return {"E": E, "k": np.exp(theta[:, 0] - theta[:, 1] * x0), "p": theta[:, 1].copy()}

        return Problem(
            form=LogSumExp(len(bounds), terms),
            target=target,
            bounds=bounds,
            axes=log_x[None, :],
            starts=lambda weights, keep: _starts(u, observed, self.offset, weights, keep),
            constants=constants,
        )


def _starts(u: Array, y: Array, offset: bool, weights: Array, keep: int | None) -> Array:
    """Return starts (problems, starts, coordinates): a line through the logs or, with `offset`, a grid of p.

    keep: number of the grid's starts to return, by lowest error; None for all.
    """
    if not offset:
        return _straight(u, np.log(y)[None, :], weights)[:, None, :]
    basis = np.stack([np.exp(-OFFSET_GRID[:, None] * u), np.ones((len(OFFSET_GRID), len(u)))], 2)
    amplitudes, error = variable_projection(basis / y[None, :, None], np.ones_like(y), weights)
    log = np.log(np.maximum(amplitudes, 0.02 * y.min()))
    starts = np.stack([log[..., 0], np.broadcast_to(-OFFSET_GRID, error.shape), log[..., 1]], axis=2)
    return starts if keep is None else least_starts(starts, error, keep)


def _straight(u: Array, log_y: Array, weights: Array) -> Array:
    """Fit lines log y = log k + p u, one per row of `weights` (P, n); return (log k, p), (P, 2). log_y: (P or 1, n)."""
    total = weights.sum(axis=1)
    mean_u, mean_y = weights @ u / total, (weights * log_y).sum(axis=1) / total
    centred = u[None, :] - mean_u[:, None]
    variance = np.maximum((weights * centred**2).sum(axis=1), 1e-300)
    p = (weights * centred * log_y).sum(axis=1) / variance
    return np.stack([mean_y - p * mean_u, p], axis=1)
