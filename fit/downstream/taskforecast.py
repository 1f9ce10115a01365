"""Forecasts of benchmark tasks by several laws, weighted by how well each predicted larger runs.

The laws, with chance and ceiling as parameters (`taskcurves.py`): in compute; in N and D; in the loss, which a law of N
and D predicts (two steps); and, where items are stored, their `ItemLaw` in that loss. As in `Forecaster`, every law is
fitted to the runs below each cut-off of compute and predicts the others. The tasks' typical error counts as one more
cut-off of each task. All tasks are fitted at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, check_level, floats, positive, same_length
from ..flops import flops_per_token
from ..forecasting.forecaster import GAP, CutOff, Member, cut_offs, half_width
from ..laws.registry import loss_law
from ..table import Runs, RunTable, as_table, numeric
from .itemlaw import ItemLaw
from .taskcurves import Curves

if TYPE_CHECKING:
    import pandas as pd

MIN_RUNS, MAX_CUTS = 8, 6  # fewest runs of a fit, chosen by hand; cut-offs, from the largest compute down
# Chosen on Gadre et al.'s C4 and RPJ, as in constants/forecast.yaml. WALK: errors grow with this power of the log of
# extrapolation.
POWER, DRIFT, DISAGREEMENT, WALK = 1.0, 1.0, 1.0, 0.5
FARTHEST = 2.0  # largest log of extrapolation, in units of the largest that a hold-out tested
VAGUE = 0.6  # widest useful interval, as a share of (1 - chance), or of the bits per byte; chosen by hand
METRICS = {"acc": "a share from 0 to 1", "gold_bpb": "zero or more bits per byte"}  # and what is accepted
Fits = tuple[Array, Array, Array]  # predictions and variances (T, fits, n + points), scatter of runs (T,)


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
        rows = [row for part in parts for row in _forecast(part, grid, level, items or {})]
    return pd.DataFrame(rows).sort_values(["task", "metric"], kind="stable", ignore_index=True)


@dataclass(frozen=True)
class _Grid:
    """Runs, then the points of the forecast: log of compute, and features of each law (fits, runs + points, k).

    cuts: hold-outs; the first fit is of all runs. further (points,): log of extrapolation.
    """

    run_id: np.ndarray
    N: Array
    D: Array
    cuts: list[CutOff]
    masks: np.ndarray
    features: dict[str, Array]
    loss: Array | None
    measured: Array
    compute: Array
    further: Array

    @classmethod
    def of(cls, table: RunTable, N: Array, D: Array) -> _Grid:
        spend = flops_per_token(table.N, table.D, table.flops)
        compute = np.append(table.flops, (6.0 * N if spend is None else spend(N)) * D)
        n, sizes, tokens = len(table), np.append(table.N, N), np.append(table.D, D)
        cuts = cut_offs({"N": table.N, "D": table.D}, table.flops, table.group, MIN_RUNS)[:MAX_CUTS]
        masks = np.array([np.ones(n, dtype=bool), *(cut.fitted for cut in cuts)])

        def scaled(values: Array) -> Array:
            return (values - values[:n].mean()) / (values[:n].std() or 1.0)

        log = {name: scaled(np.log(values)) for name, values in (("C", compute), ("N", sizes), ("D", tokens))}
        one = np.ones(len(compute))
        features = {"compute": np.stack([one, log["C"]], 1)[None], "size": np.stack([one, log["N"], log["D"]], 1)[None]}
        loss = None
        try:
            law = loss_law("chinchilla").fit(table.N, table.D, table.loss, weight=table.weight)
            member, points = Member.of(law, cuts), {"N": sizes, "D": tokens}
            logs = [member.log_values(constants, points) for constants in (member.constants, member.rolled)]
            loss = np.exp(np.concatenate(logs, axis=1)).T
        except InputError:
            pass  # N and D that vary together have no law of both
        if loss is not None and np.isfinite(loss).all():
            features["loss"] = _of_loss(loss, table.loss)
        else:
            loss = None
        if len(np.unique(table.N)) < 2 or len(np.unique(table.D)) < 2:
            del features["size"]
        further = np.maximum(np.log(compute[n:] / table.flops.max()), 0.0)
        return cls(table.run_id, N, D, cuts, masks, features, loss, table.loss, compute, further)


def _of_loss(loss: Array, measured: Array) -> Array:
    return np.stack([np.ones_like(loss), (measured.mean() - loss) / (measured.std() or 1.0)], axis=-1)


def _read(metric: str, table: RunTable) -> _Scores | None:
    """Return a metric's scores, or None if no task has any. Raises InputError for accuracies beyond 0 and 1."""
    frame, rows, columns = table.frame, table.rows, []
    names = sorted(str(name)[: -len(metric) - 1] for name in frame.columns if str(name).endswith(f"/{metric}"))
    for task in names:
        value, error = numeric(frame, f"{task}/{metric}")[rows], numeric(frame, f"{task}/{metric}_se")[rows]
        chance = numeric(frame, f"{task}/chance")[rows] if metric == "acc" else np.zeros(len(rows))
        if (wrong := value[(value < 0) | (value > (1 if metric == "acc" else np.inf))]).size:
            raise InputError(f"{task}/{metric} is {wrong[0]:g}; it must be {METRICS[metric]}.")
        if not np.isfinite(value).any():
            continue
        if metric == "gold_bpb":
            value = np.exp2(-value)
            error = np.log(2.0) * value * error
        usual = np.median(error[error > 0]) if (error > 0).any() else 0.0
        error = np.maximum(np.where(np.isfinite(error), error, usual), max(0.5 * usual, 1e-4))
        floor = float(np.median(chance[np.isfinite(chance)])) if np.isfinite(chance).any() else 0.0
        columns.append((task, value, error**2, floor))
    if not columns:
        return None
    tasks, *values = zip(*columns, strict=True)
    return _Scores(metric, list(tasks), *map(np.array, values))


def _fit_curves(part: _Scores, grid: _Grid, law: str) -> Fits:
    """Fit one law's curves to all runs and to those below each cut-off, for all tasks."""
    T, K, n = len(part.tasks), len(grid.masks), len(grid.measured)
    features = grid.features[law]
    fitted = features[:, :n] if law != "loss" else _of_loss(grid.measured, grid.measured)[None]
    has_score = np.isfinite(part.value)
    y, errors = (np.repeat(values, K, axis=0) for values in (part.value, part.variance))
    used = np.repeat(has_score, K, axis=0) & np.tile(grid.masks, (T, 1))
    curves = Curves.fit(fitted, y, errors, used, np.repeat(part.floor, K))
    at = features if len(features) == 1 else np.tile(features, (T, 1, 1))
    value, variance = (array.reshape(T, K, -1) for array in curves.predict(at))
    return value, variance, curves.scatter.reshape(T, K)[:, 0]


def _fit_items(part: _Scores, grid: _Grid, items: Mapping[str, Any]) -> Fits:
    """Fit the item law of each task with `items`; NaN for a task that has none, or whose items determine no law."""
    T, K, n = len(part.tasks), len(grid.masks), len(grid.measured)
    value, variance = np.full((T, K, len(grid.compute)), np.nan), np.zeros((T, K, len(grid.compute)))
    for t, task in enumerate(part.tasks):
        if task not in items or not {*grid.run_id} <= {*map(str, items[task].index)}:
            continue
        responses = items[task].set_axis(items[task].index.astype(str)).loc[grid.run_id].to_numpy()
        at = np.tile(grid.compute, (K, 1)) if grid.loss is None else grid.loss
        along, seen = ("flops", grid.compute[:n]) if grid.loss is None else ("loss", grid.measured)
        try:
            for k, mask in enumerate(grid.masks):
                law = ItemLaw(along).fit(responses[mask], seen[mask], part.floor[t])
                value[t, k] = law.predict(at[k])
                if k == 0:
                    ends = law.forecast(at[0, n:])
                    variance[t, 0, n:] = ((ends["high"] - ends["low"]) / (2 * 1.96)) ** 2
        except InputError:
            value[t] = np.nan
    return value, variance, np.zeros(T)


def _forecast(part: _Scores, grid: _Grid, level: float, items: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the rows of one metric."""
    n, tested = len(grid.measured), [cut.tested for cut in grid.cuts]
    fits = {law: _fit_curves(part, grid, law) for law in grid.features}
    if items and grid.cuts and part.metric == "acc":
        fits["items"] = _fit_items(part, grid, items)
    value, variance, scatter = (np.stack(arrays) for arrays in zip(*fits.values(), strict=True))  # laws, tasks, ...
    absent = ~np.isfinite(value).all(axis=(2, 3))
    value = np.where(absent[:, :, None, None], 0.0, value)
    rolled = [value[:, :, k + 1, :n][..., rows] for k, rows in enumerate(tested)]
    moves = [
        (values - part.value[:, rows]) / cut.further**WALK
        for values, rows, cut in zip(rolled, tested, grid.cuts, strict=True)
    ]
    share = np.where(
        absent, 0.0, _with_typical([np.where(absent[..., None], np.nan, m) for m in moves], absent.shape) ** -POWER
    )
    share = share / share.sum(axis=0)
    rate = _with_typical([np.einsum("lt,ltn->tn", share, move) for move in moves], absent.shape[1:])
    middle = np.einsum("lt,ltn->tn", share, value[:, :, 0, n:])
    far = np.where(grid.further > 0, np.maximum(grid.further, np.log(GAP)), 0.0)
    sampling = np.median(part.variance, axis=1)
    wide = half_width(
        level,
        [
            np.einsum("lt,ltn->tn", share, variance[:, :, 0, n:]),
            DISAGREEMENT * np.einsum("lt,ltn->tn", share, (value[:, :, 0, n:] - middle) ** 2),
            DRIFT**2 * np.outer(rate, far ** (2 * WALK)),
            (np.einsum("lt,lt->t", share, scatter**2) + sampling)[:, None],
        ],
    )
    low, high = np.clip(middle - wide, 0.0, 1.0), np.clip(middle + wide, 0.0, 1.0)
    held_out = np.concatenate(
        [np.einsum("lt,ltn->tn", share, values) for values in [value[:, :, 0, :0], *rolled]], axis=1
    )
    truth = np.concatenate([part.value[:, :0], *(part.value[:, rows] for rows in tested)], axis=1)
    if part.metric == "gold_bpb":
        middle, low, high, held_out, truth = (
            -np.log2(np.maximum(v, 1e-9)) for v in (middle, high, low, held_out, truth)
        )
    error, leading = np.sqrt(np.nanmean((held_out - truth) ** 2, axis=1)), np.argmax(share, axis=0)
    for t, task in enumerate(part.tasks):
        size = 1.0 - part.floor[t]
        for i, (N, D) in enumerate(zip(grid.N, grid.D, strict=True)):
            row = {"task": task, "metric": part.metric, "N": N, "D": D, "flops": grid.compute[n + i]}
            useful = VAGUE * (size if part.metric == "acc" else middle[t, i])
            reason = _refusal(part.value[t], grid, error[t], float(grid.further[i]), low[t, i], high[t, i], useful)
            ends = dict(zip(("value", "low", "high"), (middle[t, i], low[t, i], high[t, i]), strict=True))
            ends = dict.fromkeys(ends, np.nan) if reason else ends
            yield row | ends | {"law": [*fits][leading[t]], "error": error[t], "reason": reason}


def _with_typical(moves: list[Array], shape: tuple[int, ...]) -> Array:
    """Return mean squares of moves (..., tasks, tested) over cut-offs; the tasks' median counts as one more cut-off."""
    if not moves:
        return np.ones(shape)
    square = np.stack([np.nanmean(move**2, axis=-1) for move in moves])
    typical = np.nanmedian(np.nanmean(square, axis=0), axis=-1, keepdims=True)
    return np.asarray((typical + np.nansum(square, axis=0)) / (1.0 + np.isfinite(square).sum(axis=0)))


def _refusal(value: Array, grid: _Grid, error: float, further: float, low: float, high: float, useful: float) -> str:
    """Return why there is no forecast at a point; empty if there is one."""
    runs = int(np.isfinite(value).sum())
    if runs < MIN_RUNS:
        return f"only {runs} runs have a score; at least {MIN_RUNS} are needed."
    if np.nanmax(value) == np.nanmin(value):
        return "every run has the same score, which shows no trend."
    if not np.isfinite(error):
        return "no larger run can be held out: below half of the largest compute are too few different runs."
    reach = max(float(cut.further.max()) for cut in grid.cuts)
    if further > FARTHEST * reach:
        return (
            f"its compute is {np.exp(further):.3g} times that of the largest run; hold-outs of up to "
            f"{np.exp(reach):.3g} times allow at most {np.exp(FARTHEST * reach):.3g} times."
        )
    if high - low > useful:
        return f"the interval of a run, {low:.2f} to {high:.2f}, is too wide to be useful."
    return ""
