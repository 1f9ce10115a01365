"""A sweep's benchmarks as one page: tasks by compute, loss against accuracy, and which tasks are informative.

The best run of a budget is the one with the lowest held-out loss: the best of many noisy scores would look monotone by
luck. `paired.py` tests which tasks tell runs apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from ...train.errors import counted
from ..metrics import above_chance
from .page import Axis, Panel, compute, guessing, is_number, number, render_page, short_count, spell
from .paired import MEASURES, Answers, Choice, Paired, compare_tasks

FEW = 60  # checkpoints in a panel that still have error bars each
SAME_BUDGET = 1.25  # runs whose FLOPs differ by less from the smallest of their budget belong to it
SHADES = 6  # colours of N, and of recipes
BITS, SCORE = MEASURES["gold_bpb"], MEASURES["acc"]  # bits per byte of the right answer, or of text
NAMES = {"gold_bpb": "bits per byte", "acc": "accuracy"}
Row = Mapping[str, Any]
Signal = Mapping[str, Paired | None]  # by measure
Value = tuple[float, float | None]  # and its standard error


def sweep_page(
    rows: Sequence[Row],
    answers: Mapping[str, Answers],
    title: str,
    links: Mapping[str, str],
    forecasts: Sequence[Row] = (),
) -> str:
    """Return a self-contained HTML page of a sweep's scores.

    `rows`: one per checkpoint, with run_id, name, step, final, N, D, flops, loss, recipe (or None), `tasks` (scores by
    task) and perhaps `budget`, which groups the runs. `answers`: run_id -> the final checkpoint's score on each item.
    `links`: run_id -> relative path of that checkpoint's page. `forecasts`: rows of task, metric, flops, value, low and
    high (None: no forecast), law, error and reason, by rising flops.
    """
    sweep = Sweep.of(rows)
    scored = sorted({name for row in sweep.rows for name in row["tasks"]})
    finals = {place: answers.get(sweep.rows[place]["run_id"], {}) for group in sweep.budgets for place in group}
    compared = {measure: compare_tasks(finals, measure, choices(sweep)) for measure in NAMES}
    signals = {task: {measure: compared[measure].get(task) for measure in NAMES} for task in scored}

    def strength(task: str) -> float:
        return max((one.z / one.threshold for one in signals[task].values() if one), default=0.0)

    names = sorted(scored, key=lambda task: (-strength(task), task))
    if not names:
        return render_page("sweep.html", title, {"tasks": []}, "sweep.css")
    lowest = sweep.lowest([place for group in sweep.budgets for place in group])
    scores = {} if lowest is None else sweep.rows[lowest]["tasks"]
    tasks = [_task(sweep, name, signals[name], [row for row in forecasts if row["task"] == name]) for name in names]
    best = sweep.best_of_each()
    best_of_budget = {place for line in sweep.lines.values() for place in line}
    sections = [
        ("tasks", "What each task tells"),
        ("recipes", "By recipe"),
        ("panels", "Tasks by compute"),
        ("runs", "Runs"),
    ]
    context = {
        "sweep": sweep,
        "tasks": tasks,
        "key": _key(sweep),
        "recipe_of": recipe_of,
        "forecasts": forecasts,
        "sections": [section for section in sections if section[0] != "recipes" or sweep.recipes],
        "scores": scores,
        "above": above_chance(scores),
        "lead": [*guessing(scores, "The best run’s accuracy"), *_differing(tasks)],
        "facts": _facts(sweep),
        "warnings": _warnings(sweep, len(rows), answers),
        "best": best,
        "best_flops": max((sweep.rows[place]["flops"] for place in best.values()), default=None),
        "recipe_rows": _recipe_rows(sweep, names, best),
        "finals": [
            (sweep.rows[place], safe_link(links.get(sweep.rows[place]["run_id"])), place in best_of_budget)
            for group in sweep.budgets
            for place in group
        ],
    }
    data = [{"said": spell(_said(row)), "link": safe_link(links.get(row["run_id"]))} for row in sweep.rows]
    return render_page("sweep.html", title, context, "sweep.css", "sweep.js", data)


def safe_link(link: str | None) -> str | None:
    """Return a link if it is a relative path; otherwise, such as with a scheme (javascript:) or a host, None."""
    return link if link and re.fullmatch(r"(?!/)[^:\\]*", link) and link.isprintable() else None


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """The scored checkpoints that have FLOPs, grouped by budget and recipe."""

    rows: list[Row]
    budgets: list[list[int]]  # places in `rows` of the finished runs of each budget, by rising FLOPs
    recipes: list[str]  # names, where there are several; otherwise empty
    shades: list[float]  # largest N of each colour

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Sweep:
        usable: list[Row] = [{"tasks": {}, **row} for row in rows if is_number(row.get("flops")) and row["flops"] > 0]
        recipes = sorted({recipe_of(row) for row in usable})
        sizes = sorted({row["N"] for row in usable if is_number(row.get("N"))})
        parts = np.array_split(np.asarray(sizes, dtype=float), min(SHADES, max(len(sizes), 1)))
        shades = [float(part[-1]) for part in parts if len(part)]
        return cls(usable, _budgets(usable), recipes if len(recipes) > 1 else [], shades)

    def colour(self, place: int) -> str:
        row = self.rows[place]
        if self.recipes:
            return self.recipe_colour(recipe_of(row))
        return self.shade(
            next((shade for shade, largest in enumerate(self.shades) if (row.get("N") or 0) <= largest), 0)
        )

    def shade(self, place: int) -> str:
        """Return the CSS class of the colour at index `place` of `shades`."""
        spread = round(place * (SHADES - 1) / (len(self.shades) - 1)) if len(self.shades) > 1 else SHADES - 2
        return f"n{spread}"

    def recipe_colour(self, recipe: str) -> str:
        return f"r{self.recipes.index(recipe) % SHADES}"

    def value(self, place: int, task: str, keys: Sequence[str]) -> Value | None:
        """Return (score, standard error) of row `place` on a task for the first of `keys` with a number, or None."""
        scores = self.rows[place]["tasks"].get(task, {})
        key = next((key for key in keys if is_number(scores.get(key))), None)
        if key is None:
            return None
        error = scores.get(f"{key}_se")
        return scores[key], error if is_number(error) else None

    def best(self, recipe: str | None = None) -> list[int]:
        """Return per budget the row index of the finished run, of `recipe` if given, with the lowest held-out loss."""
        return [place for group in self.budgets if (place := self.lowest(group, recipe)) is not None]

    @cached_property
    def lines(self) -> dict[str, list[int]]:
        return {self.recipe_colour(recipe): self.best(recipe) for recipe in self.recipes} or {"": self.best()}

    def lowest(self, group: Sequence[int], recipe: str | None = None) -> int | None:
        candidates = [
            place
            for place in group
            if is_number(self.rows[place].get("loss")) and recipe in (None, recipe_of(self.rows[place]))
        ]
        return min(candidates, key=lambda place: self.rows[place]["loss"], default=None)

    def best_of_each(self) -> dict[str, int]:
        """Return recipe -> row index of its best run, at the largest budget that has all recipes; {} if none has."""
        for group in reversed(self.budgets):
            best = {recipe: self.lowest(group, recipe) for recipe in self.recipes}
            if all(place is not None for place in best.values()):
                return {recipe: place for recipe, place in best.items() if place is not None}
        return {}


def recipe_of(row: Row) -> str:
    return "no recipe" if row.get("recipe") is None else str(row["recipe"])


def _budgets(rows: Sequence[Row]) -> list[list[int]]:
    """Group the row indices of finished runs by compute budget, in rising order.

    If a run has no `budget`, each group holds runs of up to SAME_BUDGET times the FLOPs of its smallest run.
    """
    final = [place for place, row in enumerate(rows) if row.get("final", True)]
    groups: dict[float, list[int]] = {}
    named = all(is_number(rows[place].get("budget")) for place in final)
    start = 0.0
    for place in sorted(final, key=lambda place: rows[place]["flops"]):
        flops = rows[place]["flops"]
        if not start or flops > start * SAME_BUDGET:
            start = flops
        groups.setdefault(rows[place]["budget"] if named else start, []).append(place)
    return [groups[budget] for budget in sorted(groups)]


def trend(sweep: Sweep, task: str) -> list[float]:
    """Return the bits per byte on `task` of each budget's best run, by rising FLOPs."""
    return [scored[0] for place in sweep.best() if (scored := sweep.value(place, task, BITS))]


def choices(sweep: Sweep) -> list[Choice]:
    """List the choices between two recipes (else two sizes) that both a smaller and the largest budget offer.

    Each is four row indices: the best runs of both options at the smaller budget, then at the largest.
    """
    made: list[dict[Any, int]] = []
    for group in sweep.budgets:
        places = {size: place for place, size in enumerate(sorted({sweep.rows[run].get("N") or 0 for run in group}))}
        kinds: dict[Any, list[int]] = {}
        for run in group:
            row = sweep.rows[run]
            kinds.setdefault(recipe_of(row) if sweep.recipes else places[row.get("N") or 0], []).append(run)
        made.append({kind: best for kind, runs in kinds.items() if (best := sweep.lowest(runs)) is not None})
    *smaller, largest = made or [{}]
    if not sweep.recipes:
        smaller = [small for small in smaller if len(small) == len(largest)]
    return [
        (small[one], small[other], largest[one], largest[other])
        for small in smaller
        for one, other in combinations(sorted(small.keys() & largest.keys()), 2)
    ]


def task_verdict(signal: Signal) -> str:
    compared = {name: one.clear for measure, name in NAMES.items() if (one := signal.get(measure))}
    clear = [name for name, is_clear in compared.items() if is_clear]
    return " and ".join(clear) or ("nothing" if compared else "unknown")


# --- what the page shows ---------------------------------------------------------------------------------------------


class Task(NamedTuple):
    name: str
    signal: Signal
    verdict: str
    trend: list[float]  # bits per byte of each budget's best run
    panels: list[Panel]
    forecast: str  # a sentence on the accuracy at the largest compute of the forecast


def _task(sweep: Sweep, name: str, signals: Signal, ahead: Sequence[Row]) -> Task:
    panels = _panels(sweep, name, ahead)
    return Task(name, signals, task_verdict(signals), trend(sweep, name), panels, _forecast(ahead))


LAWS = {"compute": "compute", "size": "N and D", "loss": "the loss", "items": "the items"}


def _forecast(rows: Sequence[Row]) -> str:
    """Return a sentence on a task's forecast at its largest compute, and on its backtest; empty without one."""
    last = next((row for row in reversed(rows) if row["metric"] == "acc"), None)
    if last is None:
        return ""
    goal = f"{compute(last['flops'])} FLOPs"
    if last["reason"]:
        return f"No forecast of the accuracy at {goal}: {last['reason']}"
    return (
        f"Forecast of the accuracy at {goal}: {number(last['value'])} [{number(last['low'])}, {number(last['high'])}]. "
        f"The law of {LAWS[last['law']]} leads; the error on held-out larger runs was {number(last['error'])}."
    )


def _differing(tasks: Sequence[Task]) -> list[str]:
    """Return sentences on which tasks tell runs apart."""
    bits = [one.clear for task in tasks if (one := task.signal["gold_bpb"])]
    silent = ", ".join(task.name for task in tasks if task.verdict == "nothing")
    count = f"{sum(bits)} of {counted(len(bits), 'task')}"
    lines = [f"Bits per byte of the right answer tell runs apart on {count}."] if bits else []
    return [*lines, f"Nothing tells them apart on {silent}."] if silent else lines


def _facts(sweep: Sweep) -> list[tuple[str, str, str]]:
    flops = [row["flops"] for row in sweep.rows]
    sizes = [row["N"] for row in sweep.rows if is_number(row.get("N"))]
    runs, budgets = counted(len({row["run_id"] for row in sweep.rows}), "run"), counted(len(sweep.budgets), "budget")
    return [
        ("Checkpoints", f"{len(sweep.rows):,}", f"of {runs}"),
        ("Training FLOPs", compute(max(flops)), f"from {compute(min(flops))}, in {budgets}"),
        ("Parameters (N)", short_count(max(sizes, default=None)), f"from {short_count(min(sizes))}" if sizes else ""),
    ]


def _warnings(sweep: Sweep, row_count: int, answers: Mapping[str, Answers]) -> list[str]:
    lines = []
    finals = [sweep.rows[place]["run_id"] for group in sweep.budgets for place in group]
    if missing := sum(run_id not in answers for run_id in finals):
        lines.append(f"Not compared by item, because their items are missing: {missing} of {len(finals)} runs.")
    if row_count > len(sweep.rows):
        lines.append(f"Left out, because FLOPs are unknown: {row_count - len(sweep.rows)} of {row_count} checkpoints.")
    withheld: dict[str, int] = {}
    for row in sweep.rows:
        for name, scores in row["tasks"].items():
            withheld[name] = withheld.get(name, 0) + bool(scores.get("withheld"))
    if listed := ", ".join(f"{name} {many}" for name, many in withheld.items() if many):
        lines.append(f"Scores were withheld, because the model failed on an item; checkpoints by task: {listed}.")
    return lines


def _said(row: Row) -> str:
    recipe = f", {row['recipe']}" if row.get("recipe") is not None else ""
    return (
        f"{row.get('name') or row['run_id']}{recipe}\n"
        f"N {short_count(row.get('N'))}, D {short_count(row.get('D'))}, step {row.get('step')}\n"
        f"{compute(row['flops'])} FLOPs, loss {number(row.get('loss'), 4)}"
    )


def _recipe_rows(
    sweep: Sweep, tasks: Sequence[str], best: Mapping[str, int]
) -> list[tuple[str, dict[str, Value | None], float | None, int]]:
    """List (name, value by recipe, lowest value, decimals) for held-out loss and each task's bits per byte.

    `best`: recipe -> row index of its best run.
    """
    losses = {recipe: sweep.rows[place].get("loss") for recipe, place in best.items()}
    rows: list[tuple[str, dict[str, Value | None], int]] = [
        ("held-out loss", {recipe: (loss, None) if is_number(loss) else None for recipe, loss in losses.items()}, 4)
    ]
    rows += [(task, {recipe: sweep.value(place, task, BITS) for recipe, place in best.items()}, 3) for task in tasks]
    return [
        (name, values, min((value[0] for value in values.values() if value), default=None), digits)
        for name, values, digits in rows
        if digits == 4 or any(values.values())
    ]


def _panels(sweep: Sweep, task: str, ahead: Sequence[Row]) -> list[Panel]:
    ahead = [row for row in ahead if is_number(row["value"])]
    reach = [row["flops"] for row in [*sweep.rows, *ahead]]
    views = [("flops", "FLOPs", Axis.around(reach, log=True))]
    if losses := [row["loss"] for row in sweep.rows if is_number(row.get("loss"))]:
        views.append(("loss", "held-out loss", Axis.around(losses)))
    panels = (
        _panel(
            sweep, task, keys, name, *view, [row for row in ahead if view[0] == "flops" and row["metric"] == keys[0]]
        )
        for view in views
        for keys, name in ((BITS, "bits per byte"), (SCORE, "accuracy"))
    )
    return [panel for panel in panels if panel]


def _panel(
    sweep: Sweep, task: str, keys: Sequence[str], name: str, field: str, label: str, axis: Axis, ahead: Sequence[Row]
) -> Panel | None:
    points = {
        place: (row[field], *scored)
        for place, row in enumerate(sweep.rows)
        if is_number(row.get(field)) and (scored := sweep.value(place, task, keys))
    }
    if not points:
        return None
    lines = {colour: [place for place in line if place in points] for colour, line in sweep.lines.items()}
    with_bars = set(points) if len(points) <= FEW else {place for line in lines.values() for place in line}
    errors = [(x, y, error) for place, (x, y, error) in points.items() if error and place in with_bars]
    heights = [y for _, y, _ in points.values()] + [y + side * 2 * error for _, y, error in errors for side in (-1, 1)]
    heights += [row[end] for row in ahead for end in ("low", "high")]
    levels = (row["tasks"].get(task, {}).get("chance") for row in sweep.rows)
    chance = next(filter(is_number, levels), None) if keys == SCORE else None
    upright = Axis.around(heights if chance is None else [*heights, chance])
    upright.low = max(upright.low, 0.0)  # neither bits nor accuracy can be negative
    panel = Panel(f"{name} by {label}", axis, upright, label, errors=errors, chance=chance)
    panel.band = [(row["flops"], row["value"], row["low"], row["high"]) for row in ahead]
    for place, (x, y, _) in points.items():
        group = panel.dots if sweep.rows[place].get("final", True) else panel.faint
        group.setdefault(sweep.colour(place), []).append((place, x, y))
    if field == "flops":
        panel.lines = [
            (colour, [points[place][:2] for place in line]) for colour, line in lines.items() if len(line) > 1
        ]
    return panel


def _key(sweep: Sweep) -> list[tuple[str, str]]:
    if sweep.recipes:
        return [(sweep.recipe_colour(recipe), recipe) for recipe in sweep.recipes]
    names = [f"{'to' if place else 'N up to'} {short_count(largest)}" for place, largest in enumerate(sweep.shades)]
    return [(sweep.shade(place), name) for place, name in enumerate(names)]
