"""Laws of several data recipes are fitted separately, compared with an interval, and never pooled."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.recipes import sentences, split

RAW = "raw"
TRUTH = {"E": 1.7, "A": 400.0, "B": 400.0, "alpha": 0.34, "beta": 0.28}


def runs(recipes: dict[str, dict[str, float]], noise: float = 1e-3, seed: int = 0, shared: float = 0.0) -> pd.DataFrame:
    """Return a ladder of each recipe, by TRUTH with changes; a point has the same `shared` noise in every recipe."""
    generator = np.random.default_rng(seed)
    N, D = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e5, 1e7, 6), np.geomspace(2e6, 2e8, 5)))
    common = np.exp(shared * generator.standard_normal(len(N)))
    frames = []
    for name, changes in recipes.items():
        k = TRUTH | changes
        loss = k["E"] + k["A"] / N ** k["alpha"] + k["B"] / D ** k["beta"]
        loss = loss * common * np.exp(noise * generator.standard_normal(len(N)))
        frames.append(pd.DataFrame({"N": N, "D": D, "loss": loss, "recipe": name, "seed": 0}))
    table = pd.concat(frames, ignore_index=True)
    return table.assign(run_id=[f"r{i}" for i in range(len(table))], flops=6 * table.N * table.D)


def test_each_recipe_has_the_law_that_it_has_alone() -> None:
    table = runs({"raw": {}, "gopher": {"E": 1.6}, "near:0.8": {"B": 300.0}})
    results = fit.by_recipe(fit.read_table(table), (1e18,), 50)
    assert [result.recipe for result in results] == ["raw", "gopher", "near:0.8"]
    for result in results:
        table_of_recipe = fit.read_table(table[table.recipe == result.recipe])
        law = fit.ChinchillaLaw().fit(table_of_recipe.N, table_of_recipe.D, table_of_recipe.loss)
        assert result.law is not None
        assert result.law.constants_ == pytest.approx(law.constants_, rel=1e-12)


def test_the_base_is_raw_text_wherever_it_stands_and_an_empty_cell_is_raw() -> None:
    table = runs({"gopher": {}, "raw": {}})
    assert list(split(fit.read_table(table))) == [RAW, "gopher"]
    for cell in (None, ""):
        empty = table.assign(recipe=table.recipe.where(table.recipe != "raw", cell))
        assert list(split(fit.read_table(empty))) == [RAW, "gopher"]
    assert list(split(fit.read_table(table.drop(columns="recipe")))) == [RAW]


@pytest.fixture(scope="module")
def analysis() -> fit.Analysis:
    return fit.analyze(
        fit.read_table(runs({"raw": {}, "gopher": {"E": 2.5, "beta": 0.4}})), (1e18,), 20, intervals="noise"
    )


def test_an_analysis_never_pools_recipes(analysis: fit.Analysis) -> None:
    table = analysis.table.frame
    raw_analysis = fit.analyze(fit.read_table(table[table.recipe == "raw"]), (1e18,), 0, intervals="noise")
    assert analysis.law is not None
    assert raw_analysis.law is not None
    assert analysis.law.constants_ == raw_analysis.law.constants_
    assert all(analysis.backtest[name] == raw_analysis.backtest[name] for name in ("steps", "predicted", "measured"))
    assert raw_analysis.recipes == []
    assert "recipes_apart" in {warning.code for warning in analysis.warnings}
    assert "recipes_mixed" not in {warning.code for warning in analysis.warnings}
    recipes = analysis.to_dict()["recipes"]
    assert [recipe["recipe"] for recipe in recipes] == ["raw", "gopher"]
    assert recipes[1]["ci"]["E"][0] < 2.5 < recipes[1]["ci"]["E"][1]
    # The doctor warns about the table that mixes recipes.
    for mixed, recipe in ((True, table), (False, table[table.recipe == "gopher"])):
        assert ("recipes_mixed" in {warning.code for warning in fit.examine(fit.read_table(recipe))}) == mixed


def test_a_recipe_without_a_law_says_why_and_is_still_compared() -> None:
    table = runs({"raw": {}, "gopher": {"E": 1.6}})
    few = table.drop(table[(table.recipe == "gopher") & ~((table.N < 3e5) & (table.D < 1e7))].index)
    _, gopher = fit.by_recipe(fit.read_table(few), (1e18,), 50)
    assert gopher.law is None
    assert gopher.reason
    assert gopher.comparison is not None
    assert gopher.comparison.multipliers[1].value > 1
    assert gopher.comparison.reason
    single_run = few.drop(few[(few.recipe == "gopher")].index[1:])
    raw, gopher = fit.by_recipe(fit.read_table(single_run), (1e18,))
    assert gopher.comparison is None
    assert "one N" in sentences([raw, gopher])[0]
