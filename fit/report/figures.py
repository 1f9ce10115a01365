"""The report's interactive figures, as plain plotly dictionaries ({"data": [...], "layout": {...}}).

Special here:
- No plotly objects are built: a dictionary is what the page needs, and importing the library costs more than all the
  figures.
- Colours carry meaning: viridis is size or budget (ordered, readable by every eye), the three Okabe-Ito colours are the
  approaches, each with its own dash, too. Legends stand above the data, never on it.
- Every string from data is escaped, because plotly reads hover texts as HTML.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..approaches.isoflop import IsoflopProfile
from ..errors import Array
from ..formatting import count, loss, ratio, scientific, text
from ..results import Analysis

Figure = dict[str, Any]

APPROACH_STYLE = {
    "envelope": ("#009E73", "dot", "diamond"),
    "isoflop": ("#D55E00", "dash", "square"),
    "parametric": ("#0072B2", "solid", "circle"),
}
TASK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Viridis, sampled, without its palest end, which is lost on white.
VIRIDIS = ((68, 1, 84), (70, 50, 127), (54, 92, 141), (39, 127, 142), (31, 161, 135), (74, 194, 109), (159, 218, 58))
INK, FAINT, GRID = "#1b1f24", "#6a737d", "#e7eaee"
CURVE_POINTS = 300


def shade(share: float) -> str:
    """A colour of the ordered scale at 0 to 1."""
    at = float(np.clip(share, 0, 1)) * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    mixed = [round(a + (at - low) * (b - a)) for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True)]
    return "rgb({},{},{})".format(*mixed)


def shades(values: Array) -> list[str]:
    """Colours by the logarithm of the values."""
    log = np.log(values)
    span = np.ptp(log)
    return [shade(0.3 if span == 0 else (v - log.min()) / span) for v in log]


def layout(x: str, y: str, height: int = 440, log_x: bool = True, log_y: bool = False, **more: Any) -> dict[str, Any]:
    """The one look of all figures. Parameters and tokens read 10k, 1M, 1B; FLOPs as powers of ten."""

    def axis(title: str, log: bool) -> dict[str, Any]:
        return {
            "title": {"text": title, "standoff": 12},
            "type": "log" if log else "linear",
            "gridcolor": GRID,
            "zeroline": False,
            "linecolor": "#aeb6bf",
            "ticks": "outside",
            "tickcolor": "#aeb6bf",
            "exponentformat": ("power" if "FLOPs" in title else "B") if log else "none",
            "automargin": True,
        } | ({"minor": {"ticks": "outside", "ticklen": 3, "tickcolor": "#d5dae0"}} if log else {})

    return {
        "xaxis": axis(x, log_x),
        "yaxis": axis(y, log_y),
        "height": height,
        "margin": {"l": 64, "r": 20, "t": 44, "b": 56},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "white", "bordercolor": "#aeb6bf", "font": {"color": INK}, "align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "font": {"size": 12}},
    } | more


def fit_axis(axis: dict[str, Any], values: Any, pad: float = 0.05) -> None:
    """Fit a log axis around positive values."""
    low, high = np.log10(np.min(values)), np.log10(np.max(values))
    room = pad * (high - low) + 0.02
    axis["range"] = [float(low - room), float(high + room)]
    axis["dtick"] = tick_step(float(high - low))


def tick_step(decades: float) -> int | str:
    """Label 1, 2 and 5 on a short log axis, and about eight decades on a long one."""
    return "D2" if decades < 1.6 else max(1, int(np.ceil(decades / 8)))


def line_trace(x: Any, y: Any, colour: str, **more: Any) -> dict[str, Any]:
    line = {"color": colour, "width": 2} | more.pop("line", {})
    return {"type": "scatter", "mode": "lines", "x": as_list(x), "y": as_list(y), "line": line} | more


def point_trace(x: Any, y: Any, colour: Any, **more: Any) -> dict[str, Any]:
    marker = {"color": colour, "size": 8, "line": {"color": "white", "width": 1}} | more.pop("marker", {})
    return {"type": "scatter", "mode": "markers", "x": as_list(x), "y": as_list(y), "marker": marker} | more


def as_list(values: Any) -> list[Any]:
    return [float(v) if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]


def hovers(lines: list[str]) -> dict[str, Any]:
    return {"text": lines, "hovertemplate": "%{text}<extra></extra>"}


def run_hover(a: Analysis) -> list[str]:
    t = a.table
    return [
        f"<b>{text(run)}</b><br>N {count(n)} · D {count(d)} · D/N {ratio(d / n)}"
        f"<br>{scientific(c)} FLOPs<br>loss {y:.4f}"
        for run, n, d, c, y in zip(t.run_id, t.N, t.D, t.flops, t.loss, strict=True)
    ]


def loss_curves(a: Analysis, curves: Any, by: str) -> Figure | None:
    """Training loss by `tokens` or `flops`, coloured by N, with validation losses as points."""
    sizes = dict(zip(a.table.run_id.tolist(), a.table.N.tolist(), strict=True))
    known = curves[curves["run_id"].astype(str).isin(sizes)] if "run_id" in curves and by in curves else curves.iloc[:0]
    known = known.dropna(subset=[by, "loss"]) if "loss" in known else known.iloc[:0]
    if known.empty:
        return None
    order = sorted(sizes, key=sizes.__getitem__)
    colours = dict(zip(order, shades(np.array([sizes[r] for r in order])), strict=True))
    data = []
    for run, rows in known.groupby(known["run_id"].astype(str), sort=False):
        rows = rows[rows[by] > 0].sort_values(by)
        keep = np.unique(np.geomspace(1, max(len(rows), 1), CURVE_POINTS).astype(int) - 1)
        rows = rows.iloc[keep] if len(rows) else rows
        hover = f"<b>{text(run)}</b><br>N {count(sizes[run])}<br>{by} %{{x:.3s}}<br>loss %{{y:.4f}}<extra></extra>"
        style = {"width": 1.3}
        data.append(
            line_trace(
                rows[by], rows["loss"], colours[run], line=style, opacity=0.85, showlegend=False, hovertemplate=hover
            )
        )
    t = a.table
    x_end = t.D if by == "tokens" else t.flops
    data.append(
        point_trace(
            x_end,
            t.loss,
            as_list(np.log10(t.N)),
            name="final validation loss",
            showlegend=True,
            marker={"size": 7, "colorscale": _scale(), "colorbar": _size_bar(t.N)},
            **hovers(run_hover(a)),
        )
    )
    top = float(np.nanquantile(known["loss"].to_numpy(dtype=np.float64), 0.97))
    low = min(float(t.loss.min()), float(np.nanmin(known["loss"].to_numpy(dtype=np.float64))))
    look = layout("tokens seen" if by == "tokens" else "training FLOPs", "loss (nats per token)")
    seen = known[by].to_numpy(dtype=np.float64)
    fit_axis(look["xaxis"], np.maximum(seen[seen > 0], float(x_end.min()) / 30))
    look["yaxis"]["range"] = [low - 0.05 * (top - low), top + 0.05 * (top - low)]
    return {"data": data, "layout": look}


def _scale() -> list[list[Any]]:
    return [[i / 10, shade(i / 10)] for i in range(11)]


def _size_bar(N: Array) -> dict[str, Any]:
    ticks = np.unique(np.round(np.linspace(np.log10(N.min()), np.log10(N.max()), 5), 3))
    return {
        "title": {"text": "N", "side": "top"},
        "tickvals": ticks.tolist(),
        "ticktext": [count(10**t, 2) for t in ticks],
        "thickness": 10,
        "outlinewidth": 0,
        "len": 0.9,
    }


def isoflop(a: Analysis) -> Figure | None:
    """Loss by size at each budget, with curves and vertices; a refused vertex is hollow and dashed."""
    profiles = a.profiles.profiles_
    if not profiles:
        return None
    data: list[dict[str, Any]] = []
    for profile, colour in zip(profiles, shades(np.array([p.flops for p in profiles])), strict=True):
        group = f"{profile.flops:.6g}"
        hover = [
            f"{scientific(profile.flops)} FLOPs<br>N {count(n)} · D {count(d)}<br>loss {y:.4f}"
            for n, d, y in zip(profile.N, profile.D, profile.loss, strict=True)
        ]
        name = f"{scientific(profile.flops)}"
        data.append(point_trace(profile.N, profile.loss, colour, name=name, legendgroup=group, **hovers(hover)))
        if not profile.has_curve:
            continue
        N = np.geomspace(profile.N.min() / 1.15, profile.N.max() * 1.15, 80)
        dash = {"dash": "solid" if profile.accepted else "dot"}
        data.append(
            line_trace(N, profile.curve(N), colour, line=dash, legendgroup=group, showlegend=False, hoverinfo="skip")
        )
        if profile.accepted:
            data.append(_vertex(profile, colour, group))
    look = layout("parameters N", "loss (nats per token)", height=480)
    fit_axis(look["xaxis"], np.concatenate([p.N for p in profiles]))
    look["legend"]["title"] = {"text": "FLOPs "}
    return {"data": data, "layout": look}


def _vertex(p: IsoflopProfile, colour: str, group: str) -> dict[str, Any]:
    interval = p.interval()
    bars: dict[str, Any] = {}
    said = ""
    if interval is not None and p.N_best is not None and np.isfinite(interval).all():
        bars = {
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [interval[1] - p.N_best],
                "arrayminus": [p.N_best - interval[0]],
                "color": colour,
                "thickness": 1.5,
            }
        }
        said = f" [{count(interval[0])}, {count(interval[1])}]"
    marker = {"symbol": "star", "size": 14, "line": {"color": INK, "width": 1}}
    hover = [
        f"<b>minimum at {scientific(p.flops)} FLOPs</b><br>N* {count(p.N_best)}{said}<br>D* {count(p.D_best)}"
        f"<br>loss {loss(p.loss_best)}"
    ]
    return point_trace(
        [p.N_best], [p.loss_best], colour, marker=marker, legendgroup=group, showlegend=False, **bars, **hovers(hover)
    )


def contours(a: Analysis) -> Figure | None:
    """Parametric loss over (N, D), the runs, isoFLOP lines, and the efficient frontier."""
    law, t = a.law, a.table
    if law is None:
        return None
    N = np.geomspace(t.N.min() / 2, t.N.max() * 2, 60)
    D = np.geomspace(t.D.min() / 2, t.D.max() * 2, 60)
    Z = np.asarray(law.predict(N[None, :], D[:, None]))
    low, high, step = _nice_levels(float(Z.min()), float(np.quantile(Z, 0.97)))
    data: list[dict[str, Any]] = [
        {
            "type": "contour",
            "x": as_list(N),
            "y": as_list(D),
            "z": [as_list(row) for row in Z],
            "colorscale": [[i / 10, shade(i / 10)] for i in range(11)],
            "contours": {
                "start": low,
                "end": high,
                "size": step,
                "coloring": "lines",
                "showlabels": True,
                "labelfont": {"size": 10},
                "labelformat": ".3~f",
            },
            "line": {"width": 1.2},
            "showscale": False,
            "hovertemplate": "N %{x:.3s}<br>D %{y:.3s}<br>law %{z:.4f}<extra></extra>",
        }
    ]
    for p in a.profiles.profiles_:
        order = np.argsort(p.N)
        data.append(
            line_trace(
                p.N[order], p.D[order], FAINT, line={"width": 1, "dash": "dot"}, showlegend=False, hoverinfo="skip"
            )
        )
    C = np.geomspace(6 * N[0] * D[0], 6 * N[-1] * D[-1], 80)
    best = law.optimal(C)
    inside = (N[0] <= best.N) & (N[-1] >= best.N) & (D[0] <= best.D) & (D[-1] >= best.D)
    colour, dash, _ = APPROACH_STYLE["parametric"]
    hover = [
        f"<b>optimal at 6ND = {scientific(c)}</b><br>N* {count(n)} · D* {count(d)}<br>D/N {ratio(d / n)} · loss {y:.4f}"
        for c, n, d, y in zip(C[inside], best.N[inside], best.D[inside], best.loss[inside], strict=True)
    ]
    data.append(
        line_trace(
            best.N[inside],
            best.D[inside],
            colour,
            line={"width": 3, "dash": dash},
            name="efficient frontier",
            **hovers(hover),
        )
    )
    marker = {"size": 9, "colorscale": _scale(), "cmin": low, "cmax": high, "line": {"color": INK, "width": 1}}
    data.append(point_trace(t.N, t.D, as_list(t.loss), marker=marker, name="runs", **hovers(run_hover(a))))
    look = layout("parameters N", "tokens D", height=500, log_y=True)
    fit_axis(look["xaxis"], N, 0.0)
    fit_axis(look["yaxis"], D, 0.0)
    return {"data": data, "layout": look}


def _nice_levels(low: float, high: float) -> tuple[float, float, float]:
    """First and last level and a step of 1, 2 or 5 times a power of ten, at most 20 steps between."""
    rough = max(high - low, 1e-6) / 20
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(power * min((m for m in (1, 2, 5, 10) if m * power >= rough), default=10))
    return float(np.ceil(low / step) * step), float(np.floor(high / step) * step), step
