"""Chinchilla's law with an exponent gamma that sets how a small N and a small D add up.

At gamma = 1 it is Chinchilla's law; with E = 0 and beta = 1 it is Kaplan's. The optimal N and D do not depend on gamma.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import EqualLoss, optimum
from ..errors import Array, Columns, Constants
from ..solver.forms import PowerSum
from .chinchilla import EXPONENT_BOUNDS, VANISHED, ChinchillaLaw, power_terms
from .law import Problem, amplitude, centred, projected_starts

EXPONENT_GRID = np.geomspace(0.03, 1.0, 6)  # of alpha gamma and of beta gamma
GAMMA_GRID = np.array([0.25, 0.5, 1.0, 2.0])
SHARE_GRID = np.array([0.0, 0.3, 0.6, 0.8, 0.95])  # E as a share of the lowest loss
STARTS = 32  # of a full fit
GAMMA_BOUNDS = (0.1, 10.0)  # here the sum is nearly a maximum or nearly a geometric mean


class GammaLaw(ChinchillaLaw):
    """L(N, D) = E + (A / N^alpha + B / D^beta)^gamma.

    Parameters are those of `ChinchillaLaw`. After `fit`: E_, A_, B_, alpha_, beta_, gamma_.
    """

    form = "gamma"
    title = "the law E + (A/N^alpha + B/D^beta)^gamma"
    names: tuple[str, ...] = ("E", "A", "B", "alpha", "beta", "gamma")  # type: ignore[assignment]
    formula = "L(N, D) = {E} + ({A} / N^{alpha} + {B} / D^{beta})^{gamma}"
    resample_starts = 2
    direct = "deeper"
    gamma_: float

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        c = constants
        without = {**c, "E": 0.0}
        return c["E"] + np.power(ChinchillaLaw.evaluate(without, *inputs), c["gamma"])

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        N, D, inner = optimum(flops, {**constants, "E": 0.0}, flops_per_token)
        return N, D, constants["E"] + np.power(inner, constants["gamma"])

    def equal_loss(self, constants: Constants, loss: Array) -> EqualLoss:
        inner = np.power(np.maximum(loss - constants["E"], 0.0), 1.0 / constants["gamma"])
        return EqualLoss({**constants, "E": np.zeros_like(constants["E"])}, inner)

    # The law as the solver sees it.

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        (x, x0), (y, y0) = (centred(column) for column in inputs)
        target, fixed = np.log(observed), self.E
        names = ["A", "alpha", "B"] + ([] if self.tied else ["beta"]) + ["gamma"] + (["E"] if fixed is None else [])
        at = {name: i for i, name in enumerate(names)}
        at.setdefault("beta", at["alpha"])
        low, high = float(target.min()) - VANISHED, float(target.max()) + 2.0

        def constants(theta: Array) -> Columns:
            gamma = theta[:, at["gamma"]].copy()
            alpha, beta = theta[:, at["alpha"]] / gamma, theta[:, at["beta"]] / gamma
            A, B = (
                np.where(theta[:, at[name]] <= low, 0.0, amplitude(theta[:, at[name]] / gamma, -np.inf, shift))
                for name, shift in (("A", x0 * alpha), ("B", y0 * beta))
            )
            E = np.full(len(theta), fixed) if fixed is not None else amplitude(theta[:, at["E"]], low)
            return {"E": E, "A": A, "B": B, "alpha": alpha, "beta": beta, "gamma": gamma}

        def starts(weights: Array, keep: int | None) -> Array:
            # Given gamma, E and the exponents, (loss - E)^(1 / gamma) is linear in A and B.
            floors = SHARE_GRID * observed.min() if fixed is None else np.array([fixed])
            betas = EXPONENT_GRID[:1] if self.tied else EXPONENT_GRID
            axes = np.meshgrid(EXPONENT_GRID, betas, GAMMA_GRID, floors, indexing="ij")
            alpha, beta, gamma, E = (axis.ravel() for axis in axes)
            beta = alpha if self.tied else beta
            power = np.log(observed - E[:, None]) / gamma[:, None]
            lines = [np.exp(-(alpha / gamma)[:, None] * x - power), np.exp(-(beta / gamma)[:, None] * y - power)]
            # To first order, a residual of the power is loss / (gamma (loss - E)) times that of log loss.
            scale = (gamma * (1.0 - E / observed.mean())) ** 2

            def coordinates(log: Array) -> dict[str, Array]:
                values = {"A": log[..., 0] * gamma, "B": log[..., 1] * gamma, "alpha": alpha, "beta": beta}
                values |= {"gamma": gamma, "E": np.log(np.maximum(E, 1e-3 * observed.min()))}
                return {name: value for name, value in values.items() if name in at}

            floor = 0.02 * np.exp(power).min(axis=1)[:, None]
            return projected_starts(at, coordinates, np.stack(lines, 2), weights, keep or STARTS, None, scale, floor)

        bounds = dict.fromkeys("ABE", (low, high)) | {"gamma": GAMMA_BOUNDS}
        bounds = {name: bounds.get(name, EXPONENT_BOUNDS) for name in names}
        terms = power_terms(at, x, y, fixed)
        terms.insert(2, ((at["gamma"],), np.ones((len(x), 1))))
        return Problem(PowerSum(len(names), terms), target, bounds, np.log(np.stack(inputs)), starts, constants)
