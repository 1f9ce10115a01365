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
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its parts are imported at first use

from ..allocation.allocation import own_convention, unlimited
from ..errors import InputError, floats, positive
from ..table import Runs, RunTable, as_table, ended, numeric
from .taskforecast import forecast_tasks
from .tasklaw import TaskLaw

if TYPE_CHECKING:
    import pandas as pd

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
        law = self.law and {"link": self.law.link, "constants": self.law.constants_}
        return asdict(replace(self, law=None)) | {"extrapolate": self.extrapolate, "law": law}

    def __repr__(self) -> str:
        if self.reason:
            return f"{self.task}: refused, {self.reason}"
        form, lines = "  at {:.3g} FLOPs: {:.3f} [{:.3f}, {:.3f}]", [f"{self.task}: {self.law!r}"]
        for p in self.predictions:
            lines.append(form.format(p.flops, p.acc, *p.acc_interval) + f" (refused: {p.reason})" * bool(p.reason))
        return "\n".join(lines)


def signal_to_noise(scores: Any, noise: float, source: str = "given") -> SignalToNoise:
    """Compare the range of scores (runs,) with their noise (Heineman et al. 2025).

    `noise`: standard deviation of one score; `source`: how it was measured.
    """
    scores = floats(scores)
    mean, spread, n = float(np.abs(scores.mean())), float(np.ptp(scores)), len(scores)
    # Expected range of n standard normals, by Blom's approximation.
    by_luck = 2.0 * float(scipy.special.ndtri((n - 0.375) / (n + 0.25))) if n > 1 else math.inf
    ratio = spread / noise if noise != 0 else (math.inf if spread > 0 else 0.0)
    scale = mean if mean > 0 else math.nan
    return SignalToNoise(spread / scale, noise / scale, ratio, by_luck, source)


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
    names = (str(name) for name in table.frame.columns)
    verdicts = [_verdict(name.removesuffix("/acc"), table, link) for name in names if name.endswith("/acc")]
    if not len(goals) or not any(verdict.extrapolate for verdict in verdicts):
        return verdicts
    N, D, _ = unlimited(law, law.constants_, goals, own_convention(law))
    if not (np.isfinite([N, D]).all() and (np.array([N, D]) > 0).all()):
        return [verdict if verdict.reason else replace(verdict, reason=NO_OPTIMUM) for verdict in verdicts]
    ahead = forecast_tasks(table, N, D)
    at: dict[Any, Any] = {task: rows.assign(C=goals) for task, rows in ahead[ahead["metric"] == "acc"].groupby("task")}
    return [
        verdict if verdict.reason else replace(verdict, predictions=tuple(
            TaskPrediction(row.C, row.N, row.D, row.value, (row.low, row.high), row.law, row.error, row.reason)
            for row in at[verdict.task].itertuples()
        )) for verdict in verdicts
    ]  # fmt: skip


def _verdict(task: str, table: RunTable, link: str) -> TaskVerdict:
    rows, measure, chance = _scores(task, table)
    ends, errors = rows[rows["final"]], rows["acc_se"].to_numpy() if rows["acc_se"].notna().all() else None
    if len(ends) < FEWEST:
        few = f"only {len(ends)} runs have a score; at least {FEWEST} are needed."
        return TaskVerdict(task, measure, len(ends), few)
    score, signal = (signal_to_noise(ends[name], *_noise(rows, name)) for name in ("acc", "loss"))
    z, by_luck = ends[["acc_z", "acc_z_by_luck"]].iloc[0]
    if by_luck > 0 and (z <= by_luck or score.source == ITEMS):
        score = replace(score, ratio=float(z), by_luck=float(by_luck), source=PAIRED)
    reason, law = _refusal(ends, score, chance), TaskLaw(link)
    if not reason:
        try:
            law.fit(rows["N"], rows["D"], rows["loss"], rows["acc"], errors, chance, rows["final"])
            reason = "" if law.converged_ else "the fit of its law did not converge."
        except InputError as error:
            reason = str(error)
    return TaskVerdict(task, measure, len(ends), reason, score, signal, None if reason else law)


def _scores(task: str, table: RunTable) -> tuple[pd.DataFrame, str, float]:
    """Return the scores of finished runs, then of checkpoints after SKIPPED; the loss that they have; and chance."""
    import pandas as pd

    frame, measure = table.frame, "gold_bpb"
    names = ("acc", "acc_se", "chance", "acc_z", "acc_z_by_luck")
    data = pd.DataFrame({name: numeric(frame, f"{task}/{name}") for name in names})
    data["step"], data["loss"] = numeric(frame, "step"), numeric(frame, f"{task}/gold_bpb")
    data["acc_se"] = data["acc_se"].fillna(data["acc_se"].median())
    ends = data.iloc[table.rows].assign(run=table.run_id, N=table.N, D=table.D, final=True)
    if not np.isfinite(ends["loss"]).any():
        measure, ends["loss"] = "loss", table.loss
        data["loss"] = numeric(frame, "loss" if "loss" in frame else "val_loss")
    parts = [ends[np.isfinite(ends["acc"]) & (ends["loss"] > 0)]]
    if {"run_id", "final", "step"} <= {*frame.columns}:
        others = data.assign(run=frame["run_id"].astype(str).to_numpy(), N=np.nan, D=np.nan, final=False)[~ended(frame)]
        first = others["run"].map(dict(zip(parts[0]["run"], SKIPPED * parts[0]["step"], strict=True))).astype(float)
        parts.append(others[(others["step"] >= first) & np.isfinite(others["acc"]) & (others["loss"] > 0)])
    rows, chance = pd.concat(parts).fillna({"step": np.inf}), parts[0]["chance"].median()
    return rows, measure, 0.0 if math.isnan(chance) else float(chance)


def _noise(rows: pd.DataFrame, column: str) -> tuple[float, str]:
    """Return the standard deviation of one score, and where it was measured."""
    ends, last = rows[rows["final"]], rows.sort_values("step", kind="stable").groupby("run").tail(LAST).groupby("run")
    # Half the mean squared difference of neighbours estimates the variance, nearly free of a trend.
    squares = [0.5 * np.diff(values) ** 2 for _, values in last[column] if len(values) >= 3]
    if squares:
        return math.sqrt(np.concatenate(squares).mean()), "last checkpoints"
    repeats = ends.groupby(["N", "D"])[column]
    if (freedom := len(ends) - repeats.ngroups) >= 3:
        return math.sqrt((repeats.var(ddof=0) * repeats.size()).sum() / freedom), "runs of one size and length"
    if column == "acc" and rows["acc_se"].notna().all():
        return math.sqrt((ends["acc_se"] ** 2).mean()), ITEMS
    return math.nan, ""


def _refusal(ends: pd.DataFrame, score: SignalToNoise, chance: float) -> str:
    """Return why a task may not be extrapolated; empty if it may."""
    if math.isnan(score.ratio):
        return "the noise of its scores is unknown: the table has no checkpoints, repeated runs or standard errors."
    error = ends["acc_se"].fillna(score.noise * abs(float(ends["acc"].mean()))).clip(lower=1e-12)
    best = float(((ends["acc"] - chance) / error).max())
    if best <= float(scipy.special.ndtri(1.0 - LUCK / len(ends))):
        return (
            f"no run is significantly above chance ({chance:.3g}): the best of {len(ends)} is {max(best, 0.0):.1f} "
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
    correlation = ends["acc"].corr(-ends["loss"], method="spearman")
    if not correlation >= MONOTONE:
        return (
            f"its accuracy does not follow its loss: their rank correlation is {correlation:.2f}, and at least "
            f"{MONOTONE} is needed."
        )
    return ""
