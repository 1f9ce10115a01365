"""Tables of mixtures of experts: the best law, sparsity and leverage over dense; FLOPs are 6 N_active D."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import SPREAD, Array, Columns, InputError, positive
from ..laws.experts import ExpertLaw
from ..table import RunTable
from ..uncertainty import percentile_intervals, resampled_together

LOADS = ("load_max", "dead_experts")
ACTIVE = 0.99  # a model is dense from this share of active parameters


@dataclass(frozen=True)
class ExpertStudy:
    """The results on experts of one table; `reason` is why no law was fitted.

    held_out: form -> root mean square error of log loss on the largest N_active and the most experts, fitted without
    them. sparsities: experts, leverage at the largest run's budget and its interval. answers: the best run of each
    target, with any N_total and with at most the runs' largest. load: the worst imbalance of any run.
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


def held_out(law: ExpertLaw, columns: Columns, out: np.ndarray) -> Array:
    """Fit the law without the rows in mask `out`; return log(observed / predicted loss) of these rows."""
    law.fit(*(columns[name][~out] for name in (*law.inputs, "loss")))
    return np.log(columns["loss"][out]) - np.log(law.predict(*(columns[name][out] for name in law.inputs)))


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
    last = [c[name] > c[name].max() / SPREAD for name in ("N_active", "experts")]
    laws = [ExpertLaw(form, tokens, share) for form in ("abnar", "ludziejewski", *(["clark"] if tokens else []))]
    laws = [law for law in laws if len(law.names) < min((~out).sum() for out in last)] or laws[:1]
    errors = {law.form: float(np.sqrt(np.mean([np.mean(held_out(law, c, out) ** 2) for out in last]))) for law in laws}
    law = min(laws, key=lambda law: errors[law.form])
    law.fit(*(c[name] for name in (*law.inputs, "loss")))
    if bootstrap:
        law.bootstrap(bootstrap, resampled_together(runs.group, runs.run_id, law.problem_.free), seed)
    C, answers = float((6.0 * c["N_active"] * c["D"]).max()), []
    leverage, ends = law.leverage(C, numbers).tolist(), [None] * len(numbers)
    if law.draws_ is not None:
        ends = percentile_intervals(law.leverage(C, numbers, law.draws_), 0.95).tolist()
    rows = [{"experts": E, "leverage": k, "ci": ci} for E, k, ci in zip(numbers.tolist(), leverage, ends, strict=True)]
    for max_total in (None, float(c["N_total"].max())):
        best = law.optimal(targets, max_total)
        edge = (best.more["experts"] / numbers.max() > 0.999).tolist()
        answers += [row | {"most": max_total, "edge": at} for row, at in zip(best.rows(), edge, strict=True)]
    load = {name: v.max() for name in LOADS if len(v := runs.column(name)[np.isfinite(runs.column(name)) & sparse])}
    return ExpertStudy("", law, errors, rows, answers, {name: float(worst) for name, worst in load.items()}, c)
