"""The report: one self-contained HTML file, law.json and PNGs beside it. Warnings come first, numbers with their
intervals second.

Special here: the page needs no network (plotly.js is inlined once), every string that comes from data is escaped, and
every file appears whole or not at all, so that a report can be rewritten while someone reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..approaches.approaches import Estimate
from ..errors import InputError
from ..files import write_text
from ..formatting import UNDETERMINED, amount, count, interval, loss, percent, ratio, scientific, text, times
from ..results import Analysis
from . import figures, figures_law, figures_optimum, sections
from .costs import what_it_cost
from .page import Page, cell, table

if TYPE_CHECKING:
    import pandas as pd

OBJECTIVES = {
    "huber": "Log-Huber objective (delta {:g}, summed)",
    "l1": "L1 objective in log loss (summed)",
    "squares": "Least squares in log loss (half the sum)",
    "se": "Least squares weighted by each run's standard error (half the sum)",
}
RUN_COLUMNS = (
    ("width", "width", "{:.0f}"),
    ("depth", "depth", "{:.0f}"),
    ("val_bpb", "bits per byte", "{:.4f}"),
    ("epochs", "epochs", "{:.2f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("seconds", "seconds", "{:,.0f}"),
)


def write_report(
    analysis: Analysis,
    directory: str | Path,
    curves: pd.DataFrame | None = None,
    title: str = "Scaling-law report",
    provenance: Mapping[str, object] | None = None,
    costs: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.html, law.json and PNG figures into `directory` (made if missing) and return the path of
    report.html.

    `curves`: run_id, step, tokens, flops, loss of every run (optional). `provenance`: names and values for the footer.
    `costs`: what the runs cost, as `costs.json` of a sweep has it (see `costs.what_it_cost`).
    Raises InputError when the directory cannot be written to or the curves lack a column.
    """
    from ..plots import save_figures

    folder = Path(directory)
    if curves is not None:
        missing = [c for c in ("run_id", "tokens", "flops", "loss") if c not in curves]
        if missing:
            raise InputError(f"curves have no column {missing[0]!r}; they have {', '.join(map(str, curves.columns))}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}); give a folder that can be written to.") from None
    origin = _origin(analysis, provenance or {})
    content = analysis.to_dict() | {"provenance": origin}
    if analysis.law is not None:
        content["estimator"] = analysis.law.to_dict()
    write_text(folder / "law.json", json.dumps(content, allow_nan=False) + "\n")
    save_figures(analysis, folder, curves)
    path = folder / "report.html"
    write_text(path, build_page(analysis, curves, title, origin, costs).render())
    return path


def build_page(
    a: Analysis, curves: Any, title: str, origin: Mapping[str, str], costs: Mapping[str, Any] | None = None
) -> Page:
    """The page, section by section."""
    page = Page(title)
    _head(page, a, title, origin)
    _backtest(page, a)  # before any extrapolation
    _targets(page, a)
    sections.recipes(page, a)
    _law(page, a)
    _runs(page, a, curves)
    _optimum(page, a)
    _scores(page, a)
    sections.conventions(page, a)
    what_it_cost(page, costs)
    _run_table(page, a)
    _footer(page, a, origin)
    return page


def _head(page: Page, a: Analysis, title: str, origin: Mapping[str, str]) -> None:
    t = a.table
    span = f"{scientific(float(t.flops.min()))} to {scientific(float(t.flops.max()))} training FLOPs"
    page.add(f"<h1>{text(title)}</h1><p class=sub>{len(t)} finished runs, {span}, {text(origin['date'])}</p>")
    if a.warnings:
        items = "".join(f"<li><code>{text(w.code)}</code><span>{text(w.message)}</span></li>" for w in a.warnings)
        page.add(f'<ul class="warnings">{items}</ul>')
    else:
        page.add(
            '<ul class="warnings none"><li><code>no warnings</code><span>No check found anything.</span></li></ul>'
        )
    cards = [
        (f"{a.interior_minima} of {len(a.profiles.profiles_)}", "budgets with a minimum inside of the sizes tried"),
        _exponent_card(a),
    ]
    if a.law is not None:
        cards.append(
            ("{agreeing} of {tried}".format(**a.law.starts_), "starts of the parametric fit agree on its optimum")
        )
    if a.backtest["steps"]:
        held = scientific(a.backtest["held_out_flops"])
        cards.append(
            (percent(a.backtest["loss_error"]), f"mean error of the loss predicted for {held} FLOPs from cheaper runs")
        )
    shown = "".join(f'<div class="card"><b>{text(big)}</b><span>{text(small)}</span></div>' for big, small in cards)
    said = " ".join(sentence for sentence in (_backtested(a), _answer(a), a.verdict.sentence) if sentence)
    page.add(f'<p class="answer">{text(said)}</p><div class="cards">{shown}</div>')


def _backtested(a: Analysis) -> str:
    """How well cheaper runs foretold the dearest ones, in one sentence; nothing where that could not be tried."""
    if not a.backtest["steps"]:
        return ""
    held = a.backtest["steps"][-1]
    said = f"Fitted without the {scientific(held['held_out_flops'])}-FLOP runs, the law foretells their loss"
    said += f" to {percent(held['loss_error'])}"
    if held["N_measured"] and held["N_predicted"]:
        said += f" and the best size as {count(held['N_predicted'])}, where {count(held['N_measured'])} was measured"
    return said + "."


def _answer(a: Analysis) -> str:
    """The question that the report answers, in one sentence."""
    C, largest = a.targets[0], float(a.table.flops.max())
    budget = f"{scientific(C)} FLOPs" + (f", {times(C / largest)} the largest run," if largest < C else "")
    for key in ("parametric", "isoflop", "envelope"):
        approach = a.approaches[key]
        e = approach.at(C) if approach.available else None
        if e is not None and e.N is not None:
            known = interval(e.intervals["N"], count)
            if known == UNDETERMINED:
                return f"These runs do not determine what {budget} would want: the interval spans over five decades."
            size, tokens = f"{count(e.N)} parameters ({known})", f"{count(e.D)} tokens"
            return f"For {budget} {key} asks for {size} and {tokens} ({interval(e.intervals['D'], count)})."
    return f"No approach has an answer for {budget.rstrip(',')}."


def _exponent_card(a: Analysis) -> tuple[str, str]:
    for key in ("parametric", "isoflop", "envelope"):
        approach = a.approaches[key]
        if approach.exponent is not None:
            said = interval(approach.exponent_interval, lambda v: f"{v:.2f}")
            return f"{approach.exponent:.3f}", f"exponent a of N* ∝ C^a ({said}), {approach.title.lower()}"
    return "–", "exponent a of N* ∝ C^a"


def _targets(page: Page, a: Analysis) -> None:
    largest = float(a.table.flops.max())
    # What can be checked against runs stands above what cannot.
    budgets = sorted({largest, 10 * largest, *a.targets})
    rows = []
    for C in budgets:
        far = C / largest
        note = "the largest run" if largest == C else f"{times(far)} the largest run"
        if C in a.targets:
            note = f"target, {note}"
        rows.append(f'<tr class="group"><th colspan="5">{scientific(C)} FLOPs<small>{text(note)}</small></th></tr>')
        rows += [_target_row(a, key, C) for key in ("parametric", "isoflop", "envelope")]
    head = ("approach", "parameters N", "tokens D", "tokens per parameter", "loss, nats per token")
    page.add(
        "<h2>What a budget wants</h2><p class=caption>Each value with its 95 % interval, covering the noise of these "
        f'runs under the assumed form. Extrapolations err by more.</p><div class="scroll">{table(head, rows)}</div>'
    )


def _target_row(a: Analysis, key: str, C: float) -> str:
    approach = a.approaches[key]
    colour, dash, _ = figures.APPROACH_STYLE[key]
    line = {"solid": "solid", "dash": "dashed", "dot": "dotted"}[dash]
    style = f"border-color:{colour};border-top-style:{line}"
    name = f'<td><span class="key" style="{style}"></span>{text(approach.title)}</td>'
    if not approach.available:
        return f'<tr>{name}<td colspan="4" class="sub">no answer: see the warnings</td></tr>'
    e: Estimate = approach.at(C)
    cells = [
        cell(count(e.N), interval(e.intervals["N"], count)),
        cell(count(e.D), interval(e.intervals["D"], count)),
        cell(ratio(e.ratio), interval(e.intervals["ratio"], ratio)),
        cell(loss(e.loss), interval(e.intervals["loss"], loss)) if e.loss is not None else cell("–", "needs 4 budgets"),
    ]
    return f"<tr>{name}{''.join(cells)}</tr>"


def _law(page: Page, a: Analysis) -> None:
    law = a.law
    page.add("<h2>The parametric law</h2>")
    if law is None:
        page.add(f"<p>There is none: {text(a.approaches['parametric'].reason)}</p>")
        return

    def fraction(top: float, symbol: str, power: float) -> str:
        return (
            f'<span class="frac"><span>{amount(top, 4)}</span><span><i>{symbol}</i><sup>{power:.3f}</sup></span></span>'
        )

    page.add(
        f'<div class="equation"><i>L</i>(<i>N</i>, <i>D</i>) = {law.E_:.3f} + '
        f"{fraction(law.A_, 'N', law.alpha_)} + {fraction(law.B_, 'D', law.beta_)}</div>"
    )
    says: dict[str, Any] = {"E": loss, "A": amount, "B": amount, "alpha": loss, "beta": loss}
    what = {
        "E": "irreducible loss",
        "A": "size term",
        "B": "data term",
        "alpha": "exponent of N",
        "beta": "exponent of D",
    }
    rows = []
    for name, say in says.items():
        pair = None if law.draws_ is None else law.interval(name)
        rows.append(
            f"<tr><td>{name}, {what[name]}</td>{cell(say(getattr(law, name + '_')))}{cell(interval(pair, say))}</tr>"
        )
    page.add(f'<div class="scroll">{table(("constant", "value", "95 % interval"), rows)}</div>')
    draws = f", intervals from {law.bootstrap_['resamples']} bootstrap refits" if law.draws_ is not None else ""
    page.add(
        f"<p class=caption>{text(OBJECTIVES[law.objective].format(law.delta))} {law.objective_:.4g}; "
        f"{law.starts_['agreeing']} of {law.starts_['tried']} starts agree{draws}.</p>"
    )
    left = page.figure("residuals", figures_law.residuals(a), "What the law leaves over, by run.")
    wanted = f"Refits by the D/N they want at {scientific(a.targets[0])} FLOPs."
    right = page.figure("cloud", figures_law.cloud(a), wanted)
    page.add(f'<div class="pair">{left}{right}</div>')


def _runs(page: Page, a: Analysis, curves: Any) -> None:
    page.add("<h2>The runs</h2>")
    if curves is not None and len(curves):
        by_tokens = page.figure(
            "loss-tokens",
            figures.loss_curves(a, curves, "tokens"),
            "Training loss by tokens; points are the final held-out losses.",
        )
        by_flops = page.figure("loss-flops", figures.loss_curves(a, curves, "flops"), "The same by training FLOPs.")
        page.add(f'<h3>Loss curves</h3><div class="pair">{by_tokens}{by_flops}</div>')
    drawn = page.figure(
        "isoflop",
        figures.isoflop(a),
        "One colour a budget: runs, a cubic in log N (a parabola below 5 sizes), and its minimum with a 95 % interval. "
        "Dotted: refused.",
    )
    page.add(
        f"<h3>IsoFLOP profiles</h3>{drawn}" if drawn else "<p>No budget has enough runs for an isoFLOP profile.</p>"
    )
    drawn = page.figure(
        "contours",
        figures.contours(a),
        "Loss of the parametric law, the runs (dotted lines join those of one budget), and the efficient frontier.",
    )
    page.add(f"<h3>Loss over size and data</h3>{drawn}" if drawn else "")


def _optimum(page: Page, a: Analysis) -> None:
    sizes = page.figure("optimal-n", figures_optimum.allocation(a, "N"))
    tokens = page.figure("optimal-d", figures_optimum.allocation(a, "D"))
    losses = page.figure("optimal-loss", figures_optimum.allocation(a, "loss"), "Bands are 95 % intervals.")
    if not (sizes or tokens):
        page.add("<h2>The optimum by budget</h2><p>No approach has an answer.</p>")
        return
    page.add(
        "<h2>The optimum by budget</h2>"
        "<p class=caption>Stars are isoFLOP minima, open diamonds the best runs. Bands are 95 % intervals.</p>"
        f'{_switch(page)}<div class="pair">{sizes}{tokens}</div>'
    )
    page.add(f"<h3>Predicted loss</h3>{losses}" if losses else "")
    sections.suspects(page, a)
    sections.published(page, a)


def _switch(page: Page) -> str:
    """Two buttons that move the figures of this section between the runs and far targets, where there are any."""
    if not any("meta" in figure["layout"] for figure in page.figures.values()):
        return ""
    return (
        '<div class="switch"><button value="near" aria-pressed="true">near the runs</button>'
        '<button value="far" aria-pressed="false">out to the target</button></div>'
    )


def _scores(page: Page, a: Analysis) -> None:
    accuracy, bits = figures_optimum.scores(a, "acc"), figures_optimum.scores(a, "gold_bpb")
    if accuracy is None and bits is None:
        return
    left = page.figure("accuracy", accuracy, "Accuracy with its standard error; dotted lines are chance.")
    right = page.figure(
        "gold-bpb", bits, "Bits per byte of the right answer: smooth where accuracy still sits at chance."
    )
    page.add(
        "<h2>Scores</h2><p class=caption>Lines join the run of lowest loss in each budget.</p>"
        f'<div class="pair">{left}{right}</div>'
    )
    sections.downstream(page, a)


def _backtest(page: Page, a: Analysis) -> None:
    page.add("<h2>Backtest</h2>")
    steps = a.backtest["steps"]
    if not steps:
        page.add(f"<p>None was possible: {text(a.backtest['reason'].rstrip('.'))}.</p>")
        return
    rows = []
    for s in steps:
        allocation = "–"
        if s["N_measured"]:
            allocation = f"{count(s['N_predicted'])} / {count(s['N_measured'])}"
        rows.append(
            f"<tr><td>{scientific(s['held_out_flops'])} FLOPs</td>"
            f"{cell(str(s['runs_fitted']))}{cell(str(s['runs_predicted']))}"
            f"{cell(percent(s['loss_error']))}{cell(percent(s['loss_bias'], True))}{cell(_share(s['loss_inside']))}"
            f"{cell(allocation)}"
            f"{cell(ratio(s['tokens_per_parameter_predicted']) + ' / ' + ratio(s['tokens_per_parameter_measured']))}"
            f"{cell(ratio(s['tokens_per_parameter_at_target']))}</tr>"
        )
    target = scientific(a.targets[0])
    head = (
        "held out",
        "fitted",
        "predicted",
        "loss error",
        "bias",
        "in 95 %",
        "N*: law / run",
        "D/N: law / run",
        f"D/N at {target}",
    )
    full = ratio(steps[-1]["tokens_per_parameter_at_target_full"])
    page.add(
        "<p>Each row fits the parametric law on runs cheaper than a budget and predicts that budget. A small error of "
        f"loss does not show that the allocation is right: compare the last column with {full}, from all runs. "
        "In 95 %: how many of the runs predicted lie within the law's own 95 % interval for a new run.</p>"
        f'<div class="scroll">{table(head, rows)}</div>{page.figure("backtest", figures_optimum.backtest(a))}'
    )
    sections.influence(page, a)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _run_table(page: Page, a: Analysis) -> None:
    t = a.table
    extra = [(name, head, form) for name, head, form in RUN_COLUMNS if np.isfinite(t.column(name)).any()]
    values = {name: t.column(name) for name, _, _ in extra}
    rows = []
    for i in np.lexsort((t.N, t.flops if np.isnan(t.budget).all() else t.budget)):
        se = f"± {t.loss_se[i]:.4f}" if np.isfinite(t.loss_se[i]) else ""
        cells = [
            f"<td><code>{text(t.run_id[i])}</code></td>",
            cell(scientific(t.flops[i]), value=float(t.flops[i])),
            cell(count(t.N[i]), value=float(t.N[i])),
            cell(count(t.D[i]), value=float(t.D[i])),
            cell(ratio(t.D[i] / t.N[i]), value=float(t.D[i] / t.N[i])),
            cell(f"{t.loss[i]:.4f} {se}".strip(), value=float(t.loss[i])),
        ]
        for name, _, form in extra:
            v = float(values[name][i])
            cells.append(cell(form.format(v), value=v) if np.isfinite(v) else cell("–"))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = ("run", "FLOPs", "N", "D", "D/N", "loss", *(h for _, h, _ in extra))
    page.add(
        f"<h2>All runs</h2><p class=caption>Click a heading to sort.</p>"
        f'<div class="scroll tall">{table(head, rows, classes="sortable")}</div>'
    )


def _footer(page: Page, a: Analysis, origin: Mapping[str, str]) -> None:
    entries = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in origin.items())
    notes = "".join(f"<p>{text(note)}</p>" for note in a.table.notes)
    page.add(f"<footer>{notes}<dl>{entries}</dl></footer>")


def _origin(a: Analysis, provenance: Mapping[str, object]) -> dict[str, str]:
    """The footer's names and values: what was read, when, and how the intervals were drawn."""
    own = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "table": a.table.source,
        "bootstrap": f"{a.resamples} resamples, seed {a.seed}",
    }
    return own | {str(name): str(value) for name, value in provenance.items()}
