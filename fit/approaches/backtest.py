"""How far to trust the fits: predict dearer runs from cheaper ones, and leave out one rung or one budget at a time.

The error of *allocation* stands beside the error of loss, because a law can predict loss within one percent and still
misplace tokens per parameter by a factor of two.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from ..allocation.allocation import compute_optimal
from ..errors import Array, InputError, enough, identifiable
from ..flops import FlopsPerToken
from ..table import RunTable
from ..uncertainty import percentile_interval, resampled_together
from .approaches import Law, finite_or_none, size_or_none
from .isoflop import IsoflopProfiles, binned_levels

COARSE_BIN = 0.5  # decades, where the table has no budgets
RUNG_GAP = 0.02  # log N; sizes nearer than this are one rung
SIZES = ("N", "tokens_per_parameter")
DRAWS = 200  # resamples behind the prediction intervals of a step


def backtest(table: RunTable, profiles: IsoflopProfiles, law: Law | None, target: float) -> dict[str, Any]:
    """Every step fits approach 3 (and 2 where it can) on runs cheaper than a budget and predicts that budget's runs.

    Returns {"steps", "reason", "influence"} and, copied to the top, the fields of the last step, of the highest budget:
    loss_error (mean absolute, relative), loss_bias (positive: predicted too high), both also over all runs of the
    budget and beyond (_beyond), loss_inside (share of held-out runs within the 95 % prediction interval), N and
    tokens_per_parameter, _predicted by approach 3, by approach 2 (_isoflop) and _measured.
    """
    if law is None:
        return {"steps": [], "reason": "there is no parametric law", "influence": None}
    labels, budgets = _levels(table, profiles)
    influence = leave_one_out(table, law, labels, budgets, target)
    steps, reason = [], "there is one budget only" if len(budgets) < 2 else ""
    for level in range(1, len(budgets)):
        test = labels == level
        train = (table.flops < table.flops[test].min()) & ~test
        try:
            steps.append(_step(table, train, test, float(budgets[level]), profiles, law, target))
        except InputError as error:
            reason = f"below {budgets[level]:.3g} FLOPs: {str(error).rstrip('.')}"
    if not steps:
        return {"steps": [], "reason": reason, "influence": influence}
    held_highest = steps[-1]["held_out_flops"] == float(budgets[-1])
    return {"steps": steps, "reason": "" if held_highest else reason, "influence": influence, **steps[-1]}


def leave_one_out(table: RunTable, law: Law, labels: np.ndarray, budgets: Array, target: float) -> dict[str, Any]:
    """Approach 3 without each rung (the runs of one size) and without each budget: {"left_out": [...], "most": ...}.

    `moves` are in widths of the full fit's interval (of the logarithm for N and D/N): beyond a half, one rung decides
    more than the interval admits. `most` is the entry with the largest move (without intervals: of log N).
    """
    # A rung is the runs of one size, by rising N.
    order = np.argsort(table.N, kind="stable")
    rungs = np.empty(len(table), dtype=int)
    rungs[order] = np.concatenate([[0], np.cumsum(np.diff(np.log(table.N[order])) > RUNG_GAP)])
    groups = [
        ("size", float(np.exp(np.log(table.N[rungs == rung]).mean())), rungs == rung) for rung in range(rungs.max() + 1)
    ]
    groups += [("budget", float(C), labels == level) for level, C in enumerate(budgets)]
    left_out = np.stack([rows for _, _, rows in groups])
    usable = np.array([_identifies(law, table.where(~rows & (table.weight > 0))) for rows in left_out])
    # Leaving runs out is a weight of zero, so all refits are one call of the batched solver.
    refits = _answers(law, law.refit(~(left_out & usable[:, None])), target)
    refits = {name: np.where(usable, values, np.nan) for name, values in refits.items()}
    full = _answers(law, {name: np.array([value]) for name, value in law.constants_.items()}, target)
    moves = {name: values - _logs(full)[name] for name, values in _logs(refits).items()}
    draws = {} if law.draws_ is None else _answers(law, law.draws_, target)
    ends = _logs({name: np.array(percentile_interval(values)) for name, values in draws.items()})
    for name in moves:
        width = ends[name][1] - ends[name][0] if name in ends else np.nan
        with np.errstate(invalid="ignore"):  # a move without end over an interval without end
            moves[name] /= width if width > 0 else np.nan
    entries: list[dict[str, Any]] = [
        {"kind": kind, "value": value, "runs": int(rows.sum())}
        | {name: (size_or_none if name in SIZES else finite_or_none)(values[i]) for name, values in refits.items()}
        | {"moves": {name: finite_or_none(values[i]) for name, values in moves.items()}}
        for i, (kind, value, rows) in enumerate(groups)
    ]

    def far(entry: dict[str, Any]) -> tuple[float, str]:
        moved = [(abs(move), name) for name, move in entry["moves"].items() if move is not None]
        with np.errstate(divide="ignore"):  # an optimum of zero parameters
            away = -1.0 if entry["N"] is None else abs(float(np.log(entry["N"] / full["N"][0])))
        return max(moved, default=(away, "N"))

    most = max(entries, key=far)
    return {"left_out": entries, "most": None if far(most)[0] < 0 else most | {"moved": far(most)[1]}}


def _levels(table: RunTable, profiles: IsoflopProfiles) -> tuple[np.ndarray, Array]:
    """Label (n,) and FLOPs of the budgets; bins of COARSE_BIN where the table has fewer than two."""
    if len(profiles.budgets_) >= 2:
        return profiles.labels_, profiles.budgets_
    labels = binned_levels(table.flops, COARSE_BIN)
    means = [np.log10(table.flops[labels == level]).mean() for level in range(labels.max() + 1)]
    return labels, np.array([float(10**mean) for mean in means])


def _step(
    table: RunTable,
    train: np.ndarray,
    test: np.ndarray,
    budget: float,
    profiles: IsoflopProfiles,
    full: Law,
    target: float,
) -> dict[str, Any]:
    if not train.any():
        raise InputError("no cheaper run to fit.")
    cheap, held = table.where(train), table.where(test)
    law = full.clone()
    law.fit(cheap.N, cheap.D, cheap.loss, weight=cheap.weight, loss_se=cheap.known_se)
    law.flops_per_token_ = full.flops_per_token_  # one convention for all steps
    if not law.converged_:
        raise InputError("the fit did not converge.")
    beyond = _errors(law, table.where(table.flops >= held.flops.min()))
    step: dict[str, Any] = {
        "held_out_flops": budget,
        "runs_fitted": len(cheap),
        "converged": law.converged_,
        **_errors(law, held),
        **{f"{name}_beyond": value for name, value in beyond.items() if name != "runs_predicted"},
        "runs_beyond": beyond["runs_predicted"],
        "tokens_per_parameter_at_target": size_or_none(compute_optimal(law, target).ratio[0]),
        "tokens_per_parameter_at_target_full": size_or_none(compute_optimal(full, target).ratio[0]),
        "predicted": np.asarray(law.predict(held.N, held.D)).tolist(),
        "measured": held.loss.tolist(),
        "loss_inside": _inside(law, cheap, held) if full.draws_ is not None else None,
    }
    two = _profiles(cheap, profiles, cheap.budget)
    for name, C in (("at_target", target), ("predicted", budget)):
        N, D = (None if one is None else float(one.predict(C)) for one in (two.N_law_, two.D_law_))
        step[f"tokens_per_parameter_{name}_isoflop"] = D / N if N and D else None
    step["N_predicted_isoflop"] = N
    vertex = _profiles(held, profiles, np.full(len(held), budget)).profiles_[0]
    N, D = (vertex.N_best, vertex.D_best) if vertex.accepted else (None, None)
    # The law's optimum is asked at the FLOPs of the held-out vertex's own N and D.
    spend = law.flops_per_token_ or FlopsPerToken()
    best = compute_optimal(law, spend(np.array(N)) * D) if N and D else None
    return step | {
        "N_predicted": best and size_or_none(best.N[0]),
        "N_measured": N,
        "tokens_per_parameter_predicted": best and size_or_none(best.ratio[0]),
        "tokens_per_parameter_measured": D / N if N and D else None,
    }


def _errors(law: Law, runs: RunTable) -> dict[str, Any]:
    error = np.asarray(law.predict(runs.N, runs.D)) / runs.loss - 1.0
    return {"runs_predicted": len(runs), "loss_error": float(np.abs(error).mean()), "loss_bias": float(error.mean())}


def _inside(law: Law, cheap: RunTable, held: RunTable) -> float | None:
    """Share of the held-out runs within the law's own 95 % prediction interval; None without one."""
    try:
        law.bootstrap(DRAWS, resampled_together(cheap.group, cheap.run_id, law.problem_.free))
    except InputError:
        return None
    if not law.bootstrap_["resamples"]:
        return None
    low, high = law.predict_interval(held.N, held.D, kind="run").T
    return float(((low <= held.loss) & (held.loss <= high)).mean())


def _profiles(runs: RunTable, like: IsoflopProfiles, budget: Array) -> IsoflopProfiles:
    """Profiles of some runs, by the method of `like`."""
    return IsoflopProfiles(like.method).fit(runs.N, runs.D, runs.loss, runs.flops, budget, runs.weight)


def _identifies(law: Law, runs: RunTable) -> bool:
    try:
        enough(np.unique(np.stack([runs.N, runs.D]), axis=1).shape[1], len(law.names), "the law")
        identifiable(runs.N, runs.D)
    except InputError:
        return False
    return True


def _answers(law: Law, constants: dict[str, Array], target: float) -> dict[str, Array]:
    """Exponents, and the optimum at the target, under other constants of the law, each (refits,)."""
    other = copy(law)
    other.draws_ = constants
    best = compute_optimal(other, target).draws
    exponents = {name: constants[name] for name in law.exponent_names}
    return exponents | {"N": best["N"][0], "tokens_per_parameter": best["ratio"][0], "loss": best["loss"][0]}


def _logs(answers: dict[str, Array]) -> dict[str, Array]:
    """What moves are counted in: exponents, and the logarithms of N and D/N."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: np.log(values) if name in SIZES else values for name, values in answers.items() if name != "loss"}
