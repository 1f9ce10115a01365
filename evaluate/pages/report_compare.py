"""A checkpoint beside others: those of the same compute, and one other item by item.

Special here:
- Two checkpoints that answered the same items are compared item by item: the error of the mean difference is far
  smaller than two separate errors suggest, because an item that is hard for one is hard for both.
- An item is the same only where prompt and choices are the same, not where the place in the dataset is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..metrics import mean_and_error
from .charts import strip
from .page import cell, compute, count, is_number, name_of, number, row, signed, table, text

EQUAL = 1.5  # checkpoints whose compute differs by no more than this factor are compared
# (key, name, whether more is better)
MEASURES = (
    ("acc", "accuracy", True),
    ("exact_match", "exact match", True),
    ("gold_bpb", "gold BPB", False),
    ("bpb", "bits per byte", False),
    ("p_right", "p(right)", True),
    ("margin", "margin", True),
)


def at_equal_compute(
    scores: Mapping[str, Any], peers: Iterable[Mapping[str, Any]], factor: float = EQUAL
) -> list[Mapping[str, Any]]:
    """The other checkpoints whose FLOPs are within the factor, nearest first; none where a number is missing."""
    own = scores.get("flops")
    if not is_number(own) or own <= 0:
        return []
    near = [
        (abs(math.log(peer["flops"] / own)), place, peer)
        for place, peer in enumerate(peers)
        if is_number(peer.get("flops")) and peer["flops"] > 0 and not _same(peer, scores)
    ]
    reach = math.log(factor) + 1e-9
    return [peer for distance, _, peer in sorted(near, key=lambda entry: entry[:2]) if distance <= reach]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one.get("run_id"), one.get("step")) == (other.get("run_id"), other.get("step"))


def key_of(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two items the same question."""
    return (item.get("task"), item.get("index"), item.get("prompt"), tuple(item.get("choices") or ()))


def number_of(item: Mapping[str, Any], measure: str) -> float | None:
    """One number of an item: one of its metrics, or what stands beside them."""
    values = item.get("values") or {}
    value = values[measure] if measure in values else item.get(measure)
    return float(value) if is_number(value) else None


@dataclass(frozen=True)
class Difference:
    """This checkpoint less the other one, over `items` that both answered; `error` is the paired standard error."""

    items: int
    own: float
    other: float
    value: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Whether it is more than two standard errors."""
        return self.error is not None and abs(self.value) > 2 * self.error


def paired(items: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Difference]]:
    """Task -> measure -> difference, over the items that both have a number for."""
    known = {key_of(item): item for item in others}
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for item in items:
        other = known.get(key_of(item))
        if other is None:
            continue
        for measure, _, _ in MEASURES:
            a, b = number_of(item, measure), number_of(other, measure)
            if a is not None and b is not None:
                pairs.setdefault((str(item["task"]), measure), []).append((a, b))
    found: dict[str, dict[str, Difference]] = {}
    for (task, measure), both in pairs.items():
        value, error = mean_and_error([a - b for a, b in both])
        assert value is not None
        own, other_mean = (sum(side) / len(both) for side in zip(*both, strict=True))
        found.setdefault(task, {})[measure] = Difference(len(both), own, other_mean, value, error)
    return found


def called(scores: Mapping[str, Any]) -> str:
    """A checkpoint in a few words."""
    size = count(scores.get("N_total"))
    return f"{scores.get('name') or scores.get('run_id')} at step {scores.get('step')}" + (
        f" ({size} parameters)" if size != "–" else ""
    )


def compute_section(scores: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> str:
    """The page's section on the sweep's checkpoints of about the same compute; empty where there are no others."""
    others = [peer for peer in peers if not _same(peer, scores)]
    if not others:
        return ""
    head = '<section><h2 id="compute">At equal compute</h2>'
    near = at_equal_compute(scores, others)
    if not near:
        return f"{head}<p>{_nearest(scores, others)}</p></section>"
    flops = [peer["flops"] for peer in near]
    said = (
        f"{len(near)} of the sweep's {len(others)} other checkpoints took between {compute(min(flops))} and "
        f"{compute(max(flops))} FLOPs; this one took {compute(scores['flops'])}. Each is a dot, this one is blue, with "
        "two standard errors; the upright line is chance. Better is right for accuracy, left for bits per byte."
    )
    rows = []
    for name, task in scores["tasks"].items():
        cells = [_strip_cells(task, near, name, keys) for keys in (("gold_bpb", "bpb"), ("acc", "exact_match"))]
        if any(cells):
            rows.append(row(name_of(name), [found or '<td class="r">–</td><td></td><td></td>' for found in cells]))
    shown = table(["task", "BPB", "", "place", "accuracy", "", "place"], rows, left=(0, 2, 5)) if rows else ""
    return f'{head}<p class="soft">{said}</p>{shown}</section>'


def _nearest(scores: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    own = scores.get("flops")
    known = [peer["flops"] for peer in others if is_number(peer.get("flops")) and peer["flops"] > 0]
    if not is_number(own) or own <= 0 or not known:
        return "The compute of this checkpoint or of the others is not recorded, so nothing is compared."
    nearest = min(known, key=lambda flops: abs(math.log(flops / own)))
    return (
        f"None of the sweep's {len(others)} other checkpoints is within a factor {EQUAL} of this one's "
        f"{compute(own)} FLOPs; the nearest took {compute(nearest)}."
    )


def _strip_cells(task: Mapping[str, Any], near: Sequence[Mapping[str, Any]], name: str, keys: Sequence[str]) -> str:
    """Three cells, the value, the picture and this checkpoint's place; empty where the task has no such number."""
    key = next((key for key in keys if is_number(task.get(key))), None)
    if key is None:
        return ""
    own, others = task[key], []
    for peer in near:
        value = (peer["tasks"].get(name) or {}).get(key)
        if is_number(value):
            others.append((value, f"{called(peer)}, {compute(peer['flops'])} FLOPs: {value:.4f}"))
    more = next(more for measure, _, more in MEASURES if measure == key)
    better = sum(value > own if more else value < own for value, _ in others)
    picture = strip(own, task.get(f"{key}_se"), others, task.get("chance") if more else None)
    place = f"{better + 1} of {len(others) + 1}" if others else "–"
    return f'<td class="r">{number(own)}</td><td class="pic">{picture}</td><td class="r">{place}</td>'


def against_section(
    scores: Mapping[str, Any], items: Sequence[Mapping[str, Any]], other: tuple[Mapping[str, Any], Sequence[Any]] | None
) -> str:
    """The page's section on one other checkpoint, item by item."""
    if other is None:
        return ""
    head = (
        f'<section><h2 id="against">Against {text(called(other[0]))}</h2>'
        f'<p class="soft path">{text(other[0].get("checkpoint", ""))}</p>'
    )
    found = paired(items, other[1])
    if not found:
        return f"{head}<p>The two have no item with the same prompt and choices, so nothing is compared.</p></section>"
    rows = []
    for task, measures in found.items():
        known = [entry for entry in MEASURES if entry[0] in measures]
        for place, (key, name, more) in enumerate(known):
            heading = "" if place else f'<th scope="rowgroup" rowspan="{len(known)}">{name_of(task)}</th>'
            cells = "".join(_difference_cells(measures[key], name, more))
            rows.append(f"<tr{'' if place else ' class=first'}>{heading}{cells}</tr>")
    said = (
        "Means over the items that both answered, with the paired standard error: the spread of the differences item "
        "by item, over the root of their number."
    )
    columns = ["task", "measure", "items", "this", "other", "difference", ""]
    return f'{head}<p class="soft">{said}</p>{table(columns, rows, left=(0, 1, 6))}</section>'


def _difference_cells(difference: Difference, name: str, more: bool) -> list[str]:
    better = (difference.value > 0) == more
    tone = ("better" if better else "worse") if difference.is_clear else "soft"
    error = "" if difference.error is None else f'<small class="in">± {difference.error:.3f}</small>'
    return [
        f"<td>{text(name)}</td>",
        cell(f"{difference.items:,}"),
        cell(number(difference.own)),
        cell(number(difference.other)),
        f'<td class="r"><span class="{tone}">{signed(difference.value)}</span>{error}</td>',
        f'<td class="{tone}">{tone if difference.is_clear else "within two errors"}</td>',
    ]
