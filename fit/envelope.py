"""The compute-efficient envelope (approach 1): the best run at each level of compute, and power laws through those.

Special here:
- By default the points are *finished runs*. Hoffmann et al. read the envelope off whole loss curves, but a point in the
  middle of a schedule that decays later has a higher loss than a run that was finished there, so such an envelope
  favours small models that have decayed. `fit_curves` is there for curves of constant learning rate, where every point
  is worth as much as the next.
- The envelope knows the optimum only to within the neighbouring sizes, so each bootstrap draw moves the winner at
  random halfway to its neighbours. Without that a coarse grid would look certain.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import Array, InputError, positive, same_length
from .isoflop import budget_levels
from .powerlaw import PowerLaw
from .uncertainty import cluster_counts

BIN_WIDTH = 0.1  # decades of C that compete with each other where the table has no budgets
CURVE_LEVELS = 60  # levels of C at which loss curves are compared


class Envelope:
    """Approach 1. After `fit`: flops_, N_, D_, loss_ (levels,), N_law_, D_law_ (PowerLaw, or None below 2 levels),
    loss_law_ (None below 4 levels), source_ ("final points" or "loss curves").
    """

    def fit(
        self, N: ArrayLike, D: ArrayLike, loss: ArrayLike, flops: ArrayLike, budget: ArrayLike | None = None
    ) -> Envelope:
        """Finished runs: N, D, loss, flops (n,). Raises InputError for values that are not positive finite numbers."""
        N, D, loss, flops = positive("N", N), positive("D", D), positive("loss", loss), positive("flops", flops)
        same_length(N=N, D=D, loss=loss, flops=flops)
        labels, levels = budget_levels(flops, N, budget)
        if len(levels) < 2:
            bins = np.floor((np.log10(flops) - np.log10(flops.min())) / BIN_WIDTH).astype(int)
            _, labels = np.unique(bins, return_inverse=True)
            labels = labels.ravel()
        self.source_ = "final points"
        self._points = (N, D, loss, flops)
        self._labels = labels
        self._bare = len(levels) < 2
        self._settle(*_winners(N, D, loss, flops, labels, np.ones(len(N)), self._bare, None))
        return self

    def fit_curves(self, curves: Any, N: dict[str, float]) -> Envelope:
        """Loss curves of constant learning rate: a DataFrame with run_id, tokens, flops, loss, and N by run_id.

        At each of CURVE_LEVELS levels of C the curves that reach it compete by interpolated loss. No bootstrap: points
        of one curve are not independent, and runs enter and leave with C.
        """
        missing = [name for name in ("run_id", "tokens", "flops", "loss") if name not in curves]
        if missing:
            raise InputError(f"curves have no column {missing[0]!r}; there are {', '.join(map(str, curves.columns))}.")
        lines: list[tuple[Any, ...]] = []
        for run, rows in curves.dropna(subset=["tokens", "flops", "loss"]).groupby("run_id"):
            if str(run) in N and len(rows) > 1:
                rows = rows.sort_values("flops")
                lines.append((N[str(run)], *(np.log(positive(c, rows[c])) for c in ("flops", "tokens", "loss"))))
        if not lines:
            raise InputError("curves hold no run of the table with at least 2 points; one curve per run is expected.")
        low, high = min(line[1][0] for line in lines), max(line[1][-1] for line in lines)
        best = []
        for C in np.linspace(low, high, CURVE_LEVELS):
            reached = [line for line in lines if line[1][0] <= C <= line[1][-1]]
            if reached:
                at = [(float(np.interp(C, x, y)), size, float(np.interp(C, x, d))) for size, x, d, y in reached]
                best.append((C, *min(at)))
        C, log_loss, sizes, log_d = (np.array(column) for column in zip(*best, strict=True))
        improving = log_loss < np.concatenate([[np.inf], np.minimum.accumulate(log_loss)[:-1]])
        self.source_ = "loss curves"
        self._settle(*(v[improving] for v in (np.exp(C), sizes, np.exp(log_d), np.exp(log_loss))))
        return self

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0) -> Envelope:
        """Resample whole runs (`groups` (points,)) `n` times; laws get draws."""
        if self.source_ != "final points":
            raise InputError("an envelope of loss curves has no bootstrap; fit final points for intervals.")
        N, D, loss, flops = self._points
        groups = np.arange(len(N)) if groups is None else groups
        counts = cluster_counts(groups, n, seed)
        generator = np.random.default_rng(seed + 1)
        # Draws share the full fit's levels, so that the laws' points line up; a level that a draw misses is NaN.
        draws = np.full((3, n, len(self.flops_)), np.nan)
        for row, count in enumerate(counts):
            C, *best = _winners(N, D, loss, flops, self._labels, count, self._bare, generator)
            place = np.abs(np.log(C)[:, None] - np.log(self.flops_)[None, :]).argmin(axis=1) if len(C) else []
            draws[:, row, place] = np.array(best)
        for law, values in zip((self.N_law_, self.D_law_, self.loss_law_), draws, strict=True):
            if law is not None:
                law.fit_draws(values)
        return self

    def _settle(self, flops: Array, N: Array, D: Array, loss: Array) -> None:
        self.flops_, self.N_, self.D_, self.loss_ = flops, N, D, loss
        enough = len(flops) >= 2
        self.N_law_ = PowerLaw().fit(flops, N) if enough else None
        self.D_law_ = PowerLaw().fit(flops, D) if enough else None
        self.loss_law_ = PowerLaw(offset=True).fit(flops, loss) if len(flops) >= 4 else None

    def __repr__(self) -> str:
        if not hasattr(self, "flops_"):
            return "Envelope()"
        return f"Envelope({len(self.flops_)} levels of {self.source_}, N* law: {self.N_law_})"


def _winners(
    N: Array,
    D: Array,
    loss: Array,
    flops: Array,
    labels: np.ndarray,
    counts: Array,
    bare: bool,
    jitter: np.random.Generator | None,
) -> tuple[Array, Array, Array, Array]:
    """flops, N, D and loss of the best run of each level, where it also beats every cheaper level."""
    best = []
    lowest = np.inf
    for level in np.unique(labels[labels >= 0]):
        rows = np.flatnonzero((labels == level) & (counts > 0))
        # A bin of one or two sizes is no competition.
        if len(np.unique(N[rows])) < (3 if bare else 2):
            continue
        winner = rows[loss[rows].argmin()]
        if loss[winner] >= lowest:
            continue
        lowest = loss[winner]
        shift = 0.0 if jitter is None else _within_neighbours(N[labels == level], N[winner], jitter)
        best.append(
            (np.median(flops[labels == level]), N[winner] * np.exp(shift), D[winner] * np.exp(-shift), loss[winner])
        )
    columns = np.array(best).reshape(-1, 4).T
    return columns[0], columns[1], columns[2], columns[3]


def _within_neighbours(sizes: Array, winner: float, generator: np.random.Generator) -> float:
    """A uniform shift in log N, at most halfway to the next size on either side (at an edge: as far as on the inner
    side).
    """
    steps = np.unique(np.log(sizes)) - np.log(winner)
    up, down = steps[steps > 1e-9], -steps[steps < -1e-9]
    right = up.min() if up.size else (down.min() if down.size else 0.0)
    left = down.min() if down.size else right
    return float(generator.uniform(-0.5 * left, 0.5 * right))
