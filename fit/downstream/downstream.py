"""Extrapolation of benchmark tasks from small runs, with the reasons why some tasks are refused.

A task is fitted only if it has enough runs, a score significantly above chance, a range larger than noise alone would
show, and accuracy that rises as the task's loss falls. Noise comes from the last checkpoints, else from repeated runs,
else from items or a comparison of runs item by item (`<task>/acc_z`, `<task>/acc_z_by_luck`).

Heineman et al. 2025 (arXiv:2508.13144) for signal and noise; Bhagia et al. 2024 (arXiv:2412.04403) for the two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..allocation.allocation import own_convention, unlimited
from ..errors import Array, InputError, floats, positive
from ..table import Runs, RunTable, as_table, ended, numeric
from .taskforecast import forecast_tasks
from .tasklaw import TaskLaw

__all__ = ["SignalToNoise", "TaskLaw", "TaskPrediction", "TaskVerdict", "fit_tasks", "signal_to_noise", "task_names"]

# Thresholds chosen by hand unless a source is named.
FEWEST = 9  # runs: five constants plus a margin
CLEAR = 2.0  # smallest range of the scores, in units of the range that noise alone would show
LUCK = 0.01  # significance level of a best score above chance
MONOTONE = 0.5  # smallest rank correlation of accuracy with falling loss
LAST = 6  # checkpoints at the end of a run that measure noise
ITEMS, PAIRED = "standard error of the items", "differences item by item"  # sources of noise
NO_OPTIMUM = "the law has no finite optimum at a target."
SKIPPED = 0.1  # share of a run's steps whose checkpoints are skipped, as in Bhagia et al. 2024


@dataclass(frozen=True)
class SignalToNoise:
    """The range of final scores compared with their noise.

    signal: range over mean; noise: standard deviation of one score over mean; by_luck: expected ratio if all
    differences were noise. If runs were compared item by item, ratio is the largest difference in standard errors, and
    by_luck the value that chance exceeds once in twenty times.
    """

    signal: float
    noise: float
    ratio: float
    by_luck: float
    source: str

    @property
    def clear(self) -> bool:
        return self.ratio >= self.by_luck * (1.0 if self.source == PAIRED else CLEAR)


@dataclass(frozen=True)
class TaskPrediction:
    """The forecast of a task at the optimum of one budget; `reason` is why there is none, else empty.

    acc_interval: of the score of a new run; law: the one of largest weight; error: of held-out larger runs.
    """

    flops: float
    N: float
    D: float
    acc: float
    acc_interval: tuple[float, float]
    law: str
    error: float
    reason: str = ""


@dataclass(frozen=True)
class TaskVerdict:
    """The verdict on a task: its law and predictions, or the reason why it was refused.

    `measure` is the loss of the first step: gold_bpb, or else loss.
    """

    task: str
    measure: str
    runs: int
    reason: str
    score: SignalToNoise | None = None
    loss: SignalToNoise | None = None
    law: TaskLaw | None = None
    predictions: tuple[TaskPrediction, ...] = field(default=())

    @property
    def extrapolate(self) -> bool:
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, without the law's data, for JSON."""
        law = None
        if self.law:
            law = {"link": self.law.link, "constants": self.law.constants_}
        basics = {name: getattr(self, name) for name in ("task", "measure", "runs", "extrapolate", "reason")}
        signals = {name: signal and asdict(signal) for name, signal in (("score", self.score), ("loss", self.loss))}
        return basics | signals | {"law": law, "predictions": [asdict(p) for p in self.predictions]}

    def __repr__(self) -> str:
        if self.reason:
            return f"{self.task}: refused, {self.reason}"
        lines = [f"{self.task}: {self.law!r}"]
        for p in self.predictions:
            low, high = p.acc_interval
            refusal = f" (refused: {p.reason})" if p.reason else ""
            lines.append(f"  at {p.flops:.3g} FLOPs: {p.acc:.3f} [{low:.3f}, {high:.3f}]{refusal}")
        return "\n".join(lines)


def signal_to_noise(scores: Any, noise: float, source: str = "given") -> SignalToNoise:
    """Compare the range of scores (runs,) with their noise (Heineman et al. 2025).

    `noise`: standard deviation of one score; `source`: how it was measured.
    """
    from scipy.special import ndtri

    scores = floats(scores)
    mean, n = float(np.abs(scores.mean())), len(scores)
    spread = float(np.ptp(scores))
    # Expected range of n standard normals, by Blom's approximation.
    by_luck = 2.0 * float(ndtri((n - 0.375) / (n + 0.25))) if n > 1 else math.inf
    ratio = spread / noise if noise != 0 else (math.inf if spread > 0 else 0.0)
    scale = mean if mean > 0 else math.nan
    return SignalToNoise(spread / scale, noise / scale, ratio, by_luck, source)


def task_names(table: RunTable) -> list[str]:
    return [str(name)[: -len("/acc")] for name in table.frame.columns if str(name).endswith("/acc")]


def fit_tasks(table: Runs, targets: Sequence[float] = (), law: Any = None, link: str = "sigmoid") -> list[TaskVerdict]:
    """Fit or refuse every task of the table, and predict it at the optimum of each target budget.

    Parameters
    ----------
    targets
        FLOP budgets in the law's convention; they need `law`.
    law
        A law of N and D fitted to the table's rows, which gives the optimum.
    link
        Curve from task loss to accuracy, see `TaskLaw`.
    """
    table = as_table(table)
    goals = positive("target", targets) if len(targets) else np.zeros(0)
    if len(goals) and (law is None or tuple(law.inputs) != ("N", "D") or len(law.data_["N"]) != len(table)):
        raise InputError(f"law is {law!r}; targets need a law of N and D fitted to the {len(table)} runs of the table.")
    verdicts = [_verdict(task, table, link) for task in task_names(table)]
    if not len(goals) or not any(verdict.extrapolate for verdict in verdicts):
        return verdicts
    N, D, _ = unlimited(law, law.constants_, goals, own_convention(law))
    if not (np.isfinite([N, D]).all() and (np.array([N, D]) > 0).all()):
        return [verdict if verdict.reason else replace(verdict, reason=NO_OPTIMUM) for verdict in verdicts]
    ahead = forecast_tasks(table, N, D)
    ahead = ahead[ahead["metric"] == "acc"].set_index("task")
    return [
        verdict if verdict.reason else replace(verdict, predictions=_predictions(ahead.loc[[verdict.task]], goals))
        for verdict in verdicts
    ]


def _predictions(rows: Any, goals: Array) -> tuple[TaskPrediction, ...]:
    return tuple(
        TaskPrediction(float(C), row.N, row.D, row.value, (row.low, row.high), row.law, row.error, row.reason)
        for C, row in zip(goals, rows.itertuples(), strict=True)
    )


@dataclass(frozen=True)
class _Scores:
    """The rows of a task: finished runs (positions `at` of the table), then checkpoints."""

    measure: str
    at: np.ndarray
    run: np.ndarray
    step: Array
    final: np.ndarray
    loss: Array
    acc: Array
    acc_se: Array | None
    chance: float


def _verdict(task: str, table: RunTable, link: str) -> TaskVerdict:
    rows = _scores(task, table)
    runs = len(rows.at)
    if runs < FEWEST:
        return TaskVerdict(task, rows.measure, runs, f"only {runs} runs have a score; at least {FEWEST} are needed.")
    acc, loss = rows.acc[rows.final], rows.loss[rows.final]
    score = signal_to_noise(acc, *_noise(rows, rows.acc, rows.acc_se, table))
    signal = signal_to_noise(loss, *_noise(rows, rows.loss, None, table))
    z, by_luck = (float(table.column(f"{task}/acc_z{of}")[rows.at[0]]) for of in ("", "_by_luck"))
    if by_luck > 0 and (z <= by_luck or score.source == ITEMS):
        score = replace(score, ratio=z, by_luck=by_luck, source=PAIRED)
    reason = _refusal(rows, score)
    if reason:
        return TaskVerdict(task, rows.measure, runs, reason, score, signal)
    N, D = (np.full(len(rows.acc), np.nan) for _ in range(2))
    N[rows.final], D[rows.final] = table.N[rows.at], table.D[rows.at]
    try:
        fitted = TaskLaw(link).fit(N, D, rows.loss, rows.acc, rows.acc_se, rows.chance, rows.final)
    except InputError as error:
        return TaskVerdict(task, rows.measure, runs, str(error), score, signal)
    if not fitted.converged_:
        return TaskVerdict(task, rows.measure, runs, "the fit of its law did not converge.", score, signal)
    return TaskVerdict(task, rows.measure, runs, "", score, signal, fitted)


def _scores(task: str, table: RunTable) -> _Scores:
    frame = table.frame
    acc, loss, error = (numeric(frame, f"{task}/{name}") for name in ("acc", "gold_bpb", "acc_se"))
    measure = "gold_bpb" if np.isfinite(loss[table.rows]).any() else "loss"
    if measure == "loss":
        loss = numeric(frame, "loss" if "loss" in frame else "val_loss").copy()
        loss[table.rows] = table.loss
    scored = np.isfinite(acc) & (loss > 0)
    at = np.flatnonzero(scored[table.rows])
    step = numeric(frame, "step")
    checkpoints, owner = _checkpoints(table, at, step)
    keep = scored[checkpoints]
    places = np.concatenate([table.rows[at], checkpoints[keep]])
    error = np.where(np.isfinite(error), error, np.nanmedian(error) if np.isfinite(error).any() else np.nan)[places]
    chance = table.column(f"{task}/chance")[at]
    return _Scores(
        measure=measure,
        at=at,
        run=np.concatenate([table.run_id[at], table.run_id[owner[keep]]]),
        step=np.where(np.isfinite(step), step, np.inf)[places],
        final=np.arange(len(places)) < len(at),
        loss=loss[places],
        acc=acc[places],
        acc_se=error if np.isfinite(error).all() and len(places) else None,
        chance=float(np.median(chance[np.isfinite(chance)])) if np.isfinite(chance).any() else 0.0,
    )


def _checkpoints(table: RunTable, at: np.ndarray, step: Array) -> tuple[np.ndarray, np.ndarray]:
    """Find the checkpoints of the runs with indices `at`, without those in the first share SKIPPED of a run's steps.

    Returns the checkpoints' rows in `table.frame`, and the index of each one's run.
    """
    frame = table.frame
    if not {"run_id", "final", "step"} <= set(frame.columns):
        return np.zeros(0, dtype=int), np.zeros(0, dtype=int)
    owner = {table.run_id[i]: i for i in at}
    names = frame["run_id"].astype(str).to_numpy()
    mask = np.array([name in owner for name in names]) & ~ended(frame)
    places = np.flatnonzero(mask)
    owners = np.array([owner[name] for name in names[places]], dtype=int)
    late = step[places] >= SKIPPED * step[table.rows[owners]]
    return places[late], owners[late]


def _noise(rows: _Scores, values: Array, errors: Array | None, table: RunTable) -> tuple[float, str]:
    squares: list[float] = []
    for run in np.unique(rows.run):
        places = np.flatnonzero(rows.run == run)
        last = values[places[np.argsort(rows.step[places], kind="stable")][-LAST:]]
        if len(last) >= 3:
            # Half the mean squared difference of neighbours estimates the variance, nearly free of a trend.
            squares += list(0.5 * np.diff(last) ** 2)
    if squares:
        return math.sqrt(float(np.mean(squares))), "last checkpoints"
    _, twin = np.unique(np.stack([table.N[rows.at], table.D[rows.at]]), axis=1, return_inverse=True)
    repeats = [values[rows.final][twin.ravel() == i] for i in range(int(twin.max()) + 1)]
    freedom = sum(len(group) - 1 for group in repeats)
    if freedom >= 3:
        total = sum(float(((group - group.mean()) ** 2).sum()) for group in repeats)
        return math.sqrt(total / freedom), "runs of one size and length"
    if errors is not None:
        return math.sqrt(float(np.mean(errors[rows.final] ** 2))), ITEMS
    return math.nan, ""


def _refusal(rows: _Scores, score: SignalToNoise) -> str:
    """Return why a task may not be extrapolated; empty if it may."""
    from scipy.special import ndtri
    from scipy.stats import spearmanr

    if math.isnan(score.ratio):
        return "the noise of its scores is unknown: the table has no checkpoints, repeated runs or standard errors."
    acc, loss = rows.acc[rows.final], rows.loss[rows.final]
    error = score.noise * abs(float(acc.mean())) if rows.acc_se is None else rows.acc_se[rows.final]
    above = np.where(acc > rows.chance, (acc - rows.chance) / np.maximum(error, 1e-12), 0.0)
    best = float(above.max())
    if best <= float(ndtri(1.0 - LUCK / len(acc))):
        return (
            f"no run is significantly above chance ({rows.chance:.3g}): the best of {len(acc)} is {best:.1f} "
            f"standard errors above it."
        )
    if not score.clear and score.source == PAIRED:
        return (
            f"no two runs differ significantly: compared item by item, the largest difference is {score.ratio:.2f} "
            f"standard errors, and more than {score.by_luck:.2f} is needed."
        )
    if not score.clear:
        return (
            f"its scores span {score.ratio:.1f} times their noise ({score.source}), and noise alone would span "
            f"{score.by_luck:.1f} times; at least {CLEAR * score.by_luck:.1f} is needed."
        )
    correlation = float(spearmanr(acc, -loss).statistic)
    if not correlation >= MONOTONE:
        return (
            f"its accuracy does not follow its loss: their rank correlation is {correlation:.2f}, and at least "
            f"{MONOTONE} is needed."
        )
    return ""
