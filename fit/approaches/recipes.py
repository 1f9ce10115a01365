"""Runs of several data recipes: one law per recipe, side by side, and never one law through all of them.

Recipes are scored on the same held-out text with the same tokenizer. What decides between them at the scale of the runs
is the difference in loss of runs that differ in recipe alone; its interval is far narrower than a law's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..allocation.allocation import compute_optimal
from ..formatting import scientific
from ..table import RunTable
from ..uncertainty import percentile_interval
from .approaches import Estimate, Interval, Law, fit_parametric, law_intervals, parametric

COLUMN = "recipe"
RAW = "raw"
# Columns that runs have in common which differ in recipe alone, as far as a table has them.
ALIKE = ("seed", "schedule", "decay_share", "learning_rate", "batch_size", "sequence_length", "width", "depth", "heads")


@dataclass(frozen=True)
class Difference:
    """A loss less that of the base recipe, with its 95 % interval (None: not known)."""

    value: float
    interval: Interval | None
    pairs: int = 0  # runs that differ in recipe alone behind it; 0: of two laws

    @property
    def clear(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "ci": self.interval, "pairs": self.pairs, "clear": self.clear}

    def __str__(self) -> str:
        known = "" if self.interval is None else f" [{self.interval[0]:+.4f}, {self.interval[1]:+.4f}]"
        word = ("higher" if self.value > 0 else "lower") if self.clear else "not clearly different"
        return f"{word} ({self.value:+.4f}{known} nats)"


@dataclass(frozen=True)
class RecipeLaw:
    """One recipe, and how it compares with the base: `paired`, by runs that differ in recipe alone; `at_target`, by the
    laws, each at its own compute-optimal size.
    """

    recipe: str
    table: RunTable
    target: float
    law: Law | None
    reason: str
    estimate: Estimate | None
    paired: Difference | None = None
    at_target: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        law, e = self.law, self.estimate
        return {
            "recipe": self.recipe,
            "runs": len(self.table),
            "reason": self.reason,
            "law": law and law.constants_,
            "ci": law_intervals(law),
            "target": self.target,
            "N": e and e.N,
            "N_ci": e and e.N_ci,
            "loss": e and e.loss,
            "loss_ci": e and e.loss_ci,
            "paired": self.paired and self.paired.to_dict(),
            "at_target": self.at_target and self.at_target.to_dict(),
        }

    def __repr__(self) -> str:
        said = self.reason if self.law is None else repr(self.law)
        return f"{self.recipe} ({len(self.table)} runs): {said}"


def split(runs: RunTable) -> dict[str, RunTable]:
    """The runs of each recipe, the base first: raw text where there is some, else what comes first in the table."""
    if COLUMN not in runs.frame:
        return {RAW: runs}
    names = runs.frame[COLUMN].iloc[runs.rows]
    recipes = np.where(names.isna() | (names.astype(str).str.strip() == ""), RAW, names.astype(str))
    found = sorted(dict.fromkeys(recipes.tolist()), key=lambda name: name != RAW)
    return {found[0]: runs} if len(found) == 1 else {name: runs.where(recipes == name) for name in found}


def by_recipe(
    runs: RunTable,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 0,
    seed: int = 0,
    law: Law | None = None,
) -> list[RecipeLaw]:
    """A law for each recipe of the table, the base first, each compared with the base at the first target; arguments as
    in `analyze`. A recipe whose runs allow no fit is still compared by its runs.
    """
    C = float(targets[0])
    found: list[RecipeLaw] = []
    for name, own in split(runs).items():
        fitted, reason = fit_parametric(own, own.N, law, bootstrap, seed)
        estimate = None if fitted is None else parametric(fitted, "", fitted.flops_per_token_).at(C)
        one = RecipeLaw(name, own, C, fitted, reason.rstrip("."), estimate)
        if found:
            one = replace(one, paired=paired(found[0].table, own), at_target=_at_target(found[0], one))
        found.append(one)
    return found


def paired(base: RunTable, other: RunTable) -> Difference | None:
    """Mean difference of the losses of runs that have N, D and what else is `ALIKE` in common; None where no two have.

    The interval is Student's over groups (a trunk and its branches count as one).
    """
    ours, theirs = _points(base), _points(other)
    shared = [key for key in theirs if key in ours]
    if not shared:
        return None
    differences = np.array([other.loss[theirs[key]] - base.loss[ours[key]] for key in shared])
    groups = other.group[[theirs[key] for key in shared]]
    names, weights = np.unique(groups, return_counts=True)
    means = np.array([differences[groups == name].mean() for name in names])
    value = float(differences.mean())
    if len(means) < 2:
        return Difference(value, None, len(shared))
    from scipy.stats import t as student

    # Of a mean over groups of unequal size: the ratio estimator, as for any sample of clusters.
    spread = np.sqrt(np.sum((weights * (means - value)) ** 2) * len(means) / (len(means) - 1)) / weights.sum()
    half = float(student.ppf(0.975, len(means) - 1) * spread)
    return Difference(value, (value - half, value + half), len(shared))


def _points(runs: RunTable) -> dict[tuple[Any, ...], int]:
    """The run at each point that has one alone; of several, none is the pair of another's."""
    others = [runs.frame[name].iloc[runs.rows].astype(str) for name in ALIKE if name in runs.frame]
    keys = list(zip(runs.N.tolist(), runs.D.tolist(), *others, strict=True))
    count = Counter(keys)
    return {key: i for i, key in enumerate(keys) if count[key] == 1}


def _at_target(base: RecipeLaw, other: RecipeLaw) -> Difference | None:
    """Of the losses that two laws promise at the target, each at its own best size."""
    if base.estimate is None or other.estimate is None or base.estimate.loss is None or other.estimate.loss is None:
        return None
    value = other.estimate.loss - base.estimate.loss
    draws = []
    for law in (base.law, other.law):
        if law is None or law.draws_ is None:
            return Difference(value, None)
        draws.append(compute_optimal(law, base.target).draws["loss"][0])
    n = min(map(len, draws))
    # Both bootstraps take the same random numbers; shuffled, the draws are independent. The recipes do share the noise
    # of initialization and of the held-out text, so the interval errs to be wide.
    mixed = np.random.default_rng(0).permutation(draws[1])[:n]
    low, high = percentile_interval(mixed - draws[0][:n])
    return Difference(value, (float(low), float(high)))


def sentences(laws: Sequence[RecipeLaw]) -> list[str]:
    """What the comparison says, one sentence per recipe beyond the base."""
    said = []
    for one in laws[1:]:
        parts = []
        if one.paired is not None:
            points = "one point" if one.paired.pairs == 1 else f"{one.paired.pairs} points"
            parts.append(f"at the {points} that both have, its loss is {one.paired}")
        if one.at_target is not None:
            parts.append(f"at {scientific(one.target)} FLOPs its law is {one.at_target}")
        rest = "; ".join(parts) if parts else "it has no run at a point of the base, and no law"
        said.append(f"{one.recipe} against {laws[0].recipe}: {rest}.")
    return said
