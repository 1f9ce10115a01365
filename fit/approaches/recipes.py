"""Runs of several data recipes: one law a recipe, side by side, and never one law through all of them.

Special here:
- Recipes are scored on the same held-out text with the same tokenizer, so their losses may be compared; a law through
  runs of several would fit the choice of recipe as noise.
- What decides between recipes at the scale of the runs is not the laws but the runs that differ in recipe alone: the
  mean difference of their losses at equal N, D and seed has an interval of its own, far narrower than a law's.
- The law says what the difference becomes at a larger budget. Differences there take the draws of the two laws as
  independent, though the recipes share noise of initialization and of the held-out text: the interval errs to be wide.

Penedo et al. 2024 (FineWeb, arXiv:2406.17557); Li et al. 2024 (DCLM, arXiv:2406.11794).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import Array, InputError
from ..flops import flops_per_token
from ..formatting import scientific
from ..laws.chinchilla import NAMES, ChinchillaLaw
from ..table import RunTable
from ..uncertainty import percentile_interval, resampled_together
from .approaches import Estimate, parametric

COLUMN = "recipe"
RAW = "raw"
# Columns that runs have in common which differ in recipe alone, as far as a table has them.
ALIKE = ("seed", "schedule", "decay_share", "learning_rate", "batch_size", "sequence_length", "width", "depth", "heads")
Interval = tuple[float, float]


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


@dataclass(frozen=True)
class RecipeLaw:
    """One recipe: its runs, its law or the reason why it has none, and how it compares with the base recipe.

    `paired` is of runs that differ in recipe alone, `at_target` of the laws at their own compute-optimal sizes.
    """

    recipe: str
    table: RunTable
    target: float
    law: ChinchillaLaw | None
    reason: str
    estimate: Estimate | None
    paired: Difference | None = None
    at_target: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        law, e = self.law, self.estimate
        known = law is not None and law.draws_ is not None
        return {
            "recipe": self.recipe,
            "runs": len(self.table),
            "reason": self.reason,
            "law": None if law is None else {name: law.constants_[name] for name in NAMES},
            "ci": {name: law.interval(name) for name in NAMES} if law is not None and known else {},
            "target": self.target,
            "N": e and e.N,
            "N_ci": e and e.intervals["N"],
            "loss": e and e.loss,
            "loss_ci": e and e.intervals["loss"],
            "paired": self.paired and self.paired.to_dict(),
            "at_target": self.at_target and self.at_target.to_dict(),
        }

    def __repr__(self) -> str:
        said = self.reason if self.law is None else repr(self.law)
        return f"{self.recipe} ({len(self.table)} runs): {said}"


def split(runs: RunTable) -> dict[str, RunTable]:
    """The runs of each recipe, the base first: raw text where there is some, else what comes first in the table.

    A table without a column `recipe` is all raw.
    """
    if COLUMN not in runs.frame:
        return {RAW: runs}
    names = runs.frame[COLUMN].iloc[runs.rows]
    recipes = np.where(names.isna() | (names.astype(str).str.strip() == ""), RAW, names.astype(str))
    found = sorted(dict.fromkeys(recipes.tolist()), key=lambda name: name != RAW)
    if len(found) == 1:
        return {found[0]: runs}
    return {name: chosen(runs, recipes == name) for name in found}


def chosen(runs: RunTable, keep: np.ndarray) -> RunTable:
    """Some rows of a table, by a mask (n,)."""
    names = ("N", "D", "loss", "loss_se", "flops", "budget", "run_id", "group", "weight", "rows")
    return replace(runs, **{name: getattr(runs, name)[keep] for name in names})


def by_recipe(
    runs: RunTable,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 0,
    seed: int = 0,
    law: ChinchillaLaw | None = None,
) -> list[RecipeLaw]:
    """A law for each recipe of the table, the base first, each compared with the base at the first target.

    Arguments as in `analyze`. A recipe whose runs allow no fit has a reason instead, and is still compared by its runs.
    """
    found: list[RecipeLaw] = []
    for name, own in split(runs).items():
        one = _fitted(name, own, float(targets[0]), bootstrap, seed, law or ChinchillaLaw())
        base = found[0] if found else None
        if base is not None:
            one = replace(one, paired=paired(base.table, own), at_target=_at_target(base, one))
        found.append(one)
    return found


def _fitted(name: str, runs: RunTable, C: float, bootstrap: int, seed: int, options: ChinchillaLaw) -> RecipeLaw:
    law = options.clone()
    try:
        law.fit(runs.N, runs.D, runs.loss, runs.weight, runs.known_se)
    except InputError as error:
        return RecipeLaw(name, runs, C, None, str(error).rstrip("."), None)
    if bootstrap:
        with contextlib.suppress(InputError):  # too few runs to resample: a law without intervals
            law.bootstrap(bootstrap, resampled_together(runs.group, runs.run_id, law.problem_.free), seed)
    estimate = parametric(law, "", flops_per_token(runs.N, runs.D, runs.flops)).at(C)
    return RecipeLaw(name, runs, C, law, "", estimate)


def paired(base: RunTable, other: RunTable) -> Difference | None:
    """Mean difference of the losses of runs that have N, D and what else is `ALIKE` in common; None where no two have.

    The interval is Student's over groups (a trunk and its branches count as one), for which it takes two at least.
    """
    ours, theirs = _points(base), _points(other)
    shared = [key for key in theirs if key in ours]
    if not shared:
        return None
    differences = np.array([other.loss[theirs[key]] - base.loss[ours[key]] for key in shared])
    groups = other.group[[theirs[key] for key in shared]]
    means = np.array([differences[groups == name].mean() for name in np.unique(groups)])
    weights = np.array([(groups == name).sum() for name in np.unique(groups)], dtype=np.float64)
    value = float(differences.mean())
    if len(means) < 2:
        return Difference(value, None, len(shared))
    from scipy.stats import t as student

    # Of a mean over groups of unequal size: the ratio estimator, as for any sample of clusters.
    spread = np.sqrt(np.sum((weights * (means - value)) ** 2) * len(means) / (len(means) - 1)) / weights.sum()
    half = float(student.ppf(0.975, len(means) - 1) * spread)
    return Difference(value, (value - half, value + half), len(shared))


def _points(runs: RunTable) -> dict[tuple[Any, ...], int]:
    """The run at each point; none where several are, for which of them would be the pair of another's is not known."""
    others = [runs.frame[name].iloc[runs.rows].astype(str) for name in ALIKE if name in runs.frame]
    keys = list(zip(runs.N.tolist(), runs.D.tolist(), *others, strict=True))
    count = Counter(keys)
    return {key: i for i, key in enumerate(keys) if count[key] == 1}


def _at_target(base: RecipeLaw, other: RecipeLaw) -> Difference | None:
    """Of the losses that two laws promise at the target, each at its own best size."""
    if base.estimate is None or other.estimate is None or base.estimate.loss is None or other.estimate.loss is None:
        return None
    draws = [_loss_draws(one) for one in (base, other)]
    value = other.estimate.loss - base.estimate.loss
    if draws[0] is None or draws[1] is None:
        return Difference(value, None)
    n = min(map(len, (draws[0], draws[1])))
    # Both bootstraps take the same random numbers; shuffled, the draws are independent, as is said above.
    mixed = np.random.default_rng(0).permutation(draws[1])[:n]
    low, high = percentile_interval(mixed - draws[0][:n])
    return Difference(value, (float(low), float(high)))


def _loss_draws(one: RecipeLaw) -> Array | None:
    from ..allocation.allocation import compute_optimal

    if one.law is None or one.law.draws_ is None:
        return None
    own = one.table
    best = compute_optimal(one.law, np.array([one.target]), flops_per_token(own.N, own.D, own.flops) or 6.0)
    draws = best.draws.get("loss")
    return None if draws is None else np.asarray(draws).reshape(-1)


def sentences(laws: Sequence[RecipeLaw]) -> list[str]:
    """What the comparison says, a sentence a recipe beyond the base."""
    said = []
    for one in laws[1:]:
        parts = []
        if one.paired is not None:
            word = _direction(one.paired)
            points = "one point" if one.paired.pairs == 1 else f"{one.paired.pairs} points"
            parts.append(f"at the {points} that both have, its loss is {word}")
        if one.at_target is not None:
            parts.append(f"at {scientific(one.target)} FLOPs its law is {_direction(one.at_target)}")
        rest = "; ".join(parts) if parts else "it has no run at a point of the base, and no law"
        said.append(f"{one.recipe} against {laws[0].recipe}: {rest}.")
    return said


def _direction(d: Difference) -> str:
    known = "" if d.interval is None else f" [{d.interval[0]:+.4f}, {d.interval[1]:+.4f}]"
    if not d.clear:
        return f"not clearly different ({d.value:+.4f}{known} nats)"
    return f"{'higher' if d.value > 0 else 'lower'} ({d.value:+.4f}{known} nats)"
