"""The report's figures of the parametric law itself: residuals, the bootstrap cloud, and what each left-out part does.

Special here: as in `figures.py`, figures are plain plotly dictionaries, and every string from data is escaped.
"""

from __future__ import annotations

import numpy as np

from ..formatting import amount
from ..published import published_law
from ..results import Analysis
from .figures import (
    FAINT,
    INK,
    TASK_COLOURS,
    Figure,
    as_list,
    fit_axis,
    hovers,
    layout,
    line_trace,
    point_trace,
    run_hover,
    shades,
)

CLOUD = 1500  # draws shown; more only slow the page
FRONTIER = 1e25  # FLOPs that published laws are asked about
BESIDE = ("kaplan2020_N_opt", "hoffmann2022_approach2", "besiroglu2024", "porian2024_tuned", "deepseek2024", "llama3")


def residuals(a: Analysis) -> Figure | None:
    """Measured over predicted loss of every run, by training FLOPs, coloured by size."""
    if a.law is None:
        return None
    off = np.expm1(a.law.residuals())
    hover = [f"{line}<br>{100 * r:+.2f} % of the prediction" for line, r in zip(run_hover(a), off, strict=True)]
    style = layout("training FLOPs", "measured over predicted loss, %", height=400, showlegend=False)
    fit_axis(style["xaxis"], a.table.flops)
    ends = [10**v for v in style["xaxis"]["range"]]
    zero = line_trace(ends, [0.0, 0.0], FAINT, line={"width": 1, "dash": "dot"}, hoverinfo="skip")
    points = point_trace(a.table.flops, 100 * off, shades(a.table.N), **hovers(hover))
    return {"data": [zero, points], "layout": style}


def cloud(a: Analysis) -> Figure | None:
    """Both exponents of every refit, coloured by the tokens per parameter that it wants at the first target."""
    law = a.law
    if law is None or law.draws_ is None:
        return None
    alpha, beta = law.draws_["alpha"][:CLOUD], law.draws_["beta"][:CLOUD]
    want = law.optimal(a.targets[0]).draws["ratio"][0][:CLOUD]
    known = np.isfinite(want) & (want > 0)
    if known.sum() < 2:
        return None
    alpha, beta, want = alpha[known], beta[known], want[known]
    low, high = np.quantile(want, [0.025, 0.975])
    hover = [f"α {x:.4f}, β {y:.4f}<br>D/N {amount(z)}" for x, y, z in zip(alpha, beta, want, strict=True)]
    marker = {"size": 5, "opacity": 0.55, "line": {"width": 0}}
    refits = point_trace(
        alpha, beta, shades(np.clip(want, low, high)), marker=marker, name="refits of resamples", **hovers(hover)
    )
    best = point_trace(
        [law.alpha_], [law.beta_], INK, marker={"size": 11, "symbol": "x-thin", "line": {"color": INK, "width": 3}},
        name="the fit", **hovers([f"α {law.alpha_:.4f}, β {law.beta_:.4f}"]),
    )  # fmt: skip
    style = layout("α, exponent of N", "β, exponent of D", height=400, log_x=False)
    note = f"dark: D/N {amount(float(low))}, light: {amount(float(high))}"
    style["annotations"] = [
        {"text": note, "xref": "paper", "yref": "paper", "x": 1, "y": 1.02, "xanchor": "right", "yanchor": "bottom",
         "showarrow": False, "font": {"size": 12, "color": FAINT}}
    ]  # fmt: skip
    return {"data": [refits, best], "layout": style}


def published(a: Analysis) -> Figure | None:
    """N* by budget of this law and of the published ones, from the runs to the farthest target and to a frontier."""
    if a.law is None or not a.approaches["parametric"].available:
        return None
    own = a.approaches["parametric"]
    low, high = float(a.table.flops.min()), max(*a.targets, FRONTIER)
    C = np.geomspace(low, high, 60)
    data, seen = [], []
    for name, colour in zip(BESIDE, TASK_COLOURS[1:], strict=False):
        best = published_law(name).optimal(C)
        data.append(line_trace(C, best.N, colour, name=name, line={"dash": "dot", "width": 1.5}))
        seen.append(best.N)
    values, band = own.values(C)["N"], own.bands(C)["N"]
    if band is not None:
        finite = np.isfinite(band).all(axis=1) & (band > 0).all(axis=1)
        edges = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        data.append({**edges, "x": as_list(C[finite]), "y": as_list(band[finite, 1])})
        fill = {"fill": "tonexty", "fillcolor": "rgba(0,114,178,0.13)"}
        data.append({**edges, **fill, "x": as_list(C[finite]), "y": as_list(band[finite, 0])})
    data.append(line_trace(C, values, TASK_COLOURS[0], name="this law", line={"width": 3}))
    style = layout("training FLOPs", "optimal parameters N*", height=440, log_y=True)
    fit_axis(style["xaxis"], C)
    fit_axis(style["yaxis"], np.concatenate([values, *seen]))
    return {"data": data, "layout": style}
