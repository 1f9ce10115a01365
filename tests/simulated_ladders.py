"""Simulated ladders of two variants whose compute multiplier is known, for the tests of `fit.compare`.

The true law is the fitted form or one of three others (a different sum, an interaction, exponents that bend), with
random constants. Branches of one trunk share noise, and so do runs with the same seed of both variants. The variant has
the loss of the base at k(C) times the compute, in N, in D, or in both, so k(C) is its exact multiplier.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from isoflop import fit

FORMS = ("chinchilla", "sum", "interaction", "bent")
# Number of sizes, values of D, and seeds; noise of the log loss.
DESIGNS = ((3, 2, 2, 0.01), (3, 2, 2, 0.002), (3, 4, 2, 0.005), (4, 3, 3, 0.005), (5, 4, 2, 0.01), (5, 4, 4, 0.002))
FAR = 10.0  # times the largest run


@dataclass(frozen=True)
class Case:
    """One simulated comparison: true law, design, and the variant's effect (k, its trend, side)."""

    form: str
    design: tuple[int, int, int, float]
    effect: tuple[float, float, str]
    seeds_shared: bool = True
    gap: float = 0.0  # the variant's log E is lower by this


def simulate(case: Case, rng: np.random.Generator) -> tuple[fit.RunTable, fit.RunTable]:
    """Return the base's runs and the variant's."""
    sizes, tokens, seeds, noise = case.design
    k, trend, side = case.effect
    N = 1.5e4 * 2.0 ** np.arange(sizes)
    ratio = 20 * 2.0 ** (np.arange(tokens) * (2 if tokens == 2 else 1))
    n, d = (values.ravel() for values in np.meshgrid(np.log(N), np.log(ratio), indexing="ij"))
    d = d + n
    size = np.repeat(np.arange(sizes), tokens)
    loss = truth(case.form, rng)
    share = {"both": 0.5, "D": 1.0, "N": 0.0}[side]
    # The base at budget c equals the variant at c - log k(c).
    variant_point = [
        (v.mean() + (v - v.mean() + math.log(k) * part) / (1 - trend)) for v, part in ((n, 1 - share), (d, share))
    ]
    losses = (loss(n, d), loss(*variant_point))
    trunk, unshared = rng.standard_normal((2, seeds, sizes)), rng.standard_normal((2, seeds, len(n)))
    common, shared = (rng.standard_normal((seeds, width)) for width in (sizes, len(n)))
    tables = []
    for arm, clean in enumerate(losses):
        rows = []
        for seed in range(seeds):
            shared_variance = 0.5 if case.seeds_shared else 0.0
            trunk_noise = math.sqrt(shared_variance) * common[seed] + math.sqrt(1 - shared_variance) * trunk[arm, seed]
            run_noise = math.sqrt(shared_variance) * shared[seed] + math.sqrt(1 - shared_variance) * unshared[arm, seed]
            error = noise * (math.sqrt(0.6) * trunk_noise[size] + math.sqrt(0.4) * run_noise)
            label = seed if case.seeds_shared or not arm else seeds + seed
            rows.append({"N": np.exp(n), "D": np.exp(d), "loss": clean * np.exp(error), "seed": label})
        table = pd.concat([pd.DataFrame(row) for row in rows], ignore_index=True)
        tables.append(fit.read_table(table.assign(run_id=[f"{arm}-{i}" for i in range(len(table))])))
    return tables[0], tables[1]


def truth(form: str, rng: np.random.Generator) -> Callable[[Any, Any], Any]:
    """Return a law of log N and log D with random constants."""
    E, alpha, beta = rng.uniform(0.5, 1.7), *rng.uniform(0.25, 0.6, 2)
    a, b = np.log(rng.uniform(0.2, 0.6, 2))

    def loss(n: Any, d: Any) -> Any:
        n, d = n - math.log(3e4), d - math.log(3e4 * 60)
        size_term, data_term = a - alpha * n, b - beta * d
        if form == "sum":
            return E + np.exp(0.7 * np.logaddexp(size_term / 0.7, data_term / 0.7))
        if form == "interaction":
            return E + np.exp(size_term) + np.exp(data_term) + 0.1 * np.exp((alpha * -n - beta * d) / 2)
        if form == "bent":
            size_term, data_term = (
                size_term - 0.033 * np.log1p(np.exp(3 * n)),
                data_term + 0.04 * np.log1p(np.exp(2 * d)),
            )
        return E + np.exp(size_term) + np.exp(data_term)

    return loss


def covered(case: Case, rounds: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return whether each round's intervals contain the truth: middle, largest run, extrapolation and trend."""
    rng = np.random.default_rng([seed, zlib.crc32(repr(case).encode())])
    k, trend, _ = case.effect
    held: dict[str, list[float]] = {name: [] for name in ("middle", "largest", "far", "trend", "half", "free")}
    for _ in range(rounds):
        base, variant = simulate(case, rng)
        top = float(base.flops.max())
        comparison = fit.compare(base, variant, [FAR * top])
        center = comparison.multipliers[1]
        assert center.ci is not None
        for name, multiplier in zip(("middle", "largest", "far"), comparison.multipliers[1:], strict=True):
            held[name].append(holds(multiplier.ci, k * (multiplier.flops / center.flops) ** trend))
        held["trend"].append(holds(comparison.trend_ci, trend))
        held["half"].append(math.log(center.ci[1] / center.ci[0]) / 2)
        held["free"].append(comparison.E == "free")
    return {name: np.array(values) for name, values in held.items()}


def holds(ends: tuple[float, float] | None, true: float) -> bool:
    return ends is not None and ends[0] <= true <= ends[1]
