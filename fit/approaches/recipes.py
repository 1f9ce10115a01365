"""Runs of several variants or data recipes: a separate law of each, compared with the base by `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..formats import NONE, read_formats
from ..table import Runs, RunTable, as_table
from .approaches import Estimate, Law, fit_parametric, law_intervals, parametric
from .compare import Comparison, compare, decoding

COLUMN = "recipe"  # `RunTable` reads a column `variant` as this one
RAW, BASE, UNQUANTIZED = "raw", "base", "unquantized"


@dataclass(frozen=True)
class RecipeLaw:
    """One recipe or variant; `apart` is why it is not compared with the base."""

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
        """Return the largest cache of these runs' models while generating, in bytes per token; NaN if unknown."""
        return float(self.table.column("kv_bytes").max())

    @property
    def decode(self) -> tuple[float, float, float] | None:
        return decoding(self.table)

    def to_dict(self) -> dict[str, Any]:
        """Return the law, its best N and loss, and the comparison, for JSON."""
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
        law = self.reason if self.law is None else repr(self.law)
        return f"{self.recipe} ({len(self.table)} runs): {law}"


def kinds(runs: RunTable) -> str:
    if "variant" in runs.frame:
        return "variants"
    return "number formats" if UNQUANTIZED in split(runs) else "data recipes"


def split(runs: RunTable) -> dict[str, RunTable]:
    """Split runs by recipe or variant, and by number format if one has several.

    The base is first: the one named `raw`, `base` or, if formats are split, `unquantized`, else the table's first.
    """
    base = BASE if "variant" in runs.frame else RAW
    recipes = np.full(len(runs), base, dtype=object)
    if COLUMN in runs.frame:
        names = runs.frame[COLUMN].iloc[runs.rows]
        recipes = np.where(names.isna() | (names.astype(str).str.strip() == ""), base, names.astype(str))
    pairs = list(zip(recipes.tolist(), read_formats(runs)[0].tolist(), strict=True))
    if len({*pairs}) > len({*recipes}):
        parts = ([name] * (name != base) + [format] * (format != NONE) for name, format in pairs)
        recipes, base = np.array([" ".join(names) or UNQUANTIZED for names in parts], dtype=object), UNQUANTIZED
    ordered = sorted(dict.fromkeys(recipes.tolist()), key=lambda name: name != base)
    return {ordered[0]: runs} if len(ordered) == 1 else {name: runs.where(recipes == name) for name in ordered}


def by_recipe(
    runs: Runs,
    targets: Sequence[float] = (1e24,),
    bootstrap: int = 0,
    seed: int = 0,
    law: Law | None = None,
) -> list[RecipeLaw]:
    """Fit a law to each recipe or variant of the table and compare each with the base, which is first.

    Arguments are as in `analyze`.
    """
    C = float(targets[0])
    laws: list[RecipeLaw] = []
    for name, table in split(as_table(runs)).items():
        fitted, reason = fit_parametric(table, table.N, law, bootstrap, seed)
        estimate = None if fitted is None else parametric(fitted, "", fitted.flops_per_token_).at(C)
        recipe = RecipeLaw(name, table, C, fitted, reason.rstrip("."), estimate)
        if laws:
            try:
                recipe = replace(recipe, comparison=compare(laws[0].table, table, targets, (laws[0].recipe, name)))
            except InputError as error:
                recipe = replace(recipe, apart=str(error).rstrip("."))
        laws.append(recipe)
    return laws


def sentences(laws: Sequence[RecipeLaw]) -> list[str]:
    """Return a paragraph on each recipe except the base: its comparison, or why there is none."""
    return [
        " ".join(recipe.comparison.sentences)
        if recipe.comparison
        else f"{recipe.recipe} has no compute multiplier: {recipe.apart}."
        for recipe in laws[1:]
    ]
