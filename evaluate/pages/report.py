"""Show one checkpoint's scores as a page (`templates/checkpoint.html`) and as a plain table.

A withheld number is never a zero. Two checkpoints are compared item by item, which makes the error of the mean
difference far smaller than two separate errors suggest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...train.errors import counted
from ..metrics import above_chance, mean_and_error, task_label
from .page import compute, grouped, guessing, is_number, number, render_page, scored, short_count, with_error

Scores = Mapping[str, Any]
Items = Sequence[Mapping[str, Any]]
Other = tuple[Scores, Items]
MANY = 5  # tasks that a warning lists
# Numbers of a task with a fixed column on the page; any other number with a standard error is a further metric.
PLACED = ("acc", "acc_norm", "gold_bpb", "p_right", "margin", "bpb")
# Measures of two checkpoints: (key, name, whether more is better).
MEASURES = (
    ("acc", "accuracy", True),
    ("exact_match", "exact match", True),
    ("gold_bpb", "gold BPB", False),
    ("bpb", "bits per byte", False),
    ("p_right", "p(right)", True),
    ("margin", "margin", True),
)
# Metrics that tell whether an item was answered correctly; the first one present counts.
VERDICTS = ("acc", "exact_match", "acc_norm")


def checkpoint_page(scores: Scores, items: Items = (), against: Other | None = None) -> str:
    """Return a self-contained HTML page of a checkpoint: the scores from `Evaluator.evaluate`, and its items.

    `against`: scores and items of another checkpoint, to compare item by item.
    """
    name, worst = scores.get("name") or scores["run_id"], (scores.get("held_out") or {}).get("worst")
    tasks = {task: task_scores for task, task_scores in scores["tasks"].items() if not _is_domain(task_scores)}
    domains = sorted(
        ((task, task_scores) for task, task_scores in scores["tasks"].items() if _is_domain(task_scores)),
        key=lambda pair: pair[1]["bpb"],
    )
    count = sum(task.get("contaminated_items") == 0 for task in tasks.values())  # looked through and found clean
    among = counted(count, "task") if count == len(tasks) else f"{count} of {counted(len(tasks), 'task')}"
    clean = [f"No item of {among} shares text with the training data."] if count else []
    sections = {
        ("tasks", "Benchmarks"): tasks or not scores["tasks"],
        ("domains", "Text by domain"): domains,
        ("against", "Compared"): against,
        ("samples", "Samples"): items,
        ("worst", "Worst losses"): worst,
    }
    context = {
        "name": name,
        "scores": scores,
        "tasks": tasks,
        "domains": domains,
        "items": items,
        "worst": worst,
        "sections": [section for section, is_there in sections.items() if is_there],
        "sampled": task_order(scores, items),
        "further_metrics": _further_metrics,
        "lead": guessing(tasks, "Accuracy"),
        "above": above_chance(tasks),
        "facts": _facts(scores),
        "warnings": _warnings(scores),
        "footer": _footer(scores),
        "remarks": [*_suites(scores), *clean],
        "other": against[0] if against else None,
        "other_name": _called(against[0]) if against else "",
        "differences": _differences(items, against[1]) if against else {},
    }
    title = f"Scores of {name}, step {scores['step']}"
    script, data = ("samples.js", payload(scores, items, against)) if items else ("", None)
    return render_page("checkpoint.html", title, context, "samples.css", script, data)


def _facts(scores: Scores) -> list[tuple[str, str, str]]:
    held_out = scores.get("held_out") or {}
    active = scores.get("N_active", scores.get("N_total"))  # another version's scores do not say
    counts = [("Parameters (N_total)", "N_total"), ("N_non_embedding", "N_non_embedding"), ("Tokens (D)", "tokens")]
    counts[1:1] = [] if active == scores.get("N_total") else [("N_active", "N_active")]
    known_counts = [(name, scores.get(key)) for name, key in counts]
    facts = [(name, short_count(count), grouped(count)) for name, count in known_counts if count is not None]
    if scores.get("flops") is not None:
        six = "" if not active else f"exact; 6ND is {compute(6 * active * scores['tokens'])}"
        facts.append(("Training FLOPs", compute(scores["flops"]), six))
    error = held_out.get("val_loss_se")
    unit = f"{'' if error is None else f'± {error:.4f} '}nats per token"
    facts.append(("Held-out loss", number(held_out.get("val_loss"), 4), unit))
    facts.append(("Held-out bits per byte", number(held_out.get("val_bpb"), 4), ""))
    return facts


def _footer(scores: Scores) -> str:
    parts = {
        "run": scores["run_id"],
        "checkpoint SHA-256": str(scores.get("checkpoint_sha256") or "")[:16],
        "context": f"{scores['sequence_length']} tokens",
        "tokenizer": str(scores.get("tokenizer") or "")[:16],
        "lm-eval": scores["lm_eval_version"],
        "precision": scores.get("precision"),
        "scored on": f"{scores['device']} in {scores['seconds']:.1f} s",
    }
    return " · ".join(f"{key} {value}" for key, value in parts.items() if value)


def _suites(scores: Scores) -> list[str]:
    return [
        f"Suite {name}: {with_error(mean['centered'], mean.get('centered_se'))} mean centered accuracy over "
        f"{counted(mean['tasks'], 'task')}; 0 is guessing, 1 is all correct."
        for name, mean in (scores.get("suites") or {}).items()
        if is_number(mean.get("centered"))
    ]


def _is_domain(task: Scores) -> bool:
    """Return whether a task scores whole texts: it has bits per byte, but no questions with answers."""
    return task.get("bpb") is not None and task.get("acc") is None and task.get("gold_bpb") is None


def _further_metrics(task: Scores) -> list[str]:
    names = [key[:-3] for key in task if key.endswith("_se") and key[:-3] not in PLACED]
    return [name for name in names if is_number(task.get(name))]


def _warnings(scores: Scores) -> list[str]:
    tasks = scores["tasks"]
    lines = [f"{name} has no score: {task['withheld']}." for name, task in tasks.items() if task["withheld"]]
    cut = {name: task for name, task in tasks.items() if task["truncated_items"] and not task["withheld"]}
    context = f"on the left to the model's context of {scores['sequence_length']} tokens"
    if cut:
        lines.append(f"Prompts were cut {context}: {_listed(cut, 'truncated_items')}.")
    if contaminated := {name: task for name, task in tasks.items() if task.get("contaminated_items")}:
        lines.append(f"Items that share text with the training data: {_listed(contaminated, 'contaminated_items')}.")
    settings = {"precision": "precision", "lm_eval_version": "lm-eval", "scoring": "scoring"}
    for name, task in tasks.items():
        if differences := [
            f"{label} {task[key]}" for key, label in settings.items() if task.get(key, old := scores.get(key)) != old
        ]:
            lines.append(f"{name} was scored with different settings from the rest: {', '.join(differences)}.")
    if scores.get("contamination_withheld"):
        lines.append(f"Contamination is unknown: {scores['contamination_withheld']}.")
    if (scores.get("held_out") or {}).get("withheld"):
        lines.append(f"Held-out loss is missing: {scores['held_out']['withheld']}.")
    return lines


def _listed(tasks: Mapping[str, Scores], key: str) -> str:
    listed = [f"{name} {task[key]:,} of {task['items']:,}" for name, task in tasks.items()]
    return ", ".join(listed[:MANY]) + (f", and {counted(len(listed) - MANY, 'other task')}" if listed[MANY:] else "")


# --- against another checkpoint --------------------------------------------------------------------------------------


def _called(scores: Scores) -> str:
    size = scores.get("N_total")
    shown = f" ({short_count(size)} parameters)" if is_number(size) else ""
    step = f" at step {scores['step']}" if is_number(scores.get("step")) else ""
    return f"{scores.get('name') or scores.get('run_id') or 'a checkpoint without a name'}{step}{shown}"


@dataclass(frozen=True)
class Difference:
    """This checkpoint minus the other one, over `items` items that both answered; `error`: paired standard error."""

    items: int
    own: float
    other: float
    value: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        return self.error is not None and abs(self.value) > 2 * self.error


def _key_of(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for two items exactly if they are the same question; the index alone does not tell."""
    return (item.get("task"), item.get("index"), item.get("prompt"), tuple(item.get("choices") or ()))


def paired_differences(
    items: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Difference]]:
    """Return task -> measure (such as acc) -> difference of two checkpoints on the items where both have a number."""
    others_by_key = {_key_of(item): item for item in others}
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for item in items:
        if (other := others_by_key.get(_key_of(item))) is None:
            continue
        for measure, _, _ in MEASURES:
            a, b = ((one.get("values") or {}).get(measure, one.get(measure)) for one in (item, other))
            if is_number(a) and is_number(b):
                pairs.setdefault((str(item["task"]), measure), []).append((float(a), float(b)))
    differences: dict[str, dict[str, Difference]] = {}
    for (task, measure), both in pairs.items():
        value, error = mean_and_error([a - b for a, b in both])
        assert value is not None
        own_mean, other_mean = (sum(side) / len(both) for side in zip(*both, strict=True))
        differences.setdefault(task, {})[measure] = Difference(len(both), own_mean, other_mean, value, error)
    return differences


def _differences(items: Items, others: Items) -> dict[str, list[tuple[str, Difference, str]]]:
    def tone(difference: Difference, more_is_better: bool) -> str:
        return "soft" if not difference.is_clear else "better" if (difference.value > 0) == more_is_better else "worse"

    return {
        task: [
            (name, by_measure[key], tone(by_measure[key], more)) for key, name, more in MEASURES if key in by_measure
        ]
        for task, by_measure in paired_differences(items, others).items()
    }


# --- samples ---------------------------------------------------------------------------------------------------------


def is_right(item: Mapping[str, Any]) -> bool | None:
    """Return whether an item was answered correctly; None if none of its metrics tells, as for whole texts."""
    values = item.get("values") or {}
    names = [*VERDICTS, *sorted(name for name in values if name.startswith("exact_match"))]
    return next((values[name] >= 0.5 for name in names if is_number(values.get(name))), None)


def payload(scores: Scores, items: Items, against: Other | None) -> dict[str, Any]:
    """Return the data of the page's script: items with answers of this checkpoint, and of `against` if given."""
    others = {_key_of(item): item for item in against[1]} if against else {}
    tasks = task_order(scores, items)
    places = {task: place for place, task in enumerate(tasks)}
    packed = []
    for item in items:
        question = _known(item, "index", "prompt", "choices", "right", "target")
        entry = {"task": places[str(item.get("task"))], **question, **_answer(item)}
        entry |= {flag: 1 for flag in ("truncated", "contaminated") if item.get(flag)}
        if (other := others.get(_key_of(item))) is not None:
            entry["other"] = _answer(other)
        packed.append(entry)
    return {"tasks": tasks, "names": ["this checkpoint", _called(against[0]) if against else None], "items": packed}


def task_order(scores: Scores, items: Items) -> list[str]:
    with_items = {str(item.get("task")) for item in items}
    return [*(name for name in scores["tasks"] if name in with_items), *sorted(with_items - scores["tasks"].keys())]


def _known(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: item[name] for name in names if item.get(name) is not None}


def _answer(item: Mapping[str, Any]) -> dict[str, Any]:
    right = is_right(item)
    numbers = _known(item, "log_probabilities", "answer", "gold_bpb", "p_right", "margin", "bpb", "values")
    return numbers | ({} if right is None else {"ok": int(right)})


# --- for a terminal --------------------------------------------------------------------------------------------------

# Columns of the plain table: key, heading. The rare ones are shown only if some task has the number.
_COLUMNS = (("acc", "accuracy"), ("acc_norm", "acc_norm"), ("gold_bpb", "gold BPB"))
_RARE = (("p_right", "p(right)"), ("margin", "margin"), ("bpb", "bits/byte"))


def format_scores(scores: Scores) -> str:
    tasks = scores["tasks"]
    further = sorted({name for task in tasks.values() for name in _further_metrics(task)})
    rare = [(key, name) for key, name in _RARE if any(is_number(task.get(key)) for task in tasks.values())]
    columns = [*_COLUMNS, *rare, *((name, name) for name in further)]
    lines = [["task", "items", *(name for _, name in columns)]]
    lines[0].insert(3, "chance")
    for name, task in tasks.items():
        cells = [scored(task, key) for key, _ in columns]
        lines.append([task_label(name, task), str(task["items"]), cells[0], number(task["chance"]), *cells[1:]])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, *guessing(tasks, "Accuracy"), *_suites(scores), *_warnings(scores)])
