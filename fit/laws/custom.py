"""Laws written as a Python function.

    def precision(c, N, D, P):  # Kumar et al. 2024 (arXiv:2411.04330): weights of P bits act as fewer parameters
        return c["E"] + c["A"] / (N * (1 - np.exp(-P / c["gamma"]))) ** c["alpha"] + c["B"] / D ** c["beta"]

    bounds = {"E": (0.1, 10), "A": (1, 1e6), "B": (1, 1e6), "alpha": (0.05, 2), "beta": (0.05, 2), "gamma": (0.1, 20)}
    law = FunctionLaw(precision, bounds, inputs=("N", "D", "P")).fit(N, D, P, loss)

Derivatives come from the function itself (`solver/jets.py`), so it must use only arithmetic and NumPy's elementary
functions, without casts or branches. Constants with bounds above zero are fitted as logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..errors import Array, Constants, InputError, Say
from ..solver.forms import LogSumTerms
from ..solver.jets import ACCEPTED
from .law import Law, LossLaw, Problem

Function = Callable[..., Any]
CANDIDATES = 16  # points of the Latin hypercube for each start that is kept
CHECKED = 8  # points where the derivatives are checked
UNUSABLE = 1e6  # squared error of a start without a finite prediction
# Attributes of a fitted law, without the underscore at the end: no constant may have these names.
TAKEN = {"bootstrap", "constants", "converged", "data", "degenerate", "draws", "groups"}
TAKEN |= {"objective", "problem", "scatter", "se", "starts", "theta", "weight"}


class FunctionLaw(LossLaw):
    """The law `function(constants, *inputs)`; `analyze` accepts one of N and D.

    `degenerate_` also names constants that no prediction depends on.

    Parameters
    ----------
    function
        Takes constants (name -> array or `Jet`) and the inputs, which broadcast together, and returns predictions above
        zero.
    parameters
        name -> (lowest, highest), both finite; equal ones fix the constant.
    inputs, output : names of the columns that `fit` takes, in order, and of the prediction.
    starts : starts with all constants, name -> value, tried in addition to the drawn ones.
    tries, seed : number of starts kept from a Latin hypercube, and its seed.
    name : name of the law; by default that of the function.
    """

    form = "function"

    def __init__(
        self,
        function: Function | None = None,
        parameters: Mapping[str, Sequence[float]] | None = None,
        inputs: Sequence[str] = ("N", "D"),
        output: str = "loss",
        starts: Iterable[Mapping[str, float]] = (),
        tries: int = 64,
        seed: int = 0,
        name: str | None = None,
        objective: str = "huber",
        delta: float = 1e-3,
    ) -> None:
        super().__init__(objective, delta)
        self.function = function
        self.parameters, self.bounds = parameters, _bounds(parameters or {})
        self.names, self.inputs = tuple(self.bounds), tuple(inputs)
        self.exponent_names = tuple(name for name in self.names if name.startswith(("alpha", "beta")))
        self.output = str(output)
        if not self.inputs or len({*self.inputs, self.output}) != len(self.inputs) + 1:
            raise InputError(f"inputs is {inputs!r} and output is {output!r}; all names must differ.")
        if tries < 1:
            raise InputError(f"tries is {tries}; it must be at least 1.")
        self.starts = starts
        self._user_starts = [self._start(start) for start in starts]
        self.tries, self.seed = int(tries), int(seed)
        self.name = name or getattr(function, "__name__", "function")
        self.title = f"the law {self.name}"

    def options(self) -> dict[str, Any]:
        parameters = {name: list(pair) for name, pair in self.bounds.items()}
        arguments = self.get_params() | {
            "parameters": parameters,
            "inputs": list(self.inputs),
            "starts": self._user_starts,
        }
        return {name: value for name, value in arguments.items() if name != "function"}

    fit = Law.fit  # inputs may be others than N and D

    def evaluate(self, constants: Constants, *inputs: Any) -> Any:  # type: ignore[override]
        if self.function is None:
            raise InputError(f"{self.title} has no function; give it to FunctionLaw or to from_json(source, function).")
        return self.function(constants, *inputs)

    def equation(self, say: Say) -> str:
        constants = ", ".join(f"{name} = {say(name)}" for name in self.names)
        return f"{self.output}({', '.join(self.inputs)}) = {self.name}({constants})"

    @classmethod
    def from_json(cls, source: Any, function: Function | None = None) -> Self:
        """Read a fitted law from a file; `function` is the one that it was fitted with.

        Raises InputError if `function` is None or does not reproduce the stored objective.
        """
        if function is None:
            raise InputError(
                "function is missing; a file does not contain it, so give the function that the law was fitted with."
            )
        law = super().from_json(source)
        law.function = function
        law._check_function(law.theta_[None, :])
        residual = law.residuals()
        slope = np.clip(residual, -law._delta, law._delta)
        objective = float((law.weight_ * law._precision) @ (slope * (residual - 0.5 * slope)))
        if not np.isclose(objective, law.objective_, rtol=1e-6, atol=1e-18):
            raise InputError(
                f"function gives an objective of {objective:.6g} on the stored data, but the file states "
                f"{law.objective_:.6g}; give the function that the law was fitted with."
            )
        return law

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        if not self.names:
            raise InputError("parameters is empty; give the bounds of each constant, such as {'E': (0.1, 10)}.")
        Law._check(self, inputs, observed)
        self._check_function(self.problem_.starts(np.ones((1, self.problem_.form.points)), CHECKED)[0])

    def _check_function(self, points: Array) -> None:
        """Raise InputError unless the function has finite derivatives at one of `points` (points, coordinates)."""
        try:
            with np.errstate(all="ignore"):
                value, (first, _) = self.problem_.form.value(points)
        except InputError:
            raise
        except Exception as error:  # it is the user's function, and may raise anything
            raise InputError(
                f"function cannot be differentiated ({type(error).__name__}: {error}); {ACCEPTED}."
            ) from None
        if not np.isfinite(first[np.isfinite(value)]).any():
            raise InputError(
                "function has no finite prediction and slope at any start; give starts where both are finite."
            )

    def _accept(self, solution: Any) -> None:
        super()._accept(solution)
        first = self.problem_.form.value(self.theta_[None, :])[1][0][0]  # (n, k)
        moved = np.abs(first[self.weight_ > 0]).max(axis=0) > 0.0
        free = self.problem_.lower < self.problem_.upper
        self._mark_degenerate(*np.array(self.names)[free & ~moved].tolist())

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        target = np.log(observed)
        logarithmic = {name for name, (low, _) in self.bounds.items() if low > 0.0}

        def constants(theta: Array) -> dict[str, Any]:
            columns = zip(self.names, theta.T, strict=True)
            return {name: np.exp(column) if name in logarithmic else column.copy() for name, column in columns}

        def terms(v: Mapping[str, Any]) -> list[Any]:
            values = {name: np.exp(value) if name in logarithmic else value for name, value in v.items()}
            return [np.log(self.evaluate(values, *inputs))]

        def starts(weights: Array, keep: int | None) -> Array:
            points = self._points(problem.lower, problem.upper, logarithmic)
            error = weights @ _squares(self.evaluate, constants(points), inputs, target).T
            if keep is None:  # a full fit always includes the given starts
                error[:, : len(self._user_starts)] = -1.0
            order = np.argsort(error, axis=1, kind="stable")[:, : keep or len(self._user_starts) + self.tries]
            return points[order]

        at = {name: i for i, name in enumerate(self.names)}
        problem = Problem(
            form=LogSumTerms(terms, at, len(target)),
            target=target,
            bounds={n: tuple(np.log(pair)) if n in logarithmic else pair for n, pair in self.bounds.items()},
            axes=np.log(np.stack([column for column in inputs if np.ptp(column) > 0.0] or [inputs[0]])),
            starts=starts,
            constants=constants,
        )
        return problem

    def _points(self, lower: Array, upper: Array, logarithmic: Collection[str]) -> Array:
        user = [[np.log(v) if name in logarithmic else v for name, v in start.items()] for start in self._user_starts]
        drawn = lower + latin_hypercube(CANDIDATES * self.tries, len(lower), self.seed) * (upper - lower)
        return np.concatenate([np.reshape(user, (-1, len(lower))), drawn])

    def _start(self, start: Mapping[str, float]) -> dict[str, float]:
        if set(start) != set(self.names):
            raise InputError(f"starts holds {', '.join(start) or 'nothing'}; each start needs {', '.join(self.names)}.")
        for name, value in start.items():
            low, high = self.bounds[name]
            if not low <= value <= high:
                raise InputError(f"starts holds {name} = {value}; it must lie within its bounds, {low:g} and {high:g}.")
        return {name: float(start[name]) for name in self.names}


def _squares(function: Function, constants: Constants, inputs: Sequence[Array], target: Array) -> Array:
    """Return squared errors of log predictions, (G, n), for G values of the constants; UNUSABLE where not finite."""
    points = {name: value[:, None] for name, value in constants.items()}
    shape = (len(next(iter(constants.values()))), len(target))
    try:
        with np.errstate(all="ignore"):
            log = np.log(np.broadcast_to(np.asarray(function(points, *inputs), dtype=np.float64), shape))
    except InputError:
        raise
    except Exception as error:  # it is the user's function, and may raise anything
        raise InputError(
            f"function fails on arrays ({type(error).__name__}: {error}); it must accept constants of shape (P, 1) by "
            "name and inputs of shape (n,), and return an array that broadcasts to (P, n)."
        ) from None
    if not np.isfinite(log).all(axis=1).any():
        raise InputError(
            "nowhere within the bounds does function give a finite value above zero for every run; change the bounds."
        )
    return np.nan_to_num((log - target) ** 2, nan=UNUSABLE, posinf=UNUSABLE)


def latin_hypercube(points: int, dimensions: int, seed: int) -> Array:
    """Return random points in the unit cube, (points, dimensions).

    Every axis has `points` equal slices with one point each (McKay et al. 1979).
    """
    rng = np.random.default_rng(seed)
    slices = rng.permuted(np.tile(np.arange(points), (dimensions, 1)), axis=1).T
    return (slices + rng.random((points, dimensions))) / points


def _bounds(parameters: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    bounds = {}
    for name, pair in parameters.items():
        if not str(name).isidentifier() or name in TAKEN:
            raise InputError(f"parameters has {name!r}; use a Python name that is not an attribute of a fitted law.")
        try:
            low, high = (float(v) for v in pair)
        except (TypeError, ValueError):
            raise InputError(f"parameters has {name} = {pair!r}; it must be a pair of numbers.") from None
        if not (np.isfinite([low, high]).all() and low <= high):
            raise InputError(
                f"parameters has {name} = ({low:g}, {high:g}); both must be finite, and the lower one first."
            )
        bounds[name] = (low, high)
    return bounds
