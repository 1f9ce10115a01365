"""Backtests: predict larger-budget runs from cheaper ones, and leave out one size or one budget at a time.

A law can predict loss within one percent and miss tokens per parameter by a factor of two.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from ..allocation.allocation import compute_optimal, own_convention, unlimited
from ..errors import Array, InputError
from ..flops import FlopsPerToken
from ..forecasting.forecaster import GAP, determines
from ..forecasting.mixture import FormMixture
from ..table import RunTable
from ..uncertainty import percentile_interval, resampled_together
from .approaches import Law, finite_or_none, size_or_none
from .envelope import Envelope
from .isoflop import IsoflopProfiles, binned_levels

COARSE_BIN = 0.5  # decades of C, for tables with fewer than two or over MOST_BUDGETS budgets; chosen by hand
MOST_BUDGETS = 20
RUNG_GAP = 0.02  # in log N; sizes closer than this are one rung
SIZES = ("N", "tokens_per_parameter")
DRAWS = 100  # resamples for the prediction intervals of a step
PREDICTIONS = {"parametric": "N_predicted", "isoflop": "N_predicted_isoflop", "envelope": "N_predicted_envelope"}


def backtest(
    table: RunTable, profiles: IsoflopProfiles, law: Law | None, target: float, mixture: FormMixture | None = None
) -> dict[str, Any]:
    """Predict the runs of each budget, and the optimum at `target` FLOPs, by approaches fitted to cheaper runs.

    Returns "steps" (one per budget), "reason" (why a step is missing), "influence" (of `leave_one_out`), "tested" (of
    `_tested`) and the last step's fields. loss_error (mean absolute) and loss_bias (positive: predicted too high) are
    relative; suffix _beyond is over all runs from this budget on. The best N and tokens_per_parameter have the suffix
    _predicted (by approach 3), _predicted_isoflop (by approach 2) or _measured.
    """
    empty: dict[str, Any] = {"steps": [], "reason": "no parametric law was fitted", "influence": None, "tested": None}
    if law is None:
        return empty
    labels, budgets = _levels(table, profiles)
    influence = leave_one_out(table, law, labels, budgets, target)
    steps, tests, reason = [], [], "the runs have only one budget" if len(budgets) < 2 else ""
    for level in range(1, len(budgets)):
        test = labels == level
        train = (table.flops < table.flops[test].min()) & ~test
        try:
            refit = _refit(table.where(train), law)
            steps.append(
                _step(refit, table.where(train), table.where(test), float(budgets[level]), profiles, law, target)
            )
            beyond = table.where(table.flops >= table.flops[test].min())
            runs, error, bias = _errors(refit, beyond).values()
            steps[-1] |= {"runs_beyond": runs, "loss_error_beyond": error, "loss_bias_beyond": bias}
            if mixture is None and _spans_budgets(table.flops[train]):
                tests.append(_by_law(refit, table.where(train), beyond, law.draws_ is not None))
        except InputError as error:
            reason = f"below {budgets[level]:.3g} FLOPs: {str(error).rstrip('.')}"
    if not steps:
        return empty | {"reason": reason, "influence": influence}
    if mixture is not None:
        tests = _by_mixture(mixture)
    held_highest = steps[-1]["held_out_flops"] == float(budgets[-1])
    result = {"steps": steps, "reason": "" if held_highest else reason, "influence": influence}
    return result | {"tested": _tested(steps, tests, mixture is not None)} | steps[-1]


def leave_one_out(table: RunTable, law: Law, labels: np.ndarray, budgets: Array, target: float) -> dict[str, Any]:
    """Refit the law without each size and each budget in turn. Returns "left_out", an entry per refit, and "most".

    "moves" are changes of exponents and, at `target` FLOPs, of the best log N and log D/N, over the widths of the full
    fit's intervals. "most" is the entry with the largest move or, without intervals, the largest change of log N.
    """
    # Number the rungs by rising N.
    order = np.argsort(table.N, kind="stable")
    rungs = np.empty(len(table), dtype=int)
    rungs[order] = np.concatenate([[0], np.cumsum(np.diff(np.log(table.N[order])) > RUNG_GAP)])
    groups = [
        ("size", float(np.exp(np.log(table.N[rungs == rung]).mean())), rungs == rung) for rung in range(rungs.max() + 1)
    ]
    groups += [("budget", float(C), labels == level) for level, C in enumerate(budgets)]
    left_out = np.stack([rows for _, _, rows in groups])
    rest = ~left_out & (table.weight > 0)
    usable = np.array([determines(law, {name: values[rows] for name, values in law.data_.items()}) for rows in rest])
    # Leaving runs out is a weight of zero, so all refits are one call of the batched solver.
    refits = _answers(law, law.refit(~(left_out & usable[:, None])), target)
    refits = {name: np.where(usable, values, np.nan) for name, values in refits.items()}
    full = _answers(law, {name: np.array([value]) for name, value in law.constants_.items()}, target)
    moves = {name: values - _logs(full)[name] for name, values in _logs(refits).items()}
    draws = {} if law.draws_ is None else _answers(law, law.draws_, target)
    ends = _logs({name: np.array(percentile_interval(values)) for name, values in draws.items()})
    for name in moves:
        width = ends[name][1] - ends[name][0] if name in ends else np.nan
        with np.errstate(invalid="ignore"):  # infinite move over infinite interval
            moves[name] /= width if width > 0 else np.nan
    entries: list[dict[str, Any]] = [
        {"kind": kind, "value": value, "runs": int(rows.sum())}
        | {name: (size_or_none if name in SIZES else finite_or_none)(values[i]) for name, values in refits.items()}
        | {"moves": {name: finite_or_none(values[i]) for name, values in moves.items()}}
        for i, (kind, value, rows) in enumerate(groups)
    ]

    def largest_move(entry: dict[str, Any]) -> tuple[float, str]:
        sizes = [(abs(move), name) for name, move in entry["moves"].items() if move is not None]
        with np.errstate(divide="ignore"):  # an optimum of zero parameters
            distance = -1.0 if entry["N"] is None else abs(float(np.log(entry["N"] / full["N"][0])))
        return max(sizes, default=(distance, "N"))

    farthest = max(entries, key=largest_move)
    return {
        "left_out": entries,
        "most": None if largest_move(farthest)[0] < 0 else farthest | {"moved": largest_move(farthest)[1]},
    }


def _levels(table: RunTable, profiles: IsoflopProfiles) -> tuple[np.ndarray, Array]:
    """Return the index (n,) of each run's budget, and the budgets in FLOPs.

    Runs with fewer than 2 or more than MOST_BUDGETS budgets are binned by FLOPs.
    """
    if 2 <= len(profiles.budgets_) <= MOST_BUDGETS:
        return profiles.labels_, profiles.budgets_
    labels = binned_levels(table.flops, COARSE_BIN)
    means = [np.log10(table.flops[labels == level]).mean() for level in range(labels.max() + 1)]
    return labels, np.array([float(10**mean) for mean in means])


def _refit(cheap: RunTable, full: Law) -> Law:
    if not len(cheap):
        raise InputError("there is no cheaper run to fit.")
    law = full.clone()
    law.fit(cheap.N, cheap.D, cheap.loss, weight=cheap.weight, loss_se=cheap.known_se)
    law.flops_per_token_ = full.flops_per_token_  # one convention for all steps
    if not law.converged_:
        raise InputError("the fit did not converge.")
    return law


def _step(
    law: Law,
    cheap: RunTable,
    held: RunTable,
    budget: float,
    profiles: IsoflopProfiles,
    full: Law,
    target: float,
) -> dict[str, Any]:
    """Predict `held` runs of one budget from `cheap` runs. `law` is fitted to the cheap runs, `full` to all runs."""
    step: dict[str, Any] = {
        "held_out_flops": budget,
        "runs_fitted": len(cheap),
        "converged": law.converged_,
        **_errors(law, held),
        "tokens_per_parameter_at_target": size_or_none(compute_optimal(law, target).ratio[0]),
        "tokens_per_parameter_at_target_full": size_or_none(compute_optimal(full, target).ratio[0]),
        "predicted": np.asarray(law.predict(held.N, held.D)).tolist(),
        "measured": held.loss.tolist(),
    }
    cheap_profiles = _profiles(cheap, profiles, cheap.budget)
    for name, C in (("at_target", target), ("predicted", budget)):
        N, D = (
            None if size_law is None else float(size_law.predict(C))
            for size_law in (cheap_profiles.N_law_, cheap_profiles.D_law_)
        )
        step[f"tokens_per_parameter_{name}_isoflop"] = D / N if N and D else None
    step["N_predicted_isoflop"] = N
    envelope_law = Envelope().fit(cheap.N, cheap.D, cheap.loss, cheap.flops, cheap.budget).N_law_
    step["N_predicted_envelope"] = envelope_law and float(envelope_law.predict(budget))
    vertex = _profiles(held, profiles, np.full(len(held), budget)).profiles_[0]
    N, D = (vertex.N_best, vertex.D_best) if vertex.accepted else (None, None)
    # Evaluate the law's optimum at the FLOPs of the held-out vertex's N and D.
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


def _by_law(law: Law, cheap: RunTable, beyond: RunTable, resample: bool) -> dict[str, Any]:
    """Test the law on runs `beyond`: relative errors, and with `resample` the share of losses in 95 % intervals."""
    ends = None
    if resample:
        with suppress(InputError):
            law.bootstrap(DRAWS, resampled_together(cheap.group, cheap.run_id, law.problem_.free))
            ends = law.predict_interval(beyond.N, beyond.D, kind="run").T if law.bootstrap_["resamples"] else None
    return _ahead(
        len(cheap), float(cheap.flops.max()), beyond.flops, beyond.loss, law.predict(beyond.N, beyond.D), ends
    )


def _by_mixture(mixture: FormMixture) -> list[dict[str, Any]]:
    """Test the mixture fitted below each cut-off on the runs above it, from the lowest cut-off with two budgets."""
    tests = []
    for k in reversed(range(len(mixture.cut_offs_))):
        cut = mixture.cut_offs_[k]
        earlier = mixture.before(k) if _spans_budgets(mixture.reach_[cut.fitted]) else None
        if earlier is not None:
            N, D, loss = (mixture.data_[name][cut.tested] for name in ("N", "D", "loss"))
            predicted, *ends = earlier.forecast(N, D).to_numpy().T
            interval = ends if mixture.draws else None
            flops = mixture.reach_[cut.tested]
            tests.append(_ahead(int(cut.fitted.sum()), cut.reach, flops, loss, predicted, interval))
    return tests


def _ahead(fitted: int, top: float, flops: Array, loss: Array, predicted: Array, ends: Any) -> dict[str, Any]:
    inside = None if ends is None else float(np.mean((ends[0] <= loss) & (loss <= ends[1])))
    error = (predicted / loss - 1.0).tolist()
    return {"flops": top, "runs_fitted": fitted, "factor": (flops / top).tolist(), "error": error, "inside": inside}


def _tested(steps: list[dict[str, Any]], ahead: list[dict[str, Any]], mixed: bool) -> dict[str, Any] | None:
    """Summarise the predictions of all steps.

    "ahead" has an entry per step: for each predicted run the relative "error" and the "factor" of its FLOPs over
    "flops", those of the largest run fitted; "inside" is the share of losses in the intervals. "size_error" is the root
    mean square error of each approach's best log N, over steps where all have one; "best" is the approach with the
    lowest.
    """
    approaches = {key: name for key, name in PREDICTIONS.items() if any(step[name] for step in steps)}
    sized = [step for step in steps if step["N_measured"] and all(step[name] for name in approaches.values())]
    size_error = {
        key: float(np.sqrt(np.mean([np.log(step[name] / step["N_measured"]) ** 2 for step in sized])))
        for key, name in approaches.items()
        if sized
    }
    inside = [test["inside"] for test in ahead if test["inside"] is not None]
    return {
        "by": "mixture" if mixed else "parametric",
        "reach": max((max(test["factor"]) for test in ahead), default=1.0),
        "predictions": sum(len(test["factor"]) for test in ahead),
        "error": float(np.mean([np.mean(np.abs(test["error"])) for test in ahead])) if ahead else None,
        "bias": [float(np.mean(test["error"])) for test in ahead],
        "inside": float(np.mean(inside)) if inside else None,
        "size_error": size_error,
        "best": min(size_error, key=lambda key: size_error[key], default=None),
        "ahead": ahead,
    }


def _spans_budgets(flops: Array) -> bool:
    """Return whether runs span a factor of compute; runs of one budget do not show how losses fall with it."""
    return bool(flops.max() > GAP * (1.0 - 1e-4) * flops.min())  # a budget's runs end at whole steps


def _profiles(runs: RunTable, like: IsoflopProfiles, budget: Array) -> IsoflopProfiles:
    return IsoflopProfiles(like.method).fit(runs.N, runs.D, runs.loss, runs.flops, budget, runs.weight)


@np.errstate(all="ignore")  # a term that vanished gives zeros and infinities
def _answers(law: Law, constants: dict[str, Array], target: float) -> dict[str, Array]:
    """Return the exponents and the best N, D/N and loss at `target` FLOPs by name, for constants (refits,)."""
    N, D, loss = (values[0] for values in unlimited(law, constants, np.array([[target]]), own_convention(law)))
    exponents = {name: constants[name] for name in law.exponent_names}
    return exponents | {"N": N, "tokens_per_parameter": D / N, "loss": loss + 0.0 * N}


def _logs(answers: dict[str, Array]) -> dict[str, Array]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: np.log(values) if name in SIZES else values for name, values in answers.items() if name != "loss"}
