"""Test whether runs differ on a task by more than chance, and whether small runs rank choices as large ones do.

All runs answer the same items, so errors are those of paired differences. The threshold for the two runs furthest apart
is simulated: in each draw all differences on an item keep their sign, or change it together. The second question is
DataDecide's (Magnusson et al. 2025, arXiv:2504.11393).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics import LUCK

DRAWS = 1000
SMALLEST = 1.96  # threshold: that of two runs by the normal distribution
FEWEST = 10  # items
MOST = 20_000  # pairs of runs that are compared
MEASURES = {"gold_bpb": ("gold_bpb", "bpb"), "acc": ("acc", "exact_match")}  # and what of an item they are
Answers = dict[str, dict[str, dict[int, float]]]  # task -> measure -> item -> value
Choice = tuple[int, int, int, int]  # one and another of the small runs, the same two of the large ones


@dataclass(frozen=True)
class Paired:
    """A comparison of runs on the items of one task.

    `z`: largest difference of two runs, in standard errors; `held`: share of the `choices` that small and large runs
    rank alike, with its standard error over items.
    """

    z: float
    threshold: float
    held: tuple[float, float] | None

    @property
    def clear(self) -> bool:
        return self.z > self.threshold


def answers_of(items: Iterable[Mapping[str, Any]]) -> Answers:
    answers: Answers = {}
    for item in items:
        numbers = (item.get("values") or {}) | {key: item.get(key) for key in MEASURES["gold_bpb"]}
        for measure, keys in MEASURES.items():
            if (value := next((numbers[key] for key in keys if numbers.get(key) is not None), None)) is not None:
                answers.setdefault(item["task"], {}).setdefault(measure, {})[item["index"]] = float(value)
        if (margin := log_margin(item)) is not None and not item.get("contaminated"):
            answers.setdefault(item["task"], {}).setdefault("margin", {})[item["index"]] = margin
    return answers


def log_margin(item: Mapping[str, Any]) -> float | None:
    """Return the nats of an item's likeliest right choice minus those of its likeliest wrong one; None without both."""
    right, nats = item.get("right") or [], item.get("log_probabilities") or []
    wrong = [value for place, value in enumerate(nats) if place not in right]
    known = right and wrong and item.get("choices") and None not in nats
    return max(nats[place] for place in right) - max(wrong) if known else None


def compare_tasks(answers: Mapping[Any, Answers], measure: str, choices: Sequence[Choice] = ()) -> dict[str, Paired]:
    by_task: dict[str, dict[Any, Mapping[int, float]]] = {}
    for run, tasks in answers.items():
        for task, measures in tasks.items():
            if measure in measures:
                by_task.setdefault(task, {})[run] = measures[measure]
    return {
        task: comparison for task, runs in by_task.items() if (comparison := compare_runs(runs, choices)) is not None
    }


def compare_runs(answers: Mapping[Any, Mapping[int, float]], choices: Sequence[Choice]) -> Paired | None:
    """Compare runs over the items that all of them answered; None for one run, or fewer than `FEWEST` items.

    `answers`: run -> item -> value of a measure; `choices`: see `Choice`.
    """
    shared = sorted(set.intersection(*map(set, answers.values()))) if len(answers) > 1 else []
    if (n := len(shared)) < FEWEST:
        return None
    rng, order = np.random.default_rng(0), {run: place for place, run in enumerate(answers)}
    scores = np.array([[of_run[item] for item in shared] for of_run in answers.values()])
    means, (i, j) = scores.mean(axis=1), np.triu_indices(len(scores), 1)
    if len(i) > MOST:
        chosen = rng.choice(len(i), MOST, replace=False)
        i, j = i[chosen], j[chosen]
    centred = scores - scores.mean(axis=0)  # without what all find hard
    products = centred @ centred.T / n
    square = np.maximum(products[i, i] + products[j, j] - 2 * products[i, j], 0)  # of a difference, its mean
    i, j, error = (array[square > 1e-24] for array in (i, j, np.sqrt(square / n)))
    difference = np.abs(means[i] - means[j]) / error
    # Were two runs alike, each of their differences could as well have the other sign.
    drawn = centred @ rng.choice([-1.0, 1.0], (DRAWS, n)).T / n  # (runs, draws)
    parts = np.array_split(drawn, 1 + DRAWS * len(i) // 200_000, axis=1)  # that fit into the cache
    by_luck = [np.max(np.abs(part[i] - part[j]) / error[:, None], axis=0, initial=0.0) for part in parts]

    def z_of(difference: Any) -> Any:
        """Convert mean / (root mean square / sqrt(n)) to mean / (standard deviation / sqrt(n)), capped."""
        return difference * np.sqrt((n - 1) / np.maximum(n - difference**2, 1e-4 * n))

    z = z_of(difference)
    threshold = max(SMALLEST, float(z_of(np.quantile(np.concatenate(by_luck), 1 - LUCK))))
    held, known_choices = None, [[order[run] for run in choice] for choice in choices if order.keys() >= set(choice)]
    if known_choices:
        a, b, c, d = np.array(known_choices).T

        def agreeing(score: np.ndarray) -> np.ndarray:
            """Return per row (rows, runs) the share of choices that small and large runs rank alike; a tie is half."""
            return (np.sign(score[:, a] - score[:, b]) * np.sign(score[:, c] - score[:, d]) / 2 + 0.5).mean(axis=1)

        items = rng.integers(n, size=(DRAWS, n)) + n * np.arange(DRAWS)[:, None]  # rng.multinomial is slower
        resampled = np.bincount(items.ravel(), minlength=DRAWS * n).reshape(DRAWS, n) @ scores.T / n
        held = float(agreeing(means[None])[0]), float(agreeing(resampled).std())
    return Paired(float(z.max(initial=0.0)), threshold, held)
