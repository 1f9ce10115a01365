"""Scores of a task from the results of its items, with standard errors and chance level, and a suite's mean.

Below a billion parameters accuracy jumps about near chance, while gold bits per byte and p_right move smoothly with
compute.

p_right and margin: Magnusson et al. 2025 (arXiv:2504.11393). Centered accuracy: Li et al. 2024 (arXiv:2406.11794).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from ..train.errors import counted

LUCK = 0.05  # chance that a difference is called clear where there is none


@dataclass(frozen=True)
class ItemResult:
    index: int  # place in its dataset split
    values: dict[str, float]  # metrics whose mean is the task's score, by lm-eval's names (acc, acc_norm, exact_match)
    log_probabilities: list[float] = field(default_factory=list)  # nats of every continuation scored
    gold: tuple[float, str] | None = None  # (nats, text) of the right answer, as scored, if the task has such a text
    chance: float | None = None  # probability that a uniform guess is right, if guessing has a meaning
    truncated: bool = False  # the prompt was cut
    failed: bool = False  # the model returned NaN while it generated
    prompt: str = ""
    choices: list[str] | None = None  # the continuations, one per log-probability
    right: list[int] | None = None  # places of the right ones
    answer: str | None = None  # the generated text
    target: str | None = None  # the right text
    bytes: int | None = None  # UTF-8 bytes of a whole text that was scored (rolling tasks)

    @property
    def is_finite(self) -> bool:
        return not self.failed and all(math.isfinite(value) for value in self.log_probabilities)

    @property
    def gold_bpb(self) -> float | None:
        return None if self.gold is None else gold_bits_per_byte(*self.gold)

    @property
    def bpb(self) -> float | None:
        return -sum(self.log_probabilities) / math.log(2) / self.bytes if self.bytes else None

    @property
    def p_right(self) -> float | None:
        """Return the summed probability of the right choices, in a softmax over all choices; None without choices."""
        shares = self._shares
        return None if shares is None else float(shares[self.right].sum())

    @property
    def margin(self) -> float | None:
        """Return p_right minus the probability of the likeliest wrong choice; None without right or wrong choices."""
        shares, right = self._shares, self.p_right
        if shares is None or right is None or len(set(self.right or ())) == len(shares):
            return None
        return right - float(np.delete(shares, self.right or []).max())

    @functools.cached_property
    def _shares(self) -> np.ndarray | None:
        if not self.choices or not self.right or len(self.log_probabilities) < len(self.choices) or not self.is_finite:
            return None
        nats = np.asarray(self.log_probabilities[: len(self.choices)])
        shares = np.exp(nats - nats.max())
        return np.asarray(shares / shares.sum())


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error, s / sqrt(n); None where undefined, such as the error of one value."""
    if not len(values):
        return None, None
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():  # a metric that is undefined for an item
        return None, None
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return float(array.mean()), error


def error_of_alike(count: int) -> float:
    """Return the standard error of an accuracy whose `count` answers are all right or all wrong.

    Because s / sqrt(n) would be 0, it assumes two more right and two more wrong answers (Agresti & Coull 1998).
    """
    share = 2 / (count + 4)
    return math.sqrt(share * (1 - share) / (count + 4))


def gold_bits_per_byte(log_probability: float, text: str) -> float:
    """Convert a text's log-probability in nats to bits per UTF-8 byte; `text` includes the space before an answer."""
    return -log_probability / math.log(2) / len(text.encode("utf-8", errors="replace"))


def ratio_and_error(amounts: Sequence[float], sizes: Sequence[float]) -> tuple[float | None, float | None]:
    """Return sum(amounts) / sum(sizes) over texts and its standard error (Cochran 1977, chapter 6).

    With one text the error is None; without texts both are.
    """
    if not len(amounts):
        return None, None
    y, x = np.asarray(amounts, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    ratio = float(y.sum() / x.sum())
    if len(y) < 2:
        return ratio, None
    spread = float(np.sqrt(((y - ratio * x) ** 2).sum() / (len(y) - 1)))
    return ratio, math.sqrt(len(y)) * spread / float(x.sum())


# Numbers of an item whose mean is the task's, and that lm-eval does not compute.
OWN = ("gold_bpb", "p_right", "margin")
ALWAYS = ("acc", "acc_norm")


def task_scores(items: Sequence[ItemResult], contaminated: Collection[int] | None = None) -> dict[str, Any]:
    """Return a task's scores: `<metric>`, its standard error `<metric>_se`, chance, item counts, `withheld`, `clean`.

    `acc`, `acc_norm`, `gold_bpb`, `p_right`, `margin` and `bpb` are always there, but may be None. `withheld` says on
    which item the model failed (then every score is None), or is None. `clean`: scores without the items whose index is
    in `contaminated`; None if that is unknown.
    """
    broken = next((item for item in items if not item.is_finite), None)
    names = [*ALWAYS, *sorted({name for item in items for name in item.values} - {*ALWAYS, *OWN, "bpb"})]
    scores = _numbers([] if broken else items, names)
    scores["chance"] = mean_and_error([item.chance for item in items if item.chance is not None])[0]
    scores["items"] = len(items)
    scores["truncated_items"] = sum(item.truncated for item in items)
    scores["withheld"] = None
    if broken and broken.failed:
        scores["withheld"] = f"item {broken.index}: the model returned NaN while generating"
    elif broken:
        place, value = next((p, v) for p, v in enumerate(broken.log_probabilities) if not math.isfinite(v))
        scores["withheld"] = f"item {broken.index}: the log-probability of choice {place} is {value}"
    scores["contaminated_items"] = scores["clean"] = None
    if contaminated is not None:
        clean = [item for item in items if item.index not in contaminated]
        scores["contaminated_items"] = len(items) - len(clean)
        scores["clean"] = _numbers([] if broken else clean, names) | {"items": len(clean)}
    return scores


def _numbers(items: Sequence[ItemResult], names: Sequence[str]) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for name in names:
        values = [item.values[name] for item in items if name in item.values]
        scores[name], scores[f"{name}_se"] = mean_and_error(values)
        if len(values) > 1 and set(values) in ({0.0}, {1.0}):
            scores[f"{name}_se"] = error_of_alike(len(values))
    for name in OWN:
        values_of_items = [value for item in items if (value := getattr(item, name)) is not None]
        scores[name], scores[f"{name}_se"] = mean_and_error(values_of_items)
    texts = [item for item in items if item.bytes]
    bits = [-sum(item.log_probabilities) / math.log(2) for item in texts]
    scores["bpb"], scores["bpb_se"] = ratio_and_error(bits, [float(item.bytes or 0) for item in texts])
    return scores


def task_label(name: str, scores: Mapping[str, Any]) -> str:
    """Return a task's name; for piqa@5 "piqa (<5 examples)" if the context cut all prompts, with ≤ if it cut some."""
    shots, cut = scores.get("shots"), scores.get("truncated_items")
    if not shots or not cut:
        return name
    return f"{name.partition('@')[0]} ({'<' if cut == scores['items'] else '≤'}{counted(shots, 'example')})"


def centered(scores: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Return a task's (acc - chance) / (1 - chance) and its standard error; None without accuracy or if chance is 1."""
    acc, chance = scores.get("acc"), scores.get("chance") or 0.0
    if acc is None or chance >= 1:
        return None
    error = scores.get("acc_se")
    return (acc - chance) / (1 - chance), None if error is None else error / (1 - chance)


def above_chance(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Test, for each task with an accuracy, whether it is better than guessing; return the outcomes by task.

    One-sided normal test with Bonferroni's bound: guessing passes on some task in at most one of 20 evaluations.
    """
    scores = {name: score for name, task in tasks.items() if (score := centered(task)) is not None}
    bound = NormalDist().inv_cdf(1 - LUCK / max(len(scores), 1))
    return {name: value > bound * (error or math.inf) for name, (value, error) in scores.items()}


def suite_scores(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a suite's mean centered accuracy over its tasks with an accuracy, each with equal weight.

    `centered_se` is its standard error over items, `tasks` the number of tasks averaged, and `withheld` why there is no
    score, or None.
    """
    withheld = next((scores["withheld"] for scores in tasks if scores.get("withheld")), None)
    centered_scores = [] if withheld else [score for scores in tasks if (score := centered(scores)) is not None]
    errors = [error for _, error in centered_scores if error is not None]
    whole = bool(centered_scores) and len(errors) == len(centered_scores)
    return {
        "centered": sum(value for value, _ in centered_scores) / len(centered_scores) if centered_scores else None,
        "centered_se": math.sqrt(sum(error**2 for error in errors)) / len(centered_scores) if whole else None,
        "tasks": len(centered_scores),
        "withheld": withheld,
    }
