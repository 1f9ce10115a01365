"""Matplotlib figures for papers: one call a figure, colour-blind safe, readable in print.

Special here: every function draws on axes that it is given or makes its own, and returns the axes; nothing is shown or
saved behind your back, and the style is applied to these axes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import Array, InputError
from .formatting import count, scientific

# This module imports neither laws nor analyses, so that `law.plot()` may import it.
Law = Any
Analysis = Any
IsoflopProfiles = Any
APPROACHES = {"envelope": ("#009E73", ":", "D"), "isoflop": ("#D55E00", "--", "s"), "parametric": ("#0072B2", "-", "o")}
SIZE = (6.0, 4.2)
DPI = 200
FORMATS = ("png", "pdf", "svg")


def _axes(axes: Any, x: str, y: str, log_x: bool = True, log_y: bool = False) -> Any:
    if axes is None:
        import matplotlib.pyplot as plt

        axes = plt.subplots(figsize=SIZE, layout="constrained")[1]
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log_x:
        from matplotlib.ticker import LogFormatterSciNotation

        axes.set_xscale("log")
        # Labels between powers of ten only where there is hardly one power on the axis: else they overlap.
        axes.xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(0.6, 0.3)))
    if log_y:
        axes.set_yscale("log")
    axes.grid(True, color="#e7eaee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _colours(values: Array) -> Any:
    from matplotlib import colormaps

    log = np.log(values)
    span = float(np.ptp(log))
    share = (log - log.min()) / span if span else np.full(len(log), 0.3)
    return colormaps["viridis"](0.85 * share)


def _legend(axes: Any, **more: Any) -> None:
    """Above the axes, so that it covers no data."""
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "handlelength": 1.6, "columnspacing": 1.2}
    axes.legend(frameon=False, fontsize=8, **(place | more))


def plot_contours(law: Law, N: Array, D: Array, loss: Array, axes: Any = None) -> Any:
    """Loss of the law over (N, D), the runs, and the compute-efficient frontier under C = 6ND."""
    axes = _axes(axes, "parameters N", "tokens D", log_y=True)
    n = np.geomspace(N.min() / 2, N.max() * 2, 80)
    d = np.geomspace(D.min() / 2, D.max() * 2, 80)
    Z = np.asarray(law.predict(n[None, :], d[:, None]))
    levels = np.linspace(Z.min(), np.quantile(Z, 0.97), 14)
    lines = axes.contour(n, d, Z, levels=levels, cmap="viridis", linewidths=0.9)
    axes.clabel(lines, fontsize=7, fmt="%.2f")
    best = law.optimal(np.geomspace(6 * n[0] * d[0], 6 * n[-1] * d[-1], 100))
    axes.plot(best.N, best.D, color=APPROACHES["parametric"][0], linewidth=2.4, label="efficient frontier")
    axes.scatter(N, D, c=loss, cmap="viridis", s=26, edgecolor="black", linewidth=0.6, zorder=3, label="runs")
    axes.set_xlim(n[0], n[-1])
    axes.set_ylim(d[0], d[-1])
    _legend(axes, ncols=2)
    return axes


def plot_isoflop(profiles: IsoflopProfiles, axes: Any = None) -> Any:
    """Runs, curve and vertex of each budget; a refused curve is dotted and has no vertex."""
    axes = _axes(axes, "parameters N", "loss (nats per token)")
    shown = profiles.profiles_
    if not shown:
        return axes
    for p, colour in zip(shown, _colours(np.array([p.flops for p in shown])), strict=True):
        axes.scatter(p.N, p.loss, color=colour, s=24, zorder=3, label=f"{scientific(p.flops)} FLOPs")
        if not p.has_curve:
            continue
        N = np.geomspace(p.N.min() / 1.15, p.N.max() * 1.15, 80)
        axes.plot(N, p.curve(N), color=colour, linestyle="-" if p.accepted else ":", linewidth=1.4)
        if p.accepted:
            axes.scatter(
                [p.N_best], [p.loss_best], marker="*", s=130, color=colour, edgecolor="black", linewidth=0.7, zorder=4
            )
    _legend(axes, ncols=5)
    return axes


def plot_allocation(analysis: Analysis, quantity: str = "N", axes: Any = None) -> Any:
    """N, D or loss of the best run by budget, with bands of every approach that has an answer; `quantity` is N, D or
    loss.
    """
    title = {"N": "optimal parameters N*", "D": "optimal tokens D*", "loss": "loss of the best run (nats per token)"}[
        quantity
    ]
    axes = _axes(axes, "training FLOPs", title, log_y=quantity != "loss")
    low, high = float(analysis.table.flops.min()), float(analysis.table.flops.max())
    C = np.geomspace(low / 2, high * 30, 120)
    seen: list[float] = []
    for approach in analysis.approaches.values():
        values, band = approach.values(C)[quantity], approach.bands(C)[quantity]
        if not approach.available or not np.isfinite(values).any():
            continue
        colour, dash, _ = APPROACHES[approach.key]
        axes.plot(C, values, color=colour, linestyle=dash, linewidth=1.8, label=approach.title)
        seen += values[np.isfinite(values)].tolist()
        if band is not None and np.isfinite(band).all():
            axes.fill_between(C, np.clip(band[:, 0], 1e-30, None), band[:, 1], color=colour, alpha=0.13, linewidth=0)
    good = analysis.profiles.accepted_
    points = {"N": [p.N_best for p in good], "D": [p.D_best for p in good], "loss": [p.loss_best for p in good]}[
        quantity
    ]
    if good:
        axes.scatter(
            [p.flops for p in good],
            points,
            marker="*",
            s=110,
            color=APPROACHES["isoflop"][0],
            edgecolor="black",
            zorder=4,
        )
        seen += [float(v) for v in points if v is not None]
    if seen:
        # A band that opens wide must not squeeze the lines flat.
        pad = 3.0 if quantity != "loss" else 1.0
        low_y, high_y = min(seen), max(seen)
        axes.set_ylim(
            *((low_y / pad, high_y * pad) if quantity != "loss" else (low_y - 0.1 * low_y, high_y + 0.05 * high_y))
        )
        _legend(axes, ncols=3)
    return axes


def plot_curves(analysis: Analysis, curves: Any, by: str = "flops", axes: Any = None) -> Any:
    """Loss curves (DataFrame: run_id, tokens, flops, loss) of the table's runs by `tokens` or `flops`, coloured by
    N.
    """
    axes = _axes(axes, "tokens seen" if by == "tokens" else "training FLOPs", "loss (nats per token)")
    t = analysis.table
    for i, colour in enumerate(_colours(t.N)):
        rows = curves[curves["run_id"].astype(str) == t.run_id[i]].dropna(subset=[by, "loss"]).sort_values(by)
        rows = rows[rows[by] > 0]
        axes.plot(rows[by], rows["loss"], color=colour, linewidth=0.9, alpha=0.85)
        axes.scatter([t.D[i] if by == "tokens" else t.flops[i]], [t.loss[i]], color=[colour], s=16, zorder=3)
    axes.set_title(f"dark: N = {count(t.N.min())}, light: N = {count(t.N.max())}", fontsize=9)
    return axes


def plot_residuals(law: Law, by: ArrayLike | None = None, axes: Any = None) -> Any:
    """Residuals in percent against `by` (n,) (by default 6ND, or the first input), coloured by the first input."""
    first = law.data_[law.inputs[0]]
    compute = 6.0 * law.data_["N"] * law.data_["D"] if {"N", "D"} <= set(law.inputs) else first
    label = "training FLOPs (6ND)" if {"N", "D"} <= set(law.inputs) else law.inputs[0]
    x = compute if by is None else np.asarray(by, dtype=np.float64)
    axes = _axes(axes, label if by is None else "", "measured over predicted (%)")
    residual = 100.0 * np.expm1(law.residuals())
    axes.axhline(0.0, color="#6a737d", linewidth=1.0)
    axes.scatter(x, residual, color=_colours(first), s=24, edgecolor="white", linewidth=0.4, zorder=3)
    axes.set_title(f"dark: {law.inputs[0]} = {count(first.min())}, light: {count(first.max())}", fontsize=9)
    return axes


def plot_cloud(law: Law, x: str = "alpha", y: str = "beta", axes: Any = None) -> Any:
    """Two constants of every bootstrap refit against each other, the fit, and their 95 % intervals."""
    if law.draws_ is None:
        raise InputError("a bootstrap cloud needs draws; call bootstrap(n, groups=run_id) first.")
    for name in (x, y):
        if name not in law.names:
            raise InputError(f"{name!r} is not a constant of this law; choose among {', '.join(law.names)}.")
    axes = _axes(axes, x, y, log_x=False)
    colour = APPROACHES["parametric"][0]
    axes.scatter(law.draws_[x], law.draws_[y], s=7, color=colour, alpha=0.25, linewidth=0, label="refits of resamples")
    low, high = law.interval(x)
    bottom, top = law.interval(y)
    bars = {"xerr": [[max(law.constants_[x] - low, 0)], [max(high - law.constants_[x], 0)]]}
    bars["yerr"] = [[max(law.constants_[y] - bottom, 0)], [max(top - law.constants_[y], 0)]]
    style = {"fmt": "o", "color": "black", "markersize": 5, "linewidth": 1.2, "capsize": 3}
    axes.errorbar([law.constants_[x]], [law.constants_[y]], **bars, **style, label="fit, 95 % intervals")
    _legend(axes, ncols=2)
    return axes


def plot_backtest(analysis: Analysis, axes: Any = None) -> Any:
    """Loss predicted from cheaper runs against loss measured, one colour a held-out budget."""
    axes = _axes(axes, "measured loss", "predicted loss", log_x=False)
    steps = analysis.backtest["steps"]
    if not steps:
        return axes
    colours = _colours(np.array([step["held_out_flops"] for step in steps]))
    for step, colour in zip(steps, colours, strict=True):
        label = f"{scientific(step['held_out_flops'])} FLOPs"
        axes.scatter(step["measured"], step["predicted"], color=colour, s=22, label=label, zorder=3)
    low, high = (f(f(step["measured"]) for step in steps) for f in (min, max))
    axes.plot([low, high], [low, high], color="#6a737d", linewidth=1.0, linestyle=":")
    _legend(axes, ncols=5)
    return axes


def save_figures(
    analysis: Analysis, directory: str | Path, curves: Any = None, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Every figure that this analysis supports, in each of `formats` (png, pdf, svg), written whole or not at all.

    PDF and SVG are vectors with their text as text, for papers. Raises InputError for another format.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from .files import replacing

    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise InputError(f"format is {unknown[0]!r}; choose among {', '.join(FORMATS)}.")
    written = []
    for name, draw in _drawings(analysis, curves).items():
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.13, bottom=0.13, right=0.97, top=0.88)
        draw(figure.subplots())
        for kind in formats:
            path = Path(directory) / f"{name}.{kind}"
            with replacing(path) as temporary, rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
                figure.savefig(temporary, dpi=DPI, format=kind)
            written.append(path)
    return written


def _drawings(analysis: Analysis, curves: Any) -> dict[str, Callable[[Any], Any]]:
    """Name -> what draws it on axes, for whatever the analysis has."""
    law, t = analysis.law, analysis.table
    drawings: dict[str, Callable[[Any], Any]] = {"isoflop": lambda axes: plot_isoflop(analysis.profiles, axes)}
    if law is not None:
        drawings["contours"] = lambda axes: plot_contours(law, t.N, t.D, t.loss, axes)
        drawings["residuals"] = lambda axes: plot_residuals(law, axes=axes)
        if law.draws_ is not None:
            drawings["bootstrap"] = lambda axes: plot_cloud(law, axes=axes)
    if analysis.backtest["steps"]:
        drawings["backtest"] = lambda axes: plot_backtest(analysis, axes)
    for quantity in ("N", "D", "loss"):
        drawings[f"optimal_{quantity}"] = partial(plot_allocation, analysis, quantity)
    if curves is not None and len(curves):
        for by in ("tokens", "flops"):
            drawings[f"loss_by_{by}"] = partial(plot_curves, analysis, curves, by)
    return drawings
