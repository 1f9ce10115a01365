"""Base classes of all laws: fitting, resampling, intervals, prediction and JSON.

A subclass defines `_problem`, `evaluate` and `equation`.

Objectives, sums over residuals r_i = log observed_i - log predicted_i:
  huber    sum w_i huber_delta(r_i), Hoffmann et al. 2022 (arXiv:2203.15556), equation 3
  l1       huber with delta = 1e-6, which is L1 to within 1e-6 in log loss
  squares  sum w_i r_i^2 / 2
  se       sum w_i r_i^2 / (2 (s_i^2 + tau^2)), s_i the relative standard error and tau the extra scatter that makes
           the weighted squares equal the degrees of freedom (Paule and Mandel 1982)
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import Optimum, compute_optimal, search
from ..errors import (
    Array,
    Column,
    Columns,
    Constants,
    InputError,
    Say,
    check_weights,
    enough,
    floats,
    identifiable,
    is_uneven,
    need_uneven,
    one_of,
    positive,
    same_length,
    unboxed,
)
from ..files import write_text
from ..flops import CONVENTIONS, FlopsPerToken, flops_per_token
from ..plots import plot_contours
from ..solver.forms import LogForm
from ..solver.solver import AGREE, Solution, best_of, joined, solve, variable_projection
from ..table import RunTable, as_table, by_name
from ..uncertainty import (
    RUNS_PER_CONSTANT,
    by_group,
    excess_scatter,
    group_labels,
    identifiable_counts,
    independent_groups,
    jackknife_weights,
    kernel_width,
    need_no_group_alone,
    numbered,
    percentile_interval,
    percentile_intervals,
    wild_targets,
)
from .persistence import law_to_dict, read_law
from .summary import Summary, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OBJECTIVES = ("huber", "l1", "squares", "se")
L1_DELTA = 1e-6
PINV = 1e-3  # smaller singular values, relative to the largest, are ignored in a linear step; chosen by hand
LARGE = 2000  # from this many rows, resamples move the optimum so little that their refits start only there
PROBED = 100  # see `Law._refit`; if 3 % of the resamples have several optima, this notices in 95 % of tables
RESAMPLES_AT_ONCE = 50  # starts of this many resamples are projected at once, to bound memory


@dataclass
class Problem:
    """A law with k coordinates over a table of n rows, as the solver needs it to fit P resamples at once.

    target (n,): log of the observed values; bounds: constant -> (lower, upper) of its coordinate, equal if fixed; axes
    (m, n): log inputs that must vary in every resample; starts(weights (P, n), keep): the best `keep` starts (P, keep,
    k), or all if None; constants(theta (P, k)): name -> (P,).
    """

    form: LogForm
    target: Array
    bounds: Mapping[str, tuple[float, float]]
    axes: Array
    starts: Callable[[Array, int | None], Array]
    constants: Callable[[Array], Columns]

    def __post_init__(self) -> None:
        self.coordinates = tuple(self.bounds)
        self.lower, self.upper = floats([*self.bounds.values()]).reshape(-1, 2).T
        self.free = int((self.lower < self.upper).sum())


def amplitude(log: Array, floor: float, shift: Array | float = 0.0) -> Array:
    """Return exp(log + shift), exactly zero where `log` is at its lower bound `floor`."""
    with np.errstate(over="ignore"):
        return np.where(log <= floor, 0.0, np.exp(log + shift))


def centred(column: Array) -> tuple[Array, float]:
    """Return the logs of a column (n,) minus their mean, and the mean."""
    log = np.log(column)
    return log - log.mean(), float(log.mean())


def least_starts(starts: Array, error: Array, keep: int | None) -> Array:
    """Return the `keep` starts of lowest error for each of P problems, best first; all, unsorted, if `keep` is None.

    starts (P, G, k), error (P, G): G starts with k coordinates for each problem.
    """
    return starts if keep is None else np.take_along_axis(starts, np.argsort(error, axis=1)[:, :keep, None], axis=1)


def projected_starts(
    at: Mapping[str, int],
    coordinates: Callable[[Array], Mapping[str, Any]],
    basis: Array,
    weights: Array,
    keep: int | None,
    target: Array | None = None,
    scale: Array | float = 1.0,
    floor: Array | float = 0.0,
) -> Array:
    """Return the `keep` best of G starts for each of P problems, (P, keep, k), with m amplitudes by least squares.

    The other coordinates come from a grid of G points. at: index of each coordinate. coordinates: maps log amplitudes
    (P, G, m) to all k coordinates by name, which broadcast to (P, G). basis (G, n, m): what multiplies each amplitude
    in each row. weights (P, n). keep: None for all. target (n,): what the products should add up to; default 1. scale
    (G,): converts squared residuals to squared log residuals. floor (G, 1): replaces smaller amplitudes. An amplitude
    of zero or less multiplies the error by four.
    """
    target = np.ones(basis.shape[1]) if target is None else target
    chunks = []
    for chunk_weights in np.array_split(weights, max(1, len(weights) // RESAMPLES_AT_ONCE)):
        amplitudes, error = variable_projection(basis, target, chunk_weights)
        error = np.where((amplitudes > 0).all(axis=2), error, 4.0 * error) * scale
        starts = np.empty((*error.shape, max(at.values()) + 1))
        for name, values in coordinates(np.log(np.maximum(amplitudes, floor))).items():
            starts[..., at[name]] = values
        chunks.append(least_starts(starts, error, keep))
    return np.concatenate(chunks)


class Estimator:
    """A base class with parameters as in scikit-learn: each constructor argument is an attribute."""

    inputs: tuple[str, ...]
    output: str
    constants_: dict[str, float]
    draws_: Columns | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments; `deep` has no effect."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments and discard the fit."""
        current = self.get_params()
        for name in params:
            if name not in current:
                raise InputError(f"{name!r} is not a parameter of {type(self).__name__}; it has {', '.join(current)}.")
        fresh = vars(type(self)(**current | params))  # a parameter that is refused leaves the law as it was
        vars(self).clear()
        vars(self).update(fresh)
        return self

    def clone(self) -> Self:
        return type(self)(**self.get_params())

    # What scikit-learn asks of an estimator; it is imported only by `__sklearn_tags__`, which it calls itself.
    __sklearn_clone__ = clone

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "constants_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        output, inputs = TargetTags(required=True, positive_only=True), InputTags(positive_only=True)
        return Tags("regressor", output, regressor_tags=RegressorTags(), input_tags=inputs)

    def _arguments(
        self, columns: tuple[Any, ...], named: Mapping[str, Any], options: dict[str, Any]
    ) -> tuple[Columns, list[Any]]:
        """Return the columns that `fit` was given, and the values of its `options`, also from a table."""
        if len(columns) == 1 and not named and {"N", "D", "loss"} <= {*self.inputs, self.output}:
            columns = (as_table(columns[0]),)
        if columns and isinstance(columns[0], RunTable):
            options = columns[0].options | {name: value for name, value in options.items() if value is not None}
        data = by_name("fit", self.inputs, columns, named, (self.output,))
        return {name: positive(name, column) for name, column in data.items()}, [*options.values()]

    def _fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            columns = ", ".join((*self.inputs, self.output))
            raise InputError(f"this {type(self).__name__} is not fitted; call fit({columns}) first.")

    def _bootstrapped(self) -> Columns:
        self._fitted()
        if self.draws_ is None:
            raise InputError(
                f"this {type(self).__name__} has no intervals yet; call bootstrap(n, groups=run_id) first."
            )
        return self.draws_


class Law(Estimator):
    """A law in log space with the interface of scikit-learn.

    After `fit`: constants_ (name -> float, each also an attribute such as `alpha_`), objective_, starts_ ({"tried",
    "agreeing"}), converged_, degenerate_ (constants stuck at a bound), scatter_ (tau of objective "se", else 0). After
    `bootstrap`: draws_ (name -> (resamples,)) and bootstrap_ (counts and options).
    """

    form: ClassVar[str] = ""
    title: str
    names: tuple[str, ...]
    formula: str  # the law as text, with the constants' names in braces
    resample_starts: int = 2  # starts of a resample in addition to the optimum of all runs
    probed: bool = False  # whether the fit may be the only start of a resample, see `_refit`
    # Whether a fit also refines every start directly under its own delta: "no", "always", or "deeper", which counts
    # these starts only if one of them ended lower.
    direct: str = "no"
    bootstrap_: dict[str, Any]
    resampling: ClassVar[str] = "auto"  # the default method of `bootstrap`
    irreducible: ClassVar[str] = ""  # the additive constant, if there is one
    vanishing: ClassVar[Mapping[str, str]] = {}  # constant -> the term that vanishes when it is zero

    flops_per_token_: FlopsPerToken | None = None  # as the fitted table counts them; None: 6N
    _groups: np.ndarray | None = None  # of the fit's rows, which `bootstrap` keeps together by default

    def __init__(self, objective: str = "huber", delta: float = 1e-3) -> None:
        one_of("objective", objective, OBJECTIVES)
        if not delta > 0:
            raise InputError(f"delta is {delta}; it must be above zero (1e-3 is usual, infinity gives least squares).")
        self.objective, self.delta = objective, float(delta)

    # Overridden by subclasses.

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        """Return the `Problem` of fitting the law to `inputs` and `observed`, columns (n,)."""
        raise NotImplementedError

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        """Return the law's value; constants and inputs broadcast together."""
        raise NotImplementedError

    def equation(self, say: Say) -> str:
        """Return the law as text, with each constant written as `say(name)`."""
        return self.formula.format(**{name: say(name) for name in self.names})

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON types."""
        return self.get_params()

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        enough(np.unique(np.stack(inputs), axis=1).shape[1], self.problem_.free, self.title)
        # Settings such as a learning rate are tried at few values, however many constants there are.
        need_uneven(self.output, observed, self.problem_.free if self.output == "loss" else 2)

    # Fitting.

    @np.errstate(all="ignore")  # a start that overflows has an infinite objective and loses
    def fit(
        self, *columns: Any, weight: Column = None, loss_se: Column = None, flops: Column = None, groups: Any = None,
        **named: Any,
    ) -> Self:  # fmt: skip
        """Fit to n rows: columns of `inputs`, then of `output`, each (n,) and above zero, by position or name.

        `fit(runs)` takes all columns from a RunTable or DataFrame; in `fit(X, y)`, the inputs are the columns of X.

        Options (n,): weight of each row in the objective; loss_se, standard errors of the output for "se"; flops, from
        which `optimal` of a law of N and D learns FLOPs per token (default: 6N); groups, run or trunk ids for
        `bootstrap`.
        """
        columns, width = tuple(column for column in columns if column is not None), len(self.inputs) + 1
        if width < len(columns) <= width + 2:  # options by position
            weight, loss_se = (*columns[width:], loss_se)[:2]
            columns = columns[:width]
        options = {"weight": weight, "loss_se": loss_se, "flops": flops, "groups": groups}
        self.data_, (weight, loss_se, flops, groups) = self._arguments(columns, named, options)
        *inputs, observed = self.data_.values()
        self.weight_ = check_weights(weight, len(observed))
        same_length(**self.data_, weight=self.weight_)
        self.se_ = None if loss_se is None else positive(f"{self.output}_se", loss_se)
        self._groups = None if groups is None else group_labels(groups, len(observed))
        if self.inputs == ("N", "D"):
            self.flops_per_token_ = None if flops is None else flops_per_token(inputs[0], inputs[1], flops)
        if self.objective == "se":
            if self.se_ is None:
                raise InputError(f"{self.output}_se is missing; objective 'se' needs the standard error of every row.")
            same_length(**{self.output: observed, f"{self.output}_se": self.se_})
        used = self.weight_ > 0
        self._prepare(0.0)
        self._check(tuple(column[used] for column in inputs), observed[used])
        self._accept(self._solve_scatter() if self.objective == "se" else self._solve_full())
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "problem_"}  # it holds local functions

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "theta_" in state:
            *inputs, observed = self.data_.values()
            self.problem_ = self._problem(tuple(inputs), observed)

    def _prepare(self, scatter: float) -> None:
        *inputs, observed = self.data_.values()
        self.problem_ = self._problem(tuple(inputs), observed)
        self.scatter_ = scatter
        self._precision = np.ones_like(self.weight_)
        if self.objective == "se" and self.se_ is not None:
            self._precision = 1.0 / ((self.se_ / self.data_[self.output]) ** 2 + scatter**2)

    def _solve_full(self) -> Solution:
        """Fit from all starts, lowering Huber's delta in stages; unless `direct` is "no", also without stages."""
        problem, weights = self.problem_, (self.weight_ * self._precision)[None, :]
        starts = problem.starts(weights, None)
        smooth = self._solve(weights, starts)
        if self.direct == "no" or np.isinf(self._delta):
            return smooth
        starts = starts.swapaxes(0, 1)  # each start as a separate problem
        weights = np.broadcast_to(weights, (len(starts), problem.form.points))
        direct = self._solve(weights, starts, staged=False)
        combined = best_of(joined([smooth, direct]), np.zeros(1 + len(starts), dtype=int))
        deeper = combined.objective[0] < smooth.objective[0] * (1.0 - AGREE)
        return combined if deeper or self.direct == "always" or not smooth.converged[0] else smooth

    def _solve_scatter(self) -> Solution:
        """Fit the law and estimate the scatter tau by turns, until tau settles."""
        variance = 1.0 / self._precision
        freedom = int((self.weight_ > 0).sum()) - self.problem_.free
        for _ in range(30):
            self._precision = 1.0 / (variance + self.scatter_**2)
            solution = self._solve_full()
            residual = self.problem_.target - self.problem_.form.value(solution.theta)[0][0]
            scatter = excess_scatter(self.weight_ * residual**2, variance, freedom)
            settled = abs(scatter - self.scatter_) <= 1e-6 * np.sqrt(variance.mean() + scatter**2)
            self.scatter_ = scatter
            if settled:
                break
        return solution

    @property
    def _delta(self) -> float:
        return {"huber": self.delta, "l1": L1_DELTA}.get(self.objective, np.inf)

    def _solve(self, weights: Array, starts: Array, target: Array | None = None, **options: Any) -> Solution:
        p = self.problem_
        target = p.target if target is None else target
        return solve(p.form, target, weights, starts, p.lower, p.upper, self._delta, **options)

    def _accept(self, solution: Solution) -> None:
        self.theta_ = solution.theta[0]
        self.starts_ = {"tried": int(solution.tried[0]), "agreeing": int(solution.agreeing[0])}
        self.objective_ = float(solution.objective[0])
        self.converged_ = bool(solution.converged[0])
        held = solution.at_bound[0]
        self.degenerate_ = [name for name, stuck in zip(self.problem_.coordinates, held, strict=True) if stuck]
        self._set_constants()

    def _mark_degenerate(self, *names: str) -> None:
        self.degenerate_ += [name for name in dict.fromkeys(names) if name not in self.degenerate_]

    def _set_constants(self) -> None:
        constants = self.problem_.constants(self.theta_[None, :])
        self.constants_ = {name: float(constants[name][0]) for name in self.names}
        for name, value in self.constants_.items():
            setattr(self, name + "_", value)
        self.draws_ = None

    def resume(self, theta: Array, scatter: float) -> None:
        """Restore a fit from its coordinates `theta` (k,) and scatter tau; data and weights must be set already."""
        self._prepare(scatter)
        self.theta_ = theta
        self._set_constants()

    def refit(self, weights: ArrayLike, target: Array | None = None) -> Columns:
        """Refit once per row of `weights` (P, n); return constants, name -> (P,), NaN where a refit did not converge.

        `weights` multiply the fit's weights; `target` (P, n) replaces the log of the observed values.
        """
        solution = self._refit(np.atleast_2d(floats(weights)), target)
        return {k: np.where(solution.converged, v, np.nan) for k, v in self.problem_.constants(solution.theta).items()}

    @np.errstate(all="ignore")
    def _refit(self, weights: Array, target: Array | None = None, keep: int | None = None) -> Solution:
        """Refit once per row of `weights` (P, n), from the fit and `keep` other points (None: `resample_starts`).

        A law that is `probed` tries PROBED refits from the fit in two ways. If their optima agree, the fit is the only
        start of all refits.
        """
        self._fitted()
        weights = weights * self.weight_ * self._precision
        rows, fit, alone = np.arange(len(weights)), self.theta_, np.empty((1, 0, len(self.theta_)))

        def solve_rows(rows: np.ndarray, starts: Array | None = None, warm: Array | None = fit) -> Solution:
            if starts is None:  # other targets are close to the data, so one set of starts serves all
                projected = weights[rows if target is None else rows[:1]]
                starts = self.problem_.starts(projected, keep or self.resample_starts)
            return self._solve(weights[rows], starts, None if target is None else target[rows], warm=warm)

        if len(self.weight_) >= LARGE or not self.probed:
            return solve_rows(rows, alone if len(self.weight_) >= LARGE else None)
        first, rest = np.split(rows, [PROBED])
        solution = solve_rows(first, fit[None, None])
        unsure = first[solution.agreeing < solution.tried]
        if rest.size and unsure.size:
            return solve_rows(rows)
        if rest.size:
            solution = joined([solution, solve_rows(rest, alone)])
            unsure = rows[solution.agreeing < solution.tried]
        if unsure.size:
            solution = best_of(joined([solution, solve_rows(unsure, warm=None)]), np.r_[rows, unsure])
        return solution

    # Resampling.

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0, method: str | None = None) -> Self:
        """Refit to `n` resamples. Raises InputError for too few groups, or if one group alone determines a constant.

        Parameters
        ----------
        groups
            Run or trunk ids (rows,), by default those of the fit; rows of one group are resampled together.
        method : {"auto", "pairs", "wild"}
            "pairs" draws groups with replacement. "wild" keeps all rows and adds to each prediction a random multiple
            of the residual under a fit without the row's group. "auto" is "wild" below 20 groups per constant.
        """
        self._fitted()
        method = self.resampling if method is None else method
        one_of("method", method, ("auto", "pairs", "wild"))
        groups = group_labels(self._groups if groups is None else groups, len(self.weight_))
        p, used, redrawn = self.problem_, self.weight_ > 0, 0
        independent, numbers = independent_groups(groups[used], p.free), numbered(groups, *self.data_.values())
        if method == "auto":
            method = "wild" if independent < RUNS_PER_CONSTANT * p.free else "pairs"
        if method == "pairs":
            inputs = np.stack([self.data_[name] for name in self.inputs])
            counts, redrawn = identifiable_counts(numbers, n, seed, inputs, self.weight_, p.axes, p.free)
            solution = self._refit(counts)
        else:
            free = (p.lower < self.theta_) & (self.theta_ < p.upper)
            need_no_group_alone(self._slopes(p, self.theta_)[np.ix_(used, free)], groups[used], self.title)
            errors = self.left_out_residuals(groups)
            width = 0.0 if np.isinf(self._delta) else kernel_width(errors[used], independent)
            target = wild_targets(self._values(), errors, numbers, n, seed, independent - p.free, width)
            solution = self._refit(np.ones(target.shape), target)
        self._drawn(solution, groups, method=method, seed=seed, redrawn=redrawn)
        return self

    def _drawn(self, solution: Solution, groups: np.ndarray, method: str, seed: int, redrawn: int = 0) -> None:
        converged = int(solution.converged.sum())
        counts = {"resamples": converged, "redrawn": redrawn, "unconverged": len(solution.converged) - converged}
        self.groups_, self.bootstrap_ = groups, counts | {"method": method, "seed": seed}
        self.draws_ = self.problem_.constants(solution.theta[solution.converged])

    def left_out_residuals(self, groups: np.ndarray) -> Array:
        """Return log(observed / predicted) of each row, (rows,), predicted by a fit without the row's group."""
        _, member = by_group(groups)
        predicted = self.problem_.form.value(self._refit(jackknife_weights(groups)).theta)[0]
        return self.problem_.target - predicted[member, np.arange(len(member))]

    def _slopes(self, problem: Problem, theta: Array) -> Array:
        """Return the Jacobian (rows, k) of log predictions at coordinates theta (k,), each row times sqrt(weight)."""
        k = len(theta)
        _, cache = problem.form.value(np.broadcast_to(theta, (k, k)))
        return problem.form.along(cache, np.eye(k)).T * np.sqrt(self.weight_ * self._precision)[:, None]

    def nearby(self, theta: Array, rows: np.ndarray, moves: Array) -> Columns:
        """Approximate r refits, each by a linear step from theta (k,), the fit to `rows`; return constants, (r,) each.

        `moves` (r, rows): changes of the log observed values, times sqrt(weight). Coordinates at a bound stay there.
        """
        p = self.problem_
        free = (p.lower < theta) & (theta < p.upper)
        stepped = np.tile(theta, (len(moves), 1))
        stepped[:, free] += moves @ np.linalg.pinv(self._slopes(p, theta)[np.ix_(rows, free)], rcond=PINV).T
        return p.constants(np.clip(stepped, p.lower, p.upper))

    # Intervals.

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Return the bootstrap interval (low, high) of constant `name`."""
        self._check_name(name)
        return self.interval_of(lambda constants: constants[name], level)

    def interval_of(self, quantity: Callable[[Constants], Any], level: float = 0.95) -> tuple[float, float]:
        """Return the bootstrap interval (low, high) of `quantity`, a function of constants, name -> (draws,)."""
        return percentile_interval(quantity(self._bootstrapped()), level)

    def predict_interval(
        self, *inputs: ArrayLike, level: float = 0.95, kind: str = "mean", **named: ArrayLike
    ) -> Array:
        """Return the bootstrap interval (low, high) at each point: (2,) for scalars, (points, 2) for arrays (points,).

        `kind` "mean": of the law's value; "run": of one new run, whose error is drawn from the fit's residuals.
        """
        points = self._inputs(inputs, named)
        if kind not in ("mean", "run"):
            raise InputError(f"kind is {kind!r}; choose mean (the law's value) or run (the value of one new run).")
        draws = self.predict_draws(*np.broadcast_arrays(*points))
        if kind == "run":
            generator = np.random.default_rng((self.bootstrap_["seed"] or 0) + 1)  # not the signs or counts of draws
            order = np.argsort(self.residuals())
            error = self._inflation(len(np.unique(self.groups_[self.weight_ > 0]))) * self.residuals()[order]
            share = self.weight_[order] / self.weight_.sum()
            draws = draws * np.exp(generator.choice(error, size=draws.shape, p=share))
        return percentile_intervals(draws, level)

    def _inflation(self, independent: int) -> float:
        """Return by what factor errors exceed residuals, sqrt(n / (n - free constants)), for n = `independent` runs."""
        return float(np.sqrt(independent / max(independent - self.problem_.free, 1)))

    @property
    def residual_scale_(self) -> float:
        """Return the standard deviation of the log residuals, with rows minus free constants as degrees of freedom."""
        self._fitted()
        inflated = self._inflation(int((self.weight_ > 0).sum())) * self.residuals()
        return float(np.sqrt(self.weight_ @ inflated**2 / self.weight_.sum()))

    # Predictions and text.

    def predict(self, *inputs: ArrayLike, **named: ArrayLike) -> Any:
        """Return the law's value at inputs given by position or name; a float if all of them are scalars."""
        self._fitted()
        return unboxed(self.evaluate(self.constants_, *self._inputs(inputs, named)))

    def predict_draws(self, *inputs: ArrayLike, **named: ArrayLike) -> Array:
        """Return the law's value under each bootstrap draw: (resamples,) for scalars, else (points, resamples)."""
        draws = self._bootstrapped()
        columns = [floats(v)[..., None] for v in self._inputs(inputs, named)]
        with np.errstate(over="ignore"):
            return np.asarray(self.evaluate(draws, *columns))

    def _values(self) -> Array:
        """Return the fit's log predictions for its own rows, (n,)."""
        return self.problem_.form.value(self.theta_[None, :])[0][0]

    def residuals(self) -> Array:
        """Return log(observed / predicted) of the fitted rows, (n,)."""
        self._fitted()
        return self.problem_.target - self._values()

    def score(self, *columns: Any, **named: ArrayLike) -> float:
        """Return R^2 of the log predictions; inputs and observed values are given as to `fit`."""
        *inputs, observed = map(floats, by_name("score", self.inputs, columns, named, (self.output,)).values())
        target = np.log(observed)
        error = target - np.log(self.predict(*inputs))
        return float(1.0 - (error**2).sum() / ((target - target.mean()) ** 2).sum())

    def say(self, name: str) -> str:
        """Return constant `name` as text: its value and, after `bootstrap`, its interval."""
        self._check_name(name)
        shown = f"{self.constants_[name]:.4g}"
        if self.draws_ is None or np.ptp(self.draws_[name]) == 0:
            return shown
        low, high = self.interval(name)
        return f"{shown} [{low:.4g}, {high:.4g}]"

    def __repr__(self) -> str:
        if hasattr(self, "theta_"):
            return f"{self.equation(self.say)}   ({self._state()})"
        parameters = inspect.signature(type(self)).parameters
        changed = {key: value for key, value in self.options().items() if value != parameters[key].default}
        arguments = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        return f"{type(self).__name__}({arguments})"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_() if hasattr(self, "theta_") else f"<code>{self!r}</code>"

    def summary(self, level: float = 0.95) -> Summary:
        """Return a table of the constants with bootstrap standard errors and intervals."""
        return summarize(self, level)

    def _state(self) -> str:
        """Return how the fit went, such as `240 points, 64 of 64 starts agree`."""
        agreement = "{agreeing} of {tried} starts agree".format(**self.starts_) if self.converged_ else "NOT converged"
        stuck = f", {', '.join(self.degenerate_)} at a bound" if self.degenerate_ else ""
        return f"{len(self.weight_)} points, {agreement}{stuck}"

    # JSON.

    def to_dict(self) -> dict[str, Any]:
        """Return options, constants, data with its hash, draws and provenance as JSON types."""
        self._fitted()
        return law_to_dict(self)

    def to_json(self, path: Any = None) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if given."""
        written = json.dumps(self.to_dict(), allow_nan=False) + "\n"
        if path is not None:
            write_text(Path(path), written)
        return written

    @classmethod
    def from_json(cls, source: Any) -> Self:
        """Read a fitted law from a file or the text of `to_json`. Raises InputError for a law of another form."""
        law: Self = read_law(source, cls)
        return law

    # Checks.

    def _inputs(self, inputs: tuple[ArrayLike, ...], named: Mapping[str, ArrayLike]) -> list[Array]:
        return [floats(value) for value in by_name("predict", self.inputs, inputs, named).values()]

    def _check_name(self, name: str) -> None:
        self._fitted()
        one_of("constant", name, self.names)


class LossLaw(Law):
    """A law L(N, D)."""

    title = "a law of N and D"
    inputs: tuple[str, ...] = ("N", "D")
    output = "loss"
    E: float | None = None  # None: E is fitted
    exponent_names: tuple[str, ...] = ()  # exponents of the falling terms
    power_optimum: ClassVar[bool] = False  # whether N*(C) is a power of C, so that `size_exponent` is exact

    def fit(  # type: ignore[override]
        self,
        N: Any,
        D: Column = None,
        loss: Column = None,
        weight: Column = None,
        loss_se: Column = None,
        flops: Column = None,
        groups: Any = None,
    ) -> Self:
        """Fit to parameters, tokens and losses (nats per token) of n runs, or to a table; options as in `Law.fit`.

        Raises InputError for bad numbers, too few different runs, or N and D that vary only together.
        """
        return super().fit(N, D, loss, weight=weight, loss_se=loss_se, flops=flops, groups=groups)

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        """Return the best N and D and their loss for `flops` = flops_per_token N D, by a search accurate to 1e-6."""
        return search(self, constants, floats(flops), lambda N: flops_per_token * N)

    def size_exponent(self, constants: Constants) -> Any:
        """Return the mean exponent a of the best N, which grows as (FLOPs)^a, from the cheapest to the largest run."""
        C = 6.0 * self.data_["N"] * self.data_["D"]
        low, high = float(C.min()), float(C.max())
        ends = self.optimum(np.array([[low], [high]]), {k: np.atleast_1d(v) for k, v in constants.items()})[0]
        return np.squeeze(np.log(ends[1] / ends[0]) / np.log(high / low))

    def optimal(self, flops: ArrayLike, level: float = 0.95, convention: str = "table") -> Optimum:
        """Return the N and D of lowest loss for `flops`, with intervals after `bootstrap`.

        `flops` are counted as in the fitted table, or as 6ND for convention "6nd".
        """
        self._fitted()
        one_of("convention", convention, CONVENTIONS)
        return compute_optimal(self, flops, 6.0 if convention == "6nd" else None, level)

    @property
    def exponents_(self) -> tuple[float, float]:
        """Return (a, b): for C = 6 N D FLOPs, the best N grows as C^a and the best D as C^b."""
        self._fitted()
        a = float(self.size_exponent(self.constants_))
        return a, 1.0 - a

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Return the bootstrap interval of constant `name`, or of the exponent `a` of `exponents_`."""
        if name != "a" or name in self.names:
            return super().interval(name, level)
        return self.interval_of(self.size_exponent, level)

    @property
    def unresolved_(self) -> list[str]:
        """Return the names of inputs that, varied over their range in the table, leave the fitted loss unchanged."""
        self._fitted()
        log = {name: np.log(self.data_[name]) for name in self.inputs}
        centre = {name: np.full(2, values.mean()) for name, values in log.items()}
        ends = {name: centre | {name: floats([values.min(), values.max()])} for name, values in log.items()}
        return [name for name, columns in ends.items() if not is_uneven(self.predict(*map(np.exp, columns.values())))]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot loss contours over (N, D), the runs and the efficient frontier."""
        return plot_contours(self, ax=ax)

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        super()._check(inputs, observed)
        identifiable(*inputs)
        if self.E is not None and observed.min() <= self.E:
            raise InputError(f"E is {self.E:g}; it must be below the lowest loss, {observed.min():.4g}.")


class OffsetLaw(LossLaw):
    """A law of N and D with an irreducible loss E, fitted unless set."""

    irreducible = "E"
    E_: float

    def __init__(self, objective: str = "huber", delta: float = 1e-3, E: float | None = None) -> None:
        super().__init__(objective, delta)
        if E is not None and not 0 <= E < np.inf:
            raise InputError(f"E is {E}; it must be zero or more and below the lowest loss, or None to fit it.")
        self.E = None if E is None else float(E)
        if E is not None:  # with E fixed, a large delta may hide the deepest valley
            self.direct = "deeper"


class LineLaw(Law):
    """A law y(x) through few points at chosen x; its bootstrap keeps every x."""

    inputs = ("x",)
    output = "y"
    resampling = "wild"

    def fit(  # type: ignore[override]
        self, x: Any, y: Column = None, weight: Column = None, loss_se: Column = None
    ) -> Self:
        """Fit to positive x and y (n,), or a table of both, optionally with weights and standard errors of y."""
        return super().fit(x, y, weight=weight, loss_se=loss_se)
