"""`CurveLaw`: the loss after every step, under any schedule of the learning rate, for any size.

Least squares of log loss under Huber's function. Neighbours in a curve and points of one run share their luck: errors
come from leaving out whole runs, or blocks of a run as long as residuals remember where runs are few, each by one
Gauss-Newton step. What a prediction misses besides is learned from the last losses of runs that were left out, and from
how far the other forms disagree: each counts by how well it fits, to the power of half the number of
different schedules, for what a form misses of a schedule it misses in every run of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ..errors import Array, InputError, check_level, enough
from .curves import WARM, Curve, checked_schedule, curves_of
from .features import Design, design
from .forms import FORMS, Constant, Form, declared, form_named, losses, paper

DELTA = 1e-3  # of Huber's function of log loss, as in Hoffmann et al. 2022 and Luo et al. 2025
FEW_RUNS = 5  # below which blocks of a run are left out, not runs
LAST = 0.1  # share of a run's losses that tells what its last one misses
SLACK = 2.0  # log units by which a constant that no run tells may move
SEEN = 0.01  # of the largest rate: the fall from which on drops can be learned
STARTS, TRIED = 6, 10  # starts of a fit, and steps of each before the best goes on
COARSE = 400  # entries of a schedule that is searched


class CurveLaw:
    """Law of whole loss curves: `form` is "multi-power", "annealing" or "functional".

    Left out: steps before lr first reaches its maximum, and `warm` of a run's steps after them. Where rows are sparse,
    lr is linear in step between them; give `schedules` where it is not. Curves of one size give a law without N.
    `fading`: what a cooldown gains may fall with training (constant d); without it the papers' forms are fitted.

    After fit: constants_ (in the papers' units), effective_points_, correlation_length_ (points), cooldown_seen_,
    noise_ (standard deviation of the logarithm of a last loss about the law).
    """

    def __init__(self, form: str = "multi-power", warm: float = WARM, fading: bool = True) -> None:
        self.form = form_named(form).name
        self.fading = fading
        self.warm = warm

    def fit(self, curves: pd.DataFrame, schedules: Mapping[Any, Any] | None = None) -> CurveLaw:
        """curves: DataFrame run, step, lr, loss[, N]. schedules: run -> lr of its steps 1..T, for exactness."""
        return self.fit_runs(curves_of(curves, schedules))

    def fit_runs(self, curves: list[Curve]) -> CurveLaw:
        self._solved([curve.past_warmup(self.warm) for curve in curves])
        self._learn_errors()
        return self

    def _solved(self, curves: list[Curve]) -> CurveLaw:
        """Fitted to curves without their warm-up."""
        runs = [run for run in curves if len(run.steps)]
        if not runs:
            raise InputError("every loss lies in the warm-up, which is left out; longer curves are needed.")
        sizes = sorted({run.N for run in runs if run.N})
        self.reference_ = float(np.exp(np.mean(np.log(sizes)))) if sizes else 1.0
        self.sized_ = len(sizes) > 1
        self.unit_ = max(float(run.lr.max()) for run in runs)
        self.horizon_ = max(float(run.lr[: run.steps[-1]].sum()) for run in runs) / self.unit_
        self.cooldown_seen_ = any(_falls(run.lr[: run.steps[-1]]) for run in runs)
        self._declared = declared(self._form, len(sizes), self.cooldown_seen_, self.fading)
        enough(sum(len(run.steps) for run in runs), len(self._declared), "The law of curves")
        self.runs_ = runs
        self._design = self._designed([(run.lr, run.steps, run.N) for run in runs])
        self._target = np.log(np.concatenate([run.loss for run in runs]))
        share = np.concatenate([np.full(len(run.steps), 1 / len(run.steps)) for run in runs])
        self._share = share * len(share) / len(runs)
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
        """Losses (T,) after each of steps 1..T under lr (T,); with a level a DataFrame of loss, low and high."""
        asked = self._asked(lr, N)
        if level is None:
            return self._losses(asked)
        return pd.DataFrame(dict(zip(("loss", "low", "high"), self._interval(asked, level), strict=True)))

    def final(self, lr: Any, N: float | None = None, level: float = 0.95) -> tuple[float, float, float]:
        """Loss after the last step of lr (T,), and its interval."""
        loss, low, high = self._interval(self._asked(lr, N, last_only=True), level)
        return float(loss[0]), float(low[0]), float(high[0])

    def best_schedule(self, steps: int, peak: float, N: float | None = None, warmup: int = 0) -> Array:
        """The rates (steps,) that fall from `peak` to the lowest last loss under the law (Luo et al. 2025)."""
        from scipy.optimize import minimize

        if not (steps > max(warmup, 0) + 1 and peak > 0):
            raise InputError(
                f"steps is {steps} and peak {peak:g}; more steps than warm-up and a peak above 0 are needed."
            )
        self._can_see(np.array([1.0, 0.0]))
        stride = max((steps - warmup) / COARSE, 1.0)
        count = max(int((steps - warmup) / stride), 2)
        knots = 1 - np.geomspace(1.0, 0.01, 16)
        knots[-1] = 1.0
        place = np.linspace(0, 1, count)
        values, size = self._values(self._theta), self._size(N)

        def rates(ratio: Array) -> Array:
            return np.interp(place, knots, np.concatenate([[1.0], np.cumprod(ratio)]))

        def last(ratio: Array) -> float:
            curve = (rates(ratio) * peak / self.unit_, np.array([count]), size)
            d = design([curve], self.horizon_, self._form.rises, stride=stride)
            return float(np.log(losses(self._form, d, values)[0][0])) * 1e3

        shapes = [np.cos(np.pi / 2 * knots) ** 2, 1 - knots, np.minimum(1, (1 - knots) / 0.2), (1 - knots) ** 2]
        starts = [np.maximum(shape[1:], 1e-4) / np.maximum(shape[:-1], 1e-4) for shape in shapes]
        begun = sorted(starts, key=last)[:2]
        found = min(
            (minimize(last, x, method="L-BFGS-B", bounds=[(0, 1)] * len(x), options={"maxiter": 30}) for x in begun),
            key=lambda result: result.fun,
        )
        decay = np.interp(np.linspace(0, 1, steps - warmup), place, rates(found.x))
        return peak * np.concatenate([np.arange(1, warmup + 1) / (warmup + 1), decay])

    def _asked(self, lr: Any, N: float | None, last_only: bool = False) -> tuple[Array, np.ndarray, float | None]:
        lr = checked_schedule(lr, "the schedule")
        self._can_see(lr)
        return (lr, np.arange(1, len(lr) + 1) if last_only is False else np.array([len(lr)]), N)

    def _can_see(self, lr: Array) -> None:
        if not hasattr(self, "_theta"):
            raise InputError("the law of curves has not been fitted; call fit first.")
        if not self.cooldown_seen_ and _falls(lr):
            raise InputError(
                "the law saw no cooldown, for lr falls in none of its curves, and the schedule falls; "
                "fit a curve with a cooldown, or ask for a constant rate."
            )

    def _losses(self, asked: tuple[Array, np.ndarray, float | None]) -> Array:
        return losses(self._form, self._designed([asked], fine=True), self._values(self._theta))[0]

    def _disagreement(self, asked: tuple[Array, np.ndarray, float | None], value: Array) -> Array:
        """Sum of squared distances of the log losses (rows,) of the other forms from ours, weighed."""
        if not self.cooldown_seen_:
            return np.zeros_like(value)
        if self._rivals is None:
            self._rivals = [
                CurveLaw(name, self.warm, self.fading)._solved(self.runs_) for name in FORMS if name != self.form
            ]
        shares = np.linspace(0.05, 1, 20)
        shapes = len({tuple(np.round(np.quantile(run.lr, shares) / run.lr.max(), 1)) for run in self.runs_})
        weights = [min(1.0, self._misfit / rival._misfit) ** (shapes / 2) for rival in self._rivals]
        total = np.zeros_like(value)
        for weight, rival in zip(weights, self._rivals, strict=True):
            total += weight * (np.log(np.maximum(rival._losses(asked), 1e-300)) - value) ** 2
        return total

    def _size(self, N: float | None) -> float:
        if self.sized_ and N is None:
            raise InputError("N is not given; the law was fitted to several sizes and needs one.")
        if N is not None and not N > 0:
            raise InputError(f"N is {N:g}; it must be above zero.")
        return float(N) / self.reference_ if self.sized_ and N else 1.0

    def _designed(self, curves: list[tuple[Array, np.ndarray, float | None]], fine: bool = False) -> Design:
        scaled = [(lr / self.unit_, steps, self._size(N)) for lr, steps, N in curves]
        return design(scaled, self.horizon_, self._form.rises, fine)

    def _values(self, theta: Array) -> dict[str, float]:
        return {
            name: float(np.exp(value) if constant.log else value)
            for (name, constant), value in zip(self._declared.items(), theta, strict=True)
        }

    def _log_losses(self, theta: Array, d: Design) -> tuple[Array, Array]:
        """Log losses (rows,), and their derivatives (rows, constants) by what is fitted."""
        values = self._values(theta)
        loss, by = losses(self._form, d, values, slopes=True)
        safe = np.maximum(loss, 1e-3 * np.exp(self._target.min()))
        slope = [by[name] * (values[name] if c.log else 1.0) for name, c in self._declared.items()]
        return np.log(safe), np.stack(slope, axis=1) / safe[:, None]

    def _solve(self) -> None:
        from scipy.optimize import least_squares

        constants = list(self._declared.values())
        low, high = (np.array([_inside(c, side) for c in constants]) for side in ("low", "high"))
        root = np.sqrt(self._share)
        kept: dict[str, Any] = {}

        def both(theta: Array) -> tuple[Array, Array]:
            if kept.get("at") != (at := theta.tobytes()):
                value, slope = self._log_losses(theta, self._design)
                kept.update(at=at, both=(root * (value - self._target), root[:, None] * slope))
            return kept["both"]

        def solved(theta: Array, steps: int, tight: float) -> Any:
            return least_squares(
                lambda t: both(t)[0], theta, lambda t: both(t)[1], (low, high), "trf", tight, tight, tight,
                "jac", "huber", DELTA, max_nfev=steps,
            )  # fmt: skip

        tried = [solved(start, TRIED, 1e-6) for start in self._starts(constants)]
        self._theta = solved(min(tried, key=lambda found: found.cost).x, 300, 1e-10).x
        self._misfit = float(np.mean(both(self._theta)[0] ** 2)) + 1e-16

    def _starts(self, constants: list[Constant]) -> list[Array]:
        """Start points in what is fitted; loss itself sets the scale of the amplitudes."""
        scale = float(np.exp(self._target.min()))
        amplitudes = {"E": 0.8, "F": 0.2, "A": 0.2, "B": 0.1}
        found = []
        for i in range(STARTS):
            start = []
            for j, (name, c) in enumerate(self._declared.items()):
                value = c.starts[(i >> (j % 2)) % len(c.starts)] if len(c.starts) > 1 else c.starts[0]
                value = amplitudes[name] * scale * (0.5 if i >= STARTS // 2 else 1.0) if name in amplitudes else value
                start.append(np.log(value) if c.log else value)
            found.append(np.array(start))
        return [start for i, start in enumerate(found) if not any(np.array_equal(start, x) for x in found[:i])]

    def _learn_errors(self) -> None:
        value, slope = self._log_losses(self._theta, self._design)
        missed = self._target - value
        weight = self._share * np.minimum(1.0, DELTA / np.maximum(np.abs(missed), 1e-12))
        rows = self._design.rows
        self.correlation_length_ = memory([missed[part] for part in rows])
        self.effective_points_ = len(missed) / self.correlation_length_
        blocks = (
            rows if len(rows) >= FEW_RUNS else [b for part in rows for b in _blocks(part, self.correlation_length_)]
        )
        spread = max(float(np.average(missed**2, weights=weight)), 1e-16)
        ridge = np.eye(len(self._theta)) * spread / SLACK**2 * float(np.mean(weight))
        self._fit = (value, slope, missed, weight, slope.T @ (weight[:, None] * slope) + ridge)
        moves = np.array([self.moved(block) for block in blocks])
        centred = moves - moves.mean(axis=0)
        self._covariance = centred.T @ centred * (len(blocks) - 1) / len(blocks)
        self.freedom_ = max(len(blocks) - 1, 1)
        ends = [slice(part.stop - max(int(LAST * (part.stop - part.start)), 1), part.stop) for part in rows]
        products = []
        for part, end in zip(rows, ends, strict=True):
            step = self.moved(part) if len(rows) >= FEW_RUNS else 0.0 * self._theta
            products.append(float(np.mean(missed[end] * (missed[end] - slope[end] @ step))))
        self.noise_ = float(np.sqrt(max(np.mean(products), np.mean([np.mean(missed[end] ** 2) for end in ends]))))

    def moved(self, left_out: slice | Array) -> Array:
        """How far the fitted constants move when these rows are left out: one Gauss-Newton step."""
        _, slope, missed, weight, normal = self._fit
        J, w = slope[left_out], weight[left_out]
        return -np.linalg.solve(normal - J.T @ (w[:, None] * J), J.T @ (w * missed[left_out]))

    def _interval(self, asked: tuple[Array, np.ndarray, float | None], level: float) -> tuple[Array, Array, Array]:
        from scipy.stats import t

        check_level(level)
        value, slope = self._log_losses(self._theta, self._designed([asked], fine=True))
        variance = np.einsum("ij,jk,ik->i", slope, self._covariance, slope) + self.noise_**2
        variance += self._disagreement(asked, value)
        half = t.ppf((1 + level) / 2, self.freedom_) * np.sqrt(variance)
        return np.exp(value), np.exp(value - half), np.exp(value + half)


def memory(runs: list[Array]) -> float:
    """How many neighbours in a curve say what one independent point says: 1 + 2 sum of autocorrelations (Geyer)."""
    longest = max(len(run) for run in runs)
    power = sum(float(run @ run) for run in runs)
    if power <= 0:
        return 1.0
    length = 1.0
    for lag in range(1, longest):
        together = sum(float(run[lag:] @ run[:-lag]) for run in runs if len(run) > lag)
        if together <= 0:
            break
        length += 2 * together / power
    return min(length, float(longest))


def _inside(constant: Constant, side: str) -> float:
    value = getattr(constant, side)
    return float(np.log(value) if constant.log else value)


def _blocks(part: slice, length: float) -> list[slice]:
    count = max(int((part.stop - part.start) / max(length, 1.0)), 2)
    edges = np.linspace(part.start, part.stop, min(count, part.stop - part.start) + 1).astype(int)
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


def _falls(lr: Array) -> bool:
    """Whether the rate falls after warm-up by enough to learn from."""
    peak = float(lr.max())
    return bool(lr[int(np.argmax(lr)) :].min() < peak * (1 - SEEN))
