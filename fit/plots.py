"""Matplotlib figures for papers: one call per figure, colour-blind safe, readable in print.

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
from .files import replacing
from .formatting import count, scientific
from .report import series
from .report.series import APPROACH_STYLE, CURVE_TITLES, FAINT, GRID, LOSS, OPTIMUM_TITLES, Analysis, Law, shades

SIZE = (6.0, 4.2)
DPI = 200
FORMATS = ("png", "pdf", "svg")
DASHES = {"solid": "-", "dash": "--", "dot": ":"}
STAR = {"marker": "*", "s": 120, "edgecolor": "black", "linewidth": 0.7, "zorder": 4}


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
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _legend(axes: Any, columns: int) -> Any:
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "handlelength": 1.6, "columnspacing": 1.2}
    axes.legend(frameon=False, fontsize=8, ncols=columns, **place)
    return axes


def plot_contours(law: Law, N: Array, D: Array, loss: Array, axes: Any = None) -> Any:
    """Loss of the law over (N, D), the runs, and the compute-efficient frontier under C = 6ND."""
    axes = _axes(axes, "parameters N", "tokens D", log_y=True)
    found = series.loss_contours(law, N, D)
    levels = np.arange(found.low, found.high + found.step / 2, found.step)
    axes.clabel(axes.contour(found.N, found.D, found.loss, levels, cmap="viridis", linewidths=0.9), fontsize=7)
    colour = APPROACH_STYLE["parametric"][0]
    axes.plot(found.frontier.N, found.frontier.D, color=colour, linewidth=2.4, label="efficient frontier")
    axes.scatter(N, D, c=loss, cmap="viridis", s=26, edgecolor="black", linewidth=0.6, zorder=3, label="runs")
    axes.set_xlim(found.N[0], found.N[-1])
    axes.set_ylim(found.D[0], found.D[-1])
    return _legend(axes, 2)


def plot_isoflop(profiles: Any, axes: Any = None) -> Any:
    """Runs, curve and vertex of each budget; a refused curve is dotted and has no vertex."""
    axes = _axes(axes, "parameters N", LOSS)
    shown = profiles.profiles_
    for p, colour in zip(shown, shades(np.array([p.flops for p in shown])) if shown else [], strict=True):
        axes.scatter(p.N, p.loss, color=colour, s=24, zorder=3, label=f"{scientific(p.flops)} FLOPs")
        if p.has_curve:
            line = "-" if p.accepted else ":"
            axes.plot(*series.profile_curve(p), color=colour, linestyle=line, linewidth=1.4)
        if p.accepted:
            axes.scatter([p.N_best], [p.loss_best], color=colour, **STAR)
    return _legend(axes, 5) if shown else axes


def plot_allocation(analysis: Analysis, quantity: str = "N", axes: Any = None) -> Any:
    """N, D or loss of the best run by budget, with bands of every approach that has an answer; `quantity` is N, D or
    loss.
    """
    log = quantity != "loss"
    axes = _axes(axes, "training FLOPs", OPTIMUM_TITLES[quantity], log_y=log)
    C = np.geomspace(analysis.table.flops.min() / 2, analysis.table.flops.max() * 30, 120)
    seen: list[Array] = []
    for approach, values, band in series.allocation_lines(analysis, quantity, C):
        colour, dash, _ = APPROACH_STYLE[approach.key]
        axes.plot(C, values, color=colour, linestyle=DASHES[dash], linewidth=1.8, label=approach.title)
        seen.append(values[np.isfinite(values)])
        if band is not None:
            axes.fill_between(C, np.clip(band[:, 0], 1e-30, None), band[:, 1], color=colour, alpha=0.13, linewidth=0)
    vertices, _ = series.measured_optima(analysis, quantity)
    axes.scatter(*vertices, color=APPROACH_STYLE["isoflop"][0], **STAR)
    seen.append(vertices[1])
    everything = np.concatenate(seen)
    if not everything.size:
        return axes
    # A band that opens wide must not squeeze the lines flat.
    low, high = everything.min(), everything.max()
    axes.set_ylim(*((low / 3, high * 3) if log else (0.9 * low, 1.05 * high)))
    return _legend(axes, 3)


def plot_curves(analysis: Analysis, curves: Any, by: str = "flops", axes: Any = None) -> Any:
    """Loss curves (DataFrame: run_id, tokens, flops, loss) of the table's runs by `tokens` or `flops`, coloured by
    N.
    """
    axes = _axes(axes, CURVE_TITLES[by], LOSS)
    t = analysis.table
    colours = dict(zip(t.N.tolist(), shades(t.N), strict=True))
    for _, N, x, loss in series.loss_curves(analysis, curves, by):
        axes.plot(x, loss, color=colours[N], linewidth=0.9, alpha=0.85)
    axes.scatter(t.D if by == "tokens" else t.flops, t.loss, color=shades(t.N), s=16, zorder=3)
    axes.set_title(f"dark: N = {count(t.N.min())}, light: N = {count(t.N.max())}", fontsize=9)
    return axes


def plot_residuals(law: Law, by: ArrayLike | None = None, axes: Any = None) -> Any:
    """Residuals in percent against `by` (n,) (by default 6ND, or the first input), coloured by the first input."""
    name = law.inputs[0]
    first = law.data_[name]
    label, x = name, first
    if by is not None:
        label, x = "", np.asarray(by, dtype=np.float64)
    elif {"N", "D"} <= set(law.inputs):
        label, x = "training FLOPs (6ND)", 6.0 * law.data_["N"] * law.data_["D"]
    axes = _axes(axes, label, "measured over predicted (%)")
    axes.axhline(0.0, color=FAINT, linewidth=1.0)
    residual = 100.0 * np.expm1(law.residuals())
    axes.scatter(x, residual, color=shades(first), s=24, edgecolor="white", linewidth=0.4, zorder=3)
    axes.set_title(f"dark: {name} = {count(first.min())}, light: {count(first.max())}", fontsize=9)
    return axes


def plot_cloud(law: Law, x: str = "alpha", y: str = "beta", axes: Any = None) -> Any:
    """Two constants of every bootstrap refit against each other, the fit, and their 95 % intervals."""
    if law.draws_ is None:
        raise InputError("a bootstrap cloud needs draws; call bootstrap(n, groups=run_id) first.")
    for name in (x, y):
        if name not in law.names:
            raise InputError(f"{name!r} is not a constant of this law; choose among {', '.join(law.names)}.")
    axes = _axes(axes, x, y, log_x=False)
    colour = APPROACH_STYLE["parametric"][0]
    axes.scatter(law.draws_[x], law.draws_[y], s=7, color=colour, alpha=0.25, linewidth=0, label="refits of resamples")
    bars = []
    for name in (x, y):
        (low, high), value = law.interval(name), law.constants_[name]
        bars.append([[max(value - low, 0)], [max(high - value, 0)]])
    style = {"fmt": "o", "color": "black", "markersize": 5, "linewidth": 1.2, "capsize": 3}
    axes.errorbar(
        [law.constants_[x]], [law.constants_[y]], xerr=bars[0], yerr=bars[1], **style, label="fit, 95 % intervals"
    )
    return _legend(axes, 2)


def plot_backtest(analysis: Analysis, axes: Any = None) -> Any:
    """Loss predicted from cheaper runs against loss measured, one colour per held-out budget."""
    axes = _axes(axes, "measured loss", "predicted loss", log_x=False)
    steps = analysis.backtest["steps"]
    if not steps:
        return axes
    for step, colour in zip(steps, shades(np.array([step["held_out_flops"] for step in steps])), strict=True):
        label = f"{scientific(step['held_out_flops'])} FLOPs"
        axes.scatter(step["measured"], step["predicted"], color=colour, s=22, label=label, zorder=3)
    low, high = (f(f(step["measured"]) for step in steps) for f in (min, max))
    axes.plot([low, high], [low, high], color=FAINT, linewidth=1.0, linestyle=":")
    return _legend(axes, 5)


def save_figures(
    analysis: Analysis, directory: str | Path, curves: Any = None, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Every figure that this analysis supports, in each of `formats` (png, pdf, svg), written whole or not at all.

    PDF and SVG are vectors with their text as text, for papers. Raises InputError for another format.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise InputError(f"format is {unknown[0]!r}; choose among {', '.join(FORMATS)}.")
    written = []
    for name, draw in _drawings(analysis, curves).items():
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.13, bottom=0.13, right=0.97, top=0.88)
        draw(axes=figure.subplots())
        for kind in formats:
            path = Path(directory) / f"{name}.{kind}"
            with replacing(path) as temporary, rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
                figure.savefig(temporary, dpi=DPI, format=kind)
            written.append(path)
    return written


def _drawings(analysis: Analysis, curves: Any) -> dict[str, Callable[..., Any]]:
    """Name -> what draws it on `axes`, for whatever the analysis has."""
    law, t = analysis.law, analysis.table
    drawings: dict[str, Callable[..., Any]] = {"isoflop": partial(plot_isoflop, analysis.profiles)}
    if law is not None:
        drawings["contours"] = partial(plot_contours, law, t.N, t.D, t.loss)
        drawings["residuals"] = partial(plot_residuals, law)
        exponents = [name for name in law.names if name.startswith(("alpha", "beta"))]
        if law.draws_ is not None and len(exponents) > 1:
            drawings["bootstrap"] = partial(plot_cloud, law, *exponents[:2])
    if analysis.backtest["steps"]:
        drawings["backtest"] = partial(plot_backtest, analysis)
    for quantity in OPTIMUM_TITLES:
        drawings[f"optimal_{quantity}"] = partial(plot_allocation, analysis, quantity)
    if curves is not None and len(curves):
        for by in CURVE_TITLES:
            drawings[f"loss_by_{by}"] = partial(plot_curves, analysis, curves, by)
    return drawings
