"""What a careful reader would ask of a fit: plain warnings, worst first. `doctor.py` asks the table alone."""

from __future__ import annotations

from copy import copy

import numpy as np

from ..allocation.allocation import compute_optimal
from ..approaches.approaches import Law
from ..approaches.isoflop import IsoflopProfiles
from ..formatting import amount, scientific
from ..results import Analysis
from ..table import RunTable
from .doctor import Found, Warning, examine
from .outliers import find_outliers

NAMED = 5
MANY_OUTLIERS = 0.05  # share of the runs from which they have a cause in common
# What limits a fit without being a fault of it comes last.
MILD = ("few_runs", "few_sizes", "narrow_span", "flop_convention", "vertex_uncertain", "dropped_worst", "derived_d")


def run_checks(a: Analysis) -> tuple[Warning, ...]:
    """All warnings of an analysis, worst first: what stops a fit, the table's faults, the fit's, and limits of both."""
    law, recipes, verdict = a.law, a.recipes, a.verdict
    found = [
        Warning(f"no_{one.key}", f"{one.title} has no answer: {one.reason.rstrip('.')}.")
        for one in a.approaches.values()
        if not one.available
    ]
    found += [] if law is None else _solver(law)
    # A profile whose lowest loss is at an edge is refused by its fit, with its own reason: said once is enough.
    found += [w for w in examine(a.table, a.targets) if w.code != "edge_minimum"]
    if len(recipes) > 1:
        base, *others = (one.recipe for one in recipes)
        found.append(
            Warning(
                "recipes_apart",
                f"The table has runs of {len(recipes)} data recipes; everything here is of {base} alone "
                f"({len(a.table)} runs), and {', '.join(others)} have laws of their own beside it.",
            )
        )
    found += [] if law is None else _outliers(a, law)
    if verdict.agree is False:
        why = f" What may be why: {' '.join(verdict.suspects)}" if verdict.suspects else ""
        said = f"{verdict.sentence} Trust none of them before the reason is known.{why}"
        found.append(Warning("approaches_disagree", said))
    found += [*_profiles(a.profiles), *([] if law is None else _few_trunks(a.table, law))]
    return tuple(sorted(found, key=lambda w: w.code in MILD))


def _solver(law: Law) -> Found:
    tried, agree = law.starts_["tried"], law.starts_["agreeing"]
    if agree < 0.9 * tried:
        yield Warning(
            "starts_disagree",
            f"{agree} of {tried} starts agree on the parametric optimum; the data hardly pin the law down.",
        )
    for name in law.degenerate_:
        what = {"E": "the irreducible loss E is zero", "A": "the term in N vanished", "B": "the term in D vanished"}
        said = what.get(name, f"{name} = {law.constants_[name]:.3g} is at the end of its range")
        yield Warning(
            "degenerate_parameter",
            f"In the parametric fit {said}; its optimum cannot be trusted without runs over a wider range of N and D.",
        )
    if law.draws_ is not None and not law.degenerate_:
        stuck = law.degenerate_draws()
        if stuck.size and stuck.mean() > 0.05:
            yield Warning(
                "degenerate_bootstrap",
                f"{stuck.mean():.0%} of bootstrap refits put E, alpha or beta at zero; more runs are needed.",
            )
        lost = law.bootstrap_["unconverged"]
        if lost:
            yield Warning(
                "bootstrap_unconverged", f"{lost} bootstrap refits did not converge and are left out of the intervals."
            )


def _outliers(a: Analysis, law: Law) -> Found:
    found, n = find_outliers(law), len(a.table)
    if not found.rows.size:
        return
    shown = ", ".join(
        f"{a.table.run_id[i]} (loss {a.table.loss[i]:.4g}, {np.expm1(found.residual[i]):+.0%})"
        for i in found.rows[:NAMED]
    )
    more = f" and {found.rows.size - NAMED} more" if found.rows.size > NAMED else ""
    many = found.rows.size > max(NAMED, MANY_OUTLIERS * n)
    yield Warning(
        "loss_outlier",
        f"{found.rows.size} of {n} runs lie far from the law that the others follow to within about "
        f"{found.scatter:.1%}: {shown}{more}. Without them {_moved(law, found.constants, a.targets[0])}; "
        + (
            "so many have a cause in common, such as diverged, repeated or short runs, and the law is not theirs."
            if many
            else "find out what happened to them, and fit without those that are no runs of this kind."
        ),
    )


def _moved(law: Law, without: dict[str, float], C: float) -> str:
    """What other constants do to D/N at C FLOPs and to the exponents."""
    other = copy(law)
    other.constants_ = without
    was, now = (amount(float(compute_optimal(one, C).ratio[0])) for one in (law, other))
    exponents = "".join(
        f", {name} from {law.constants_[name]:.3f} to {without[name]:.3f}" for name in law.exponent_names
    )
    return f"D/N at {scientific(C)} FLOPs goes from {was} to {now}{exponents}"


def _profiles(profiles: IsoflopProfiles) -> Found:
    for profile in profiles.profiles_:
        if not profile.accepted:
            yield Warning(
                "vertex_refused",
                f"The isoFLOP minimum at {scientific(profile.flops)} FLOPs is refused: {profile.reason}.",
            )
    wide = ", ".join(
        scientific(p.flops)
        for p in profiles.accepted_
        if (i := p.interval()) is not None and not (p.N.min() / 3 < i[0] and i[1] < p.N.max() * 3)
    )
    if wide:
        yield Warning("vertex_uncertain", f"The minimum at {wide} FLOPs is uncertain by more than the sizes tried.")


def _few_trunks(table: RunTable, law: Law) -> Found:
    trunks = len(np.unique(table.group))
    if law.draws_ is not None and len(np.unique(law.groups_)) > trunks:
        yield Warning(
            "few_trunks",
            f"The {len(table)} runs come from {trunks} trunks, too few to resample: the parametric intervals "
            "resample runs, which share their trunk's luck, and are too narrow. More sizes or seeds would mend that.",
        )
