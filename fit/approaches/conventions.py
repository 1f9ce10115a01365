"""Fits under each count of parameters and FLOPs that a table has, for comparison.

The convention alone can change the exponent of N*(C) from 0.5 to 0.7.

Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; Pearce and Song 2024 (arXiv:2406.12907); Porian et al. 2024
(arXiv:2406.19146).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import Array
from ..table import Runs, RunTable, as_table
from .approaches import Approach, Law, fit_parametric, three_approaches
from .envelope import Envelope
from .isoflop import IsoflopProfiles, budget_levels

PARAMETERS = ("N_total", "N_active", "N_non_embedding", "N_kaplan")
SAME = 1e-3  # columns are one convention up to this relative difference
LEVEL = 1.02  # FLOPs of one budget are not moved if they agree within this factor


@dataclass(frozen=True)
class ConventionRow:
    """One convention: the three approaches under it, or the reason why it is left out.

    `own` is true for the table's convention; `moved` is the largest factor on D that made runs share a budget.
    """

    parameters: str
    flops: str
    own: bool
    targets: tuple[float, ...] = ()
    approaches: dict[str, Approach] = field(default_factory=dict)
    law: Law | None = None
    moved: float = 1.0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        shown = ("N", "D", "tokens_per_parameter", "loss", "N_ci", "tokens_per_parameter_ci")
        answers = {}
        for key, approach in self.approaches.items():
            answer = vars(approach.at(self.targets[0])) if approach.available else {}
            answers[key] = approach.to_dict() | {name: answer.get(name) for name in shown}
        return {
            "parameters": self.parameters,
            "flops": self.flops,
            "own": self.own,
            "reason": self.reason,
            "moved": self.moved,
            "target": self.targets[0] if self.targets else None,
            "law": self.law and self.law.constants_,
            "approaches": answers,
        }

    def __repr__(self) -> str:
        head = f"{self.parameters}, {self.flops}{' (the table)' if self.own else ''}: "
        if self.reason:
            return head + f"left out, {self.reason}"
        exponents = [f"{key} a = {a.exponent:.3f}" for key, a in self.approaches.items() if a.exponent is not None]
        return head + (", ".join(exponents) or "no approach has an answer")


def by_convention(
    table: Runs,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 0,
    seed: int = 0,
    law: Law | None = None,
    own: Array | None = None,
    main: tuple[tuple[Law | None, str], dict[str, Approach]] | None = None,
) -> list[ConventionRow]:
    """Fit the approaches under every pair of a parameter count and a FLOP count of the table.

    FLOPs are counted as 6ND and as in `flops_exact`, or without it as in the table if that differs. The row with the
    table's N and the FLOPs `own` (n,), by default the table's, is marked `own`. `main` has the results of
    `fit_parametric` and `three_approaches` for the table's N and FLOPs, if known. Other arguments are as in `analyze`.
    """
    table = as_table(table)
    own = table.flops if own is None else own
    counts = {name: table.column(name) for name in PARAMETERS if name in table.frame}
    active = counts.pop("N_active", table.N)
    if "N_total" in counts and np.isfinite(active).all() and not _same(active, counts["N_total"]):
        counts = {"N_active": active} | counts
    if not any(_same(N, table.N) for N in counts.values()):
        counts = {"N": table.N} | counts
    exact = table.column("flops_exact")
    measured = ("exact", exact) if np.isfinite(exact).any() else ("table", table.flops)
    usable = {name: np.isfinite(N) & (N > 0) for name, N in counts.items()}
    laws = {
        name: main[0] if main and np.array_equal(N, table.N) else fit_parametric(table, N, law, bootstrap, seed)
        for name, N in counts.items()
        if usable[name].all()
    }
    # Losses of moved runs follow the count of N in which approach 3 fits best.
    movers = [(counts[name], law_or_none) for name, (law_or_none, _) in laws.items() if law_or_none is not None]
    mover = min(movers, key=lambda mover: mover[1].objective_, default=None)
    rows = []
    for name, N in counts.items():
        spent = {"6nd": 6.0 * N * table.D, measured[0]: measured[1]}
        if measured[0] == "table" and _same(spent["6nd"], table.flops):
            del spent["table"]
        for label, C in spent.items():
            row = ConventionRow(name, label, _same(N, table.N) and _same(C, own), tuple(map(float, targets)))
            missing = ~(usable[name] & np.isfinite(C) & (C > 0))
            if missing.any():
                column = f"flops_{label}" if usable[name].all() else name
                reason = f"{column} is missing or zero in {int(missing.sum())} of {len(N)} runs"
                rows.append(replace(row, reason=reason))
                continue
            if main and np.array_equal(N, table.N) and np.array_equal(C, table.flops):
                rows.append(replace(row, approaches=main[1], law=main[0][0]))
                continue
            profiles, envelope, moved = read_off(table, N, C, mover)
            approaches = three_approaches(profiles, envelope, laws[name], table, (N, C), bootstrap, seed)
            rows.append(replace(row, approaches=approaches, law=laws[name][0], moved=moved))
    return rows


def read_off(
    table: RunTable, N: Array, C: Array, mover: tuple[Array, Law] | None
) -> tuple[IsoflopProfiles, Envelope, float]:
    """Fit isoFLOP profiles and an envelope to sizes N and FLOPs C, (n,) each.

    If C differs within a budget, each D is scaled to one C, and losses are adjusted by the law of `mover` (sizes, law).
    The last result is the largest factor applied to D.
    """
    budget, factor = _shared_budgets(table, C)
    largest = float(np.exp(np.abs(np.log(factor)).max()))
    loss = table.loss
    if largest > LEVEL and mover is not None:
        size, law = mover
        loss = np.asarray(loss * (law.predict(size, table.D * factor) / law.predict(size, table.D)))
    else:
        if largest > LEVEL:
            budget = np.full(len(C), np.nan)
        factor, largest = np.ones(len(C)), 1.0
    runs = (N, table.D * factor, loss, C * factor, budget)
    return IsoflopProfiles("valley").fit(*runs, table.weight), Envelope().fit(*runs), largest


def _shared_budgets(table: RunTable, C: Array) -> tuple[Array, Array]:
    """Return each run's budget in the FLOP count of C (NaN: none), and the factor on D that reaches it, both (n,)."""
    labels, levels = budget_levels(table.flops, table.N, table.budget)
    budget = np.full(len(C), np.nan)
    if _same(C, table.flops):
        budget[labels >= 0] = levels[labels[labels >= 0]]
        return budget, np.ones(len(C))
    for level in range(len(levels)):
        budget[labels == level] = np.exp(np.log(C[labels == level]).mean())
    return budget, np.where(np.isfinite(budget), budget / C, 1.0)


def _same(values: Array, other: Array) -> bool:
    return bool(np.all(np.abs(values / other - 1.0) < SAME))
