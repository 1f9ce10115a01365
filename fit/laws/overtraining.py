"""The law of over-training in C = 6 N D and M = D / N.

It equals E + A / N^alpha + B / D^alpha with eta = alpha / 2, a = A 6^eta, b = B 6^eta, and is fitted as this law in 6
N^2 and 6 D^2.

Gadre et al. 2024 (arXiv:2403.08540), equation 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, floats
from .chinchilla import FLAT_EXPONENT, two_power_laws
from .law import OffsetLaw, Problem

RENAMED = {"A": "a", "B": "b", "alpha": "eta"}


class OvertrainingLaw(OffsetLaw):
    """L(C, M) = E + (a M^eta + b M^-eta) C^-eta, fitted to N and D.

    `E` fixes the irreducible loss. After `fit`: E_, a_, b_, eta_.
    """

    form = "overtraining"
    title = "the law E + (a M^eta + b M^-eta) C^-eta"
    names = ("E", "a", "b", "eta")
    formula = "L(C, M) = {E} + ({a} M^{eta} + {b} M^-{eta}) C^-{eta}"
    exponent_names = ("eta",)
    power_optimum = True
    a_: float
    b_: float
    eta_: float

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        N, D = inputs
        c = constants
        size, data = (6.0 * np.square(floats(v)) for v in (N, D))
        return c["E"] + c["a"] * np.power(size, -c["eta"]) + c["b"] * np.power(data, -c["eta"])

    def at(self, flops: ArrayLike, ratio: ArrayLike) -> Any:
        """Return the predicted loss of runs with `flops` = 6 N D and `ratio` = D / N."""
        C, M = floats(flops), floats(ratio)
        return self.predict(N=np.sqrt(C / (6.0 * M)), D=np.sqrt(C * M / 6.0))

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        """Return the best N and D and their loss for `flops` = flops_per_token N D; D / N is (b / a)^(1 / (2 eta))."""
        c, spent = constants, floats(flops) / flops_per_token
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            M = np.divide(c["b"], c["a"]) ** (0.5 / c["eta"])
            N, D = np.sqrt(spent / M), np.sqrt(spent * M)
            return N, D, self.evaluate(c, N, D)

    def size_exponent(self, constants: Constants) -> Any:
        return 0.0 * constants["eta"] + 0.5

    # The law as the solver sees it.

    def _accept(self, solution: Any) -> None:
        super()._accept(solution)
        if 2.0 * self.constants_["eta"] < FLAT_EXPONENT:
            self._mark_degenerate("eta")

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        size, data = (6.0 * v**2 for v in inputs)
        problem = two_power_laws((size, data), observed, True, self.E)

        def constants(theta: Array) -> Columns:
            tied = problem.constants(theta)
            return {"E": tied["E"], "a": tied["A"], "b": tied["B"], "eta": tied["alpha"]}

        bounds = {RENAMED.get(name, name): pair for name, pair in problem.bounds.items()}
        return replace(problem, bounds=bounds, constants=constants)
