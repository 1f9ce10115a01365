"""The compute-efficient envelope (approach 1): the best run at each level of compute, and power laws through those.

The points are *finished runs*: on a loss curve, a point in the middle of a schedule that decays later has too high a
loss, which favours small models that have decayed. Hoffmann et al. 2022 (arXiv:2203.15556), section 3.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import FLAT, Array, positive, same_length
from ..laws.powerlaw import PowerLaw
from ..uncertainty import cluster_counts
from .isoflop import binned_levels, budget_levels

BIN_WIDTH = 0.1  # decades of C that compete with each other where the table has no budgets


class Envelope:
    """Approach 1. After `fit`: flops_, N_, D_, loss_ (levels,), N_law_, D_law_ (PowerLaw, or None below 2 levels),
    loss_law_ (None below 4 levels), edges_ (levels left out because an end of their sizes won).
    """

    def fit(
        self, N: ArrayLike, D: ArrayLike, loss: ArrayLike, flops: ArrayLike, budget: ArrayLike | None = None
    ) -> Envelope:
        """Finished runs: N, D, loss, flops (n,). Raises InputError for values that are not positive finite numbers."""
        N, D, loss, flops = positive("N", N), positive("D", D), positive("loss", loss), positive("flops", flops)
        same_length(N=N, D=D, loss=loss, flops=flops)
        labels, levels = budget_levels(flops, N, budget)
        if len(levels) < 2:
            labels = binned_levels(flops, BIN_WIDTH)
        # A bin of one or two sizes is no competition.
        self._points, self._labels, self._rivals = (N, D, loss, flops), labels, 2 if len(levels) > 1 else 3
        best, edges = self._winners(np.ones((1, len(N))))
        self._settle(best[:, 0, np.isfinite(best[0, 0])], edges)
        return self

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0) -> Envelope:
        """Resample whole runs (`groups` (points,)) `n` times; laws get draws."""
        if self.N_law_ is None:
            return self
        counts = cluster_counts(np.arange(len(self._labels)) if groups is None else groups, n, seed)
        (C, *best), _ = self._winners(counts, np.random.default_rng(seed + 1))
        row, level = np.nonzero(np.isfinite(C))
        # Draws share the full fit's levels, so that the laws' points line up; a level that a draw misses is NaN.
        place = np.abs(np.log(C[row, level])[:, None] - np.log(self.flops_)[None, :]).argmin(axis=1)
        draws = np.full((3, n, len(self.flops_)), np.nan)
        draws[:, row, place] = np.array(best)[:, row, level]
        for law, values in zip((self.N_law_, self.D_law_, self.loss_law_), draws, strict=True):
            if law is not None:
                law.fit_draws(values)
        return self

    def _winners(self, counts: Array, jitter: np.random.Generator | None = None) -> tuple[Array, int]:
        """flops, N, D and loss (4, draws, levels) of the best of the runs in counts (draws, n), NaN where it does not
        beat every cheaper level or lacks a smaller or a larger rival; and how often it lacks one.
        """
        N, D, loss, flops = self._points
        levels = np.unique(self._labels[self._labels >= 0])
        best, ends = np.full((4, len(counts), len(levels)), np.nan), np.zeros((2, len(counts), len(levels)))
        edges, lowest = 0, np.full(len(counts), np.inf)
        for at, level in enumerate(levels):
            rows = np.flatnonzero(self._labels == level)
            rows = rows[np.argsort(loss[rows], kind="stable")]
            sizes, member = np.unique(N[rows], return_inverse=True)
            there = counts[:, rows] > 0
            rivals = (there @ np.eye(len(sizes), dtype=np.float32)[member] > 0).sum(axis=1)
            first = there.argmax(axis=1)
            better = (rivals >= self._rivals) & (loss[rows[first]] < lowest * (1.0 - FLAT))
            lowest[better] = loss[rows[first[better]]]
            # The smallest or largest of its rivals shows where the sizes end and not where the optimum is.
            inside = better & (member[first] > 0) & (member[first] < len(sizes) - 1)
            edges += int((better & ~inside).sum())
            winner, C = rows[first[inside]], np.full(int(inside.sum()), np.median(flops[rows]))
            best[:, inside, at] = C, N[winner], D[winner], loss[winner]
            # The optimum is known only to within half the way to the neighbouring sizes; else a coarse grid would look
            # certain.
            steps = np.unique(np.log(N[rows])) - np.log(N[winner])[:, None]
            down = np.where(steps < -1e-9, steps, -np.inf).max(axis=1)
            ends[:, inside, at] = 0.5 * down, 0.5 * np.where(steps > 1e-9, steps, np.inf).min(axis=1)
        if jitter is not None:
            inside = np.isfinite(best[0])
            low, high = ends[:, inside]
            shift = low + (high - low) * jitter.random(int(inside.sum()))
            best[1, inside] *= np.exp(shift)
            best[2, inside] *= np.exp(-shift)
        return best, edges

    def _settle(self, columns: Array, edges: int) -> None:
        flops, N, D, loss = self.flops_, self.N_, self.D_, self.loss_ = columns
        self.edges_ = edges
        self.N_law_, self.D_law_ = (PowerLaw().fit(flops, x) if len(flops) >= 2 else None for x in (N, D))
        self.loss_law_ = PowerLaw(offset=True).fit(flops, loss) if len(flops) >= 4 else None

    def __repr__(self) -> str:
        if not hasattr(self, "flops_"):
            return "Envelope()"
        return f"Envelope({len(self.flops_)} levels, N* law: {self.N_law_})"
