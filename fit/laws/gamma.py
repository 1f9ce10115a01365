"""The law L(N, D) = E + (A / N^alpha + B / D^beta)^gamma: one exponent more says how the two shortages add up.

At gamma = 1 it is Chinchilla's law, with E = 0 and beta = 1 Kaplan's. The optimal N and D do not depend on gamma.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import EqualLoss, optimum
from ..errors import Array, Columns, Constants, Say
from ..solver.forms import LogSumTerms, Term, power_sum
from ..solver.solver import variable_projection
from .chinchilla import EXPONENT_BOUNDS, FAR, VANISHED, ChinchillaLaw
from .law import Problem, amplitude, least_starts

EXPONENT_GRID = np.geomspace(0.03, 1.0, 6)  # of alpha gamma and of beta gamma
GAMMA_GRID = np.array([0.25, 0.5, 1.0, 2.0])
SHARE_GRID = np.array([0.0, 0.3, 0.6, 0.8, 0.95])  # E as a share of the lowest loss
STARTS = 32  # of a full fit
GAMMA_BOUNDS = (0.1, 10.0)  # at these the sum is nearly a maximum, or nearly a geometric mean


class GammaLaw(ChinchillaLaw):
    """L(N, D) = E + (A / N^alpha + B / D^beta)^gamma.

    Parameters are those of `ChinchillaLaw`. After `fit`: E_, A_, B_, alpha_, beta_, gamma_.
    """

    form = "gamma"
    title = "the law E + (A/N^alpha + B/D^beta)^gamma"
    names: tuple[str, ...] = ("E", "A", "B", "alpha", "beta", "gamma")  # type: ignore[assignment]
    resample_starts = 2
    direct = "deeper"
    gamma_: float

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        c = constants
        without = {**c, "E": 0.0}
        return c["E"] + np.power(ChinchillaLaw.evaluate(without, *inputs), c["gamma"])

    def equation(self, say: Say) -> str:
        inner = f"{say('A')} / N^{say('alpha')} + {say('B')} / D^{say('beta')}"
        return f"L(N, D) = {say('E')} + ({inner})^{say('gamma')}"

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        """In closed form: the N and D that minimise the sum in brackets."""
        N, D, inner = optimum(flops, {**constants, "E": 0.0}, flops_per_token)
        return N, D, constants["E"] + np.power(inner, constants["gamma"])

    def equal_loss(self, constants: Constants, loss: Array) -> EqualLoss:
        left = np.power(np.maximum(loss - constants["E"], 0.0), 1.0 / constants["gamma"])
        return EqualLoss({**constants, "E": np.zeros_like(constants["E"])}, left)

    # The law as the solver sees it.

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        """Coordinates: of (A / N^alpha)^gamma and (B / D^beta)^gamma the logarithm at the mean log N and log D and the
        exponent; gamma; log E unless fixed. Uncentred: the constants, A, B and E as logarithms.
        """
        log_n, log_d = np.log(inputs[0]), np.log(inputs[1])
        x0, y0 = (float(log_n.mean()), float(log_d.mean())) if centred else (0.0, 0.0)
        x, y, target = log_n - x0, log_d - y0, np.log(observed)
        names = ["A", "alpha", "B"] + ([] if self.tied else ["beta"]) + ["gamma"] + (["E"] if self.E is None else [])
        at = {name: i for i, name in enumerate(names)}
        at.setdefault("beta", at["alpha"])
        low, high = (float(target.min()) - VANISHED, float(target.max()) + 2.0) if centred else (-FAR, FAR)
        fixed = self.E

        def constants(theta: Array) -> Columns:
            gamma, (alpha, beta) = theta[:, at["gamma"]].copy(), (theta[:, at[name]] for name in ("alpha", "beta"))
            power = gamma if centred else np.ones_like(gamma)
            alpha, beta = alpha / power, beta / power
            A, B = (
                np.where(theta[:, at[name]] <= low, 0.0, amplitude(theta[:, at[name]] / power, -np.inf, shift))
                for name, shift in (("A", x0 * alpha), ("B", y0 * beta))
            )
            E = np.full(len(theta), fixed) if fixed is not None else amplitude(theta[:, at["E"]], low)
            return {"E": E, "A": A, "B": B, "alpha": alpha, "beta": beta, "gamma": gamma}

        def terms(v: Mapping[str, Array], second: bool) -> list[Term]:
            found = [_term(v, x, y, centred, second)]
            if self.E is None:
                found.append(Term(v["E"] + 0.0 * x, {"E": np.ones_like(v["E"])}))
            elif self.E > 0:
                found.append(Term(np.full((1, len(x)), np.log(self.E))))
            return found

        bounds = dict.fromkeys("ABE", (low, high)) | {"gamma": GAMMA_BOUNDS}
        return Problem(
            form=LogSumTerms(terms, at, len(x)),
            target=target,
            bounds={name: bounds.get(name, EXPONENT_BOUNDS) for name in names},
            logarithmic="ABE",
            axes=np.stack([log_n, log_d]),
            starts=lambda weights, keep: _starts(x, y, observed, fixed, at, centred, weights, keep),
            constants=constants,
        )


def _term(v: Mapping[str, Array], x: Array, y: Array, centred: bool, with_second: bool) -> Term:
    """The logarithm of (A / N^alpha + B / D^beta)^gamma."""
    s = v["gamma"]
    one = np.ones_like(s)
    if centred:
        g = Term(v["A"] - v["alpha"] * x, {"A": one, "alpha": -x})
        h = Term(v["B"] - v["beta"] * y, {"B": one, "beta": -y})
    else:
        lines = []
        for letter, exponent, z in (("A", "alpha", x), ("B", "beta", y)):
            value = s * (v[letter] - v[exponent] * z)
            first = {letter: s, exponent: -s * z, "gamma": value / s}
            lines.append(Term(value, first, {(letter, "gamma"): one, (exponent, "gamma"): -z}))
        g, h = lines
    return power_sum(g, h, s, "gamma", ("A", "alpha", "B", "beta", "gamma"), with_second)


def _starts(
    x: Array,
    y: Array,
    loss: Array,
    E: float | None,
    at: Mapping[str, int],
    centred: bool,
    weights: Array,
    keep: int | None,
) -> Array:
    """Starts (P, G, k) from a grid: given gamma, E and the exponents, (loss - E)^(1 / gamma) is linear in A and B."""
    tied = at["alpha"] == at["beta"]
    floors = SHARE_GRID * loss.min() if E is None else np.array([E])
    axes = np.meshgrid(EXPONENT_GRID, EXPONENT_GRID[:1] if tied else EXPONENT_GRID, GAMMA_GRID, floors, indexing="ij")
    alpha, beta, gamma, floor = (axis.ravel() for axis in axes)
    beta = alpha if tied else beta
    powered = np.log(loss - floor[:, None]) / gamma[:, None]
    basis = np.stack(
        [np.exp(-(alpha / gamma)[:, None] * x - powered), np.exp(-(beta / gamma)[:, None] * y - powered)], 2
    )
    amplitudes, error = variable_projection(basis, np.ones_like(loss), weights)
    # A residual of the powered loss is loss / (gamma (loss - E)) times one of log loss, to first order.
    error = error * (gamma * (1.0 - floor / loss.mean())) ** 2
    error = np.where((amplitudes > 0).all(axis=2), error, error * 4.0)
    log = np.log(np.maximum(amplitudes, 0.02 * np.exp(powered).min(axis=1)[:, None]))
    scale = gamma if centred else np.ones_like(gamma)
    starts = np.empty((*error.shape, max(at.values()) + 1))
    starts[..., at["A"]], starts[..., at["B"]] = log[..., 0] * scale, log[..., 1] * scale
    starts[..., at["alpha"]], starts[..., at["beta"]] = alpha * scale / gamma, beta * scale / gamma
    starts[..., at["gamma"]] = gamma
    if E is None:
        starts[..., at["E"]] = np.log(np.maximum(floor, 1e-3 * loss.min()))
    return least_starts(starts, error, keep or STARTS)
