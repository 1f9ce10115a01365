"""A sweep's scored checkpoints, arranged: budgets, the best run of each, and what may be said of a task.

Special here:
- The best run of a budget is the one with the lowest held-out loss, not the one with the best score on the task: the
  best of many noisy scores would look monotone by luck.
- Runs of one budget are those whose FLOPs lie within a factor of each other, because a grid hits its budgets only
  to within whole steps.

Heineman et al. 2025 (arXiv:2508.13144) for signal and noise; Magnusson et al. 2025 (arXiv:2504.11393) for tasks that
move at small scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .page import is_number

SAME_BUDGET = 1.25  # runs whose FLOPs differ by less from the smallest of their budget belong to it
SHADES = 6  # colours of N, and of recipes
BITS = ("gold_bpb", "bpb")  # bits per byte of the right answer, or of text
SCORE = ("acc", "exact_match")


@dataclass
class Sweep:
    """The rows, arranged.

    Attributes:
        rows: those that can be drawn: FLOPs above zero.
        budgets: places in `rows` of the finished runs of each budget, by rising FLOPs.
        recipes: names, where there are several; otherwise empty.
        shades: largest N of each colour but the last.
    """

    rows: list[Mapping[str, Any]]
    budgets: list[list[int]]
    recipes: list[str]
    shades: list[float]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Sweep:
        kept = [entry for entry in rows if is_number(entry.get("flops")) and entry["flops"] > 0]
        recipes = sorted({recipe_of(entry) for entry in kept})
        sizes = sorted({entry["N"] for entry in kept if is_number(entry.get("N"))})
        parts = np.array_split(np.asarray(sizes, dtype=float), min(SHADES, max(len(sizes), 1)))
        shades = [float(part[-1]) for part in parts if len(part)]
        return cls(kept, budgets(kept), recipes if len(recipes) > 1 else [], shades)

    def colour(self, place: int) -> str:
        """Class of a dot: its recipe where recipes are compared, its N otherwise."""
        entry = self.rows[place]
        if self.recipes:
            return self.recipe_colour(recipe_of(entry))
        shade = next((number for number, most in enumerate(self.shades) if (entry.get("N") or 0) <= most), 0)
        return self.shade(shade)

    def shade(self, place: int) -> str:
        """Class of one of the shades of N. Few of them take colours that lie far apart."""
        spread = round(place * (SHADES - 1) / (len(self.shades) - 1)) if len(self.shades) > 1 else SHADES - 2
        return f"n{spread}"

    def recipe_colour(self, recipe: str) -> str:
        return f"r{self.recipes.index(recipe) % SHADES}"

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(name for entry in self.rows for name in entry.get("tasks") or {}))

    def value(self, place: int, task: str, keys: Sequence[str]) -> tuple[float, float | None] | None:
        """The first of `keys` that this checkpoint has for the task, with its standard error."""
        scores = (self.rows[place].get("tasks") or {}).get(task) or {}
        key = next((key for key in keys if is_number(scores.get(key))), None)
        if key is None:
            return None
        error = scores.get(f"{key}_se")
        return scores[key], error if is_number(error) else None

    def chance(self, task: str) -> float | None:
        """The task's chance level, where a checkpoint's scores have it."""
        levels = (((entry.get("tasks") or {}).get(task) or {}).get("chance") for entry in self.rows)
        return next(filter(is_number, levels), None)

    @cached_property
    def best(self) -> list[int]:
        """Of each budget, the finished run with the lowest held-out loss."""
        return self._best(None)

    @cached_property
    def lines(self) -> dict[str, list[int]]:
        """The same by colour class: of each recipe, where recipes are compared, and of all runs otherwise."""
        return {self.recipe_colour(recipe): self._best(recipe) for recipe in self.recipes} or {"": self.best}

    def _best(self, recipe: str | None) -> list[int]:
        lowest = (self._lowest(group, recipe) for group in self.budgets)
        return [place for place in lowest if place is not None]

    def _lowest(self, group: Sequence[int], recipe: str | None) -> int | None:
        known = [
            place for place in group
            if is_number(self.rows[place].get("loss")) and recipe in (None, recipe_of(self.rows[place]))
        ]  # fmt: skip
        return min(known, key=lambda place: self.rows[place]["loss"], default=None)

    def best_of_each(self) -> dict[str, int]:
        """Of each recipe, its best run at the largest budget that all recipes have; empty where there is none."""
        for group in reversed(self.budgets):
            known = {recipe: self._lowest(group, recipe) for recipe in self.recipes}
            if all(place is not None for place in known.values()):
                return {recipe: place for recipe, place in known.items() if place is not None}
        return {}


def recipe_of(entry: Mapping[str, Any]) -> str:
    """What a run's data went through; runs without a recipe stand together as one."""
    return "no recipe" if entry.get("recipe") is None else str(entry["recipe"])


def budgets(rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of the finished runs of each budget, by rising FLOPs: by `budget` where every run has one."""
    final = [place for place, entry in enumerate(rows) if entry.get("final", True)]
    groups: dict[float, list[int]] = {}
    named = all(is_number(rows[place].get("budget")) for place in final)
    start = 0.0
    for place in sorted(final, key=lambda place: rows[place]["flops"]):
        flops = rows[place]["flops"]
        if not start or flops > start * SAME_BUDGET:
            start = flops
        groups.setdefault(rows[place]["budget"] if named else start, []).append(place)
    return [groups[budget] for budget in sorted(groups)]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's, with ties shared; None below three points, or where one side does not vary."""
    if len(x) < 3:
        return None
    first, second = (_ranks(np.asarray(side, dtype=float)) for side in (x, y))
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


@dataclass(frozen=True)
class Trend:
    """How bits per byte of a task follow compute.

    Attributes:
        values: of the best run of each budget, by rising FLOPs.
        rank_best: rank correlation with FLOPs over those; rank_all: over all finished runs.
    """

    values: tuple[float, ...]
    rank_best: float | None
    rank_all: float | None

    @property
    def falls(self) -> bool:
        """Whether each budget has a lower value than the one before."""
        return len(self.values) > 1 and all(
            later < before for before, later in zip(self.values, self.values[1:], strict=False)
        )


def trend(sweep: Sweep, task: str) -> Trend | None:
    """None for a task without bits per byte."""

    def points(places: Sequence[int]) -> tuple[list[float], list[float]]:
        found = [
            (sweep.rows[place]["flops"], scored[0]) for place in places if (scored := sweep.value(place, task, BITS))
        ]
        return [flops for flops, _ in found], [value for _, value in found]

    best, every = points(sweep.best), points([place for group in sweep.budgets for place in group])
    return Trend(tuple(best[1]), rank_correlation(*best), rank_correlation(*every)) if every[1] else None


def strength(entry: Mapping[str, Any] | None) -> float:
    """How far the better of a task's two measures stands out of its noise, in units of what luck would show."""
    return max((_stands_out((entry or {}).get(key)) for key in ("acc", "gold_bpb")), default=0.0)


def _stands_out(one: Mapping[str, Any] | None) -> float:
    if not one or not is_number(one.get("ratio")) or not is_number(one.get("by_luck")) or one["by_luck"] <= 0:
        return 0.0
    return float(one["ratio"] / one["by_luck"])


def _is_judged(one: Mapping[str, Any]) -> bool:
    """A ratio may be infinite; it is NaN where nothing measures the noise."""
    return isinstance(one["ratio"], int | float) and not math.isnan(one["ratio"])


def verdict(entry: Mapping[str, Any] | None) -> str:
    """What a task is good for at this scale, in words."""
    known = {key: one for key in ("acc", "gold_bpb") if (one := (entry or {}).get(key)) and _is_judged(one)}
    clear = {key for key, one in known.items() if one.get("clear")}
    if not known:
        return "not known"
    if not clear:
        return "noise: differences between runs mean nothing"
    names = {"gold_bpb": "BPB", "acc": "accuracy"}
    told = " and ".join(name for key, name in names.items() if key in clear) + " tell runs apart"
    noise = [name for key, name in names.items() if key in known and key not in clear]
    return (told if len(clear) > 1 else told.replace("tell", "tells")) + "".join(f", {name} is noise" for name in noise)
