"""What figures show, as numbers: plotly (report/figures.py) and matplotlib (plots.py) draw the same series and colours.

This module imports neither laws nor analyses, so that `law.plot()` may import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..allocation.allocation import Optimum, compute_optimal
from ..errors import Array

Law = Any  # of N and D, fitted
Analysis = Any
Series = tuple[Array, Array]  # x and y, each (m,)

# Colours carry meaning: viridis is size or budget (ordered, readable by every eye), three Okabe-Ito colours are the
# approaches, each with its own dash (solid, dash or dot) and symbol, too.
APPROACH_STYLE = {
    "envelope": ("#009E73", "dot", "diamond"),
    "isoflop": ("#D55E00", "dash", "square"),
    "parametric": ("#0072B2", "solid", "circle"),
}
# Viridis, sampled, without its palest end, which is lost on white.
VIRIDIS = ((68, 1, 84), (70, 50, 127), (54, 92, 141), (39, 127, 142), (31, 161, 135), (74, 194, 109), (159, 218, 58))
FAINT, GRID = "#6a737d", "#e7eaee"
LOSS = "loss (nats per token)"
OPTIMUM_TITLES = {
    "N": "optimal parameters N*",
    "D": "optimal tokens D*",
    "loss": "loss of the best run (nats per token)",
}
CURVE_TITLES = {"tokens": "tokens seen", "flops": "training FLOPs"}


def shade(share: float) -> str:
    """A colour of the ordered scale at 0 to 1."""
    at = float(np.clip(share, 0, 1)) * (len(VIRIDIS) - 1)
    low = min(int(at), len(VIRIDIS) - 2)
    mixed = (round(a + (at - low) * (b - a)) for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def shades(values: Array) -> list[str]:
    """Colours by the logarithm of the values."""
    log = np.log(values)
    span = np.ptp(log)
    return [shade(0.3 if span == 0 else (v - log.min()) / span) for v in log]


def profile_curve(profile: Any) -> Series:
    """N and loss along the curve of an isoFLOP profile, a little beyond its sizes."""
    N = np.geomspace(profile.N.min() / 1.15, profile.N.max() * 1.15, 80)
    return N, profile.curve(N)


@dataclass(frozen=True)
class Contours:
    """Loss (d, n) over N (n,) and D (d,), round levels, and the compute-efficient frontier under C = 6ND."""

    N: Array
    D: Array
    loss: Array
    low: float
    high: float
    step: float
    frontier: Optimum
    inside: np.ndarray  # which points of the frontier lie within N and D


def loss_contours(law: Law, N: Array, D: Array) -> Contours:
    """Of a law around runs of sizes N and tokens D (runs,)."""
    n, d = (np.geomspace(values.min() / 2, values.max() * 2, 60) for values in (N, D))
    loss = np.asarray(law.predict(n[None, :], d[:, None]))
    low, high = float(loss.min()), float(np.quantile(loss, 0.97))
    rough = max(high - low, 1e-6) / 20  # at most 20 steps of 1, 2 or 5 times a power of ten
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(power * min((m for m in (1, 2, 5, 10) if m * power >= rough), default=10))
    best = compute_optimal(law, np.geomspace(6 * n[0] * d[0], 6 * n[-1] * d[-1], 80))
    inside = (n[0] <= best.N) & (n[-1] >= best.N) & (d[0] <= best.D) & (d[-1] >= best.D)
    ends = (float(np.ceil(low / step) * step), float(np.floor(high / step) * step))
    return Contours(n, d, loss, *ends, step, best, inside)


def allocation_lines(a: Analysis, quantity: str, C: Array) -> list[tuple[Any, Array, Array | None]]:
    """Of every approach that says: the approach, its N, D or loss at budgets C (m,), and the band (m, 2), if known."""
    lines = []
    for approach in a.approaches.values():
        values, band = approach.values(C)[quantity], approach.bands(C)[quantity]
        if approach.available and np.isfinite(values).any():
            lines.append((approach, values, band if band is not None and np.isfinite(band).all() else None))
    return lines


def measured_optima(a: Analysis, quantity: str) -> tuple[Series, Series]:
    """N, D or loss that the runs show by budget: accepted isoFLOP vertices, and the envelope's winners."""
    good = a.profiles.accepted_
    name = {"N": "N_best", "D": "D_best", "loss": "loss_best"}[quantity]
    vertices = np.array([p.flops for p in good]), np.array([getattr(p, name) for p in good])
    return vertices, (a.envelope.flops_, getattr(a.envelope, f"{quantity}_"))


def loss_curves(a: Analysis, curves: Any, by: str) -> list[tuple[str, float, Array, Array]]:
    """Run, N, x and loss of each curve (DataFrame: run_id, tokens, flops, loss) of the table's runs, where x is `by`:
    tokens or flops.
    """
    sizes = dict(zip(a.table.run_id.tolist(), a.table.N.tolist(), strict=True))
    if not {"run_id", "loss", by} <= set(curves):
        return []
    known = curves[curves["run_id"].astype(str).isin(sizes) & (curves[by] > 0)].dropna(subset=["loss"])
    found = []
    for run, rows in known.groupby(known["run_id"].astype(str), sort=False):
        rows = rows.sort_values(by)
        x, loss = (rows[name].to_numpy(dtype=np.float64) for name in (by, "loss"))
        found.append((str(run), sizes[str(run)], x, loss))
    return found
