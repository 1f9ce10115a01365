"""The report's interactive figures as plain plotly dictionaries, without a slow import of plotly.

Strings from data are escaped, because plotly reads hover texts as HTML.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Array, is_uneven
from ..formatting import amount, count, fixed, percent, scientific, text, times
from ..plots import (
    APPROACH_STYLE,
    CURVE_TITLES,
    FAINT,
    LOSS,
    OPTIMUM_TITLES,
    allocation_lines,
    loss_contours,
    measured_optima,
    profile_curve,
    shade,
    shades,
)
from ..plots import loss_curves as curves_of_runs
from ..published import published_law
from ..results import Analysis

Figure = dict[str, Any]
Trace = dict[str, Any]  # a plotly trace, layout, or part of one

# Shared layout, in parts.
STYLE = (Path(__file__).parent / "templates" / "layout.json").read_text(encoding="utf-8")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#1b1f24"
SCALE = [[i / 10, shade(i / 10)] for i in range(11)]
CURVE_POINTS = 300  # points of a loss curve
MOST_RUNS, MOST_CURVES = 300, 100  # largest numbers drawn in a figure, evenly spread; more would overlap
PANELS, SCORE = 4, PALETTE[0]  # task panels per row, and the colour of their marks
WIDEST = 1e3  # bands are cut at this factor of the value; wider ones would flatten the rest of the figure
FRONTIER = 1e25  # FLOPs up to which published laws are drawn
BESIDE = ("kaplan2020_N_opt", "hoffmann2022_approach2", "besiroglu2024", "porian2024_tuned", "deepseek2024", "llama3")


def draw_all(a: Analysis, curves: Any) -> dict[str, Figure | None]:
    """Draw every figure of the report: name -> figure, None where the analysis lacks the data."""
    drawings = (answer, backtest, residuals, isoflop, contours, published, multiplier, experts)
    drawn = {draw.__name__: draw(a) for draw in drawings}
    drawn |= {f"loss-{by}": loss_curves(a, curves, by) for by in CURVE_TITLES}
    drawn |= {f"optimal-{quantity.lower()}": allocation(a, quantity) for quantity in OPTIMUM_TITLES}
    return drawn | {"accuracy": scores(a, "acc"), "gold-bpb": scores(a, "gold_bpb")}


# Building blocks.


def style(part: str) -> Any:
    return json.loads(STYLE)[part]


def layout(
    x: str,
    y: str,
    xs: Any = None,
    ys: Any = None,
    *,
    pad: float = 0.05,
    height: int = 440,
    log_x: bool = True,
    log_y: bool = False,
    **more: Any,
) -> Trace:
    """Return a plotly layout with axis titles `x` and `y` and, if given, log axes that span `xs` and `ys`."""
    look: Trace = style("layout") | {"height": height} | more
    for axis, title, log, values in (("xaxis", x, log_x, xs), ("yaxis", y, log_y, ys)):
        look[axis] = style("axis") | (style("log") if log else {}) | {"title": {"text": title, "standoff": 12}}
        if log and "FLOPs" in title:
            look[axis]["exponentformat"] = "power"
        if values is not None:
            low, high = np.log10(np.min(values)), np.log10(np.max(values))
            room = pad * (high - low) + 0.02
            look[axis] |= {"range": [float(low - room), float(high + room)], "dtick": tick_step(float(high - low))}
    return look


def tick_step(decades: float) -> int | str:
    """Return plotly's `dtick` for a log axis of this many decades: ticks at 1, 2 and 5 if few, else about eight."""
    return "D2" if decades < 1.6 else max(1, int(np.ceil(decades / 8)))


def as_list(values: Any) -> list[Any]:
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]


def line(
    x: Any, y: Any, colour: str, hover: list[str] | None = None, width: float = 2, dash: str = "solid", **more: Any
) -> Trace:
    """Return a plotly line; without `hover` texts it is left out of the legend."""
    return _trace("lines", x, y, hover, {"line": {"color": colour, "width": width, "dash": dash}} | more)


def points(x: Any, y: Any, colour: Any, hover: list[str], size: float = 8, edge: str = "white", **more: Any) -> Trace:
    """Return a plotly trace of at most MOST_RUNS marks with hover texts, in one `colour` or a list of them."""
    if len(x) > MOST_RUNS:
        chosen = np.unique(np.linspace(0, len(x) - 1, MOST_RUNS).astype(int)).tolist()
        x, y, hover = np.asarray(x)[chosen], np.asarray(y)[chosen], [hover[i] for i in chosen]
        colour = colour if isinstance(colour, str) else [colour[i] for i in chosen]
        if "error_y" in more:
            more["error_y"] = more["error_y"] | {"array": [more["error_y"]["array"][i] for i in chosen]}
    marker = {"color": colour, "size": size, "line": {"color": edge, "width": 1}} | more.pop("marker", {})
    return _trace("markers", x, y, hover, {"marker": marker} | more)


def _trace(mode: str, x: Any, y: Any, hover: list[str] | None, more: Trace) -> Trace:
    hover_style: Trace = {"text": hover, "hovertemplate": "%{text}<extra></extra>"}
    if hover is None:
        hover_style = {"hoverinfo": "skip", "showlegend": False}
    return {"type": "scatter", "mode": mode, "x": as_list(x), "y": as_list(y)} | hover_style | more


def band_area(x: Array, band: Array, colour: str, **more: Any) -> Trace:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    around, edge = np.concatenate([x, x[::-1]]), np.concatenate([band[:, 1], band[::-1, 0]])
    fill = f"rgba({red},{green},{blue},0.13)"
    return line(around, edge, colour, width=0, fill="toself", fillcolor=fill, **more)


def budget_hovers(head: str, C: Any, quantity: str, values: Any) -> list[str]:
    say: Any = fixed if quantity in ("loss", "multiplier") else count
    return [f"{head}<br>{scientific(c)} FLOPs<br>{quantity} {say(v)}" for c, v in zip(C, values, strict=True)]


def run_hover(a: Analysis) -> list[str]:
    t = a.table
    return [
        f"<b>{text(run)}</b><br>N {count(n)} · D {count(d)} · D/N {amount(d / n)}"
        f"<br>{scientific(c)} FLOPs<br>loss {y:.4f}"
        for run, n, d, c, y in zip(t.run_id, t.N, t.D, t.flops, t.loss, strict=True)
    ]


# The runs.


def loss_curves(a: Analysis, curves: Any, by: str) -> Figure | None:
    run_curves = curves_of_runs(a, curves, by)
    if not run_curves:
        return None
    curve_points = min(CURVE_POINTS, 60 * MOST_CURVES // min(len(run_curves), MOST_CURVES))
    every = -(-len(run_curves) // MOST_CURVES)
    t, data = a.table, []
    colours = dict(zip(t.N.tolist(), shades(t.N), strict=True))
    for run, N, x, y in run_curves[::every]:
        keep = np.unique(np.geomspace(1, len(x), curve_points).astype(int) - 1)
        hover = f"<b>{text(run)}</b><br>N {count(N)}<br>{by} %{{x:.3s}}<br>loss %{{y:.4f}}<extra></extra>"
        shown = line(x[keep], y[keep], colours[N], width=1.3, opacity=0.85, hoverinfo="all", hovertemplate=hover)
        data.append(shown)
    x_end = t.D if by == "tokens" else t.flops
    sizes = np.log10(t.N)
    ticks = np.unique(np.round(np.linspace(sizes.min(), sizes.max(), 5), 3))
    bar = style("colorbar") | {"tickvals": ticks.tolist(), "ticktext": [count(10**tick, 2) for tick in ticks]}
    marker = {"size": 7, "colorscale": SCALE, "colorbar": bar}
    ends = points(x_end, t.loss, as_list(sizes), run_hover(a), marker=marker, name="final validation loss")
    ends["showlegend"] = True
    seen, losses = (np.concatenate([curve[i] for curve in run_curves]) for i in (2, 3))
    look = layout(CURVE_TITLES[by], LOSS, np.maximum(seen, float(x_end.min()) / 30))
    top, low = float(np.quantile(losses, 0.97)), min(float(t.loss.min()), float(losses.min()))
    look["yaxis"]["range"] = [low - 0.05 * (top - low), top + 0.05 * (top - low)]
    return {"data": [*data, ends], "layout": look}


def isoflop(a: Analysis) -> Figure | None:
    profiles = a.profiles.profiles_
    if not profiles:
        return None
    data: list[Trace] = []
    for p, colour in zip(profiles, shades(np.array([p.flops for p in profiles])), strict=True):
        name = scientific(p.flops)
        hover = [
            f"{name} FLOPs<br>N {count(n)} · D {count(d)}<br>loss {y:.4f}"
            for n, d, y in zip(p.N, p.D, p.loss, strict=True)
        ]
        data.append(points(p.N, p.loss, colour, hover, name=name, legendgroup=name))
        if p.has_curve:
            dash = "solid" if p.accepted else "dot"
            data.append(line(*profile_curve(p), colour, dash=dash, legendgroup=name))
        if p.accepted:
            data.append(_vertex(p, colour, name))
    look = layout("parameters N", LOSS, np.concatenate([p.N for p in profiles]), height=480)
    look["legend"]["title"] = {"text": "FLOPs "}
    return {"data": data, "layout": look}


def _vertex(p: Any, colour: str, group: str) -> Trace:
    interval, bars, range_text = p.interval(), {}, ""
    if interval is not None and np.isfinite(interval).all():
        sides = {"array": [interval[1] - p.N_best], "arrayminus": [p.N_best - interval[0]]}
        bars = {"error_x": {"type": "data", "symmetric": False, **sides, "color": colour, "thickness": 1.5}}
        range_text = f" [{count(interval[0])}, {count(interval[1])}]"
    hover = (
        f"<b>minimum at {group} FLOPs</b><br>N* {count(p.N_best)}{range_text}<br>D* {count(p.D_best)}"
        f"<br>loss {fixed(p.loss_best)}"
    )
    star = {"marker": {"symbol": "star"}, "legendgroup": group, "showlegend": False}
    return points([p.N_best], [p.loss_best], colour, [hover], 14, INK, **star, **bars)


# The law.


def contours(a: Analysis) -> Figure | None:
    t = a.table
    if a.law is None or not is_uneven(a.law.predict(t.N, t.D)):
        return None
    n, d, losses, (low, high, step), best = loss_contours(a.law, t.N, t.D)
    surface = style("contours") | {"colorscale": SCALE, "z": [as_list(row) for row in losses]}
    surface |= {"x": as_list(n), "y": as_list(d)}
    surface["contours"] |= {"start": low, "end": high, "size": step}
    data = [surface, *(line(p.N, p.D, FAINT, width=1, dash="dot") for p in a.profiles.profiles_)]
    inside = (n[0] <= best["N"]) & (n[-1] >= best["N"]) & (d[0] <= best["D"]) & (d[-1] >= best["D"])
    C, N, D, loss = (best[name][inside] for name in ("flops", "N", "D", "loss"))
    hover = [
        f"<b>optimal at {scientific(c)} FLOPs</b><br>N* {count(n)} · D* {count(d)}<br>D/N {amount(d / n)}"
        f" · loss {y:.4f}"
        for c, n, d, y in zip(C, N, D, loss, strict=True)
    ]
    data.append(line(N, D, APPROACH_STYLE["parametric"][0], hover, width=3, name="efficient frontier"))
    marker = {"colorscale": SCALE, "cmin": low, "cmax": high}
    data.append(points(t.N, t.D, as_list(t.loss), run_hover(a), 9, INK, marker=marker, name="runs"))
    return {"data": data, "layout": layout("parameters N", "tokens D", n, d, pad=0.0, height=500, log_y=True)}


def residuals(a: Analysis) -> Figure | None:
    if a.law is None:
        return None
    off = np.expm1(a.law.residuals())
    hover = [f"{label}<br>{100 * r:+.2f} % of the prediction" for label, r in zip(run_hover(a), off, strict=True)]
    flops = a.table.flops
    look = layout("training FLOPs", "measured over predicted loss, %", flops, height=400, showlegend=False)
    zero = line([10**v for v in look["xaxis"]["range"]], [0.0, 0.0], FAINT, width=1, dash="dot")
    return {"data": [zero, points(flops, 100 * off, shades(a.table.N), hover)], "layout": look}


# The optimum by budget, published laws, the backtest, scores.


def answer(a: Analysis) -> Figure | None:
    """Draw the optimal N and D against budget, by the first approach with an answer."""
    goal, runs = a.targets[0], a.table.flops
    data: list[Trace] = []
    notes: list[Trace] = []
    shown: list[float] = []
    for quantity, what, colour in (("N", "parameters", PALETTE[0]), ("D", "tokens", PALETTE[1])):
        C, lines = allocation_lines(a, quantity, float(runs.min()), 2 * max(goal, float(runs.max())))
        if not lines:
            return None
        lead, values, band = lines[0]
        at = int(np.searchsorted(C, goal))
        label = f"<b>{count(float(values[at]))} {what}</b>"
        if band is not None:
            band = np.clip(band, values[:, None] / WIDEST, values[:, None] * WIDEST)
            data.append(band_area(C, band, colour))
            label += f"<br>{count(float(band[at, 0]))} to {count(float(band[at, 1]))}"
        hover = budget_hovers(f"<b>{lead.title}</b>", C, quantity, values)
        data.append(line(C, values, colour, hover, width=2.5, name=f"{what} {quantity}"))
        data.append(points([goal], [values[at]], colour, [label], 12, showlegend=False))
        minima, winners = measured_optima(a, quantity)
        C_best, best = minima if len(minima[0]) else winners
        hover = budget_hovers("isoFLOP minimum" if len(minima[0]) else "best run", C_best, quantity, best)
        data.append(points(C_best, best, colour, hover, 7, showlegend=False, marker={"symbol": "circle-open"}))
        notes.append(
            style("note") | {
                "xref": "x", "yref": "y", "x": float(np.log10(goal)), "y": float(np.log10(values[at])), "xshift": -8,
                "yshift": 6, "text": label, "align": "right", "font": {"size": 13, "color": colour},
            }
        )  # fmt: skip
        shown += [*values, *best]
    look = layout("training FLOPs", "", [C[0], C[-1]], shown, pad=0.16, height=340, log_y=True, annotations=notes)
    edge: Trace = {"type": "line", "x0": goal, "x1": goal, "yref": "paper", "y0": 0, "y1": 1}
    return {"data": data, "layout": look | {"shapes": [edge | {"line": {"color": FAINT, "width": 1, "dash": "dot"}}]}}


def allocation(a: Analysis, quantity: str) -> Figure | None:
    low, high = float(a.table.flops.min()), float(a.table.flops.max())
    C, lines = allocation_lines(a, quantity)
    end = float(C[-1])
    data: list[Trace] = []
    near: list[float] = []
    for approach, values, band in lines:
        near += values[(high * 30 >= C) & np.isfinite(values)].tolist()
        colour, dash, symbol = APPROACH_STYLE[approach.key]
        group: Trace = {"legendgroup": approach.key}
        if band is not None:
            data.append(band_area(C, np.clip(band, 1e-30, 1e40), colour, **group))
        hover = budget_hovers(f"<b>{approach.title}</b>", C, quantity, values)
        data.append(line(C, values, colour, hover, dash=dash, name=approach.title.split(" · ")[-1], **group))
        marks = values[np.searchsorted(C, a.targets)]
        hover = budget_hovers("<b>target</b>", a.targets, quantity, marks)
        group |= {"marker": {"symbol": symbol}, "showlegend": False}
        data.append(points(a.targets, marks, colour, hover, 10, **group))
    if not data:
        return None
    (C_vertex, vertices), (C_best, winners) = measured_optima(a, quantity)
    near += [*vertices, *winners]
    if len(vertices):
        hover, star = budget_hovers("isoFLOP minimum", C_vertex, quantity, vertices), {"symbol": "star"}
        colour = APPROACH_STYLE["isoflop"][0]
        data.append(points(C_vertex, vertices, colour, hover, 12, INK, marker=star, name="minima"))
    hover, colour = budget_hovers("best run", C_best, quantity, winners), APPROACH_STYLE["envelope"][0]
    ring = {"symbol": "diamond-open", "line": {"color": colour, "width": 2}}
    data.append(points(C_best, winners, colour, hover, 9, marker=ring, name="best runs"))
    log = quantity != "loss"
    look = layout("training FLOPs", OPTIMUM_TITLES[quantity], log_y=log)
    look["margin"]["t"] = 64
    every = [v for one in data if "fill" not in one for v in one["y"] if v is not None]
    views = {
        name: _view("xaxis", [low / 2, right], 0.0, True) | _view("yaxis", shown, 0.12, log)
        for name, right, shown in (("near", high * 30, near), ("far", end, every))
    }
    # Show the range near the runs first; if the targets are far beyond, a switch on the page shows the whole range.
    beyond = np.log10(end / (high * 30)) >= 1.0
    for change, value in views["near" if beyond else "far"].items():
        axis, key = change.split(".")
        look[axis][key] = value
    return {"data": data, "layout": look | ({"meta": views} if beyond else {})}


def _view(axis: str, values: list[float], pad: float, log: bool) -> dict[str, Any]:
    """Return arguments for plotly's relayout that fit `axis` to `values`, with margins of `pad` times the range."""
    ends = np.array([min(values), max(values)])
    low, high = np.log10(ends) if log else ends
    room = pad * (high - low) + 1e-9
    view: dict[str, Any] = {f"{axis}.range": [float(low - room), float(high + room)]}
    return view | ({f"{axis}.dtick": tick_step(float(high - low + 2 * room))} if log else {})


def published(a: Analysis) -> Figure | None:
    lead = a.lead
    if not lead.available:
        return None
    C = np.geomspace(a.table.flops.min(), max(*a.targets, FRONTIER), 30)
    values, band = (answers["N"] for answers in lead.answers(C))
    sizes = {name: published_law(name).optimal(C).N for name in BESIDE} | {"these runs": values}
    data = []
    for (name, N), colour in zip(sizes.items(), (*PALETTE[1:], PALETTE[0]), strict=True):
        hover = budget_hovers(f"<b>{name}</b>", C, "N", N)
        data.append(line(C, N, colour, hover, 1.5, "dot", name=name))
    data[-1] |= {"legendrank": 1, "line": {"color": PALETTE[0], "width": 3.0, "dash": "solid"}}
    if band is not None:
        finite = np.isfinite(band).all(axis=1) & (band > 0).all(axis=1)
        data.insert(0, band_area(C[finite], band[finite], PALETTE[0]))
    look = layout("training FLOPs", "optimal parameters N*", C, np.concatenate([*sizes.values()]), log_y=True)
    return {"data": data, "layout": look}


def backtest(a: Analysis) -> Figure | None:
    ahead, data = (a.backtest["tested"] or {}).get("ahead", []), list[Trace]()
    if not ahead:
        return None
    for step, colour in zip(ahead, shades(np.array([step["flops"] for step in ahead])), strict=True):
        error = 100 * np.array(step["error"])
        hover = [
            f"{times(f)} the compute<br>{e:+.2f} % of the loss" for f, e in zip(step["factor"], error, strict=True)
        ]
        data.append(points(step["factor"], error, colour, hover, 7, name=f"{scientific(step['flops'])} FLOPs"))
    far, largest = a.targets[0] / float(a.table.flops.max()), max(max(step["factor"]) for step in ahead)
    look = layout(
        "compute relative to the largest run fitted", "error of the loss, %", [1, max(far, largest)], height=400
    )
    data.append(line([10**v for v in look["xaxis"]["range"]], [0, 0], FAINT, width=1, dash="dot"))
    errors = [100 * e for step in ahead for e in step["error"]]
    data.append(
        line(
            [far, far],
            [min(errors), max(errors)],
            APPROACH_STYLE["mixture"][0],
            ["the target"] * 2,
            dash="dash",
            name="target",
        )
    )
    look["legend"]["title"] = {"text": "fitted up to "}
    return {"data": data, "layout": look}


def multiplier(a: Analysis) -> Figure | None:
    """Draw how many times the compute the base needs for each variant's loss, against budget."""
    lines, bands = list[Trace](), list[Trace]()
    compared = [item.comparison for item in a.recipes if item.comparison]
    for item, colour in zip(compared, PALETTE * len(compared), strict=False):
        C, k = (np.array([getattr(m, name) for m in item.curve]) for name in ("flops", "value"))
        hover = budget_hovers(f"<b>{text(item.variant)}</b>", C, "multiplier", k)
        intervals, name = [m.ci for m in item.curve if m.ci], text(item.variant)
        if len(intervals) == len(C):
            bands.append(band_area(C, np.array(intervals), colour, legendgroup=name))
        lines.append(line(C, k, colour, hover, name=name, legendgroup=name))
    if not lines:
        return None
    C, largest = np.array(lines[0]["x"]), compared[0].multipliers[2].flops
    look = layout("training FLOPs of the base", "compute multiplier", C, height=420, showlegend=True)
    same = line([10**v for v in look["xaxis"]["range"]], [1, 1], FAINT, width=1, dash="dot")
    every = [v for item in (*lines, *bands) for v in item["y"] if v is not None]
    ends = line([largest] * 2, [min(every), max(every)], FAINT, ["the largest run"] * 2, 1, "dash", name="largest run")
    return {"data": [*bands, same, *lines, ends], "layout": look}


def experts(a: Analysis) -> Figure | None:
    """Draw loss against FLOPs (6 N_active D) for each number of experts."""
    if a.experts is None or a.experts.law is None:
        return None
    c, every, data = a.experts.columns, [row["experts"] for row in a.experts.sparsities], list[Trace]()
    C, of_run = 6.0 * c["N_active"] * c["D"], zip(c["N_active"], c["N_total"], c["D"], strict=True)
    hover = np.array([f"N_active {count(N)} of {count(whole)}, D {count(D)}" for N, whole, D in of_run])
    reach = np.geomspace(C.min(), C.max(), 40)
    for E, colour in zip(every, shades(np.array(every)), strict=True):
        of, name = c["experts"] == E, f"{E:g} experts" if E > 1 else "dense"
        data.append(points(C[of], c["loss"][of], colour, list(hover[of]), name=name, legendgroup=name))
        best = a.experts.law.optimal(reach, experts=E).loss
        data.append(line(reach, best, colour, width=1.5, legendgroup=name))
    return {"data": data, "layout": layout("training FLOPs", LOSS, C)}


def scores(a: Analysis, measure: str) -> Figure | None:
    """Draw accuracies or `gold_bpb` (bits per byte of the right answer) against compute, one panel per task."""
    t, hover = a.table, run_hover(a)
    columns = [name for name in map(str, t.frame.columns) if name.endswith(f"/{measure}")]
    names = sorted(name.rsplit("/", 1)[0] for name in columns if np.isfinite(t.column(name)).any())
    if not names:
        return None
    data, titles, rows = list[Trace](), list[Trace](), -(-len(names) // PANELS)
    ends, axes = [float(t.flops.min()), float(t.flops.max())], layout("", "", t.flops)
    look = layout("", "", height=90 + 165 * rows, showlegend=False)
    look["grid"] = {"rows": rows, "columns": PANELS, "pattern": "independent", "xgap": 0.22, "ygap": 0.4}
    for place, task in enumerate(names, 1):
        x, y = (axis + str(place) * (place > 1) for axis in "xy")
        panel: Trace = {"xaxis": x, "yaxis": y}
        for axis, name in (("xaxis", x), ("yaxis", y)):
            look[f"{axis}{name[1:]}"] = axes[axis] | {"title": {}, "tickfont": {"size": 10}, "nticks": 4}
        look[f"xaxis{x[1:]}"] |= {"exponentformat": "power", "dtick": 1}
        values, errors, chance = (t.column(f"{task}/{name}") for name in (measure, f"{measure}_se", "chance"))
        seen = np.flatnonzero(np.isfinite(values))
        bars: Trace = {"type": "data", "array": as_list(np.nan_to_num(errors[seen])), "color": SCORE}
        hover_texts = [f"<b>{text(task)}</b> {values[i]:.3f} ± {errors[i]:.3f}<br>{hover[i]}" for i in seen]
        shown: Trace = {"opacity": 0.7, "error_y": bars | {"thickness": 0.7, "width": 0}}
        data.append(points(t.flops[seen], values[seen], SCORE, hover_texts, 6, **shown, **panel))
        # The run of lowest loss in each budget, by rising FLOPs.
        levels = (seen[a.profiles.labels_[seen] == level] for level in range(len(a.profiles.budgets_)))
        best = np.array([rows[t.loss[rows].argmin()] for rows in levels if rows.size], dtype=int)
        best = best[np.argsort(t.flops[best])]
        data.append(line(t.flops[best], values[best], SCORE, width=1.5, **panel))
        if measure == "acc" and np.isfinite(chance).any():
            level = float(chance[np.isfinite(chance)][0])
            hover_texts = [f"chance level of {text(task)}: {percent(level)}"] * 2
            data.append(line(ends, [level] * 2, FAINT, hover_texts, 1.2, "dot", **panel))
        at: Trace = {"xref": f"{x} domain", "yref": f"{y} domain", "x": 0, "y": 1, "xanchor": "left"}
        titles.append(style("note") | at | {"text": f"<b>{text(task)}</b>", "font": {"size": 12, "color": INK}})
    return {"data": data, "layout": look | {"annotations": titles}}
