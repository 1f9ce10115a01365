"""The critical batch size: how many tokens and steps a loss costs at each batch, and where the two trade evenly.

    E = E_min (1 + batch / B_crit),   S = S_min (1 + B_crit / batch),   B_crit = E_min / S_min

so that (S / S_min - 1) (E / E_min - 1) = 1. E = batch S, and the batch is chosen, so a run has one error: the law is
fitted to log E. Every run must be at its best settings for its batch, and end its schedule where its tokens are read.
Zhang et al. call critical what costs 20 % more than E_min: 0.2 B_crit.

McCandlish et al. 2018 (arXiv:1812.06162), equation 2.11; Kaplan et al. 2020 (arXiv:2001.08361), equations 1.4 and 5.1;
Zhang et al. 2024 (arXiv:2410.21676), for a critical batch by its overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, positive, same_length
from ..laws.law import Problem, amplitude
from ..solver.forms import LogSumExp
from ..solver.solver import variable_projection
from .hyperparameters import DesignedLaw, log_design

REACH = np.log(1e6)  # how far beyond the batches tried B_crit may lie before one of the two costs is called zero


class CriticalBatchLaw(DesignedLaw):
    """E = E_min + S_min batch: tokens E to one loss at each batch (tokens).

    After `fit`: E_min_ (tokens), S_min_ (steps), B_crit_ (tokens); `degenerate_` names what the batches say nothing
    about.
    """

    form = "critical-batch"
    title = "the critical batch law"
    names = ("E_min", "S_min", "B_crit")
    inputs = ("batch",)
    output = "tokens"
    E_min_: float
    S_min_: float
    B_crit_: float

    def __init__(self, objective: str = "squares", delta: float = 1e-3) -> None:
        super().__init__(objective, delta)

    def fit(
        self, batch: ArrayLike, tokens: ArrayLike, weight: ArrayLike | None = None, loss_se: ArrayLike | None = None
    ) -> Self:
        """Batch and tokens to the loss, (n,), both counted in tokens; from pairs of steps and tokens, `fit(tokens /
        steps, tokens)`.
        """
        return self._fit((batch, tokens), weight, loss_se)

    @staticmethod
    def evaluate(constants: Mapping[str, Any], *inputs: Any) -> Any:
        """E_min + S_min batch at inputs (batch,)."""
        return constants["E_min"] + constants["S_min"] * inputs[0]

    def equation(self, say: Callable[[str], str]) -> str:
        return f"tokens = {say('E_min')} (1 + batch / {say('B_crit')}), steps >= {say('S_min')}"

    # The law as the solver sees it.

    def _designs(self) -> list[Array]:
        return [log_design([self.data_["batch"]], len(self.weight_))]

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        distinct = len(np.unique(np.round(np.log(inputs[0]), 6)))
        if distinct < 3:
            raise InputError(f"{self.title} needs at least 3 different batches; there are {distinct}.")

    def _problem(self, inputs: tuple[Array, ...], observed: Array, centred: bool = True) -> Problem:
        log_batch, target = np.log(inputs[0]), np.log(observed)
        middle = float(log_batch.mean()) if centred else 0.0
        one = np.ones((len(target), 1))
        floor = float(target.min()) - REACH - np.ptp(log_batch) if centred else -500.0
        ceiling = float(target.max()) + 2.0 if centred else 500.0
        lower, upper = np.full(2, floor), np.full(2, ceiling)

        def constants(theta: Array) -> dict[str, Array]:
            E_min, S_min = amplitude(theta[:, 0], floor), amplitude(theta[:, 1], floor, -middle)
            with np.errstate(over="ignore", divide="ignore"):
                return {"E_min": E_min, "S_min": S_min, "B_crit": E_min / S_min}

        def starts(weights: Array, keep: int | None) -> Array:
            basis = np.stack([np.ones_like(target), np.exp(log_batch - middle)], axis=1)[None]
            amplitudes, _ = variable_projection(basis / observed[None, :, None], np.ones_like(target), weights)
            least = 1e-3 * observed.min()
            return np.log(np.maximum(amplitudes, least))

        return Problem(
            form=LogSumExp(2, [((0,), one), ((1,), one, log_batch - middle)]),
            target=target,
            lower=lower,
            upper=upper,
            coordinates=("E_min", "S_min"),
            logarithmic=(True, True),
            axes=log_batch[None, :],
            starts=starts,
            constants=constants,
        )


def tokens_to_loss(tokens: ArrayLike, loss: ArrayLike, target: float) -> float:
    """Tokens at which one run's loss (n,) first reaches `target`, linear in the logarithms; NaN where it never does."""
    tokens, loss = positive("tokens", tokens), positive("loss", loss)
    same_length(tokens=tokens, loss=loss)
    order = np.argsort(tokens)
    x, y = np.log(tokens[order]), np.log(loss[order] / positive("target", [target]))
    reached = np.flatnonzero(y <= 0)
    if reached.size == 0:
        return float("nan")
    i = int(reached[0])
    if i == 0 and y[0] < 0:
        raise InputError(f"target is {target:g} and the run is below it from its first point; choose a lower one.")
    if y[i] == 0:
        return float(np.exp(x[i]))
    return float(np.exp(x[i - 1] + (x[i] - x[i - 1]) * y[i - 1] / (y[i - 1] - y[i])))
