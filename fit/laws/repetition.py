"""The data-constrained law: the value of repeated tokens, and of parameters beyond the best size for the data.

    L(N, D, U) = E + A / N'^alpha + B / D'^beta
    D' = U   + U   R_D (1 - exp(-(D / U   - 1) / R_D))
    N' = U_N + U_N R_N (1 - exp(-(N / U_N - 1) / R_N)), U_N the size that is compute-optimal for U tokens, at most N

U_N solves alpha A / U_N^alpha = beta B / U^beta.

Muennighoff et al. 2023 (arXiv:2305.16264), equations 5 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import Optimum, token_limited
from ..errors import Array, Columns, Constants, InputError, floats, identifiable
from ..solver.forms import LogSumTerms
from .chinchilla import FLAT_EXPONENT, VANISHED
from .law import Law, Problem, amplitude, centred, projected_starts

EXPONENT_GRID = np.geomspace(0.1, 1.0, 5)
DECAY_GRID = np.geomspace(0.5, 200.0, 8)
COARSE_DECAY_GRID = np.geomspace(1.0, 60.0, 4)
RATIO_GRID = (5.0, 20.0, 80.0)  # tokens per parameter at the optimum, for the starts
HUGE = 300.0  # largest log(N / U_N): N' no longer grows there, and exp(2 HUGE) is still finite
BASE = ("A", "alpha", "B", "beta", "E")
EXPONENT_BOUNDS = (FLAT_EXPONENT, 3.0)
R_BOUNDS = (1e-3, 1e5)  # repeats are worth nothing, and as much as new tokens
STARTS = 64
TINY = 1e-300  # replaces a vanished term before its logarithm is taken


def saturated(s: Any, r: Any) -> Any:
    """Return h(s, r) = log(1 + R (1 - exp(-(e^s - 1) / R))) with R = e^r: log(D' / U) at s = log(D / U) >= 0."""
    R = np.exp(r)
    return np.log1p(-R * np.expm1(-np.expm1(s) / R))


def worth(v: Mapping[str, Any], x: Any, w: Any, repeats: Any) -> tuple[Any, Any]:
    """Return log N' and log D', the logs of effective parameters and tokens.

    v: by name, the logs of A, B, R_D and R_N; alpha and beta themselves. x, w: logs of N and of unique tokens, in the
    units for which A and B hold. repeats: log(D / unique tokens).
    """
    optimal = (v["A"] - v["B"] + np.log(v["alpha"] / v["beta"]) + v["beta"] * w) / v["alpha"]
    excess = np.minimum(np.maximum(x - optimal, 0.0), HUGE)
    return x - excess + saturated(excess, v["R_N"]), w + saturated(repeats, v["R_D"])


class RepetitionLaw(Law):
    """L(N, D, U) = E + A / N'^alpha + B / D'^beta; see the module for N' and D'.

    U: unique tokens; above D it counts as D.
    After `fit`: E_, A_, B_, alpha_, beta_, R_D_, R_N_; `degenerate_` has R_N if no run is too large for its unique
    tokens.

    Parameters
    ----------
    tied
        Hold alpha = beta, as the paper does.
    base
        Fixed E, A, B, alpha and beta, such as from a tied fit to runs of one epoch, as in the paper.
    """

    form = "repetition"
    title = "the law of repeated data"
    formula = "L(N, D, U) = {E} + {A} / N'^{alpha} + {B} / D'^{beta}, R_D = {R_D}, R_N = {R_N}"
    names = ("E", "A", "B", "alpha", "beta", "R_D", "R_N")
    direct = "always"
    irreducible = "E"
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
                "tied and base were both given, but base already fixes both exponents; give only one of them."
            )
        self.tied, self.base = bool(tied), base
        self._base = None if base is None else _base(base)

    def options(self) -> dict[str, Any]:
        return self.get_params() | {"base": self._base}

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        c = {name: floats(value) for name, value in constants.items()}
        log_n, log_d, log_u = (np.log(v) for v in inputs)
        w = np.minimum(log_u, log_d)
        v = c | {name: np.log(np.maximum(c[name], TINY)) for name in ("A", "B", "R_D", "R_N")}
        size, data = worth(v, log_n, w, log_d - w)
        return c["E"] + c["A"] * np.exp(-c["alpha"] * size) + c["B"] * np.exp(-c["beta"] * data)

    def optimal(self, flops: ArrayLike, unique_tokens: ArrayLike, level: float = 0.95) -> Optimum:
        """Return the best N and D for `flops` = 6 N D and `unique_tokens`; the result's `more` has the epochs."""
        return token_limited(self, flops, unique_tokens, level=level)

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        super()._check(inputs, observed)
        N, D, U = inputs
        if self._base is None:
            identifiable(N, D)
        if not (D > U * (1.0 + 1e-9)).any():
            raise InputError("U is at least D in every row, so no run repeats its data; add runs of several epochs.")

    def _accept(self, solution: Any) -> None:
        super()._accept(solution)
        columns = [self.data_[name] for name in self.inputs]
        without = self.evaluate(self.constants_ | {"R_N": R_BOUNDS[0]}, *columns)
        if np.allclose(without, self.predict(*columns), rtol=1e-9, atol=0.0):
            self._mark_degenerate("R_N")

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        (x, x0), (y, y0) = centred(inputs[0]), centred(inputs[1])
        w = np.minimum(np.log(inputs[2]) - y0, y)
        target, repeats, base = np.log(observed), y - w, self._base
        free = [] if base else [name for name in BASE if not (self.tied and name == "beta")]
        names = (*free, "R_D", "R_N")
        at = {name: i for i, name in enumerate(names)} | ({"beta": free.index("alpha")} if self.tied else {})
        low, high = float(target.min()) - VANISHED, float(target.max()) + 2.0
        bounds = dict.fromkeys("ABE", (low, high)) | dict.fromkeys(("alpha", "beta"), EXPONENT_BOUNDS)
        bounds |= dict.fromkeys(("R_D", "R_N"), tuple(np.log(R_BOUNDS)))
        fixed = {}
        if base:
            middle = {"A": x0 * base["alpha"], "B": y0 * base["beta"], "E": 0.0}
            fixed = base | {name: float(np.log(max(base[name], TINY))) - middle[name] for name in "ABE"}

        def terms(v: Mapping[str, Any]) -> list[Any]:
            size, data = worth(v, x, w, repeats)
            return [v["A"] - v["alpha"] * size, v["B"] - v["beta"] * data, v["E"]]

        def constants(theta: Array) -> Columns:
            values = {name: np.exp(theta[:, at[name]]) for name in ("R_D", "R_N")}
            if base:
                return {name: np.full(len(theta), base[name]) for name in BASE} | values
            values |= {name: theta[:, at[name]].copy() for name in ("alpha", "beta")}
            for name, shift in (("A", x0 * values["alpha"]), ("B", y0 * values["beta"]), ("E", 0.0)):
                values[name] = amplitude(theta[:, at[name]], low, shift)
            return values

        def starts(weights: Array, keep: int | None) -> Array:
            if base:  # the best of a grid, by least squares
                grid = np.stack([g.ravel() for g in np.meshgrid(np.log(DECAY_GRID), np.log(DECAY_GRID))], 1)
                error = weights @ ((form.value(grid)[0] - target) ** 2).T
                return grid[np.argsort(error, axis=1)[:, : keep or STARTS]]
            betas = EXPONENT_GRID[:1] if self.tied else EXPONENT_GRID
            axes = (EXPONENT_GRID, betas, COARSE_DECAY_GRID, COARSE_DECAY_GRID, RATIO_GRID)
            alpha, beta, R_D, R_N, ratio = (g.reshape(-1, 1) for g in np.meshgrid(*axes, indexing="ij"))
            beta = alpha if self.tied else beta
            # With U_N from the tokens per parameter, the law is linear in E, A and B.
            excess = np.clip(x - (w - np.log(ratio) - x0 + y0), 0.0, HUGE)
            size = x - excess + saturated(excess, np.log(R_N))
            data = w + saturated(repeats, np.log(R_D))
            basis = np.stack([np.exp(-alpha * size), np.exp(-beta * data), np.ones_like(size)], axis=2)

            def coordinates(log: Array) -> dict[str, Array]:
                held = {"alpha": alpha, "beta": beta, "R_D": np.log(R_D), "R_N": np.log(R_N)}
                return dict(zip("ABE", np.moveaxis(log, 2, 0), strict=True)) | {k: v[:, 0] for k, v in held.items()}

            basis, floor = basis / observed[None, :, None], 0.02 * observed.min()
            return projected_starts(at, coordinates, basis, weights, keep or STARTS, floor=floor)

        form = LogSumTerms(terms, at, len(target), fixed)
        return Problem(
            form, target, {name: bounds[name] for name in names}, np.log(np.stack(inputs[:2])), starts, constants
        )


def _base(base: Mapping[str, float]) -> dict[str, float]:
    missing = [name for name in BASE if name not in base]
    if missing:
        raise InputError(f"base has no value for {missing[0]}; it needs E, A, B, alpha and beta.")
    for name in BASE:
        value = base[name]
        number = isinstance(value, float | int | np.number)
        if not number or not (0.0 < value < np.inf or (name == "E" and value == 0.0)):
            raise InputError(f"base has {name} = {value!r}; it must be a finite number above zero.")
    return {name: float(base[name]) for name in BASE}
