"""Rules for learning rate, batch and weight decay from the runs of `isoflop tune`, and the cost of other settings.

Log loss is a constant per cell, one (N, D), plus a cost of each setting, where u = log(setting / best setting):

    c (exp(a u) - 1 - a u) / a^2,   a parabola near the best, steeper above it where a > 0

The best settings are power laws of N and D, and for the learning rate also of the batch, with priors at published
exponents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy  # its parts are imported at first use

from ..errors import Array, Columns, InputError
from ..uncertainty import percentile_interval
from .settings_surface import cells_of, near_best

WINDOW = 0.08  # largest relative excess loss of the runs used; chosen by hand, like the values below
MISFIT = 0.3  # error of the cost's form, as a share of the cost; it is added to the noise
SHARED = 1.5  # inflation of the covariance, because similar runs share the form's error
NOISY = 0.02  # noise above which choosing runs by their loss flattens the costs
UNSURE = 0.7  # an exponent whose error exceeds this share of the prior's width is mostly the prior
STEPS = 6  # rounds of reweighting


class Prior(NamedTuple):
    mean: float
    width: float
    source: str = ""


# Coordinates: log best settings at the mean of the runs, their exponents, then c and a of the costs.
PRIORS = {
    "rate": Prior(0.0, 10.0),
    "rate_N": Prior(0.0, 0.15, "muP, arXiv:2203.03466"),
    "rate_D": Prior(-0.15, 0.2, "Step Law, arXiv:2503.04715, at its own batch, and Bjorck et al., arXiv:2409.19913"),
    "rate_batch": Prior(0.5, 0.25, "the square root of Malladi et al., arXiv:2205.10287"),
    "batch": Prior(0.0, 10.0),
    "batch_N": Prior(0.0, 0.15, "Power Lines, arXiv:2505.13738"),
    "batch_D": Prior(0.48, 0.15, "Power Lines and Step Law"),
    "timescale": Prior(np.log(0.3), 1.0, "Wang and Aitchison, arXiv:2405.13698"),
    "timescale_N": Prior(0.26, 0.3, "between a constant and Power Lines"),
    "timescale_D": Prior(-0.26, 0.3, "between a constant and Power Lines"),
    **dict.fromkeys(("cost_rate", "cost_batch", "cost_timescale"), Prior(np.log(0.03), 1.0)),
    **dict.fromkeys(("bend_rate", "bend_batch"), Prior(0.5, 0.5)),
    "bend_timescale": Prior(-0.5, 0.5),  # a parabola in the decay itself is flat above the best time scale
}
MEAN, WIDTH = (np.array([getattr(prior, name) for prior in PRIORS.values()]) for name in ("mean", "width"))


def tuning_rules(runs: Columns, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Fit learning rate, batch and timescale as power laws; return a tuning file's content, with 95 % intervals.

    `runs`: N, D, learning_rate, batch (tokens), timescale (of weight decay, as a share of D) and loss, each (n,).
    """
    near = near_best(runs["N"], runs["D"], runs["loss"], np.ones(len(runs["loss"])), WINDOW)
    used = {name: values[near] for name, values in runs.items()}
    fitted = _Costs(used)
    at, covariance = fitted.fit()
    theta = np.random.default_rng(seed).multivariate_normal(at, covariance, draws, method="cholesky")
    error = dict(zip(PRIORS, np.sqrt(np.diag(covariance)), strict=False))
    best = np.exp(fitted.best(at))
    tried = np.array([[runs[name].min(), runs[name].max()] for name in SETTINGS])
    outside = (best < tried[:, :1]) | (best > tried[:, 1:])
    rules, drawn = (fitted.rules(values) for values in (at[:, None], theta.T))
    unknown = {
        name: f"{p.mean:.3g} ± {p.width:.3g} ({p.source}), a published value that these runs hardly change"
        for name, p in PRIORS.items()
        if p.source and error[name] > UNSURE * p.width
    }
    cells = fitted.cell.max() + 1
    warnings = []
    if edge := sum(bool(outside[:, fitted.cell == cell].any()) for cell in range(cells)):
        message = (
            f"In {edge} of {cells} cells the best learning rate, batch or decay lies outside the range tried; widen "
            "the sweep there."
        )
        warnings.append({"code": "optimum_at_edge", "message": message})
    if fitted.noise > NOISY:
        message = (
            f"Runs scatter by {fitted.noise:.1%} about the fitted costs, which makes the costs too low; add seeds or "
            "train longer."
        )
        warnings.append({"code": "noisy_runs", "message": message})
    return {
        "tuning": {rule: {name: float(value[0]) for name, value in law.items()} for rule, law in rules.items()},
        "intervals": {
            rule: {name: list(percentile_interval(values, 0.95)) for name, values in law.items()}
            for rule, law in drawn.items()
        },
        "prior": unknown,
        "range": {name: [float(runs[name].min()), float(runs[name].max())] for name in ("N", "D")},
        "runs": len(runs["loss"]),
        "used": len(used["loss"]),
        "noise": fitted.noise,
        "warnings": warnings,
    }


SETTINGS = ("learning_rate", "batch", "timescale")


class _Costs:
    """The model of runs near the best of their cells. Coordinates q: as in PRIORS, then each cell's lowest log loss."""

    def __init__(self, runs: Columns) -> None:
        self.cell, self.loss = cells_of(runs["N"], runs["D"]), np.log(runs["loss"])
        if len(self.loss) <= len(PRIORS) + self.cell.max() + 1:
            raise InputError(
                f"{len(self.loss)} runs lie within {WINDOW:.0%} of the best of their (N, D); the rules need more than "
                f"{len(PRIORS)}, plus one for each (N, D)."
            )
        logs = {name: np.log(runs[name]) for name in ("N", "D", *SETTINGS)}
        self.middle = {name: float(values.mean()) for name, values in logs.items()}
        self.n, self.d, *settings = (logs[name] - self.middle[name] for name in logs)
        self.x = np.stack(settings)
        self.noise = 0.01

    def best(self, q: Array) -> Array:
        """Return the logs of the best SETTINGS at each run's N and D, (3, n); the learning rate fits the best batch."""
        rate, rate_N, rate_D, slope, batch, batch_N, batch_D, tau, tau_N, tau_D = q[:10]
        b = batch + batch_N * self.n + batch_D * self.d
        logs = [rate + rate_N * self.n + rate_D * self.d + slope * b, b, tau - self.middle["timescale"]]
        logs[2] = logs[2] + tau_N * self.n + tau_D * self.d
        return np.stack(logs) + np.array([[self.middle[name]] for name in SETTINGS])

    def costs(self, q: Array) -> Array:
        """Return each run's log loss, (n,), above that of the best settings at its N and D."""
        off = self.x + np.array([[self.middle[name]] for name in SETTINGS]) - self.best(q)
        off[0] -= q[3] * off[1]  # from the best rate with the run's own batch
        c, a = np.exp(q[10:13, None]), np.where(abs(q[13:16]) < 1e-3, 1e-3, q[13:16])[:, None]
        return np.asarray((c * (np.expm1(np.minimum(a * off, 30.0)) - a * off) / a**2).sum(axis=0))

    def fit(self) -> tuple[Array, Array]:
        """Fit the coordinates and the noise by turns; return the coordinates (k,) and their covariance (k, k)."""
        k = len(PRIORS)
        lowest = [self.loss[self.cell == cell].min() for cell in range(self.cell.max() + 1)]
        q = np.concatenate([MEAN, lowest])
        for _ in range(STEPS):
            scale = np.hypot(self.noise, MISFIT * self.costs(q))

            def errors(q: Array, scale: Array = scale) -> Array:
                left = self.loss - q[k:][self.cell] - self.costs(q)
                return np.concatenate([left / scale, (q[:k] - MEAN) / WIDTH])

            solution = scipy.optimize.least_squares(errors, q, x_scale="jac")
            q, freedom = solution.x, len(self.loss) - len(lowest) - 10
            self.noise *= float(np.sqrt((errors(q)[: len(self.loss)] ** 2).sum() / freedom))
        return q, SHARED * np.linalg.inv(solution.jac.T @ solution.jac)

    def rules(self, q: Array) -> dict[str, dict[str, Array]]:
        """Convert draws `q` (coordinates, draws) to power laws: setting -> factor k and exponents, (draws,) each."""
        rate, rate_N, rate_D, slope, batch, batch_N, batch_D, tau, tau_N, tau_D = q[:10]
        N, D, lr, B, _ = self.middle.values()
        return {
            "batch_tokens": {"k": np.exp(batch + B - batch_N * N - batch_D * D), "N": batch_N, "D": batch_D},
            "learning_rate": {
                "k": np.exp(rate + lr - rate_N * N - rate_D * D - slope * B),
                "N": rate_N,
                "D": rate_D,
                "batch": slope,
            },
            "timescale": {"k": np.exp(tau - tau_N * N - tau_D * D), "N": tau_N, "D": tau_D},
        }


def excess_with_error(centre: Array, sides: Array, draws: int = 2000, seed: int = 0) -> tuple[Array, Array]:
    """Return the relative excess loss (n,) of n settings over the optimum nearby, and its standard error (n,).

    centre (n, 2): losses with two seeds. sides (n, axes, 2): losses one step down and up each axis, NaN for none. Along
    each axis the optimum is the minimum of a parabola through the losses or, if this is not between the sides, the
    lowest.
    """
    centre, sides = np.log(centre), np.log(sides)
    noise = np.sqrt(np.mean((centre[:, 0] - centre[:, 1]) ** 2) / 2)
    generator = np.random.default_rng(seed)
    scale = noise * np.sqrt(len(centre) / generator.chisquare(len(centre), (draws, 1)))  # as for Student's t
    middle = centre.mean(axis=1)
    drawn = _above_parabolas(
        middle + scale / np.sqrt(2) * generator.standard_normal((draws, *middle.shape)),
        sides + scale[..., None, None] * generator.standard_normal((draws, *sides.shape)),
    )
    return _above_parabolas(middle, sides), drawn.std(axis=0)


def _above_parabolas(middle: Array, sides: Array) -> Array:
    low, high = np.moveaxis(sides - middle[..., None, None], -1, 0)
    slope, bend = (high - low) / 2, high + low
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.abs(slope) <= bend
        lowest = np.where(inside, -(slope**2) / (2 * bend), np.fmin(0.0, np.fmin(low, high)))
    return np.asarray(np.expm1(-lowest.sum(axis=-1)))
