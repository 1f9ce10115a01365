"""A task's accuracy in two steps: (N, D) to task loss by a law, and task loss to accuracy by a curve.

Checkpoints are used in the second step alone. `forecast_tasks` gives intervals, and weighs other laws too.

  sigmoid      acc = floor + (ceiling - floor) / (1 + exp(-slope (middle - loss)))
               Bhagia et al. 2024 (arXiv:2412.04403)
  exponential  acc = floor + exp(slope (middle - loss))
               Gadre et al. 2024 (arXiv:2403.08540), there error = eps - k exp(-gamma loss)

The second step weights rows by 1 / (acc_se^2 + tau^2), where tau is the scatter of runs beyond sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, InputError, Say, enough, floats, one_of, positive, same_length, unboxed
from ..laws.law import Estimator, Law
from ..laws.registry import law_class
from ..solver.forms import LogSumTerms
from ..solver.solver import Solution, solve
from ..table import by_name
from ..uncertainty import excess_scatter

LINKS = {"sigmoid": ("floor", "ceiling", "middle", "slope"), "exponential": ("floor", "middle", "slope")}
OFFSETS = np.linspace(-6.0, 4.0, 11)  # starting values of the curve's argument at the mean loss ...
LOG_SLOPES = np.log([0.2, 0.5, 1.0, 2.0, 5.0])  # ... and of its slope per standard deviation of the loss
FAR = 15.0  # bound of the curve's argument at the mean loss


class TaskLaw(Estimator):
    """A law of a task's accuracy at (N, D), through the task's loss.

    After `fit`: law_ (the first step), constants_ (both steps), scatter_ (tau), items_ (the benchmark's size, or None),
    converged_.

    Parameters
    ----------
    link : {"sigmoid", "exponential"}
    ceiling : float or None
        The sigmoid's limit at low loss; None fits it.
    law : Law, optional
        Unfitted law of (N, D) for the first step; default E + A/N^alpha + B/D^beta.
    """

    form = "task"
    inputs = ("N", "D")
    output = "task_loss, acc"

    def __init__(self, link: str = "sigmoid", ceiling: float | None = 1.0, law: Law | None = None) -> None:
        one_of("link", link, LINKS)
        if ceiling is not None and not 0 < ceiling <= 1:
            raise InputError(f"ceiling is {ceiling}; it must be above 0 and at most 1, or None to fit it.")
        if law is not None and law.inputs != ("N", "D"):
            raise InputError(f"law takes {', '.join(law.inputs)}; a task needs a law of N and D.")
        self.link, self.ceiling, self.law = link, ceiling, law_class()() if law is None else law

    def fit(
        self,
        N: Any,
        D: Any = None,
        task_loss: Any = None,
        acc: Any = None,
        acc_se: Any = None,
        chance: float | None = 0.0,
        final: ArrayLike | None = None,
    ) -> Self:
        """Fit both steps, task loss and accuracy, to n rows, or to a table, passed as N, with these columns.

        Parameters
        ----------
        N, D
            (n,) parameters and tokens.
        task_loss
            (n,) gold bits per byte, or another loss.
        acc, acc_se
            (n,) accuracy from 0 to 1, and its standard error from the items.
        chance
            The curve's floor; None fits it.
        final
            (n,) mask of the rows that the first step uses; default: all.
        """
        columns = [column for column in (N, D, task_loss, acc) if column is not None]
        N, D, task_loss, acc = by_name("fit", ("N", "D", "task_loss", "acc"), columns, {}).values()
        self.data_ = _rows(N, D, task_loss, acc, acc_se, final)
        if chance is not None and not 0 <= chance < 1:
            raise InputError(f"chance is {chance}; it must be at least 0 and below 1, or None to fit it.")
        self.chance = chance
        d = self.data_
        done = d["final"]
        first: Any = self.law.clone()
        self.law_ = first.fit(d["N"][done], d["D"][done], d["loss"][done])
        self._curve = _Curve(self.link, d["loss"], d["acc"], chance, self.ceiling)
        enough(len(np.unique(d["loss"])), self._curve.free, "the curve from task loss to accuracy")
        self._solve_scatter()
        self.names = (*self.law_.names, *LINKS[self.link])
        curve = self._curve.constants(self._theta[None, :])
        self.constants_ = self.law_.constants_ | {name: float(curve[name][0]) for name in LINKS[self.link]}
        spread = d["acc"] * (1 - d["acc"]) / np.maximum(d["se"], 1e-12) ** 2  # se^2 = acc (1 - acc) / items
        self.items_ = round(float(np.median(spread))) if acc_se is not None else None
        return self

    def _solve_scatter(self) -> None:
        acc, se = self.data_["acc"], self.data_["se"]
        freedom = len(acc) - self._curve.free
        self.scatter_ = 0.0
        for _ in range(30):  # weights and scatter in turn, until the scatter settles
            variance = se**2 + self.scatter_**2
            self._weight = 1.0 / np.where(variance > 0, variance, 1.0)
            solution = self._curve.solve(self._weight[None, :])
            residual = self._curve.form.value(solution.theta)[0][0] - acc
            before, self.scatter_ = self.scatter_, excess_scatter(residual**2, np.maximum(se**2, 1e-20), freedom)
            if abs(before - self.scatter_) <= 1e-6 * (self.scatter_ + 1e-12):
                break
        self._theta = solution.theta[0]
        self.converged_ = bool(solution.converged[0]) and self.law_.converged_

    def task_loss(self, constants: Constants, N: Any, D: Any) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(self.law_.evaluate(constants, N, D))

    def accuracy(self, constants: Constants, loss: Any) -> Array:
        u = constants["slope"] * (constants["middle"] - loss)
        top = constants["ceiling"] - constants["floor"] if self.link == "sigmoid" else 1.0
        return np.asarray(constants["floor"] + top * _shape(self.link, u))

    def predict(self, N: ArrayLike, D: ArrayLike) -> Any:
        self._fitted()
        return unboxed(self.accuracy(self.constants_, self.task_loss(self.constants_, floats(N), floats(D))))

    def equation(self, say: Say) -> str:
        """Return both steps as text, with each constant written by `say(name)`."""
        first = self.law_.equation(say).split("= ", 1)[1]
        u = f"{say('slope')} ({say('middle')} - L)"
        if self.link == "exponential":
            return f"acc = {say('floor')} + exp({u}), L = {first}"
        return f"acc = {say('floor')} + ({say('ceiling')} - {say('floor')}) / (1 + exp(-{u})), L = {first}"

    def __repr__(self) -> str:
        if not hasattr(self, "constants_"):
            return f"TaskLaw(link={self.link!r}, ceiling={self.ceiling}, law={self.law!r})"
        state = "converged" if self.converged_ else "NOT converged"
        return (
            f"{self.equation(lambda name: f'{self.constants_[name]:.4g}')}   ({len(self.data_['acc'])} points, {state})"
        )


class _Curve:
    """The curve from task loss to accuracy, in coordinates (floor, ceiling, argument at the mean loss, log slope)."""

    def __init__(self, link: str, loss: Array, acc: Array, chance: float | None, ceiling: float | None) -> None:
        self.link, self.acc = link, acc
        self.mean, self.spread = float(loss.mean()), float(loss.std()) or 1.0
        self.z = (loss - self.mean) / self.spread
        at = {name: i for i, name in enumerate(("floor", "ceiling", "offset", "log_slope"))}
        self.form = LogSumTerms(self._terms, at, len(loss))
        top = 1.0 if link == "exponential" else ceiling
        low, high = float(acc.min()), float(acc.max())
        self.lower = np.array([0.0 if chance is None else chance, high if top is None else top, -FAR, np.log(1e-2)])
        self.upper = np.array([high if chance is None else chance, 1.0 if top is None else top, FAR, np.log(50.0)])
        self.free = int((self.lower < self.upper).sum())
        floor, roof = np.clip(low, self.lower[0], self.upper[0]), 0.5 * (self.lower[1] + self.upper[1])
        offset, slope = (grid.ravel() for grid in np.meshgrid(OFFSETS, LOG_SLOPES, indexing="ij"))
        self.starts = np.stack([np.full_like(offset, floor), np.full_like(offset, roof), offset, slope], axis=1)

    def solve(self, weights: Array) -> Solution:
        """Fit the curve for each row of weights (P, n), from all starts."""
        starts = np.broadcast_to(self.starts, (len(weights), *self.starts.shape))
        return solve(self.form, self.acc, weights, starts, self.lower, self.upper, np.inf)

    def constants(self, theta: Array) -> Columns:
        floor, ceiling, offset, log_slope = theta.T
        values = {"floor": floor, "ceiling": ceiling, "slope": np.exp(log_slope) / self.spread}
        values["middle"] = self.mean + offset / values["slope"]
        return {name: values[name] for name in LINKS[self.link]}

    def _terms(self, v: Mapping[str, Any]) -> list[Any]:
        height = v["ceiling"] - v["floor"] if self.link == "sigmoid" else 1.0
        return [v["floor"] + height * _shape(self.link, v["offset"] - np.exp(v["log_slope"]) * self.z)]


def _shape(link: str, u: Any) -> Any:
    # 50: a huge accuracy is clipped later, infinity would spoil derivatives.
    return np.exp(np.minimum(u, 50.0)) if link == "exponential" else np.exp(-np.logaddexp(0.0, -u))


def _rows(
    N: ArrayLike, D: ArrayLike, loss: ArrayLike, acc: ArrayLike, se: ArrayLike | None, final: ArrayLike | None
) -> Columns:
    """Check the arguments of `TaskLaw.fit` and return them as columns; `se` is raised to half its median at least."""
    rows = {name: np.atleast_1d(floats(v)) for name, v in (("N", N), ("D", D), ("acc", acc))}
    rows["loss"] = positive("task_loss", loss)
    rows["se"] = np.zeros(len(rows["acc"])) if se is None else floats(se)
    done = np.ones(len(rows["acc"]), dtype=bool) if final is None else np.asarray(final).astype(bool)
    same_length(**rows, final=done)
    for name in ("N", "D"):
        positive(name, rows[name][done])
    accepted = {"acc": (1.0, "a share from 0 to 1"), "se": (np.finfo(float).max, "a finite number, zero or more")}
    for name, (largest, expected) in accepted.items():
        bad = ~((rows[name] >= 0) & (rows[name] <= largest))
        if bad.any():
            first = int(np.argmax(bad))
            field = "acc_se" if name == "se" else name
            raise InputError(f"{field} is {rows[name][first]:g} in row {first}; it must be {expected}.")
    if (rows["se"] > 0).any():
        rows["se"] = np.maximum(rows["se"], 0.5 * np.median(rows["se"][rows["se"] > 0]))
    return rows | {"final": done}
