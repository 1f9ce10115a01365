"""Interactive figures of what follows from the runs: the optimum by budget, scores, and the backtest."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import Array
from ..formatting import count, loss, percent, scientific, text
from ..results import Analysis
from .figures import (
    APPROACH_STYLE,
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
    tick_step,
)


def allocation(a: Analysis, quantity: str) -> Figure | None:
    """N, D or loss of the best run by budget: bands of all approaches, the measured optima, and the targets."""
    able = [x for x in a.approaches.values() if x.available]
    low, high = float(a.table.flops.min()), float(a.table.flops.max())
    far = max(*a.targets, high * 10)
    C = np.unique(np.concatenate([np.geomspace(low / 2, far * 2, 90), np.array(a.targets)]))
    say: Any = {"N": count, "D": count, "loss": loss}[quantity]
    data: list[dict[str, Any]] = []
    near_values: list[float] = []
    for approach in able:
        values, band = approach.values(C)[quantity], approach.bands(C)[quantity]
        if not np.isfinite(values).any():
            continue
        colour, dash, symbol = APPROACH_STYLE[approach.key]
        near = high * 30 >= C
        near_values += values[near & np.isfinite(values)].tolist()
        if band is not None and np.isfinite(band).all():
            data.append(_band(C, np.clip(band, 1e-30, 1e40), colour, approach.key))
        hover = [
            f"<b>{approach.title}</b><br>{scientific(c)} FLOPs<br>{quantity} {say(v)}"
            for c, v in zip(C, values, strict=True)
        ]
        data.append(
            line_trace(
                C,
                values,
                colour,
                line={"dash": dash},
                name=approach.title.split(" · ")[1],
                legendgroup=approach.key,
                **hovers(hover),
            )
        )
        at = [approach.at(c) for c in a.targets]
        marks = [getattr(e, quantity) for e in at]
        data.append(
            point_trace(
                a.targets,
                [np.nan if m is None else m for m in marks],
                colour,
                marker={"symbol": symbol, "size": 10},
                legendgroup=approach.key,
                showlegend=False,
                **hovers(
                    [
                        f"<b>target {scientific(c)} FLOPs</b><br>{quantity} {say(m)}"
                        for c, m in zip(a.targets, marks, strict=True)
                    ]
                ),
            )
        )
    if not data:
        return None
    measured = _measured(a, quantity)
    data += measured
    for trace in measured:
        near_values += [v for v in trace["y"] if v is not None]
    title = {"N": "optimal parameters N*", "D": "optimal tokens D*", "loss": "loss of the best run (nats per token)"}[
        quantity
    ]
    look = layout("training FLOPs", title, log_y=quantity != "loss", height=440)
    look["margin"]["t"] = 64
    _zoom(look, low, high, far, near_values, data, log_y=quantity != "loss")
    return {"data": data, "layout": look}


def _measured(a: Analysis, quantity: str) -> list[dict[str, Any]]:
    """The optima that the runs show: accepted isoFLOP vertices, and the envelope's winners."""
    good, e = a.profiles.accepted_, a.envelope
    vertices = {"N": [p.N_best for p in good], "D": [p.D_best for p in good], "loss": [p.loss_best for p in good]}[
        quantity
    ]
    winners = {"N": e.N_, "D": e.D_, "loss": e.loss_}[quantity]
    say: Any = loss if quantity == "loss" else count
    traces = []
    if good:
        hover = [
            f"isoFLOP minimum<br>{scientific(p.flops)} FLOPs<br>{quantity} {say(v)}"
            for p, v in zip(good, vertices, strict=True)
        ]
        marker = {"symbol": "star", "size": 12, "line": {"color": INK, "width": 1}}
        traces.append(
            point_trace(
                [p.flops for p in good],
                vertices,
                APPROACH_STYLE["isoflop"][0],
                marker=marker,
                name="minima",
                **hovers(hover),
            )
        )
    hover = [
        f"best run<br>{scientific(c)} FLOPs<br>{quantity} {say(v)}" for c, v in zip(e.flops_, winners, strict=True)
    ]
    marker = {"symbol": "diamond-open", "size": 9, "line": {"color": APPROACH_STYLE["envelope"][0], "width": 2}}
    traces.append(
        point_trace(e.flops_, winners, APPROACH_STYLE["envelope"][0], marker=marker, name="best runs", **hovers(hover))
    )
    return traces


def _band(C: Array, band: Array, colour: str, key: str) -> dict[str, Any]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": as_list(np.concatenate([C, C[::-1]])),
        "y": as_list(np.concatenate([band[:, 1], band[::-1, 0]])),
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.13)",
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": key,
    }


def _zoom(
    look: dict[str, Any],
    low: float,
    high: float,
    far: float,
    near: list[float],
    data: list[dict[str, Any]],
    log_y: bool,
) -> None:
    """Start near the runs; where the targets lie far off, `meta` carries that view and the one out to them."""
    near_x = [np.log10(low / 2), np.log10(high * 30)]
    far_x = [np.log10(low / 2), np.log10(far * 2)]
    all_y = [v for t in data for v in t["y"] if v is not None and t.get("fill") is None]

    def span(values: list[float]) -> list[float]:
        bounds = np.log10([min(values), max(values)]) if log_y else np.array([min(values), max(values)])
        pad = 0.12 * (bounds[1] - bounds[0]) + 1e-9
        return [float(bounds[0] - pad), float(bounds[1] + pad)]

    near_y, far_y = span(near), span(all_y)
    views = {"near": _view(near_x, near_y, log_y), "far": _view(far_x, far_y, log_y)}
    shown = views["far" if far_x[1] - near_x[1] < 1.0 else "near"]
    for axis in ("xaxis", "yaxis"):
        look[axis] |= {key.split(".")[1]: value for key, value in shown.items() if key.startswith(axis)}
    if shown is views["near"]:
        look["meta"] = views  # the page's switch relayouts to one of these


def _view(x: list[float], y: list[float], log_y: bool) -> dict[str, Any]:
    change: dict[str, Any] = {
        "xaxis.range": [float(v) for v in x],
        "yaxis.range": y,
        "xaxis.dtick": tick_step(x[1] - x[0]),
    }
    if log_y:
        change["yaxis.dtick"] = tick_step(y[1] - y[0])
    return change


def tasks(a: Analysis) -> list[str]:
    """Tasks with a score in the table."""
    names = {str(c).rsplit("/", 1)[0] for c in a.table.frame.columns if str(c).endswith(("/acc", "/gold_bpb"))}
    return sorted(n for n in names if any(np.isfinite(a.table.column(f"{n}/{m}")).any() for m in ("acc", "gold_bpb")))


def scores(a: Analysis, measure: str) -> Figure | None:
    """`acc` (with its chance level) or `gold_bpb` of each task by compute, with standard errors; the line joins each
    budget's best runs.
    """
    data: list[dict[str, Any]] = []
    t = a.table
    hover_run = run_hover(a)
    for task, colour in zip(tasks(a), TASK_COLOURS * 9, strict=False):
        values, errors = t.column(f"{task}/{measure}"), t.column(f"{task}/{measure}_se")
        seen = np.isfinite(values)
        if not seen.any():
            continue
        bars = {
            "type": "data",
            "array": as_list(np.nan_to_num(errors[seen])),
            "color": colour,
            "thickness": 0.7,
            "width": 0,
        }
        shown = [
            f"<b>{text(task)}</b> {values[i]:.3f} ± {errors[i]:.3f}<br>{hover_run[i]}" for i in np.flatnonzero(seen)
        ]
        data.append(
            point_trace(
                t.flops[seen],
                values[seen],
                colour,
                name=text(task),
                legendgroup=task,
                opacity=0.75,
                error_y=bars,
                **hovers(shown),
            )
        )
        best = _best_of_budget(a, seen)
        data.append(
            line_trace(
                t.flops[best],
                values[best],
                colour,
                line={"width": 1.5},
                legendgroup=task,
                showlegend=False,
                hoverinfo="skip",
            )
        )
        chance = t.column(f"{task}/chance")
        if measure == "acc" and np.isfinite(chance).any():
            level = float(chance[np.isfinite(chance)][0])
            ends = [float(t.flops.min()), float(t.flops.max())]
            said = [f"chance level of {text(task)}: {percent(level)}"] * 2
            line = {"width": 1.2, "dash": "dot"}
            data.append(
                line_trace(ends, [level, level], colour, line=line, legendgroup=task, showlegend=False, **hovers(said))
            )
    if not data:
        return None
    title = "accuracy (dotted: chance)" if measure == "acc" else "gold answer, bits per byte"
    look = layout("training FLOPs", title)
    fit_axis(look["xaxis"], t.flops)
    return {"data": data, "layout": look}


def _best_of_budget(a: Analysis, seen: np.ndarray) -> np.ndarray:
    """The run of lowest loss in each budget, by rising FLOPs."""
    best = []
    for level in range(len(a.profiles.budgets_)):
        rows = np.flatnonzero((a.profiles.labels_ == level) & seen)
        if rows.size:
            best.append(rows[a.table.loss[rows].argmin()])
    picked = np.array(best, dtype=int)
    return picked[np.argsort(a.table.flops[picked])]


def backtest(a: Analysis) -> Figure | None:
    """Predicted against measured loss of held-out budgets."""
    steps = a.backtest["steps"]
    if not steps:
        return None
    data = []
    ends = [np.inf, -np.inf]
    for step, colour in zip(steps, shades(np.array([s["held_out_flops"] for s in steps])), strict=True):
        measured, predicted = np.array(step["measured"]), np.array(step["predicted"])
        ends = [min(ends[0], measured.min(), predicted.min()), max(ends[1], measured.max(), predicted.max())]
        hover = [
            f"measured {m:.4f}<br>predicted {p:.4f} ({percent(p / m - 1, True)})"
            for m, p in zip(measured, predicted, strict=True)
        ]
        name = f"{scientific(step['held_out_flops'])} FLOPs held out"
        data.append(point_trace(measured, predicted, colour, name=name, **hovers(hover)))
    pad = 0.05 * (ends[1] - ends[0]) + 1e-6
    diagonal = [ends[0] - pad, ends[1] + pad]
    data.append(
        line_trace(diagonal, diagonal, FAINT, line={"width": 1, "dash": "dot"}, showlegend=False, hoverinfo="skip")
    )
    return {"data": data, "layout": layout("measured loss", "predicted loss", log_x=False, height=400)}
