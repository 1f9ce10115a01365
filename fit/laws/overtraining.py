"""The law of over-training, L(C, M) = E + (a M^eta + b M^-eta) C^-eta, with M = D / N and C = 6 N D.

It is E + A / N^alpha + B / D^alpha in other words: eta = alpha / 2, a = A 6^eta, b = B 6^eta; its fit is the tied one
of `ChinchillaLaw` in 6 N^2 and 6 D^2. At every M the reducible loss falls with the same power of C.

Gadre et al. 2024 (arXiv:2403.08540), equation 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, InputError, Say, floats
from .chinchilla import FLAT_EXPONENT, ChinchillaLaw
from .law import Law, LossLaw, Problem

RENAMED = {"A": "a", "B": "b", "alpha": "eta"}


class OvertrainingLaw(LossLaw):
    """L(C, M) = E + (a M^eta + b M^-eta) C^-eta; fitted to N and D.

    `E` fixes the irreducible loss. After `fit`: E_, a_, b_, eta_.
    """

    form = "overtraining"
    title = "the law E + (a M^eta + b M^-eta) C^-eta"
    names = ("E", "a", "b", "eta")
    exponent_names = ("eta",)
    irreducible = "E"
    power_optimum = True
    E_: float
    a_: float
    b_: float
    eta_: float

    def __init__(self, objective: str = "huber", delta: float = 1e-3, E: float | None = None) -> None:
        super().__init__(objective, delta)
        tied = self._tied(E)
        self.E, self.direct = tied.E, tied.direct

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        N, D = inputs
        c = constants
        size, data = (6.0 * np.square(floats(v)) for v in (N, D))
        return c["E"] + c["a"] * np.power(size, -c["eta"]) + c["b"] * np.power(data, -c["eta"])

    def equation(self, say: Say) -> str:
        eta = say("eta")
        return f"L(C, M) = {say('E')} + ({say('a')} M^{eta} + {say('b')} M^-{eta}) C^-{eta}"

    def at(self, flops: ArrayLike, ratio: ArrayLike) -> Any:
        """The predicted loss of `flops` = 6 N D of training at `ratio` = D / N."""
        C, M = floats(flops), floats(ratio)
        return self.predict(N=np.sqrt(C / (6.0 * M)), D=np.sqrt(C * M / 6.0))

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        """In closed form: M = (b / a)^(1 / (2 eta)) tokens per parameter at every C."""
        c, spent = constants, floats(flops) / flops_per_token
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            M = np.divide(c["b"], c["a"]) ** (0.5 / c["eta"])
            N, D = np.sqrt(spent / M), np.sqrt(spent * M)
            return N, D, self.evaluate(c, N, D)

    def size_exponent(self, constants: Constants) -> Any:
        """One half."""
        return 0.0 * constants["eta"] + 0.5

    # To and from the law E + A / N^alpha + B / D^alpha.

    def chinchilla(self) -> ChinchillaLaw:
        """The same fitted law, with its draws, as a `ChinchillaLaw(tied=True)`."""
        self._fitted()
        draws = None if self.draws_ is None else tied_constants(self.draws_)
        return _translated(self, ChinchillaLaw, {new: old for old, new in RENAMED.items()}, draws)

    @classmethod
    def from_chinchilla(cls, law: ChinchillaLaw) -> Self:
        """A fitted `ChinchillaLaw(tied=True)`, with its draws, in these constants."""
        law._fitted()
        if not law.tied:
            raise InputError("the ChinchillaLaw has two exponents; fit it with tied=True, as this law has only one.")
        draws = None if law.draws_ is None else own_constants(law.draws_)
        return _translated(law, cls, RENAMED, draws)

    # The law as the solver sees it.

    def _tied(self, E: float | None) -> ChinchillaLaw:
        return ChinchillaLaw(self.objective, self.delta, tied=True, E=E)

    def _accept(self, found: Any) -> None:
        super()._accept(found)
        if 2.0 * self.constants_["eta"] < FLAT_EXPONENT:
            self._call_degenerate("eta")

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        size, data = (6.0 * v**2 for v in inputs)
        problem = self._tied(self.E)._problem((size, data), observed, centred)

        def constants(theta: Array) -> Columns:
            found = problem.constants(theta)
            return {"E": found["E"], "a": found["A"], "b": found["B"], "eta": found["alpha"]}

        bounds = {RENAMED.get(name, name): pair for name, pair in problem.bounds.items()}
        return replace(problem, bounds=bounds, logarithmic="abE", constants=constants)


def tied_constants(constants: Constants) -> dict[str, Any]:
    """E, A, B, alpha = beta of the tied Chinchilla law from E, a, b, eta."""
    c, six = constants, np.power(6.0, -constants["eta"])
    return {"E": c["E"], "A": c["a"] * six, "B": c["b"] * six, "alpha": 2.0 * c["eta"], "beta": 2.0 * c["eta"]}


def own_constants(constants: Constants) -> dict[str, Any]:
    """E, a, b, eta from the constants of a tied Chinchilla law."""
    c, eta = constants, 0.5 * constants["alpha"]
    six = np.power(6.0, eta)
    return {"E": c["E"], "a": c["A"] * six, "b": c["B"] * six, "eta": eta}


def _translated(law: Law, to: Any, renamed: Mapping[str, str], draws: Mapping[str, Array] | None) -> Any:
    """The fitted law as class `to`, by way of its file: the solver's coordinates are the same, but for a factor of two
    in the exponent, as the mean of log 6 N^2 is log 6 + 2 mean log N.
    """
    content = law.to_dict()
    exponent = law.problem_.coordinates.index("eta" if to is ChinchillaLaw else "alpha")
    content["fit"]["theta"][exponent] *= 2.0 if to is ChinchillaLaw else 0.5
    content["fit"]["degenerate"] = [renamed.get(name, name) for name in law.degenerate_]
    content["form"] = to.form
    content["options"].pop("tied", None)
    if to is ChinchillaLaw:
        content["options"]["tied"] = True
    if draws is not None:
        content["bootstrap"]["draws"] = {name: values.tolist() for name, values in draws.items()}
    return to.from_json(json.dumps(content))
