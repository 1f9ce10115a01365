"""The data-constrained law: what tokens are worth when they are seen again, and parameters that outgrow their data.

    L(N, D, U) = E + A / N'^alpha + B / D'^beta
    D' = U   + U   R_D (1 - exp(-(D / U   - 1) / R_D))
    N' = U_N + U_N R_N (1 - exp(-(N / U_N - 1) / R_N)), U_N the size that is compute-optimal for U tokens, and at most N

Special here:
- The value of a repeated token decays: U tokens seen for ever are worth (1 + R_D) U. With nothing repeated, D' = D, but
  N' < N still where a model has more parameters than is optimal for its unique tokens.
- U_N solves alpha A / U_N^alpha = beta B / U^beta, so it moves with the constants; its derivatives are in the fit.
- `base=` holds E, A, B, alpha and beta, and fits R_D and R_N alone. That is the paper's way: it took the base from
  other runs, each of one epoch. Without it all seven are fitted at once.
- The objective in (R_D, R_N) is flat and has several valleys (the published pair is one of them, and not the deepest):
  `starts_` says how many starts agree, and a profile interval how little the data say.

Muennighoff et al. 2023 (arXiv:2305.16264), equations 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import Optimum, token_limited
from ..errors import Array, InputError, identifiable
from ..solver.forms import LogSumTerms
from ..solver.solver import AGREE, Minimum, Solution, minimise
from .chinchilla import FLAT_EXPONENT, VANISHED
from .law import L1_DELTA, Law, Problem
from .repetition_form import HUGE, Repeated, decay_starts, joint_starts, saturated

BASE = ("A", "alpha", "B", "beta", "E")
LOGARITHMIC = ("A", "B", "E", "R_D", "R_N")
EXPONENT_BOUNDS = (FLAT_EXPONENT, 3.0)
R_BOUNDS = (1e-3, 1e5)  # repeats that are worth nothing, and repeats that are as good as new
STARTS = 64
FAR = 200.0  # bounds of coordinates that are not centred


class RepetitionLaw(Law):
    """L(N, D, U) = E + A / N'^alpha + B / D'^beta; see the module for N' and D'.

    Parameters
    ----------
    objective, delta
        As in every law; see `fit.law`.
    tied : bool
        Hold alpha = beta, as the paper does.
    base : mapping, optional
        E, A, B, alpha and beta to hold, such as the constants of a tied fit to runs of one epoch.
        Intervals are then those of R_D and R_N given the base.

    Notes:
    -----
    After `fit`: E_, A_, B_, alpha_, beta_, R_D_, R_N_, and what `Law` lists; `degenerate_` names R_N where no run has
    more parameters than is optimal for its unique tokens.
    """

    form = "repetition"
    title = "the law of repeated data"
    names = ("E", "A", "B", "alpha", "beta", "R_D", "R_N")
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

        A run with D below U has seen D different tokens. `weight` (n,) multiplies each run's term. `loss_se` (n,) is
        the loss's standard error, for objective "se". Raises InputError when a value is not a positive finite number,
        when there are too few different runs, when N and D do not vary separately, or when no run repeats its data.
        """
        return self._fit((N, D, U, loss), weight, loss_se)

    @staticmethod
    def evaluate(constants: Mapping[str, Any], *inputs: Any) -> Any:
        """E + A / N'^alpha + B / D'^beta at inputs (N, D, U)."""
        c = {name: np.asarray(value, dtype=np.float64) for name, value in constants.items()}
        with np.errstate(divide="ignore", invalid="ignore"):
            log_n, log_d, log_u = (np.log(v) for v in inputs)
            w = np.minimum(log_u, log_d)
            optimal = (np.log(c["alpha"] * c["A"]) - np.log(c["beta"] * c["B"]) + c["beta"] * w) / c["alpha"]
            excess = np.clip(np.nan_to_num(log_n - optimal, nan=0.0), 0.0, HUGE)
        size = log_n - excess + saturated(excess, np.log(c["R_N"]))
        data = w + saturated(log_d - w, np.log(c["R_D"]))
        return c["E"] + c["A"] * np.exp(-c["alpha"] * size) + c["B"] * np.exp(-c["beta"] * data)

    def equation(self, say: Callable[[str], str]) -> str:
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

    def _solve_full(self) -> Solution:
        """From every start twice: as every law, and at the wanted delta at once.

        A large delta sees only the broadest valley and carries all starts there; at the small one there are others.
        """
        smooth = super()._solve_full()
        if self.objective in ("squares", "se"):
            return smooth
        p, weights = self.problem_, self.weight_ * self._precision
        delta = L1_DELTA if self.objective == "l1" else self.delta
        starts = p.starts(weights[None, :], None)[0]
        return _better(smooth, minimise(p.form, p.target, weights, starts, p.lower, p.upper, delta, stages=(1.0,)))

    def _accept(self, found: Any) -> None:
        super()._accept(found)
        c = self.constants_
        columns = [self.data_[name] for name in self.inputs]
        without = self.evaluate(c | {"R_N": R_BOUNDS[0]}, *columns)
        if np.allclose(without, self.predict(*columns), rtol=1e-9, atol=0.0):
            self._call_degenerate("R_N")

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        """Coordinates: log A and log B (at the mean log N and log D), log E, the exponents, log R_D and log R_N; those
        of the base only where it is not given.
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

        form = LogSumTerms(data, at, len(target), _centred(base, x0, y0) if base else None)

        def constants(theta: Array) -> dict[str, Array]:
            found = {name: np.exp(theta[:, at[name]]) for name in ("R_D", "R_N")}
            if base:
                return {name: np.full(len(theta), base[name]) for name in BASE} | found
            found |= {name: theta[:, at[name]].copy() for name in ("alpha", "beta")}
            for name, shift in (("A", x0 * found["alpha"]), ("B", y0 * found["beta"]), ("E", 0.0)):
                log = theta[:, at[name]]
                with np.errstate(over="ignore"):  # a term that vanished is exactly zero
                    found[name] = np.where(log <= floor, 0.0, np.exp(log + shift))
            return found

        def starts(weights: Array, keep: int | None) -> Array:
            if base:
                return decay_starts(form, target, weights, keep or STARTS)
            return joint_starts(data, x0 - y0, observed, at, weights, keep or STARTS)

        return Problem(
            form=form,
            target=target,
            lower=np.array([bounds[name][0] for name in names]),
            upper=np.array([bounds[name][1] for name in names]),
            coordinates=names,
            logarithmic=tuple(name in LOGARITHMIC for name in names),
            axes=np.stack([log_n, log_d]),
            starts=starts,
            constants=constants,
        )


def _base(given: Mapping[str, float]) -> dict[str, float]:
    """The five constants of the base as floats, checked."""
    missing = [name for name in BASE if name not in given]
    if missing:
        raise InputError(f"base has no {missing[0]}; it needs E, A, B, alpha and beta.")
    for name in BASE:
        value = given[name]
        if not isinstance(value, float | int | np.number) or not (
            0.0 < value < np.inf or (name == "E" and value == 0.0)
        ):
            raise InputError(f"base has {name} = {value!r}; it must be a finite number above zero.")
    return {name: float(given[name]) for name in BASE}


def _centred(base: Mapping[str, float], x0: float, y0: float) -> dict[str, float]:
    """The base as coordinates: log A and log B at the middle of log N and log D, log E, and the exponents."""
    shift = {"A": x0 * base["alpha"], "B": y0 * base["beta"], "E": 0.0}
    logs = {name: float(np.log(max(base[name], 1e-300))) - shift[name] for name in "ABE"}
    return logs | {name: base[name] for name in ("alpha", "beta")}


def _better(smooth: Solution, direct: Minimum) -> Solution:
    """The better of the solution of one problem and of more minima of it."""
    objective = np.where(direct.converged, direct.objective, np.inf)
    best = int(objective.argmin())
    if objective[best] < (smooth.objective[0] if smooth.converged[0] else np.inf):
        smooth = Solution(
            direct.theta[[best]],
            direct.objective[[best]],
            direct.converged[[best]],
            direct.at_bound[[best]],
            smooth.tried,
            np.where(smooth.objective <= objective[best] * (1.0 + AGREE) + 1e-20, smooth.agreeing, 0),
        )
    also = int((objective <= smooth.objective[0] * (1.0 + AGREE) + 1e-20).sum())
    return replace(smooth, tried=smooth.tried + len(objective), agreeing=smooth.agreeing + also)
