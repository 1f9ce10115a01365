"""The report: a self-contained HTML page with answer, warnings and tables, and law.json and PNGs next to it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..approaches.approaches import Estimate
from ..approaches.recipes import kinds, sentences
from ..errors import InputError, need
from ..files import filling, write_text
from ..flops import in_words
from ..formatting import INTERVALS, UNDETERMINED, amount, count, fixed, interval, percent, scientific, times
from ..plots import ANALYSIS, APPROACH_STYLE, FIGURES, save_figures
from ..results import Analysis
from ..uncertainty import END_ERROR
from . import figures
from .precision import draw_precision, precision_text

if TYPE_CHECKING:
    import pandas as pd

TEMPLATES = Path(__file__).parent / "templates"
SHOWN = 8  # rows of the influence table, those with the largest moves
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
    under_way: Sequence[Mapping[str, Any]] = (),
    alone: Analysis | None = None,
) -> Path:
    """Write report.html, law.json and PNG figures into `directory`, all or none. Returns the path of report.html.

    Parameters
    ----------
    curves
        Columns run_id, tokens, flops and loss for every run.
    provenance
        Names and values for the footer.
    costs
        Content of a sweep's costs.json.
    under_way
        Unfinished runs: run_id, N, D, seen (share of D), loss (forecast), low, high.
    alone
        The analysis without points of averaged weights, for comparison.
    """
    need("analysis", analysis, "profiles", ANALYSIS)
    folder = Path(directory)
    if curves is not None:
        missing = [c for c in ("run_id", "tokens", "flops", "loss") if c not in curves]
        if missing:
            raise InputError(f"curves have no column {missing[0]!r}; they have {', '.join(map(str, curves.columns))}.")
    origin = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "table": analysis.table.source,
        "bootstrap": f"{analysis.resamples} resamples, seed {analysis.seed}{_seed_error(analysis)}",
        **{str(name): str(value) for name, value in (provenance or {}).items()},
    }
    content = analysis.to_dict() | {"provenance": origin}
    if analysis.law is not None:
        content["estimator"] = analysis.law.to_dict()
    if alone is not None:
        content["runs_alone"] = {"runs": len(alone.table), "optimal": alone.to_dict()["optimal"]}
    if analysis.lead.mixture is not None:
        content["mixture"] = analysis.lead.mixture.to_dict()
    with filling(folder, [f"{name}.png" for name in FIGURES]) as new:
        write_text(new / "law.json", json.dumps(content, allow_nan=False) + "\n")
        save_figures(analysis, new, curves)
        write_text(new / "report.html", render_report(analysis, curves, title, origin, costs, under_way, alone))
    return folder / "report.html"


def render_report(
    a: Analysis,
    curves: Any,
    title: str,
    origin: Mapping[str, str],
    costs: Mapping[str, Any] | None = None,
    under_way: Sequence[Mapping[str, Any]] = (),
    alone: Analysis | None = None,
) -> str:
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    t, law, (answer, best) = a.table, a.law, _answer(a)
    drawn = figures.draw_all(a, curves) | draw_precision(a.precision)
    shown = {f"figure-{name}": figure for name, figure in drawn.items() if figure is not None}
    return render_template(
        "report.html",
        a=a,
        title=title,
        origin=origin,
        counted=in_words(a.convention),
        answer=answer,
        best=best,
        influence=_influence(a),
        styles=APPROACH_STYLE,
        covered=INTERVALS[a.lead.intervals["intervals"]],
        exponents=[] if law is None else law.exponent_names,
        equation="" if law is None else law.equation(lambda name: amount(law.constants_[name], 4)),
        precision=a.precision and precision_text(a.precision.to_dict(a.targets, a.speedup)),
        recipes=a.recipes,
        kind=kinds(a.table),
        compared=sentences(a.recipes),
        order=np.lexsort((t.N, t.flops if np.isnan(t.budget).all() else t.budget)),
        columns=[(head, form, t.column(name)) for name, head, form in RUN_COLUMNS if np.isfinite(t.column(name)).any()],
        costs=costs,
        under_way=under_way,
        alone=alone,
        figures=drawn,
        most=(figures.MOST_RUNS, figures.MOST_CURVES),
        packed=packed,
        drawn=packed(json.dumps(shown, allow_nan=False)),
        plotly=packed(get_plotlyjs()),
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
    )


def packed(content: str) -> str:
    return base64.b64encode(gzip.compress(content.encode(), mtime=0)).decode()


def render_template(name: str, **context: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {say.__name__: say for say in (amount, count, fixed, interval, percent, scientific, times)}
    return environment.get_template(name).render(context)


def _seed_error(a: Analysis) -> str:
    if not (draws := a.lead.mixture.draws if a.lead.mixture else a.resamples):
        return ""
    return f"; another seed moves the ends of intervals by about {percent(END_ERROR / np.sqrt(draws))} of the width"


def _answer(a: Analysis) -> tuple[str, Estimate | None]:
    """Return a sentence with the optimum at the first target, and the estimate, None without an optimum."""
    C, largest = a.targets[0], float(a.table.flops.max())
    far = f", {times(C / largest)} the compute of the largest run," if largest < C else ""
    budget = f"a budget of {scientific(C)} training FLOPs ({in_words(a.convention)}){far}"
    best = next((estimate for approach in a.ranked if (estimate := approach.at(C)).N is not None), None)
    if best is None:
        reason = a.lead.reason.rstrip(".") or "no approach has a best size there"
        return f"These runs give no answer for {budget.rstrip(',')}: {reason}. Add runs of other N and D.", None
    if interval(best.N_ci, count) == UNDETERMINED:
        return f"For {budget} these runs determine no optimum: the interval of N spans more than five decades.", None
    return f"For {budget} the best model has {count(best.N)} parameters and trains on {count(best.D)} tokens.", best


def _influence(a: Analysis) -> list[dict[str, Any]]:
    """Return the backtest's entries of the sizes and budgets whose omission moves the fit most, largest first."""
    influence = a.backtest["influence"]
    if not influence or influence["most"] is None:
        return []

    def move(entry: dict[str, Any]) -> float:
        return max((abs(v) for v in entry["moves"].values() if v is not None), default=0.0)

    return sorted((e for e in influence["left_out"] if e["N"] is not None), key=move, reverse=True)[:SHOWN]
