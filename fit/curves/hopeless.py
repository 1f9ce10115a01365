"""Whether a run of a tune can still win: how likely it ends below the best of its group, from its loss so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import Array

YOUNG = 0.15  # share of its tokens below which a run is not judged: a warm-up takes up to 0.1
RECENT = 0.1  # of a run's tokens so far, whose losses say where it is
NEAR = 0.1  # log loss above the best of a group at which a finished run teaches half: only near ones decide
# What is known before finished runs say more, as of NOISE_RUNS of them: which part of a difference is left in the end,
# and by how much a final log loss is missed, at a share s NOISE (1 - s) + LAST_NOISE. Chosen on one tune for the FLOPs
# saved, tried on another by benchmarks/hopeless.py of commit b30938e.
SLOPE, SLOPE_WIDTH, NOISE, LAST_NOISE, NOISE_RUNS = 0.9, 0.3, 0.02, 0.003, 8.0


@dataclass(frozen=True)
class Trial:
    """A run among those of its group, of one N, D and shape of schedule, which differ in rates and batch."""

    group: Hashable
    share: Array  # (points,) rising, of its tokens
    loss: Array  # (points,) after these, of training or held-out, but the same for all
    final: float | None = None  # the loss that is compared in the end; None: not known yet

    def level(self, share: float) -> float | None:
        """Log loss about `share`, over the same tokens for every run; None without a loss as early."""
        about = np.linspace((1 - RECENT) * share, share, 16)
        if not len(self.share) or self.share[0] > about[0] or self.share[-1] < about[-2]:
            return None
        return float(np.interp(about, self.share, np.log(self.loss)).mean())


class Chance(NamedTuple):
    probability: float  # that it ends below the best finished run of its group
    loss: float  # where it is expected to end
    share: float  # of its tokens, which it was judged by


def chance_to_win(run: Trial, finished: Sequence[Trial]) -> Chance | None:
    """Of a run under way; None where it is too young, or no run of its group has finished.

    Log final loss is linear in the log loss at the same share, with a level for each group: a
    Bayesian linear regression with a normal-inverse-gamma prior (Gelman et al. 2013, Bayesian Data Analysis, ch. 14)
    on all finished runs, so the answer is of Student's t with as many degrees as they pay for.
    """
    from scipy.special import stdtr

    share = float(run.share[-1]) if len(run.share) else 0.0
    own = run.level(share)
    taught, ends = list[tuple[Trial, float, float]](), dict[Hashable, float]()  # logarithms
    for one in finished:
        if one.final is not None and (level := one.level(share)) is not None:
            end = float(np.log(one.final))
            taught.append((one, level, end))
            ends[one.group] = min(end, ends.get(one.group, end))
    if share < YOUNG or own is None or run.group not in ends:
        return None
    groups, noise = list(ends), NOISE * (1 - share) + LAST_NOISE

    def row(one: Trial, level: float) -> list[float]:
        return [level, *(float(one.group == group) for group in groups)]

    # Prior knowledge enters as rows of its own, scaled to the noise; levels of groups have none.
    prior = np.array([[noise / SLOPE_WIDTH, *[0.0] * len(groups)]])
    y = np.array([end for _, _, end in taught])
    weight = 1 / np.hypot(1, (y - [ends[one.group] for one, _, _ in taught]) / NEAR)
    X = np.vstack([weight[:, None] * [row(one, level) for one, level, _ in taught], prior])
    y = np.concatenate([weight * y, [noise / SLOPE_WIDTH * SLOPE]])
    inverse = np.linalg.pinv(X.T @ X)
    found = inverse @ X.T @ y
    degrees = NOISE_RUNS + max(float((weight**2).sum()) - len(groups), 0.0)
    scale2 = (NOISE_RUNS * noise**2 + float(((y - X @ found) ** 2).sum())) / degrees
    x = np.array(row(run, own))
    expected, error = float(x @ found), float(np.sqrt(scale2 * (1 + x @ inverse @ x)))
    best = ends[run.group]
    return Chance(float(stdtr(degrees, (best - expected) / error)), float(np.exp(max(expected, best))), share)
