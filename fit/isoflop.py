"""IsoFLOP profiles (approach 2): a parabola in log N at each budget, and N*(C), D*(C) through their vertices.

Special here:
- A vertex is refused, with the reason, when the parabola is concave, when the vertex lies outside of the sizes tried,
  when the lowest measured loss is at the smallest or largest size, or when there are fewer than 3 sizes. A refused
  vertex enters no fit.
- The sizes are chosen and not sampled, so the bootstrap is parametric: coefficients are drawn from their sampling
  distribution, with the residual spread pooled over budgets (a profile of six sizes alone has three degrees of freedom)
  and itself drawn from its own distribution. For a parabola with Gaussian noise this is exact.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from .errors import Array, InputError, positive, same_length
from .errors import weights as check_weights
from .powerlaw import PowerLaw
from .uncertainty import percentile_interval

LEVEL_WIDTH = 0.05  # decades of C that count as one budget where the table names none
TIGHT_WIDTH = 0.02  # closer than this, three runs are enough to call it a budget
LOOSE_RUNS = 6


@dataclass(frozen=True)
class IsoflopProfile:
    """One budget: its runs, its parabola loss = c0 + c1 u + c2 u^2 with u = log(N / N0), and its vertex.

    `reason` is empty when the vertex is accepted. `N_draws` (draws,) are bootstrap vertices, NaN where a draw was
    concave.
    """

    flops: float
    N: Array
    D: Array
    loss: Array
    weight: Array
    N0: float
    coefficients: tuple[float, float, float] | None
    N_best: float | None
    D_best: float | None
    loss_best: float | None
    reason: str = ""
    N_draws: Array | None = None
    D_draws: Array | None = None
    loss_draws: Array | None = None

    @property
    def accepted(self) -> bool:
        return not self.reason

    def curve(self, N: ArrayLike) -> Array:
        """The parabola's loss at sizes N."""
        if self.coefficients is None:
            raise InputError(f"the isoFLOP profile at {self.flops:.3g} FLOPs has no parabola: {self.reason}.")
        u = np.log(np.asarray(N, dtype=np.float64) / self.N0)
        c0, c1, c2 = self.coefficients
        return c0 + c1 * u + c2 * u**2

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Interval of the vertex's N; a concave draw counts as a vertex at either infinity. None before a bootstrap."""
        if self.N_draws is None:
            return None
        draws = self.N_draws.copy()
        lost = np.flatnonzero(np.isnan(draws))
        draws[lost[::2]], draws[lost[1::2]] = 0.0, np.inf
        return percentile_interval(draws, level)


class IsoflopProfiles:
    """Approach 2. After `fit`: profiles_ (by rising budget), N_law_, D_law_ (PowerLaw or None below 2 accepted
    vertices),
    loss_law_ (PowerLaw with offset, or None below 4), sigma_ (pooled relative residual spread) and freedom_ (its
    degrees of freedom).
    """

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        loss: ArrayLike,
        flops: ArrayLike,
        budget: ArrayLike | None = None,
        weight: ArrayLike | None = None,
    ) -> IsoflopProfiles:
        """N, D, loss, flops (n,). `budget` (n,) names the budget of each run (NaN: none); else budgets are read off
        `flops`.

        Raises InputError for values that are not positive finite numbers. Returns self; refused vertices raise nothing.
        """
        N, D, loss, flops = positive("N", N), positive("D", D), positive("loss", loss), positive("flops", flops)
        weight = check_weights(weight, len(N))
        same_length(N=N, D=D, loss=loss, flops=flops, weight=weight)
        self.labels_, self.budgets_ = budget_levels(flops, N, budget)
        self.profiles_: list[IsoflopProfile] = []
        for level, C in enumerate(self.budgets_):
            rows = (self.labels_ == level) & (weight > 0)
            if rows.any():
                self.profiles_.append(_profile(float(C), N[rows], D[rows], loss[rows], weight[rows]))
        self.sigma_, self.freedom_ = _pooled_spread(self.profiles_)
        self.draws_ = 0
        self._fit_laws()
        return self

    def bootstrap(self, n: int = 1000, seed: int = 0) -> IsoflopProfiles:
        """Draw `n` sets of parabolas; every vertex, N*(C), D*(C) and L*(C) gets draws. Without residual freedom: no
        draws.
        """
        if n < 1:
            raise InputError(f"bootstrap is {n}; a positive number of resamples is needed.")
        if self.freedom_ < 1:
            return self
        generator = np.random.default_rng(seed)
        # One unknown noise level for all budgets: drawn once per draw and shared.
        sigma = self.sigma_ * np.sqrt(self.freedom_ / generator.chisquare(self.freedom_, n))
        self.profiles_ = [_draw(profile, sigma, generator) for profile in self.profiles_]
        self.draws_ = n
        self._fit_laws()
        return self

    @property
    def accepted_(self) -> list[IsoflopProfile]:
        return [profile for profile in self.profiles_ if profile.accepted]

    def _fit_laws(self) -> None:
        self.N_law_: PowerLaw | None = None
        self.D_law_: PowerLaw | None = None
        self.loss_law_: PowerLaw | None = None
        good = self.accepted_
        if len(good) < 2:
            return
        C = np.array([p.flops for p in good])
        drawn = self.draws_ > 0
        weight = _vertex_weights(good) if drawn else None
        self.N_law_ = PowerLaw().fit(C, [p.N_best for p in good], weight)  # type: ignore[arg-type]
        self.D_law_ = PowerLaw().fit(C, [p.D_best for p in good], weight)  # type: ignore[arg-type]
        if len(good) >= 4:
            self.loss_law_ = PowerLaw(offset=True).fit(C, [p.loss_best for p in good])  # type: ignore[arg-type]
        if drawn:
            self.N_law_.fit_draws(np.stack([np.asarray(p.N_draws) for p in good], 1))
            self.D_law_.fit_draws(np.stack([np.asarray(p.D_draws) for p in good], 1))
            if self.loss_law_ is not None:
                self.loss_law_.fit_draws(np.stack([np.asarray(p.loss_draws) for p in good], 1))

    def __repr__(self) -> str:
        if not hasattr(self, "profiles_"):
            return "IsoflopProfiles()"
        return (
            f"IsoflopProfiles({len(self.accepted_)} of {len(self.profiles_)} vertices accepted, N* law: {self.N_law_})"
        )


def budget_levels(flops: Array, N: Array, budget: ArrayLike | None = None) -> tuple[np.ndarray, Array]:
    """Label (n,) of the budget that each run belongs to, -1 for none, and the budgets in rising order.

    Where `budget` names them (finite values), its values are the levels. Else a level is a window of LEVEL_WIDTH
    decades, taken greedily from the fullest one, that holds at least 3 sizes (LOOSE_RUNS runs where the window is wide,
    because points that merely happen to lie near each other are no profile).
    """
    labels = np.full(len(flops), -1)
    if budget is not None:
        named = np.asarray(budget, dtype=np.float64)
        if np.isfinite(named).any():
            values = np.unique(named[np.isfinite(named)])
            for level, value in enumerate(values):
                labels[named == value] = level
            return labels, values
    log = np.log10(flops)
    order = np.argsort(log, kind="stable")
    free = np.ones(len(order), dtype=bool)
    found: list[np.ndarray] = []
    while free.any():
        rows = order[free[order]]
        ends = np.searchsorted(log[rows], log[rows] + LEVEL_WIDTH, side="right")
        begin = int(np.argmax(ends - np.arange(len(rows))))
        window = rows[begin : ends[begin]]
        wide = np.ptp(log[window]) > TIGHT_WIDTH
        if len(window) < 3:
            break
        free[window] = False
        if len(np.unique(N[window])) >= 3 and (not wide or len(window) >= LOOSE_RUNS):
            found.append(window)
    centres = np.array([float(10 ** np.median(log[window])) for window in found])
    for level, which in enumerate(np.argsort(centres)):
        labels[found[which]] = level
    return labels, np.sort(centres)


def _profile(C: float, N: Array, D: Array, loss: Array, weight: Array) -> IsoflopProfile:
    order = np.argsort(N)
    N, D, loss, weight = N[order], D[order], loss[order], weight[order]
    N0 = float(np.exp(np.log(N).mean()))
    bare = IsoflopProfile(C, N, D, loss, weight, N0, None, None, None, None)
    sizes = len(np.unique(np.round(np.log(N), 6)))
    if sizes < 3:
        return replace(
            bare, reason=f"only {sizes} size{'s' if sizes > 1 else ''} at this budget, and a parabola needs 3"
        )
    u = np.log(N / N0)
    root = np.sqrt(weight)
    X = np.stack([np.ones_like(u), u, u**2], 1)
    c = np.linalg.lstsq(X * root[:, None], loss * root, rcond=None)[0]
    bare = replace(bare, coefficients=(float(c[0]), float(c[1]), float(c[2])))
    if c[2] <= 0:
        return replace(bare, reason="the parabola is concave, so it has no minimum")
    vertex = -c[1] / (2 * c[2])
    N_best = N0 * float(np.exp(np.clip(vertex, -700, 700)))
    reason = ""
    if not u[0] < vertex < u[-1]:
        side = "smaller" if vertex <= u[0] else "larger"
        reason = f"the vertex lies outside of the sizes tried; add {side} ones"
    else:
        mean = [loss[size == N].mean() for size in np.unique(N)]
        lowest = int(np.argmin(mean))
        if lowest in (0, len(mean) - 1):
            side = "smallest" if lowest == 0 else "largest"
            reason = f"the lowest measured loss is at the {side} size, an edge of the sizes tried"
    return replace(
        bare,
        N_best=N_best,
        D_best=float(_tokens_at(bare, np.array([N_best]))[0]),
        loss_best=float(c[0] + c[1] * vertex + c[2] * vertex**2),
        reason=reason,
    )


def _tokens_at(profile: IsoflopProfile, N: Array) -> Array:
    """D of this budget at size N: log D is read off a quadratic in log N through the runs, whatever the FLOP
    convention.
    """
    u = np.log(profile.N / profile.N0)
    X = np.stack([np.ones_like(u), u, u**2], 1)
    c = np.linalg.lstsq(X, np.log(profile.D), rcond=None)[0]
    at = np.log(N / profile.N0)
    return np.exp(c[0] + c[1] * at + c[2] * at**2)


def _pooled_spread(profiles: list[IsoflopProfile]) -> tuple[float, int]:
    """Relative residual spread over all parabolas, and its degrees of freedom."""
    total, freedom = 0.0, 0
    for profile in profiles:
        if profile.coefficients is None:
            continue
        residual = (profile.loss - profile.curve(profile.N)) / profile.loss.min()
        total += float((profile.weight / profile.weight.mean() * residual**2).sum())
        freedom += len(residual) - 3
    return (float(np.sqrt(total / freedom)), freedom) if freedom > 0 else (float("nan"), 0)


def _draw(profile: IsoflopProfile, sigma: Array, generator: np.random.Generator) -> IsoflopProfile:
    """The profile with bootstrap vertices; draws far outside of the sizes are pulled to ten times their range."""
    if profile.coefficients is None:
        return profile
    u = np.log(profile.N / profile.N0)
    X = np.stack([np.ones_like(u), u, u**2], 1)
    information = (X * (profile.weight / profile.weight.mean())[:, None]).T @ X
    shape = np.linalg.cholesky(np.linalg.inv(information))
    noise = generator.standard_normal((len(sigma), 3)) @ shape.T * (sigma * profile.loss.min())[:, None]
    c0, c1, c2 = (np.asarray(profile.coefficients) + noise).T
    with np.errstate(divide="ignore", invalid="ignore"):
        vertex = np.where(c2 > 0, -c1 / (2 * c2), np.nan)
    vertex = np.clip(vertex, u[0] - np.log(10.0), u[-1] + np.log(10.0))
    N = profile.N0 * np.exp(vertex)
    return replace(profile, N_draws=N, D_draws=_tokens_at(profile, N), loss_draws=c0 + c1 * vertex + c2 * vertex**2)


def _vertex_weights(profiles: list[IsoflopProfile]) -> Array:
    """Inverse variance of each log vertex, by quartiles, with the median variance added for what differs between
    budgets.
    """
    quartiles = np.array([np.nanpercentile(np.log(p.N_draws), [25, 75]) for p in profiles])  # type: ignore[arg-type]
    variance = (np.diff(quartiles, axis=1).ravel() / 1.349) ** 2
    floor = float(np.median(variance)) + 1e-12
    return floor / (variance + floor)
