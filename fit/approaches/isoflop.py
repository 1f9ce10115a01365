"""IsoFLOP profiles (approach 2): the best size of each budget from a curve in log N, and N*(C), D*(C) through those.

Special here:
- The curve is a parabola in log N, a cubic, or Akima's interpolant (vertex.py). The parabola has the least noise and is
  biased where a profile is lopsided, the cubic has nearly three times that noise and little bias, and Akima's curve,
  which follows any shape, six times. `lopsidedness` says when a parabola will not do.
- A vertex is refused, with the reason, when the parabola is concave, when the vertex lies outside of the sizes tried,
  when the lowest measured loss is at the smallest or largest size, or when there are fewer than 3 sizes. A refused
  vertex enters no fit.
- The sizes are chosen and not sampled, so the bootstrap is parametric: vertices of the losses with noise added. The
  noise is the residual spread pooled over budgets (a profile of six sizes alone has three degrees of freedom) and
  itself drawn from its own distribution, or each run's own standard error, or a number in nats. For a polynomial
  with Gaussian noise this is exact.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.2; Porian et al. 2024 (arXiv:2406.19146) for Akima and given noise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, positive, same_length
from ..errors import weights as check_weights
from ..laws.powerlaw import PowerLaw
from ..uncertainty import excess_scatter
from .isoflop_profile import IsoflopProfile, cubic_term, draw_vertices, find_vertex, tokens_at, vertex_variance
from .vertex import METHODS

Method = Literal["parabola", "cubic", "akima"]
LEVEL_WIDTH = 0.05  # decades of C that count as one budget where the table names none
TIGHT_WIDTH = 0.02  # closer than this, three runs are enough to call it a budget
LOOSE_RUNS = 6


class IsoflopProfiles:
    """Approach 2.

    Parameters
    ----------
    method : "parabola", "cubic" or "akima"
        The curve through each profile; a cubic needs 5 sizes, and where there are fewer it is a parabola.
    noise : "spread", "loss_se" or a number
        Where the uncertainty of a loss comes from: the residual spread pooled over budgets, the standard error of each
        run, or one standard deviation in nats for all.

    Notes:
    -----
    After `fit`: profiles_ (by rising budget), labels_ and budgets_ (`budget_levels`), N_law_, D_law_ (PowerLaw or None
    below 2 accepted vertices), loss_law_ (PowerLaw with offset, or None below 4), sigma_ (pooled relative residual
    spread) and freedom_ (its degrees of freedom). After `bootstrap`: scatter_, the standard deviation of log vertices
    about N*(C) beyond their own uncertainty, which the draws of the laws carry too.
    """

    def __init__(
        self,
        method: Method = "parabola",
        noise: Literal["spread", "loss_se"] | float = "spread",
    ) -> None:
        if method not in METHODS:
            raise InputError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")
        known = noise in ("spread", "loss_se") if isinstance(noise, str) else np.isfinite(noise) and noise > 0
        if not known:
            raise InputError(f"noise is {noise!r}; 'spread', 'loss_se' or a number of nats above zero is accepted.")
        self.method, self.noise = method, noise

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        loss: ArrayLike,
        flops: ArrayLike,
        budget: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        loss_se: ArrayLike | None = None,
    ) -> IsoflopProfiles:
        """N, D, loss, flops (n,). `budget` (n,) names the budget of each run (NaN: none); else budgets are read off
        `flops`. `loss_se` (n,) is read with noise="loss_se" only.

        Raises InputError for values that are not positive finite numbers. Returns self; refused vertices raise nothing.
        """
        N, D, loss, flops = positive("N", N), positive("D", D), positive("loss", loss), positive("flops", flops)
        weight, se = check_weights(weight, len(N)), self._standard_errors(loss_se, len(N))
        same_length(N=N, D=D, loss=loss, flops=flops, weight=weight, loss_se=se)
        self.labels_, self.budgets_ = budget_levels(flops, N, budget)
        self.profiles_: list[IsoflopProfile] = []
        for level, C in enumerate(self.budgets_):
            rows = np.flatnonzero((self.labels_ == level) & (weight > 0))
            if rows.size:
                rows = rows[np.argsort(N[rows], kind="stable")]
                n, d, y, error, w = (values[rows] for values in (N, D, loss, se, weight))
                N0 = float(np.exp(np.log(n).mean()))
                self.profiles_.append(find_vertex(IsoflopProfile(self.method, float(C), n, d, y, error, w, N0)))
        self.sigma_, self.freedom_ = _pooled_spread(self.profiles_)
        self.draws_ = 0
        self._fit_laws()
        return self

    def bootstrap(self, n: int = 1000, seed: int = 0) -> IsoflopProfiles:
        """Draw `n` sets of curves; every vertex, N*(C), D*(C) and L*(C) gets draws. Without residual freedom, and with
        noise="spread": no draws.
        """
        if n < 1:
            raise InputError(f"bootstrap is {n}; a positive number of resamples is needed.")
        if self.noise == "spread" and self.freedom_ < 1:
            return self
        generator = np.random.default_rng(seed)
        # One unknown noise level for all budgets: drawn once per draw and shared.
        spread = self.sigma_ * np.sqrt(self.freedom_ / generator.chisquare(max(self.freedom_, 1), n))
        self.profiles_ = [
            draw_vertices(p, self._noise(p, spread[:, None]), generator) if p.has_curve else p for p in self.profiles_
        ]
        self.draws_ = n
        self._fit_laws(generator)
        return self

    @property
    def accepted_(self) -> list[IsoflopProfile]:
        return [profile for profile in self.profiles_ if profile.accepted]

    def lopsidedness(self) -> tuple[float, float] | None:
        """Whether the profiles ask for a cubic: Student's t of its term, pooled over budgets, and the mean move of the
        log vertices from parabola to cubic. None where no accepted profile has 5 sizes.
        """
        found = [term for term in map(cubic_term, self.profiles_) if term is not None]
        if not found:
            return None
        terms, rest, freedom, shifts = (np.array(column) for column in zip(*found, strict=True))
        noise = np.sqrt(max(rest.sum() / freedom.sum(), 1e-24))  # losses are not known better than 1e-12
        return float(terms.sum() / np.sqrt(len(found)) / noise), float(np.nanmean(shifts))

    def _standard_errors(self, loss_se: ArrayLike | None, points: int) -> Array:
        if self.noise != "loss_se":
            return np.full(points, np.nan)
        if loss_se is None:
            raise InputError("noise is 'loss_se' and no loss_se is given; each run needs its standard error in nats.")
        return positive("loss_se", loss_se)

    def _noise(self, profile: IsoflopProfile, spread: Array) -> Array:
        """Standard deviation of each loss in nats, (draws, n)."""
        if self.noise == "spread":
            return spread * profile.loss.min() * np.sqrt(profile.weight.mean() / profile.weight)
        each = profile.loss_se if self.noise == "loss_se" else np.full(len(profile.N), self.noise)
        return np.broadcast_to(each, (len(spread), len(profile.N)))

    def _fit_laws(self, generator: np.random.Generator | None = None) -> None:
        self.N_law_: PowerLaw | None = None
        self.D_law_: PowerLaw | None = None
        self.loss_law_: PowerLaw | None = None
        self.scatter_ = 0.0
        good = self.accepted_
        if len(good) < 2:
            return
        C, N, D, loss = (
            np.array([getattr(p, name) for p in good]) for name in ("flops", "N_best", "D_best", "loss_best")
        )
        variance = vertex_variance(good) if self.draws_ else np.ones(len(good))
        self.scatter_ = _beyond(C, N, variance) if self.draws_ else 0.0
        weight = _precision(variance, self.scatter_)
        self.N_law_, self.D_law_ = PowerLaw().fit(C, N, weight), PowerLaw().fit(C, D, weight)
        if len(good) >= 4:
            self.loss_law_ = PowerLaw(offset=True).fit(C, loss)
        if generator is not None:
            self._draw_laws(good, generator)

    def _draw_laws(self, good: list[IsoflopProfile], generator: np.random.Generator) -> None:
        """Laws through the draws of the vertices, each moved once more by the scatter between budgets."""
        assert self.N_law_ is not None
        assert self.D_law_ is not None
        shift = np.exp(self.scatter_ * generator.standard_normal((len(good), self.draws_)))
        N = [np.asarray(p.N_draws) * moved for p, moved in zip(good, shift, strict=True)]
        D = [tokens_at(p, sizes) for p, sizes in zip(good, N, strict=True)]
        self.N_law_.fit_draws(np.stack(N, 1))
        self.D_law_.fit_draws(np.stack(D, 1))
        if self.loss_law_ is not None:
            self.loss_law_.fit_draws(np.stack([np.asarray(p.loss_draws) for p in good], 1))

    def __repr__(self) -> str:
        if not hasattr(self, "profiles_"):
            return f"IsoflopProfiles({self.method!r})"
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


def _pooled_spread(profiles: list[IsoflopProfile]) -> tuple[float, float]:
    """Relative residual spread over all profiles, and its degrees of freedom (Satterthwaite's, where contrasts
    overlap).
    """
    total, trace, square = 0.0, 0.0, 0.0
    for profile in profiles:
        if profile.has_curve:
            contrasts = profile.shape.contrasts(profile.loss)
            total += float(((contrasts @ profile.loss) ** 2).sum()) / profile.loss.min() ** 2
            # In units where every run has one variance, these are the moments of a sum of squares.
            gram = (contrasts * (profile.weight.mean() / profile.weight)) @ contrasts.T
            trace += float(np.trace(gram))
            square += float((gram**2).sum())
    return (float(np.sqrt(total / trace)), trace**2 / square) if trace > 0.5 else (float("nan"), 0.0)


def _beyond(C: Array, N: Array, variance: Array) -> float:
    """Standard deviation of log vertices about their power law beyond what their own variances explain."""
    residual = np.log(N) - np.log(np.asarray(PowerLaw().fit(C, N, _precision(variance, 0.0)).predict(C)))
    return excess_scatter(residual**2, variance, len(C) - 2)


def _precision(variance: Array, scatter: float) -> Array:
    """Weights of log vertices; the median variance is added because each is itself estimated from few sizes."""
    weight = 1.0 / (variance + np.median(variance) + scatter**2)
    return np.asarray(weight / weight.max())
