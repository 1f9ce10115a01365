"""`CurveLaw`: the loss after every step, for any schedule of the learning rate and any size.

Fits minimise Huber's function of errors of log loss, with a penalty on d: it is zero unless the schedules determine it.
Intervals include the errors of constants (from leaving out runs or, with few runs, blocks as long as the correlation of
residuals), of last losses of left-out runs, and of the form (the other forms' deviations, weighted by their quality of
fit to the power of half the number of schedules, and at most the error of left-out schedules beyond noise).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts are imported at first use

from ..errors import Array, InputError, check_level, enough
from .curves import WARM, Curve, checked_schedule, curves_of
from .features import Design, design
from .forms import FORMS, Constant, Form, declared, form_named, losses, paper

DELTA = 1e-3  # of Huber's function of log loss, as in Hoffmann et al. 2022 and Luo et al. 2025
FEW_RUNS = 5  # with fewer runs, blocks of runs are left out instead of runs
LAST = 0.1  # share of a run's losses that estimates the error of its last one
PULL = 4.0  # penalty on d, in DELTA per root of the number of rows; chosen on MLPs and 16 simulated tables
SLACK = 2.0  # prior width, in log units, of constants that no run determines
SEEN = 0.01  # least fall, as a share of the largest rate, from which drops can be learned
STARTS, TRIED = 6, 10  # starts of a fit, and steps of each before only the best continues
COARSE = 400  # entries of a schedule during the search


class CurveLaw:
    """A law of whole loss curves: `form` is "multi-power", "annealing" or "functional".

    Steps before lr first reaches its maximum, and a share `warm` of a run's steps after them, are left out. Between
    rows lr is linear in step, unless given as `schedules`. Curves of one size give a law without N. With `fading`,
    unlike in the papers, the gain of a cooldown may change with training (constant d).

    After fit: constants_ (in the papers' units), effective_points_, correlation_length_ (points), cooldown_seen_,
    noise_ (standard deviation of a last log loss).
    """

    def __init__(self, form: str = "multi-power", warm: float = WARM, fading: bool = True) -> None:
        self.form = form_named(form).name
        self.fading = fading
        self.warm = warm

    def fit(self, curves: pd.DataFrame, schedules: Mapping[Any, Any] | None = None) -> CurveLaw:
        """Fit to a DataFrame with columns run, step, lr, loss[, N]. `schedules`: run -> exact lr of its steps 1..T."""
        return self.fit_runs(curves_of(curves, schedules))

    def fit_runs(self, curves: list[Curve]) -> CurveLaw:
        self._fit_curves([curve.past_warmup(self.warm) for curve in curves])
        self._learn_errors()
        return self

    def _fit_curves(self, curves: list[Curve]) -> CurveLaw:
        """Fit to curves from which the warm-up was removed."""
        runs = [run for run in curves if len(run.steps)]
        if not runs:
            raise InputError("every loss is from the warm-up, which is left out; give longer curves.")
        sizes = sorted({run.N for run in runs if run.N})
        self.reference_ = float(np.exp(np.mean(np.log(sizes)))) if sizes else 1.0
        self.sized_ = len(sizes) > 1
        self.unit_ = max(float(run.lr.max()) for run in runs)
        self.horizon_ = max(float(run.lr[: run.steps[-1]].sum()) for run in runs) / self.unit_
        self.cooldown_seen_ = any(_falls(run.lr[: run.steps[-1]]) for run in runs)
        self._declared = declared(self._form, len(sizes), self.cooldown_seen_, self.fading)
        enough(sum(len(run.steps) for run in runs), len(self._declared), "The law of curves")
        self.runs_ = runs
        self._design = self._make_design([(run.lr, run.steps, run.N) for run in runs])
        self._target = np.log(np.concatenate([run.loss for run in runs]))
        # Every run counts the same, however often its loss was logged.
        share = np.concatenate([np.full(len(run.steps), 1 / len(run.steps)) for run in runs])
        self._share = share * len(share) / len(runs)
        shapes = [np.round(np.quantile(run.lr, np.linspace(0.05, 1, 20)) / run.lr.max(), 1) for run in runs]
        self._schedule = np.unique(shapes, axis=0, return_inverse=True)[1].ravel()  # of each run, equal to one digit
        # The penalty's residual is _pull @ theta; under one schedule d stands for other errors too, and has none.
        strength = PULL * DELTA * np.sqrt(len(share)) * self._schedule.any()
        self._pull = strength * (np.array([*self._declared]) == "d")
        self._rivals: list[CurveLaw] | None = None
        self._solve()
        return self

    @property
    def _form(self) -> Form:
        return FORMS[self.form]

    @property
    def constants_(self) -> dict[str, float]:
        return paper(self._form, self._values(self._theta), self.unit_, self.horizon_, self.reference_)

    def predict(self, lr: Any, N: float | None = None, level: float | None = None) -> Any:
        """Return losses (T,) after steps 1..T under lr (T,), or with `level` a DataFrame of loss, low and high."""
        query = self._query(lr, N)
        if level is None:
            return self._losses(query)
        return pd.DataFrame(dict(zip(("loss", "low", "high"), self._interval(query, level), strict=True)))

    def last(self, lr: Any, N: float | None = None) -> float:
        """Predict the loss after the last step of lr (T,)."""
        return float(self._losses(self._query(lr, N, last_only=True))[0])

    def final(self, lr: Any, N: float | None = None, level: float = 0.95) -> tuple[float, float, float]:
        """Predict the loss after the last step of lr (T,). Returns loss, low and high."""
        loss, low, high = self._interval(self._query(lr, N, last_only=True), level)
        return float(loss[0]), float(low[0]), float(high[0])

    def best_schedule(self, steps: int, peak: float, N: float | None = None, warmup: int = 0) -> Array:
        """Return the rates (steps,) of lowest last loss that rise to `peak` in `warmup` steps (Luo et al. 2025)."""
        if not (steps > max(warmup, 0) + 1 and peak > 0):
            raise InputError(
                f"steps is {steps} and peak is {peak:g}; steps must exceed the warm-up, and peak must be above 0."
            )
        self._check_cooldown(np.array([1.0, 0.0]))
        stride = max((steps - warmup) / COARSE, 1.0)
        count = max(int((steps - warmup) / stride), 2)
        knots = 1 - np.geomspace(1.0, 0.01, 16)  # finer towards the end, where a schedule changes the last loss most
        knots[-1] = 1.0
        place = np.linspace(0, 1, count)
        values, size = self._values(self._theta), self._size(N)

        def rates(ratio: Array) -> Array:
            return np.interp(place, knots, np.concatenate([[1.0], np.cumprod(ratio)]))

        def last(ratio: Array) -> float:
            curve = (rates(ratio) * peak / self.unit_, np.array([count]), size)
            d = design([curve], self.horizon_, self._form.rises, stride=stride)
            # Scaled for L-BFGS-B's absolute tolerance of gradients.
            return float(np.log(losses(self._form, d, values)[0][0])) * 1e3

        shapes = [np.cos(np.pi / 2 * knots) ** 2, 1 - knots, np.minimum(1, (1 - knots) / 0.2), (1 - knots) ** 2]
        starts = [np.maximum(shape[1:], 1e-4) / np.maximum(shape[:-1], 1e-4) for shape in shapes]
        best_starts = sorted(starts, key=last)[:2]  # cosine, linear, WSD or squared: the two best are refined
        options: dict[str, Any] = {"method": "L-BFGS-B", "options": {"maxiter": 30}}
        results = (scipy.optimize.minimize(last, x, bounds=[(0, 1)] * len(x), **options) for x in best_starts)
        best = min(results, key=lambda result: result.fun)
        decay = np.interp(np.linspace(0, 1, steps - warmup), place, rates(best.x))
        return peak * np.concatenate([np.arange(1, warmup + 1) / (warmup + 1), decay])

    def _query(self, lr: Any, N: float | None, last_only: bool = False) -> tuple[Array, np.ndarray, float | None]:
        lr = checked_schedule(lr, "the schedule")
        self._check_cooldown(lr)
        return (lr, np.arange(1, len(lr) + 1) if last_only is False else np.array([len(lr)]), N)

    def _check_cooldown(self, lr: Array) -> None:
        if not hasattr(self, "_theta"):
            raise InputError("the law of curves is not fitted; call fit first.")
        if not self.cooldown_seen_ and _falls(lr):
            raise InputError(
                "the learning rate of the schedule falls, but it falls in none of the fitted curves; "
                "fit a curve with a cooldown, or give a schedule with a constant rate."
            )

    def _losses(self, query: tuple[Array, np.ndarray, float | None]) -> Array:
        return losses(self._form, self._make_design([query], fine=True), self._values(self._theta))[0]

    def _disagreement(self, query: tuple[Array, np.ndarray, float | None], value: Array) -> Array:
        """Return the weighted sum of squared differences between log losses of other forms and `value` (rows,)."""
        if not self.cooldown_seen_:
            return np.zeros_like(value)
        if self._rivals is None:
            self._rivals = [
                CurveLaw(name, self.warm, self.fading)._fit_curves(self.runs_) for name in FORMS if name != self.form
            ]
        power = (self._schedule.max() + 1) / 2
        weights = [min(1.0, self._misfit / rival._misfit) ** power for rival in self._rivals]
        logs = [np.log(np.maximum(rival._losses(query), 1e-300)) for rival in self._rivals]
        return np.asarray(weights @ (np.array(logs) - value) ** 2)

    def _size(self, N: float | None) -> float:
        if self.sized_ and N is None:
            raise InputError("N is missing; the law was fitted to several sizes, so give the size to predict for.")
        if N is not None and not N > 0:
            raise InputError(f"N is {N:g}; it must be above zero.")
        return float(N) / self.reference_ if self.sized_ and N else 1.0

    def _make_design(self, curves: list[tuple[Array, np.ndarray, float | None]], fine: bool = False) -> Design:
        scaled = [(lr / self.unit_, steps, self._size(N)) for lr, steps, N in curves]
        return design(scaled, self.horizon_, self._form.rises, fine)

    def _values(self, theta: Array) -> dict[str, float]:
        return {
            name: float(np.exp(value) if constant.log else value)
            for (name, constant), value in zip(self._declared.items(), theta, strict=True)
        }

    def _log_losses(self, theta: Array, d: Design) -> tuple[Array, Array]:
        """Return log losses (rows,) at coordinates theta, and their derivatives by theta, (rows, constants)."""
        values = self._values(theta)
        loss, by = losses(self._form, d, values, slopes=True)
        safe = np.maximum(loss, 1e-3 * np.exp(self._target.min()))  # a trial step may reach negative losses
        slope = [by[name] * (values[name] if c.log else 1.0) for name, c in self._declared.items()]
        return np.log(safe), np.stack(slope, axis=1) / safe[:, None]

    def _solve(self) -> None:
        constants = list(self._declared.values())
        low, high = (np.array([_inside(c, side) for c in constants]) for side in ("low", "high"))
        root = np.sqrt(self._share)
        cache: dict[str, Any] = {}

        def residuals_and_slopes(theta: Array) -> tuple[Array, Array]:
            # SciPy asks for values and slopes at one point in turn.
            if cache.get("at") != (at := theta.tobytes()):
                value, slope = self._log_losses(theta, self._design)
                errors = np.append(root * (value - self._target), self._pull @ theta)
                cache.update(at=at, both=(errors, np.vstack([root[:, None] * slope, self._pull])))
            return cache["both"]

        def minimise(theta: Array, steps: int, tolerance: float) -> Any:
            return scipy.optimize.least_squares(
                lambda t: residuals_and_slopes(t)[0], theta, lambda t: residuals_and_slopes(t)[1], (low, high), "trf",
                tolerance, tolerance, tolerance, "jac", "huber", DELTA, max_nfev=steps,
            )  # fmt: skip

        results = [minimise(start, TRIED, 1e-6) for start in self._starts(constants)]
        self._theta = minimise(min(results, key=lambda result: result.cost).x, 300, 1e-10).x
        self._misfit = float(np.mean(residuals_and_slopes(self._theta)[0][:-1] ** 2)) + 1e-16

    def _starts(self, constants: list[Constant]) -> list[Array]:
        """Return start points of the fit: values of the constants or, where `log`, their logarithms."""
        scale = float(np.exp(self._target.min()))
        amplitudes = {"E": 0.8, "F": 0.2, "A": 0.2, "B": 0.1}
        starts = []
        for i in range(STARTS):
            start = []
            for j, (name, c) in enumerate(self._declared.items()):
                value = c.starts[(i >> (j % 2)) % len(c.starts)] if len(c.starts) > 1 else c.starts[0]
                value = amplitudes[name] * scale * (0.5 if i >= STARTS // 2 else 1.0) if name in amplitudes else value
                start.append(np.log(value) if c.log else value)
            starts.append(np.array(start))
        return [start for i, start in enumerate(starts) if not any(np.array_equal(start, x) for x in starts[:i])]

    def _learn_errors(self) -> None:
        value, slope = self._log_losses(self._theta, self._design)
        residual = self._target - value
        weight = self._share * np.minimum(1.0, DELTA / np.maximum(np.abs(residual), 1e-12))
        rows = self._design.rows
        self.correlation_length_ = memory([residual[part] for part in rows])
        self.effective_points_ = len(residual) / self.correlation_length_
        blocks = (
            rows if len(rows) >= FEW_RUNS else [b for part in rows for b in _blocks(part, self.correlation_length_)]
        )
        spread = max(float(np.average(residual**2, weights=weight)), 1e-16)
        ridge = np.eye(len(self._theta)) * spread / SLACK**2 * float(np.mean(weight))
        ridge += np.diag(self._pull**2) * min(1.0, DELTA / max(abs(self._pull @ self._theta), 1e-12))
        self._fit = (value, slope, residual, weight, slope.T @ (weight[:, None] * slope) + ridge)
        moves = np.array([self.moved(block) for block in blocks])
        centred = moves - moves.mean(axis=0)  # jackknife: the spread of estimates without one block
        self._covariance = centred.T @ centred * (len(blocks) - 1) / len(blocks)
        self.freedom_ = max(len(blocks) - 1, 1)
        ends = [slice(part.stop - max(int(LAST * (part.stop - part.start)), 1), part.stop) for part in rows]
        products = []
        for part, end in zip(rows, ends, strict=True):
            step = self.moved(part) if len(rows) >= FEW_RUNS else 0.0 * self._theta
            products.append(float(np.mean(residual[end] * (residual[end] - slope[end] @ step))))
        self.noise_ = float(np.sqrt(max(np.mean(products), np.mean([np.mean(residual[end] ** 2) for end in ends]))))
        # By how much the variance of last losses of left-out schedules exceeds the noise.
        schedule, last = self._schedule, np.array([part.stop - 1 for part in rows])
        of_row = np.repeat(schedule, [part.stop - part.start for part in rows])
        errors = [(residual - slope @ self.moved(of_row == k))[last[schedule == k]] for k in {*schedule.tolist()}]
        square = float(np.mean([np.mean(error**2) for error in errors]))
        self._excess = max(square - self.noise_**2, 0.0) if len(errors) > 1 else np.inf

    def moved(self, left_out: slice | Array) -> Array:
        """Estimate the change of theta if the rows `left_out` are removed, by one Gauss-Newton step."""
        _, slope, residual, weight, normal = self._fit
        J, w = slope[left_out], weight[left_out]
        remaining = normal - J.T @ (w[:, None] * J)
        return -np.linalg.pinv(remaining, hermitian=True) @ (J.T @ (w * residual[left_out]))

    def _interval(self, query: tuple[Array, np.ndarray, float | None], level: float) -> tuple[Array, Array, Array]:
        check_level(level)
        design = self._make_design([query], fine=True)
        value, slope = self._log_losses(self._theta, design)
        variance = np.einsum("ij,jk,ik->i", slope, self._covariance, slope) + self.noise_**2
        # Errors of left-out schedules are known up to the longest run; beyond it, they are taken to grow with length.
        variance += np.minimum(self._disagreement(query, value), self._excess * np.maximum(design.area, 1.0) ** 2)
        half = scipy.special.stdtrit(self.freedom_, (1 + level) / 2) * np.sqrt(variance)
        return np.exp(value), np.exp(value - half), np.exp(value + half)


def memory(runs: list[Array]) -> float:
    """Return the correlation length of residuals in points: 1 + 2 times the sum of autocorrelations (Geyer)."""
    longest = max(len(run) for run in runs)
    power = sum(float(run @ run) for run in runs)
    if power <= 0:
        return 1.0
    length = 1.0
    for lag in range(1, longest):
        covariance = sum(float(run[lag:] @ run[:-lag]) for run in runs if len(run) > lag)
        if covariance <= 0:  # Geyer's initial positive sequence ends here
            break
        length += 2 * covariance / power
    return min(length, float(longest))


def _inside(constant: Constant, side: str) -> float:
    value = getattr(constant, side)
    return float(np.log(value) if constant.log else value)


def _blocks(part: slice, length: float) -> list[slice]:
    count = max(int((part.stop - part.start) / max(length, 1.0)), 2)
    edges = np.linspace(part.start, part.stop, min(count, part.stop - part.start) + 1).astype(int)
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


def _falls(lr: Array) -> bool:
    peak = float(lr.max())
    return bool(lr[int(np.argmax(lr)) :].min() < peak * (1 - SEEN))
