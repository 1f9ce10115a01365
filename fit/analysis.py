"""One table in, everything that can be said about it out: three approaches, intervals, a backtest, and the warnings.

Special here: an approach that cannot be fitted does not stop the others. It becomes `None` with a warning, so that a
report can always be written; only a table that no approach can read (bad numbers) is an InputError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .approaches import approaches as side
from .approaches.approaches import Approach, Verdict, verdict
from .approaches.backtest import backtest
from .approaches.conventions import ConventionRow, by_convention
from .approaches.envelope import Envelope
from .approaches.isoflop import IsoflopProfiles
from .approaches.recipes import RecipeLaw, by_recipe, sentences, split
from .checks.checks import run_checks
from .checks.diagnosis import Warning
from .downstream.downstream import TaskVerdict, fit_tasks
from .errors import InputError, positive
from .flops import flops_per_token
from .formatting import estimate_json, plain_json
from .laws.chinchilla import NAMES, ChinchillaLaw
from .table import RunTable
from .uncertainty import resampled_together

QUICK = 300  # resamples behind the intervals of side tables: conventions and tasks


@dataclass
class Analysis:
    """What `analyze` found. `approaches` maps envelope, isoflop and parametric to an `Approach`; `law` is None where it
    has no fit. `table` is of one data recipe; `recipes` has the law of each where there are several.
    """

    table: RunTable
    targets: tuple[float, ...]
    law: ChinchillaLaw | None
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
        """The JSON of `isoflop fit --json`: finite numbers, null where there is none (an unbounded end of an interval,
        too).
        """
        law = self.law
        return plain_json(
            {
                "law": None if law is None else {"form": law.form} | {name: getattr(law, name + "_") for name in NAMES},
                "ci": {} if law is None or law.draws_ is None else {name: law.interval(name) for name in NAMES},
                "starts": {"tried": 0, "agreeing": 0} if law is None else law.starts_,
                "objective": None if law is None else law.objective_,
                "optimal": [] if law is None else self._estimates(self.approaches["parametric"]),
                "backtest": self.backtest,
                "warnings": [{"code": w.code, "message": w.message} for w in self.warnings],
                "approaches": {
                    key: {
                        "reason": approach.reason,
                        "exponent": approach.exponent,
                        "exponent_ci": approach.exponent_interval,
                        "optimal": self._estimates(approach) if approach.available else [],
                    }
                    for key, approach in self.approaches.items()
                },
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

    def _estimates(self, approach: Approach) -> list[dict[str, Any]]:
        return [estimate_json(approach.at(C)) for C in self.targets]

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


def analyze(
    table: RunTable,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 1000,
    seed: int = 0,
    law: ChinchillaLaw | None = None,
) -> Analysis:
    """Fit all three approaches to a table of finished runs.

    Runs of several data recipes are never pooled: everything is of the base recipe's runs alone (raw text, where the
    table has some), and `recipes` has a law for each, compared with it.

    targets: FLOP budgets to answer for. bootstrap: resamples over runs, 0 for no intervals. law: the parametric law to
    fit, for other options than its defaults; it is not changed. Raises InputError when a target is not a positive
    number or the bootstrap is negative.
    """
    goals = tuple(float(C) for C in positive("target", np.atleast_1d(np.asarray(targets, dtype=np.float64))))
    if bootstrap < 0:
        raise InputError(
            f"bootstrap is {bootstrap}; zero (no intervals) or a positive number of resamples is expected."
        )
    if law is not None and law.objective == "se" and table.known_se is None:
        raise InputError("objective is 'se', which needs a loss_se above zero in every row of the table.")
    groups = split(table)
    laws = by_recipe(table, goals, bootstrap, seed, law) if len(groups) > 1 else []
    table = next(iter(groups.values()))
    fitted, reason = _parametric(law or ChinchillaLaw(), table, bootstrap, seed)
    profiles = IsoflopProfiles("cubic").fit(table.N, table.D, table.loss, table.flops, table.budget, table.weight)
    envelope = Envelope().fit(table.N, table.D, table.loss, table.flops, table.budget)
    if bootstrap:
        profiles.bootstrap(bootstrap, seed)
        envelope.bootstrap(bootstrap, table.group, seed)
    span = (float(table.flops.min()), float(table.flops.max()))
    approaches = {
        "envelope": side.envelope(envelope),
        "isoflop": side.isoflop(profiles),
        "parametric": side.parametric(fitted, reason, flops_per_token(table.N, table.D, table.flops), span),
    }
    quick = min(bootstrap, QUICK)
    found = Analysis(
        table=table,
        targets=goals,
        law=fitted,
        profiles=profiles,
        envelope=envelope,
        approaches=approaches,
        backtest=backtest(table, profiles, fitted, goals[0]),
        verdict=verdict(approaches, goals, table),
        conventions=by_convention(table, goals, quick, seed, law),
        tasks=fit_tasks(table, goals, fitted, quick, seed) if fitted is not None and bootstrap else [],
        resamples=bootstrap,
        seed=seed,
        recipes=laws,
    )
    found.warnings = run_checks(found)
    return found


def _parametric(options: ChinchillaLaw, table: RunTable, bootstrap: int, seed: int) -> tuple[ChinchillaLaw | None, str]:
    try:
        law = options.clone().fit(table.N, table.D, table.loss, table.weight, table.known_se)
    except InputError as error:
        return None, str(error)
    if bootstrap:
        # With too few runs to resample, a law without intervals is still worth its warning.
        with contextlib.suppress(InputError):
            law.bootstrap(bootstrap, resampled_together(table.group, table.run_id, law.problem_.free), seed)
    return law, ""
