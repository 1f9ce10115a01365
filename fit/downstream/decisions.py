"""Which tasks order recipes at smaller scales as at the largest one, and which few tasks to score for that.

Decision accuracy (Magnusson et al. 2025, arXiv:2504.11393) is the share of pairs of recipes that a smaller scale orders
as the largest does, by the mean score over seeds; a tie counts half. Pairs whose difference at the largest scale is
within noise (two-sided, 95 %) are left out. Noise is that of seeds, or of items if there are too few seeds. As pairs
share recipes, intervals are Wilson's with the larger of two variances: that of Kendall's tau for normal scores (Esscher
1924), and the cluster-robust one of dyads (Aronow, Samii and Assenova 2015, arXiv:1312.3398).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its parts are imported at first use

from ..approaches.recipes import split
from ..errors import Array, InputError, check_level, positive
from ..formatting import interval, percent, plain_json
from ..table import RunTable, as_table, columns_of, load, numeric

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("acc", "gold_bpb", "p_right", "margin", "bpb")  # read from a table of runs
LOWER = ("gold_bpb", "bpb", "loss", "error", "perplexity")  # metrics of which less is better
TEXTS, NUMBERS = ["recipe", "task", "metric"], ["N", "D", "flops", "value", "se", "items", "tokens"]
SAME = math.log(1.25)  # runs whose N and D differ by less are of one scale; chosen by hand
RECIPES, ITEMS, FREEDOM = 3, 10, 3  # fewest for an answer, and degrees of freedom for the noise of seeds; by hand
FOR_SUITE, TESTS = 5, 50  # fewest recipes, of which two test a suite chosen by the others; most such tests


@dataclass(frozen=True)
class Decisions:
    """The result of `decision_accuracy`; `reason` is why there is no answer or no suite, else empty.

    `tasks`, those with the highest lower ends of intervals first: task, metric, reason, noise (its source), accuracy,
    accuracy_ci, pairs, signal_to_noise (range of recipes over the noise of a run, median of the scales), the same per
    FLOP of scoring a run (2 N items tokens; null if unknown), and `scales`, the smaller ones by rising FLOPs. `suite`:
    tasks, cost (items, or tokens where given), and shares of pairs that smaller scales order as the mean standardized
    score does at the largest: accuracy (and _ci) of suites chosen without the pair's recipes, all_tasks of that mean.
    """

    tasks: Sequence[dict[str, Any]] = ()
    suite: dict[str, Any] | None = None
    reason: str = ""

    @property
    def sentences(self) -> list[str]:
        """Return sentences on the suite and on tasks without an answer."""
        if not self.tasks:
            return [f"It is not known which benchmark tells recipes apart: {self.reason}."]
        first = f"No suite of tasks is recommended: {self.reason}."
        if s := self.suite:
            shares = f"{percent(s['accuracy'])} ({interval(s['accuracy_ci'], percent)})", percent(s["all_tasks"])
            first = f"Recommended suite: {', '.join(s['tasks'])}. Suites chosen without a pair of recipes order "
            first += "{} of such pairs at smaller scales as all tasks do at the largest; all tasks {}.".format(*shares)
        refused: dict[str, list[str]] = {}
        for task in (task for task in self.tasks if task["reason"]):
            refused.setdefault(task["reason"], []).append(f"{task['task']}/{task['metric']}")
        return [first, *(f"No answer for {', '.join(names)}: {reason}." for reason, names in refused.items())]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `sentences`, for JSON."""
        return dict(plain_json(vars(self) | {"sentences": self.sentences}))


def decision_accuracy(scores: Any, budget: float = math.inf, level: float = 0.95) -> Decisions:
    """Measure how often each task and metric orders recipes at smaller scales as at the largest one.

    Args:
        scores: A sweep directory or table of runs with columns <task>/<metric>; a dictionary of such tables by recipe;
            or a table with a row per score: recipe (or variant), task, metric, value, some of N, D and flops, and
            perhaps se, items and tokens (of one item). Rows of one recipe and scale are its seeds.
        budget: Most items, or tokens where these are given, of the recommended suite.
        level: Probability of the intervals.
    """
    check_level(level)
    if (rows := _tidy(scores)).empty:
        return Decisions(reason="no run has scores of tasks")
    if len(recipes := sorted({*rows["recipe"]})) < RECIPES:
        return Decisions(reason=f"the scores are of {len(recipes)} of the at least {RECIPES} recipes that are needed")
    if len(sizes := _assign_scales(rows)) < 2:
        return Decisions(reason="the scores are of one scale, and at least two are needed")
    columns = [_Column(part, recipes, sizes, level) for _, part in rows.groupby(TEXTS[1:], sort=False)]
    columns.sort(key=lambda column: -column.result.get("accuracy_ci", [-1])[0])
    answered = [column for column in columns if not column.result["reason"]]
    return Decisions([column.result for column in columns], *_recommend(answered, budget, level))


def share_of_pairs(agrees: Array, i: Any, j: Any, level: float = 0.95) -> tuple[float, tuple[float, float]]:
    """Return the mean of `agrees` (scales, pairs), the orders of recipes i and j that hold, and its interval."""
    used, p = np.isfinite(agrees).any(axis=0), np.linspace(0.0, 1.0, 2001)
    means, both = np.nanmean(agrees[:, used], axis=0), np.concatenate([i[used], j[used]])
    share, degree, within = means.mean(), np.bincount(both), np.nanvar(agrees, axis=1).mean()
    # Scales that err on different pairs average out. Few pairs show poorly how far, so half of that is counted, as if
    # one more pair had been held alike by all scales.
    alone = 1 / (4 * len(means))
    common_error = min(1.0, 0.5 + 0.5 * (means.var() + alone) / (within + alone))
    zeta = 1 / 9 - (2 / np.pi * np.arcsin(np.sin(np.pi * (p - 0.5)) / 2)) ** 2  # of two pairs with a common recipe
    normal = common_error * (p * (1 - p) + (degree * (degree - 1)).sum() / len(means) * zeta / 4)
    robust = (np.bincount(both, np.tile(means - share, 2)) ** 2).sum() - len(means) * means.var()
    variance = np.maximum(normal, robust / len(means) / (1 - 1 / (degree > 0).sum())) / len(means)
    width = scipy.special.ndtri(0.5 + level / 2)
    inside = p[(share - p) ** 2 <= width**2 * variance + 1e-7]  # half a step of p, squared
    return float(share), (float(inside.min()), float(inside.max()))


def _tidy(scores: Any) -> pd.DataFrame:
    """Return a row per score with the columns TEXTS and NUMBERS (NaN: unknown)."""
    import pandas as pd

    if not isinstance(scores, (Mapping, RunTable)) and "task" in (frame := load(scores)[0]):
        texts = dict(zip(TEXTS, columns_of(frame, [*TEXTS, "value"]), strict=False))
        rows = pd.DataFrame(texts).astype(str).assign(**{name: numeric(frame, name) for name in NUMBERS})
        for name in [name for name in NUMBERS[:3] if name in frame] or ["N, D or flops"]:
            positive(name, columns_of(frame, [name])[0])
        if (bad := ~np.isfinite(rows["value"])).any():
            row = bad.idxmax()
            raise InputError(f"value is {frame['value'][row]} in row {row}; it must be a finite number.")
        return rows
    parts = [pd.DataFrame(columns=[*TEXTS, *NUMBERS])]
    for recipe, runs in (scores if isinstance(scores, Mapping) else split(as_table(scores))).items():
        table = as_table(runs)
        for task, _, metric in (str(column).rpartition("/") for column in table.frame.columns):
            if task and metric in METRICS:
                names = (f"{task}/{metric}", f"{task}/{metric}_se", f"{task}/items", f"{task}/tokens")
                values = (recipe, task, metric, table.N, table.D, table.flops, *map(table.column, names))
                parts.append(pd.DataFrame(dict(zip([*TEXTS, *NUMBERS], values, strict=True))))
    rows = pd.concat(parts[1:] or parts, ignore_index=True)
    return rows[np.isfinite(rows["value"].astype(float))].reset_index(drop=True)


def _assign_scales(rows: pd.DataFrame) -> Array:
    """Add a column `scale`, the nearest of the recipe with most; return N, D and FLOPs of the scales, (scales, 3)."""
    sizes = rows[NUMBERS[:3]].astype(float)
    sizes["flops"] = sizes["flops"].fillna(6 * sizes["N"] * sizes["D"]).fillna(sizes["N"]).fillna(sizes["D"])
    logs = np.log(sizes[[name for name in ("N", "D") if sizes[name].notna().all()] or ["flops"]].to_numpy()).round(6)
    points = max((np.unique(logs[of], axis=0) for of in rows.groupby("recipe").indices.values()), key=len)
    distance = np.abs(logs[:, None] - points).max(axis=2)
    nearest = np.where(distance.min(axis=1) < SAME, distance.argmin(axis=1), -1)
    scales = sizes.assign(nearest=nearest)[nearest >= 0].groupby("nearest").median().sort_values("flops")
    rows["scale"] = scales.index.get_indexer(nearest)  # type: ignore[arg-type]
    return scales.to_numpy()


class _Column:
    """The mean scores (recipes, scales) of a task and metric, and its entry `result` of `Decisions.tasks`."""

    def __init__(self, rows: pd.DataFrame, recipes: list[str], sizes: Array, level: float) -> None:
        (self.task, self.metric), places = rows[["task", "metric"]].iloc[0], range(len(sizes))
        values = rows.groupby(["recipe", "scale"])["value"].agg(["mean", "count", "var"])
        grids = (values[name].unstack().reindex(recipes, columns=places).to_numpy(float) for name in values)
        self.mean, seeds, variance = grids
        of_items = (rows["se"] ** 2).groupby(rows["scale"]).mean().reindex(places).to_numpy()
        freedom, items = np.nansum(seeds - 1, 0), rows["items"].dropna().unique()
        noise = np.where(freedom >= FREEDOM, np.nansum((seeds - 1) * variance, 0) / np.maximum(freedom, 1), of_items)
        noise = np.sqrt(np.where(noise > 0, noise, np.nan))  # of one run, (scales,)
        self.cost = float(items.max(initial=0) * rows["tokens"].fillna(1).median()) or math.inf  # unknown
        recipes_scored = np.isfinite(self.mean).sum(0)
        last = self.last = int(max(np.flatnonzero(recipes_scored >= RECIPES), default=0))
        source = "unknown" if np.isnan(noise[last]) else "seeds" if freedom[last] >= FREEDOM else "items"
        quantile = scipy.special.stdtrit(freedom[last] if source == "seeds" else math.inf, 0.975)
        reach = quantile * np.nan_to_num(noise[last])
        large, (i, j) = self.mean[:, last], np.triu_indices(len(recipes), 1)
        clear = np.abs(large[i] - large[j]) > reach * np.sqrt(1 / seeds[i, last] + 1 / seeds[j, last])
        i, j = i[clear], j[clear]
        agrees, reason = _agreement(self.mean[:, :last].T, large, i, j), ""
        if len(items) > 1:
            reason = f"runs answered different numbers of items ({items.min():g} to {items.max():g})"
        elif items.min(initial=ITEMS) < ITEMS:
            reason = f"it has {items[0]:g} of the at least {ITEMS} items that are needed"
        elif not (recipes_scored[:last] > 1).any():
            reason = f"no scale with scores of {RECIPES} recipes has a smaller scale with scores of two of them"
        elif not np.isfinite(agrees).any():
            reason = "the recipes do not differ by more than noise at the largest scale"
        self.result: dict[str, Any] = {"task": self.task, "metric": self.metric, "reason": reason, "noise": source}

        def over(at: list[int]) -> dict[str, Any]:
            """Return the accuracy and signal to noise over the scales `at`."""
            accuracy, ci = share_of_pairs(agrees[at], i, j, level)
            signal = (np.nanmax(self.mean[:, at], 0) - np.nanmin(self.mean[:, at], 0)) / noise[at]
            per_flop = np.median(signal / (2 * sizes[at, 0] * (rows["items"] * rows["tokens"]).median()))
            signals = {"signal_to_noise": np.median(signal), "signal_to_noise_per_flop": per_flop}
            return {"accuracy": accuracy, "accuracy_ci": ci} | signals

        if not reason:
            at = np.flatnonzero(np.isfinite(agrees).any(1)).tolist()
            scales = [dict(zip(NUMBERS, sizes[k], strict=False)) | over([k]) for k in at]
            self.result |= over(at) | {"pairs": len(i), "scales": scales}


def _agreement(small: Array, large: Array, i: Any, j: Any) -> Array:
    """Return 1 where `small` (..., recipes) orders i and j as `large` (recipes,), 0 where not, and 0.5 for a tie."""
    return np.sign(small[..., i] - small[..., j]) * np.sign(large[i] - large[j]) / 2 + 0.5


def _recommend(columns: Sequence[_Column], budget: float, level: float) -> tuple[dict[str, Any] | None, str]:
    """Choose a suite, and test the choice on pairs of recipes that it did not see. Returns None and the reason else."""
    if not columns:
        return None, "no task has an answer"
    last = max(column.last for column in columns)
    columns = [column for column in columns if column.last == last]
    means = np.array([column.mean[:, : last + 1] for column in columns])
    means = means[:, np.isfinite(means[..., -1]).all(0)]  # (columns, recipes, scales)
    means = means[..., np.isfinite(means).all((0, 1))]
    if means.shape[1] < FOR_SUITE or means.shape[2] < 2:
        return None, f"at least {FOR_SUITE} recipes must have scores of all tasks at the largest and a smaller scale"
    tasks, cost = [column.task for column in columns], {column.task: column.cost for column in columns}
    signs = np.array([-1.0 if column.metric in LOWER else 1.0 for column in columns])[:, None, None]
    spread = np.maximum(means.std(1, keepdims=True), 1e-12)
    scores = np.moveaxis(signs * (means - means.mean(1, keepdims=True)) / spread, 1, 2)
    *whole, large = np.average(scores, axis=0, weights=[1 / tasks.count(task) for task in tasks])
    scores, (i, j) = scores[:, :-1], np.triu_indices(len(large), 1)  # (columns, smaller scales, recipes)

    def choose(seen: Any) -> list[int]:
        """Add the score that orders most of the pairs `seen`, as long as that helps and the budget allows it."""
        chosen, best = list[int](), 0.0
        while True:
            paid, left = {tasks[k] for k in chosen}, [k for k in range(len(tasks)) if k not in chosen]
            free = [k for k in left if sum(cost[task] for task in paid | {tasks[k]}) <= budget]
            shares = _agreement(scores[chosen].sum(0) + scores[free], large, i[seen], j[seen]).mean((1, 2))
            if shares.max(initial=0) <= best:
                return chosen
            best, chosen = shares.max(), [*chosen, free[int(shares.argmax())]]

    if not (chosen := choose(i >= 0)):
        return None, f"the budget of {budget:g} is less than the cheapest task needs"
    pairs = np.random.default_rng(0).permutation(len(i))[:TESTS]
    unseen = [choose(~np.isin(i, (i[k], j[k])) & ~np.isin(j, (i[k], j[k]))) for k in pairs]
    held_out = [_agreement(scores[s].sum(0), large, i[[k]], j[[k]]) for s, k in zip(unseen, pairs, strict=True)]
    accuracy, ci = share_of_pairs(np.concatenate(held_out, axis=1), i[pairs], j[pairs], level)
    names, paid = [f"{tasks[k]}/{columns[k].metric}" for k in chosen], {tasks[k] for k in chosen}
    suite = {"tasks": names, "cost": sum(cost[task] for task in paid), "accuracy": accuracy, "accuracy_ci": ci}
    return suite | {"all_tasks": _agreement(np.array(whole), large, i[pairs], j[pairs]).mean()}, ""
