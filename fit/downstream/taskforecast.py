"""Forecasts of benchmark tasks by several laws, weighted by how well each predicted larger runs.

The laws are in compute; in N and D; in the loss, which a law of N and D predicts (two steps); and, where items are
stored, their `ItemLaw` in that loss. As in `Forecaster`, every law is fitted to the runs below each cut-off of compute
and predicts the others. The tasks' typical error counts as one more cut-off of each task.

The first three are curves floor + (top - floor) exp(-exp(-u)), u linear in features. With u = w log C + b, the negative
logarithm of the share of the height is a power of compute (arXiv:2512.08894). Floor and top are parameters with a
prior. Bits per byte b follow the same curve as 2^-b: above the floor, b = E + A C^-w.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, check_level, floats, positive, same_length
from ..flops import flops_per_token
from ..forecasting.forecaster import GAP, Member, cut_offs, half_width
from ..laws.registry import loss_law
from ..solver.forms import LogSumTerms
from ..solver.solver import solve
from ..table import Runs, RunTable, as_table
from ..uncertainty import excess_scatter
from .itemlaw import ItemLaw

if TYPE_CHECKING:
    import pandas as pd

MIN_RUNS, MAX_CUTS = 8, 6  # fewest runs of a fit, chosen by hand; cut-offs, from the largest compute down
# Chosen on Gadre et al.'s C4 and RPJ, as in constants/forecast.yaml. WALK: errors grow with this power of the log of
# extrapolation.
POWER, DRIFT, DISAGREEMENT, WALK = 1.0, 1.0, 1.0, 0.5
FLOOR, TOP, OFFSET, SLOPE = 0.03, 0.1, 4.0, 3.0  # standard deviations of the curves' priors
SCATTERS, FAR = 4, 30.0  # solutions of curves and scatters in turn; bound of u and of the parameters
FARTHEST = 2.0  # largest log of extrapolation, in units of the largest that a hold-out tested
VAGUE = 0.6  # widest useful interval, as a share of (1 - chance), or of the bits per byte; chosen by hand
METRICS = {"acc": (1.0, "a share from 0 to 1"), "gold_bpb": (np.inf, "zero or more bits per byte")}  # limit; in words
Fits = tuple[Array, Array, Array]  # predictions (T, fits, n + points), variances (T, points), scatter of runs (T,)


@dataclass(frozen=True)
class _Scores:
    """One metric of T tasks in n runs: value (T, n), NaN if missing, variance of its items, floor (T,).

    Bits per byte b are held as 2^-b.
    """

    metric: str
    tasks: list[str]
    value: Array
    variance: Array
    floor: Array


def forecast_tasks(
    scores: Runs, N: ArrayLike, D: ArrayLike, level: float = 0.95, items: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """Forecast every task of a table at N parameters and D tokens (points,).

    Returns a DataFrame with a row per task, metric ("acc", "gold_bpb") and point: task, metric, N, D, flops; value, low
    and high (the interval of a new run's score); law (the one of largest weight); error (root mean square error of the
    weighted laws on held-out larger runs); and reason. Where hold-outs allow no forecast, value, low and high are NaN,
    and `reason` is why.

    Parameters
    ----------
    scores
        Columns as in `read_table`, and of each task `TASK/acc` or `TASK/gold_bpb`, perhaps with `_se`, and
        `TASK/chance`.
    items
        Task -> responses, a DataFrame (run_id, items) of margins or of right and wrong answers; see `ItemLaw`.
    """
    import pandas as pd

    check_level(level)
    table = as_table(scores)
    sizes, tokens = positive("N", np.atleast_1d(floats(N))), positive("D", np.atleast_1d(floats(D)))
    same_length(**{name: v for name, v in (("N", sizes), ("D", tokens)) if len(v) > 1})
    sizes, tokens = (np.asarray(v) for v in np.broadcast_arrays(sizes, tokens))
    parts = [part for metric in METRICS if (part := _read(metric, table)) is not None]
    if not parts:
        raise InputError(f"{table.source} has no score of a task; columns TASK/acc or TASK/gold_bpb are needed.")
    grid = _Grid.of(table, sizes, tokens)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing are NaN, and have a reason
        rows = pd.concat([_forecast(part, grid, level, items or {}) for part in parts])
    return rows.sort_values(["task", "metric"], kind="stable", ignore_index=True)


@dataclass(frozen=True)
class _Grid:
    """The n runs, then the points of the forecast: compute, and features of each law (fits, n + points, k).

    fitted (fits, n): masks of all runs, then of those below each cut-off. apart (cut-offs, n): log of extrapolation of
    a tested run, else NaN. loss (fits, n + points): by the law of loss, if there is one.
    """

    table: RunTable
    N: Array
    D: Array
    compute: Array
    fitted: np.ndarray
    apart: Array
    features: dict[str, Array]
    loss: Array | None

    @classmethod
    def of(cls, table: RunTable, N: Array, D: Array) -> _Grid:
        spend = flops_per_token(table.N, table.D, table.flops)
        compute = np.append(table.flops, (6.0 * N if spend is None else spend(N)) * D)
        n, points = len(table), {"N": np.append(table.N, N), "D": np.append(table.D, D)}
        cuts = cut_offs({"N": table.N, "D": table.D}, table.flops, table.group, MIN_RUNS)[:MAX_CUTS]
        fitted, apart = np.ones((1 + len(cuts), n), dtype=bool), np.full((len(cuts), n), np.nan)
        for k, cut in enumerate(cuts):
            fitted[k + 1], apart[k, cut.tested] = cut.fitted, cut.further
        one, (log_C, *log_sizes) = np.ones_like(compute), (_scaled(v, n) for v in (compute, *points.values()))
        features, loss = {"compute": np.stack([one, log_C], 1)[None]}, None
        if len(np.unique(table.N)) > 1 and len(np.unique(table.D)) > 1:
            features["size"] = np.stack([one, *log_sizes], 1)[None]
        with suppress(InputError):  # N and D that vary together have no law of both
            member = Member.of(loss_law("chinchilla").fit(table.N, table.D, table.loss, weight=table.weight), cuts)
            logs = [member.log_values(constants, points) for constants in (member.constants, member.rolled)]
            loss = np.exp(np.concatenate(logs, axis=1)).T
        if loss is not None and np.isfinite(loss).all():
            features["loss"] = _of_loss(loss, table.loss)
        return cls(table, N, D, compute, fitted, apart, features, loss if "loss" in features else None)


def _scaled(values: Array, n: int) -> Array:
    """Return the logarithms of values, scaled so that the first n have mean 0 and variance 1."""
    logs = np.log(values)
    return (logs - logs[:n].mean()) / (logs[:n].std() or 1.0)


def _of_loss(loss: Array, measured: Array) -> Array:
    return np.stack([np.ones_like(loss), (measured.mean() - loss) / (measured.std() or 1.0)], axis=-1)


def _read(metric: str, table: RunTable) -> _Scores | None:
    """Return a metric's scores, or None if no task has any. Raises InputError for accuracies beyond 0 and 1."""
    columns, names = [], sorted(map(str, table.frame.columns))
    for task in (name.removesuffix(f"/{metric}") for name in names if name.endswith(f"/{metric}")):
        value, error, chance = (table.column(f"{task}/{name}") for name in (metric, f"{metric}_se", "chance"))
        if (wrong := value[(value < 0) | (value > METRICS[metric][0])]).size:
            raise InputError(f"{task}/{metric} is {wrong[0]:g}; it must be {METRICS[metric][1]}.")
        if metric == "gold_bpb":
            value, chance = np.exp2(-value), np.zeros(0)
            error = np.log(2.0) * value * error
        usual = np.median(error[error > 0]) if (error > 0).any() else 0.0
        error = np.maximum(np.where(np.isfinite(error), error, usual), max(0.5 * usual, 1e-4))
        chance = chance[np.isfinite(chance)]
        if np.isfinite(value).any():
            columns.append((task, value, error**2, np.median(chance) if len(chance) else 0.0))
    if not columns:
        return None
    tasks, *values = zip(*columns, strict=True)
    return _Scores(metric, list(tasks), *map(np.array, values))


def _fit_curves(part: _Scores, grid: _Grid, law: str) -> Fits:
    """Fit one law's curves to all runs and to those below each cut-off, for all tasks at once."""
    (T, n), K, features, losses = part.value.shape, len(grid.fitted), grid.features[law], grid.table.loss
    used = np.repeat(np.isfinite(part.value), K, axis=0) & np.tile(grid.fitted, (T, 1))
    y, variance, floor = (np.repeat(values, K, axis=0) for values in (part.value, part.variance, part.floor))
    form = _curves(features[:, :n] if law != "loss" else _of_loss(losses, losses)[None])
    more = [[0.0]] * (form.parameters - 3)
    prior = np.stack([floor, *np.tile([[1.0], [-1.0], *more], T * K)], axis=1)
    precision, bound = np.array([FLOOR, TOP, OFFSET, *(SLOPE for _ in more)]) ** -2.0, np.full(form.parameters, FAR)
    theta, scatter = prior.copy(), np.full(T * K, 0.01)
    theta[:, 3:] = 0.3
    target, variance = np.concatenate([np.where(used, y, 0.0), prior], axis=1), np.where(used, variance, 1.0)
    for _ in range(SCATTERS):
        weight = np.concatenate([used / (variance + scatter[:, None] ** 2), np.tile(precision, (T * K, 1))], axis=1)
        theta = solve(form, target, weight, theta[:, None], -bound, bound, np.inf).theta
        value, (slopes, *_) = form.value(theta)
        covariance = np.linalg.inv((slopes * weight[..., None]).transpose(0, 2, 1) @ slopes)
        free = used.sum(axis=1) - np.sum(1.0 - np.einsum("pii->pi", covariance) * precision, axis=1)
        square = used * (value - target)[:, :n] ** 2
        scatter = np.maximum(excess_scatter(square, variance, np.maximum(free, 1.0)), 1e-4)
    value, (slopes, *_) = _curves(features if len(features) == 1 else np.tile(features, (T, 1, 1))).value(theta)
    error = np.einsum("pni,pij,pnj->pn", slopes, covariance, slopes)
    value, error = (array[:, : features.shape[1]].reshape(T, K, -1) for array in (value, error))
    return value, error[:, 0, n:], scatter.reshape(T, K)[:, 0]


def _curves(features: Array) -> LogSumTerms:
    """Return the form of curves at features (1 or curves, n, k), followed by the parameters, which have priors."""
    _, n, k = features.shape
    columns = np.pad(features, ((0, 0), (0, k + 2), (0, 0)))
    curve, itself = np.repeat([1.0, 0.0], (n, k + 2)), np.eye(n + k + 2)[:, n:]

    def terms(v: Mapping[str, Any]) -> list[Any]:
        floor, top, *weights = v.values()
        u = sum(weight * columns[..., i] for i, weight in enumerate(weights))
        share = np.exp(-np.exp(np.minimum(-u, FAR)))
        return [curve * (floor + (top - floor) * share) + sum(itself[:, i] * one for i, one in enumerate(v.values()))]

    return LogSumTerms(terms, {str(i): i for i in range(k + 2)}, n + k + 2)


def _fit_items(part: _Scores, grid: _Grid, items: Mapping[str, Any]) -> Fits:
    """Fit the item law of each task with `items`; NaN for a task that has none, or whose items determine no law."""
    (T, n), run_id = part.value.shape, grid.table.run_id
    along, at, seen = "flops", grid.compute[None], grid.table.flops
    if grid.loss is not None:
        along, at, seen = "loss", grid.loss, grid.table.loss
    value, variance = np.full((T, len(grid.fitted), len(grid.compute)), np.nan), np.zeros((T, len(grid.N)))
    for t, task in enumerate(part.tasks):
        if task not in items or not {*run_id} <= {*map(str, items[task].index)}:
            continue
        responses = items[task].set_axis(items[task].index.astype(str)).loc[run_id].to_numpy()
        with suppress(InputError):
            laws = [ItemLaw(along).fit(responses[mask], seen[mask], part.floor[t]) for mask in grid.fitted]
            value[t] = [law.predict(at[k % len(at)]) for k, law in enumerate(laws)]
            ends = laws[0].forecast(at[0, n:])
            variance[t] = ((ends["high"] - ends["low"]) / (2 * 1.96)) ** 2
    return value, variance, np.zeros(T)


def _forecast(part: _Scores, grid: _Grid, level: float, items: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of one metric."""
    import pandas as pd

    n, apart, truth = len(grid.table), grid.apart, part.value[:, None]
    fits = {law: _fit_curves(part, grid, law) for law in grid.features}
    if items and len(apart) and part.metric == "acc":
        fits["items"] = _fit_items(part, grid, items)
    value, variance, scatter = (np.stack(arrays) for arrays in zip(*fits.values(), strict=True))  # laws, tasks, ...
    absent = ~np.isfinite(value).all(axis=(2, 3))
    moves = (value[:, :, 1:, :n] - truth) / apart**WALK
    share = np.where(absent, 0.0, _with_typical(np.where(absent[..., None, None], np.nan, moves)) ** -POWER)
    share = share / share.sum(axis=0)
    value[absent] = 0.0

    def mean(values: Array) -> Array:
        return np.einsum("lt,lt...->t...", share, values)

    mixed, ahead = mean(value), value[:, :, 0, n:]
    middle, held_out = mixed[:, 0, n:], np.where(np.isfinite(apart), mixed[:, 1:, :n], np.nan)
    further = np.maximum(np.log(grid.compute[n:] / grid.table.flops.max()), 0.0)
    drift = np.where(further > 0, np.maximum(further, np.log(GAP)), 0.0) ** (2 * WALK)
    parts = [
        mean(variance),
        DISAGREEMENT * mean((ahead - middle) ** 2),
        DRIFT**2 * np.outer(_with_typical((held_out - truth) / apart**WALK), drift),
        (mean(scatter**2) + np.median(part.variance, axis=1))[:, None],
    ]
    wide = half_width(level, parts)
    low, high = np.clip(middle - wide, 0.0, 1.0), np.clip(middle + wide, 0.0, 1.0)
    if part.metric == "gold_bpb":
        numbers = (middle, high, low, held_out, truth)
        middle, low, high, held_out, truth = (-np.log2(np.maximum(v, 1e-9)) for v in numbers)
    error, leading = np.sqrt(np.nanmean((held_out - truth) ** 2, axis=(1, 2))), np.argmax(share, axis=0)
    height = 1.0 - part.floor[:, None] if part.metric == "acc" else middle
    reach, useful = float(np.nanmax(apart, initial=0.0)), np.broadcast_to(VAGUE * height, middle.shape)
    ends, (tasks, points) = {"value": middle, "low": low, "high": high}, np.indices(middle.shape).reshape(2, -1)
    about = {"N": grid.N[points], "D": grid.D[points], "flops": grid.compute[n:][points]}
    about |= {name: values.ravel() for name, values in ends.items()}
    about |= {"law": np.array([*fits])[leading[tasks]], "error": error[tasks]}
    rows = pd.DataFrame({"task": np.array(part.tasks)[tasks], "metric": part.metric} | about)
    rows["reason"] = [
        _refusal(part.value[t], error[t], further[i], reach, low[t, i], high[t, i], useful[t, i])
        for t, i in zip(tasks, points, strict=True)
    ]
    rows.loc[rows["reason"] != "", [*ends]] = np.nan
    return rows


def _with_typical(moves: Array) -> Array:
    """Return mean squares of moves (..., tasks, cut-offs, runs); the tasks' median counts as one more cut-off."""
    square = np.nanmean(moves**2, axis=-1)
    typical = np.nanmedian(np.nanmean(square, axis=-1), axis=-1, keepdims=True) if square.size else np.ones(1)
    return np.asarray((typical + np.nansum(square, axis=-1)) / (1.0 + np.isfinite(square).sum(axis=-1)))


def _refusal(value: Array, error: float, further: float, reach: float, low: float, high: float, useful: float) -> str:
    """Return why there is no forecast at a point, with hold-outs of up to `reach`; empty if there is one."""
    runs = int(np.isfinite(value).sum())
    if runs < MIN_RUNS:
        return f"only {runs} runs have a score; at least {MIN_RUNS} are needed."
    if np.nanmax(value) == np.nanmin(value):
        return "every run has the same score, which shows no trend."
    if not np.isfinite(error):
        return "no larger run can be held out: below half of the largest compute are too few different runs."
    if further > FARTHEST * reach:
        return (
            f"its compute is {np.exp(further):.3g} times that of the largest run; hold-outs of up to "
            f"{np.exp(reach):.3g} times allow at most {np.exp(FARTHEST * reach):.3g} times."
        )
    if high - low > useful:
        return f"the interval of a run, {low:.2f} to {high:.2f}, is too wide to be useful."
    return ""
