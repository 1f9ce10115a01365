"""Forms of the loss as a function of the mixture, N and D, each fitted to many losses at once.

    effective    L = E + A / N^a + (D sum_i g_i v_i^p)^-b
    product      L = E + N^-a (D sum_i g_i v_i^p)^-b
    exponential  L = E + N^-a D^-b prod_i g_i^v_i
    overfitting  effective, and K sum_i q_i (N / U_i)^k (n_i - 1)^s

v_i is the weight w_i of domain i; after n > 1 epochs of U_i tokens, times h / n, h = 1 + R (1 - e^(-(n - 1) / R))
(Muennighoff et al. 2023, arXiv:2305.16264). More epochs raise a loss only by an additive penalty for over-fitting
(Lovelace et al. 2026, arXiv:2605.01640); q_i is domain i's share of sum_i g_i w_i^p. g are transfer weights to one
loss, p < 1 means that a domain's returns diminish (Shukor et al. 2025, arXiv:2507.09404); the exponential law is by Ye
et al. 2024 (arXiv:2403.16952). Constants have wide normal priors, so that runs at one scale determine a fit. A Gaussian
process, or boosted trees, adds what a form misses at a mixture.
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
# Of this penalty fitted to the runs of Muennighoff et al.: k 0.56 and s 0.88 up to 60 epochs, 0.80 and 0.41 for all.
PENALTY = {"K": (np.log(0.005), 2.0), "k": (np.log(0.7), 0.3), "s": (np.log(0.7), 0.5)}
TRANSFER_SPREAD = 2.0  # standard deviation of a transfer weight, or of its logarithm, about no effect of the mixture
STARTS = ((0.5, 0.2), (0.8, 0.3), (0.9, 0.15))  # E as a share of the lowest loss, and b
FIXED = 1e9  # precision of a constant that a form lacks
ROUNDS, REFITS, REWEIGHED = 60, 12, (0, 6, 12, 18)  # iterations; those in which noise and outliers are judged again
HUBER = 3.0  # residuals above so many standard deviations count linearly
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
    """A form of m domains; its coordinates theta (P, k) are the logs of g and of the constants in `priors`."""

    def __init__(self, kind: str, points: Points) -> None:
        self.kind, self.m = kind, points.weights.shape[1]
        self.priors = PRIORS | (PENALTY if kind == "overfitting" else {})
        self.at = {name: self.m + i for i, name in enumerate(self.priors)}
        self.additive = kind in ("effective", "overfitting")
        lacks = {"A": not (self.additive and np.ptp(points.size)), "a": not np.ptp(points.size)}
        lacks |= {"p": kind == "exponential", "b": kind == "exponential" and not np.ptp(points.tokens)}
        lacks |= dict.fromkeys(self.at.keys() & {"R", *PENALTY}, not points.repeats.any())
        self.lacks = {name for name, lack in lacks.items() if lack}
        spread = [TRANSFER_SPREAD] * self.m + [spread for _, spread in self.priors.values()]
        self.precision = np.array(spread) ** -2.0
        self.precision[[self.at[name] for name in self.lacks]] = FIXED

    def start(self, target: Array, share: float, b: float) -> Array:
        """Return theta (P, k) without an effect of the mixture, which is also the priors' mean."""
        floor, mean = share * np.exp(target.min(axis=1)), np.exp(target.mean(axis=1))
        rest = np.log((mean - floor) / (1.0 if "A" in self.lacks else 2.0))
        theta = np.tile([0.0] * self.m + [mean for mean, _ in self.priors.values()], (len(target), 1))
        theta[:, : self.m] = (rest if self.kind == "exponential" else -rest / b)[:, None]
        theta[:, [self.at["E"], self.at["A"]]] = np.stack([np.log(floor), rest], axis=1)
        theta[:, self.at["b"]] = np.log(b)
        return theta

    def value(self, theta: Array, points: Points) -> tuple[Array, Array]:
        """Return log losses (P, n) and their derivatives by theta (P, n, k)."""
        g, x, y, at = theta[:, None, : self.m], points.size, points.tokens, self.at
        E, b, A, a, p, R, *penalty = np.exp(theta[:, self.m :]).T[..., None]
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
        if self.additive:
            size = np.exp(-a * x) * (0.0 if "A" in self.lacks else A)
        else:
            log_data, size = log_data - a * x, np.zeros(())
            slopes[:, :, at["a"]] = -a * x
        data = np.exp(log_data)
        slopes *= data[..., None]
        slopes[:, :, at["E"]], slopes[:, :, at["A"]] = E, size
        slopes[:, :, at["a"]] -= a * x * size
        loss = E + size + data
        if penalty:
            K, k, s = (constant[..., None] for constant in penalty)
            repeated, log_w = points.repeats > 0, np.log(np.maximum(points.weights, 1e-300))
            passes = np.log(np.where(repeated, np.expm1(points.repeats), 1.0))  # log(n - 1)
            ratio = x[:, None] - y[:, None] + np.where(repeated, points.repeats - log_w, 0.0)  # log(N / U)
            share = np.exp(g + p[..., None] * log_w)
            share /= np.maximum(share.sum(axis=2, keepdims=True), 1e-300)
            worse = share * repeated * K * np.exp(k * ratio + s * passes)
            excess = worse.sum(axis=2)
            slope = worse - share * excess[..., None]  # derivatives by the logs of g_i w_i^p
            slopes[:, :, : self.m] += slope
            slopes[:, :, at["p"]] += p * (slope * log_w).sum(axis=2)
            slopes[:, :, at["K"]] = excess
            slopes[:, :, at["k"]] = (worse * k * ratio).sum(axis=2)
            slopes[:, :, at["s"]] = (worse * s * passes).sum(axis=2)
            loss += excess
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


@np.errstate(all="ignore")  # a step that overflows is not taken
def solve(form: Form, theta: Array, prior: Array, data: Data, rows: Any, rounds: int) -> tuple[Array, Array]:
    """Minimise sum_i w_i huber(r_i / noise) plus the priors over some rows, by the Levenberg-Marquardt method.

    theta and the priors' means are (P, k). Returns theta and the noise of log loss (P,).
    """
    points, target, full = data.points[rows], data.target[:, rows], data.weight[:, rows]
    weight, diagonal, damping = full, np.arange(theta.shape[1]), np.full(len(theta), 1e-2)
    freedom = np.maximum(full.sum(axis=1) - len(diagonal), 0.5 * full.sum(axis=1))
    log, slopes = form.value(theta, points)
    for iteration in range(rounds):
        if iteration in REWEIGHED:
            noise = np.maximum(np.sqrt((weight * (target - log) ** 2).sum(axis=1) / freedom), LEAST_NOISE)
            weight = full / np.maximum(np.abs(target - log) / (HUBER * noise[:, None]), 1.0)
            cost = np.full(len(theta), np.inf)
        scaled = slopes * (weight / noise[:, None] ** 2)[..., None]
        curvature = scaled.swapaxes(1, 2) @ slopes
        curvature[:, diagonal, diagonal] = (curvature[:, diagonal, diagonal] + form.precision) * (1 + damping[:, None])
        descent = np.einsum("pnk,pn->pk", scaled, target - log) - form.precision * (theta - prior)
        moved = theta + np.clip(np.linalg.solve(curvature, descent[..., None])[..., 0], -2.0, 2.0)
        costs = []
        for at, value in ((theta, log), (moved, (new := form.value(moved, points))[0])):
            misfit = (weight * (target - value) ** 2).sum(axis=1) / noise**2
            costs.append(misfit + ((at - prior) ** 2 * form.precision).sum(axis=1))
        cost, better = costs[0], costs[1] < costs[0]
        theta, log = np.where(better[:, None], moved, theta), np.where(better[:, None], new[0], log)
        slopes = np.where(better[:, None, None], new[1], slopes)
        damping = np.clip(np.where(better, 0.2, 5.0) * damping, 1e-9, 1e9)
        if iteration > REWEIGHED[-1] and (~better | (costs[0] - costs[1] < 1e-7 * cost)).all():
            break
    return theta, noise


def fit_form(form: Form, data: Data) -> tuple[Array, Array, Array]:
    """Fit a form to all rows from each of STARTS; return each loss's best theta, its priors' means, and the noise."""
    starts = [form.start(data.target, *start) for start in STARTS]
    fits = [(*solve(form, start, start, data, slice(None), ROUNDS), start) for start in starts]
    best, losses = np.argmin([noise for _, noise, _ in fits], axis=0), np.arange(len(data.target))
    theta, noise, prior = (np.stack(parts)[best, losses] for parts in zip(*fits, strict=True))
    return theta, prior, noise


class Corrected:
    """A form and a correction by mixture, fitted to all rows and to the rows that each hold-out fits.

    held: predictions (losses, tested) of each hold-out.
    """

    def __init__(self, form: Form, correction: Any, data: Data, cuts: list[CutOff], folds: int) -> None:
        self.form, self.fits = form, list[tuple[Array, list[Any]]]()
        self.theta, prior, _ = fit_form(form, data)
        first = np.unique(data.mixture, return_index=True)[1]
        members = data.mixture == np.arange(len(first))[:, None]
        for below in [np.ones(len(data.group), dtype=bool), *(cut.fitted for cut in cuts)]:
            theta = solve(form, self.theta, prior, data, below, REFITS)[0] if self.fits else self.theta
            residual, steps = data.target - form.value(theta, data.points)[0], list[Any]()
            for k, weights in enumerate(data.weight * below):
                has_residual = members @ weights > 0
                mean = members[has_residual] @ (weights * residual[k]) / (members[has_residual] @ weights)
                places = form.places(self.theta[k], data.points[first[has_residual]])
                steps.append(correction(places, mean, self.fits[0][1][k] if self.fits else None))
            self.fits.append((theta, steps))
        self.held = [self._value(fit, data.points[cut.tested]) for fit, cut in zip(self.fits[1:], cuts, strict=True)]
        self.fits = self.fits[: folds + 1]

    def _value(self, fit: tuple[Array, list[Any]], points: Points) -> Array:
        steps = [step.predict(self.form.places(t, points)) for step, t in zip(fit[1], self.theta, strict=True)]
        return self.form.value(fit[0], points)[0] + np.stack(steps)

    def predict(self, points: Points, folds: bool) -> tuple[Array, Array]:
        """Return log losses (losses, n) and, with `folds`, those of the fits without each fold, (losses, n, folds)."""
        values = [self._value(fit, points) for fit in (self.fits if folds else self.fits[:1])]
        return values[0], np.stack(values[1:] or values, axis=2)


class Process:
    """A Gaussian process through residuals (n,) at places (n, m), with a squared exponential of the median distance.

    The ratio of the noise's variance to its own has the greatest likelihood, or is that of `like`.
    """

    def __init__(self, places: Array, residual: Array, like: Process | None) -> None:
        self.places = places
        self.length: float = like.length if like else float(np.median(pdist(places))) or 1.0
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
