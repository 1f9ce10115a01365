"""The data and colours of all figures, and Matplotlib figures for papers.

Plots are drawn on `ax`, or on new axes, which are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .allocation.allocation import own_convention, unlimited
from .errors import Array, Columns, InputError, floats, is_uneven, need, one_of
from .files import replacing
from .formatting import count, scientific
from .table import as_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Law = Any  # of N and D, fitted
Analysis = Any
ANALYSIS = "what `analyze` returns"
Series = tuple[Array, Array]  # x and y, each (m,)

# Viridis encodes size or budget (ordered, safe for colour-blind readers); Okabe-Ito colours encode the approaches, each
# also with its own dash and symbol.
APPROACH_STYLE = {
    "mixture": ("#1b1f24", "solid", "star"),
    "envelope": ("#009E73", "dot", "diamond"),
    "isoflop": ("#D55E00", "dash", "square"),
    "parametric": ("#0072B2", "solid", "circle"),
}
# Samples of viridis without its palest end, which is invisible on white.
VIRIDIS = ((68, 1, 84), (70, 50, 127), (54, 92, 141), (39, 127, 142), (31, 161, 135), (74, 194, 109), (159, 218, 58))
FAINT, GRID = "#6a737d", "#e7eaee"
LOSS = "loss (nats per token)"
OPTIMUM_TITLES = {
    "N": "optimal parameters N*",
    "D": "optimal tokens D*",
    "loss": "loss of the best run (nats per token)",
}
CURVE_TITLES = {"tokens": "tokens seen", "flops": "training FLOPs"}
# Every figure that `save_figures` may write.
FIGURES: tuple[str, ...] = ("isoflop", "contours", "residuals", "bootstrap", "backtest")
FIGURES += (*(f"optimal_{quantity}" for quantity in OPTIMUM_TITLES), *(f"loss_by_{by}" for by in CURVE_TITLES))
SIZE = (6.0, 4.2)
DPI = 200
FORMATS = ("png", "pdf", "svg")
DASHES = {"solid": "-", "dash": "--", "dot": ":"}
STAR: dict[str, Any] = {"marker": "*", "s": 120, "edgecolor": "black", "linewidth": 0.7, "zorder": 4}


def shade(share: float) -> str:
    """Return the colour (#rrggbb) at `share`, 0 to 1, of the scale VIRIDIS."""
    at = float(np.clip(share, 0, 1)) * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    mixed = (round(a + (at - low) * (b - a)) for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def shades(values: Array) -> list[str]:
    """Return a colour (#rrggbb) for each value by its logarithm."""
    log = np.log(values)
    span = np.ptp(log)
    return [shade(0.3 if span == 0 else (v - log.min()) / span) for v in log]


def profile_curve(profile: Any) -> Series:
    """Return points (N, loss) on an isoFLOP profile's fitted curve, to slightly beyond its sizes."""
    N = np.geomspace(profile.N.min() / 1.15, profile.N.max() * 1.15, 80)
    return N, profile.curve(N)


def loss_contours(law: Law, N: Array, D: Array) -> tuple[Array, Array, Array, tuple[float, float, float], Columns]:
    """Return N (n,) and D (d,) around the runs, the law's loss (d, n), contour levels (low, high, step), optima."""
    n, d = (np.geomspace(values.min() / 2, values.max() * 2, 60) for values in (N, D))
    loss = np.asarray(law.predict(n[None, :], d[:, None]))
    low, high = float(loss.min()), float(np.quantile(loss, 0.97))
    rough = max(high - low, 1e-6) / 20  # at most 20 steps of 1, 2 or 5 times a power of ten
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(power * min((m for m in (1, 2, 5, 10) if m * power >= rough), default=10))
    levels = (float(np.ceil(low / step) * step), float(np.floor(high / step) * step), step)
    C = np.geomspace(6 * n[0] * d[0], 6 * n[-1] * d[-1], 80)
    best = dict(zip(("N", "D", "loss"), unlimited(law, law.constants_, C, own_convention(law)), strict=True))
    return n, d, loss, levels, {"flops": C, **best}


def allocation_lines(
    a: Analysis, quantity: str, low: float = 0.0, high: float = np.inf
) -> tuple[Array, list[tuple[Any, Array, Array | None]]]:
    """Return budgets (m,) from `low` to `high`, and (approach, `quantity` there, interval (m, 2) or None) for each.

    Approaches without an answer there are left out.
    """
    C, answers = a.by_budget
    inside, lines = (low <= C) & (high >= C), []
    for approach, values, bands in answers:
        value, band = values[quantity][inside], bands[quantity]
        if np.isfinite(value).any():
            band = None if band is None or not np.isfinite(band[inside]).all() else band[inside]
            lines.append((approach, value, band))
    return C[inside], lines


def measured_optima(a: Analysis, quantity: str) -> tuple[Series, Series]:
    """Return two series (budgets, measured optimal `quantity`): of accepted isoFLOP minima, and of the envelope."""
    good = a.profiles.accepted_
    name = {"N": "N_best", "D": "D_best", "loss": "loss_best"}[quantity]
    vertices = np.array([p.flops for p in good]), np.array([getattr(p, name) for p in good])
    return vertices, (a.envelope.flops_, getattr(a.envelope, f"{quantity}_"))


def loss_curves(a: Analysis, curves: Any, by: str) -> list[tuple[str, float, Array, Array]]:
    """Return (id, N, x, loss) of each analysed run in `curves`; x is its column `by`, tokens or flops."""
    sizes = dict(zip(a.table.run_id.tolist(), a.table.N.tolist(), strict=True))
    if curves is None or not {"run_id", "loss", by} <= set(curves):
        return []
    selected = curves[curves["run_id"].astype(str).isin(sizes) & (curves[by] > 0)].dropna(subset=["loss"])
    runs = []
    for run, rows in selected.groupby(selected["run_id"].astype(str), sort=False):
        rows = rows.sort_values(by)
        x, loss = (rows[name].to_numpy(dtype=np.float64) for name in (by, "loss"))
        runs.append((str(run), sizes[str(run)], x, loss))
    return runs


def draw_axes(ax: Axes | None, x: str, y: str, log_x: bool = True, log_y: bool = False) -> Axes:
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=SIZE, layout="constrained")[1]
    ax.set(xlabel=x, ylabel=y)
    if log_x:
        from matplotlib.ticker import LogFormatterSciNotation

        ax.set_xscale("log")
        # Minor labels only on axes of less than about one decade; on others they would overlap.
        ax.xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(0.6, 0.3)))
    if log_y:
        ax.set_yscale("log")
    ax.grid(True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def draw_legend(ax: Axes, columns: int) -> Axes:
    place: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (-0.02, 1.0),
        "handlelength": 1.6,
        "columnspacing": 1.2,
    }
    ax.legend(frameon=False, fontsize=8, ncols=columns, **place)
    return ax


def plot_contours(law: Law, N: Any = None, D: Any = None, loss: Any = None, ax: Axes | None = None) -> Axes:
    """Plot contours of the law's loss over (N, D), the runs, and the compute-efficient frontier.

    The runs are columns (n,) or a table instead of N, by default those of the fit.
    """
    need("law", law, "constants_", "a fitted law of N and D")
    if D is None or loss is None:
        runs = None if N is None else as_table(N)
        N, D, loss = law.data_.values() if runs is None else (runs.N, runs.D, runs.loss)
    ax = draw_axes(ax, "parameters N", "tokens D", log_y=True)
    n, d, surface, (low, high, step), best = loss_contours(law, N, D)
    levels = np.arange(low, high + step / 2, step)
    ax.clabel(ax.contour(n, d, surface, levels, cmap="viridis", linewidths=0.9), fontsize=7)
    ax.plot(best["N"], best["D"], color=APPROACH_STYLE["parametric"][0], linewidth=2.4, label="efficient frontier")
    ax.scatter(N, D, c=loss, cmap="viridis", s=26, edgecolor="black", linewidth=0.6, zorder=3, label="runs")
    ax.set(xlim=(n[0], n[-1]), ylim=(d[0], d[-1]))
    return draw_legend(ax, 2)


def plot_profiles(profiles: Any, ax: Axes | None = None) -> Axes:
    """Plot each budget's runs and fitted curve, with a star at an accepted minimum; curves without one are dotted."""
    ax = draw_axes(ax, "parameters N", LOSS)
    shown = profiles.profiles_
    for p, colour in zip(shown, shades(np.array([p.flops for p in shown])) if shown else [], strict=True):
        ax.scatter(p.N, p.loss, color=colour, s=24, zorder=3, label=f"{scientific(p.flops)} FLOPs")
        if p.has_curve:
            line = "-" if p.accepted else ":"
            ax.plot(*profile_curve(p), color=colour, linestyle=line, linewidth=1.4)
        if p.accepted:
            ax.scatter([p.N_best], [p.loss_best], color=colour, **STAR)
    return draw_legend(ax, 5) if shown else ax


def plot_allocation(analysis: Analysis, quantity: str = "N", ax: Axes | None = None) -> Axes:
    """Plot the optimal `quantity` (N, D or loss) and interval by budget for every approach with an answer."""
    need("analysis", analysis, "profiles", ANALYSIS)
    log = quantity != "loss"
    ax = draw_axes(ax, "training FLOPs", OPTIMUM_TITLES[quantity], log_y=log)
    C, lines = allocation_lines(analysis, quantity, high=30 * analysis.table.flops.max())
    seen: list[Array] = []
    for approach, values, band in lines:
        colour, dash, _ = APPROACH_STYLE[approach.key]
        ax.plot(C, values, color=colour, linestyle=DASHES[dash], linewidth=1.8, label=approach.title)
        seen.append(values[np.isfinite(values)])
        if band is not None:
            ax.fill_between(C, np.clip(band[:, 0], 1e-30, None), band[:, 1], color=colour, alpha=0.13, linewidth=0)
    vertices, _ = measured_optima(analysis, quantity)
    ax.scatter(*vertices, color=APPROACH_STYLE["isoflop"][0], **STAR)
    seen.append(vertices[1])
    everything = np.concatenate(seen)
    if not everything.size:
        return ax
    # Set limits by the lines, because a wide band would flatten them.
    low, high = everything.min(), everything.max()
    ax.set_ylim(*((low / 3, high * 3) if log else (0.9 * low, 1.05 * high)))
    return draw_legend(ax, 3)


def plot_curves(analysis: Analysis, curves: Any, by: str = "flops", ax: Axes | None = None) -> Axes:
    """Plot loss against `by`, tokens or flops, for analysed runs in `curves` (run_id, tokens, flops, loss)."""
    need("analysis", analysis, "profiles", ANALYSIS)
    ax = draw_axes(ax, CURVE_TITLES[by], LOSS)
    t = analysis.table
    colours = dict(zip(t.N.tolist(), shades(t.N), strict=True))
    for _, N, x, loss in loss_curves(analysis, curves, by):
        ax.plot(x, loss, color=colours[N], linewidth=0.9, alpha=0.85)
    ax.scatter(t.D if by == "tokens" else t.flops, t.loss, color=shades(t.N), s=16, zorder=3)
    ax.set_title(f"dark: N = {count(t.N.min())}, light: N = {count(t.N.max())}", fontsize=9)
    return ax


def plot_residuals(law: Law, by: ArrayLike | None = None, ax: Axes | None = None) -> Axes:
    """Plot a law's errors in percent against `by` (n,), by default 6ND or, without N and D, the first input."""
    need("law", law, "data_", "a fitted law")
    name = law.inputs[0]
    first = law.data_[name]
    label, x = name, first
    if by is not None:
        label, x = "", floats(by)
    elif {"N", "D"} <= set(law.inputs):
        label, x = "training FLOPs (6ND)", 6.0 * law.data_["N"] * law.data_["D"]
    ax = draw_axes(ax, label, "measured over predicted (%)")
    ax.axhline(0.0, color=FAINT, linewidth=1.0)
    residual = 100.0 * np.expm1(law.residuals())
    ax.scatter(x, residual, color=shades(first), s=24, edgecolor="white", linewidth=0.4, zorder=3)
    ax.set_title(f"dark: {name} = {count(first.min())}, light: {count(first.max())}", fontsize=9)
    return ax


def plot_cloud(law: Law, x: str = "alpha", y: str = "beta", ax: Axes | None = None) -> Axes:
    """Plot the constants `x` and `y` of every bootstrap refit, with the fit and 95 % intervals."""
    if getattr(law, "draws_", None) is None:
        raise InputError("this law has no bootstrap draws to plot; call bootstrap(n, groups=run_id) first.")
    for name in (x, y):
        one_of("constant", name, law.names)
    ax = draw_axes(ax, x, y, log_x=False)
    colour = APPROACH_STYLE["parametric"][0]
    ax.scatter(law.draws_[x], law.draws_[y], s=7, color=colour, alpha=0.25, linewidth=0, label="refits of resamples")
    bars = []
    for name in (x, y):
        (low, high), value = law.interval(name), law.constants_[name]
        bars.append([[max(value - low, 0)], [max(high - value, 0)]])
    style: dict[str, Any] = {"fmt": "o", "color": "black", "markersize": 5, "linewidth": 1.2, "capsize": 3}
    ax.errorbar(
        [law.constants_[x]], [law.constants_[y]], xerr=bars[0], yerr=bars[1], **style, label="fit, 95 % intervals"
    )
    return draw_legend(ax, 2)


def plot_backtest(analysis: Analysis, ax: Axes | None = None) -> Axes:
    """Plot a backtest's errors of the loss against compute relative to the largest run fitted."""
    need("analysis", analysis, "profiles", ANALYSIS)
    ax = draw_axes(ax, "compute relative to the largest run fitted", "error of the loss (%)")
    ahead = (analysis.backtest["tested"] or {}).get("ahead", [])
    if not ahead:
        return ax
    for step, colour in zip(ahead, shades(np.array([step["flops"] for step in ahead])), strict=True):
        label = f"{scientific(step['flops'])} FLOPs"
        ax.scatter(step["factor"], 100 * np.array(step["error"]), color=colour, s=22, label=label, zorder=3)
    ax.axhline(0.0, color=FAINT, linewidth=1.0, linestyle=":")
    ax.axvline(analysis.targets[0] / analysis.table.flops.max(), color=FAINT, linestyle="--", label="target")
    return draw_legend(ax, 5)


def save_figures(
    analysis: Analysis, directory: str | Path, curves: Any = None, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Save every figure that `analysis` and `curves` support in `formats` (png, pdf, svg); return the paths."""
    need("analysis", analysis, "profiles", ANALYSIS)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for kind in formats:
        one_of("format", kind, FORMATS)
    written = []
    for name, draw in _drawings(analysis, curves).items():
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.13, bottom=0.13, right=0.97, top=0.88)
        draw(ax=figure.subplots())
        for kind in formats:
            path = Path(directory) / f"{name}.{kind}"
            with replacing(path) as temporary, rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
                figure.savefig(temporary, dpi=DPI, format=kind)
            written.append(path)
    return written


def _drawings(analysis: Analysis, curves: Any) -> dict[str, Callable[..., Any]]:
    law, t = analysis.law, analysis.table
    drawings: dict[str, Callable[..., Any]] = {}
    if analysis.profiles.profiles_:
        drawings["isoflop"] = partial(plot_profiles, analysis.profiles)
    if law is not None:
        if is_uneven(law.predict(t.N, t.D)):
            drawings["contours"] = partial(plot_contours, law, t.N, t.D, t.loss)
        drawings["residuals"] = partial(plot_residuals, law)
        drawn = analysis.approaches["parametric"].available and law.draws_ is not None
        if drawn and len(law.exponent_names) > 1:
            drawings["bootstrap"] = partial(plot_cloud, law, *law.exponent_names[:2])
    if (analysis.backtest["tested"] or {}).get("ahead"):
        drawings["backtest"] = partial(plot_backtest, analysis)
    for quantity in OPTIMUM_TITLES:
        if allocation_lines(analysis, quantity)[1]:
            drawings[f"optimal_{quantity}"] = partial(plot_allocation, analysis, quantity)
    for by in CURVE_TITLES:
        if loss_curves(analysis, curves, by):
            drawings[f"loss_by_{by}"] = partial(plot_curves, analysis, curves, by)
    return drawings
