"""What an analysis found: the table, every fit, what was checked, and the JSON of `isoflop fit --json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .approaches.approaches import Approach, Law
from .approaches.conventions import ConventionRow
from .approaches.envelope import Envelope
from .approaches.isoflop import IsoflopProfiles
from .approaches.recipes import RecipeLaw, sentences
from .checks.doctor import Warning
from .checks.verdict import Verdict
from .downstream.downstream import TaskVerdict
from .formatting import plain_json
from .table import RunTable


@dataclass
class Analysis:
    """What `analyze` found. `approaches` maps envelope, isoflop and parametric to an `Approach`; `law` is None where it
    has no fit. `table` is of one data recipe; `recipes` has the law of each where there are several.
    """

    table: RunTable
    targets: tuple[float, ...]
    law: Law | None
    profiles: IsoflopProfiles
    envelope: Envelope
    approaches: dict[str, Approach]
    backtest: dict[str, Any]
    verdict: Verdict
    conventions: list[ConventionRow]
    tasks: list[TaskVerdict]
    resamples: int
    seed: int
    recipes: list[RecipeLaw] = field(default_factory=list)
    warnings: tuple[Warning, ...] = ()

    @property
    def interior_minima(self) -> int:
        """Budgets whose isoFLOP vertex is accepted: a minimum inside of the sizes tried."""
        return len(self.profiles.accepted_)

    def to_dict(self) -> dict[str, Any]:
        """Finite numbers, null where there is none (also for an unbounded end of an interval)."""
        law = self.law
        approaches = {
            key: {
                "reason": approach.reason,
                "exponent": approach.exponent,
                "exponent_ci": approach.exponent_interval,
                "optimal": [approach.at(C).to_dict() for C in self.targets] if approach.available else [],
            }
            for key, approach in self.approaches.items()
        }
        return plain_json(
            {
                "law": None if law is None else {"form": law.form} | law.constants_,
                "ci": {} if law is None or law.draws_ is None else {name: law.interval(name) for name in law.names},
                "starts": {"tried": 0, "agreeing": 0} if law is None else law.starts_,
                "objective": None if law is None else law.objective_,
                "optimal": approaches["parametric"]["optimal"],
                "backtest": self.backtest,
                "warnings": [{"code": w.code, "message": w.message} for w in self.warnings],
                "approaches": approaches,
                "verdict": self.verdict.sentence,
                "suspects": self.verdict.suspects,
                "conventions": [row.to_dict() for row in self.conventions],
                "tasks": [task.to_dict() for task in self.tasks],
                "recipes": [one.to_dict() for one in self.recipes],
                "recipes_compared": sentences(self.recipes),
                "interior_minima": self.interior_minima,
                "profiles": [
                    {
                        "flops": p.flops,
                        "sizes": len(np.unique(p.N)),
                        "N": p.N_best,
                        "D": p.D_best,
                        "loss": p.loss_best,
                        "N_ci": p.interval(),
                        "accepted": p.accepted,
                        "reason": p.reason,
                    }
                    for p in self.profiles.profiles_
                ],
                "runs": len(self.table),
                "converged": None if law is None else law.converged_,
                "bootstrap": {"resamples": self.resamples, "seed": self.seed},
                "notes": list(self.table.notes),
            }
        )

    def __repr__(self) -> str:
        budgets = len(self.profiles.profiles_)
        lines = [f"{len(self.table)} runs, {self.interior_minima} of {budgets} budgets with an interior minimum"]
        lines.append(f"law: {self.law!r}" if self.law else "law: none")
        for C in self.targets:
            for approach in self.approaches.values():
                e = approach.at(C) if approach.available else None
                said = f"N = {e.N:.3g}, D = {e.D:.3g}" if e and e.N and e.D else "no answer"
                lines.append(f"  at {C:.3g} FLOPs, {approach.title}: {said}")
        lines += [f"  warning ({w.code}): {w.message}" for w in self.warnings]
        return "\n".join(lines)
