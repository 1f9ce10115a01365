"""Tables of mixtures of experts: the best law, sparsity and leverage over dense; FLOPs are 6 N_active D."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import SPREAD, Columns, InputError, positive
from ..forecasting.forecaster import Forecaster
from ..laws.experts import ExpertLaw
from ..table import RunTable
from ..uncertainty import percentile_intervals, resampled_together

LOADS = ("load_max", "dead_experts")
DRAWS = 100  # most resamples of every form, 0.05 s each on 223 runs; an interval's ends are then known to 7 % of it
ACTIVE = 0.99  # a model is dense from this share of active parameters


@dataclass(frozen=True)
class ExpertStudy:
    """The results on experts of one table; `reason` is why no law was fitted.

    law: the form that predicted held-out larger runs best; held_out: form -> root mean square error of its log losses
    there. sparsities: experts, leverage at the largest run's budget and its interval. answers: the best run of each
    target by the law, with any N_total and with at most the runs' largest, and its loss by all forms. load: the worst
    imbalance of any run.
    """

    reason: str = ""
    law: ExpertLaw | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    sparsities: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    load: dict[str, float] = field(default_factory=dict)
    columns: Columns = field(default_factory=dict, repr=False)  # as `expert_columns`

    def to_dict(self) -> dict[str, Any]:
        fields = vars(self) | {"law": self.law and {"form": self.law.form} | self.law.constants_}
        return {name: value for name, value in fields.items() if name != "columns"}


def expert_columns(runs: RunTable) -> Columns:
    """Return N_active, N_total, D, loss and experts, each (n,). Raises InputError if a column is missing.

    experts is the number per layer over the number used per token, 1 for dense runs.
    """
    for name in ("N_active", "N_total", "experts"):
        if not np.isfinite(runs.column(name)).any():
            has = ", ".join(map(str, runs.frame.columns))
            raise InputError(f"column {name!r} has no numbers; a law of experts needs it, and the table has {has}.")
    N, total, E, per_token = (runs.column(name) for name in ("N_active", "N_total", "experts", "experts_per_token"))
    E = np.where(ACTIVE * total > N, E / np.where(np.isfinite(per_token), per_token, 1.0), 1.0)
    checked = {name: positive(name, v) for name, v in (("N_active", N), ("N_total", total), ("experts", E))}
    return {**checked, "D": runs.D, "loss": runs.loss}


def by_experts(runs: RunTable, targets: tuple[float, ...], bootstrap: int = 0, seed: int = 0) -> ExpertStudy | None:
    """Fit laws of mixtures of experts, with answers at `targets` FLOPs; return None if all runs are dense."""
    if not (runs.column("N_active") < ACTIVE * runs.column("N_total")).any():
        return None
    try:
        return _study(runs, targets, bootstrap, seed)
    except InputError as error:
        return ExpertStudy(str(error))


def _study(runs: RunTable, targets: tuple[float, ...], bootstrap: int, seed: int) -> ExpertStudy:
    c = expert_columns(runs)
    sparse, numbers = c["experts"] > 1.0, np.unique(c["experts"])
    if len(numbers) < 2:
        raise InputError(
            f"experts is {numbers[0]:g} in every run; a law of experts needs runs with another number, or dense runs."
        )
    share = float(np.median((c["N_total"] / c["N_active"] - 1.0)[sparse] / (c["experts"][sparse] - 1.0)))
    tokens = float(np.median(c["D"])) if c["D"].max() < SPREAD * c["D"].min() else None
    laws = {form: ExpertLaw(form, tokens, share) for form in ("abnar", "ludziejewski", *(["clark"] if tokens else []))}
    groups = resampled_together(runs.group, runs.run_id, max(len(law.names) for law in laws.values()))
    forecaster = Forecaster(laws, draws=min(bootstrap, DRAWS), seed=seed)
    columns = {name: c[name] for name in (*forecaster.inputs, "loss")}
    forecaster.fit(**columns, weight=runs.weight, groups=groups)
    law = forecaster.laws_[max(forecaster.weights_, key=lambda form: forecaster.weights_[form])]
    assert isinstance(law, ExpertLaw)
    C, answers = float((6.0 * c["N_active"] * c["D"]).max()), []
    leverage, ends = law.leverage(C, numbers).tolist(), [None] * len(numbers)
    if law.draws_ is not None:
        ends = percentile_intervals(law.leverage(C, numbers, law.draws_), 0.95).tolist()
    rows = [{"experts": E, "leverage": k, "ci": ci} for E, k, ci in zip(numbers.tolist(), leverage, ends, strict=True)]
    for max_total in (None, float(c["N_total"].max())):
        best = law.optimal(targets, max_total)
        at = {"N_active": best.N, "D": best.D, **best.more}
        at = {name: at[name] for name in forecaster.inputs}
        draws = best.draws and {**best.draws, "loss": forecaster.quantiles(**at)}
        best = replace(best, loss=forecaster.predict(**at), draws=draws)
        edge = (best.more["experts"] / numbers.max() > 0.999).tolist()
        answers += [row | {"most": max_total, "edge": on} for row, on in zip(best.rows(), edge, strict=True)]
    load = {name: runs.column(name)[np.isfinite(runs.column(name)) & sparse] for name in LOADS}
    worst = {name: float(values.max()) for name, values in load.items() if len(values)}
    return ExpertStudy("", law, forecaster.errors_, rows, answers, worst, c)
