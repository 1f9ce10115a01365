"""The full analysis of a table: three approaches, intervals, a backtest and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .approaches.approaches import Law, fit_parametric, mix_forms, three_approaches
from .approaches.backtest import backtest
from .approaches.conventions import by_convention, read_off
from .approaches.envelope import Envelope
from .approaches.experts import by_experts
from .approaches.isoflop import IsoflopProfiles
from .approaches.recipes import by_recipe, split
from .checks.checks import run_checks
from .checks.verdict import verdict
from .downstream.decisions import decision_accuracy
from .downstream.downstream import fit_tasks
from .errors import InputError, one_of, positive
from .flops import CONVENTIONS, flops_per_token
from .formatting import INTERVALS
from .results import Analysis
from .table import Runs, as_table
from .uncertainty import check_resampling

QUICK = 300  # resamples for side tables (conventions, tasks, experts); fewer than the main fit, for speed


@np.errstate(all="ignore")  # zeros and infinities of vanished terms are reported in words
def analyze(
    table: Runs,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 1000,
    seed: int = 0,
    law: Law | None = None,
    convention: str = "table",
    intervals: str = "mixture",
    speedup: Mapping[str, float] | None = None,
) -> Analysis:
    """Fit the isoFLOP, envelope and parametric approaches to finished runs, a RunTable or DataFrame.

    With several data recipes, each has its own law, and all other results are for the base recipe. With several number
    formats, all results except `precision` are for the runs without quantization.

    Parameters
    ----------
    targets
        FLOP budgets.
    bootstrap
        Resamples of runs; 0 for no intervals.
    law
        Unfitted law of N and D; default Chinchilla's.
    convention
        How FLOPs are counted: "table" (as in the table) or "6nd".
    intervals
        "mixture" also fits a mixture of law forms, which becomes the main answer; "noise" does not.
    speedup
        Number format -> how many times as fast it trains, for the format that wins a budget.
    """
    goals = tuple(float(C) for C in positive("target", np.atleast_1d(np.asarray(targets, dtype=np.float64))))
    check_resampling(bootstrap, seed, minimum=0)
    one_of("convention", convention, CONVENTIONS)
    one_of("intervals", intervals, INTERVALS)
    table = as_table(table)
    if law is not None and law.objective == "se" and table.known_se is None:
        raise InputError("objective is 'se', which needs a loss_se above zero in every row of the table.")
    from .precision.precisionlaw import by_precision  # imports pandas

    table, precision = by_precision(table, bootstrap, seed, speedup)
    counted, note = table, None
    if convention == "6nd" and flops_per_token(table.N, table.D, table.flops) is not None:
        note = "FLOPs are counted as 6ND, as requested, and not as in the table."
        counted = replace(table, flops=6.0 * table.N * table.D, notes=(*table.notes, note))
    groups = split(counted)
    laws = by_recipe(counted, goals, bootstrap, seed, law) if len(groups) > 1 else []
    as_given, table = (next(iter(split(runs).values())) for runs in (table, counted))
    fitted = fit_parametric(table, table.N, law, bootstrap, seed)
    runs = (table.N, table.D, table.loss, table.flops, table.budget)
    profiles, envelope = IsoflopProfiles("valley").fit(*runs, table.weight), Envelope().fit(*runs)
    if note is not None:  # runs of one budget have different 6ND: move them to a common one
        mover = None if fitted[0] is None else (table.N, fitted[0])
        profiles, envelope, _ = read_off(as_given, table.N, table.flops, mover)
    approaches = three_approaches(profiles, envelope, fitted, table, (table.N, table.flops), bootstrap, seed)
    quick, spend = min(bootstrap, QUICK), flops_per_token(table.N, table.D, table.flops)
    # Always fitted in the table's count, so that a saved mixture gives the same answer in every convention.
    mixture = mix_forms(as_given, spend, bootstrap, seed) if intervals == "mixture" else None
    main = (fitted, approaches) if table is as_given else None  # as in the side table
    analysis = Analysis(
        table=table,
        targets=goals,
        law=fitted[0],
        profiles=profiles,
        envelope=envelope,
        approaches=approaches,
        mixture=mixture,
        backtest=backtest(table, profiles, fitted[0], goals[0], mixture.mixture if mixture else None),
        verdict=verdict(approaches, goals, table),
        conventions=by_convention(as_given, goals, quick, seed, law, own=table.flops, main=main),
        tasks=fit_tasks(table, goals, fitted[0]) if fitted[0] is not None and bootstrap else [],
        resamples=bootstrap,
        seed=seed,
        recipes=laws,
        decisions=decision_accuracy(groups) if laws else None,
        experts=by_experts(counted, goals, quick, seed),
        precision=precision,
        speedup=speedup,
    )
    analysis.warnings = run_checks(analysis)
    return analysis
