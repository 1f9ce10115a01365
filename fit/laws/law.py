"""What every law can do: fit, bootstrap, intervals, predictions, a representation, and JSON.

Special here:
- A law says only what is its own (`_problem`, `evaluate`, `equation`); the fit of many starts, the resampling and the
  bookkeeping are written once, here.
- A resample is a row of weights and a refit is a full fit: it starts at the law's own optimum and at the best points of
  its own variable projection, so that another valley is found where there is one.
- A resample that cannot identify the law (too few different runs, or an input that no longer varies) is drawn again,
  and one whose fit does not converge is left out; both are counted in `bootstrap_`.

Objectives, in log space, of residuals r_i = log observed_i - log predicted_i, always *summed*:
  huber    sum w_i huber_delta(r_i), Hoffmann et al. 2022 (arXiv:2203.15556), equation 3
  l1       the same with delta = 1e-6, which is L1 to within 1e-6 in log loss
  squares  sum w_i r_i^2 / 2
  se       sum w_i r_i^2 / (2 (s_i^2 + tau^2)), s_i the relative standard error of the observation and tau a scatter of
           the runs beyond it, found so that the sum is worth one per degree of freedom (Paule and Mandel 1982)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, enough, positive, same_length
from ..errors import weights as check_weights
from ..formatting import interval, text
from ..solver.forms import LogForm
from ..solver.solver import Solution, solve
from ..uncertainty import bca_interval, excess_scatter, percentile_interval
from .resampling import left_out, predict_interval, resample, residual_scale

OBJECTIVES = ("huber", "l1", "squares", "se")
L1_DELTA = 1e-6


@dataclass(frozen=True)
class Problem:
    """A law over one table of n rows, in the solver's k coordinates.

    target (n,) log of what was observed; lower, upper (k,), equal where a coordinate is fixed; coordinates (k,) names
    the constant behind each; logarithmic (k,) says whether a coordinate is the logarithm of its constant; axes (m, n)
    log inputs that must vary in every resample. `starts(weights (P, n), keep)` gives (P, G, k), the `keep` best or all;
    `constants(theta (P, k))` gives name -> (P,).
    """

    form: LogForm
    target: Array
    lower: Array
    upper: Array
    coordinates: tuple[str, ...]
    logarithmic: tuple[bool, ...]
    axes: Array
    starts: Callable[[Array, int | None], Array]
    constants: Callable[[Array], dict[str, Array]]

    @property
    def free(self) -> int:
        """How many coordinates are fitted."""
        return int((self.lower < self.upper).sum())


class Law:
    """A law in log space with scikit-learn manners: options in the constructor, `fit` returns self, results end in _.

    After `fit`: constants_ (name -> float, each also as an attribute, as in `alpha_`), objective_, starts_ ({"tried",
    "agreeing"}), converged_, degenerate_ (names of constants that the fit could not move off a bound), scatter_ (tau of
    objective "se", else 0). After `bootstrap`: draws_ (name -> (resamples,)) and bootstrap_ (counts and options).
    """

    form: ClassVar[str]
    title: str
    names: tuple[str, ...]
    inputs: tuple[str, ...] = ("N", "D")
    output: str = "loss"
    resample_starts: int = 2  # starts of a resample besides the optimum of all runs

    def __init__(self, objective: str = "huber", delta: float = 1e-3) -> None:
        if objective not in OBJECTIVES:
            raise InputError(f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}.")
        if not delta > 0:
            raise InputError(f"delta is {delta}; it must be above zero (1e-3 is usual, infinity gives least squares).")
        self.objective, self.delta = objective, float(delta)
        self.draws_: dict[str, Array] | None = None

    # What a subclass gives.

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        """The law over these rows; uncentred, every coordinate is one constant alone (for profile likelihoods)."""
        raise NotImplementedError

    @staticmethod
    def evaluate(constants: Mapping[str, Any], *inputs: Any) -> Any:
        """The law's value; constants and inputs broadcast together."""
        raise NotImplementedError

    def equation(self, say: Callable[[str], str]) -> str:
        """The law as text, each constant through `say(name)`."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"objective": self.objective, "delta": self.delta}

    def clone(self) -> Self:
        """An unfitted law with the same options."""
        return type(self)(**self.options())

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        """Raises InputError where the rows that count cannot identify the law."""
        enough(np.unique(np.stack(inputs), axis=1).shape[1], self.problem_.free, self.title)

    # Fitting.

    def _fit(self, columns: tuple[ArrayLike, ...], weight: ArrayLike | None, loss_se: ArrayLike | None) -> Self:
        """Fit to columns (n,): the inputs in order, then what was observed. Subclasses' `fit` spell the names out."""
        names = (*self.inputs, self.output)
        values = {name: positive(name, column) for name, column in zip(names, columns, strict=True)}
        self.weight_ = check_weights(weight, len(values[self.output]))
        same_length(**values, weight=self.weight_)
        self.data_ = values
        self.se_ = None if loss_se is None else positive(f"{self.output}_se", loss_se)
        if self.objective == "se":
            if self.se_ is None:
                raise InputError(f"{self.output}_se is missing; objective 'se' needs the standard error of every row.")
            same_length(**{self.output: values[self.output], f"{self.output}_se": self.se_})
        inputs = tuple(values[name] for name in self.inputs)
        used = self.weight_ > 0
        self._prepare(0.0)
        self._check(tuple(v[used] for v in inputs), values[self.output][used])
        self._accept(self._solve_scatter() if self.objective == "se" else self._solve_full())
        return self

    def _prepare(self, scatter: float) -> None:
        """The problem, and each row's precision, from the data and the options."""
        inputs = tuple(self.data_[name] for name in self.inputs)
        self.problem_ = self._problem(inputs, self.data_[self.output])
        self.scatter_ = scatter
        self._precision = np.ones_like(self.weight_)
        if self.objective == "se" and self.se_ is not None:
            self._precision = 1.0 / ((self.se_ / self.data_[self.output]) ** 2 + scatter**2)
        self._jackknife: tuple[np.ndarray, Solution] | None = None

    def _solve_full(self) -> Solution:
        weights = (self.weight_ * self._precision)[None, :]
        return self._solve(weights, self.problem_.starts(weights, None))

    def _solve_scatter(self) -> Solution:
        """Alternate between the fit and the scatter tau that makes each degree of freedom worth one."""
        variance = 1.0 / self._precision
        freedom = int((self.weight_ > 0).sum()) - self.problem_.free
        for _ in range(30):
            self._precision = 1.0 / (variance + self.scatter_**2)
            found = self._solve_full()
            residual = self.problem_.target - self.problem_.form.value(found.theta)[0][0]
            scatter = excess_scatter(self.weight_ * residual**2, variance, freedom)
            settled = abs(scatter - self.scatter_) <= 1e-6 * np.sqrt(variance.mean() + scatter**2)
            self.scatter_ = scatter
            if settled:
                break
        return found

    @property
    def _delta(self) -> float:
        """The residual from which the objective is linear."""
        return {"huber": self.delta, "l1": L1_DELTA}.get(self.objective, np.inf)

    def _solve(self, weights: Array, starts: Array, target: Array | None = None, warm: Array | None = None) -> Solution:
        p = self.problem_
        target = p.target if target is None else target
        return solve(p.form, target, weights, starts, p.lower, p.upper, self._delta, warm)

    def _accept(self, found: Solution) -> None:
        self.theta_ = found.theta[0]
        self.starts_ = {"tried": int(found.tried[0]), "agreeing": int(found.agreeing[0])}
        self.objective_ = float(found.objective[0])
        self.converged_ = bool(found.converged[0])
        held = found.at_bound[0]
        self.degenerate_ = [name for name, stuck in zip(self.problem_.coordinates, held, strict=True) if stuck]
        self._settle()

    def _settle(self) -> None:
        """Constants and their attributes from `theta_`; whatever was drawn before is gone."""
        constants = self.problem_.constants(self.theta_[None, :])
        self.constants_ = {name: float(constants[name][0]) for name in self.names}
        for name, value in self.constants_.items():
            setattr(self, name + "_", value)
        self.draws_ = None

    def resume(self, theta: Array, scatter: float) -> None:
        """Become the fitted law that had these coordinates: for a law read from a file, with its data in place."""
        self._prepare(scatter)
        self.theta_ = theta
        self._settle()

    def refit(self, weights: ArrayLike, target: Array | None = None) -> dict[str, Array]:
        """Constants (P,) of P refits whose `weights` (P, n) multiply the fit's own; NaN where one did not converge.

        `target` (P, n) replaces the logarithm of what was observed. Leaving a row out is a weight of zero.
        """
        found = self._refit(np.atleast_2d(np.asarray(weights, dtype=np.float64)), target)
        return {k: np.where(found.converged, v, np.nan) for k, v in self.problem_.constants(found.theta).items()}

    def _refit(self, weights: Array, target: Array | None = None) -> Solution:
        self._fitted()
        weights = weights * self.weight_ * self._precision
        # With other targets the variable projection of the data still lies near, so one set of starts serves all.
        own = self.problem_.starts(weights if target is None else weights[:1], self.resample_starts)
        return self._solve(weights, own, target, warm=self.theta_)

    # Uncertainty.

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0, method: str = "auto") -> Self:
        """Refit `n` resamples; rows of one group (`groups` (rows,): run ids, or trunks) move together.

        method "pairs" draws whole groups with replacement. "wild" keeps every row and moves its value up or down by
        what the fit without its group misses it by. "auto" is wild below 20 groups a fitted constant, where intervals
        of pairs are too wide, and pairs from there on. Raises InputError where there are too few groups to resample,
        and where wild meets a group without which a constant is undetermined. Returns self.
        """
        self._fitted()
        if method not in ("auto", "pairs", "wild"):
            raise InputError(f"method is {method!r}; choose auto, pairs or wild.")
        rows = len(self.weight_)
        groups = np.arange(rows) if groups is None else np.asarray(groups)
        if len(groups) != rows:
            raise InputError(f"groups has {len(groups)} values and the fit has {rows} points; each needs one.")
        found, drawn = resample(self, n, groups.astype(str), seed, method)
        self.groups_, self.bootstrap_ = groups.astype(str), drawn
        self.draws_ = self.problem_.constants(found.theta[found.converged])
        return self

    def interval(self, name: str, level: float = 0.95, method: str = "percentile") -> tuple[float, float]:
        """Interval of a constant: "percentile" or "bca" of the bootstrap, or "profile" of the likelihood, which needs
        no bootstrap, takes rows as independent, and has an infinite end where the runs determine none.
        """
        self._known(name)
        if method == "profile":
            from .profiles import profile_interval

            return profile_interval(self, name, level)
        return self.interval_of(lambda constants: constants[name], level, method)

    def interval_of(
        self, quantity: Callable[[Mapping[str, Any]], Any], level: float = 0.95, method: str = "percentile"
    ) -> tuple[float, float]:
        """Bootstrap interval of any function of the constants, which it takes as name -> (draws,) arrays."""
        draws = quantity(self._bootstrapped())
        if method == "percentile":
            return percentile_interval(draws, level)
        if method != "bca":
            raise InputError(f"method is {method!r}; choose percentile or bca, or profile for a constant of the law.")
        without = left_out(self, self.groups_)
        left = {name: values[without.converged] for name, values in self.problem_.constants(without.theta).items()}
        return bca_interval(draws, float(quantity(self.constants_)), quantity(left), level)

    # Reading.

    def predict(self, *inputs: ArrayLike, **named: ArrayLike) -> Any:
        """The law at its inputs, by position or by name, broadcast together; a float for floats."""
        self._fitted()
        value = np.asarray(self.evaluate(self.constants_, *self._inputs(inputs, named)))
        return float(value) if value.ndim == 0 else value

    def predict_draws(self, *inputs: ArrayLike, **named: ArrayLike) -> Array:
        """The law under each bootstrap draw: (resamples,) for scalars, (points, resamples) for (points,)."""
        draws = self._bootstrapped()
        columns = [np.asarray(v, dtype=np.float64)[..., None] for v in self._inputs(inputs, named)]
        with np.errstate(over="ignore"):
            return np.asarray(self.evaluate(draws, *columns))

    def predict_interval(
        self, *inputs: ArrayLike, level: float = 0.95, kind: str = "mean", **named: ArrayLike
    ) -> Array:
        """Interval at each point, of shape (2,) for scalars and (points, 2) for (points,), after `bootstrap`.

        kind "mean" is where the law's value lies. "run" is where one new run lands, seed noise and all: each draw is
        multiplied by exp of a residual drawn from those of the fit, inflated for its degrees of freedom. That takes the
        noise of the new run to be like that of the runs that there are.
        """
        return predict_interval(self, self._inputs(inputs, named), level, kind)

    def residuals(self) -> Array:
        """Log of what was observed minus log predicted, of shape (n,)."""
        self._fitted()
        return self.problem_.target - self.problem_.form.value(self.theta_[None, :])[0][0]

    @property
    def residual_scale_(self) -> float:
        """Root mean square residual in log space, per degree of freedom: what two runs of one setting scatter by."""
        self._fitted()
        return residual_scale(self)

    def say(self, name: str, digits: int = 4) -> str:
        """A constant with its interval, where there is one, as in `0.3473 [0.3171, 0.3731]`."""
        self._known(name)
        shown = f"{self.constants_[name]:.{digits}g}"
        if self.draws_ is None or np.ptp(self.draws_[name]) == 0:
            return shown
        low, high = self.interval(name)
        return f"{shown} [{low:.{digits}g}, {high:.{digits}g}]"

    def __repr__(self) -> str:
        if not hasattr(self, "theta_"):
            usual = inspect.signature(type(self)).parameters
            changed = {key: value for key, value in self.options().items() if value != usual[key].default}
            said = ", ".join(f"{key}={value!r}" for key, value in changed.items())
            return f"{type(self).__name__}({said})"
        return f"{self.equation(self.say)}   ({self.summary()})"

    def _repr_html_(self) -> str:
        """For notebooks: the equation, and a row a constant."""
        if not hasattr(self, "theta_"):
            return f"<code>{self!r}</code>"
        rows = [
            (
                name,
                f"{value:.5g}",
                interval(self.interval(name), "{:.4g}".format) if self.draws_ else "bootstrap() gives one",
            )
            for name, value in self.constants_.items()
        ]
        body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return (
            f"<p><code>{text(self.equation(lambda name: format(self.constants_[name], '.4g')))}</code></p>"
            f"<table><thead><tr><th>constant</th><th>value</th><th>95 % interval</th></tr></thead>"
            f"<tbody>{body}</tbody></table><p><small>{text(self.summary())}</small></p>"
        )

    def summary(self) -> str:
        """How the fit went, as in `240 points, 64 of 64 starts agree`."""
        said = "{agreeing} of {tried} starts agree".format(**self.starts_) if self.converged_ else "NOT converged"
        stuck = f", {', '.join(self.degenerate_)} at a bound" if self.degenerate_ else ""
        return f"{len(self.weight_)} points, {said}{stuck}"

    # JSON.

    def to_dict(self) -> dict[str, Any]:
        """Everything: options, constants, data with its hash, draws and provenance, as JSON's own types."""
        from .persistence import law_to_dict

        self._fitted()
        return law_to_dict(self)

    def to_json(self, path: Any = None) -> str:
        """The same as text, also written to `path` where one is given."""
        from .persistence import write_law

        return write_law(self.to_dict(), path)

    @classmethod
    def from_json(cls, source: Any) -> Self:
        """A fitted law from a file or from `to_json`'s text; nothing is fitted again.

        Raises InputError for what is no law, another version of the format, or a law of another form.
        """
        from .persistence import read_law

        return read_law(source, cls)

    # Checks.

    def _inputs(self, inputs: tuple[ArrayLike, ...], named: Mapping[str, ArrayLike]) -> list[Array]:
        given = dict(zip(self.inputs, inputs, strict=False)) | dict(named)
        if len(inputs) + len(named) != len(self.inputs) or set(given) != set(self.inputs):
            said = ", ".join([*(f"#{i + 1}" for i in range(len(inputs))), *named]) or "nothing"
            raise InputError(f"predict was given {said}; it takes {', '.join(self.inputs)}, each once.")
        return [np.asarray(given[name], dtype=np.float64) for name in self.inputs]

    def _known(self, name: str) -> None:
        self._fitted()
        if name not in self.names:
            raise InputError(f"interval of {name!r} is not known; choose one of {', '.join(self.names)}.")

    def _fitted(self) -> None:
        if not hasattr(self, "theta_"):
            columns = ", ".join((*self.inputs, self.output))
            raise InputError(f"this {type(self).__name__} is not fitted; call fit({columns}) first.")

    def _bootstrapped(self) -> dict[str, Array]:
        self._fitted()
        if self.draws_ is None:
            raise InputError(
                f"this {type(self).__name__} has no intervals yet; call bootstrap(n, groups=run_id) first."
            )
        return self.draws_
