"""One checkpoint's scores as a page and as plain text.

Special here: warnings stand before numbers; chance is drawn beside accuracy, because an accuracy says nothing without
it; a number that was withheld is never a zero. The page is one file without fonts or network, and without a script
where there are no samples to look through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...train.files import write_atomic
from .charts import bar
from .page import (
    cards,
    cell,
    compute,
    count,
    document,
    is_number,
    name_of,
    number,
    row,
    soften,
    table,
    text,
    warnings_list,
    with_error,
)
from .report_compare import against_section, compute_section
from .report_items import STYLE, payload, samples_section, task_order, worst_section
from .report_script import SAMPLES

Items = Sequence[Mapping[str, Any]]
Other = tuple[Mapping[str, Any], Items]
MANY = 5  # cut tasks that still get a line each
# Numbers of a task that have a place of their own on the page; any other with a standard error is a further metric.
PLACED = ("acc", "acc_norm", "gold_bpb", "p_right", "margin", "bpb")
EXPLAINED = (
    "± is one standard error over items. The bar is accuracy, its whisker two standard errors, the tick chance. "
    "Gold BPB: what the model spends on the right answer, in bits per UTF-8 byte; lower is better, and below a billion "
    "parameters it moves before accuracy does. p(right): probability of the right choice among the choices; margin: "
    "what it has over the best wrong one. Clean part: the items that share no text with the training data."
)


def write_checkpoint_report(
    scores: Mapping[str, Any],
    path: Path,
    items: Items = (),
    peers: Sequence[Mapping[str, Any]] = (),
    against: Other | None = None,
) -> None:
    """Writes a self-contained HTML page.

    Args:
        scores: what `evaluate_checkpoint` returned.
        path: of the page.
        items: the items of its tasks, as the items file holds them: the samples.
        peers: scores of the sweep's other checkpoints, with their `flops`: what equal compute buys elsewhere.
        against: scores and items of one other checkpoint, to be compared item by item.
    """
    write_atomic(path, render(scores, items, peers, against))


def render(
    scores: Mapping[str, Any], items: Items = (), peers: Sequence[Mapping[str, Any]] = (), against: Other | None = None
) -> str:
    """The page as text."""
    held_out = scores.get("held_out") or {}
    sections = [
        _benchmarks(scores, task_order(scores, items)),
        _domains(scores),
        compute_section(scores, peers),
        against_section(scores, items, against),
        samples_section(items, against),
        worst_section(held_out),
    ]
    names = ("Benchmarks", "Text by domain", "At equal compute", "Compared", "Samples", "Worst losses")
    anchors = ("tasks", "domains", "compute", "against", "samples", "worst")
    present = [(name, anchor) for name, anchor, part in zip(names, anchors, sections, strict=True) if part]
    links = "".join(f'<a href="#{anchor}">{name}</a>' for name, anchor in present)
    body = (
        f"<h1>{text(scores.get('name') or scores['run_id'])}, step {text(_whole(scores['step']))}</h1>"
        f'<div class="soft path">{text(scores["checkpoint"])}</div>'
        f"{f'<nav aria-label=sections>{links}</nav>' if len(present) > 1 else ''}"
        f"{warnings_list(_warnings(scores))}{cards(_facts(scores))}{''.join(sections)}{_footer(scores)}"
    )
    title = f"Scores of {scores.get('name') or scores['run_id']}, step {scores['step']}"
    if not items:
        return document(title, body, style=STYLE)
    return document(title, body, data=payload(scores, items, against), script=SAMPLES, style=STYLE)


def _facts(scores: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    held_out = scores.get("held_out") or {}
    facts = {"Parameters (N_total)": (count(scores["N_total"]), _whole(scores["N_total"]))}
    if scores.get("N_non_embedding") is not None:
        facts["N_non_embedding"] = (count(scores["N_non_embedding"]), _whole(scores["N_non_embedding"]))
    facts["Tokens (D)"] = (count(scores["tokens"]), _whole(scores["tokens"]))
    if scores.get("flops") is not None:
        six = "" if not scores["N_total"] else f"exact; 6ND is {compute(6 * scores['N_total'] * scores['tokens'])}"
        facts["Training FLOPs"] = (compute(scores["flops"]), six)
    error = held_out.get("val_loss_se")
    facts["Held-out loss"] = (
        number(held_out.get("val_loss"), 4),
        f"{'' if error is None else f'± {error:.4f} '}nats a token",
    )
    facts["Held-out bits per byte"] = (number(held_out.get("val_bpb"), 4), "")
    return facts


def _footer(scores: Mapping[str, Any]) -> str:
    known = {
        "run": scores["run_id"], "checkpoint SHA-256": str(scores.get("checkpoint_sha256") or "")[:16],
        "context": f"{scores['sequence_length']} tokens", "tokenizer": str(scores.get("tokenizer") or "")[:16],
        "lm-eval": scores["lm_eval_version"], "precision": scores.get("precision"),
        "scored on": f"{scores['device']} in {scores['seconds']:.1f} s",
    }  # fmt: skip
    return f"<footer>{text(' · '.join(f'{key} {value}' for key, value in known.items() if value))}</footer>"


def _whole(value: Any) -> str:
    return f"{value:,}" if is_number(value) else str(value)


def _benchmarks(scores: Mapping[str, Any], sampled: Sequence[str]) -> str:
    tasks = {name: task for name, task in scores["tasks"].items() if not _is_domain(task)}
    if not tasks:
        return "" if scores["tasks"] else '<section><h2 id="tasks">Benchmarks</h2><p>No task was scored.</p></section>'
    rows = []
    for name, task in tasks.items():
        rows.append(row(_named(name, sampled), _cells(task)))
        clean = task.get("clean")
        if clean and clean["items"] != task["items"]:
            rows.append(row("clean part", _clean_cells(clean, task), "part"))
    head = ["task", "items", "shots", "accuracy", "", "chance", "acc_norm", "gold BPB", "p(right)", "margin"]
    shown = table(head, rows, left=(0, 4))
    said = "".join(f"<p>{text(line)}</p>" for line in [*_suites(scores), *_uncontaminated(tasks)])
    return f'<section><h2 id="tasks">Benchmarks</h2>{said}{shown}<p class="soft small">{EXPLAINED}</p></section>'


def _uncontaminated(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many tasks were looked through and found clean; nothing where nobody looked."""
    clean = sum(task.get("contaminated_items") == 0 for task in tasks.values())
    among = f"the {len(tasks)}" if clean == len(tasks) else f"{clean} of the {len(tasks)}"
    return [f"No item of {among} tasks shares text with the training data."] if clean else []


def _suites(scores: Mapping[str, Any]) -> list[str]:
    """A sentence a suite that was scored whole."""
    return [
        f"Suite {name}: {with_error(mean['centered'], mean.get('centered_se'))} mean centered accuracy over "
        f"{mean['tasks']} tasks; 0 is guessing, 1 is all right."
        for name, mean in (scores.get("suites") or {}).items()
        if is_number(mean.get("centered"))
    ]


def _of(part: int, whole: int) -> str:
    """How many there are, and of how many where that is more."""
    return f"{part:,}" if part == whole else f"{part:,} of {whole:,}"


def _is_domain(task: Mapping[str, Any]) -> bool:
    """Text, scored as a whole: bits per byte and no answer."""
    return task.get("bpb") is not None and task.get("acc") is None and task.get("gold_bpb") is None


def _named(name: str, sampled: Sequence[str]) -> str:
    """A task's name; where it has samples on the page, a link to them."""
    return f'<a href="#task={sampled.index(name)}">{name_of(name)}</a>' if name in sampled else name_of(name)


def _cells(task: Mapping[str, Any]) -> list[str]:
    shots = cell(str(task.get("shots", "–")))
    many = cell(_of(task["items"], task["subset"]["of"]))
    if task["withheld"]:
        return [many, shots, '<td colspan="7" class="soft">withheld</td>']
    return [many, shots, *_numbers(task, bar(task.get("acc"), task.get("acc_se"), task["chance"], what="accuracy"))]


def _clean_cells(clean: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    return [cell(f"{clean['items']:,}"), "<td></td>", *_numbers({"chance": task["chance"], **clean}, "")]


def _numbers(task: Mapping[str, Any], picture: str) -> list[str]:
    further = [f"<div><i>{name_of(key)}</i> {soften(value)}</div>" for key, value in _further(task).items()]
    if task.get("acc") is not None or not further:
        further.insert(0, soften(with_error(task.get("acc"), task.get("acc_se"))))
    scored = [cell(with_error(task.get(key), task.get(f"{key}_se"))) for key in PLACED[1:-1]]
    return [
        f'<td class="r">{"".join(further)}</td>',
        f'<td class="pic">{picture}</td>',
        cell(number(task.get("chance"))),
        *scored,
    ]


def _further(task: Mapping[str, Any]) -> dict[str, str]:
    """Metrics of the task beyond those that every task may have: exact_match, f1, …"""
    names = [key[:-3] for key in task if key.endswith("_se") and key[:-3] not in PLACED]
    return {name: with_error(task.get(name), task.get(f"{name}_se")) for name in names if is_number(task.get(name))}


def _domains(scores: Mapping[str, Any]) -> str:
    tasks = {name: task for name, task in scores["tasks"].items() if _is_domain(task)}
    if not tasks:
        return ""
    largest = max(task["bpb"] for task in tasks.values()) * 1.05
    rows = [
        row(text(name), [
            cell(_of(task["items"], task["subset"]["of"])), cell(with_error(task["bpb"], task["bpb_se"], 4)),
            f'<td class="pic">{bar(task["bpb"], task["bpb_se"], None, largest, "bits per byte")}</td>',
        ])
        for name, task in sorted(tasks.items(), key=lambda entry: entry[1]["bpb"])
    ]  # fmt: skip
    shown = table(["domain", "documents", "bits per byte", ""], rows, left=(0, 3))
    return (
        f'<section><h2 id="domains">Text by domain</h2>{shown}<p class="soft small">Bits over UTF-8 bytes of all '
        "documents; lower is better. ± is one standard error over documents.</p></section>"
    )


def _warnings(scores: Mapping[str, Any]) -> list[str]:
    tasks, lines = scores["tasks"], []
    lines += [f"{name} has no score: {task['withheld']}." for name, task in tasks.items() if task["withheld"]]
    cut = {name: task for name, task in tasks.items() if task["truncated_items"] and not task["withheld"]}
    context = f"on the left to the model's context of {scores['sequence_length']} tokens"
    if len(cut) > MANY:
        listed = ", ".join(f"{name} {task['truncated_items']:,} of {task['items']:,}" for name, task in cut.items())
        lines.append(f"Prompts of {len(cut)} tasks were cut {context}: {listed}.")
    else:
        for name, task in cut.items():
            many = f"{task['truncated_items']:,} of {task['items']:,}"
            lines.append(f"{name}: the prompts of {many} items were cut {context}.")
    found = {name: task for name, task in tasks.items() if task.get("contaminated_items")}
    if found:
        listed = ", ".join(
            f"{name} {task['contaminated_items']:,} of {task['items']:,}" for name, task in found.items()
        )
        lines.append(f"Items that share text with the training data: {listed}.")
    if scores.get("contamination_withheld"):
        lines.append(f"Contamination is not known: {scores['contamination_withheld']}.")
    if (scores.get("held_out") or {}).get("withheld"):
        lines.append(f"Held-out loss is missing: {scores['held_out']['withheld']}.")
    return lines


# Columns of the plain table: key, heading; those that stand only where some task has the number come last.
_COLUMNS = (("acc", "accuracy"), ("acc_norm", "acc_norm"), ("gold_bpb", "gold BPB"))
_RARE = (("p_right", "p(right)"), ("margin", "margin"), ("bpb", "bits/byte"))


def format_scores(scores: Mapping[str, Any]) -> str:
    """The same as a plain table, for a terminal."""
    tasks = scores["tasks"]
    further = sorted({name for task in tasks.values() for name in _further(task)})
    rare = [(key, name) for key, name in _RARE if any(is_number(task.get(key)) for task in tasks.values())]
    columns = [*_COLUMNS, *rare, *((name, name) for name in further)]
    lines = [["task", "items", *(name for _, name in columns)]]
    lines[0].insert(3, "chance")
    for name, task in tasks.items():
        cells = [with_error(task.get(key), task.get(f"{key}_se")) for key, _ in columns]
        lines.append([name, str(task["items"]), cells[0], number(task["chance"]), *cells[1:]])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(shown + _suites(scores) + _warnings(scores))
