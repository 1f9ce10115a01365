"""The law of repeated data as the solver sees it: its terms with their derivatives, and where to start.

Special here: everything is in logarithms. With s = log(N / U_N), log N' = log N - s + h(s, log R_N) for s > 0 and log N
below, and the same for D; h(s, r) = log(1 + R (1 - exp(-(e^s - 1) / R))). The two branches meet with equal slopes, so
the objective is smooth enough for Newton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import Array
from ..solver.forms import LogSumTerms, Term
from ..solver.solver import variable_projection

EXPONENT_GRID = np.geomspace(0.1, 1.0, 5)
DECAY_GRID = np.geomspace(0.5, 200.0, 8)
COARSE_DECAY_GRID = np.geomspace(1.0, 60.0, 4)
RATIO_GRID = (5.0, 20.0, 80.0)  # tokens per parameter at the optimum, for the starts alone
HUGE = 600.0  # of log(N / U_N): beyond, N' has long ceased to grow
CHUNK = 200  # resamples whose starts are projected at once, to bound memory
NAMES = ("A", "alpha", "B", "beta")  # the coordinates that move U_N


class Jet(NamedTuple):
    """h(s, r) and its derivatives."""

    h: Array
    s: Array
    r: Array
    ss: Array
    sr: Array
    rr: Array


def saturated(s: Array, r: Array) -> Array:
    """h(s, r) = log(1 + R (1 - exp(-(e^s - 1) / R))), R = e^r: s where R is large, 0 where it is small; s >= 0."""
    R = np.exp(r)
    return np.log1p(-R * np.expm1(-np.expm1(s) / R))


def saturated_jet(s: Array, r: Array) -> Jet:
    """`saturated` with its first and second derivatives."""
    R = np.exp(r)
    z = np.expm1(s) / R
    left = np.exp(-z)
    grown = -R * np.expm1(-z)
    F = 1.0 + grown
    slope = np.exp(s - z)  # dF/ds
    Fs, Fr = slope / F, (grown - R * z * left) / F
    Fss, Fsr = slope * (1.0 - np.exp(s) / R) / F, slope * z / F
    Frr = (grown - R * z * left * (1.0 + z)) / F
    return Jet(np.log(F), Fs, Fr, Fss - Fs**2, Fsr - Fs * Fr, Frr - Fr**2)


@dataclass(frozen=True)
class Repeated:
    """The terms over n runs: x log N, w log of different tokens, both from their middles, and repeats = log D - log U.

    `wanted` names the coordinates whose derivatives are asked for.
    """

    x: Array
    w: Array
    repeats: Array
    wanted: frozenset[str]

    def __call__(self, v: Mapping[str, Array], with_second: bool) -> list[Term]:
        return [self._size(v, with_second), self._tokens(v), Term(v["E"] + 0.0 * self.x, {"E": np.ones(1)})]

    def optimal(self, v: Mapping[str, Array]) -> Array:
        """The logarithm of U_N from its middle, of shape (P, n): alpha A / U_N^alpha = beta B / U^beta."""
        return (v["A"] - v["B"] + np.log(v["alpha"] / v["beta"]) + v["beta"] * self.w) / v["alpha"]

    def excess(self, v: Mapping[str, Array]) -> Array:
        """log(N / U_N), zero where N is below U_N."""
        return np.clip(self.x - self.optimal(v), 0.0, HUGE)

    def _tokens(self, v: Mapping[str, Array]) -> Term:
        """The term log B - beta log D'."""
        jet = saturated_jet(self.repeats, v["R_D"])
        data = self.w + jet.h
        first = {"B": np.ones(1), "beta": -data, "R_D": -v["beta"] * jet.r}
        return Term(v["B"] - v["beta"] * data, first, {("beta", "R_D"): -jet.r, ("R_D", "R_D"): -v["beta"] * jet.rr})

    def _size(self, v: Mapping[str, Array], with_second: bool) -> Term:
        """The term log A - alpha log N', where log N' = x - s + h(s, r), s = x - c and c = log U_N."""
        alpha, c = v["alpha"], self.optimal(v)
        s = self.excess(v)
        jet = saturated_jet(s, v["R_N"])
        size = self.x - s + jet.h
        first = {"A": np.ones(1), "alpha": -size, "R_N": -alpha * jet.r}
        second = {("R_N", "R_N"): -alpha * jet.rr}
        if not self.wanted & set(NAMES):
            return Term(v["A"] - alpha * size, first, second)
        by, by2 = self._optimal_derivatives(v, c)
        follows = 1.0 - jet.s  # d log N' / dc; zero where N is below U_N
        for p in NAMES:
            first[p] = first.get(p, 0.0) - alpha * follows * by[p]
        if not with_second:
            return Term(v["A"] - alpha * size, first)
        bend = np.where(self.x > c, jet.ss, 0.0)
        for i, p in enumerate(NAMES):
            second[p, "R_N"] = alpha * jet.sr * by[p] - (jet.r if p == "alpha" else 0.0)
            for q in NAMES[i:]:
                second[p, q] = -alpha * (bend * by[p] * by[q] + follows * by2.get((p, q), 0.0))
                if "alpha" in (p, q):  # the factor alpha moves too
                    other = p if q == "alpha" else q
                    second[p, q] = second[p, q] - (2.0 if p == q else 1.0) * follows * by[other]
        return Term(v["A"] - alpha * size, first, second)

    def _optimal_derivatives(
        self, v: Mapping[str, Array], c: Array
    ) -> tuple[dict[str, Array], dict[tuple[str, str], Array]]:
        """First and second derivatives of `optimal`."""
        alpha, beta = v["alpha"], v["beta"]
        by = {"A": 1.0 / alpha, "B": -1.0 / alpha}
        by |= {"alpha": (1.0 / alpha - c) / alpha, "beta": (self.w - 1.0 / beta) / alpha}
        by2 = {
            ("A", "alpha"): -1.0 / alpha**2,
            ("alpha", "B"): 1.0 / alpha**2,
            ("alpha", "beta"): -by["beta"] / alpha,
            ("alpha", "alpha"): (c - alpha * by["alpha"] - 2.0 / alpha) / alpha**2,
            ("beta", "beta"): 1.0 / (alpha * beta**2),
        }
        return by, by2


def decay_starts(form: LogSumTerms, target: Array, weights: Array, keep: int) -> Array:
    """Starts (P, G, 2) in log R_D and log R_N where the base is given: the best of a grid, by least squares."""
    grid = np.stack([g.ravel() for g in np.meshgrid(np.log(DECAY_GRID), np.log(DECAY_GRID))], 1)
    error = weights @ ((form.value(grid)[0] - target) ** 2).T
    return grid[np.argsort(error, axis=1)[:, :keep]]


def joint_starts(
    data: Repeated, shift: float, observed: Array, at: Mapping[str, int], weights: Array, keep: int
) -> Array:
    """Starts (P, G, k) by variable projection over exponents, decays and tokens per parameter at the optimum.

    shift: the middle of log N less that of log D. U_N is U over the tokens per parameter, which makes N' and D' known
    and the law linear in E, A and B.
    """
    tied = at["alpha"] == at["beta"]
    second = EXPONENT_GRID[:1] if tied else EXPONENT_GRID
    axes = np.meshgrid(EXPONENT_GRID, second, COARSE_DECAY_GRID, COARSE_DECAY_GRID, RATIO_GRID, indexing="ij")
    alpha, beta, R_D, R_N, ratio = (grid.reshape(-1, 1) for grid in axes)
    beta = alpha if tied else beta
    excess = np.clip(data.x - (data.w - np.log(ratio) - shift), 0.0, HUGE)
    size = data.x - excess + saturated(excess, np.log(R_N))
    tokens = data.w + saturated(data.repeats, np.log(R_D))
    basis = np.stack([np.exp(-alpha * size), np.exp(-beta * tokens), np.ones_like(size)], axis=2)
    # Divided by the loss, a residual is one in log loss to first order.
    basis = basis / observed[None, :, None]
    grid = np.zeros((len(alpha), max(at.values()) + 1))
    for name, column in (("alpha", alpha), ("beta", beta), ("R_D", np.log(R_D)), ("R_N", np.log(R_N))):
        grid[:, at[name]] = column[:, 0]
    found = []
    for part in np.array_split(weights, max(1, len(weights) // CHUNK)):
        amplitudes, error = variable_projection(basis, np.ones_like(observed), part)
        error = np.where((amplitudes > 0).all(axis=2), error, error * 4.0)
        order = np.argsort(error, axis=1)[:, :keep]
        starts = grid[order]
        log = np.log(np.maximum(np.take_along_axis(amplitudes, order[:, :, None], axis=1), 0.02 * observed.min()))
        for i, name in enumerate("ABE"):
            starts[..., at[name]] = log[..., i]
        found.append(starts)
    return np.concatenate(found)
