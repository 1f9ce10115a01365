"""The runs of a tune: Sobol points over learning rate, batch and weight decay at a few sizes, in rungs of growing D.

Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) of a region instead of single settings, for the best
ones move with D: a rung has half the runs of the one before, in half the volume, around the best quarter of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...train.config import ModelConfig, RunConfig
from ...train.errors import UserError
from ...train.flops import count_parameters, training_flops_per_token
from ..config import PowerRule, TuneGrid
from . import architectures
from .tuning import Tuner, decaying_rate

LEAST_RUNS, MOST_RUNS = 16, 128  # of a size in the first rung
KEPT = 0.25  # of a rung's runs, around whose settings the next rung lies
BATCH_POWER = 0.383  # with which the best batch is expected to grow from rung to rung (Bergsma et al. 2025)
LEAST_STEPS = 25  # of a run with the largest batch
TIMESCALE = 0.3  # the middle of what is tried
VARIED = ("optimizer.learning_rate", "optimizer.batch_size", "optimizer.weight_decay")
FASTEST = 4.0  # steps in which weights are forgotten, at least


class Settings(NamedTuple):
    """What a run of a tune varies."""

    learning_rate: float
    batch: float  # tokens
    timescale: float  # of weight decay, tau = B / (eta lambda D), eta the rate of matrices


Tried = Mapping[tuple[int, int], Sequence[tuple[Settings, float]]]  # settings and losses by N_total and D


def rung_runs(
    grid: TuneGrid, base: RunConfig, tuner: Tuner, rung: int = 0, tried: Tried | None = None
) -> Iterator[RunConfig]:
    """The runs of one rung, all with one seed, for only their differences count; `tried`: what those before came to."""
    from scipy.stats import qmc

    count, half = _runs_per_size(grid, base) >> rung, math.log(grid.span) * 0.5 ** (rung / 3)
    for model in tune_models(grid, base):
        N, tokens = count_parameters(model).N_active, rung_tokens(grid, base, model, rung)
        middle = np.log([base.optimizer.learning_rate, base.batch_tokens, TIMESCALE])
        if rung:
            before = rung_tokens(grid, base, model, rung - 1)
            best = sorted((tried or {}).get((N, before), ()), key=lambda run: run[1])
            if not best:
                continue  # none of these runs came to its end
            middle = np.log([settings for settings, _ in best[: math.ceil(KEPT * len(best))]]).mean(axis=0)
            middle[1] += BATCH_POWER * math.log(tokens / before)
        points = qmc.Sobol(len(middle), seed=base.seed + 7919 * rung + N).random_base2((count - 1).bit_length())
        for rate, batch, timescale in np.exp(middle + half * (2 * points[:count] - 1)).tolist():
            least = max(base.data.sequence_length, tokens / grid.max_steps)
            batch = max(least, min(batch, tokens / LEAST_STEPS))
            rules = replace(
                tuner.rules,
                learning_rate=PowerRule(rate),
                batch_tokens=PowerRule(batch),
                timescale=PowerRule(max(timescale, FASTEST * batch / tokens)),
                min_steps=LEAST_STEPS,
                keep=[name for name in tuner.rules.keep if name not in VARIED],
                horizon="run",
            )
            yield Tuner(rules).tuned(replace(base, model=model, tokens=tokens, seed=base.seed + rung))


def tune_models(grid: TuneGrid, base: RunConfig) -> list[ModelConfig]:
    return [architectures.nearest_model(base.model, size) for size in sorted(grid.sizes)]


def rung_tokens(grid: TuneGrid, base: RunConfig, model: ModelConfig, rung: int) -> int:
    """D of a rung: a whole number of steps of every batch, for runs of a size are compared at one D."""
    first, now = grid.tokens_per_parameter[0], grid.tokens_per_parameter[rung]
    unit = base.data.sequence_length * 3 * 2 ** math.ceil(math.log2(base.optimizer.batch_size * grid.span))
    return max(1, round(first * count_parameters(model).N_active / unit)) * round(now / first) * unit


def _runs_per_size(grid: TuneGrid, base: RunConfig) -> int:
    """Of the first rung, as the FLOPs pay for."""
    ratios = grid.tokens_per_parameter
    if not grid.sizes or not ratios or any(longer < 2 * one for one, longer in pairwise(ratios)):
        raise UserError(
            f"grid.sizes is {grid.sizes} and grid.tokens_per_parameter is {ratios}; a tune needs a size, and rungs "
            "that rise at least twofold"
        )
    assert grid.flops_budget is not None
    cost = sum(
        training_flops_per_token(model, base.data.sequence_length) * rung_tokens(grid, base, model, rung) / 2**rung
        for model in tune_models(grid, base)
        for rung in range(len(grid.tokens_per_parameter))
    )
    if grid.flops_budget < LEAST_RUNS * cost:
        raise UserError(
            f"grid.flops_budget is {grid.flops_budget:.3g}, and this design needs {LEAST_RUNS * cost:.3g} for "
            f"{LEAST_RUNS} runs per size in its first rung; give at least that, or smaller grid.sizes or "
            "grid.tokens_per_parameter"
        )
    return min(MOST_RUNS, int(grid.flops_budget / cost))


def settings_of(run: RunConfig) -> Settings:
    """What a run of a tune tried."""
    forgotten = decaying_rate(run.optimizer, run.model.width) * run.optimizer.weight_decay * run.steps
    return Settings(run.optimizer.learning_rate, run.batch_tokens, 1.0 / forgotten)
