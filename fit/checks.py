"""What a careful reader would ask of a fit, asked first: plain warnings, worst first.

Special here: each check is one small function from an analysis to warnings, listed in CHECKS; adding one is adding a
function. A code is stable, for programs; a message is for people and names the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from .chinchilla import FLAT_EXPONENT, NAMES
from .formatting import scientific, times
from .uncertainty import studentised

if TYPE_CHECKING:
    from .analysis import Analysis

OUTLIER = 6.0  # robust sigmas
EXTRAPOLATION = 100.0
MANY_EPOCHS = 4.0  # repetition up to here is nearly as good as new data (Muennighoff et al. 2023)
LONG_WARMUP = 0.2
FEW_SIZES = 5
SUSPECTS = "usual suspects: N counted with or without embeddings, FLOP convention, schedules not matched to D, outliers"


@dataclass(frozen=True)
class Warning:
    code: str
    message: str


def run_checks(analysis: Analysis) -> tuple[Warning, ...]:
    """All warnings of an analysis, worst first."""
    return tuple(warning for check in CHECKS for warning in check(analysis))


def _missing_approaches(a: Analysis) -> Iterator[Warning]:
    for approach in a.approaches.values():
        if not approach.available:
            yield Warning(f"no_{approach.key}", f"{approach.title} has no answer: {approach.reason.rstrip('.')}.")


def _solver(a: Analysis) -> Iterator[Warning]:
    law = a.law
    if law is None:
        return
    tried, agree = law.starts_["tried"], law.starts_["agreeing"]
    if not law.converged_:
        yield Warning(
            "not_converged", f"The parametric fit did not converge from any of {tried} starts; do not use its numbers."
        )
    elif agree < 0.9 * tried:
        yield Warning(
            "starts_disagree",
            f"{agree} of {tried} starts agree on the parametric optimum; the data hardly pin the law down.",
        )
    for name in law.degenerate_:
        what = {"E": "the irreducible loss E is zero", "A": "the term in N vanished", "B": "the term in D vanished"}
        said = what.get(name, f"{name} = {getattr(law, name + '_'):.3g} is at the end of its range")
        yield Warning("degenerate_parameter", f"In the parametric fit {said}; its optimum cannot be trusted.")
    if law.draws_ is not None and not law.degenerate_:
        stuck = (law.draws_["E"] <= 0) | (law.draws_["alpha"] < FLAT_EXPONENT) | (law.draws_["beta"] < FLAT_EXPONENT)
        if stuck.mean() > 0.05:
            yield Warning(
                "degenerate_bootstrap",
                f"{stuck.mean():.0%} of refits of resampled runs put E, alpha or beta at zero; more runs are needed.",
            )
        lost = law.bootstrap_["unconverged"]
        if lost:
            yield Warning(
                "bootstrap_unconverged", f"{lost} bootstrap refits did not converge and are left out of the intervals."
            )


def _outliers(a: Analysis) -> Iterator[Warning]:
    if a.law is None:
        return
    z = studentised(a.law.residuals(), len(NAMES))
    bad = np.flatnonzero(np.abs(z) > OUTLIER)
    if bad.size:
        worst = bad[np.argsort(-np.abs(z[bad]))]
        shown = ", ".join(f"{a.table.run_id[i]} (loss {a.table.loss[i]:.4g}, {z[i]:+.1f} sigma)" for i in worst[:5])
        more = f" and {bad.size - 5} more" if bad.size > 5 else ""
        yield Warning(
            "loss_outlier",
            f"{bad.size} of {len(z)} runs lie more than {OUTLIER:g} robust sigma from the parametric law: {shown}{more}"
            "; a few such points can move the optimum, so look at them and refit without.",
        )


def _disagreement(a: Analysis) -> Iterator[Warning]:
    clashes = [f"{one} and {two} at {scientific(C)} FLOPs" for C, one, two in disagreements(a)]
    if clashes:
        yield Warning(
            "approaches_disagree", f"N* differs beyond the intervals between {'; '.join(clashes)} ({SUSPECTS})."
        )


def disagreements(a: Analysis) -> list[tuple[float, str, str]]:
    """(flops, key, key) wherever the N* intervals of two approaches do not overlap: at each target, and at the largest
    budget run.
    """
    found = []
    for C in sorted({float(a.table.flops.max()), *a.targets}):
        intervals = {key: approach.at(C).intervals["N"] for key, approach in a.approaches.items() if approach.available}
        for one, two in combinations(intervals, 2):
            left, right = intervals[one], intervals[two]
            if left and right and (left[1] < right[0] or right[1] < left[0]):
                found.append((C, one, two))
    return found


def _profiles(a: Analysis) -> Iterator[Warning]:
    for profile in a.profiles.profiles_:
        if not profile.accepted:
            yield Warning(
                "vertex_refused",
                f"The isoFLOP minimum at {scientific(profile.flops)} FLOPs is refused: {profile.reason}.",
            )
    few = [p for p in a.profiles.profiles_ if len(np.unique(p.N)) < FEW_SIZES]
    if few:
        said = ", ".join(f"{len(np.unique(p.N))} at {scientific(p.flops)}" for p in few)
        yield Warning("few_sizes", f"A parabola wants at least {FEW_SIZES} sizes per budget; there are {said} FLOPs.")
    wide = [
        p
        for p in a.profiles.accepted_
        if (i := p.interval()) is not None and not (p.N.min() / 3 < i[0] and i[1] < p.N.max() * 3)
    ]
    if wide:
        said = ", ".join(f"{scientific(p.flops)}" for p in wide)
        yield Warning("vertex_uncertain", f"The minimum at {said} FLOPs is uncertain by more than the sizes tried.")


def _reach(a: Analysis) -> Iterator[Warning]:
    low, high = float(a.table.flops.min()), float(a.table.flops.max())
    if high / low < 10:
        yield Warning(
            "narrow_span", f"The runs span a factor of {high / low:.3g} in compute; a law in C wants at least 10."
        )
    far = [C for C in a.targets if EXTRAPOLATION * high < C]
    if far:
        said = ", ".join(f"{scientific(C)} FLOPs ({times(C / high)})" for C in far)
        yield Warning(
            "extrapolation",
            f"The target {said} lies beyond {EXTRAPOLATION:g} times the largest run ({scientific(high)} FLOPs); "
            "the intervals cover the noise of these runs and not a change of law on the way.",
        )


def _conventions(a: Analysis) -> Iterator[Warning]:
    t = a.table
    ratio = t.flops / (6.0 * t.N * t.D)
    if ratio.min() < 0.8 or ratio.max() > 1.25:
        yield Warning(
            "flop_convention",
            f"FLOPs are between {ratio.min():.2f} and {ratio.max():.2f} times 6ND; approach 3 allocates under C = 6ND, "
            "approaches 1 and 2 under the table's FLOPs, so their exponents may differ by convention alone.",
        )
    if t.N.max() < 1000 or t.D.max() < 1e4:
        yield Warning(
            "units",
            f"The largest N is {t.N.max():.4g} and the largest D {t.D.max():.4g}; are they in millions, not in ones?",
        )
    if t.loss.max() > 15:
        yield Warning("units", f"The highest loss is {t.loss.max():.4g}; is it in nats per token?")


def _training(a: Analysis) -> Iterator[Warning]:
    epochs, warmup = a.table.column("epochs"), a.table.column("warmup_share")
    many = epochs > MANY_EPOCHS
    if many.any():
        yield Warning(
            "repeated_data",
            f"{int(many.sum())} runs see their data more than {MANY_EPOCHS:g} times (up to {np.nanmax(epochs):.1f}); "
            "tokens seen again are worth less than this law assumes.",
        )
    long = warmup > LONG_WARMUP
    if long.any():
        yield Warning(
            "long_warmup",
            f"{int(long.sum())} runs warm up for over {LONG_WARMUP:.0%} of their steps (to {np.nanmax(warmup):.0%}); "
            "short runs then look worse than they are, which tilts N*(C).",
        )


def _table(a: Analysis) -> Iterator[Warning]:
    t = a.table
    pairs = len(np.unique(np.stack([t.N, t.D]), axis=1).T)
    if a.law is not None and pairs < 10:
        yield Warning(
            "few_runs", f"The parametric law has 5 constants and {pairs} different runs; intervals are rough."
        )
    _, counts = np.unique(
        np.stack([np.unique(t.run_id, return_inverse=True)[1].ravel(), t.N, t.D]), axis=1, return_counts=True
    )
    if (counts > 1).any():
        yield Warning("duplicate_runs", f"{int((counts - 1).sum())} rows repeat the run id, N and D of another row.")
    if t.dropped:
        yield Warning("dropped_worst", f"The {t.dropped} highest losses were dropped at the user's request.")
    if t.derived_d:
        yield Warning("derived_d", "D was not measured but derived as FLOPs / (6N); errors in N and C enter it.")


CHECKS: tuple[Callable[[Analysis], Iterator[Warning]], ...] = (
    _missing_approaches,
    _solver,
    _outliers,
    _disagreement,
    _profiles,
    _reach,
    _conventions,
    _training,
    _table,
)
