"""Forms of the loss as a function of the mixture, N and D, each fitted to many losses at once.

    effective    L = E + A / N^a + (D sum_i g_i v_i^p)^-b
    product      L = E + N^-a (D sum_i g_i v_i^p)^-b
    exponential  L = E + N^-a D^-b exp(sum_i g_i v_i)

v_i is the weight of domain i; after n > 1 epochs, times (1 + R (1 - exp(-(n - 1) / R))) / n (Muennighoff et al. 2023,
arXiv:2305.16264). g are transfer weights to one loss, p < 1 means that a domain's returns diminish (Shukor et al. 2025,
arXiv:2507.09404); the exponential law is by Ye et al. 2024 (arXiv:2403.16952). Constants have wide normal priors, so
that runs at one scale determine a fit. A Gaussian process, or boosted trees, adds what a form misses at a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist, pdist

from ..errors import Array
from ..forecasting.forecaster import CutOff
from ..laws.repetition import saturated

# Prior of each constant's logarithm: mean (NaN: from the data) and standard deviation. b, a, R: about published values.
PRIORS = {"E": (np.nan, 3.0), "b": (np.log(0.3), 1.0), "A": (np.nan, 3.0), "a": (np.log(0.34), 0.3)}
PRIORS |= {"p": (0.0, 0.5), "R": (np.log(15.4), 1.0)}
TRANSFER_SPREAD = 2.0  # standard deviation of a transfer weight, or of its logarithm, about no effect of the mixture
STARTS = ((0.5, 0.2), (0.8, 0.3), (0.9, 0.15))  # E as a share of the lowest loss, and b
FIXED = 1e9  # precision of a constant that a form lacks
ROUNDS, REFITS, REWEIGHED = 60, 12, (0, 6, 12, 20)  # iterations; those in which outliers and noise are judged again
HUBER = 3.0  # residuals above so many standard deviations count linearly
MOST_LEVERAGE = 0.8  # of a group, when its residual is scaled to that of a fit without it; chosen by hand
LEAST_NOISE = 1e-4  # of log loss
RATIOS = np.geomspace(0.01, 100.0, 17)  # of the noise's variance to the process's; the likeliest is taken
TREES = {"max_iter": 60, "max_depth": 4, "max_bins": 64, "min_samples_leaf": 5, "early_stopping": False}


@dataclass(frozen=True)
class Points:
    """Weights (n, m), and logs of N and D (n,) about the table's means and of epochs (n, m), at least zero."""

    weights: Array
    size: Array
    tokens: Array
    repeats: Array

    def __getitem__(self, rows: Any) -> Points:
        return Points(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Data:
    """Log losses and weights of n rows, (losses, n), and the numbers of their mixtures and groups, (n,)."""

    points: Points
    target: Array
    weight: Array
    mixture: np.ndarray
    group: np.ndarray


class Form:
    """A form of m domains; its coordinates theta (P, k) are the logs of g (exponential: g) and of PRIORS."""

    def __init__(self, kind: str, points: Points) -> None:
        self.kind, self.m = kind, points.weights.shape[1]
        self.at = {name: self.m + i for i, name in enumerate(PRIORS)}
        lacks = {"A": kind != "effective" or not np.ptp(points.size), "a": not np.ptp(points.size)}
        lacks |= {"p": kind == "exponential", "R": not points.repeats.any()}
        lacks["b"] = kind == "exponential" and not np.ptp(points.tokens)
        self.lacks = {name for name, lack in lacks.items() if lack}
        spread = [TRANSFER_SPREAD] * self.m + [spread for _, spread in PRIORS.values()]
        self.precision = np.array(spread) ** -2.0
        self.precision[[self.at[name] for name in self.lacks]] = FIXED

    def start(self, target: Array, share: float, b: float) -> Array:
        """Return theta (P, k) without an effect of the mixture, which is also the priors' mean."""
        floor, mean = share * np.exp(target.min(axis=1)), np.exp(target.mean(axis=1))
        rest = np.log((mean - floor) / (1.0 if "A" in self.lacks else 2.0))
        theta = np.tile([0.0] * self.m + [mean for mean, _ in PRIORS.values()], (len(target), 1))
        theta[:, : self.m] = (rest if self.kind == "exponential" else -rest / b)[:, None]
        theta[:, [self.at["E"], self.at["A"]]] = np.stack([np.log(floor), rest], axis=1)
        theta[:, self.at["b"]] = np.log(b)
        return theta

    def value(self, theta: Array, points: Points) -> tuple[Array, Array]:
        """Return log losses (P, n) and their derivatives by theta (P, n, k)."""
        g, x, y, at = theta[:, None, : self.m], points.size, points.tokens, self.at
        E, b, A, a, p, R = np.exp(theta[:, self.m :]).T[..., None]
        slopes = np.zeros((len(theta), len(x), theta.shape[1]))
        v, by_R = self._worth(points, R[..., None])
        if self.kind == "exponential":
            log_data = (g * v).sum(axis=2) - b * y
            slopes[:, :, : self.m], slopes[:, :, at["b"]] = v, -b * y
            slopes[:, :, at["R"]] = (g * v * by_R).sum(axis=2)
        else:
            log_v = np.log(np.maximum(v, 1e-300))
            parts = np.exp(g + p[..., None] * log_v)
            total = np.maximum(parts.sum(axis=2), 1e-300)
            parts /= total[..., None]
            log_data = -b * (y + np.log(total))
            slopes[:, :, : self.m], slopes[:, :, at["b"]] = -b[..., None] * parts, log_data
            slopes[:, :, at["p"]] = -b * p * (parts * log_v).sum(axis=2)
            slopes[:, :, at["R"]] = -b * p * (parts * by_R).sum(axis=2)
        if self.kind == "effective":
            size = np.exp(-a * x) * (0.0 if "A" in self.lacks else A)
        else:
            log_data, size = log_data - a * x, np.zeros(())
            slopes[:, :, at["a"]] = -a * x
        data = np.exp(log_data)
        slopes *= data[..., None]
        slopes[:, :, at["E"]], slopes[:, :, at["A"]] = E, size
        slopes[:, :, at["a"]] -= a * x * size
        loss = E + size + data
        slopes *= (self.precision < FIXED) / loss[..., None]
        return np.log(loss), slopes

    def _worth(self, points: Points, R: Any) -> tuple[Array, Array]:
        """Return weights reduced for repetition, (P, n, m), and the derivatives of their logs by log R."""
        if "R" in self.lacks:
            return points.weights[None], np.zeros(1)
        z = np.expm1(points.repeats) / R
        slope = R * (1.0 - np.exp(-z) * (1.0 + z)) / (1.0 - R * np.expm1(-z))
        return points.weights * np.exp(saturated(points.repeats, np.log(R)) - points.repeats), slope

    def places(self, theta: Array, points: Points) -> Array:
        """Return each domain's part in the tokens that help a loss, (n, m), for coordinates theta (k,)."""
        p, R = np.exp(theta[[self.at["p"], self.at["R"]]])
        parts = np.exp(theta[: self.m]) * self._worth(points, R)[0].reshape(points.weights.shape) ** p
        return np.asarray(parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300))

    def constants(self, theta: Array) -> Array:
        """Return g and the constants of PRIORS, (P, k)."""
        logs = np.arange(theta.shape[1]) >= (self.m if self.kind == "exponential" else 0)
        return np.where(logs, np.exp(np.where(logs, theta, 0.0)), theta)


@np.errstate(all="ignore")  # a step that overflows is not taken
def solve(form: Form, theta: Array, prior: Array, data: Data, rows: Any, noise: Array | None = None) -> list[Array]:
    """Minimise sum_i w_i huber(r_i / noise) plus the priors over some rows, by the Levenberg-Marquardt method.

    `noise` (P,): that of a fit nearby, of which `theta` is the optimum; fewer iterations are then made. Returns theta
    (P, k), the priors' means, noise (P,), weights with outliers reduced (P, n) and -2 log likelihood (P,).
    """
    points, target, full = data.points[rows], data.target[:, rows], data.weight[:, rows]
    near, weight, diagonal = noise is not None, full, np.arange(theta.shape[1])
    noise = np.full(len(theta), 0.02) if noise is None else noise
    damping, freedom = np.full(len(theta), 1e-2), full.sum(axis=1)

    def objective(log: Array, at: Array) -> Array:
        return (weight * (target - log) ** 2).sum(axis=1) / noise**2 + ((at - prior) ** 2 * form.precision).sum(axis=1)

    log, slopes = form.value(theta, points)
    for iteration in range(REFITS if near else ROUNDS):
        if iteration in REWEIGHED and (near or iteration):
            weight = full / np.maximum(np.abs(target - log) / (HUBER * noise[:, None]), 1.0)
            if not near:
                rest = np.maximum(freedom - len(diagonal), 0.5 * freedom)
                noise = np.maximum(np.sqrt((weight * (target - log) ** 2).sum(axis=1) / rest), LEAST_NOISE)
        cost, scaled = objective(log, theta), slopes * (weight / noise[:, None] ** 2)[..., None]
        curvature = scaled.swapaxes(1, 2) @ slopes
        curvature[:, diagonal, diagonal] = (curvature[:, diagonal, diagonal] + form.precision) * (1 + damping[:, None])
        descent = np.einsum("pnk,pn->pk", scaled, target - log) - form.precision * (theta - prior)
        moved = theta + np.clip(np.linalg.solve(curvature, descent[..., None])[..., 0], -2.0, 2.0)
        new_log, new_slopes = form.value(moved, points)
        new_cost = objective(new_log, moved)
        better = new_cost < cost
        theta, log = np.where(better[:, None], moved, theta), np.where(better[:, None], new_log, log)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        damping = np.clip(np.where(better, 0.2, 5.0) * damping, 1e-9, 1e9)
        if iteration > REWEIGHED[-1] and (~better | (cost - new_cost < 1e-7 * cost)).all():
            break
    return [theta, prior, noise, weight, objective(log, theta) + 2.0 * freedom * np.log(noise)]


def fit_form(form: Form, data: Data) -> list[Array]:
    """Fit a form to all rows from each of STARTS; return each loss's likeliest solution, as `solve` does."""
    starts = [form.start(data.target, *start) for start in STARTS]
    solutions = [solve(form, start, start, data, slice(None)) for start in starts]
    best = np.argmin([solution[-1] for solution in solutions], axis=0)
    return [np.stack(parts)[best, np.arange(len(best))] for parts in zip(*solutions, strict=True)]


class Corrected:
    """A form and a correction by mixture, fitted to all rows and, for `held` (losses, tested), below each hold-out.

    Draws move the form by one linear step for residuals with random `signs` (draws, n), the same in a group, and for
    draws of the priors; those of the correction are a jackknife over the first `folds` hold-outs.
    """

    def __init__(self, form: Form, correction: Any, data: Data, cuts: list[CutOff], signs: Array, folds: int) -> None:
        self.form, rows = form, [np.ones(len(data.group), dtype=bool), *(cut.fitted for cut in cuts)]
        self.theta, prior, noise, weight, _ = fit_form(form, data)
        generator = np.random.default_rng(len(signs))
        self._move(data, noise, weight, signs, generator)
        thetas = [self.theta, *(solve(form, self.theta, prior, data, below, noise)[0] for below in rows[1:])]
        first = np.unique(data.mixture, return_index=True)[1]
        members = data.mixture == np.arange(len(first))[:, None]
        self.steps: list[list[Any]] = []
        for theta, below in zip(thetas, rows, strict=True):
            residual = data.target - form.value(theta, data.points)[0]
            steps = []
            for k, weights in enumerate(data.weight * below):
                total = members @ weights
                mean, known = members @ (weights * residual[k]) / np.maximum(total, 1e-300), total > 0
                places = form.places(self.theta[k], data.points[first[known]])
                steps.append(correction(places, mean[known], self.steps[0][k] if self.steps else None))
            self.steps.append(steps)
        points = [data.points[cut.tested] for cut in cuts]
        pairs = zip(thetas[1:], self.steps[1:], points, strict=True)
        self.held = [form.value(theta, at)[0] + self._corrections(steps, at) for theta, steps, at in pairs]
        self.steps, self.drawn = self.steps[: folds + 1], generator.integers(folds, size=len(signs))

    def _move(self, data: Data, noise: Array, weight: Array, signs: Array, generator: Any) -> None:
        """Draw changes of theta, (losses, k, draws)."""
        log, slopes = self.form.value(self.theta, data.points)
        scaled = slopes * (weight / noise[:, None] ** 2)[..., None]
        curvature = scaled.swapaxes(1, 2) @ slopes
        inverse = np.linalg.inv(curvature + np.diag(self.form.precision))
        leverage = np.einsum("pnk,pkl,pnl->pn", scaled, inverse, slopes, optimize=True)
        together = np.stack([np.bincount(data.group, row)[data.group] for row in leverage])
        left_out = (data.target - log) / (1.0 - np.minimum(together, MOST_LEVERAGE))
        freedom = np.maximum(data.group.max() + 1.0 - leverage.sum(axis=1), 1.0)[:, None]
        t = np.sqrt(freedom / generator.chisquare(freedom, (len(freedom), len(signs))))
        pull = np.einsum("pnk,pn,rn->pkr", scaled, left_out, signs, optimize=True) * t[:, None]
        prior = np.sqrt(self.form.precision)[:, None] * generator.standard_normal((slopes.shape[2], len(signs)))
        self.moves = inverse @ (pull + prior)

    def _corrections(self, steps: list[Any], points: Points) -> Array:
        return np.stack([s.predict(self.form.places(t, points)) for s, t in zip(steps, self.theta, strict=True)])

    def predict(self, points: Points, draws: bool) -> tuple[Array, Array]:
        """Return log losses (losses, n) and, with `draws`, their draws (losses, n, draws)."""
        log, slopes = self.form.value(self.theta, points)
        log = log + self._corrections(self.steps[0], points)
        if not draws:
            return log, log[..., None]
        folds = np.stack([self._corrections(steps, points) for steps in self.steps[1:]], axis=2)
        away = np.sqrt(folds.shape[2] - 1.0) * (folds - folds.mean(axis=2, keepdims=True))
        return log, log[..., None] + slopes @ self.moves + away[..., self.drawn]


class Process:
    """A Gaussian process through residuals (n,) at places (n, m), with a squared exponential of the median distance.

    The ratio of the noise's variance to its own has the greatest likelihood, or is that of `like`.
    """

    def __init__(self, places: Array, residual: Array, like: Process | None) -> None:
        self.places, self.length = places, like.length if like else float(np.median(pdist(places))) or 1.0
        kernel = self._kernel(places)
        if like is None:
            values, vectors = np.linalg.eigh(kernel)
            variances = np.maximum(values, 0.0)[:, None] + RATIOS
            scale = ((vectors.T @ residual)[:, None] ** 2 / variances).mean(axis=0)
            likelihood = len(residual) * np.log(np.maximum(scale, 1e-300)) + np.log(variances).sum(axis=0)
        self.ratio: float = like.ratio if like else RATIOS[np.argmin(likelihood)]
        self.solved = cho_solve(cho_factor(kernel + self.ratio * np.eye(len(kernel))), residual)

    def _kernel(self, places: Array) -> Array:
        return np.asarray(np.exp(-0.5 * cdist(places, self.places, "sqeuclidean") / self.length**2))

    def predict(self, places: Array) -> Array:
        return np.asarray(self._kernel(places) @ self.solved)


def boosted_trees(places: Array, residual: Array, like: Any) -> Any:
    """Return scikit-learn's boosted trees of residuals (n,) by places (n, m); `like` is ignored."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(**TREES, random_state=0).fit(places, residual)
