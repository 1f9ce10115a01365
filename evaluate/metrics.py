"""What a task's item results add up to: accuracy, gold bits per byte, chance, and a standard error with each.

Special here:
- Below a billion parameters accuracy sits at chance and jumps about, while the bits per byte that the model spends on
  the right answer fall smoothly with compute. Both are kept, and the chance level beside them.
- A model that returns NaN (or an infinite log-probability) has no score: the task's numbers are None and the item is
  named. Zero would be a lie, and lm-eval's argmax over NaN would count such an item as answered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ItemResult:
    """One item of a benchmark, answered.

    Attributes:
        index: place of the item in its dataset split.
        values: metrics of this item whose mean is the task's score, by lm-eval's names (acc, acc_norm, exact_match, …).
        log_probabilities: nats of every continuation scored; all must be finite for the task to have a score.
        gold: (log-probability in nats, text) of the right answer, as scored; None where the task has no such text.
        chance: probability that a uniform guess among the choices is right; None where guessing has no meaning.
        truncated: whether the model's context was too short for the prompt.
        failed: whether the model returned NaN on the way to a generated answer.
    """

    index: int
    values: dict[str, float]
    log_probabilities: list[float] = field(default_factory=list)
    gold: tuple[float, str] | None = None
    chance: float | None = None
    truncated: bool = False
    failed: bool = False

    @property
    def is_finite(self) -> bool:
        return not self.failed and all(math.isfinite(value) for value in self.log_probabilities)


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error over items, s / sqrt(n) with the sample's s (n - 1); None where undefined."""
    if not len(values):
        return None, None
    array = np.asarray(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return float(array.mean()), error


def gold_bits_per_byte(log_probability: float, text: str) -> float:
    """-log2 p(text) / UTF-8 bytes of the text.

    Args:
        log_probability: of exactly that text, in nats. The blank between prompt and answer is part of what the model
            was asked for, so it is part of the text too.
        text: what was scored, not empty.
    """
    return -log_probability / math.log(2) / len(text.encode("utf-8"))


def task_scores(items: Sequence[ItemResult]) -> dict[str, Any]:
    """One task's numbers: `<metric>` and `<metric>_se` for each metric, gold_bpb, chance, items, truncated_items.

    `acc`, `acc_norm` and `gold_bpb` are always there; None means that the task has no such number. `withheld` is None,
    or says which item made the model fail; every score is None then.
    """
    broken = next((item for item in items if not item.is_finite), None)
    names = ["acc", "acc_norm", *sorted({name for item in items for name in item.values} - {"acc", "acc_norm"})]
    scores: dict[str, Any] = {}
    for name in names:
        values = [] if broken else [item.values[name] for item in items if name in item.values]
        scores[name], scores[f"{name}_se"] = mean_and_error(values)
    golds = [] if broken else [gold_bits_per_byte(*item.gold) for item in items if item.gold is not None]
    scores["gold_bpb"], scores["gold_bpb_se"] = mean_and_error(golds)
    scores["chance"] = mean_and_error([item.chance for item in items if item.chance is not None])[0]
    scores["items"] = len(items)
    scores["truncated_items"] = sum(item.truncated for item in items)
    scores["withheld"] = f"item {broken.index}: {_what_is_wrong(broken)}" if broken else None
    return scores


def _what_is_wrong(item: ItemResult) -> str:
    if item.failed:
        return "the model returned NaN while generating"
    place, value = next((p, v) for p, v in enumerate(item.log_probabilities) if not math.isfinite(v))
    return f"the log-probability of choice {place} is {value}"
