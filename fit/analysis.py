"""One table in, everything that can be said about it out: three approaches, intervals, a backtest, and the warnings.

An approach that cannot be fitted does not stop the others: it has a reason instead, so that a report is always written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .approaches.approaches import Law, fit_parametric, three_approaches
from .approaches.backtest import backtest
from .approaches.conventions import by_convention
from .approaches.envelope import Envelope
from .approaches.isoflop import IsoflopProfiles
from .approaches.recipes import by_recipe, split
from .checks.checks import run_checks
from .checks.verdict import verdict
from .downstream.downstream import fit_tasks
from .errors import InputError, positive
from .results import Analysis
from .table import RunTable

QUICK = 300  # resamples behind the intervals of side tables: conventions and tasks


def analyze(
    table: RunTable,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 1000,
    seed: int = 0,
    law: Law | None = None,
) -> Analysis:
    """Fit all three approaches to finished runs; of several data recipes each has a law, and all else is of the base.

    targets: FLOP budgets to answer for. bootstrap: resamples over runs, 0 for no intervals. law: an unfitted law of N
    and D, by default Chinchilla's; it is not changed. Raises InputError when a target is not a positive number or the
    bootstrap is negative.
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
    fitted = fit_parametric(table, table.N, law, bootstrap, seed)
    profiles = IsoflopProfiles("cubic").fit(table.N, table.D, table.loss, table.flops, table.budget, table.weight)
    envelope = Envelope().fit(table.N, table.D, table.loss, table.flops, table.budget)
    approaches = three_approaches(profiles, envelope, fitted, table, (table.N, table.flops), bootstrap, seed)
    quick = min(bootstrap, QUICK)
    found = Analysis(
        table=table,
        targets=goals,
        law=fitted[0],
        profiles=profiles,
        envelope=envelope,
        approaches=approaches,
        backtest=backtest(table, profiles, fitted[0], goals[0]),
        verdict=verdict(approaches, goals, table),
        conventions=by_convention(table, goals, quick, seed, law),
        tasks=fit_tasks(table, goals, fitted[0], quick, seed) if fitted[0] is not None and bootstrap else [],
        resamples=bootstrap,
        seed=seed,
        recipes=laws,
    )
    found.warnings = run_checks(found)
    return found
