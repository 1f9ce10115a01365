"""Smoothly broken power laws.

In log-log the slope of y - a changes from -c0 to -(c0 + c1) around d1, over a width of about 4 f1 in log x. Breaks must
lower the corrected Akaike criterion (Hurvich and Tsai 1989).

Caballero et al. 2022 (arXiv:2210.14891), equation 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import numpy as np

from ..errors import Array, Columns, Constants, InputError, Say
from ..solver.forms import LogSumTerms
from ..solver.solver import variable_projection
from .law import RESAMPLES_AT_ONCE, LineLaw, Problem, amplitude, centred, least_starts

BREAKS = (0, 1, 2, 3)
STEEPEST = 20.0  # largest |c_i|; Caballero et al. find up to 6
SHARPEST = 0.02  # smallest f_i: a bend within 8 % of x
MARGIN = 0.25  # distance that a break may have from the data, in spans of log x; chosen by hand
VANISHED = 12.0  # an offset below exp(-12) of the smallest y is stored as zero
WIDE = 50.0  # largest distance of log b from log y
OFFSET_GRID = (0.0, 0.5, 0.8, 0.95, 0.99)  # a as a share of the smallest y, for the starts
PLACES = {1: 12, 2: 9, 3: 8}  # number of breaks -> places inside the data that the starts try
WIDTH_GRID = (0.02, 0.06, 0.2)  # f as a share of the span of log x, for the starts
STARTS = 48


class BrokenPowerLaw(LineLaw):
    """y = a + b x^-c0 prod_i (1 + (x / d_i)^(1 / f_i))^(-c_i f_i) with 0 to 3 `breaks`; a is zero without `offset`.

    After `fit`: a_, b_, c0_ and, for each break in order of x, c1_, d1_, f1_, ... `degenerate_` contains the d_i of
    breaks outside the data, and of the weakest break unless `support` is above zero.
    """

    form = "broken"
    title = "the broken power law"
    a_: float
    b_: float
    c0_: float

    def __init__(self, breaks: int = 1, offset: bool = True, objective: str = "squares", delta: float = 1e-3) -> None:
        super().__init__(objective, delta)
        if breaks not in BREAKS:
            raise InputError(f"breaks is {breaks}; it must be 0, 1, 2 or 3.")
        self.breaks, self.offset = int(breaks), bool(offset)
        bends = tuple(f"{name}{i}" for i in range(1, breaks + 1) for name in "cdf")
        self.names = ("a", "b", "c0", *bends)

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        c, u = constants, np.log(inputs[0])
        log = np.log(c["b"]) - c["c0"] * u
        i = 1
        while f"d{i}" in c:
            log = log - c[f"c{i}"] * c[f"f{i}"] * np.logaddexp(0.0, (u - np.log(c[f"d{i}"])) / c[f"f{i}"])
            i += 1
        with np.errstate(over="ignore"):
            return c["a"] + np.exp(log)

    def equation(self, say: Say) -> str:
        bends = "".join(
            f" (1 + (x / {say(f'd{i}')})^(1 / {say(f'f{i}')}))^(-({say(f'c{i}')}) {say(f'f{i}')})"
            for i in range(1, self.breaks + 1)
        )
        return f"y = {say('a') + ' + ' if self.offset else ''}{say('b')} x^-({say('c0')}){bends}"

    # Support for the breaks.

    def aicc(self) -> float:
        """Return the corrected Akaike criterion, up to a constant of the data; infinity for too few rows."""
        self._fitted()
        weight = self.weight_ * self._precision
        n, k = int((weight > 0).sum()), self.problem_.free + 1
        residual = np.abs(self.residuals())
        power = 2.0 if self.objective in ("squares", "se") else 1.0
        # A scatter below rounding is no better than rounding.
        scatter = max(float(weight @ residual**power / weight.sum()), 1e-13**power)
        return 2.0 / power * n * np.log(scatter) + (2.0 * k * n / (n - k - 1) if n > k + 1 else np.inf)

    def simpler(self) -> BrokenPowerLaw:
        """Return a law with one break fewer, fitted to the same data."""
        self._fitted()
        if self.breaks == 0:
            raise InputError("breaks is 0; a simpler law exists from 1 break on.")
        law = BrokenPowerLaw(self.breaks - 1, self.offset, self.objective, self.delta)
        return law.fit(self.data_["x"], self.data_["y"], self.weight_, self.se_)

    def support(self) -> float:
        """Return the fall of the corrected Akaike criterion from one break fewer; above ten is strong support."""
        return self.simpler().aicc() - self.aicc()

    def _accept(self, solution: Any) -> None:
        super()._accept(solution)
        if not self.breaks:
            return
        c, x = self.constants_, self.data_["x"][self.weight_ > 0]
        outside = [f"d{i}" for i in range(1, self.breaks + 1) if not x.min() < c[f"d{i}"] < x.max()]
        weakest = min(range(1, self.breaks + 1), key=lambda i: abs(c[f"c{i}"]))
        unsupported = [] if self.support() > 0 else [f"d{weakest}"]
        self._mark_degenerate(*outside, *unsupported)

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        distinct = len(np.unique(np.round(np.log(inputs[0]), 6)))
        if distinct <= self.problem_.free:
            raise InputError(
                f"{self.title} with breaks = {self.breaks} has {self.problem_.free} constants, and x has {distinct} "
                f"different values; it needs at least {self.problem_.free + 1}."
            )

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        (u, x0), target, breaks = centred(inputs[0]), np.log(observed), range(1, self.breaks + 1)
        span = max(float(np.ptp(u)), 1e-3)
        names = [name for name in self.names if name != "a" or self.offset]
        at = {name: i for i, name in enumerate(names)}
        low, high = float(target.min()), float(target.max())
        bounds = {
            "a": (low - VANISHED, high),
            "b": (low - WIDE, high + WIDE),
            "c": (-STEEPEST, STEEPEST),
            "d": (float(u.min()) - MARGIN * span, float(u.max()) + MARGIN * span),
            "f": (np.log(SHARPEST), np.log(max(span, 2.0 * SHARPEST))),
        }

        def terms(v: Mapping[str, Any]) -> list[Any]:
            log = v["b"] - v["c0"] * u
            for i in breaks:
                f = np.exp(v[f"f{i}"])
                log = log - v[f"c{i}"] * f * np.logaddexp(0.0, (u - v[f"d{i}"]) / f)
            return [log, v["a"]] if self.offset else [log]

        def constants(theta: Array) -> Columns:
            with np.errstate(over="ignore"):
                b = np.exp(theta[:, at["b"]] + theta[:, at["c0"]] * x0)
            a = amplitude(theta[:, at["a"]], bounds["a"][0]) if self.offset else np.zeros(len(theta))
            columns = {kind: theta[:, [at[f"{kind}{i}"] for i in breaks]] for kind in "cdf"}
            order = np.argsort(columns["d"], axis=1)
            columns = {kind: np.take_along_axis(values, order, axis=1) for kind, values in columns.items()}
            columns |= {"d": np.exp(columns["d"] + x0), "f": np.exp(columns["f"])}
            values = {"a": a, "b": b, "c0": theta[:, at["c0"]].copy()}
            return values | {f"{kind}{i}": columns[kind][:, i - 1] for i in breaks for kind in "cdf"}

        return Problem(
            form=LogSumTerms(terms, at, len(u)),
            target=target,
            bounds={name: bounds[name[0]] for name in names},
            axes=np.log(np.stack(inputs)),
            starts=lambda weights, keep: _starts(u, observed, self.breaks, at, weights, keep or STARTS),
            constants=constants,
        )


def _starts(u: Array, y: Array, breaks: int, at: Mapping[str, int], weights: Array, keep: int) -> Array:
    """Return the `keep` best starts of a grid of a, d_i and f_i, (problems, keep, coordinates); b and c_i are fitted.

    u (n,): log x less its mean. at: index of each coordinate.
    """
    inner = np.quantile(u, np.linspace(0.0, 1.0, PLACES.get(breaks, 1) + 2)[1:-1])
    grid = list(product(combinations(inner, breaks), WIDTH_GRID if breaks else (1.0,)))
    places = np.array([place for place, _ in grid]).reshape(len(grid), breaks)
    width = float(np.ptp(u)) * np.array([share for _, share in grid])
    bends = [-width[:, None] * np.logaddexp(0.0, (u - places[:, i : i + 1]) / width[:, None]) for i in range(breaks)]
    basis = np.stack([np.ones((len(grid), len(u))), np.broadcast_to(-u, (len(grid), len(u))), *bends], axis=2)
    chosen = []
    for chunk_weights in np.array_split(weights, max(1, len(weights) // RESAMPLES_AT_ONCE)):
        starts, errors = [], []
        for share in OFFSET_GRID if "a" in at else (0.0,):
            remainder = y - share * y.min()
            # An error e in log y is an error e y / remainder in the log of the remainder.
            slopes, error = variable_projection(basis, np.log(remainder), chunk_weights * (remainder / y) ** 2)
            theta = np.empty((*error.shape, len(at)))
            for place, name in enumerate(["b", "c0", *(f"c{i + 1}" for i in range(breaks))]):
                theta[..., at[name]] = slopes[..., place]
            for i in range(breaks):
                theta[..., at[f"d{i + 1}"]], theta[..., at[f"f{i + 1}"]] = places[:, i], np.log(width)
            if "a" in at:
                theta[..., at["a"]] = np.log(max(share, 0.02) * y.min())
            starts.append(theta)
            errors.append(error)
        chosen.append(least_starts(np.concatenate(starts, axis=1), np.concatenate(errors, axis=1), keep))
    return np.concatenate(chosen)
