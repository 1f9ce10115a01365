"""Runs of several variants, or data recipes: one law of each, side by side, and never one law through all of them.

All are scored on the same held-out text, and each is compared with the base by the multiplier of `compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..table import RunTable
from .approaches import Estimate, Law, fit_parametric, law_intervals, parametric
from .compare import Comparison, compare, decoding

COLUMN = "recipe"  # that of `variant` is read as this one, where a table has it
RAW, BASE = "raw", "base"


@dataclass(frozen=True)
class RecipeLaw:
    """One recipe or variant, its law, and how it compares with the base; `apart` says why it does not."""

    recipe: str
    table: RunTable
    target: float
    law: Law | None
    reason: str
    estimate: Estimate | None
    comparison: Comparison | None = None
    apart: str = ""

    @property
    def cached(self) -> float:
        """Bytes that a decoder of the largest run keeps per token, at two a number; NaN where no column says it."""
        return float(self.table.column("kv_bytes").max())

    @property
    def decode(self) -> tuple[float, float, float] | None:
        return decoding(self.table)

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
            "comparison": self.comparison and self.comparison.to_dict(),
        }

    def __repr__(self) -> str:
        said = self.reason if self.law is None else repr(self.law)
        return f"{self.recipe} ({len(self.table)} runs): {said}"


def kinds(runs: RunTable) -> str:
    """What a page calls that which tells the runs apart."""
    return "variants" if "variant" in runs.frame else "data recipes"


def split(runs: RunTable) -> dict[str, RunTable]:
    """The runs of each recipe or variant, the base first: `raw` or `base` where there is such, else the first."""
    base = BASE if "variant" in runs.frame else RAW
    if COLUMN not in runs.frame:
        return {base: runs}
    names = runs.frame[COLUMN].iloc[runs.rows]
    recipes = np.where(names.isna() | (names.astype(str).str.strip() == ""), base, names.astype(str))
    found = sorted(dict.fromkeys(recipes.tolist()), key=lambda name: name != base)
    return {found[0]: runs} if len(found) == 1 else {name: runs.where(recipes == name) for name in found}


def by_recipe(
    runs: RunTable,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 0,
    seed: int = 0,
    law: Law | None = None,
) -> list[RecipeLaw]:
    """A law for each recipe or variant of the table, the base first, each compared with the base; arguments as in
    `analyze`. One whose runs allow no fit is still compared by its runs.
    """
    C = float(targets[0])
    found: list[RecipeLaw] = []
    for name, own in split(runs).items():
        fitted, reason = fit_parametric(own, own.N, law, bootstrap, seed)
        estimate = None if fitted is None else parametric(fitted, "", fitted.flops_per_token_).at(C)
        one = RecipeLaw(name, own, C, fitted, reason.rstrip("."), estimate)
        if found:
            try:
                one = replace(one, comparison=compare(found[0].table, own, targets, (found[0].recipe, name)))
            except InputError as error:
                one = replace(one, apart=str(error).rstrip("."))
        found.append(one)
    return found


def sentences(laws: Sequence[RecipeLaw]) -> list[str]:
    """What the comparisons with the base say, one paragraph each."""
    return [
        " ".join(one.comparison.sentences) if one.comparison else f"{one.recipe} has no multiplier: {one.apart}."
        for one in laws[1:]
    ]
