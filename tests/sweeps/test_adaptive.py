"""The adaptive loop: its first round, the rounds after it, and why it ends; killed anywhere, it goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import TRUTH, finish, replan, settings, write
from isoflop.fit.allocation.allocation import optimum
from isoflop.sweeps.config import AdaptiveGrid, IsoflopGrid, SweepConfig
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.trunks import merge_runs, own_flops
from isoflop.sweeps.growth import extend
from isoflop.sweeps.growth.suggest import fit_standing
from isoflop.sweeps.runs import membership
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.config import RunConfig
from isoflop.train.errors import UserError
from isoflop.train.flops import flops_exact

BUDGETS = [1e11, 2e11, 5e11, 1e12]


def adaptive_settings(**changes: Any) -> SweepConfig:
    return settings(AdaptiveGrid(**{"budgets": BUDGETS, "tolerance": None, "rounds": 2, "round_runs": 6} | changes))


def record(sweep: SweepDirectory) -> dict[str, Any]:
    return dict(json.loads((sweep.path / "adaptive.json").read_text()))


def spent(sweep: SweepDirectory) -> float:
    return sum(run["flops_own"] for run in sweep.plan()["runs"])


def train(sweep: SweepDirectory, config: SweepConfig, round_: dict[str, Any]) -> list[str]:
    """Adds a round as the keeper does, and ends its runs; returns the ids of those that were new."""
    new = extend.add_grid(sweep, config, extend.as_grid(round_, "test"), "a round")
    replan(sweep, config, [run.config() for run in membership.members(sweep)])
    finish(sweep)
    return new


def test_the_first_round_is_a_small_isoflop_grid_for_its_share_of_the_cost() -> None:
    base = RunConfig(tokens=0)
    base.model.vocab_size = 256
    first = grid.expand_grid(AdaptiveGrid(budgets=BUDGETS), base)
    cost = sum(map(own_flops, merge_runs(first).runs))
    whole = sum(map(own_flops, merge_runs(grid.expand_grid(IsoflopGrid(budgets=BUDGETS), base)).runs))
    assert 0.15 * whole < cost <= 0.2 * whole
    assert len(first) >= 10
    assert max(map(flops_exact, first)) <= 1e12 * 1.01
    # Steps between the budgets that are tried are 12 %.
    given = grid.expand_grid(AdaptiveGrid(budgets=BUDGETS, flops_budget=0.5 * whole), base)
    assert 0.07 * whole < sum(map(own_flops, merge_runs(given).runs)) <= 0.1 * whole


@pytest.mark.slow
def test_rounds_stay_within_the_flops_and_narrow_the_interval(
    tmp_path: Path,
) -> None:
    config = adaptive_settings()
    sweep = write(tmp_path / "sweep", config)
    finish(sweep)
    rounds = 0
    while (round_ := extend.ask_round(sweep, config)) is not None:
        assert re.match(
            rf"round {rounds + 1}: \d+ runs of .* is \[.*\], and should come to \[", extend.round_summary(sweep)
        )
        assert extend.ask_round(sweep, config) == round_  # until its runs have been added and have ended
        assert train(sweep, config, round_) == record(sweep)["rounds"][-1]["runs"]
        rounds += 1
    assert rounds == 2
    assert record(sweep)["ended"] == "all 2 rounds are over"
    assert extend.round_summary(sweep) == "the adaptive grid is over: all 2 rounds are over"
    assert extend.ask_round(sweep, config) is None
    total = record(sweep)["rounds"][0]["flops_budget"]
    assert 0.7 * total < spent(sweep) <= total * (1 + 1e-9)  # a round has six runs at most
    after = fit_standing(sweep, config, 1e15)
    before = record(sweep)["rounds"][0]["before"]["loss"]
    assert after.loss.relative_width < 0.7 * (before["high"] - before["low"]) / before["value"]
    # The convention of FLOPs moves the optimum of so flat a valley, but hardly its loss.
    assert after.loss.low < float(optimum(1e15, TRUTH)[2]) < after.loss.high


def test_it_ends_when_the_interval_is_as_narrow_as_was_asked_for(tmp_path: Path) -> None:
    config = adaptive_settings(tolerance=0.9, size_tolerance=1e6, target_flops=2e13)
    sweep = write(tmp_path / "sweep", config)
    finish(sweep)
    assert extend.ask_round(sweep, config) is None
    assert "% of the loss (asked for 90.00%) and " in record(sweep)["ended"]


@pytest.mark.slow
def test_it_ends_when_the_flops_are_spent_and_when_too_few_runs_are_done(tmp_path: Path) -> None:
    config = adaptive_settings()
    sweep = write(tmp_path / "poor", config)
    assert extend.ask_round(sweep, config) is None
    assert "0 runs of" in record(sweep)["ended"]
    finish(sweep)  # they were tried again
    assert extend.ask_round(sweep, config) is not None
    assert record(sweep)["ended"] is None
    (sweep.path / "adaptive.json").unlink()
    assert isinstance(config.grid, AdaptiveGrid)
    config.grid.flops_budget = spent(sweep) * 1.001
    assert extend.ask_round(sweep, config) is None
    assert record(sweep)["ended"].endswith("FLOPs are spent")


def test_only_an_adaptive_grid_has_rounds(tmp_path: Path) -> None:
    config = settings(IsoflopGrid(budgets=BUDGETS))
    with pytest.raises(UserError, match="is 'isoflop'; only adaptive has rounds"):
        extend.ask_round(SweepDirectory(tmp_path), config)
