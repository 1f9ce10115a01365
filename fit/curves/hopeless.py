"""The probability that a run of a tune ends below the best of its group, from its loss so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import Array

YOUNG = 0.15  # share of its tokens below which a run is not judged: a warm-up takes up to 0.1
RECENT = 0.1  # share of a run's tokens so far whose losses are averaged
NEAR = 0.1  # log loss above the best of a group at which a finished run counts half
# Prior, worth NOISE_RUNS finished runs: SLOPE is the part of a difference that remains at the end, and NOISE (1 - s) +
# LAST_NOISE the error of a final log loss predicted at share s. Chosen on one tune for the FLOPs saved, tested on
# another by benchmarks/hopeless.py of commit b30938e.
SLOPE, SLOPE_WIDTH, NOISE, LAST_NOISE, NOISE_RUNS = 0.9, 0.3, 0.02, 0.003, 8.0


@dataclass(frozen=True)
class Trial:
    """A run of a tune. Runs of one group differ in learning rates and batch only."""

    group: Hashable
    share: Array  # (points,) rising, of its tokens
    loss: Array  # (points,) training or held-out loss, the same kind for all runs
    final: float | None = None  # final loss for the comparison; None: not finished

    def level(self, share: float) -> float | None:
        """Return the mean log loss just before `share` of the tokens, or None without losses there."""
        about = np.linspace((1 - RECENT) * share, share, 16)
        if not len(self.share) or self.share[0] > about[0] or self.share[-1] < about[-2]:
            return None
        return float(np.interp(about, self.share, np.log(self.loss)).mean())


class Chance(NamedTuple):
    probability: float  # that it ends below the best finished run of its group
    loss: float  # expected final loss
    share: float  # of its tokens so far


def chance_to_win(run: Trial, finished: Sequence[Trial]) -> Chance | None:
    """Estimate the chance that a run ends below the best finished run of its group.

    None if the run is too young or its group has no finished run. Log final loss is linear in the log loss at the same
    share of tokens, plus a level per group, by Bayesian regression (Gelman et al. 2013, Bayesian Data Analysis, ch.
    14).
    """
    from scipy.special import stdtr

    share = float(run.share[-1]) if len(run.share) else 0.0
    level_now = run.level(share)
    pairs, ends = list[tuple[Trial, float, float]](), dict[Hashable, float]()  # logarithms
    for trial in finished:
        if trial.final is not None and (level := trial.level(share)) is not None:
            end = float(np.log(trial.final))
            pairs.append((trial, level, end))
            ends[trial.group] = min(end, ends.get(trial.group, end))
    if share < YOUNG or level_now is None or run.group not in ends:
        return None
    groups, noise = list(ends), NOISE * (1 - share) + LAST_NOISE

    def row(trial: Trial, level: float) -> list[float]:
        return [level, *(float(trial.group == group) for group in groups)]

    # The prior is an additional row, scaled to the noise; levels of groups have no prior.
    prior = np.array([[noise / SLOPE_WIDTH, *[0.0] * len(groups)]])
    y = np.array([end for _, _, end in pairs])
    weight = 1 / np.hypot(1, (y - [ends[trial.group] for trial, _, _ in pairs]) / NEAR)
    X = np.vstack([weight[:, None] * [row(trial, level) for trial, level, _ in pairs], prior])
    y = np.concatenate([weight * y, [noise / SLOPE_WIDTH * SLOPE]])
    inverse = np.linalg.pinv(X.T @ X)
    coefficients = inverse @ X.T @ y
    degrees = NOISE_RUNS + max(float((weight**2).sum()) - len(groups), 0.0)
    scale2 = (NOISE_RUNS * noise**2 + float(((y - X @ coefficients) ** 2).sum())) / degrees
    x = np.array(row(run, level_now))
    expected, error = float(x @ coefficients), float(np.sqrt(scale2 * (1 + x @ inverse @ x)))
    best = ends[run.group]
    return Chance(float(stdtr(degrees, (best - expected) / error)), float(np.exp(max(expected, best))), share)
