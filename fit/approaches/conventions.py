"""Every fit under each way to count parameters and FLOPs that a table carries, side by side.

The convention alone moves the exponent of N*(C) from 0.5 to 0.7 and beyond on the same runs. Loss can be a power law in
one count of N only; under the others approach 3 is the best law of a wrong form.

Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; Pearce and Song 2024 (arXiv:2406.12907); Porian et al. 2024
(arXiv:2406.19146).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import Array
from ..table import RunTable
from .approaches import Approach, Law, fit_parametric, three_approaches
from .envelope import Envelope
from .isoflop import IsoflopProfiles, budget_levels

PARAMETERS = ("N_total", "N_active", "N_non_embedding", "N_kaplan")
SAME = 1e-3  # relative difference up to which two columns are one convention
LEVEL = 1.02  # FLOPs of one budget within this factor need no move


@dataclass(frozen=True)
class ConventionRow:
    """One convention: the three approaches under it, or the reason why it is left out.

    `flops` is "6nd" or the column of FLOPs, `own` says that it is the table's convention, and `moved` is the largest
    factor by which D was moved to share a budget (1: none).
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
        """For JSON."""
        shown = ("N", "D", "tokens_per_parameter", "loss", "N_ci", "tokens_per_parameter_ci")
        found = {}
        for key, approach in self.approaches.items():
            said = vars(approach.at(self.targets[0])) if approach.available else {}
            found[key] = approach.to_dict() | {name: said.get(name) for name in shown}
        return {
            "parameters": self.parameters,
            "flops": self.flops,
            "own": self.own,
            "reason": self.reason,
            "moved": self.moved,
            "target": self.targets[0] if self.targets else None,
            "law": self.law and self.law.constants_,
            "approaches": found,
        }

    def __repr__(self) -> str:
        head = f"{self.parameters}, {self.flops}{' (the table)' if self.own else ''}: "
        if self.reason:
            return head + f"left out, {self.reason}"
        said = [f"{key} a = {a.exponent:.3f}" for key, a in self.approaches.items() if a.exponent is not None]
        return head + (", ".join(said) or "no approach has an answer")


def by_convention(
    table: RunTable,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 0,
    seed: int = 0,
    law: Law | None = None,
    own: Array | None = None,
) -> list[ConventionRow]:
    """A row for every parameter count (the columns PARAMETERS, or else N) times every FLOP count of the table: 6ND and,
    where they differ, `flops_exact` or else the table's.

    Arguments as in `analyze`; own (n,): FLOPs as answers count them, if not as the table does.
    """
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
    laws = {name: fit_parametric(table, N, law, bootstrap, seed) for name, N in counts.items() if usable[name].all()}
    # Losses are moved under the count of N in which approach 3 fits best.
    movers = [(counts[name], one) for name, (one, _) in laws.items() if one is not None]
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
            profiles, envelope, moved = read_off(table, N, C, mover)
            found = three_approaches(profiles, envelope, laws[name], table, (N, C), bootstrap, seed)
            rows.append(replace(row, approaches=found, law=laws[name][0], moved=moved))
    return rows


def read_off(
    table: RunTable, N: Array, C: Array, mover: tuple[Array, Law] | None
) -> tuple[IsoflopProfiles, Envelope, float]:
    """Approaches 2 and 1 in the counts N and C (n,), and the largest factor in D by which a run was moved for them.

    A profile that is even in one count is lopsided in another, as a valley may be.
    """
    budget, factor = _shared_budgets(table, C)
    far = float(np.exp(np.abs(np.log(factor)).max()))
    loss = table.loss
    if far > LEVEL and mover is not None:
        size, law = mover
        loss = np.asarray(loss * (law.predict(size, table.D * factor) / law.predict(size, table.D)))
    else:
        if far > LEVEL:
            budget = np.full(len(C), np.nan)
        factor, far = np.ones(len(C)), 1.0
    runs = (N, table.D * factor, loss, C * factor, budget)
    return IsoflopProfiles("valley").fit(*runs, table.weight), Envelope().fit(*runs), far


def _shared_budgets(table: RunTable, C: Array) -> tuple[Array, Array]:
    """The budget of each run (NaN: none), which is the mean FLOPs of those that share one under the table's convention;
    and the factor in D that takes the run there, both (n,).
    """
    labels, levels = budget_levels(table.flops, table.N, table.budget)
    budget = np.full(len(C), np.nan)
    if _same(C, table.flops):
        budget[labels >= 0] = levels[labels[labels >= 0]]
        return budget, np.ones(len(C))
    for level in range(len(levels)):
        budget[labels == level] = np.exp(np.log(C[labels == level]).mean())
    return budget, np.where(np.isfinite(budget), budget / C, 1.0)


def _same(one: Array, other: Array) -> bool:
    return bool(np.all(np.abs(one / other - 1.0) < SAME))
