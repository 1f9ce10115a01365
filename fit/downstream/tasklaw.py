"""A task's accuracy in two steps: (N, D) to task loss by a law, and task loss to accuracy by a curve.

Checkpoints are used in the second step alone. `forecast_tasks` gives intervals, and weighs other laws too.

  sigmoid      acc = floor + (ceiling - floor) / (1 + exp(-slope (middle - loss)))
               Bhagia et al. 2024 (arXiv:2412.04403)
  exponential  acc = floor + exp(slope (middle - loss))
               Gadre et al. 2024 (arXiv:2403.08540), there error = eps - k exp(-gamma loss)

The second step weights rows by 1 / (acc_se^2 + tau^2), where tau is the scatter of runs beyond sampling.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import scipy  # its parts are imported at first use
from numpy.typing import ArrayLike

from ..errors import Array, InputError, check_numbers, enough, floats, one_of, positive, same_length, unboxed
from ..laws.law import Estimator, Law
from ..laws.registry import law_class
from ..table import by_name
from ..uncertainty import excess_scatter

LINKS = {"sigmoid": ("floor", "ceiling", "middle", "slope"), "exponential": ("floor", "middle", "slope")}
ARGUMENTS, STEEP = (-15.0, 15.0), (0.01, 50.0)  # bounds of the curve's argument at the mean loss, and of its slope
STARTS = [(a, s) for a in np.linspace(-6.0, 4.0, 11) for s in np.log([0.2, 0.5, 1.0, 2.0, 5.0])]  # of both
TRIED = 3  # of these, the best are followed
SIGMOID = "({ceiling} - {floor}) / (1 + exp(-{slope} ({middle} - L)))"
PRECISE: Any = {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-12}


class TaskLaw(Estimator):
    """A law of a task's accuracy at (N, D), through the task's loss.

    After `fit`: law_ (the first step), constants_ (both steps), scatter_ (tau), converged_.

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
        self.data_ = d = _rows(N, D, task_loss, acc, acc_se, final)
        if chance is not None and not 0 <= chance < 1:
            raise InputError(f"chance is {chance}; it must be at least 0 and below 1, or None to fit it.")
        first: Any = self.law.clone()
        self.law_ = first.fit(*(d[name][d["final"]] for name in ("N", "D", "loss")))
        self._fit_curve(d["loss"], d["acc"], d["se"], chance)
        return self

    def _fit_curve(self, loss: Array, acc: Array, se: Array, chance: float | None) -> None:
        """Fit the second step in the coordinates floor, ceiling, argument at the mean loss, and log of the slope."""
        mean, spread = float(loss.mean()), float(loss.std()) or 1.0
        z, top = (loss - mean) / spread, 1.0 if self.link == "exponential" else self.ceiling
        floors = (0.0, acc.min()) if chance is None else (chance, chance)
        bounds = np.array([floors, (acc.max(), 1.0) if top is None else (top, top), ARGUMENTS, np.log(STEEP)])
        theta, free = bounds[:, 0].copy(), bounds[:, 0] < bounds[:, 1]
        enough(len(np.unique(loss)), int(free.sum()), "the curve from task loss to accuracy")

        def miss(values: Array, sigma: Any = 1.0) -> Array:
            theta[free] = values
            return (self._curve(theta[0], theta[1], theta[2] - np.exp(theta[3]) * z) - acc) / sigma

        starts = [np.array([*bounds[:2].mean(axis=1), *start])[free] for start in STARTS]
        starts, self.scatter_ = sorted(starts, key=lambda start: (miss(start) ** 2).sum())[:TRIED], 0.0
        for _ in range(30):  # weights and scatter in turn, until the scatter settles
            variance = se**2 + self.scatter_**2
            sigma = np.sqrt(np.where(variance > 0, variance, 1.0))
            fits = [
                scipy.optimize.least_squares(miss, s, bounds=bounds[free].T, args=(sigma,), **PRECISE) for s in starts
            ]
            solution = min(fits, key=lambda fitted: fitted.cost)
            starts, squares, before = [solution.x], miss(solution.x) ** 2, self.scatter_
            self.scatter_ = excess_scatter(squares, np.maximum(se**2, 1e-20), len(acc) - int(free.sum()))
            if abs(before - self.scatter_) <= 1e-6 * (self.scatter_ + 1e-12):
                break
        self.converged_ = solution.success and self.law_.converged_
        floor, ceiling, offset, slope = map(float, (*theta[:3], np.exp(theta[3]) / spread))
        values = {"floor": floor, "ceiling": ceiling, "middle": mean + offset / slope, "slope": slope}
        self.constants_ = self.law_.constants_ | {name: values[name] for name in LINKS[self.link]}

    def _curve(self, floor: Any, ceiling: Any, u: Any) -> Any:
        # 50: a huge accuracy is clipped later, infinity would spoil derivatives.
        if self.link == "exponential":
            return floor + np.exp(np.minimum(u, 50.0))
        return floor + (ceiling - floor) * scipy.special.expit(u)

    def accuracy(self, constants: dict[str, Any], loss: Any) -> Array:
        u = constants["slope"] * (constants["middle"] - loss)
        return np.asarray(self._curve(constants["floor"], constants.get("ceiling"), u))

    def predict(self, N: ArrayLike, D: ArrayLike) -> Any:
        self._fitted()
        with np.errstate(over="ignore"):
            return unboxed(self.accuracy(self.constants_, self.law_.evaluate(self.constants_, floats(N), floats(D))))

    def __repr__(self) -> str:
        if not hasattr(self, "constants_"):
            return f"TaskLaw(link={self.link!r}, ceiling={self.ceiling}, law={self.law!r})"
        text = {name: f"{value:.4g}" for name, value in self.constants_.items()}
        curve = "exp({slope} ({middle} - L))" if self.link == "exponential" else SIGMOID
        loss, state = self.law_.equation(text.__getitem__).split("= ", 1)[1], "" if self.converged_ else "NOT "
        curve = f"acc = {{floor}} + {curve}".format(**text)
        return f"{curve}, L = {loss}   ({len(self.data_['acc'])} points, {state}converged)"


def _rows(
    N: ArrayLike, D: ArrayLike, loss: ArrayLike, acc: ArrayLike, se: ArrayLike | None, final: ArrayLike | None
) -> dict[str, Array]:
    """Check the arguments of `TaskLaw.fit` and return them as columns; `se` is raised to half its median at least."""
    rows = {name: np.atleast_1d(floats(v)) for name, v in (("N", N), ("D", D))} | {"loss": positive("task_loss", loss)}
    rows["acc"] = check_numbers("acc", acc, None, "a share from 0 to 1", lambda v: (v >= 0) & (v <= 1))
    se = np.zeros(len(rows["acc"])) if se is None else se
    rows["se"] = check_numbers("acc_se", se, None, "a finite number, zero or more", lambda v: v >= 0)
    done = np.ones(len(rows["acc"]), dtype=bool) if final is None else np.asarray(final).astype(bool)
    same_length(**rows, final=done)
    for name in ("N", "D"):
        positive(name, rows[name][done])
    if (rows["se"] > 0).any():
        rows["se"] = np.maximum(rows["se"], 0.5 * np.median(rows["se"][rows["se"] > 0]))
    return rows | {"final": done}
