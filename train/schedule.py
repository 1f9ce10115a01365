"""Learning rate over a run, always matched to that run's own D.

A schedule that is not matched, or a warm-up that is long for the small runs, bends the fitted law
(Hoffmann et al. 2022, section 3; Porian et al. 2024), so both are impossible here.
"""

from __future__ import annotations

import math

from .config import RunConfig
from .flops import count_parameters


def warmup_steps(config: RunConfig) -> int:
    """Steps of linear warm-up: as many tokens as parameters (or those stated), never more than a share of the run.

    That it grows with N and not with D is what small runs need (Porian et al. 2024, section 3.2), and what lets runs
    of one N and several D share a trunk.
    """
    tokens = config.schedule.warmup_tokens
    if tokens is None:
        tokens = config.schedule.warmup_per_parameter * count_parameters(config.model).N_total
    return int(min(tokens / config.batch_tokens, config.schedule.warmup_max_share * config.steps))


def decay_steps(config: RunConfig) -> int:
    """Steps of the WSD cooldown at the end of the run."""
    return round(config.schedule.decay_share * config.steps) if config.schedule.kind == "wsd" else 0


def learning_rate_factor(config: RunConfig, step: int) -> float:
    """Share of the peak learning rate that step (0-based) uses; a pure function of the config and the step."""
    warmup, final, steps = warmup_steps(config), config.schedule.final_share, config.steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule.kind == "cosine":
        progress = (step - warmup) / max(1, steps - warmup)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = decay_steps(config)
    if step < steps - decay:
        return 1.0
    # 1-sqrt beats linear and cosine cooldowns (Haegele et al. 2024, section 3.2).
    progress = (step - (steps - decay) + 1) / (decay + 1)
    return final + (1 - final) * (1 - math.sqrt(progress))
