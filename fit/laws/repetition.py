"""The data-constrained law: what tokens are worth when they are seen again, and parameters that outgrow their data.

    L(N, D, U) = E + A / N'^alpha + B / D'^beta
    D' = U   + U   R_D (1 - exp(-(D / U   - 1) / R_D))
    N' = U_N + U_N R_N (1 - exp(-(N / U_N - 1) / R_N)), U_N the size that is compute-optimal for U tokens, and at most N

Special here:
- U_N solves alpha A / U_N^alpha = beta B / U^beta, so it moves with the constants; its derivatives are in the fit. In
  logarithms, log N' = log N - s + h(s, log R_N) for s = log(N / U_N) > 0, and the same for D.
- The objective in (R_D, R_N) is flat and has several valleys: `starts_` says how many starts agree.

Muennighoff et al. 2023 (arXiv:2305.16264), equations 5 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import Optimum, token_limited
from ..errors import Array, Columns, Constants, InputError, Say, floats, identifiable
from ..solver.forms import LogSumTerms, Term
from ..solver.solver import variable_projection
from .chinchilla import FLAT_EXPONENT, VANISHED
from .law import Law, Problem, amplitude

EXPONENT_GRID = np.geomspace(0.1, 1.0, 5)
DECAY_GRID = np.geomspace(0.5, 200.0, 8)
COARSE_DECAY_GRID = np.geomspace(1.0, 60.0, 4)
RATIO_GRID = (5.0, 20.0, 80.0)  # tokens per parameter at the optimum, for the starts alone
HUGE = 600.0  # of log(N / U_N): beyond, N' has long ceased to grow
CHUNK = 200  # resamples whose starts are projected at once, to bound memory
MOVING = ("A", "alpha", "B", "beta")  # the coordinates that move U_N
BASE = ("A", "alpha", "B", "beta", "E")
EXPONENT_BOUNDS = (FLAT_EXPONENT, 3.0)
R_BOUNDS = (1e-3, 1e5)  # repeats that are worth nothing, and repeats that are as good as new
STARTS = 64
FAR = 200.0  # bounds of coordinates that are not centred


class Jet(NamedTuple):
    """h(s, r) and its derivatives."""

    h: Array
    s: Array
    r: Array
    ss: Array
    sr: Array
    rr: Array


def saturated(s: Array, r: Array) -> Array:
    """h(s, r) = log(1 + R (1 - exp(-(e^s - 1) / R))), R = e^r; s >= 0."""
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
    """The terms over n runs: x log N, w log of different tokens, both from their middles; repeats log D - log U."""

    x: Array
    w: Array
    repeats: Array
    wanted: frozenset[str]

    def __call__(self, v: Mapping[str, Array], with_second: bool) -> list[Term]:
        return [self._size(v, with_second), self._tokens(v), Term(v["E"] + 0.0 * self.x, {"E": np.ones(1)})]

    def optimal(self, v: Mapping[str, Array]) -> Array:
        """Log U_N from its middle, (P, n)."""
        return (v["A"] - v["B"] + np.log(v["alpha"] / v["beta"]) + v["beta"] * self.w) / v["alpha"]

    def excess(self, v: Mapping[str, Array]) -> Array:
        return np.clip(self.x - self.optimal(v), 0.0, HUGE)

    def _tokens(self, v: Mapping[str, Array]) -> Term:
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
        if not self.wanted & set(MOVING):
            return Term(v["A"] - alpha * size, first, second)
        by, by2 = self._optimal_derivatives(v, c)
        follows = 1.0 - jet.s  # d log N' / dc; zero where N is below U_N
        for p in MOVING:
            first[p] = first.get(p, 0.0) - alpha * follows * by[p]
        if not with_second:
            return Term(v["A"] - alpha * size, first)
        bend = np.where(self.x > c, jet.ss, 0.0)
        for i, p in enumerate(MOVING):
            second[p, "R_N"] = alpha * jet.sr * by[p] - (jet.r if p == "alpha" else 0.0)
            for q in MOVING[i:]:
                second[p, q] = -alpha * (bend * by[p] * by[q] + follows * by2.get((p, q), 0.0))
                if "alpha" in (p, q):  # the factor alpha moves too
                    other = p if q == "alpha" else q
                    second[p, q] = second[p, q] - (2.0 if p == q else 1.0) * follows * by[other]
        return Term(v["A"] - alpha * size, first, second)

    def _optimal_derivatives(self, v: Mapping[str, Array], c: Array) -> tuple[Columns, dict[tuple[str, str], Array]]:
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


def joint_starts(
    data: Repeated, shift: float, observed: Array, at: Mapping[str, int], weights: Array, keep: int
) -> Array:
    """Starts (P, G, k) by variable projection over exponents, decays and tokens per parameter at the optimum.

    shift: the middle of log N less that of log D. With U_N from the tokens per parameter, the law is linear in E, A and
    B.
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


class RepetitionLaw(Law):
    """L(N, D, U) = E + A / N'^alpha + B / D'^beta; see the module for N' and D'.

    After `fit`: E_, A_, B_, alpha_, beta_, R_D_, R_N_; `degenerate_` names R_N where no run outgrows its unique tokens.

    Parameters
    ----------
    tied : bool
        Hold alpha = beta, as the paper does.
    base : mapping, optional
        E, A, B, alpha and beta to hold, as the paper does, such as the constants of a tied fit to runs of one epoch.
        Intervals are then those of R_D and R_N given the base.
    """

    form = "repetition"
    title = "the law of repeated data"
    names = ("E", "A", "B", "alpha", "beta", "R_D", "R_N")
    direct = "always"
    inputs = ("N", "D", "U")
    output = "loss"
    E_: float
    A_: float
    B_: float
    alpha_: float
    beta_: float
    R_D_: float
    R_N_: float

    def __init__(
        self,
        objective: str = "huber",
        delta: float = 1e-3,
        tied: bool = False,
        base: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(objective, delta)
        if tied and base is not None:
            raise InputError(
                "tied and base were both given; the base holds both exponents already, so give one of them."
            )
        self.tied, self.base = bool(tied), base
        self._base = None if base is None else _base(base)

    def options(self) -> dict[str, Any]:
        return self.get_params() | {"base": self._base}

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        U: ArrayLike,
        loss: ArrayLike,
        weight: ArrayLike | None = None,
        loss_se: ArrayLike | None = None,
    ) -> Self:
        """Fit to n runs: N parameters, D tokens seen, U different ones, loss (nats per token), all (n,). Returns self.

        A run with D below U has seen D different tokens. `weight` and `loss_se` (n,) as in every law. Raises InputError
        also when no run repeats its data.
        """
        return self._fit((N, D, U, loss), weight, loss_se)

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        c = {name: floats(value) for name, value in constants.items()}
        with np.errstate(divide="ignore", invalid="ignore"):
            log_n, log_d, log_u = (np.log(v) for v in inputs)
            w = np.minimum(log_u, log_d)
            optimal = (np.log(c["alpha"] * c["A"]) - np.log(c["beta"] * c["B"]) + c["beta"] * w) / c["alpha"]
            excess = np.clip(np.nan_to_num(log_n - optimal, nan=0.0), 0.0, HUGE)
        size = log_n - excess + saturated(excess, np.log(c["R_N"]))
        data = w + saturated(log_d - w, np.log(c["R_D"]))
        return c["E"] + c["A"] * np.exp(-c["alpha"] * size) + c["B"] * np.exp(-c["beta"] * data)

    def equation(self, say: Say) -> str:
        return (
            f"L(N, D, U) = {say('E')} + {say('A')} / N'^{say('alpha')} + {say('B')} / D'^{say('beta')}, "
            f"R_D = {say('R_D')}, R_N = {say('R_N')}"
        )

    def optimal(self, flops: ArrayLike, unique_tokens: ArrayLike, level: float = 0.95) -> Optimum:
        """The N and D of lowest loss under C = 6 N D with only `unique_tokens` different tokens; `more`: epochs."""
        return token_limited(self, flops, unique_tokens, level=level)

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        super()._check(inputs, observed)
        N, D, U = inputs
        if self._base is None:
            identifiable(N, D)
        if not (D > U * (1.0 + 1e-9)).any():
            raise InputError("U is D or more in every row, so no run repeats its data; add runs of several epochs.")

    def _accept(self, found: Any) -> None:
        super()._accept(found)
        columns = [self.data_[name] for name in self.inputs]
        without = self.evaluate(self.constants_ | {"R_N": R_BOUNDS[0]}, *columns)
        if np.allclose(without, self.predict(*columns), rtol=1e-9, atol=0.0):
            self._call_degenerate("R_N")

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        """Coordinates: log A and log B (at the mean log N and log D), log E, the exponents, unless the base is given;
        log R_D, log R_N.
        """
        log_n, log_d = np.log(inputs[0]), np.log(inputs[1])
        log_u = np.minimum(np.log(inputs[2]), log_d)
        x0, y0 = (float(log_n.mean()), float(log_d.mean())) if centred else (0.0, 0.0)
        target = np.log(observed)
        base = self._base
        own = [] if base else [name for name in BASE if not (self.tied and name == "beta")]
        names = (*own, "R_D", "R_N")
        at = {name: i for i, name in enumerate(names)}
        if self.tied:
            at["beta"] = at["alpha"]
        data = Repeated(log_n - x0, log_u - y0, log_d - log_u, frozenset(at))
        floor, ceiling = (float(target.min()) - VANISHED, float(target.max()) + 2.0) if centred else (-FAR, FAR)
        bounds = {"A": (floor, ceiling), "alpha": EXPONENT_BOUNDS, "R_D": tuple(np.log(R_BOUNDS))}
        bounds |= {"B": bounds["A"], "E": bounds["A"], "beta": bounds["alpha"], "R_N": bounds["R_D"]}

        fixed = {}
        if base:
            middle = {"A": x0 * base["alpha"], "B": y0 * base["beta"], "E": 0.0}
            fixed = base | {name: float(np.log(max(base[name], 1e-300))) - middle[name] for name in "ABE"}
        form = LogSumTerms(data, at, len(target), fixed)

        def constants(theta: Array) -> Columns:
            found = {name: np.exp(theta[:, at[name]]) for name in ("R_D", "R_N")}
            if base:
                return {name: np.full(len(theta), base[name]) for name in BASE} | found
            found |= {name: theta[:, at[name]].copy() for name in ("alpha", "beta")}
            for name, shift in (("A", x0 * found["alpha"]), ("B", y0 * found["beta"]), ("E", 0.0)):
                found[name] = amplitude(theta[:, at[name]], floor, shift)
            return found

        def starts(weights: Array, keep: int | None) -> Array:
            if not base:
                return joint_starts(data, x0 - y0, observed, at, weights, keep or STARTS)
            # The best of a grid, by least squares.
            grid = np.stack([g.ravel() for g in np.meshgrid(np.log(DECAY_GRID), np.log(DECAY_GRID))], 1)
            error = weights @ ((form.value(grid)[0] - target) ** 2).T
            return grid[np.argsort(error, axis=1)[:, : keep or STARTS]]

        return Problem(
            form=form,
            target=target,
            bounds={name: bounds[name] for name in names},
            logarithmic=("A", "B", "E", "R_D", "R_N"),
            axes=np.stack([log_n, log_d]),
            starts=starts,
            constants=constants,
        )


def _base(given: Mapping[str, float]) -> dict[str, float]:
    missing = [name for name in BASE if name not in given]
    if missing:
        raise InputError(f"base has no {missing[0]}; it needs E, A, B, alpha and beta.")
    for name in BASE:
        value = given[name]
        number = isinstance(value, float | int | np.number)
        if not number or not (0.0 < value < np.inf or (name == "E" and value == 0.0)):
            raise InputError(f"base has {name} = {value!r}; it must be a finite number above zero.")
    return {name: float(given[name]) for name in BASE}
