"""IsoFLOP profiles (approach 2): the best size of each budget from a curve in log N, and N*(C), D*(C) through them.

The valley, of one shape for all budgets, has the lowest errors (docs/benchmarks.md). The parabola has the least noise
but is biased for skewed profiles; Akima's interpolant has six times that noise.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.2; Porian et al. 2024 (arXiv:2406.19146); Akima 1970 (J. ACM 17).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy  # its parts are imported at first use
from numpy.typing import ArrayLike

from ..errors import Array, Column, InputError, check_weights, is_uneven, one_of, positive, same_length
from ..files import read_constants
from ..laws.powerlaw import PowerLaw
from ..plots import plot_profiles
from ..table import Runs, as_table
from ..uncertainty import check_resampling, excess_scatter, percentile_interval
from .valley import Valley, fit_valleys

Method = Literal["parabola", "akima", "valley"]
REACH = np.log(10.0)  # a polynomial's minimum may be up to ten times beyond the tried sizes
NEIGHBOURS = 4  # a parabola through this many sizes has one residual contrast
SAME_SIZE = 6  # sizes are equal if log N agrees to this many decimals
LEVEL_WIDTH = 0.05  # decades of C in one budget, if the table names none
TIGHT_WIDTH = 0.02  # within this width, three runs are enough for a budget; else LOOSE_RUNS
LOOSE_RUNS = 6
LINE_ROUNDS = 6  # rounds of reweighting

# A curve goes through losses at u (n,), log N about its mean. `minimum` takes many versions of the losses, (draws, n),
# and returns the place and value of each minimum, (draws,). `at` is the curve through one row at u (m,), NaN out of
# reach. `contrasts` (r, n) are sums of losses that contain only noise: for runs of variance sigma^2 / weight, with
# weights of mean 1, their sum of squares is sigma^2 times the trace of their covariance at sigma = 1.


class Parabola:
    """A weighted least-squares parabola; its minimum is NaN if it has none."""

    def __init__(self, u: Array, weight: Array) -> None:
        root = np.sqrt(weight / weight.mean())
        X = np.vander(u, 3, increasing=True)
        self.ends = (u.min() - REACH, u.max() + REACH)
        self.project = np.linalg.pinv(X * root[:, None]) * root  # (3, n): losses to coefficients
        self.residual = root[:, None] * (np.eye(len(u)) - X @ self.project)

    def contrasts(self, loss: Array) -> Array:
        return self.residual

    def minimum(self, losses: Array) -> tuple[Array, Array]:
        c = self.project @ losses.T
        u = np.clip(_valley(np.zeros_like(c[0]), c[2], c[1]), *self.ends)
        return u, np.polynomial.polynomial.polyval(u, c, tensor=False)

    def at(self, loss: Array, u: Array) -> Array:
        return np.asarray(np.polynomial.polynomial.polyval(u, self.project @ loss))


class Akima:
    """Akima's interpolant of log loss through the mean loss of each size; its minimum may be an end."""

    def __init__(self, u: Array, weight: Array) -> None:
        weight = weight / weight.mean()
        rounded, member = np.unique(np.round(u, SAME_SIZE), return_inverse=True)
        belongs = (np.arange(len(rounded))[:, None] == member.ravel()) * weight
        total = belongs.sum(axis=1)
        self.mean = belongs / total[:, None]  # (sizes, n)
        self.knots = self.mean @ u
        self.within = np.sqrt(weight)[:, None] * (np.eye(len(u)) - self.mean[member.ravel()])
        self.local = _local_contrasts(self.knots, total)

    def contrasts(self, loss: Array) -> Array:
        # An interpolant has no residuals. Its contrasts are the scatter of runs of one size, and residuals of parabolas
        # through neighbouring sizes that include the lowest: sizes far up the slopes do not move the minimum.
        lowest = int(np.argmin(self.mean @ loss))
        return np.concatenate([self.within, self.local[self.local[:, lowest] != 0] @ self.mean])

    def minimum(self, losses: Array) -> tuple[Array, Array]:
        # The minimum of a piecewise cubic is exact, from the roots of its derivative.
        # Coefficients (sizes - 1, draws) of a t^3 + b t^2 + c t + d, t from the left knot.
        a, b, c, d = self._interpolate(losses @ self.mean.T).c
        length = np.diff(self.knots)[:, None]
        t = _valley(a, b, c)
        t = np.where((t > 0) & (t < length), t, 0.0)
        inner = ((a * t + b) * t + c) * t + d
        candidates = np.concatenate([inner, np.log(losses @ self.mean[-1:].T).T])
        places = np.concatenate([self.knots[:-1, None] + t, np.full((1, len(losses)), self.knots[-1])])
        lowest = candidates.argmin(axis=0)
        chosen = lowest, np.arange(len(losses))
        return places[chosen], np.exp(candidates[chosen])

    def at(self, loss: Array, u: Array) -> Array:
        # The smallest and largest size may differ from their knots by rounding.
        inside = np.clip(u, *self.knots[[0, -1]])
        near = np.where(np.abs(u - inside) < 1e-9, inside, u)
        return np.exp(np.asarray(self._interpolate((self.mean @ loss)[None, :])(near))[..., 0])

    def _interpolate(self, means: Array) -> Any:
        return scipy.interpolate.Akima1DInterpolator(self.knots, np.log(means).T)


Curve = Parabola | Akima
# Method -> curve, number of sizes that it needs, name in sentences.
METHODS: dict[str, tuple[Callable[[Array, Array], Curve], int, str]] = {
    "parabola": (Parabola, 3, "a parabola"),
    "akima": (Akima, 3, "Akima's curve"),
    "valley": (Parabola, 3, "a valley"),
}


def _valley(a: Array, b: Array, c: Array) -> Array:
    """Return the t of the local minimum of a t^3 + b t^2 + c t, NaN if it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(b**2 - 3 * a * c)  # NaN where the derivative has no root
        # The root where the derivative rises, written without cancellation and valid for a parabola, a = 0.
        t = np.where(b > 0, -c / (b + root), (root - b) / (3 * a))
    return np.where(np.isfinite(t), t, np.nan)


def _local_contrasts(knots: Array, weight: Array) -> Array:
    """Return sums over NEIGHBOURS knots, (windows, knots), that are zero for parabolas and have unit variance."""
    rows = np.zeros((max(len(knots) - NEIGHBOURS + 1, 0), len(knots)))
    for first in range(len(rows)):
        window = slice(first, first + NEIGHBOURS)
        u = knots[window] - knots[window].mean()
        contrast = np.linalg.svd(np.stack([np.ones_like(u), u, u**2]))[2][-1]  # orthogonal to the three
        rows[first, window] = contrast / np.sqrt((contrast**2 / weight[window]).sum())
    return rows


@dataclass(frozen=True)
class IsoflopProfile:
    """One budget: its runs by rising N (N0: their geometric mean), the curve through them, and its vertex (minimum).

    `reason` is empty if the vertex is accepted. Draws are NaN if a polynomial had no minimum.
    """

    method: str
    flops: float
    N: Array
    D: Array
    loss: Array
    loss_se: Array
    weight: Array
    N0: float
    has_curve: bool = False
    N_best: float | None = None
    D_best: float | None = None
    loss_best: float | None = None
    reason: str = ""
    N_draws: Array | None = None
    loss_draws: Array | None = None
    valley: Valley | None = None

    @property
    def accepted(self) -> bool:
        return not self.reason

    @property
    def shape(self) -> Curve | Valley:
        return self.valley or self.own_curve

    @property
    def own_curve(self) -> Curve:
        return METHODS[self.method][0](np.log(self.N / self.N0), self.weight)

    def curve(self, N: ArrayLike) -> Array:
        """Return the curve's loss at sizes N; Akima's is NaN outside the tried sizes."""
        if not self.has_curve:
            raise InputError(f"the isoFLOP profile at {self.flops:.3g} FLOPs has no curve: {self.reason}.")
        return self.shape.at(self.loss, np.log(np.asarray(N, dtype=np.float64) / self.N0))

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Return the interval of the vertex's N, None before `bootstrap`."""
        if self.N_draws is None:
            return None
        draws = self.N_draws.copy()
        if self.method == "akima":
            edge = 1e-9
            draws[draws <= self.N.min() * (1 + edge)], draws[draws >= self.N.max() * (1 - edge)] = 0.0, np.inf
        missing = np.flatnonzero(np.isnan(draws))
        draws[missing[::2]], draws[missing[1::2]] = 0.0, np.inf
        return percentile_interval(draws, level)


def find_vertex(bare: IsoflopProfile) -> IsoflopProfile:
    """Return the profile with its vertex (minimum), or the reason why there is none."""
    sizes = len(np.unique(np.round(np.log(bare.N), SAME_SIZE)))
    _, needed, what = METHODS[bare.method]
    if sizes < needed:
        plural = "s" if sizes > 1 else ""
        return replace(bare, reason=f"only {sizes} size{plural} at this budget, and {what} needs {needed}")
    bare = replace(bare, has_curve=True)
    if not is_uneven(bare.loss):
        return replace(bare, reason="all sizes have the same loss")
    vertex, lowest = (float(value[0]) for value in bare.shape.minimum(bare.loss[None, :]))
    if np.isnan(vertex):
        bent = "is concave, so it has" if bare.method == "parabola" else "has"
        return replace(bare, reason=f"the {bare.method} {bent} no minimum")
    N = bare.N0 * float(np.exp(vertex))
    D = float(tokens_at(bare, np.array([N]))[0])
    return replace(bare, N_best=N, D_best=D, loss_best=lowest, reason=_edge(bare, N))


def _edge(profile: IsoflopProfile, N_best: float) -> str:
    """Return why the sizes do not enclose the minimum at N_best; empty if they do."""
    sizes = np.unique(profile.N)
    if profile.method != "akima" and not sizes[0] < N_best < sizes[-1]:
        side = "smaller" if N_best <= sizes[0] else "larger"
        return f"the minimum lies outside the sizes tried; add {side} sizes"
    groups = (profile.N == N for N in sizes)
    lowest = int(np.argmin([np.average(profile.loss[rows], weights=profile.weight[rows]) for rows in groups]))
    if lowest in (0, len(sizes) - 1):
        side = "largest" if lowest else "smallest"
        return f"the lowest measured loss is at the {side} size, an edge of the sizes tried"
    return ""


def tokens_at(profile: IsoflopProfile, N: Array) -> Array:
    """Interpolate the profile's D at sizes N, by a quadratic through the runs in logarithms."""
    u, at = np.log(profile.N / profile.N0), np.log(N / profile.N0)
    c = np.linalg.lstsq(np.stack([np.ones_like(u), u, u**2], 1), np.log(profile.D), rcond=None)[0]
    return np.exp(c[0] + c[1] * at + c[2] * at**2)


def vertex_variance(profiles: list[IsoflopProfile]) -> Array:
    quartiles = np.array([np.nanpercentile(np.log(p.N_draws), [25, 75]) for p in profiles])  # type: ignore[arg-type]
    return (np.diff(quartiles, axis=1).ravel() / 1.349) ** 2 + 1e-12


class IsoflopProfiles:
    """Approach 2, by "parabola", "akima" or "valley".

    `noise` of a loss is "spread", the residual spread pooled over budgets, or a standard deviation in nats.

    After `fit`: profiles_ (by rising budget), labels_, budgets_, N_law_, D_law_ (None below 2 accepted vertices),
    loss_law_ (None below 4), sigma_ (relative residual spread), freedom_ (its degrees of freedom). After `bootstrap`,
    or `fit` by "valley": scatter_ (of log vertices about N*(C), beyond their uncertainty).
    """

    N_law_: PowerLaw | None
    D_law_: PowerLaw | None
    loss_law_: PowerLaw | None

    def __init__(self, method: Method = "parabola", noise: Literal["spread"] | float = "spread") -> None:
        one_of("method", method, METHODS)
        if noise != "spread" and (isinstance(noise, str) or not 0 < noise < np.inf):
            raise InputError(f"noise is {noise!r}; it must be 'spread' or a number of nats above zero.")
        self.method, self.noise = method, noise

    def fit(
        self, N: Any, D: Column = None, loss: Column = None, flops: Column = None, budget: Column = None,
        weight: Column = None,
    ) -> IsoflopProfiles:  # fmt: skip
        """Fit to columns (n,) of runs, or a table as N. `budget`: FLOP budgets (NaN: none), by default from `flops`."""
        if D is None or loss is None or flops is None:
            t = as_table(N)
            return self.fit(t.N, t.D, t.loss, t.flops, t.budget, t.weight)
        N, D, loss, flops = positive("N", N), positive("D", D), positive("loss", loss), positive("flops", flops)
        weight = check_weights(weight, len(N))
        se = np.full(len(N), np.nan if self.noise == "spread" else float(self.noise))
        same_length(N=N, D=D, loss=loss, flops=flops, weight=weight)
        self.labels_, self.budgets_ = budget_levels(flops, N, budget)
        bare: list[IsoflopProfile] = []
        for level, C in enumerate(self.budgets_):
            rows = np.flatnonzero((self.labels_ == level) & (weight > 0))
            if rows.size:
                rows = rows[np.lexsort((loss[rows], N[rows]))]
                n, d, y, error, w = (values[rows] for values in (N, D, loss, se, weight))
                N0 = float(np.exp(np.log(n).mean()))
                bare.append(IsoflopProfile(self.method, float(C), n, d, y, error, w, N0))
        if self.method == "valley":
            rich = [i for i, p in enumerate(bare) if len(np.unique(p.N)) >= METHODS["valley"][1] and is_uneven(p.loss)]
            valleys, self.sigma_, self.freedom_ = fit_valleys([bare[i] for i in rich])
            for i, valley in zip(rich, valleys, strict=True):
                bare[i] = replace(bare[i], valley=valley)
        self.profiles_ = [find_vertex(profile) for profile in bare]
        if self.method != "valley":
            self.sigma_, self.freedom_ = _pooled_spread(self.profiles_)
        self._fit_laws()
        return self

    def bootstrap(self, n: int = 1000, seed: int = 0) -> IsoflopProfiles:
        """Draw vertices and laws `n` times by adding noise to losses, since sizes are chosen, not sampled.

        If the noise is unknown, nothing is drawn.
        """
        check_resampling(n, seed)
        if self.noise == "spread" and self.freedom_ < 1:
            return self
        generator = np.random.default_rng(seed)
        # The unknown noise level is shared by all budgets, so it is drawn once per draw.
        larger = np.sqrt(self.freedom_ / generator.chisquare(max(self.freedom_, 1), n))
        spread = self.sigma_ * larger
        for i, p in enumerate(self.profiles_):
            if p.valley is not None:
                floor, _, size = np.exp(larger * generator.multivariate_normal(np.zeros(3), p.valley.covariance, n).T)
                self.profiles_[i] = replace(p, N_draws=p.N_best * size, loss_draws=p.loss_best * floor)
            elif p.has_curve:  # noise: the standard deviation of each loss in nats, (draws, n)
                noise = np.broadcast_to(p.loss_se, (n, len(p.N)))
                if self.noise == "spread":
                    noise = spread[:, None] * p.loss.min() * np.sqrt(p.weight.mean() / p.weight)
                losses = p.loss + noise * generator.standard_normal(noise.shape)
                # Noise as large as the loss must not make it negative.
                vertex, lowest = p.shape.minimum(np.maximum(losses, 0.01 * p.loss.min()))
                self.profiles_[i] = replace(p, N_draws=p.N0 * np.exp(vertex), loss_draws=lowest)
        self._fit_laws(generator)
        return self

    @property
    def accepted_(self) -> list[IsoflopProfile]:
        return [profile for profile in self.profiles_ if profile.accepted]

    def _fit_laws(self, generator: np.random.Generator | None = None) -> None:
        self.N_law_ = self.D_law_ = self.loss_law_ = None
        self.scatter_ = 0.0
        accepted = self.accepted_
        if len(accepted) < 2:
            return
        names = ("flops", "N_best", "D_best", "loss_best")
        C, N, D, loss = (np.array([getattr(p, name) for p in accepted]) for name in names)
        variance = np.ones(len(accepted))
        if self.method == "valley":
            X, line, covariance = self._line(accepted)
            N = np.exp(X @ line)
            D = np.concatenate(list(map(tokens_at, accepted, N[:, None])))
        elif generator is not None:
            variance = vertex_variance(accepted)
            bare = PowerLaw().fit(C, N, _precision(variance, 0.0))
            self.scatter_ = excess_scatter((np.log(N) - np.log(bare.predict(C))) ** 2, variance, len(C) - 2)
        weight = _precision(variance, self.scatter_)
        self.N_law_, self.D_law_ = PowerLaw().fit(C, N, weight), PowerLaw().fit(C, D, weight)
        if len(accepted) >= 4 and is_uneven(loss):
            self.loss_law_ = PowerLaw(offset=True).fit(C, loss)
        if generator is None:
            return
        sizes = np.stack([np.asarray(p.N_draws) for p in accepted])
        if self.method == "valley":
            sizes = np.exp(X @ generator.multivariate_normal(line, covariance, sizes.shape[1]).T)
        else:  # add the scatter between budgets
            sizes *= np.exp(self.scatter_ * generator.standard_normal(sizes.shape))
        self.N_law_.fit_draws(np.stack([*sizes], 1))
        self.D_law_.fit_draws(np.stack(list(map(tokens_at, accepted, sizes)), 1))
        if self.loss_law_ is not None:
            self.loss_law_.fit_draws(np.stack([np.asarray(p.loss_draws) for p in accepted], 1))

    def _line(self, accepted: list[IsoflopProfile]) -> tuple[Array, Array, Array]:
        """Fit the valleys' log N as a line in log FLOPs. Returns the design matrix, (level, slope), and covariance."""
        prior = read_constants("forecast")["isoflop"]
        t, y = (np.log([getattr(p, name) for p in accepted]) for name in ("flops", "N_best"))
        X = np.stack([np.ones_like(t), t - t[-1]], 1)
        variance = np.array([p.valley.covariance[2, 2] for p in accepted if p.valley is not None])
        between = prior["scatter"] ** 2 + (prior["drift"] * X[:, 1]) ** 2
        slope, share = np.diag([0.0, prior["spread"] ** -2]), 1.0
        for _ in range(LINE_ROUNDS):
            weight = 1.0 / (variance + share * between)
            covariance = np.linalg.inv((X.T * weight) @ X + slope)
            line = covariance @ ((X.T * weight) @ y + slope @ [0.0, prior["exponent"]])
            # The prior of scatter and drift from public tables counts as one more budget.
            share *= (1.0 / share + (weight * (y - X @ line) ** 2).sum()) / (len(accepted) - 1)
        self.scatter_ = float(np.sqrt(share)) * prior["scatter"]
        # The line may drift as far above the largest budget as below it.
        return X, line, covariance + share * np.diag([prior["scatter"], prior["drift"]]) ** 2

    def __repr__(self) -> str:
        if not hasattr(self, "profiles_"):
            return f"IsoflopProfiles({self.method!r})"
        return (
            f"IsoflopProfiles({len(self.accepted_)} of {len(self.profiles_)} vertices accepted, N* law: {self.N_law_})"
        )


def plot_isoflop(profiles: IsoflopProfiles | Runs, ax: Any = None) -> Any:
    """Plot isoFLOP profiles (a table is fitted by "valley") with stars at accepted minima; other curves are dotted."""
    fitted = profiles if isinstance(profiles, IsoflopProfiles) else IsoflopProfiles("valley").fit(profiles)
    return plot_profiles(fitted, ax)


def budget_levels(flops: Array, N: Array, budget: ArrayLike | None = None) -> tuple[np.ndarray, Array]:
    """Return the index (n,) of each run's budget, -1 for none, and the rising budgets.

    Without `budget`, three or more sizes with close FLOPs are a budget.
    """
    labels = np.full(len(flops), -1)
    named = np.asarray(np.nan if budget is None else budget, dtype=np.float64)
    is_named = np.isfinite(named)
    if is_named.any():
        values, labels[is_named] = np.unique(named[is_named], return_inverse=True)
        return labels, values
    log = np.log10(flops)
    order = np.argsort(log, kind="stable")
    unassigned = np.ones(len(order), dtype=bool)
    windows: list[np.ndarray] = []
    while unassigned.any():
        rows = order[unassigned[order]]
        ends = np.searchsorted(log[rows], log[rows] + LEVEL_WIDTH, side="right")
        begin = int(np.argmax(ends - np.arange(len(rows))))
        window = rows[begin : ends[begin]]
        wide = np.ptp(log[window]) > TIGHT_WIDTH
        if len(window) < 3:
            break
        unassigned[window] = False
        if len(np.unique(N[window])) >= 3 and (not wide or len(window) >= LOOSE_RUNS):
            windows.append(window)
    centres = np.array([float(10 ** np.median(log[window])) for window in windows])
    for level, index in enumerate(np.argsort(centres)):
        labels[windows[index]] = level
    return labels, np.sort(centres)


def binned_levels(flops: Array, width: float) -> np.ndarray:
    """Number the runs (n,) by bins of `width` decades of FLOPs."""
    log = np.log10(flops)
    return np.unique(np.floor((log - log.min()) / width).astype(int), return_inverse=True)[1].ravel()


def _pooled_spread(profiles: list[IsoflopProfile]) -> tuple[float, float]:
    """Return the runs' relative standard deviation about their curves, and its degrees of freedom (Satterthwaite)."""
    total = trace = square = 0.0
    for profile in profiles:
        if profile.has_curve:
            contrasts = profile.own_curve.contrasts(profile.loss)
            total += float(((contrasts @ profile.loss) ** 2).sum()) / profile.loss.min() ** 2
            # In units of equal variances, these are the moments of a sum of squares.
            gram = (contrasts * (profile.weight.mean() / profile.weight)) @ contrasts.T
            trace += float(np.trace(gram))
            square += float((gram**2).sum())
    return (float(np.sqrt(total / trace)), trace**2 / square) if trace > 0.5 else (float("nan"), 0.0)


def _precision(variance: Array, scatter: float) -> Array:
    """Return weights of the vertices' log N, scaled to at most 1."""
    weight = 1.0 / (variance + np.median(variance) + scatter**2)
    return np.asarray(weight / weight.max())
