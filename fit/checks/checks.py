"""Plain warnings about a fit, worst first. `doctor.py` has the checks that need the table alone."""

from __future__ import annotations

import numpy as np

from ..allocation.allocation import own_convention, unlimited
from ..approaches.approaches import Law
from ..approaches.isoflop import IsoflopProfiles
from ..approaches.recipes import kinds
from ..formatting import UNDETERMINED, amount, count, interval, scientific
from ..results import Analysis
from ..table import RunTable
from .doctor import Warning, Warnings, examine, extrapolation, first_few
from .outliers import ROUNDING, find_outliers
from .verdict import AGREE_WITHIN

# Thresholds chosen by hand unless a source is named.
NAMED = 5  # outliers that a warning lists
# Smallest share of a backtest's losses within their 95 % intervals; the runs of one step err together, so that 2 % of
# tables that follow the law (5 budgets of 6 sizes, 0.3 % noise) are below it.
INSIDE = 0.7
HEAVY = 0.1  # weight from which a form of the mixture counts
MANY_OUTLIERS = 0.05  # share of the runs from which outliers are assumed to have a common cause
# Limits of a fit that are not faults come last.
MILD = (
    "few_runs", "few_sizes", "narrow_span", "flop_convention", "vertex_uncertain", "dropped_worst", "logged_steps",
    "derived_d",
)  # fmt: skip


def run_checks(a: Analysis) -> tuple[Warning, ...]:
    """Return all warnings: approaches without an answer, faults of the fit and the table, and, last, mild limits."""
    law, recipes, verdict = a.law, a.recipes, a.verdict
    warnings = [
        Warning(f"no_{item.key}", f"{item.title} has no answer: {item.reason.rstrip('.')}.")
        for item in (*a.approaches.values(), *([a.mixture] if a.mixture else []))
        if not item.available
    ]
    warnings += [] if law is None else _solver(law)
    # The fit of a profile already reports a lowest loss at an edge; do not report it twice.
    warnings += [w for w in examine(a.table) if w.code != "edge_minimum"]
    warnings += [*_answer(a), *_backtest(a)]
    if len(recipes) > 1:
        base, *others = (item.recipe for item in recipes)
        warnings.append(
            Warning(
                "recipes_apart",
                f"The table has runs of {len(recipes)} {kinds(a.table)}; all other results are for {base} alone "
                f"({len(a.table)} runs), with separate laws for {', '.join(others)}.",
            )
        )
    warnings += [] if law is None else [*_outliers(a, law), *_exact(law)]
    if verdict.agree is False:
        reason = f" Possible reasons: {' '.join(verdict.suspects)}" if verdict.suspects else ""
        message = f"{verdict.sentence} Rely on none of them until the reason is known.{reason}"
        warnings.append(Warning("approaches_disagree", message))
    warnings += [*_profiles(a.profiles), *([] if law is None else _few_trunks(a.table, law))]
    return tuple(sorted(warnings, key=lambda w: w.code in MILD))


def _solver(law: Law) -> Warnings:
    tried, agree = law.starts_["tried"], law.starts_["agreeing"]
    if agree < 0.9 * tried:
        yield Warning(
            "starts_disagree",
            f"{agree} of {tried} starts of the optimizer reach the same parametric law; the runs hardly determine "
            "it, so add runs of other N and D.",
        )
    if law.degenerate_:
        what = {law.irreducible: f"the irreducible loss {law.irreducible} is zero"}
        what |= {name: f"{term} vanished" for name, term in law.vanishing.items()}
        held = {name: f"{name} = {law.constants_[name]:.3g} is at the end of its range" for name in law.degenerate_}
        yield Warning(
            "degenerate_parameter",
            f"In the parametric fit {' and '.join((held | what)[name] for name in held)}; its optimum cannot be "
            "trusted without runs over a wider range of N and D.",
        )
    if law.draws_ is not None and not law.degenerate_ and (lost := law.bootstrap_["unconverged"]):
        yield Warning(
            "bootstrap_unconverged", f"{lost} bootstrap refits did not converge and are left out of the intervals."
        )


def _answer(a: Analysis) -> Warnings:
    lead, C = a.lead, a.targets[0]
    span = interval(lead.at(C).N_ci, count) if lead.available else ""
    if a.resamples and span in ("no interval", UNDETERMINED):
        reason = "spans more than five decades" if span == UNDETERMINED else "could not be computed from so few runs"
        yield Warning("no_interval", f"The {lead.key} interval of N* at {scientific(C)} FLOPs {reason}; add runs.")
    if lead.mixture is not None:
        forms, sizes = lead.mixture.weights_, lead.mixture.sizes([C], lead.flops_per_token or 6.0)
        heavy = sorted((float(N[0]), name) for name, N in sizes.items() if forms[name] >= HEAVY)
        if heavy and heavy[-1][0] > AGREE_WITHIN * heavy[0][0]:
            ends = " and ".join(
                f"{count(N)} ({name}, weight {forms[name]:.0%})" for N, name in heavy[:: len(heavy) - 1]
            )
            yield Warning(
                "forms_disagree",
                f"At {scientific(C)} FLOPs, forms of the law that predict these runs about equally well ask for {ends} "
                "parameters; only larger runs can tell which is right.",
            )


def _backtest(a: Analysis) -> Warnings:
    tested, top = a.backtest["tested"], float(a.table.flops.max())
    yield from extrapolation(top, a.targets, tested and tested["reach"])
    if tested is None or a.law is None:
        return
    if tested["inside"] is not None and tested["inside"] < INSIDE:
        yield Warning(
            "backtest_outside",
            f"Fitted to cheaper runs, the {tested['by']} errs by more than its intervals allow: only "
            f"{tested['inside']:.0%} of {tested['predictions']} losses lie within their 95 % intervals. Expect such "
            "errors in its answers, and larger ones farther out.",
        )


def _outliers(a: Analysis, law: Law) -> Warnings:
    outliers, n = find_outliers(law), len(a.table)
    if not outliers.rows.size:
        return
    shown = first_few(
        [
            f"{a.table.run_id[i]} (loss {a.table.loss[i]:.4g}, {np.expm1(outliers.residual[i]):+.0%})"
            for i in outliers.rows
        ],
        NAMED,
    )
    many = outliers.rows.size > max(NAMED, MANY_OUTLIERS * n)
    lie, them = ("lies", "it") if outliers.rows.size == 1 else ("lie", "them")
    yield Warning(
        "loss_outlier",
        f"{outliers.rows.size} of {n} runs {lie} far from the law that the other runs follow to within about "
        f"{outliers.scatter:.1%}: {shown}. Without {them} {_moved(law, outliers.constants, a.targets[0])}; "
        + (
            "so many outliers have a common cause, such as divergence, repeated data or short runs, and the law does "
            "not describe them."
            if many
            else "check what happened in them, and leave out any that do not belong to this experiment."
        ),
    )


def _exact(law: Law) -> Warnings:
    if law.residual_scale_ < ROUNDING:
        yield Warning(
            "no_scatter",
            f"The losses follow the parametric law to within {law.residual_scale_:.0e}, closer than any measured loss, "
            "so its intervals have hardly any width and mean nothing; check that the losses are measured.",
        )


def _moved(law: Law, without: dict[str, float], C: float) -> str:
    best = [unlimited(law, constants, np.array(C), own_convention(law)) for constants in (law.constants_, without)]
    was, now = (amount(float(np.ravel(D / N)[0])) for N, D, _ in best)
    exponents = "".join(
        f", {name} from {law.constants_[name]:.3f} to {without[name]:.3f}" for name in law.exponent_names
    )
    return f"D/N at {scientific(C)} FLOPs goes from {was} to {now}{exponents}"


def _profiles(profiles: IsoflopProfiles) -> Warnings:
    refused: dict[str, list[str]] = {}
    for p in profiles.profiles_:
        if not p.accepted:
            refused.setdefault(p.reason, []).append(scientific(p.flops))
    if refused:
        count = sum(map(len, refused.values()))
        message = " ".join(f"At {first_few(at)} FLOPs {reason}." for reason, at in refused.items())
        yield Warning("vertex_refused", f"{count} of {len(profiles.profiles_)} isoFLOP minima are refused. {message}")
    wide = [
        scientific(p.flops)
        for p in profiles.accepted_
        if (i := p.interval()) is not None and not (p.N.min() / 3 < i[0] and i[1] < p.N.max() * 3)
    ]
    if wide:
        message = f"The minimum at {first_few(wide)} FLOPs is uncertain by more than the sizes tried; add sizes there."
        yield Warning("vertex_uncertain", message)


def _few_trunks(table: RunTable, law: Law) -> Warnings:
    trunks = len(np.unique(table.group))
    if law.draws_ is not None and len(np.unique(law.groups_)) > trunks:
        yield Warning(
            "few_trunks",
            f"The {len(table)} runs come from {trunks} trunks, too few to resample. The parametric intervals "
            "resample single runs instead and are too narrow, because runs of one trunk have correlated errors; add "
            "sizes or seeds.",
        )
