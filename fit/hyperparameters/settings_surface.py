"""The best learning rate and batch of every (N, D), and the cost of missing them, from all runs of a sweep at once.

    log loss = best of the cell + q(log lr - log lr*(N, D), log batch - log batch*(N, D)),   lr* = k N^p_N D^p_D, ...

Special here:
- One fit for the laws of both optima and for the shape q of the loss around them, instead of a law through the optima
  of cells that were found first. The shape is shared, so a cell with a handful of runs near its optimum still counts.
- q has cubic terms: the loss rises faster above the best learning rate than below it. A parabola puts the optimum too
  low, the more so the wider it looks.
- Only runs within `window` of the best of their cell are used. Further out the cubic is wrong, and diverged runs say
  nothing about the optimum. The cost is told inside of it only.
- Choosing runs by their loss favours lucky ones. That moves no optimum to speak of, but where the noise is not small
  against the window it makes the valley look flatter than it is; `warnings` says when.
- The best loss of each cell is free, so no law of L(N, D) is assumed.

The laws: Li et al. 2025 (arXiv:2503.04715); the quadratic around an optimum in both logarithms: Porian et al. 2024
(arXiv:2406.19146).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..checks.doctor import Warning
from ..errors import Array, InputError, positive, same_length
from ..errors import weights as check_weights
from ..laws.law import Problem
from ..solver.surface import Powers, SurfaceForm, exponents
from ..uncertainty import percentile_interval
from .best_settings import TARGETS, BestSettings, best_of, convex, excess_terms, inputs_of
from .cells import cells_of, near_best
from .hyperparameters import DesignedLaw, collinear, log_design

NOISY = 0.15  # of the window: noise from which choosing runs by their loss flattens q by more than 15 %
NEAREST = 0.25  # of the window: how near the best of its cell a run counts as a best setting, for the first start


class HyperparameterSurface(DesignedLaw):
    """The joint law of a sweep over learning rate and batch (in tokens) at several (N, D).

    `learning_rate` and `batch` name the inputs of each law, of N, D and C = 6ND; () is a constant, and None says that
    the sweep did not vary it. `order` of q is 2 or 3, `window` the relative excess loss up to which a run is used.
    After `fit`: constants_, named as in learning_rate_k, learning_rate_p_N, batch_p_D, and shape_21 for the coefficient
    of u^2 v; rows_, the positions of the runs in use; and what `Law` lists. `predict` is loss over the best loss.
    """

    form = "hyperparameter-surface"
    title = "the hyperparameter surface"

    def __init__(
        self,
        learning_rate: Sequence[str] | None = ("N", "D"),
        batch: Sequence[str] | None = ("N", "D"),
        order: int = 3,
        window: float = 0.01,
    ) -> None:
        super().__init__("squares")
        given = {"learning_rate": learning_rate, "batch": batch}
        self.laws = {target: tuple(inputs) for target, inputs in given.items() if inputs is not None}
        for target, inputs in self.laws.items():
            if len(set(inputs)) < len(inputs) or not set(inputs) <= set(inputs_of(1.0, 1.0)):
                raise InputError(f"{target} is {inputs}; its law takes different ones of N, D, C.")
        if not self.laws:
            raise InputError("learning_rate and batch are both None; a sweep varies at least one of them.")
        if order not in (2, 3):
            raise InputError(f"order is {order}; 2 (a parabola) or 3 (with cubic terms) is accepted.")
        if not 0 < window < 1:
            raise InputError(f"window is {window}; a relative excess loss such as 0.01 is expected.")
        self.order, self.window = order, float(window)
        self.inputs = ("N", "D", *self.laws)
        self.powers = exponents(len(self.laws), order)
        self.shape_names = tuple("shape_" + "".join(map(str, powers)) for powers in self.powers)
        self.law_names = {t: (f"{t}_k", *(f"{t}_p_{name}" for name in inputs)) for t, inputs in self.laws.items()}
        laws = tuple(name for names in self.law_names.values() for name in names)
        self.names = (*laws, *self.shape_names)

    def options(self) -> dict[str, Any]:
        laws = {target: list(self.laws[target]) if target in self.laws else None for target in TARGETS}
        return laws | {"order": self.order, "window": self.window}

    def fit(
        self,
        N: ArrayLike,
        D: ArrayLike,
        learning_rate: ArrayLike | None,
        batch: ArrayLike | None,
        loss: ArrayLike,
        weight: ArrayLike | None = None,
    ) -> Self:
        """Every run of the sweep: N, D, learning_rate, batch (tokens), loss (n,); a setting not varied may be None.

        Raises InputError where too few runs lie within the window, where N and D do not vary as the laws need, where a
        setting does not vary within cells, and where the loss has no minimum there. Returns self.
        """
        settings = {"learning_rate": learning_rate, "batch": batch}
        columns = {"N": positive("N", N), "D": positive("D", D)}
        for target in self.laws:
            given = settings[target]
            if given is None:
                raise InputError(f"{target} is not given; give it, or set {target}=None in the constructor.")
            columns[target] = positive(target, given)
        columns["loss"] = positive("loss", loss)
        weights = check_weights(weight, len(columns["loss"]))
        same_length(**columns, weight=weights)
        self.rows_ = np.flatnonzero(near_best(columns["N"], columns["D"], columns["loss"], weights, self.window))
        self._fit(tuple(column[self.rows_] for column in columns.values()), weights[self.rows_], None)
        if not convex(self.constants_):
            raise InputError(
                f"the loss within {self.window:.2%} of the best of each cell has no minimum in "
                f"{' and '.join(self.laws)}; more settings around the best, or another window, may show one."
            )
        return self

    def optimal(self, N: ArrayLike, D: ArrayLike, batch: ArrayLike | None = None, level: float = 0.95) -> BestSettings:
        """The best settings at N, D; with a `batch` given (tokens), the best learning rate for that batch.

        A batch that costs more than the window gets NaN.
        """
        self._fitted()
        if batch is not None and len(self.laws) < 2:
            raise InputError("batch is given and the sweep did not vary learning rate and batch both.")
        n, d = np.broadcast_arrays(np.asarray(N, dtype=np.float64), np.asarray(D, dtype=np.float64))
        held = None if batch is None else np.asarray(batch, dtype=np.float64)
        found = best_of(self.constants_, n, d, held)
        known = np.ones(()) if held is None else np.isfinite(self.penalty(n, d, *found.values()))
        intervals = {}
        if self.draws_ is not None:
            wide = None if held is None else held[..., None]
            for name, draws in best_of(self.draws_, n[..., None], d[..., None], wide).items():
                rows = draws.reshape(-1, draws.shape[-1])
                pairs = np.array([percentile_interval(row, level) for row in rows]).reshape(*draws.shape[:-1], 2)
                intervals[f"{name}_interval"] = np.where(np.asarray(known)[..., None], pairs, np.nan)
        settings = {name: _plain(np.where(known, value, np.nan)) for name, value in found.items()}
        return BestSettings(_plain(n), _plain(d), **settings, **intervals, level=level)

    def penalty(self, *settings: ArrayLike, **named: ArrayLike) -> Any:
        """Relative excess loss, as in 0.0025, of N, D, learning_rate, batch over the best settings at that N and D.

        NaN beyond the window, where the fit saw nothing. For an interval see `predict_draws`, which is one more.
        """
        self._fitted()
        square, cube = excess_terms(self.constants_, *self._inputs(settings, named))
        excess = np.expm1(square + cube)
        # Along a ray from the optimum, square t^2 + cube t^3 turns down again at t = 1 where 2 square + 3 cube < 0.
        known = (2 * square + 3 * cube >= 0) & (excess <= self.window)
        return _plain(np.where(known, excess, np.nan))

    def standard_errors(self) -> dict[str, float]:
        """Standard error of each constant (of the logarithm of each k) if the runs erred independently of each other.

        Where the optima of cells scatter about the law they are too small, and `bootstrap` knows better.
        """
        self._fitted()
        p, ones = self.problem_, np.ones((1, len(self.weight_)))
        slope = -(self.weight_ * self.residuals())[None, :]
        cache = p.form.value(self.theta_[None, :])[1]
        _, hessian = p.form.derivatives(cache, slope, self.weight_ * ones, second=True)
        variance = self.noise_**2 * self.weight_.mean() * np.diag(np.linalg.inv(hessian[0]))
        return dict(zip(self.names, np.sqrt(variance).tolist(), strict=True))

    def warnings(self) -> tuple[Warning, ...]:
        """What to know before trusting the law."""
        self._fitted()
        cell = self._cells()
        found, outside = [], 0
        for rows in (cell == label for label in np.unique(cell)):
            run = {name: values[rows] for name, values in self.data_.items()}
            best = best_of(self.constants_, run["N"][:1], run["D"][:1])
            outside += any(not run[name].min() <= value[0] <= run[name].max() for name, value in best.items())
        if outside:
            message = (
                f"In {outside} of {cell.max() + 1} cells the law's best settings lie outside of those tried within "
                f"{self.window:.2%} of the best loss; widen the sweep there."
            )
            found.append(Warning("optimum_at_edge", message))
        if self.noise_ > NOISY * self.window:
            message = (
                f"Runs scatter by {self.noise_:.2%} about the surface, much for a window of {self.window:.2%}: the "
                "cost of other settings is underrated; choose a wider window."
            )
            found.append(Warning("noisy_window", message))
        return tuple(found)

    @property
    def noise_(self) -> float:
        """Relative scatter of the runs about the surface, one standard deviation."""
        self._fitted()
        freedom = len(self.weight_) - self.problem_.free - len(np.unique(self._cells()))
        return float(np.sqrt((self.weight_ * self.residuals() ** 2).sum() / self.weight_.mean() / freedom))

    @staticmethod
    def evaluate(constants: Mapping[str, Any], *inputs: Any) -> Any:
        """Loss over the best loss at inputs (N, D, then each setting that was varied)."""
        square, cube = excess_terms(constants, *inputs)
        with np.errstate(over="ignore"):
            return np.exp(square + cube)

    def equation(self, say: Callable[[str], str]) -> str:
        laws = []
        for target, (k, *powers) in self.law_names.items():
            product = [f"{name}^{say(p)}" for name, p in zip(self.laws[target], powers, strict=True)]
            laws.append(f"{target} = {' '.join([say(k), *product])}")
        return ", ".join(laws)

    # The law as the solver sees it.

    def _cells(self) -> np.ndarray:
        return cells_of(self.data_["N"], self.data_["D"])

    def _designs(self) -> list[Array]:
        known = inputs_of(self.data_["N"], self.data_["D"])
        return [log_design([known[name] for name in inputs], len(self.weight_)) for inputs in self.laws.values()]

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        cells = len(np.unique(self._cells()))
        for (target, names), design in zip(self.laws.items(), self._designs(), strict=True):
            if collinear(design):
                raise InputError(
                    f"the {cells} cells do not vary {' and '.join(names)} separately, so the law of {target} is not "
                    "identifiable; add cells, or fewer inputs."
                )
        needed = self.problem_.free + cells
        if len(observed) <= needed:
            raise InputError(
                f"{len(observed)} runs lie within {self.window:.2%} of the best of their cell, and {needed} constants "
                "are to be fitted; add settings near the best, or choose a wider window or order 2."
            )
        form = self.problem_.form
        assert isinstance(form, SurfaceForm)
        moments = form.centred(Powers(list(form.centred(form.settings)), self.powers).each())
        size = np.linalg.norm(moments, axis=1, keepdims=True)
        if not size.all() or np.linalg.svd(moments / size, compute_uv=False)[-1] < 1e-6:
            raise InputError(
                f"{' and '.join(self.laws)} do not take enough different values within cells, near the best, for terms "
                f"of order {self.order}; add settings, or set the one that does not vary to None."
            )

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        """Coordinates: of each law log k (at the mean log inputs) and its exponents, then the coefficients of q."""
        cell, weight = self._cells(), self.weight_
        share = weight / np.bincount(cell, weight)[cell]
        designs, middles = [], []
        for design in self._designs():
            middle = design[:, 1:].mean(axis=0) if centred else np.zeros(design.shape[1] - 1)
            designs.append(np.concatenate([design[:, :1], design[:, 1:] - middle], axis=1))
            middles.append(middle)
        form = SurfaceForm(np.log(np.stack(inputs[2:])), designs, cell, share, self.powers)
        target = form.centred(np.log(observed))
        first = _starts(form, target, observed, cell, weight, self.window)

        def constants(theta: Array) -> dict[str, Array]:
            found = {}
            for names, part, middle in zip(self.law_names.values(), form.parts, middles, strict=True):
                W = theta[:, part]
                with np.errstate(over="ignore"):
                    found[names[0]] = np.exp(W[:, 0] - W[:, 1:] @ middle)
                found |= dict(zip(names[1:], W.T[1:].copy(), strict=True))
            return found | dict(zip(self.shape_names, theta.T[form.shape].copy(), strict=True))

        unbounded = np.full(form.parameters, np.inf)
        return Problem(
            form=form,
            target=target,
            lower=-unbounded,
            upper=unbounded,
            coordinates=self.names,
            logarithmic=tuple(name.endswith("_k") for name in self.names),
            axes=np.log(np.stack(inputs[:2])),
            # The problem is nearly linear: beside the full fit, one more start is enough for a resample.
            starts=lambda weights, keep: first[None] if keep is None else first[None, :1],
            constants=constants,
        )


def _starts(form: SurfaceForm, target: Array, observed: Array, cell: np.ndarray, weight: Array, window: float) -> Array:
    """Starts (G, k): a law through the mean of the best settings of each cell, by three ideas of best; q is linear."""
    lowest = np.full(cell.max() + 1, np.inf)
    np.minimum.at(lowest, cell, observed)
    excess = observed / lowest[cell] - 1.0
    starts = []
    for within in (NEAREST * window, 0.5 * window, window):
        near = weight * (excess <= within)
        root = np.sqrt(near / np.bincount(cell, near)[cell])  # each cell counts once
        laws = [
            np.linalg.lstsq(root[:, None] * x.T, root * z, rcond=None)[0]
            for z, x in zip(form.settings, form.designs, strict=True)
        ]
        distances = form.distances(np.concatenate([*laws, np.zeros(len(form.powers))])[None, :])
        moments = form.centred(Powers([d[0] for d in distances], form.powers).each())
        root = np.sqrt(weight)
        starts.append(np.concatenate([*laws, np.linalg.lstsq((moments * root).T, target * root, rcond=None)[0]]))
    return np.array(starts)


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array
