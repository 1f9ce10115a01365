"""A joint fit of the best learning rate and batch at every (N, D) and of the excess loss of other settings.

    log loss = best of the cell + q(log lr - log lr*(N, D), log batch - log batch*(N, D)),   lr* = k N^p_N D^p_D, ...

All cells, one per (N, D), share q; the best loss of each is free. q has cubic terms because the loss rises faster above
the best learning rate.

The laws: Li et al. 2025 (arXiv:2503.04715); the quadratic in both logarithms: Porian et al. 2024 (arXiv:2406.19146).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..checks.doctor import Warning
from ..errors import Array, Columns, Constants, InputError, Say, check_weights, floats, positive, same_length, unboxed
from ..laws.law import Problem
from ..solver.forms import LogForm, LogSumTerms
from ..table import as_table, by_name
from ..uncertainty import percentile_intervals
from .hyperparameters import DesignedLaw, centred_design, collinear, law_constants, log_design, read_sweep

TARGETS = ("learning_rate", "batch")
Exponents = tuple[int, ...]
NOISY = 0.15  # with more noise, as a share of the window, choosing runs by their loss flattens q by more than 15 %
NEAREST = 0.25  # share of the window within which a run counts as a best setting for the first start


@dataclass(frozen=True)
class BestSettings:
    """The best settings at N, D, with intervals (..., 2); None if not varied or without draws."""

    N: Any
    D: Any
    learning_rate: Any = None
    batch: Any = None
    learning_rate_interval: Array | None = None
    batch_interval: Array | None = None
    level: float = 0.95


def inputs_of(N: Any, D: Any) -> dict[str, Any]:
    """Return, by name, the inputs that a law of a setting may have: N, D and C = 6ND."""
    return {"N": N, "D": D, "C": 6.0 * N * D}


def best_of(constants: Constants, N: Array, D: Array, batch: Array | None = None) -> Columns:
    """Return the best settings at N and D or, given `batch` (tokens), the best rate for it; NaN without a minimum."""
    inputs, best = inputs_of(N, D), {}
    for target in TARGETS:
        if f"{target}_k" in constants:
            log = np.log(constants[f"{target}_k"]) + np.zeros_like(inputs["C"])
            for name, value in inputs.items():
                log = log + constants.get(f"{target}_p_{name}", 0.0) * np.log(value)
            with np.errstate(over="ignore"):
                best[target] = np.exp(log)
    if batch is None:
        return best
    v = np.log(batch / best["batch"])
    c = {name: constants.get(f"shape_{name}", 0.0) for name in ("20", "11", "30", "21", "12")}
    # The root of dq/du = A u^2 + B u + C that is 0 at v = 0, in a form that allows A = 0.
    # dq/du at the given v; B > 0 makes the root a minimum.
    A, B, C = 3 * c["30"], 2 * (c["20"] + c["21"] * v), (c["11"] + c["12"] * v) * v
    with np.errstate(invalid="ignore", divide="ignore"):
        u = np.where(B > 0, -2 * C / (B + np.sqrt(B**2 - 4 * A * C)), np.nan)
    rate = best["learning_rate"] * np.exp(u)
    return {"learning_rate": rate, "batch": np.broadcast_to(batch, rate.shape)}


def excess_terms(constants: Constants, N: Any, D: Any, *settings: Any) -> tuple[Any, Any]:
    """Return the quadratic and cubic parts of log(loss / best loss at N, D) at `settings` (learning rate, batch)."""
    best = best_of(constants, floats(N), floats(D))
    distances = [np.log(value / optimum) for value, optimum in zip(settings, best.values(), strict=True)]
    parts = {2: np.zeros(()), 3: np.zeros(())}
    for name, coefficient in constants.items():
        if name.startswith("shape_"):
            powers = [int(digit) for digit in name.removeprefix("shape_")]
            term = coefficient
            for distance, power in zip(distances, powers, strict=True):
                term = term * distance**power
            parts[sum(powers)] = parts[sum(powers)] + term
    return parts[2], parts[3]


def exponents(axes: int, order: int) -> tuple[Exponents, ...]:
    """Return the powers of every monomial of `axes` variables and degree 2 to `order`: (2, 0), (1, 1), (0, 2), ..."""
    every = [e for e in product(range(order, -1, -1), repeat=axes) if 2 <= sum(e) <= order]
    return tuple(sorted(every, key=lambda e: (sum(e), [-power for power in e])))


def monomials(distances: Iterable[Any], powers: tuple[Exponents, ...]) -> list[Any]:
    """Return each monomial in `powers`: the product of the distances (arrays or `Jet`s), each to its power."""
    return [
        math.prod(d if p == 1 else d**p for d, p in zip(distances, degrees, strict=True) if p) for degrees in powers
    ]


class SurfaceForm(LogForm):
    """The `LogForm` f = q(z - W x), centred within cells to remove each cell's best loss.

    settings (a, n): the logarithms z, one axis each. designs: for each axis the x of its law, (n, m). share (n,): a
    run's weight as a share of its cell's. theta holds the W of each axis, then the coefficients of q.
    """

    def __init__(
        self, settings: Array, designs: list[Array], cell: np.ndarray, share: Array, powers: tuple[Exponents, ...]
    ) -> None:
        self.settings, self.designs, self.powers, self.share = settings, designs, powers, share
        self.member = (np.arange(cell.max() + 1)[:, None] == cell).astype(np.float64)  # (cells, n)
        self.average = np.ascontiguousarray((self.member * share).T)  # (n, cells)
        ends = np.cumsum([0] + [design.shape[1] for design in designs]).tolist()
        self.parts, self.shape = [slice(a, b) for a, b in pairwise(ends)], slice(ends[-1], ends[-1] + len(powers))
        self.parameters, self.points = self.shape.stop, len(cell)
        self.q = LogSumTerms(self._terms, {str(i): i for i in range(self.parameters)}, self.points)

    def _terms(self, v: Mapping[str, Any]) -> list[Any]:
        theta = [v[str(i)] for i in range(self.parameters)]
        terms = zip(theta[self.shape], monomials(self.distances(theta), self.powers), strict=True)
        return [sum(coefficient * monomial for coefficient, monomial in terms)]

    def distances(self, theta: Any) -> list[Any]:
        """Return, for each setting, log(value / best value by the laws in `theta`) of the runs, (n,)."""
        laws = [
            sum(w * x for w, x in zip(theta[part], design.T, strict=True))
            for part, design in zip(self.parts, self.designs, strict=True)
        ]
        return [z - law for z, law in zip(self.settings, laws, strict=True)]

    def centred(self, values: Array) -> Array:
        """Return values (..., n) minus their weighted mean in each cell."""
        return np.asarray(values - (values @ self.average) @ self.member)

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        value, (first, _) = self.q.value(theta)
        return self.centred(value), [self.centred(first.swapaxes(1, 2)).swapaxes(1, 2), theta]

    def second(self, cache: list[Array], slope: Array) -> Array:
        # Centring is self-adjoint up to the shares, so it is enough to centre the slope.
        return self.q.second(cache, slope - self.share * ((slope @ self.member.T) @ self.member))

    def bend(self, cache: list[Array], step: Array) -> Array:
        return self.centred(self.q.bend(cache, step))


class HyperparameterSurface(DesignedLaw):
    """The joint law of a sweep over learning rate and batch (in tokens) at several (N, D).

    After `fit`: constants_, such as learning_rate_k, batch_p_D and shape_21 (the coefficient of u^2 v), and rows_, the
    runs used. `predict` returns loss over best loss.

    Parameters
    ----------
    learning_rate, batch
        Inputs of each law among N, D and C = 6ND; () for a constant, None if not varied.
    order
        Degree of q, 2 or 3.
    window
        Largest excess loss of the runs used, relative to the lowest of their cell.
    """

    form = "hyperparameter-surface"
    title = "the hyperparameter surface"
    output = "loss"

    def __init__(
        self,
        learning_rate: Sequence[str] | None = ("N", "D"),
        batch: Sequence[str] | None = ("N", "D"),
        order: int = 3,
        window: float = 0.01,
    ) -> None:
        super().__init__("squares")
        self.learning_rate, self.batch = learning_rate, batch
        arguments = {"learning_rate": learning_rate, "batch": batch}
        self.laws = {target: tuple(inputs) for target, inputs in arguments.items() if inputs is not None}
        for target, inputs in self.laws.items():
            if len(set(inputs)) < len(inputs) or not set(inputs) <= set(inputs_of(1.0, 1.0)):
                raise InputError(f"{target} is {inputs}; its inputs must be different names among N, D and C.")
        if not self.laws:
            raise InputError("learning_rate and batch are both None; give the inputs of at least one.")
        if order not in (2, 3):
            raise InputError(f"order is {order}; it must be 2 (a parabola) or 3 (with cubic terms).")
        if not 0 < window < 1:
            raise InputError(f"window is {window}; it must be above 0 and below 1, such as 0.01.")
        self.order, self.window = order, float(window)
        self.inputs = ("N", "D", *self.laws)
        self.powers = exponents(len(self.laws), order)
        self.shape_names = tuple("shape_" + "".join(map(str, powers)) for powers in self.powers)
        self.law_names = {t: (f"{t}_k", *(f"{t}_p_{name}" for name in inputs)) for t, inputs in self.laws.items()}
        laws = tuple(name for names in self.law_names.values() for name in names)
        self.names = (*laws, *self.shape_names)

    def options(self) -> dict[str, Any]:
        laws = {target: list(self.laws[target]) if target in self.laws else None for target in TARGETS}
        return self.get_params() | laws

    def fit(  # type: ignore[override]
        self,
        N: Any,
        D: Any = None,
        learning_rate: Any = None,
        batch: Any = None,
        loss: Any = None,
        weight: Any = None,
    ) -> Self:
        """Fit to a sweep's runs, (n,) each or a table as N; batch in tokens, None for a setting that did not vary.

        Raises InputError if the runs do not determine the law, or if the loss has no minimum within `window`.
        """
        if loss is None:  # N is a table as in `read_sweep`, or N and D are X and y
            weight = as_table(N).weight if D is None and weight is None else weight
            data = by_name("fit", self.inputs, (N, D), {}, ("loss",)) if D is not None else read_sweep(N)._asdict()
            return self.fit(**{"learning_rate": None, "batch": None, "weight": weight} | data)
        settings = {"learning_rate": learning_rate, "batch": batch}
        columns = {"N": positive("N", N), "D": positive("D", D)}
        for target in self.laws:
            setting = settings[target]
            if setting is None:
                raise InputError(f"{target} is missing; give it, or set {target}=None in the constructor.")
            columns[target] = positive(target, setting)
        columns["loss"] = positive("loss", loss)
        weights = check_weights(weight, len(columns["loss"]))
        same_length(**columns, weight=weights)
        self.rows_ = np.flatnonzero(near_best(columns["N"], columns["D"], columns["loss"], weights, self.window))
        super().fit(*(column[self.rows_] for column in columns.values()), weight=weights[self.rows_])
        shape = self.constants_
        if len(self.laws) == 1:
            convex = shape["shape_2"] > 0
        else:
            convex = shape["shape_20"] > 0 and 4 * shape["shape_20"] * shape["shape_02"] > shape["shape_11"] ** 2
        if not convex:
            raise InputError(
                f"the loss within {self.window:.2%} of the best of each cell has no minimum in "
                f"{' and '.join(self.laws)}; more settings around the best, or another window, may show one."
            )
        return self

    def optimal(self, N: ArrayLike, D: ArrayLike, batch: ArrayLike | None = None, level: float = 0.95) -> BestSettings:
        """Return the best settings at N and D or, given `batch` (tokens), the best learning rate for it.

        NaN if the loss with `batch` exceeds the best by more than a fraction `window`.
        """
        self._fitted()
        if batch is not None and len(self.laws) < 2:
            raise InputError("batch is given, but the sweep did not vary both learning rate and batch; leave it out.")
        n, d = np.broadcast_arrays(floats(N), floats(D))
        fixed_batch = None if batch is None else floats(batch)
        best = best_of(self.constants_, n, d, fixed_batch)
        valid = np.ones(()) if fixed_batch is None else np.isfinite(self.penalty(n, d, *best.values()))
        intervals = {}
        if self.draws_ is not None:
            wide = None if fixed_batch is None else fixed_batch[..., None]
            for name, draws in best_of(self.draws_, n[..., None], d[..., None], wide).items():
                pairs = percentile_intervals(draws, level)
                intervals[f"{name}_interval"] = np.where(np.asarray(valid)[..., None], pairs, np.nan)
        settings = {name: unboxed(np.where(valid, value, np.nan)) for name, value in best.items()}
        return BestSettings(unboxed(n), unboxed(d), **settings, **intervals, level=level)

    def penalty(self, *settings: ArrayLike, **named: ArrayLike) -> Any:
        """Return the relative excess loss at N, D, learning_rate, batch over the best settings; NaN above `window`."""
        self._fitted()
        square, cube = excess_terms(self.constants_, *self._inputs(settings, named))
        excess = np.expm1(square + cube)
        # Along a ray from the optimum, square t^2 + cube t^3 turns down again at t = 1 where 2 square + 3 cube < 0.
        valid = (2 * square + 3 * cube >= 0) & (excess <= self.window)
        return unboxed(np.where(valid, excess, np.nan))

    def warnings(self) -> tuple[Warning, ...]:
        """Return warnings about optima outside the settings tried and about too much noise."""
        self._fitted()
        cell = self._cells()
        result, outside = [], 0
        for rows in (cell == label for label in np.unique(cell)):
            run = {name: values[rows] for name, values in self.data_.items()}
            best = best_of(self.constants_, run["N"][:1], run["D"][:1])
            outside += any(not run[name].min() <= value[0] <= run[name].max() for name, value in best.items())
        if outside:
            message = (
                f"In {outside} of {cell.max() + 1} cells the best settings of the law lie outside the settings tried "
                f"within {self.window:.2%} of the best loss; widen the sweep there."
            )
            result.append(Warning("optimum_at_edge", message))
        if self.noise_ > NOISY * self.window:
            message = (
                f"Runs scatter by {self.noise_:.2%} about the surface, too much for a window of {self.window:.2%}, so "
                "the cost of other settings is underestimated; choose a wider window."
            )
            result.append(Warning("noisy_window", message))
        return tuple(result)

    @property
    def noise_(self) -> float:
        """Return the relative standard deviation of the runs about the surface."""
        self._fitted()
        freedom = len(self.weight_) - self.problem_.free - len(np.unique(self._cells()))
        return float(np.sqrt((self.weight_ * self.residuals() ** 2).sum() / self.weight_.mean() / freedom))

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        square, cube = excess_terms(constants, *inputs)
        with np.errstate(over="ignore"):
            return np.exp(square + cube)

    def equation(self, say: Say) -> str:
        laws = []
        for target, (k, *powers) in self.law_names.items():
            product = [f"{name}^{say(p)}" for name, p in zip(self.laws[target], powers, strict=True)]
            laws.append(f"{target} = {' '.join([say(k), *product])}")
        return ", ".join(laws)

    # The interface to the solver.

    def _cells(self) -> np.ndarray:
        return cells_of(self.data_["N"], self.data_["D"])

    def _designs(self) -> list[Array]:
        columns = inputs_of(self.data_["N"], self.data_["D"])
        return [log_design([columns[name] for name in inputs], len(self.weight_)) for inputs in self.laws.values()]

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        cells = len(np.unique(self._cells()))
        for (target, names), design in zip(self.laws.items(), self._designs(), strict=True):
            if collinear(design):
                raise InputError(
                    f"the {cells} cells do not vary {' and '.join(names)} separately, so the exponents of {target} "
                    "cannot be told apart; add cells, or use fewer inputs."
                )
        needed = self.problem_.free + cells
        if len(observed) <= needed:
            raise InputError(
                f"{len(observed)} runs lie within {self.window:.2%} of the best of their cell, too few to fit {needed} "
                "constants; add settings near the best, or choose a wider window or order 2."
            )
        form = self.problem_.form
        assert isinstance(form, SurfaceForm)
        moments = form.centred(np.stack(monomials(form.centred(form.settings), self.powers)))
        size = np.linalg.norm(moments, axis=1, keepdims=True)
        # 1e-6: beyond it, rounding decides the coefficients.
        if not size.all() or np.linalg.svd(moments / size, compute_uv=False)[-1] < 1e-6:
            raise InputError(
                f"{' and '.join(self.laws)} take too few different values near the best of each cell for terms of "
                f"order {self.order}; add settings, or set the one that does not vary to None."
            )

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        """Return the least-squares problem.

        Its coordinates are, for the law of each setting, log k at the mean log inputs and the exponents, and then the
        coefficients of the polynomial q.
        """
        cell, weight = self._cells(), self.weight_
        share = weight / np.bincount(cell, weight)[cell]
        designs, middles = [], []
        for raw in self._designs():
            design, middle = centred_design(raw)
            designs.append(design)
            middles.append(middle)
        form = SurfaceForm(np.log(np.stack(inputs[2:])), designs, cell, share, self.powers)
        target = form.centred(np.log(observed))
        first = _starts(form, target, observed, cell, weight, self.window)

        def constants(theta: Array) -> Columns:
            result: Columns = {}
            for names, part, middle in zip(self.law_names.values(), form.parts, middles, strict=True):
                result |= law_constants(names, theta[:, part], middle)
            return result | dict(zip(self.shape_names, theta.T[form.shape].copy(), strict=True))

        return Problem(
            form=form,
            target=target,
            bounds=dict.fromkeys(self.names, (-np.inf, np.inf)),
            axes=np.log(np.stack(inputs[:2])),
            # The problem is nearly linear: one start, in addition to the full fit, is enough for a resample.
            starts=lambda weights, keep: first[None] if keep is None else first[None, :1],
            constants=constants,
        )


def _starts(form: SurfaceForm, target: Array, observed: Array, cell: np.ndarray, weight: Array, window: float) -> Array:
    """Return starts (3, k): laws fitted to the runs within 25, 50 and 100 % of `window`, then q fitted to all runs."""
    excess = observed / _lowest(cell, observed)[cell] - 1.0
    starts = []
    for within in (NEAREST * window, 0.5 * window, window):
        near = weight * (excess <= within)
        root = np.sqrt(near / np.bincount(cell, near)[cell])  # each cell counts once
        laws = [
            np.linalg.lstsq(root[:, None] * x, root * z, rcond=None)[0]
            for z, x in zip(form.settings, form.designs, strict=True)
        ]
        moments = form.centred(np.stack(monomials(form.distances(np.concatenate(laws)), form.powers)))
        root = np.sqrt(weight)
        starts.append(np.concatenate([*laws, np.linalg.lstsq((moments * root).T, target * root, rcond=None)[0]]))
    return np.array(starts)


def cells_of(N: Array, D: Array) -> np.ndarray:
    """Return the index of each run's cell (equal N and D), (n,)."""
    return np.unique(np.stack([N, D]), axis=1, return_inverse=True)[1].ravel()


def near_best(N: Array, D: Array, loss: Array, weight: Array, within: float) -> np.ndarray:
    """Return a mask (n,): weight above zero, and loss at most a fraction `within` above the cell's lowest."""
    cell = cells_of(N, D)
    lowest = _lowest(cell, np.where(weight > 0, loss, np.inf))
    return (weight > 0) & (loss <= lowest[cell] * (1.0 + within))


def _lowest(cell: np.ndarray, loss: Array) -> Array:
    lowest = np.full(cell.max() + 1, np.inf)
    np.minimum.at(lowest, cell, loss)
    return lowest
