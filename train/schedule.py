"""The learning rate over a run, always matched to that run's D.

An unmatched schedule, or a warm-up that is long for small runs, bends the fitted law (Hoffmann et al. 2022, section 3;
Porian et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .config import RunConfig, identity
from .flops import count_parameters


def warmup_steps(config: RunConfig) -> int:
    """Return the number of warm-up steps: by default one token per active parameter, within `warmup_max_share`."""
    schedule = config.schedule
    tokens: float | None = schedule.warmup_tokens
    if tokens is None:
        tokens = schedule.warmup_per_parameter * count_parameters(config.model).N_active
    return int(min(tokens / config.batch_tokens, schedule.warmup_max_share * config.steps))


def decay_steps(config: RunConfig) -> int:
    return round(config.schedule.decay_share * config.steps) if config.schedule.kind == "wsd" else 0


def trunk_steps(config: RunConfig) -> int:
    """Return how many first steps of a run a longer run of the same model can reuse: the steps before the decay.

    The last step never counts. The schedules `cosine` and `points` give 0.
    """
    if config.schedule.kind in ("cosine", "points"):
        return 0
    return min(config.steps - decay_steps(config), config.steps - 1)  # never the last, which has its own score


def same_until(first: RunConfig, second: RunConfig) -> int:
    """Return how many steps from the start are the same, bit for bit, in two runs.

    Runs that differ only in D, and have equally many warm-up steps, share the steps before the earlier decay.
    """
    if identity(replace(first, tokens=0)) != identity(replace(second, tokens=0)):
        return 0
    if first.tokens == second.tokens:
        return first.steps
    if warmup_steps(first) != warmup_steps(second):
        return 0
    return min(trunk_steps(first), trunk_steps(second))


def learning_rate_factor(config: RunConfig, step: int) -> float:
    """Return the learning rate of a step (0-based), as a share of the peak."""
    warmup, final, steps = warmup_steps(config), config.schedule.final_share, config.steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule.kind == "points":
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return _between(config.schedule.shares or [0, 1], config.schedule.factors or [1, 1], progress)
    if config.schedule.kind == "cosine":
        progress = (step - warmup) / max(1, steps - warmup)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = decay_steps(config)
    if step < steps - decay:
        return 1.0
    # 1-sqrt beats linear and cosine cooldowns (Haegele et al. 2024, section 3.2).
    progress = (step - (steps - decay) + 1) / (decay + 1)
    return final + (1 - final) * (1 - math.sqrt(progress))


def _between(shares: Sequence[float], factors: Sequence[float], share: float) -> float:
    number = max(i for i, begin in enumerate(shares[:-1]) if begin <= share)
    (begin, end), (low, high) = shares[number : number + 2], factors[number : number + 2]
    return high if end == begin else low + (high - low) * (share - begin) / (end - begin)
