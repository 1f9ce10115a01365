"""Tables of mixtures of experts: which law predicts best, which sparsity a budget wants, and the leverage over dense.

FLOPs are 6 N_active D.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import SPREAD, Array, Columns, InputError, positive
from ..laws.experts import ExpertLaw
from ..table import RunTable
from ..uncertainty import percentile_intervals, resampled_together

ACTIVE = 0.99  # of all parameters, from which on a model is dense


@dataclass(frozen=True)
class ExpertStudy:
    """What a table says of experts; where no law was fitted, `reason` says why.

    held_out   form -> root mean square error of log loss, fitted without the largest N_active and without most experts
    sparsities a row each: experts, runs, the lowest loss, the leverage at the dearest run's budget and its interval
    answers    what each target wants, as text: at any size, and at most with the parameters of the largest run
    """

    reason: str = ""
    law: ExpertLaw | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    sparsities: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"law": self.law and {"form": self.law.form} | self.law.constants_}


def expert_columns(runs: RunTable) -> Columns:
    """N_active, N_total, D, loss and experts, those of a layer over those that a token uses, each (n,); experts may be
    missing in dense runs. Raises InputError where a column is missing.
    """
    for name in ("N_active", "N_total", "experts"):
        if not np.isfinite(runs.column(name)).any():
            has = ", ".join(map(str, runs.frame.columns))
            raise InputError(
                f"the table has no numbers in column {name!r}, which a law of experts needs; it has {has}."
            )
    N, total, E, used = (runs.column(name) for name in ("N_active", "N_total", "experts", "experts_per_token"))
    E = np.where(ACTIVE * total > N, E / np.where(np.isfinite(used), used, 1.0), 1.0)
    found = {name: positive(name, v) for name, v in (("N_active", N), ("N_total", total), ("experts", E))}
    return {**found, "D": runs.D, "loss": runs.loss}


def held_out(law: ExpertLaw, columns: Columns, out: np.ndarray) -> Array:
    """Log of what was observed less log predicted in the rows of a mask (n,), by the law fitted to all others."""
    _fit(law, {name: values[~out] for name, values in columns.items()})
    return np.log(columns["loss"][out]) - np.log(law.predict(*(columns[name][out] for name in law.inputs)))


def by_experts(runs: RunTable, targets: tuple[float, ...], bootstrap: int = 0, seed: int = 0) -> ExpertStudy | None:
    """The study of a table; None where every N_active is N_total, or there is none."""
    if not (runs.column("N_active") < ACTIVE * runs.column("N_total")).any():
        return None
    try:
        c = expert_columns(runs)
    except InputError as error:
        return ExpertStudy(str(error))
    sparse, reason = c["experts"] > 1.0, ""
    grown = (c["N_total"][sparse] / c["N_active"][sparse] - 1.0) / (c["experts"][sparse] - 1.0)
    share = float(np.median(grown)) if sparse.any() else None
    tokens = float(np.median(c["D"])) if c["D"].max() < SPREAD * c["D"].min() else None
    laws = [ExpertLaw(form, tokens, share) for form in ("ludziejewski", "abnar", *(["clark"] if tokens else []))]
    last = [c[name] > c[name].max() / SPREAD for name in ("N_active", "experts")]
    errors: dict[str, float] = {}
    for one in laws:
        try:
            errors[one.form] = float(np.sqrt(np.mean([np.mean(held_out(one, c, out) ** 2) for out in last])))
        except InputError as error:  # too few runs for this form
            reason = str(error)
    if not errors:
        return ExpertStudy(reason)
    law = _fit(min(laws, key=lambda one: errors.get(one.form, np.inf)), c)
    if bootstrap:
        law.bootstrap(bootstrap, resampled_together(runs.group, runs.run_id, law.problem_.free), seed)
    C, tried, answers = float((6.0 * c["N_active"] * c["D"]).max()), np.unique(c["experts"]), []
    known = {"experts": tried.tolist(), "leverage": law.leverage(C, tried).tolist()}
    known["ci"] = (
        percentile_intervals(law.leverage(C, tried, law.draws_), 0.95).tolist() if law.draws_ else [None] * len(tried)
    )
    known |= {"runs": [int((c["experts"] == E).sum()) for E in tried]}
    known |= {"loss": [float(c["loss"][c["experts"] == E].min()) for E in tried]}
    rows = [dict(zip(known, row, strict=True)) for row in zip(*known.values(), strict=True)]
    for most in (None, float(c["N_total"].max())):
        best = law.optimal(targets, most)
        edge = (best.more["experts"] / tried.max() > 0.999).tolist()
        answers += [row | {"most": most, "edge": at} for row, at in zip(best.rows(), edge, strict=True)]
    return ExpertStudy("", law, errors, rows, answers)


def _fit(law: ExpertLaw, columns: Columns) -> ExpertLaw:
    return law.fit(*(columns[name] for name in (*law.inputs, "loss")))
