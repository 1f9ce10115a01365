"""The compute-efficient envelope (approach 1): the best run at each level of compute, and power laws through them.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import FLAT, Array, Column, positive, same_length
from ..laws.powerlaw import PowerLaw
from ..table import as_table
from ..uncertainty import cluster_counts, group_labels, numbered
from .isoflop import binned_levels, budget_levels

BIN_WIDTH = 0.1  # decades of C in one level, if the table has no budgets


class Envelope:
    """Approach 1, the compute-efficient envelope.

    After `fit`: flops_, N_, D_, loss_ (levels,), N_law_, D_law_ (PowerLaw, or None below 2 levels), loss_law_ (None
    below 4 levels), edges_ (levels left out because their smallest or largest size won).
    """

    def fit(
        self, N: Any, D: Column = None, loss: Column = None, flops: Column = None, budget: Column = None
    ) -> Envelope:
        """Fit to columns (n,) of finished runs, or to a table as N; `budget` is in FLOPs."""
        if D is None or loss is None or flops is None:
            t = as_table(N)
            return self.fit(t.N, t.D, t.loss, t.flops, t.budget)
        N, D, loss, flops = positive("N", N), positive("D", D), positive("loss", loss), positive("flops", flops)
        same_length(N=N, D=D, loss=loss, flops=flops)
        labels, levels = budget_levels(flops, N, budget)
        if len(levels) < 2:
            labels = binned_levels(flops, BIN_WIDTH)
        # A bin needs more than two sizes to have a winner.
        self._points, self._labels, self._rivals = (N, D, loss, flops), labels, 2 if len(levels) > 1 else 3
        best, edges = self._winners(np.ones((1, len(N))))
        self._fit_laws(best[:, 0, np.isfinite(best[0, 0])], edges)
        return self

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0) -> Envelope:
        """Refit the laws to `n` resamples of runs; runs with one label in `groups` (runs,) stay together."""
        if self.N_law_ is None:
            return self
        numbers = numbered(group_labels(groups, len(self._labels)), *self._points)
        counts = cluster_counts(numbers, n, seed)
        (C, *best), _ = self._winners(counts, np.random.default_rng(seed + 1))
        row, level = np.nonzero(np.isfinite(C))
        # Draws use the levels of the full fit, so that the laws' points match; levels missing in a draw are NaN.
        nearest = np.abs(np.log(C[row, level])[:, None] - np.log(self.flops_)[None, :]).argmin(axis=1)
        draws = np.full((3, n, len(self.flops_)), np.nan)
        draws[:, row, nearest] = np.array(best)[:, row, level]
        for law, values in zip((self.N_law_, self.D_law_, self.loss_law_), draws, strict=True):
            if law is not None:
                law.fit_draws(values)
        return self

    def _winners(self, counts: Array, jitter: np.random.Generator | None = None) -> tuple[Array, int]:
        """Find the best run of each compute level in each resample, given as `counts` (draws, n).

        Returns the winners' flops, N, D and loss, (4, draws, levels), and the number left out as smallest or largest
        size.
        """
        N, D, loss, flops = self._points
        levels = np.unique(self._labels[self._labels >= 0])
        best, ends = np.full((4, len(counts), len(levels)), np.nan), np.zeros((2, len(counts), len(levels)))
        edges, lowest = 0, np.full(len(counts), np.inf)
        for column, level in enumerate(levels):
            rows = np.flatnonzero(self._labels == level)
            rows = rows[np.argsort(loss[rows], kind="stable")]
            sizes, member = np.unique(N[rows], return_inverse=True)
            present = counts[:, rows] > 0
            rivals = (present @ np.eye(len(sizes), dtype=np.float32)[member] > 0).sum(axis=1)
            first = present.argmax(axis=1)
            better = (rivals >= self._rivals) & (loss[rows[first]] < lowest * (1.0 - FLAT))
            lowest[better] = loss[rows[first[better]]]
            # A winner at an edge of the sizes does not bracket the optimum.
            inside = better & (member[first] > 0) & (member[first] < len(sizes) - 1)
            edges += int((better & ~inside).sum())
            winner, C = rows[first[inside]], np.full(int(inside.sum()), np.median(flops[rows]))
            best[:, inside, column] = C, N[winner], D[winner], loss[winner]
            # The optimum is known only up to half the distance to neighbouring sizes; without this jitter a coarse grid
            # would look certain.
            steps = np.unique(np.log(N[rows])) - np.log(N[winner])[:, None]
            down = np.where(steps < -1e-9, steps, -np.inf).max(axis=1)
            ends[:, inside, column] = 0.5 * down, 0.5 * np.where(steps > 1e-9, steps, np.inf).min(axis=1)
        if jitter is not None:
            inside = np.isfinite(best[0])
            low, high = ends[:, inside]
            shift = low + (high - low) * jitter.random(int(inside.sum()))
            best[1, inside] *= np.exp(shift)
            best[2, inside] *= np.exp(-shift)
        return best, edges

    def _fit_laws(self, columns: Array, edges: int) -> None:
        flops, N, D, loss = self.flops_, self.N_, self.D_, self.loss_ = columns
        self.edges_ = edges
        self.N_law_, self.D_law_ = (PowerLaw().fit(flops, x) if len(flops) >= 2 else None for x in (N, D))
        self.loss_law_ = PowerLaw(offset=True).fit(flops, loss) if len(flops) >= 4 else None

    def __repr__(self) -> str:
        if not hasattr(self, "flops_"):
            return "Envelope()"
        return f"Envelope({len(self.flops_)} levels, N* law: {self.N_law_})"
