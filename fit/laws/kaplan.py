"""Kaplan's joint law L(N, D) = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D.

It has no irreducible loss. N_c and D_c are where its two lines would reach a loss of one, far beyond any run; so the
solver works with the lines at the middle of the data. N is Kaplan's count, without embeddings.

Kaplan et al. 2020 (arXiv:2001.08361), equation 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, Say, floats
from ..solver.forms import LogSumTerms, Term, power_sum
from ..solver.solver import variable_projection
from .law import LossLaw, Problem, least_starts

EXPONENT_GRID = np.geomspace(0.03, 0.8, 8)
RATIO_GRID = np.geomspace(0.25, 4.0, 8)  # of alpha_N to alpha_D; far from one, the power mean is a corner
STARTS = 32  # of a full fit: the better half of the grid
EXPONENT_BOUNDS = (0.01, 3.0)  # over three decades an exponent below this changes the loss by less than 7 %
VANISHED = 12.0  # a line with a share below exp(-12) at the middle of the data is called zero
WIDE = 20.0  # how far the line of the data may lie from the losses, in log loss
COORDINATES = ("N_c", "alpha_N", "D_c", "alpha_D")
FAR = 700.0  # of log N_c and log D_c: the largest that a float can hold


class KaplanLaw(LossLaw):
    """L(N, D) = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D.

    After `fit`: N_c_, D_c_ (parameters and tokens), alpha_N_, alpha_D_.
    """

    form = "kaplan"
    title = "the law [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D"
    names = ("N_c", "D_c", "alpha_N", "alpha_D")
    exponent_names = ("alpha_N", "alpha_D")
    power_optimum = True
    direct = "deeper"
    N_c_: float
    D_c_: float
    alpha_N_: float
    alpha_D_: float

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        N, D = inputs
        c = constants
        with np.errstate(divide="ignore"):
            size = c["alpha_N"] / c["alpha_D"] * (np.log(c["N_c"]) - np.log(N))
            data = np.log(c["D_c"]) - np.log(D)
        return np.exp(c["alpha_D"] * np.logaddexp(size, data))

    def equation(self, say: Say) -> str:
        power = f"({say('alpha_N')} / {say('alpha_D')})"
        return f"L(N, D) = [({say('N_c')} / N)^{power} + {say('D_c')} / D]^{say('alpha_D')}"

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        """In closed form: N^(1 + r) = r N_c^r C / (k D_c), with r = alpha_N / alpha_D and C = k N D."""
        c, spent = constants, floats(flops) / flops_per_token
        r = c["alpha_N"] / c["alpha_D"]
        with np.errstate(divide="ignore", invalid="ignore"):  # a line that vanished sends N to an end
            N = np.exp((np.log(r * spent) + r * np.log(c["N_c"]) - np.log(c["D_c"])) / (1.0 + r))
            return N, spent / N, self.evaluate(c, N, spent / N)

    def size_exponent(self, constants: Constants) -> Any:
        """alpha_D / (alpha_N + alpha_D)."""
        return np.divide(constants["alpha_D"], np.add(constants["alpha_N"], constants["alpha_D"]))

    # The law as the solver sees it.

    def _accept(self, found: Any) -> None:
        super()._accept(found)
        if self.theta_[0] >= self.problem_.upper[0]:  # one coordinate says which of the two lines is gone
            self.degenerate_[self.degenerate_.index("N_c")] = "D_c"

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        """Coordinates: D_c is the logarithm of the line of the data at the mean log D, N_c how far the other lies above
        it there, in units of alpha_D (uncentred: log D_c, log N_c); and the exponents.
        """
        log_n, log_d = np.log(inputs[0]), np.log(inputs[1])
        x0, y0 = (float(log_n.mean()), float(log_d.mean())) if centred else (0.0, 0.0)
        x, y, target = log_n - x0, log_d - y0, np.log(observed)
        at = {name: i for i, name in enumerate(COORDINATES)}

        def constants(theta: Array) -> Columns:
            above, alpha_N, data, alpha_D = theta.T
            if not centred:
                log_N_c, log_D_c = above, data
            else:
                log_N_c, log_D_c = x0 + (data + alpha_D * above) / alpha_N, y0 + data / alpha_D
                log_N_c = np.where(above <= -VANISHED, -np.inf, log_N_c)
                log_D_c = np.where(above >= VANISHED, -np.inf, log_D_c)
            N_c, D_c = (np.exp(np.minimum(log, FAR)) for log in (log_N_c, log_D_c))
            return {"N_c": N_c, "D_c": D_c, "alpha_N": alpha_N.copy(), "alpha_D": alpha_D.copy()}

        low, high = (float(target.min()) - WIDE, float(target.max()) + WIDE) if centred else (-FAR, FAR)
        apart = VANISHED if centred else FAR
        return Problem(
            form=LogSumTerms(lambda v, second: [_term(v, x, y, centred, second)], at, len(x)),
            target=target,
            bounds={"N_c": (-apart, apart), "alpha_N": EXPONENT_BOUNDS, "D_c": (low, high), "alpha_D": EXPONENT_BOUNDS},
            logarithmic=("N_c", "D_c"),
            axes=np.stack([log_n, log_d]),
            starts=lambda weights, keep: _starts(x, y, target, centred, weights, keep),
            constants=constants,
        )


def _term(v: Mapping[str, Array], x: Array, y: Array, centred: bool, with_second: bool) -> Term:
    """The log loss: with s = alpha_D, the power sum of the two lines' logarithms g and h."""
    N_c, alpha_N, D_c, s = (v[name] for name in COORDINATES)
    one = np.ones_like(s)
    # The lines, how each moves with the coordinates, and the second derivatives that are not zero.
    if centred:
        g_by = {"N_c": s, "alpha_N": -x, "D_c": one, "alpha_D": N_c}
        g = Term(D_c + s * N_c - alpha_N * x, g_by, {("N_c", "alpha_D"): one})
        h = Term(D_c - s * y, {"D_c": one, "alpha_D": -y})
    else:
        g = Term(alpha_N * (N_c - x), {"N_c": alpha_N, "alpha_N": N_c - x}, {("N_c", "alpha_N"): one})
        h = Term(s * (D_c - y), {"D_c": s, "alpha_D": D_c - y}, {("D_c", "alpha_D"): one})
    return power_sum(g, h, s, "alpha_D", COORDINATES, with_second)


def _starts(x: Array, y: Array, target: Array, centred: bool, weights: Array, keep: int | None) -> Array:
    """Starts (P, G, 4) from a grid of exponents: given these, loss^(1 / alpha_D) is linear in the two amplitudes."""
    ratio, alpha_D = (grid.ravel() for grid in np.meshgrid(RATIO_GRID, EXPONENT_GRID, indexing="ij"))
    powered = (target - target.mean())[None, :] / alpha_D[:, None]
    basis = np.stack([np.exp(-ratio[:, None] * x - powered), np.exp(-y - powered)], axis=2)
    # Divided by the powered loss, a residual is 1 / alpha_D times one in log loss to first order.
    amplitudes, error = variable_projection(basis, np.ones_like(x), weights)
    error = np.where((amplitudes <= 0).any(axis=2), 4.0, 1.0) * error * alpha_D**2
    log = np.log(np.maximum(amplitudes, 0.1))
    ratio, alpha_D = np.broadcast_to(ratio, error.shape), np.broadcast_to(alpha_D, error.shape)
    data = alpha_D * log[..., 1] + target.mean()
    above = log[..., 0] - log[..., 1]
    if not centred:
        above, data = (data + alpha_D * above) / (ratio * alpha_D), data / alpha_D
    starts = np.stack([above, ratio * alpha_D, data, alpha_D], axis=2)
    return least_starts(starts, error, keep or STARTS)
