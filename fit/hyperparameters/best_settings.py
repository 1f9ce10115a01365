"""What the constants of a hyperparameter surface say: the best settings at (N, D), and the loss around them.

Special here: every function takes constants as name -> value and broadcasts, so it serves one law and all its bootstrap
draws alike. Names are as in learning_rate_k, batch_p_N, and shape_21 for the coefficient of u^2 v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Array

TARGETS = ("learning_rate", "batch")


@dataclass(frozen=True)
class BestSettings:
    """Settings at N, D (any shape, broadcast); None for what the sweep did not vary. Intervals (..., 2) at `level`
    where the law has draws.
    """

    N: Any
    D: Any
    learning_rate: Any = None
    batch: Any = None
    learning_rate_interval: Array | None = None
    batch_interval: Array | None = None
    level: float = 0.95


def inputs_of(N: Any, D: Any) -> dict[str, Any]:
    """What a law of the settings may depend on."""
    return {"N": N, "D": D, "C": 6.0 * N * D}


def best_of(constants: Mapping[str, Any], N: Array, D: Array, batch: Array | None = None) -> dict[str, Array]:
    """The best of each setting that the constants know; for a given batch, the learning rate best with it, NaN where
    the loss has no minimum there.
    """
    known, found = inputs_of(N, D), {}
    for target in TARGETS:
        if f"{target}_k" in constants:
            log = np.log(constants[f"{target}_k"]) + np.zeros_like(known["C"])
            for name, value in known.items():
                log = log + constants.get(f"{target}_p_{name}", 0.0) * np.log(value)
            with np.errstate(over="ignore"):
                found[target] = np.exp(log)
    if batch is None:
        return found
    v = np.log(batch / found["batch"])
    c = {name: constants.get(f"shape_{name}", 0.0) for name in ("20", "11", "30", "21", "12")}
    # dq/du = A u^2 + B u + C; of its roots the one that is 0 at v = 0, written so that A = 0 divides by nothing.
    A, B, C = 3 * c["30"], 2 * (c["20"] + c["21"] * v), (c["11"] + c["12"] * v) * v
    with np.errstate(invalid="ignore", divide="ignore"):
        u = np.where(B > 0, -2 * C / (B + np.sqrt(B**2 - 4 * A * C)), np.nan)
    rate = found["learning_rate"] * np.exp(u)
    return {"learning_rate": rate, "batch": np.broadcast_to(batch, rate.shape)}


def excess_terms(constants: Mapping[str, Any], N: Any, D: Any, *settings: Any) -> tuple[Any, Any]:
    """The quadratic and the cubic part of q, the log of loss over best loss, at settings in the order of TARGETS."""
    best = best_of(constants, np.asarray(N, dtype=np.float64), np.asarray(D, dtype=np.float64))
    distances = [np.log(value / found) for value, found in zip(settings, best.values(), strict=True)]
    parts = {2: np.zeros(()), 3: np.zeros(())}
    for name, coefficient in constants.items():
        if name.startswith("shape_"):
            powers = [int(digit) for digit in name.removeprefix("shape_")]
            term = coefficient
            for distance, power in zip(distances, powers, strict=True):
                term = term * distance**power
            parts[sum(powers)] = parts[sum(powers)] + term
    return parts[2], parts[3]


def convex(constants: Mapping[str, float]) -> bool:
    """Whether the quadratic part of q has a minimum."""
    if "shape_2" in constants:
        return constants["shape_2"] > 0
    a, b, c = (constants[f"shape_{name}"] for name in ("20", "11", "02"))
    return a > 0 and 4 * a * c > b**2
