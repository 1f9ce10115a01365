"""The report's sections beyond the runs and the law: what conventions, single rungs and tasks change, and the published
laws beside it.

Special here: each section is a function from a page and an analysis to nothing, adds nothing where it has nothing to
say, and shows every number with its interval or says why there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..approaches.conventions import ConventionRow
from ..approaches.recipes import RecipeLaw, sentences
from ..downstream.downstream import TaskVerdict
from ..formatting import amount, count, interval, loss, ratio, scientific, text
from ..results import Analysis
from . import figures_law
from .page import Page, cell, table

KEYS = ("parametric", "isoflop", "envelope")
SHOWN = 8  # rungs and budgets of the influence table; the rest moved less


def influence(page: Page, a: Analysis) -> None:
    """What one size or one budget left out does to the answer."""
    found = a.backtest.get("influence")
    if not found or found["most"] is None:
        return
    rows = []
    entries = [e for e in found["left_out"] if e["N"] is not None]
    for e in sorted(entries, key=_reach, reverse=True)[:SHOWN]:
        what = f"size {count(e['value'])}" if e["kind"] == "size" else f"budget {scientific(e['value'])} FLOPs"
        cells = cell(str(e["runs"])) + cell(f"{e['alpha']:.3f}") + cell(f"{e['beta']:.3f}")
        rows.append(f"<tr><td>{what}</td>{cells}{cell(count(e['N']))}{cell(ratio(e['tokens_per_parameter']))}</tr>")
    target = scientific(a.targets[0])
    head = ("left out", "runs", "α", "β", f"N at {target}", f"D/N at {target}")
    most = found["most"]
    what = f"size {count(most['value'])}" if most["kind"] == "size" else f"budget {scientific(most['value'])} FLOPs"
    page.add(
        f"<h3>What single parts decide</h3><p class=caption>The parametric law without the runs of one size, or of one "
        f"budget; the largest moves. Most depends on {what}.</p>"
        f'<div class="scroll">{table(head, rows)}</div>'
    )


def _reach(entry: dict[str, Any]) -> float:
    moves = [abs(v) for v in entry["moves"].values() if v is not None]
    return max(moves, default=0.0)


def conventions(page: Page, a: Analysis) -> None:
    """The exponent and the answer under each way to count."""
    rows = [_convention_row(row) for row in a.conventions]
    if len(rows) < 2:
        return
    target = scientific(a.targets[0])
    head = (
        "counting of N, of FLOPs",
        "a, parametric",
        "a, isoFLOP",
        "a, envelope",
        f"N at {target}",
        f"D/N at {target}",
    )
    page.add(
        "<h2>Conventions</h2><p>The same runs under each way to count parameters and FLOPs that the table carries. "
        "Compare an exponent with a published one only under the same convention.</p>"
        f'<div class="scroll">{table(head, rows)}</div>'
        "<p class=caption>N and D/N by the parametric law, each in its row's convention, with 95 % intervals.</p>"
    )


def _convention_row(row: ConventionRow) -> str:
    name = f"<td>{text(row.parameters)}, {text(row.flops)}{'<small>this report</small>' if row.own else ''}</td>"
    if row.reason:
        return f'<tr>{name}<td colspan="5" class="sub">left out: {text(row.reason)}</td></tr>'
    cells = []
    for key in KEYS:
        approach = row.approaches[key]
        if approach.exponent is None:
            cells.append(cell("–"))
        else:
            cells.append(cell(f"{approach.exponent:.3f}", interval(approach.exponent_interval, lambda v: f"{v:.2f}")))
    best = row.approaches["parametric"]
    if best.available:
        e = best.at(row.targets[0])
        cells.append(cell(count(e.N), interval(e.intervals["N"], count)))
        cells.append(cell(ratio(e.ratio), interval(e.intervals["ratio"], ratio)))
    else:
        cells += [cell("–"), cell("–")]
    return f"<tr>{name}{''.join(cells)}</tr>"


def recipes(page: Page, a: Analysis) -> None:
    """The laws of the data recipes side by side; nothing where there is one recipe."""
    laws = a.recipes
    if len(laws) < 2:
        return
    target = scientific(laws[0].target)
    head = ("recipe", "runs", "E", "α", "β", f"N at {target}", f"loss at {target}", "paired runs", "laws")
    said = "".join(f"<p>{text(sentence)}</p>" for sentence in sentences(laws))
    page.add(
        "<h2>Data recipes</h2><p>One law a recipe, all scored on the same held-out text. The rest of this report is "
        f"about {text(laws[0].recipe)} alone.</p>{said}"
        f'<div class="scroll">{table(head, [_recipe_row(one) for one in laws])}</div>'
        "<p class=caption>With 95 % intervals. The last two columns are losses less that of the first row, in nats per "
        f"token: of runs that differ in recipe alone, and of the laws at {target} FLOPs, each at its own best size.</p>"
    )


def _recipe_row(one: RecipeLaw) -> str:
    cells = [f"<td>{text(one.recipe)}</td>", cell(str(len(one.table)))]
    law, e = one.law, one.estimate
    if law is None or e is None:
        cells.append(f'<td colspan="5" class="sub">no law: {text(one.reason)}</td>')
    else:
        for name in ("E", "alpha", "beta"):
            cells.append(cell(loss(law.constants_[name]), interval(law.interval(name) if law.draws_ else None, loss)))
        cells.append(cell(count(e.N), interval(e.intervals["N"], count)))
        cells.append(cell(loss(e.loss), interval(e.intervals["loss"], loss)))
    for gap in (one.paired, one.at_target):
        shown = "" if gap is None else interval(gap.interval, lambda v: f"{v:+.4f}")
        cells.append(cell("–" if gap is None else f"{gap.value:+.4f}", shown))
    return f"<tr>{''.join(cells)}</tr>"


def downstream(page: Page, a: Analysis) -> None:
    """Which tasks may be extrapolated, and what they would score; the others with the reason."""
    if not a.tasks:
        return
    rows = [_task_row(task, C) for task in a.tasks for C in (a.targets[0],)]
    target = scientific(a.targets[0])
    head = ("task", "signal to noise", f"accuracy at {target} FLOPs", "verdict")
    page.add(
        "<h3>Tasks at the target</h3><p class=caption>Size and data give the task's loss, the loss gives its accuracy. "
        "A task whose scores differ by no more than noise is refused.</p>"
        f'<div class="scroll">{table(head, rows, numeric_from=1)}</div>'
    )


def _task_row(task: TaskVerdict, target: float) -> str:
    signal = "–" if task.score is None or not np.isfinite(task.score.ratio) else amount(task.score.ratio)
    found = next((p for p in task.predictions if p.flops == target), None)
    if found is None:
        accuracy, said = cell("–"), f"refused: {task.reason}"
    else:
        accuracy = cell(f"{found.acc:.3f}", interval(found.acc_interval, lambda v: f"{v:.3f}"))
        said = f"refused: {found.reason}" if found.reason else "may be extrapolated"
    return f'<tr><td>{text(task.task)}</td>{cell(signal)}{accuracy}<td class="sub wrap">{text(said)}</td></tr>'


def published(page: Page, a: Analysis) -> None:
    """N* of this law beside the published ones."""
    drawn = page.figure(
        "published",
        figures_law.published(a),
        "Dotted: published laws, each in its own counting, tokenizer and data; compare slopes before heights.",
    )
    if drawn:
        page.add(f"<h3>Beside published laws</h3>{drawn}")


def suspects(page: Page, a: Analysis) -> None:
    """Why the approaches may disagree, where they do."""
    if a.verdict.suspects:
        items = "".join(f"<li>{text(s)}</li>" for s in a.verdict.suspects)
        page.add(f"<h3>Why the approaches may disagree</h3><ul>{items}</ul>")
