"""How far to trust the fits: predict dearer runs from cheaper ones, and leave out one rung or one budget at a time.

Special here:
- The error of *allocation* is reported beside the error of loss, because a law can predict loss within one percent and
  still misplace tokens per parameter by a factor of two.
- Leaving runs out is a weight of zero, so all refits of the influence are one call of the batched solver.
- A move is counted in widths of the full fit's 95 % interval (in the logarithm for N and D/N): beyond a half, one rung
  decides more than the interval admits. Influence is not error: the ends of a design move a fit most, whoever is off.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..allocation.allocation import optimum
from ..errors import Array, InputError, enough, identifiable
from ..laws.chinchilla import ChinchillaLaw
from ..table import RunTable
from ..uncertainty import percentile_interval, resampled_together
from .isoflop import IsoflopProfiles

COARSE_BIN = 0.5  # decades, where the table has no budgets
RUNG_GAP = 0.02  # log N; sizes nearer than this are one rung
DRAWS = 200  # resamples behind the prediction intervals of a step
MOVED = ("alpha", "beta", "N", "tokens_per_parameter")


def backtest(table: RunTable, profiles: IsoflopProfiles, law: ChinchillaLaw | None, target: float) -> dict[str, Any]:
    """Every step fits approach 3 (and 2 where it can) on runs cheaper than a budget and predicts that budget's runs.

    Returns {"steps": [...], "reason": ..., "influence": ...} and, copied to the top, the fields of the last step, which
    holds out the highest budget: loss_error (mean absolute, relative), loss_bias (mean, relative; positive: predicted
    too high), the same over all runs of the budget and beyond (_beyond), N_predicted (by approach 3), _isoflop (by
    approach 2) and N_measured, loss_inside (share of held-out runs within the 95 % prediction interval, where
    the full fit has a bootstrap), tokens_per_parameter likewise, tokens_per_parameter_at_target and _at_target_full.
    `influence` is None without a law.
    """
    labels, budgets = _levels(table, profiles)
    influence = None if law is None else leave_one_out(table, law, labels, budgets, target)
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


def hold_out(table: RunTable, below: float, target: float, full: ChinchillaLaw | None = None) -> dict[str, Any]:
    """Fit approach 3 on the runs of less than `below` FLOPs and predict all others: the fields of a step that need no
    budgets. `full` gives the fit's options and what all runs say at the target.

    Raises InputError where the cheaper runs cannot identify the law or no run is left to predict.
    """
    train = table.flops < below
    if train.all():
        raise InputError(f"below is {below:.3g} FLOPs; it must be at most the largest run, {table.flops.max():.3g}.")
    law = _fit(table, train, full)
    return {"runs_fitted": int(train.sum()), "converged": law.converged_} | _errors(law, table, ~train, target, full)


def leave_one_out(
    table: RunTable, law: ChinchillaLaw, labels: np.ndarray, budgets: Array, target: float
) -> dict[str, Any]:
    """Approach 3 without each rung (the runs of one size) and without each budget: {"left_out": [...], "most": ...}.

    Each entry: kind ("size" or "budget"), value (N or FLOPs), runs, alpha, beta, N, tokens_per_parameter and loss at
    the target (None where the rest cannot identify the law), and moves of MOVED. `most` is the entry with the largest
    move (without intervals: of log N), plus `moved`, the name of what moved; None where there is none.
    """
    rungs = _rungs(table.N)
    sizes = [float(np.exp(np.log(table.N[rungs == rung]).mean())) for rung in range(rungs.max() + 1)]
    groups = [("size", size, rungs == rung) for rung, size in enumerate(sizes)]
    groups += [("budget", float(C), labels == level) for level, C in enumerate(budgets)]
    left_out = np.stack([rows for _, _, rows in groups])
    usable = np.array([_identifies(table, ~rows & (table.weight > 0)) for rows in left_out])
    refits = _answers(law.refit(~(left_out & usable[:, None])), target)
    refits = {name: np.where(usable, values, np.nan) for name, values in refits.items()}
    full = _answers({name: np.array([value]) for name, value in law.constants_.items()}, target)
    widths = _widths(law, target)
    entries = [
        {"kind": kind, "value": value, "runs": int(rows.sum())}
        | _moved({name: values[i] for name, values in refits.items()}, full, widths)
        for i, (kind, value, rows) in enumerate(groups)
    ]
    return {"left_out": entries, "most": _most(entries, full)}


def _levels(table: RunTable, profiles: IsoflopProfiles) -> tuple[np.ndarray, Array]:
    """Label (n,) and FLOPs of the budgets; bins of COARSE_BIN where the table has fewer than two."""
    if len(profiles.budgets_) >= 2:
        return profiles.labels_, profiles.budgets_
    log = np.log10(table.flops)
    _, labels = np.unique(np.floor((log - log.min()) / COARSE_BIN).astype(int), return_inverse=True)
    labels = labels.ravel()
    return labels, np.array([float(10 ** log[labels == level].mean()) for level in range(labels.max() + 1)])


def _fit(table: RunTable, rows: np.ndarray, full: ChinchillaLaw | None) -> ChinchillaLaw:
    if not rows.any():
        raise InputError("no cheaper run to fit.")
    law = ChinchillaLaw() if full is None else full.clone()
    se = table.loss_se[rows] if law.objective == "se" else None
    return law.fit(table.N[rows], table.D[rows], table.loss[rows], table.weight[rows], se)


def _errors(
    law: ChinchillaLaw, table: RunTable, rows: np.ndarray, target: float, full: ChinchillaLaw | None
) -> dict[str, Any]:
    error = np.asarray(law.predict(table.N[rows], table.D[rows])) / table.loss[rows] - 1.0
    return {
        "runs_predicted": int(rows.sum()),
        "loss_error": float(np.abs(error).mean()),
        "loss_bias": float(error.mean()),
        "tokens_per_parameter_at_target": _finite(law.optimal(target).ratio),
        "tokens_per_parameter_at_target_full": _finite(full.optimal(target).ratio) if full else None,
    }


def _inside(law: ChinchillaLaw, table: RunTable, train: np.ndarray, test: np.ndarray) -> float | None:
    """Share of the held-out runs within the law's own 95 % prediction interval for a new run; None without one."""
    try:
        law.bootstrap(DRAWS, resampled_together(table.group[train], table.run_id[train], law.problem_.free))
    except InputError:
        return None
    low, high = law.predict_interval(table.N[test], table.D[test], kind="run").T
    return float(((low <= table.loss[test]) & (table.loss[test] <= high)).mean())


def _step(
    table: RunTable,
    train: np.ndarray,
    test: np.ndarray,
    budget: float,
    profiles: IsoflopProfiles,
    full: ChinchillaLaw | None,
    target: float,
) -> dict[str, Any]:
    law = _fit(table, train, full)
    beyond = _errors(law, table, table.flops >= table.flops[test].min(), target, full)
    step: dict[str, Any] = {
        "held_out_flops": budget,
        "runs_fitted": int(train.sum()),
        "converged": law.converged_,
        **_errors(law, table, test, target, full),
        "runs_beyond": beyond["runs_predicted"],
        "loss_error_beyond": beyond["loss_error"],
        "loss_bias_beyond": beyond["loss_bias"],
        "predicted": np.asarray(law.predict(table.N[test], table.D[test])).tolist(),
        "measured": table.loss[test].tolist(),
        "loss_inside": _inside(law, table, train, test) if full is not None and full.draws_ is not None else None,
        "N_predicted": None,
        "N_measured": None,
        "tokens_per_parameter_predicted": None,
        "tokens_per_parameter_measured": None,
        **_isoflop_prediction(table, train, budget, profiles, target),
    }
    held = _profiles(table, test, profiles, np.full(int(test.sum()), budget)).profiles_[0]
    if held.accepted and held.N_best and held.D_best:
        # The law's optimum is one of C = 6ND, so it is asked at the held-out vertex's own 6ND, whatever the table's
        # convention.
        best = law.optimal(6.0 * held.N_best * held.D_best)
        step |= {
            "N_predicted": _finite(best.N),
            "N_measured": held.N_best,
            "tokens_per_parameter_predicted": _finite(best.ratio),
            "tokens_per_parameter_measured": held.D_best / held.N_best,
        }
    return step


def _profiles(table: RunTable, rows: np.ndarray, like: IsoflopProfiles, budget: Array) -> IsoflopProfiles:
    """Profiles of some runs, by the method of `like`."""
    t = table
    return IsoflopProfiles(like.method).fit(t.N[rows], t.D[rows], t.loss[rows], t.flops[rows], budget, t.weight[rows])


def _isoflop_prediction(
    table: RunTable, train: np.ndarray, budget: float, like: IsoflopProfiles, target: float
) -> dict[str, float | None]:
    lower = _profiles(table, train, like, table.budget[train])
    N, D = lower.N_law_, lower.D_law_
    if N is None or D is None:
        names = ("N_predicted", "tokens_per_parameter_predicted", "tokens_per_parameter_at_target")
        return {f"{name}_isoflop": None for name in names}
    return {
        "N_predicted_isoflop": float(N.predict(budget)),
        "tokens_per_parameter_predicted_isoflop": float(D.predict(budget) / N.predict(budget)),
        "tokens_per_parameter_at_target_isoflop": float(D.predict(target) / N.predict(target)),
    }


def _rungs(N: Array) -> np.ndarray:
    """Label (n,) of the rung of each run, by rising N."""
    order = np.argsort(N, kind="stable")
    labels = np.empty(len(N), dtype=int)
    labels[order] = np.concatenate([[0], np.cumsum(np.diff(np.log(N[order])) > RUNG_GAP)])
    return labels


def _identifies(table: RunTable, rows: np.ndarray) -> bool:
    try:
        enough(np.unique(np.stack([table.N, table.D])[:, rows], axis=1).shape[1], 5, "the law")
        identifiable(table.N[rows], table.D[rows])
    except InputError:
        return False
    return True


def _answers(constants: dict[str, Array], target: float) -> dict[str, Array]:
    """Exponents and the optimum at the target, each (refits,)."""
    N, D, loss = optimum(target, constants)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "alpha": constants["alpha"],
            "beta": constants["beta"],
            "N": N,
            "tokens_per_parameter": D / N,
            "loss": loss,
        }


def _widths(law: ChinchillaLaw, target: float) -> dict[str, float]:
    """Width of each 95 % interval, of logarithms for N and D/N; empty without a bootstrap."""
    if law.draws_ is None:
        return {}
    ends = {name: percentile_interval(values) for name, values in _answers(law.draws_, target).items()}
    return {name: float(np.subtract(*_scale(name, np.array(ends[name][::-1])))) for name in MOVED}


def _scale(name: str, value: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return value if name in ("alpha", "beta") else np.log(value)


def _moved(found: dict[str, Any], full: dict[str, Array], widths: dict[str, float]) -> dict[str, Any]:
    """One entry's values, and how far each of MOVED went in widths of its interval."""
    moves = {}
    for name in MOVED:
        distance = float(_scale(name, found[name]) - _scale(name, full[name][0]))
        moves[name] = _number(distance / widths[name]) if widths.get(name, 0.0) > 0 else None
    return {name: _number(value) for name, value in found.items()} | {"moves": moves}


def _most(entries: list[dict[str, Any]], full: dict[str, Array]) -> dict[str, Any] | None:
    """The entry that moves the fit most, and what of it."""

    def far(entry: dict[str, Any]) -> tuple[float, str]:
        moves = [(abs(move), name) for name, move in entry["moves"].items() if move is not None]
        known = entry["N"] is not None
        return max(moves, default=(abs(float(np.log(entry["N"] / full["N"][0]))) if known else -1.0, "N"))

    most = max(entries, key=far)
    return None if far(most)[0] < 0 else most | {"moved": far(most)[1]}


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _finite(values: Array) -> float | None:
    return _number(values[0])
