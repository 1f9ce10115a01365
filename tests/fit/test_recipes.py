"""Laws of several data recipes are fitted apart, compared with an interval, and never pooled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.recipes import RAW, paired, sentences, split
from isoflop.fit.report.report import render_template

TRUTH = {"E": 1.7, "A": 400.0, "B": 400.0, "alpha": 0.34, "beta": 0.28}


def runs(recipes: dict[str, dict[str, float]], noise: float = 1e-3, seed: int = 0, shared: float = 0.0) -> pd.DataFrame:
    """A ladder of each recipe, whose law is TRUTH with changes; `shared` noise is that of a point in every recipe."""
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
    together = fit.by_recipe(fit.read_table(table), (1e18,), 50)
    assert [one.recipe for one in together] == ["raw", "gopher", "near:0.8"]
    for one in together:
        own = fit.read_table(table[table.recipe == one.recipe])
        alone = fit.ChinchillaLaw().fit(own.N, own.D, own.loss)
        assert one.law is not None
        assert one.law.constants_ == pytest.approx(alone.constants_, rel=1e-12)


def test_the_base_is_raw_text_wherever_it_stands_and_an_empty_cell_is_raw() -> None:
    table = runs({"gopher": {}, "raw": {}})
    assert list(split(fit.read_table(table))) == [RAW, "gopher"]
    for cell in (None, ""):
        empty = table.assign(recipe=table.recipe.where(table.recipe != "raw", cell))
        assert list(split(fit.read_table(empty))) == [RAW, "gopher"]
    assert list(split(fit.read_table(table.drop(columns="recipe")))) == [RAW]


@pytest.fixture(scope="module")
def both() -> fit.Analysis:
    return fit.analyze(fit.read_table(runs({"raw": {}, "gopher": {"E": 2.5, "beta": 0.4}})), (1e18,), 20)


def test_an_analysis_never_pools_recipes(both: fit.Analysis) -> None:
    table = both.table.frame
    alone = fit.analyze(fit.read_table(table[table.recipe == "raw"]), (1e18,))
    assert both.law is not None
    assert alone.law is not None
    assert both.law.constants_ == alone.law.constants_
    assert all(both.backtest[name] == alone.backtest[name] for name in ("steps", "predicted", "measured"))
    assert alone.recipes == []
    assert "recipes_apart" in {warning.code for warning in both.warnings}
    assert "recipes_mixed" not in {warning.code for warning in both.warnings}
    found = both.to_dict()["recipes"]
    assert [one["recipe"] for one in found] == ["raw", "gopher"]
    assert found[1]["ci"]["E"][0] < 2.5 < found[1]["ci"]["E"][1]


def test_the_doctor_says_that_a_table_mixes_recipes() -> None:
    codes = [warning.code for warning in fit.examine(fit.read_table(runs({"raw": {}, "gopher": {}})))]
    assert "recipes_mixed" in codes
    assert "recipes_mixed" not in [w.code for w in fit.examine(fit.read_table(runs({"gopher": {}})))]


def test_runs_that_differ_in_recipe_alone_decide_better_than_laws() -> None:
    """The noise that they share cancels in the difference."""
    table = runs({"raw": {}, "near:0.8": {"E": 1.69}}, noise=5e-4, shared=0.01)
    raw, near = fit.by_recipe(fit.read_table(table), (1e18,), 100)
    assert near.paired is not None
    assert near.at_target is not None
    assert near.paired.pairs == 30
    assert near.paired.clear
    assert near.paired.value == pytest.approx(-0.01, abs=0.002)
    (low, high), width = near.paired.interval or (0, 0), near.at_target.interval or (0, 0)
    assert high - low < (width[1] - width[0]) / 3
    assert "near:0.8 against raw: at the 30 points that both have, its loss is lower" in sentences([raw, near])[0]


def test_the_interval_of_paired_runs_covers() -> None:
    """95 % of intervals hold the true difference; of 400 with groups of two, 366 is three errors below."""
    inside, n = 0, 12
    frame = pd.DataFrame({"N": np.arange(1, n + 1) * 1e5, "D": 1e7, "loss": 3.0, "seed": 0})
    base = fit.read_table(frame.assign(group=np.repeat(np.arange(n // 2), 2)))
    for seed in range(400):
        generator = np.random.default_rng(seed)
        luck = np.repeat(generator.standard_normal(n // 2), 2)  # of a trunk
        found = paired(base, replace(base, loss=3.1 + 0.01 * luck + 0.005 * generator.standard_normal(n)))
        assert found is not None
        assert found.interval is not None
        inside += found.interval[0] <= 0.1 <= found.interval[1]
    assert 366 <= inside <= 396


def test_equal_recipes_are_not_called_different() -> None:
    table = runs({"raw": {}, "exact": {}})
    _, exact = fit.by_recipe(fit.read_table(table), (1e18,), 100)
    assert exact.paired is not None
    assert exact.at_target is not None
    assert not exact.paired.clear
    assert not exact.at_target.clear


def test_a_recipe_without_a_law_says_why_and_is_still_compared() -> None:
    table = runs({"raw": {}, "gopher": {"E": 1.6}})
    few = table.drop(table[(table.recipe == "gopher")].index[3:])
    _, gopher = fit.by_recipe(fit.read_table(few), (1e18,), 50)
    assert gopher.law is None
    assert gopher.reason
    assert gopher.paired is not None
    assert gopher.paired.pairs == 3
    assert gopher.paired.value == pytest.approx(-0.1, abs=0.05)


def test_runs_are_paired_that_differ_in_recipe_alone() -> None:
    """Where a rate is varied too, a run is paired with that of its own rate, and with none where several may be it."""
    points = pd.DataFrame({"N": [1e5, 1e5, 1e6, 1e6], "D": 1e7, "learning_rate": [1e-3, 2e-3] * 2, "seed": 0})
    loss = np.array([3.0, 3.5, 2.0, 2.5])
    raw = points.assign(loss=loss, recipe="raw").drop(index=1)  # a run that failed
    near = points.assign(loss=loss - 0.1, recipe="near:0.8")
    table = pd.concat([raw, near], ignore_index=True)
    found = fit.by_recipe(fit.read_table(table))[1].paired
    assert found is not None
    assert (found.pairs, found.value) == (3, pytest.approx(-0.1, abs=1e-12))
    assert fit.by_recipe(fit.read_table(table.drop(columns="learning_rate")))[1].paired is None


def test_recipes_of_one_run_each_are_compared_without_an_interval() -> None:
    table = runs({"raw": {}, "exact": {"E": 1.6}}).groupby("recipe", sort=False).head(1)
    raw, exact = fit.by_recipe(fit.read_table(table), (1e18,), 20)
    assert raw.law is exact.law is None
    assert exact.paired is not None
    assert (exact.paired.pairs, exact.paired.interval, exact.paired.clear) == (1, None, False)
    assert "at the one point that both have" in sentences([raw, exact])[0]


def test_the_report_shows_the_recipes_side_by_side_and_escapes_them(both: fit.Analysis) -> None:
    raw, gopher = both.recipes
    shown = [raw, replace(gopher, recipe="<script>alert(1)</script>")]
    section = render_template("recipes.html", recipes=shown, compared=sentences(shown))
    assert "&lt;script&gt;alert(1)" in section
    assert "<script>" not in section
    assert section.count("<tr>") == 3
    assert render_template("recipes.html", recipes=[], compared=[]).strip() == ""
