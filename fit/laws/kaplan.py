"""Kaplan's joint law of N and D.

It has no irreducible loss. N is Kaplan's count, without embeddings.

Kaplan et al. 2020 (arXiv:2001.08361), equation 1.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, floats
from ..solver.forms import LogSumExp, mix
from .law import LossLaw, Problem, centred, projected_starts

EXPONENT_GRID = np.geomspace(0.03, 0.8, 8)
RATIO_GRID = np.geomspace(0.25, 4.0, 8)  # of alpha_N to alpha_D; far from one, the power mean is a corner
STARTS = 32  # of a full fit: the better half of the grid
EXPONENT_BOUNDS = (0.01, 3.0)  # over three decades an exponent below this changes the loss by less than 7 %
VANISHED = 12.0  # a line with a share below exp(-12) at the middle of the data is stored as zero
WIDE = 20.0  # largest distance of the line of the data from the losses, in log loss
FAR = 700.0  # largest log N_c and log D_c that a float can hold


class KaplanLaw(LossLaw):
    """L(N, D) = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D.

    After `fit`: N_c_, D_c_ (parameters and tokens), alpha_N_, alpha_D_.
    """

    form = "kaplan"
    title = "the law [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D"
    names = ("N_c", "D_c", "alpha_N", "alpha_D")
    formula = "L(N, D) = [({N_c} / N)^({alpha_N} / {alpha_D}) + {D_c} / D]^{alpha_D}"
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

    def optimum(
        self, flops: ArrayLike, constants: Constants, flops_per_token: float = 6.0
    ) -> tuple[Array, Array, Array]:
        c, spent = constants, floats(flops) / flops_per_token
        r = c["alpha_N"] / c["alpha_D"]
        with np.errstate(divide="ignore", invalid="ignore"):  # a line that vanished sends N to an end
            N = np.exp((np.log(r * spent) + r * np.log(c["N_c"]) - np.log(c["D_c"])) / (1.0 + r))
            return N, spent / N, self.evaluate(c, N, spent / N)

    def size_exponent(self, constants: Constants) -> Any:
        return np.divide(constants["alpha_D"], np.add(constants["alpha_N"], constants["alpha_D"]))

    # The law as the solver sees it.

    def _accept(self, solution: Any) -> None:
        super()._accept(solution)
        if (
            self.theta_[0] >= self.problem_.upper[0]
        ):  # one coordinate serves both lines; its upper bound means that the one of D vanished
            self.degenerate_[self.degenerate_.index("N_c")] = "D_c"

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        (x, x0), (y, y0) = (centred(column) for column in inputs)
        target = np.log(observed)
        low, high = float(target.min()) - WIDE, float(target.max()) + WIDE
        bounds = {"N_c": (-VANISHED, VANISHED), "alpha_N": EXPONENT_BOUNDS}
        bounds |= {"D_c": (low, high), "alpha_D": EXPONENT_BOUNDS}
        at = {name: i for i, name in enumerate(bounds)}

        def constants(theta: Array) -> Columns:
            above, alpha_N, data, alpha_D = theta.T
            log_N_c, log_D_c = x0 + (data + alpha_D * above) / alpha_N, y0 + data / alpha_D
            log_N_c = np.where(above <= -VANISHED, -np.inf, log_N_c)
            log_D_c = np.where(above >= VANISHED, -np.inf, log_D_c)
            N_c, D_c = (np.exp(np.minimum(log, FAR)) for log in (log_N_c, log_D_c))
            return {"N_c": N_c, "D_c": D_c, "alpha_N": alpha_N.copy(), "alpha_D": alpha_D.copy()}

        def starts(weights: Array, keep: int | None) -> Array:
            # Given the exponents, loss^(1 / alpha_D) is linear in the two amplitudes.
            ratio, alpha_D = (grid.ravel() for grid in np.meshgrid(RATIO_GRID, EXPONENT_GRID, indexing="ij"))
            power = (target - target.mean())[None, :] / alpha_D[:, None]
            lines = [np.exp(-ratio[:, None] * x - power), np.exp(-y - power)]

            def coordinates(log: Array) -> dict[str, Array]:
                data = alpha_D * log[..., 1] + target.mean()
                return {"N_c": log[..., 0] - log[..., 1], "alpha_N": ratio * alpha_D, "D_c": data, "alpha_D": alpha_D}

            # Relative to the powered loss, a residual is 1 / alpha_D times one in log loss to first order.
            scale = alpha_D**2
            return projected_starts(at, coordinates, np.stack(lines, 2), weights, keep or STARTS, None, scale, 0.1)

        return Problem(_Lines(x, y), target, bounds, np.log(np.stack(inputs)), starts, constants)


class _Lines(LogSumExp):
    """f = D_c - s y + s log(1 + e^g), g = N_c - alpha_N x / s + y, s = alpha_D; each coordinate is a term."""

    with_square = False

    def __init__(self, x: Array, y: Array) -> None:
        super().__init__(4, [((i,), np.ones((len(x), 1))) for i in range(4)])
        self.x, self.y = x, y

    def value(self, theta: Array) -> tuple[Array, list[Array]]:
        N_c, alpha_N, D_c, s = theta.T[:, :, None]
        slope = alpha_N / s * self.x
        share, _, log = mix(N_c - slope + self.y)
        log -= self.y
        first = [s * share, -self.x * share, np.ones_like(share), log + share * slope]
        return D_c + s * log, [*first, share, slope, s]

    def bends(self, cache: list[Array]) -> dict[tuple[int, int], Array]:
        share, slope, s = cache[-3:]
        turn, curvature = {0: s, 1: -self.x, 3: slope}, share * (1.0 - share) / s
        bends = {(i, j): curvature * turn[i] * turn[j] for i in turn for j in turn if i <= j}
        bends[0, 3] += share
        return bends
