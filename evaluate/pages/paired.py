"""Whether runs differ on a task by more than the luck of its items, and whether small runs choose as large ones do.

All runs answer the same items, so an item that is hard for all of them tells nothing of their difference: its error is
that of the paired differences, and a bootstrap over items says how far apart the furthest two of so many runs would lie
by luck. The second question is that of DataDecide (Magnusson et al. 2025, arXiv:2504.11393).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
LUCK = 0.05  # chance that some two of runs that are alike lie beyond the threshold
SMALLEST = 1.96  # threshold: that of two runs by the normal distribution
FEWEST = 10  # items
MOST = 20_000  # pairs of runs that are compared
MEASURES = {"gold_bpb": ("gold_bpb", "bpb"), "acc": ("acc", "exact_match")}  # and what of an item they are
Answers = dict[str, dict[str, dict[int, float]]]  # task -> measure -> item -> value
Choice = tuple[int, int, int, int]  # one and another of the small runs, the same two of the large ones


@dataclass(frozen=True)
class Paired:
    """z: of the two runs that lie furthest apart, in standard errors of their difference; apart: share of the `pairs`
    beyond the threshold; held: share of the `choices` that turn out the same in small runs and in large ones, with its
    standard error over items.
    """

    items: int
    z: float
    threshold: float
    apart: float
    pairs: int
    held: tuple[float, float] | None
    choices: int

    @property
    def clear(self) -> bool:
        return self.z > self.threshold


def answers_of(items: Iterable[Mapping[str, Any]]) -> Answers:
    """What a run scored on each item of each task."""
    found: Answers = {}
    for item in items:
        known = (item.get("values") or {}) | {key: item.get(key) for key in MEASURES["gold_bpb"]}
        for measure, keys in MEASURES.items():
            if (value := next((known[key] for key in keys if known.get(key) is not None), None)) is not None:
                found.setdefault(item["task"], {}).setdefault(measure, {})[item["index"]] = float(value)
    return found


def compare(answers: Mapping[int, Mapping[int, float]], choices: Sequence[Choice]) -> Paired | None:
    """Of runs by their place, over the items that all of them answered; None where there is too little."""
    shared = sorted(set.intersection(*map(set, answers.values()))) if len(answers) > 1 else []
    if (n := len(shared)) < FEWEST:
        return None
    rng, order = np.random.default_rng(0), {run: place for place, run in enumerate(answers)}
    scores = np.array([[of_run[item] for item in shared] for of_run in answers.values()])
    means, resampled = scores.mean(axis=1), rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) @ scores.T / n
    i, j = np.triu_indices(len(scores), 1)
    if len(i) > MOST:
        i, j = (places[rng.choice(len(i), MOST, replace=False)] for places in (i, j))
    covariance = np.cov(scores)
    alone = covariance[i, i] + covariance[j, j]
    variance, difference = alone - 2 * covariance[i, j], np.abs(means[i] - means[j])
    # Runs that lie equally far apart on every item would have an error of zero.
    error = np.where(variance > 1e-12 * alone, np.sqrt(np.maximum(variance, 0) / n), difference / np.sqrt(n))
    i, j, error, difference = (each[error > 0] for each in (i, j, error, difference))
    z, pairs = difference / error, len(alone)
    by_luck = [np.max(np.abs(each[i] - each[j]) / error, initial=0.0) for each in resampled - means]
    threshold = max(SMALLEST, float(np.quantile(by_luck, 1 - LUCK)))
    held, known = None, [[order[run] for run in choice] for choice in choices if order.keys() >= set(choice)]
    if known:
        a, b, c, d = np.array(known).T

        def agreeing(score: np.ndarray) -> np.ndarray:
            """A tie agrees by half."""
            return (np.sign(score[:, a] - score[:, b]) * np.sign(score[:, c] - score[:, d]) / 2 + 0.5).mean(axis=1)

        held = float(agreeing(means[None])[0]), float(agreeing(resampled).std())
    apart = float((z > threshold).sum()) / pairs
    return Paired(n, float(z.max(initial=0.0)), threshold, apart, pairs, held, len(known))
