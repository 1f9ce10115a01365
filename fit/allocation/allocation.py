"""The best split of a budget between parameters and tokens, also with limited tokens or with serving counted.

Zero and infinity are answers: of laws with a vanished term, and for unreachable losses.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3; Muennighoff et al. 2023 (arXiv:2305.16264); Sardana et al. 2023
(arXiv:2401.00448).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, InputError, check_level, floats, need, one_of, positive, same_length
from ..flops import convention_name, in_words
from ..formatting import amount, count, scientific, text
from ..uncertainty import percentile_intervals
from .serving import Prices

GRID = 160  # points in the first pass of a search, for laws with several local minima
LOGITS = 700.0  # bound of logit s; exp(700) is still finite
REACH = 60.0  # log N is searched this far on both sides of log sqrt(C), so that units do not matter

Curve = Callable[[Array], Array]


@dataclass(frozen=True)
class Optimum:
    """The optimum at each target, as arrays (targets,): training FLOPs, N, D, loss, and other quantities in `more`.

    `draws` has the bootstrap draws of each quantity, (targets, resamples).
    """

    flops: Array
    N: Array
    D: Array
    loss: Array
    more: Mapping[str, Array] = field(default_factory=dict)
    draws: Mapping[str, Array] = field(default_factory=dict)
    level: float = 0.95
    convention: str = "6nd"  # how C is counted

    @property
    @np.errstate(divide="ignore", invalid="ignore")
    def ratio(self) -> Array:
        """Return tokens per parameter, D / N."""
        return self.D / self.N

    @property
    def values(self) -> Columns:
        """Return flops, N, D, ratio, loss and the entries of `more` by name, each (targets,)."""
        return {"flops": self.flops, "N": self.N, "D": self.D, "ratio": self.ratio, "loss": self.loss, **self.more}

    def interval(self, name: str, level: float | None = None) -> Array:
        """Return a quantity's interval (targets, 2), by default at `self.level`; NaN without bootstrap draws."""
        one_of("quantity", name, self.values)
        if name not in self.draws:
            return np.full((len(self.N), 2), np.nan)
        return percentile_intervals(self.draws[name], level or self.level)

    @property
    def intervals(self) -> Columns:
        """Return every quantity's `interval` by name; empty without bootstrap draws."""
        return {name: self.interval(name) for name in self.draws}

    def rows(self) -> list[dict[str, str]]:
        """Return for each target a dict of quantities by name, each written with its interval."""
        values, intervals = self.values, self.intervals

        def cell(name: str, i: int) -> str:
            shown = _written(name, values[name][i])
            low, high = intervals[name][i] if name in intervals else (np.nan, np.nan)
            if np.isnan(low) or high <= low * (1 + 1e-9):  # the target itself is the same in every draw
                return shown
            return f"{shown} [{_written(name, low)}, {_written(name, high)}]"

        return [{name: cell(name, i) for name in values} for i in range(len(self.N))]

    def __repr__(self) -> str:
        titles = self._titles()
        return "\n".join(", ".join(f"{titles[name]} = {value}" for name, value in row.items()) for row in self.rows())

    def _titles(self) -> dict[str, str]:
        named = {"flops": f"C ({in_words(self.convention)})", "ratio": "D/N"}
        return {name: named.get(name, name) for name in self.values}

    def _repr_html_(self) -> str:
        rows = self.rows()
        head = "".join(f"<th>{text(title)}</th>" for title in self._titles().values())
        body = "".join("<tr>" + "".join(f"<td>{text(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@np.errstate(all="ignore")  # zeros and infinities are answers, see above
def answer(
    law: Any, solve: Callable[[Constants], Columns], level: float, flops_per_token: float | Curve = 6.0
) -> Optimum:
    """Evaluate `solve` at a law's fitted constants and at its bootstrap draws, if any.

    `solve` maps constants (r,) to named arrays (targets, r).
    """
    check_level(level)
    if getattr(law, "constants_", None) is None:
        raise InputError(f"this {type(law).__name__} is not fitted; call fit first.")

    def every(constants: Constants) -> Columns:
        solution = solve({name: np.atleast_1d(floats(value)) for name, value in constants.items()})
        shape = np.broadcast_shapes(*(v.shape for v in solution.values()))
        return {name: np.broadcast_to(v, shape) for name, v in solution.items()}

    values = {name: v[:, 0].copy() for name, v in every(law.constants_).items()}
    draws = {} if law.draws_ is None else every(law.draws_)
    if draws:
        draws["ratio"] = draws["D"] / draws["N"]
    fields = {name: values.pop(name) for name in ("flops", "N", "D", "loss")}
    return Optimum(**fields, more=values, draws=draws, level=level, convention=convention_name(flops_per_token))


def aligned(**columns: ArrayLike) -> list[Array]:
    """Check that columns are positive, and broadcast each, a number or (targets,), to (targets, 1)."""
    checked = {name: positive(name, np.atleast_1d(np.asarray(v))) for name, v in columns.items()}
    longest = max(len(v) for v in checked.values())
    same_length(**{name: v for name, v in checked.items() if len(v) > 1})
    return [np.broadcast_to(v, longest)[:, None] for v in checked.values()]


def _written(name: str, value: float) -> str:
    if not np.isfinite(value):
        return "none" if np.isnan(value) else "∞"
    if name == "loss":
        return f"{value:.4f}"
    return (count if name in ("N", "D") else scientific if "flops" in name else amount)(value)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def optimum(flops: ArrayLike, constants: Constants, coefficient: float = 6.0) -> tuple[Array, Array, Array]:
    """Return the N and D that minimise E + A/N^alpha + B/D^beta at C = coefficient N D, and the loss.

    Hoffmann et al. 2022, equation 4.
    """
    E, A, B, alpha, beta = _live(constants)
    log_c = np.log(floats(flops) / coefficient)
    log_n = (np.log(alpha * A) - np.log(beta * B) + beta * log_c) / (alpha + beta)
    N, D = np.exp(log_n), np.exp(log_c - log_n)
    return N, D, E + _term(A, N, alpha) + _term(B, D, beta)


class EqualLoss:
    """The curve E + A/N^alpha + B/D^beta = loss as a function of z = log(s / (1-s)).

    s is the share of R = loss - E that is due to size: N = (A / s R)^(1/alpha), D = (B / (1-s) R)^(1/beta). A call
    returns log N and log D. N D is smallest at z = `cheapest`, where s = beta / (alpha + beta).
    """

    ends = (-LOGITS, LOGITS)

    def __init__(self, constants: Constants, loss: Array) -> None:
        E, A, B, self.alpha, self.beta = _live(constants)
        self.reachable = loss > E
        self.log_a, self.log_b = (np.log(X) - np.log(loss - E) for X in (A, B))
        self.cheapest = np.where(A == 0, -LOGITS, np.where(B == 0, LOGITS, np.log(self.beta / self.alpha)))

    def __call__(self, z: Any) -> tuple[Array, Array]:
        return (self.log_a + np.logaddexp(0.0, -z)) / self.alpha, (self.log_b + np.logaddexp(0.0, z)) / self.beta

    def point(self, z: Any) -> tuple[Array, Array]:
        """Return N and D at position z of the curve; infinite where no model reaches the loss."""
        N, D = (np.where(self.reachable, np.exp(log), np.inf) for log in self(z))
        return N, D


def lowest(value: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """Search elementwise for the x between `low` and `high` at which `value` is lowest.

    Returns x, and -1 where the lowest value is at `low`, 1 where it is at `high`, else 0.
    """
    step = (high - low) / GRID
    best, at = value(low), np.zeros(1)
    for i in range(1, GRID + 1):
        here = value(low + i * step)
        best, at = np.minimum(best, here), np.where(here < best, i, at)
    golden = 0.5 * (np.sqrt(5.0) - 1.0)  # golden-section search: one new value a turn (Kiefer 1953)
    a, b = low + (at - 1) * step, low + (at + 1) * step
    c, d = b - golden * (b - a), a + golden * (b - a)
    at_c, at_d = value(c), value(d)
    for _ in range(45):  # 0.618^45 of two steps is 1e-9
        left = at_c < at_d
        a, b = np.where(left, a, c), np.where(left, d, b)
        new = np.where(left, b - golden * (b - a), a + golden * (b - a))
        at_new = value(new)
        c, d = np.where(left, new, d), np.where(left, c, new)
        at_c, at_d = np.where(left, at_new, at_d), np.where(left, at_c, at_new)
    return 0.5 * (a + b), np.where(at == 0, -1, np.where(at == GRID, 1, 0))


def root(rising: Callable[[Array], Array], low: Any, high: Any) -> Array:
    """Return the zero of a rising function in [low, high], elementwise, or the bound beyond which the zero lies."""
    for _ in range(70):  # 2^-70 of the interval is below the rounding of a float64
        middle = 0.5 * (low + high)
        above = rising(middle) > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return 0.5 * (low + high)


def _live(constants: Constants) -> tuple[Array, Array, Array, Array, Array]:
    """Return E, A, B, alpha and beta; the amplitude of a term with exponent zero moves to E."""
    E, A, B, alpha, beta = (floats(constants[k]) for k in ("E", "A", "B", "alpha", "beta"))
    E = E + np.where(alpha == 0, A, 0.0) + np.where(beta == 0, B, 0.0)
    return E, np.where(alpha == 0, 0.0, A), np.where(beta == 0, 0.0, B), alpha, beta


def _term(amplitude: Array, x: Array, exponent: Array) -> Array:
    return np.where(amplitude == 0, 0.0, amplitude * np.power(x, -exponent))


def compute_optimal(
    law: Any, flops: ArrayLike, flops_per_token: float | Curve | None = None, level: float = 0.95
) -> Optimum:
    """Return the N and D of lowest loss for a training budget.

    Parameters
    ----------
    flops
        The budget, a scalar or (targets,).
    flops_per_token
        k for k N FLOPs per token, or a function of N such as `FlopsPerToken`; default as the law was fitted.
    """
    (C,) = aligned(flops=flops)
    flops_per_token = own_convention(law, flops_per_token)

    def solve(constants: Constants) -> Columns:
        N, D, loss = unlimited(law, constants, C, flops_per_token)
        return {"flops": C, "N": N, "D": D, "loss": loss}

    return answer(law, solve, level, flops_per_token)


def own_convention(law: Any, flops_per_token: float | Curve | None = None) -> float | Curve:
    if flops_per_token is None:
        flops_per_token = getattr(law, "flops_per_token_", None)
    return 6.0 if flops_per_token is None else flops_per_token


def token_limited(
    law: Any,
    flops: ArrayLike,
    unique_tokens: ArrayLike,
    flops_per_token: float | Curve | None = None,
    level: float = 0.95,
) -> Optimum:
    """Return the best N and D for `flops` with only `unique_tokens` different tokens (broadcast together).

    A law of (N, D, U) tells what tokens beyond U are worth; for a law of (N, D), D stops at one epoch and the rest of
    the budget goes into N. The result's `more` has the epochs.
    """
    C, U = aligned(flops=flops, unique_tokens=unique_tokens)
    flops_per_token = own_convention(law, flops_per_token)
    spend = spending(flops_per_token)

    def solve(constants: Constants) -> Columns:
        if tuple(law.inputs) == ("N", "D", "U"):
            N, D, loss = search(law, constants, C, spend, U)
        else:
            N, D, loss = unlimited(law, constants, C, flops_per_token)
            middle = 0.5 * np.log(C)
            # The N that spends C on one epoch.
            all_of_it = np.exp(root(lambda x: np.log(spend(np.exp(x)) * U / C), middle - REACH, middle + REACH))
            N, D = np.where(D > U, all_of_it, N), np.minimum(D, U)
            loss = np.where(D < U, loss, law.evaluate(constants, all_of_it, U))
        return {"flops": C, "N": N, "D": D, "loss": loss, "epochs": np.maximum(D / U, 1.0)}

    return answer(law, solve, level, flops_per_token)


def inference_aware(
    law: Any, lifetime_tokens: ArrayLike, loss: ArrayLike, prices: Prices | None = None, level: float = 0.95
) -> Optimum:
    """Return the model of a given loss that is cheapest to train and serve (Sardana et al. 2023).

    The result's `flops` counts training alone; its `more` has inference_flops, total_flops, saving (the share of the
    training-optimal model's cost that is saved), and with `prices` dollars. N and D are infinite where no model reaches
    the loss.

    Parameters
    ----------
    law
        A fitted law with a method `equal_loss`, such as E + A/N^alpha + B/D^beta.
    lifetime_tokens
        Tokens to be served, at 2 N FLOPs each; a token of training costs 6 N.
    loss
        The loss to reach, broadcast with `lifetime_tokens`.
    prices
        Without them, FLOPs are minimised.
    """
    need("law", law, "equal_loss", "of the form E + A/N^alpha + B/D^beta")
    served, goal = aligned(lifetime_tokens=lifetime_tokens, loss=loss)
    # Training tokens that cost as much as all of serving.
    worth = served / 3.0 * (prices.serve / prices.train if prices else 1.0)

    def solve(constants: Constants) -> Columns:
        curve = law.equal_loss(constants, goal)
        # Where the derivative of N (D + worth) along the curve is 0.
        z = root(lambda z: z - curve.cheapest - np.log1p(worth * np.exp(-curve(z)[1])), *curve.ends)
        (N, D), (N0, D0) = curve.point(z), curve.point(curve.cheapest)
        values = {"flops": 6.0 * N * D, "N": N, "D": D, "loss": goal, "inference_flops": 2.0 * N * served}
        values["total_flops"] = values["flops"] + values["inference_flops"]
        values["saving"] = 1.0 - N * (D + worth) / (N0 * (D0 + worth))
        return values | ({"dollars": 6.0 * prices.train * N * (D + worth)} if prices else {})

    return answer(law, solve, level)


def unlimited(law: Any, constants: Constants, C: Array, flops_per_token: Any) -> tuple[Array, Array, Array]:
    """Return the optimal N, D and loss for C FLOPs and unlimited tokens; C broadcasts with the constants."""
    if tuple(law.inputs) != ("N", "D"):
        raise InputError(f"the law takes {', '.join(law.inputs)}; a law of N and D is expected.")
    if callable(flops_per_token):
        return search(law, constants, C, flops_per_token)
    coefficient = float(positive("flops_per_token", [flops_per_token])[0])
    result: tuple[Array, Array, Array] = law.optimum(C, constants, coefficient)
    return result


@np.errstate(all="ignore")
def search(
    law: Any, constants: Constants, C: Array, spend: Curve, U: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return the N and D of lowest loss for C FLOPs, and this loss.

    `spend` maps N to FLOPs per token; `U` is the number of unique tokens.
    """
    # Search without the irreducible loss: adding it costs digits, and locating a flat minimum halves those left.
    sought = {**constants, law.irreducible: 0.0 * constants[law.irreducible]} if law.irreducible else constants

    def loss(x: Array, constants: Constants = sought) -> Array:
        N = np.exp(x)
        D = C / spend(N)
        value = np.asarray(law.evaluate(constants, N, D, *(() if U is None else (np.minimum(U, D),))))
        return np.where(np.isnan(value), np.inf, value)

    middle = 0.5 * np.log(C)
    x, edge = lowest(loss, middle - REACH, middle + REACH)
    N = np.where(edge < 0, 0.0, np.where(edge > 0, np.inf, np.exp(x)))
    D = np.where(edge < 0, np.inf, np.where(edge > 0, 0.0, C / spend(np.exp(x))))
    return N, D, loss(x, constants)


def spending(flops_per_token: float | Curve) -> Curve:
    if callable(flops_per_token):
        return flops_per_token
    coefficient = float(positive("flops_per_token", [flops_per_token])[0])
    return lambda N: coefficient * N
