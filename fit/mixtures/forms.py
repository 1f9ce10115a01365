"""Forms of the loss as a function of a mixture of domains, N and D, each fitted to many losses at once.

    effective    L = E + A / N^a + (D sum_i g_i v_i^p)^-b
    product      L = E + N^-a (D sum_i g_i v_i^p)^-b
    exponential  L = E + N^-a D^-b exp(sum_i t_i v_i)

v_i is the weight of domain i. Where a domain's n epochs exceed one, it is reduced to the weight that its tokens are
still worth, (1 + R (1 - exp(-(n - 1) / R))) / n of it (Muennighoff et al. 2023, arXiv:2305.16264). The transfer weights
g and t belong to one held-out loss. Exponential: Ye et al. 2024 (arXiv:2403.16952); effective: with p = 1 a power law in
the tokens that help a loss; p below one, diminishing returns of each domain (Shukor et al. 2025, arXiv:2507.09404).
Constants have wide normal priors, so that runs at one scale, or at two sizes, determine a fit.
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

# Means and standard deviations of priors, of logarithms except for transfer weights. a, b, R: published exponents and
# Muennighoff's R_D; the others are wide.
PRIORS = {"E": (np.nan, 3.0), "b": (np.log(0.3), 1.0), "A": (np.nan, 3.0), "a": (np.log(0.34), 0.3)}
PRIORS |= {"p": (0.0, 0.5), "R": (np.log(15.4), 1.0)}
TRANSFER_SPREAD = 2.0
STARTS = ((0.5, 0.2), (0.8, 0.3), (0.9, 0.15))  # share of E in the lowest loss, and b
FIXED = 1e9  # precision of the prior of a constant that a form lacks
ROUNDS, REFITS, WEIGHED = 60, 12, (6, 12, 20)  # iterations of a fit and of a refit near it; when rows are weighed again
HUBER = 3.0  # residuals above so many standard deviations count linearly
LEAST_NOISE = 1e-4  # of log loss; keeps exact data from infinite weights
FEATURES = 256  # random features of a draw of the correction
RATIOS = np.geomspace(0.01, 100.0, 17)  # of noise to the correction's variance, from which the likelihood chooses
TREES = {"max_iter": 60, "max_depth": 4, "max_bins": 64, "min_samples_leaf": 5, "early_stopping": False}


@dataclass(frozen=True)
class Points:
    """Where a loss is asked for: weights (n, m), and logs about the fit's means: of N and D (n,), of epochs (n, m)."""

    weights: Array
    size: Array
    tokens: Array
    repeats: Array  # at least zero

    def __getitem__(self, rows: Any) -> Points:
        return Points(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Data:
    """Log losses (losses, n) at n points, the rows' weights (losses, n), and their mixture and group numbers (n,)."""

    points: Points
    target: Array
    weight: Array
    mixture: np.ndarray
    group: np.ndarray


class Form:
    """A form for m domains; constants theta (P, k) are the m transfer weights and then PRIORS."""

    def __init__(self, kind: str, points: Points) -> None:
        self.kind, self.m = kind, points.weights.shape[1]
        self.at = {name: self.m + i for i, name in enumerate(PRIORS)}
        absent = {"A"} if kind != "effective" or not np.ptp(points.size) else set()
        absent |= set() if np.ptp(points.size) else {"a"}
        absent |= {"p"} if kind == "exponential" else set()
        absent |= {"R"} if not points.repeats.any() else set()
        absent |= {"b"} if kind == "exponential" and not np.ptp(points.tokens) else set()
        self.absent = absent
        self.precision = np.full(self.m + len(PRIORS), TRANSFER_SPREAD**-2)
        for name, i in self.at.items():
            self.precision[i] = FIXED if name in absent else PRIORS[name][1] ** -2

    def start(self, target: Array, share: float, b: float) -> Array:
        """Return theta (P, k) at which the loss ignores the mixture; `share` of the lowest loss is E."""
        theta = np.zeros((len(target), len(self.precision)))
        floor = share * np.exp(target.min(axis=1))
        rest = np.exp(target.mean(axis=1)) - floor
        for name, i in self.at.items():
            theta[:, i] = PRIORS[name][0]
        theta[:, self.at["E"]], theta[:, self.at["b"]] = np.log(floor), np.log(b)
        theta[:, self.at["A"]] = np.log(rest / 2)
        rest = rest if "A" in self.absent else rest / 2
        middle = np.log(rest) if self.kind == "exponential" else -np.log(rest) / b
        theta[:, : self.m] = middle[:, None]
        return theta

    def prior(self, start: Array) -> Array:
        mean = start.copy()
        mean[:, self.at["b"]] = np.where("b" in self.absent, start[:, self.at["b"]], PRIORS["b"][0])
        return mean

    def value(self, theta: Array, points: Points) -> tuple[Array, Array]:
        """Return log losses (P, n) and their derivatives (P, n, k)."""
        m, x, y = self.m, points.size, points.tokens
        E, b, A, a, p, R = np.exp(theta[:, m:]).T[..., None]
        slopes = np.zeros((len(theta), len(x), theta.shape[1]))
        v, by_R = points.weights[None], np.zeros((1, 1, 1))
        if "R" not in self.absent:
            v, by_R = _worth(points, R[..., None])
        if self.kind == "exponential":
            slopes[:, :, :m] = v
            log_data = np.einsum("pnm,pm->pn", np.broadcast_to(v, slopes[:, :, :m].shape), theta[:, :m]) - b * y
            slopes[:, :, self.at["b"]] = -b * y
            slopes[:, :, self.at["R"]] = np.einsum("pnm,pm->pn", v * by_R, theta[:, :m]) if by_R.size > 1 else 0.0
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                log_v = np.where(v > 0, np.log(v), 0.0)
            parts = np.exp(theta[:, None, :m]) * np.where(v > 0, np.exp(p[..., None] * log_v), 0.0)
            total = np.maximum(parts.sum(axis=2), 1e-300)
            shares = parts / total[..., None]
            log_data = -b * (y + np.log(total))
            slopes[:, :, :m] = -b[..., None] * shares
            slopes[:, :, self.at["b"]] = log_data
            slopes[:, :, self.at["p"]] = -b * p * (shares * log_v).sum(axis=2)
            slopes[:, :, self.at["R"]] = -b * p * (shares * by_R).sum(axis=2)
        if self.kind != "effective":
            log_data = log_data - a * x
            slopes[:, :, self.at["a"]] = -a * x
        data = np.exp(log_data)
        slopes *= data[..., None]
        slopes[:, :, self.at["E"]] = E
        size = np.zeros_like(data)
        if "A" not in self.absent:
            size = A * np.exp(-a * x)
            slopes[:, :, self.at["A"]], slopes[:, :, self.at["a"]] = size, -a * x * size
        loss = E + size + data
        slopes /= loss[..., None]
        slopes[:, :, self.precision == FIXED] = 0.0
        return np.log(loss), slopes

    def contributions(self, theta: Array, points: Points) -> Array:
        """Return the part of each domain in the tokens that help a loss, (n, m), for constants theta (k,)."""
        p, R = np.exp(theta[[self.at["p"], self.at["R"]]])
        v = points.weights if "R" in self.absent else _worth(points, R)[0]
        parts = np.exp(theta[: self.m]) * v**p
        return np.asarray(parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300))


def _worth(points: Points, R: Any) -> tuple[Array, Array]:
    """Return the weights that repeated tokens are worth, and the derivatives of their logarithms by log R."""
    value = points.weights * np.exp(saturated(points.repeats, np.log(R)) - points.repeats)
    z = np.expm1(points.repeats) / R
    return value, R * (1.0 - np.exp(-z) * (1.0 + z)) / (1.0 - R * np.expm1(-z))


@dataclass(frozen=True)
class Solution:
    """Constants theta (P, k), noise (P,) of log losses, weights (P, n) with outliers reduced, and the objective (P,)."""

    theta: Array
    noise: Array
    weight: Array
    objective: Array


@np.errstate(all="ignore")  # a step that overflows has an infinite objective and is not taken
def solve(
    form: Form, theta: Array, prior: Array, target: Array, weight: Array, points: Points, noise: Array | None = None
) -> Solution:
    """Minimise sum_i w_i huber(r_i / noise) and the priors by Levenberg's and Marquardt's method, P problems at once.

    With `noise` (P,), that of a fit nearby, few iterations are made.
    """
    refit, full = noise is not None, weight
    noise = np.full(len(theta), 0.02) if noise is None else noise
    damping, diagonal = np.full(len(theta), 1e-2), np.arange(theta.shape[1])

    def objective(log: Array, at: Array) -> Array:
        return (weight * (target - log) ** 2).sum(axis=1) / noise**2 + ((at - prior) ** 2 * form.precision).sum(axis=1)

    log, slopes = form.value(theta, points)
    for iteration in range(REFITS if refit else ROUNDS):
        if iteration in WEIGHED[: 1 if refit else None]:
            reach = HUBER * noise[:, None] / np.maximum(np.abs(target - log), 1e-12)
            weight = full * np.minimum(1.0, reach) if iteration else full
            freedom = np.maximum(full.sum(axis=1) - len(diagonal), 0.5 * full.sum(axis=1))
            if not refit:
                noise = np.maximum(np.sqrt((weight * (target - log) ** 2).sum(axis=1) / freedom), LEAST_NOISE)
        cost = objective(log, theta)
        weighted = slopes * (weight / noise[:, None] ** 2)[..., None]
        curvature = weighted.swapaxes(1, 2) @ slopes
        curvature[:, diagonal, diagonal] += form.precision
        descent = np.einsum("pnk,pn->pk", weighted, target - log) - form.precision * (theta - prior)
        curvature[:, diagonal, diagonal] *= 1.0 + damping[:, None]
        step = np.linalg.solve(curvature, descent[..., None])[..., 0]
        moved = theta + np.clip(step, -2.0, 2.0)
        new_log, new_slopes = form.value(moved, points)
        new_cost = objective(new_log, moved)
        better = new_cost < cost
        theta, log = np.where(better[:, None], moved, theta), np.where(better[:, None], new_log, log)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        damping = np.clip(np.where(better, 0.2, 5.0) * damping, 1e-9, 1e9)
        if iteration > WEIGHED[-1] and (~better | (cost - new_cost < 1e-7 * cost)).all():
            break
    return Solution(theta, noise, weight, objective(log, theta))


class Member:
    """A form fitted to all rows and below each hold-out, with draws of its surface by one linear step.

    theta (losses, k); moves (losses, k, draws): changes of theta; held: predictions (losses, tested) of each hold-out.
    """

    def __init__(self, kind: str, data: Data, cuts: list[CutOff], signs: Array, seed: int) -> None:
        self.form = form = Form(kind, data.points)
        fits = []
        for share, b in STARTS:
            start = form.start(data.target, share, b)
            prior = form.prior(start)
            fits.append((solve(form, start, prior, data.target, data.weight, data.points), prior))
        best = np.argmin([solution.objective for solution, _ in fits], axis=0)
        rows = np.arange(len(best))
        take = lambda arrays: np.stack(arrays)[best, rows]  # noqa: E731
        self.theta, self.noise, weight = (
            take([getattr(solution, name) for solution, _ in fits]) for name in ("theta", "noise", "weight")
        )
        self.prior = take([prior for _, prior in fits])
        self.residual, slopes = self._residual(self.theta, data)
        self.moves = self._moves(slopes, weight, data, signs, seed)
        self.slopes = slopes
        self.refits = [self._refit(cut, data) for cut in cuts]
        self.held = [form.value(t, data.points[cut.tested])[0] for t, cut in zip(self.refits, cuts, strict=True)]

    def _residual(self, theta: Array, data: Data) -> tuple[Array, Array]:
        log, slopes = self.form.value(theta, data.points)
        return np.where(data.weight > 0, data.target - log, 0.0), slopes

    def _refit(self, cut: CutOff, data: Data) -> Array:
        rows = cut.fitted
        return solve(
            self.form, self.theta, self.prior, data.target[:, rows], data.weight[:, rows], data.points[rows], self.noise
        ).theta

    def _moves(self, slopes: Array, weight: Array, data: Data, signs: Array, seed: int) -> Array:
        """Return changes of theta: residuals with random signs by group, and draws of the priors."""
        scaled = slopes * (weight / self.noise[:, None] ** 2)[..., None]
        curvature = scaled.swapaxes(1, 2) @ slopes
        constants = np.arange(curvature.shape[1])
        prior = curvature.copy()
        prior[:, constants, constants] += self.form.precision
        inverse = np.linalg.inv(prior)
        used = np.trace(inverse @ curvature, axis1=1, axis2=2)  # constants that the data, not the priors, determine
        groups = len(np.unique(data.group))
        freedom = np.maximum(groups - used, 1.0)
        generator = np.random.default_rng(seed)
        t = np.sqrt(groups / generator.chisquare(freedom[:, None], (len(freedom), len(signs))))
        pull = np.einsum("pnk,pn,rn->pkr", scaled, self.residual, signs, optimize=True) * t[:, None]
        pull += np.sqrt(self.form.precision)[:, None] * generator.standard_normal((len(constants), len(signs)))
        return np.asarray(inverse @ pull)

    def predict(self, points: Points, draws: bool = True) -> tuple[Array, Array]:
        """Return log losses (losses, n) and, with `draws`, their draws (losses, n, draws)."""
        log, slopes = self.form.value(self.theta, points)
        return log, log[..., None] + slopes @ self.moves if draws else log[..., None]


class Corrected:
    """A form times a Gaussian process over mixtures: what the form misses at a mixture, at every N and D.

    The process sees each domain's part in the effective tokens, with a squared-exponential kernel as long as the median
    distance. The ratio of noise to its variance has the greatest likelihood. Draws are by Matheron's rule with random
    features (Wilson et al. 2020, arXiv:2002.09309).
    """

    def __init__(self, law: Member, data: Data, cuts: list[CutOff], draws: int, seed: int) -> None:
        self.law, count = law, int(data.mixture.max()) + 1
        first = np.unique(data.mixture, return_index=True)[1]
        weight = np.stack([np.bincount(data.mixture, w, count) for w in data.weight])
        generator = np.random.default_rng(seed + 1)

        def means(values: Array, weights: Array) -> Array:  # (losses, n) -> (losses, mixtures)
            total = np.stack([np.bincount(data.mixture, v * w, count) for v, w in zip(values, weights, strict=True)])
            return total / np.maximum(np.stack([np.bincount(data.mixture, w, count) for w in weights]), 1e-300)

        residual = means(law.residual, data.weight)
        slopes = np.stack([means(s, data.weight) for s in np.moveaxis(law.slopes, 2, 0)], axis=2)
        below = [np.where(cut.fitted, data.weight, 0.0) for cut in cuts]
        rolled = [means(law._residual(t, data)[0], w) for t, w in zip(law.refits, below, strict=True)]
        self.held = [held.copy() for held in law.held]
        self.parts = []
        for k, theta in enumerate(law.theta):
            place = law.form.contributions(theta, data.points[first])
            length = float(np.median(pdist(place))) or 1.0
            kernel = np.exp(-0.5 * cdist(place, place, "sqeuclidean") / length**2)
            scale, ratio = _likeliest(kernel, residual[k])
            known = weight[k] > 0
            noisy = kernel + np.diag(np.where(known, ratio, FIXED))
            omega = generator.standard_normal((FEATURES, place.shape[1])) / length
            phase = generator.uniform(0.0, 2 * np.pi, FEATURES)
            amplitudes = scale * generator.standard_normal((FEATURES, draws))
            part = [place, length, None, None, omega, phase, amplitudes]
            sampled = _features(place, omega, phase) @ amplitudes
            sampled += scale * np.sqrt(ratio) * generator.standard_normal(sampled.shape)
            moved = residual[k][:, None] - slopes[k] @ law.moves[k] - sampled
            right = np.column_stack([residual[k], moved])
            solved = cho_solve(cho_factor(noisy), right) if scale else np.zeros_like(right)
            part[2:4] = solved[:, 0], solved[:, 1:]
            self.parts.append(part)
            for j, cut in enumerate(cuts):
                has = below[j][k] > 0
                seen = np.unique(data.mixture[has])
                if scale and len(seen):
                    alpha = cho_solve(cho_factor(noisy[np.ix_(seen, seen)]), rolled[j][k][seen])
                    self.held[j][k] += kernel[np.ix_(data.mixture[cut.tested], seen)] @ alpha

    def predict(self, points: Points, draws: bool = True) -> tuple[Array, Array]:
        log, drawn = self.law.predict(points, draws)
        for k, (place, length, mean, alphas, omega, phase, amplitudes) in enumerate(self.parts):
            at = self.law.form.contributions(self.law.theta[k], points)
            kernel = np.exp(-0.5 * cdist(at, place, "sqeuclidean") / length**2)
            log[k] += kernel @ mean
            drawn[k] += (
                kernel @ alphas + _features(at, omega, phase) @ amplitudes if draws else (kernel @ mean)[:, None]
            )
        return log, drawn


def _features(place: Array, omega: Array, phase: Array) -> Array:
    return np.sqrt(2.0 / len(omega)) * np.cos(place @ omega.T + phase)


def _likeliest(kernel: Array, residual: Array) -> tuple[float, float]:
    """Return the standard deviation of the process and the ratio of the noise's variance to its own."""
    values, vectors = np.linalg.eigh(kernel)
    squares = (vectors.T @ residual) ** 2
    variances = np.maximum(values, 0.0)[:, None] + RATIOS
    scale = (squares[:, None] / variances).mean(axis=0)
    likelihood = len(residual) * np.log(np.maximum(scale, 1e-300)) + np.log(variances).sum(axis=0)
    best = int(np.argmin(likelihood))
    return float(np.sqrt(scale[best])), float(RATIOS[best])


class Boosted:
    """A form times boosted trees of the weights, by scikit-learn; draws are a jackknife over the first `folds` cuts."""

    def __init__(self, law: Member, data: Data, cuts: list[CutOff], draws: int, seed: int, folds: int) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor

        def grown(theta: Array, fitted: np.ndarray) -> list[Any]:
            residual = data.target - law.form.value(theta, data.points)[0]
            weights = np.where(fitted, data.weight, 0.0)
            return [
                HistGradientBoostingRegressor(**TREES, random_state=seed).fit(weight_of[w > 0], r[w > 0], w[w > 0])
                for r, w in zip(residual, weights, strict=True)
            ]

        weight_of = data.points.weights
        self.law, self.trees = law, grown(law.theta, np.ones(len(weight_of), dtype=bool))
        rolled = [grown(theta, cut.fitted) for theta, cut in zip(law.refits, cuts, strict=True)]
        self.held = [
            held + _steps(trees, weight_of[cut.tested]) for held, trees, cut in zip(law.held, rolled, cuts, strict=True)
        ]
        self.folds = rolled[:folds]
        self.drawn = np.random.default_rng(seed).integers(folds, size=draws)

    def predict(self, points: Points, draws: bool = True) -> tuple[Array, Array]:
        log, drawn = self.law.predict(points, draws)
        step = _steps(self.trees, points.weights)
        log = log + step
        if draws:
            folds = np.stack([_steps(trees, points.weights) for trees in self.folds], axis=2)
            away = np.sqrt(len(self.folds) - 1) * (folds - folds.mean(axis=2, keepdims=True))
            drawn = drawn + step[..., None] + away[..., self.drawn]
        return log, drawn


def _steps(trees: list[Any], weights: Array) -> Array:
    return np.stack([tree.predict(weights) for tree in trees])
