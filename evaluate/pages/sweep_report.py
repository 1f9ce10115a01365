"""A sweep's benchmarks as one page: tasks by compute, loss to accuracy, and which tasks mean something at this scale.

Special here:
- Every panel is static SVG. The script adds what a pointer wants: which run a dot is, and the same run in every panel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...train.files import write_atomic
from .charts import Axis, Panel
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
    signed,
    spell,
    table,
    text,
    warnings_list,
    with_error,
)
from .report_script import SWEEP
from .sweep_rows import BITS, SCORE, Sweep, Trend, recipe_of, strength, trend, verdict

FEW = 60  # checkpoints in a panel that still get error bars of their own

STYLE = """
.panels{display:grid;grid-template-columns:repeat(4,1fr);gap:10px 14px}
@media (max-width:1120px){.panels{grid-template-columns:1fr 1fr}}
@media (max-width:560px){.panels{grid-template-columns:1fr}}
.panel{margin:0;min-width:0}.panel svg{width:100%;max-width:340px;height:auto;
overflow:visible}.panel svg.link{cursor:pointer}
.panel figcaption{font-size:.82rem;color:var(--soft);padding-left:8px}
.grid{stroke:var(--faint)}
.panel .chance{stroke-width:1.3;stroke-dasharray:5 3}.err{stroke:var(--soft);stroke-width:1;stroke-opacity:.55}
.pts{fill:none;stroke-width:6.5;stroke-linecap:round;stroke-opacity:.8}.pts.faint{stroke-width:4;stroke-opacity:.35}
.line{fill:none;stroke-width:1.6;stroke:var(--ink)}.ring{fill:none;stroke:var(--ink);stroke-width:2}
.n0{stroke:var(--n0)}.n1{stroke:var(--n1)}.n2{stroke:var(--n2)}.n3{stroke:var(--n3)}.n4{stroke:var(--n4)}
.n5{stroke:var(--n5)}.r0{stroke:var(--r0)}.r1{stroke:var(--r1)}.r2{stroke:var(--r2)}.r3{stroke:var(--r3)}
.r4{stroke:var(--r4)}.r5{stroke:var(--r5)}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;font-size:.85rem;color:var(--soft);margin:8px 0}
.key span{display:inline-flex;align-items:center;gap:6px}.key svg{width:22px;height:12px}
#note{position:fixed;z-index:5;max-width:340px;background:var(--paper);border:1px solid var(--line);border-radius:6px;
padding:6px 10px;font-size:.82rem;white-space:pre-line;overflow-wrap:anywhere;pointer-events:none;
box-shadow:0 3px 12px #0003}th button{font:inherit;font-weight:600;color:inherit;background:none;border:0;padding:0;
cursor:pointer}th[aria-sort] button{color:var(--accent)}th[aria-sort=ascending] button::after{content:" ↑"}
th[aria-sort=descending] button::after{content:" ↓"}.sortable .scroll{margin:0}
"""


def write_sweep_report(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    signal: Mapping[str, Mapping[str, Any]],
    title: str,
    links: Mapping[str, str] | None = None,
) -> None:
    """Writes a self-contained HTML page.

    Args:
        path: of the page.
        rows: a checkpoint each: run_id, name, step, final, N, D, flops, loss, recipe (or None), and `tasks`, the
            scores by task; where a `budget` is given, it says which runs belong together.
        signal: task -> "acc" and "gold_bpb" -> signal, noise, ratio, by_luck, clear, source; or None.
        title: of the sweep.
        links: run_id -> a page of that run's checkpoint, relative to this one.
    """
    write_atomic(path, render(rows, signal, title, links or {}))


def render(
    rows: Sequence[Mapping[str, Any]], signal: Mapping[str, Mapping[str, Any]], title: str, links: Mapping[str, str]
) -> str:
    """The page as text."""
    sweep = Sweep.of(rows)
    tasks = sorted(sweep.tasks(), key=lambda task: (-strength(signal.get(task)), task))
    if not tasks:
        body = f"<h1>{text(title)}</h1><p>No checkpoint of this sweep has been scored on a task yet.</p>"
        return document(title, body, style=STYLE)
    sections = [
        _meaning(sweep, tasks, signal), _by_recipe(sweep, tasks), _panels(sweep, tasks, signal), _runs(sweep, links),
    ]  # fmt: skip
    names = [
        ("tasks", "Which tasks mean something"),
        ("recipes", "By recipe"),
        ("panels", "Tasks by compute"),
        ("runs", "Runs"),
    ]
    present = [entry for entry, part in zip(names, sections, strict=True) if part]
    nav = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in present)
    body = (
        f"<h1>{text(title)}</h1><div class=soft>Benchmarks of the sweep’s checkpoints</div>"
        f"<nav aria-label=sections>{nav}</nav>{warnings_list(_warnings(sweep, len(rows)))}"
        f"{cards(_facts(sweep, tasks, signal))}"
        f'{"".join(sections)}<div id="note" hidden></div>'
    )
    data = [{"said": spell(_said(entry)), "link": safe_link(links.get(entry["run_id"]))} for entry in sweep.rows]
    return document(title, body, data=data, script=SWEEP, style=STYLE)


def safe_link(link: str | None) -> str | None:
    """A relative path, or nothing: an address with a scheme (javascript:) or a host is refused."""
    return link if link and re.fullmatch(r"(?!/)[^:\\]*", link) and link.isprintable() else None


def _facts(sweep: Sweep, tasks: Sequence[str], signal: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    flops = [entry["flops"] for entry in sweep.rows]
    sizes = [entry["N"] for entry in sweep.rows if is_number(entry.get("N"))]
    trends = [found for task in tasks if (found := trend(sweep, task))]
    clear = sum(any((one or {}).get("clear") for one in (signal.get(task) or {}).values()) for task in tasks)
    facts = {
        "Checkpoints": (f"{len(sweep.rows):,}", f"of {len({entry['run_id'] for entry in sweep.rows}):,} runs"),
        "Training FLOPs": (compute(max(flops)), f"from {compute(min(flops))}, in {len(sweep.budgets)} budgets"),
        "Parameters (N)": (count(max(sizes)), f"from {count(min(sizes))}") if sizes else ("–", ""),
        "Tasks that tell runs apart": (f"{clear} of {len(tasks)}", "beyond their noise"),
        "BPB falls with every budget": (
            f"{sum(one.falls for one in trends)} of {len(trends)}",
            "of the best run of each",
        ),
    }
    return facts


def _warnings(sweep: Sweep, given: int) -> list[str]:
    lines = []
    if given > len(sweep.rows):
        lines.append(f"{given - len(sweep.rows)} of {given} checkpoints have no FLOPs and are left out.")
    held: dict[str, int] = {}
    for entry in sweep.rows:
        for name, scores in (entry.get("tasks") or {}).items():
            held[name] = held.get(name, 0) + bool(scores.get("withheld"))
    listed = ", ".join(f"{name} {many}" for name, many in held.items() if many)
    if listed:
        lines.append(f"Scores were withheld, because the model failed on an item; checkpoints by task: {listed}.")
    return lines


def _said(entry: Mapping[str, Any]) -> str:
    """What stands beside the pointer."""
    recipe = f", {entry['recipe']}" if entry.get("recipe") is not None else ""
    return (
        f"{entry.get('name') or entry['run_id']}{recipe}\nN {count(entry.get('N'))}, D {count(entry.get('D'))}, step "
        f"{entry.get('step')}\n{compute(entry['flops'])} FLOPs, loss {number(entry.get('loss'), 4)}"
    )


def _meaning(sweep: Sweep, tasks: Sequence[str], signal: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of what each task is good for at this scale, the clearest first."""
    rows = []
    for task in tasks:
        known, found = signal.get(task) or {}, trend(sweep, task)
        falls = "–" if found is None or len(found.values) < 2 else _falls(found)
        ranks = [cell(signed(found.rank_best, 2)), cell(signed(found.rank_all, 2))] if found else [cell("–")] * 2
        rows.append(
            row(f'<a href="#{_anchor(tasks, task)}">{name_of(task)}</a>', [
                f'<td class="nowrap">{text(verdict(known))}</td>',
                _ratio(known.get("gold_bpb")), _ratio(known.get("acc")),
                f'<td class="nowrap">{falls}</td>', *ranks,
            ])
        )  # fmt: skip
    head = ["task", "verdict", "BPB S/N", "accuracy S/N", "BPB falls",
            "rank, best", "rank, all"]  # fmt: skip
    sources = sorted(
        {one["source"] for known in signal.values() for one in known.values() if one and one.get("source")}
    )
    said = (
        "S/N: the range of a score over the sweep's runs, over its noise, the standard deviation of one score"
        f"{' (' + text('; '.join(sources)) + ')' if sources else ''}. A ratio is bold where it is clear of what noise "
        "alone would show so many runs, given behind it. BPB falls, rank: bits per byte against FLOPs, over the best "
        "run of each budget (by held-out loss) and over all; rank is Spearman's correlation, −1 where more compute "
        "always helps."
    )
    return (
        '<section><h2 id="tasks">Which tasks mean something at this scale</h2>'
        f'<div class="sortable">{_sortable(table(head, rows, left=(0, 1, 4)))}</div>'
        f'<p class="soft small">{said}</p></section>'
    )


def _falls(found: Trend) -> str:
    steps = [later < before for before, later in zip(found.values, found.values[1:], strict=False)]
    tone, said = ("better", "with every budget") if all(steps) else ("soft", f"at {sum(steps)} of {len(steps)} steps")
    return f'<span class="{tone}">{said}</span>'


def _ratio(one: Mapping[str, Any] | None) -> str:
    """Range over noise, and behind it what luck would show."""
    if not one or not is_number(one.get("ratio")):
        return '<td class="r" data-v="-1">–</td>'
    shown = f"<b>{one['ratio']:.1f}</b>" if one.get("clear") else f"{one['ratio']:.1f}"
    return f'<td class="r" data-v="{one["ratio"]:.6g}">{shown} <small>luck {number(one.get("by_luck"), 1)}</small></td>'


def _sortable(html: str) -> str:
    """The headings of a table as buttons."""
    return re.sub(r'(<th scope="col"[^>]*>)(.*?)</th>', r'\1<button type="button">\2</button></th>', html)


def _anchor(tasks: Sequence[str], task: str) -> str:
    return f"task-{tasks.index(task)}"


def _by_recipe(sweep: Sweep, tasks: Sequence[str]) -> str:
    """Best run of each budget, recipe beside recipe; empty without several recipes."""
    if not sweep.recipes:
        return ""
    top = sweep.best_of_each()
    if not top:
        return '<section><h2 id="recipes">By recipe</h2><p>The recipes have no budget in common.</p></section>'
    rows = [row("held-out loss", _recipe_cells({r: _loss(sweep, p) for r, p in top.items()}, sweep.recipes, 4))]
    for task in tasks:
        values = {recipe: sweep.value(place, task, BITS) for recipe, place in top.items()}
        if any(values.values()):
            rows.append(row(name_of(task), _recipe_cells(values, sweep.recipes, 3)))
    flops = max(sweep.rows[place]["flops"] for place in top.values())
    said = (
        f"The best run of each recipe, by held-out loss, at the largest budget that all of them have ({compute(flops)} "
        "FLOPs): held-out loss in nats a token, tasks in bits per byte. The lowest is bold; ± is one standard error."
    )
    return (
        f'<section><h2 id="recipes">By recipe</h2>{table(["", *sweep.recipes], rows)}<p class="soft small">{said} '
        "Compare losses only where the recipes share their held-out text.</p></section>"
    )


def _loss(sweep: Sweep, place: int) -> tuple[float, float | None] | None:
    value = sweep.rows[place].get("loss")
    return (value, None) if is_number(value) else None


def _recipe_cells(
    values: Mapping[str, tuple[float, float | None] | None], recipes: Sequence[str], digits: int
) -> list[str]:
    known = [scored[0] for scored in values.values() if scored]
    cells = []
    for recipe in recipes:
        scored = values.get(recipe)
        shown = text(with_error(*scored, digits)) if scored else "–"
        cells.append(f'<td class="r">{f"<b>{shown}</b>" if scored and scored[0] == min(known) else shown}</td>')
    return cells


def _panels(sweep: Sweep, tasks: Sequence[str], signal: Mapping[str, Mapping[str, Any]]) -> str:
    """A row of small panels a task: bits per byte and accuracy, by compute and by loss."""
    flops = Axis.around([entry["flops"] for entry in sweep.rows], log=True)
    losses = [entry["loss"] for entry in sweep.rows if is_number(entry.get("loss"))]
    views = [("flops", "FLOPs", flops)]
    if losses:
        views.append(("loss", "held-out loss", Axis.around(losses)))
    parts = []
    for task in tasks:
        panels = [
            _panel(sweep, task, keys, name, view)
            for view in views
            for keys, name in ((BITS, "bits per byte"), (SCORE, "accuracy"))
        ]
        drawn = "".join(panel.svg() for panel in panels if panel)
        if drawn:
            parts.append(
                f'<section id="{_anchor(tasks, task)}"><h3>{text(task)} <span class="soft small">'
                f'{text(verdict(signal.get(task)))}</span></h3><div class="panels">{drawn}</div></section>'
            )
    return (
        '<section><h2 id="panels">Tasks by compute and by loss</h2><p class="soft">Each dot is a checkpoint; pale '
        "and small ones were still training. The line joins the best run of each budget, by held-out loss; whiskers "
        "are two standard errors over items; the dashed line is chance. Point at a dot to see the same run in every "
        "panel.</p>"
        f"{_key(sweep)}{''.join(parts)}</section>"
    )


def _panel(sweep: Sweep, task: str, keys: Sequence[str], name: str, view: tuple[str, str, Axis]) -> Panel | None:
    """One panel; None where no checkpoint has both numbers."""
    field, label, axis = view
    points: dict[int, tuple[float, float, float | None]] = {}
    for place, entry in enumerate(sweep.rows):
        scored = sweep.value(place, task, keys)
        if scored and is_number(entry.get(field)):
            points[place] = (entry[field], *scored)
    if not points:
        return None
    lines = {colour: [place for place in line if place in points] for colour, line in sweep.lines.items()}
    spoken = set(points) if len(points) <= FEW else {place for line in lines.values() for place in line}
    errors = [(x, y, error) for place, (x, y, error) in points.items() if error and place in spoken]
    heights = [y for _, y, _ in points.values()] + [y + side * 2 * error for _, y, error in errors for side in (-1, 1)]
    chance = sweep.chance(task) if keys == SCORE else None
    upright = Axis.around(heights if chance is None else [*heights, chance])
    upright.low = max(upright.low, 0.0)  # neither bits nor accuracy can be negative
    panel = Panel(f"{name} by {label}", axis, upright, label, errors=errors, chance=chance)
    for place, (x, y, _) in points.items():
        group = panel.dots if sweep.rows[place].get("final", True) else panel.faint
        group.setdefault(sweep.colour(place), []).append((place, x, y))
    if field == "flops":
        panel.lines = [
            (colour, [points[place][:2] for place in line]) for colour, line in lines.items() if len(line) > 1
        ]
    return panel


def _key(sweep: Sweep) -> str:
    """What the colours mean."""
    said = [(sweep.recipe_colour(recipe), recipe) for recipe in sweep.recipes]
    if not said:
        edges = [0.0, *sweep.shades]
        names = [
            f"N up to {count(most)}" if not low else f"to {count(most)}"
            for low, most in zip(edges, sweep.shades, strict=False)
        ]
        said = [(sweep.shade(place), name) for place, name in enumerate(names)]
    shown = "".join(
        f'<span><svg viewBox="0 0 22 12" aria-hidden="true"><path class="pts {colour}" d="M11 6h0"/></svg>'
        f"{text(name)}</span>"
        for colour, name in said
    )
    return f'<div class="key">{shown}</div>'


def _runs(sweep: Sweep, links: Mapping[str, str]) -> str:
    """The finished runs, with their pages."""
    best = {place for line in sweep.lines.values() for place in line}
    rows = []
    for place in [place for group in sweep.budgets for place in group]:
        entry = sweep.rows[place]
        name, link = text(entry.get("name") or entry["run_id"]), safe_link(links.get(entry["run_id"]))
        shown = f'<a href="{text(link)}">{name}</a>' if link else name
        cells = [f"<td>{text(recipe_of(entry))}</td>"] if sweep.recipes else []
        numbers = [("N", count), ("D", count), ("flops", compute), ("loss", lambda value: number(value, 4))]
        for field, write in numbers:
            value = entry.get(field)
            sort = f' data-v="{value:.9g}"' if is_number(value) else ""
            cells.append(f'<td class="r"{sort}>{write(value)}</td>')
        rows.append(row(shown, [*cells, f"<td>{'best of its budget' if place in best else ''}</td>"]))
    head = ["run", *(["recipe"] if sweep.recipes else []), "N", "D", "FLOPs", "held-out loss", ""]
    left = (0, 1, len(head) - 1) if sweep.recipes else (0, len(head) - 1)
    shown = _sortable(table(head, rows, left=left))
    return f'<section><h2 id="runs">Runs</h2><div class="sortable tall">{shown}</div></section>'
