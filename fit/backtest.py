"""Rolling backtest: fit on the cheaper budgets, predict the dearer ones, and compare with what was measured.

Special here: the error of *allocation* is reported beside the error of loss, because a law can predict loss within one
percent and still misplace tokens per parameter by a factor of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .chinchilla import ChinchillaLaw
from .errors import Array, InputError
from .isoflop import IsoflopProfiles
from .table import RunTable

COARSE_BIN = 0.5  # decades, where the table has no budgets


def backtest(table: RunTable, profiles: IsoflopProfiles, law: ChinchillaLaw | None, target: float) -> dict[str, Any]:
    """Every step fits approach 3 (and 2 where it can) on runs cheaper than a budget and predicts that budget's runs.

    Returns {"steps": [...], "reason": ...} and, copied to the top, the fields of the last step, which holds out the
    highest budget: loss_error (mean absolute, relative), loss_bias (mean, relative; positive: predicted too high),
    N_predicted and N_measured, tokens_per_parameter_predicted and _measured at the held-out budget, and
    tokens_per_parameter_at_target and _at_target_full.
    """
    labels, budgets = profiles.labels_, profiles.budgets_
    if len(budgets) < 2:
        low = np.log10(table.flops.min())
        bins = np.floor((np.log10(table.flops) - low) / COARSE_BIN).astype(int)
        values, labels = np.unique(bins, return_inverse=True)
        labels = labels.ravel()
        budgets = np.array([float(np.exp(np.log(table.flops[labels == level]).mean())) for level in range(len(values))])
    steps, reason = [], "there is one budget only" if len(budgets) < 2 else ""
    for level in range(1, len(budgets)):
        test = labels == level
        train = (table.flops < table.flops[test].min()) & ~test
        try:
            steps.append(_step(table, train, test, float(budgets[level]), law, target))
        except InputError as error:
            reason = f"below {budgets[level]:.3g} FLOPs: {str(error).rstrip('.')}"
    if not steps:
        return {"steps": [], "reason": reason}
    held_highest = steps[-1]["held_out_flops"] == float(budgets[-1])
    return {"steps": steps, "reason": "" if held_highest else reason, **steps[-1]}


def _step(
    table: RunTable, train: np.ndarray, test: np.ndarray, budget: float, full: ChinchillaLaw | None, target: float
) -> dict[str, Any]:
    if not train.any():
        raise InputError("no cheaper run to fit.")
    N, D, loss, flops = table.N, table.D, table.loss, table.flops
    law = ChinchillaLaw(full.delta if full else 1e-3).fit(N[train], D[train], loss[train], table.weight[train])
    error = np.asarray(law.predict(N[test], D[test])) / loss[test] - 1.0
    held = (
        IsoflopProfiles().fit(N[test], D[test], loss[test], flops[test], np.full(int(test.sum()), budget)).profiles_[0]
    )
    step: dict[str, Any] = {
        "held_out_flops": budget,
        "runs_fitted": int(train.sum()),
        "runs_predicted": int(test.sum()),
        "converged": law.converged_,
        "loss_error": float(np.abs(error).mean()),
        "loss_bias": float(error.mean()),
        "predicted": np.asarray(law.predict(N[test], D[test])).tolist(),
        "measured": loss[test].tolist(),
        "N_predicted": None,
        "N_measured": None,
        "N_predicted_isoflop": _isoflop_prediction(table, train, budget),
        "tokens_per_parameter_predicted": None,
        "tokens_per_parameter_measured": None,
        "tokens_per_parameter_at_target": _finite(law.optimal(target).ratio),
        "tokens_per_parameter_at_target_full": _finite(full.optimal(target).ratio) if full else None,
    }
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


def _isoflop_prediction(table: RunTable, train: np.ndarray, budget: float) -> float | None:
    lower = IsoflopProfiles().fit(
        table.N[train], table.D[train], table.loss[train], table.flops[train], table.budget[train], table.weight[train]
    )
    return None if lower.N_law_ is None else float(lower.N_law_.predict(budget))


def _finite(values: Array) -> float | None:
    return float(values[0]) if np.isfinite(values[0]) else None
