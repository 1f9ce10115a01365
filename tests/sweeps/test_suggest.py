"""Suggestions of `isoflop suggest`: runs that can be added, within the budget, at their real cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_sweep import TRUTH, finish, make_config, replan, write_sweep
from isoflop.fit import ChinchillaLaw, GammaLaw
from isoflop.fit.allocation.allocation import optimum
from isoflop.sweeps import prepare
from isoflop.sweeps.config import SweepConfig
from isoflop.sweeps.grid import adaptive, extend
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.adaptive import AdaptiveGrid, round_summary
from isoflop.sweeps.grid.isoflop import IsoflopGrid
from isoflop.sweeps.grid.suggest import (
    Market,
    Range,
    Suggestion,
    fit_standing,
    print_suggestion,
    suggest_runs,
    trunk_of,
)
from isoflop.sweeps.plan.trunks import Progress, merge_runs, own_flops
from isoflop.sweeps.runs import membership
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.config import RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, flops_exact
from isoflop.train.schedule import trunk_steps
from small_runs import Capture

BUDGETS = [5e10, 1e11, 2e11]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepDirectory:
    finished_sweep = write_sweep(
        tmp_path_factory.mktemp("suggest") / "sweep", make_config(IsoflopGrid(budgets=BUDGETS, sizes=4))
    )
    finish(finished_sweep)
    return finished_sweep


@pytest.fixture(scope="module")
def suggestion(sweep: SweepDirectory) -> Suggestion:
    return suggest_runs(sweep, 1e12, 1e14, max_flops=4e11, max_runs=12)


def test_the_written_grid_has_the_suggested_runs(sweep: SweepDirectory, suggestion: Suggestion, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump(suggestion.grid, sort_keys=False))
    config = prepare.configuration(sweep)
    runs = grid.expand_grid(extend.read_grid(file), prepare.resolved_base(sweep, config))
    assert [run_id(run) for run in runs] == [run.run_id for run in suggestion.runs]
    assert [(count_parameters(run.model).N_total, run.D) for run in runs] == [(run.N, run.D) for run in suggestion.runs]
    assert not {run_id(run) for run in runs} & {run.run_id for run in membership.members(sweep)}


def test_a_suggestion_keeps_to_its_budget_at_the_planners_price(sweep: SweepDirectory, suggestion: Suggestion) -> None:
    config = prepare.configuration(sweep)
    points = extend.as_grid(suggestion.grid, "test")
    runs = merge_runs(
        grid.expand_grid(points, prepare.resolved_base(sweep, config))
    ).runs  # the sweep's own runs are done
    assert sum(map(own_flops, runs)) == pytest.approx(suggestion.flops, rel=1e-9)
    assert 0.5e12 < suggestion.flops <= 1e12 * (1 + 1e-9)
    assert len(suggestion.runs) <= 12
    assert max(run.flops for run in suggestion.runs) <= 4e11 * (1 + 1e-6)
    assert any(run.trunk is not None for run in suggestion.runs)


def test_both_intervals_should_shrink_and_a_large_run_checks_the_law(suggestion: Suggestion) -> None:
    for name, before in suggestion.before.items():
        after = suggestion.after[name]
        assert before.low < after.low < before.value == after.value < after.high < before.high
    checks = [run.flops for run in suggestion.runs if run.check]
    assert checks
    assert min(checks) >= 0.5 * max(run.flops for run in suggestion.runs)


def test_a_suggestion_is_plain_json_and_a_table(suggestion: Suggestion, capsys: Capture) -> None:
    assert json.loads(json.dumps(suggestion.to_dict(), allow_nan=False))["runs"][0]["run_id"]
    print_suggestion(suggestion)
    output = capsys.readouterr().out
    assert all(run.run_id in output for run in suggestion.runs)
    assert "checks the law" in output


def sized(tokens: int, **changes: object) -> RunConfig:
    run = RunConfig(tokens=tokens)
    run.model.vocab_size = 256
    return replace(run, **changes)  # type: ignore[arg-type]


def test_a_branch_costs_its_own_steps_if_the_trunk_kept_its_checkpoint() -> None:
    trunk = sized(16_384_000)
    begin = trunk_steps(replace(trunk, tokens=8_192_000))
    limits = Range(0.2 * flops_exact(trunk), flops_exact(trunk), 1.0, 1e6, 100)
    done = Progress(fixed=True, step=trunk.steps)
    with_checkpoint = Progress(fixed=True, step=trunk.steps, saved=frozenset([begin]))
    full_price, branch_price = (
        {
            offer.run.D: offer
            for offer in Market(trunk, [trunk], {run_id(trunk): progress}).offers([trunk.seed], limits)
            if offer.trunk == trunk_of(trunk)
        }
        for progress in (done, with_checkpoint)
    )
    assert full_price
    assert all(offer.flops == offer.size for offer in full_price.values())
    assert 8_192_000 not in full_price  # only offered as a branch of an existing checkpoint
    branch = branch_price[8_192_000]
    assert branch.flops == pytest.approx(branch.size * (1 - begin / branch.run.steps))
    assert own_flops(Market(trunk, [trunk], {run_id(trunk): with_checkpoint}).merge([branch.run])[0]) == branch.flops


REFUSED = [
    ({"budget": 0.0}, "budget is 0.0; it must be a positive number"),
    ({"budget": float("nan")}, "budget is nan"),
    pytest.param({"budget": 1e6}, r"budget is 1e\+06 FLOPs, but the smallest .*e\+10", marks=pytest.mark.slow),
    pytest.param({"budget": 1e12, "max_flops": 1e5}, r"max_flops 1e\+05, but the smallest run", marks=pytest.mark.slow),
    ({"budget": 1e12, "target_flops": 1e11}, r"target_flops is 1e\+11; it must be above"),
    ({"budget": 1e12, "target_flops": 0.0}, "target_flops is 0; it must be above"),
    ({"budget": 1e12, "seeds": -1}, "seeds is -1"),
    ({"budget": 1e12, "seeds": 100}, "seeds is 100; it must be at least 0 and at most 8"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_cannot_be_suggested_is_refused(sweep: SweepDirectory, options: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        suggest_runs(sweep, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


LAWS = [({"objective": "squares"}, ChinchillaLaw("squares")), ({"form": "gamma", "objective": "se"}, GammaLaw("se"))]


@pytest.mark.parametrize(("settings", "law"), LAWS)
def test_the_law_asked_is_that_of_the_fit(sweep: SweepDirectory, settings: dict[str, Any], law: ChinchillaLaw) -> None:
    config = prepare.configuration(sweep)
    standing = fit_standing(sweep, replace(config, fit=replace(config.fit, **settings)), 1e14)
    table = standing.table
    law.fit(table.N, table.D, table.loss, table.weight, table.known_se, table.flops)
    ((name, fitted),) = standing.mixture.laws_.items()
    assert name == repr(law.clone())
    assert fitted.constants_ == law.constants_  # to the bit: the same call on the same rows
    # The optimum over N is searched for to about 1e-8 in the loss.
    assert standing.loss.value == pytest.approx(float(law.optimal(1e14).loss[0]), rel=1e-6)


def test_runs_are_suggested_under_the_law_of_the_fit(suggestion: Suggestion, tmp_path: Path, capsys: Capture) -> None:
    config = make_config(IsoflopGrid(budgets=BUDGETS, sizes=4))
    config.fit.form = "overtraining"
    fixed_sweep = write_sweep(tmp_path / "sweep", config)
    finish(fixed_sweep)
    fixed_suggestion = suggest_runs(fixed_sweep, 1e12, 1e14, max_flops=4e11, max_runs=12)
    print_suggestion(fixed_suggestion)
    assert "under OvertrainingLaw():" in " ".join(capsys.readouterr().out.split())
    # The same runs determine four constants better than five constants or five forms.
    assert all(
        fixed_suggestion.before[name].relative_width < suggestion.before[name].relative_width
        for name in fixed_suggestion.before
    )


def test_fewer_runs_than_constants_are_refused(tmp_path: Path) -> None:
    small_sweep = write_sweep(tmp_path / "sweep", make_config(IsoflopGrid(budgets=[5e10], sizes=5)))
    finish(small_sweep)
    with pytest.raises(UserError, match=r"has 5 finished runs, and the law has 5 constants; at least 6 runs"):
        suggest_runs(small_sweep, 1e12)


# The adaptive grid


FOUR_BUDGETS = [1e11, 2e11, 5e11, 1e12]


def adaptive_settings(**changes: Any) -> SweepConfig:
    return make_config(AdaptiveGrid(**{"budgets": FOUR_BUDGETS, "tolerance": None, "rounds": 2} | changes))


def ask_round(sweep: SweepDirectory, config: SweepConfig) -> dict[str, Any] | None:
    assert isinstance(config.grid, AdaptiveGrid)
    return config.grid.ask_round(sweep, config)


def record(sweep: SweepDirectory) -> dict[str, Any]:
    return dict(json.loads((sweep.path / "adaptive.json").read_text()))


def spent(sweep: SweepDirectory) -> float:
    return sum(run["flops_own"] for run in sweep.plan()["runs"])


def train(sweep: SweepDirectory, config: SweepConfig, round_: dict[str, Any]) -> list[str]:
    """Add a round as the keeper does, finish its runs, and return the ids of the new runs."""
    new = extend.add_grid(sweep, config, extend.as_grid(round_, "test"), "a round")
    replan(sweep, config, [run.config() for run in membership.members(sweep)])
    finish(sweep)
    return new


def test_the_first_round_is_a_small_isoflop_grid_for_its_share_of_the_cost() -> None:
    base = RunConfig(tokens=0)
    base.model.vocab_size = 256
    first = grid.expand_grid(AdaptiveGrid(budgets=FOUR_BUDGETS), base)
    cost = sum(map(own_flops, merge_runs(first).runs))
    full_cost = sum(map(own_flops, merge_runs(grid.expand_grid(IsoflopGrid(budgets=FOUR_BUDGETS), base)).runs))
    assert 0.15 * full_cost < cost <= 0.2 * full_cost
    assert len(first) >= 10
    assert max(map(flops_exact, first)) <= 1e12 * 1.01
    # The search tries budgets in steps of 12 %.
    with_budget = grid.expand_grid(AdaptiveGrid(budgets=FOUR_BUDGETS, flops_budget=0.5 * full_cost), base)
    assert 0.07 * full_cost < sum(map(own_flops, merge_runs(with_budget).runs)) <= 0.1 * full_cost


@pytest.mark.slow
def test_rounds_stay_within_the_flops_and_narrow_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "ROUND_RUNS", 6)
    config = adaptive_settings()
    sweep = write_sweep(tmp_path / "sweep", config)
    finish(sweep)
    rounds = 0
    while (round_ := ask_round(sweep, config)) is not None:
        assert re.match(rf"round {rounds + 1}: \d+ runs of .* is \[.*\], and should become \[", round_summary(sweep))
        assert ask_round(sweep, config) == round_  # unchanged until its runs have been added and have ended
        assert train(sweep, config, round_) == record(sweep)["rounds"][-1]["runs"]
        rounds += 1
    assert rounds == 2
    assert record(sweep)["ended"] == "all 2 rounds are done"
    assert round_summary(sweep) == "the adaptive grid is over: all 2 rounds are done"
    assert ask_round(sweep, config) is None
    total = record(sweep)["rounds"][0]["flops_budget"]
    assert 0.7 * total < spent(sweep) <= total * (1 + 1e-9)  # a round has six runs at most
    after = fit_standing(sweep, config, 1e15)
    before = record(sweep)["rounds"][0]["before"]["loss"]
    assert after.loss.relative_width < 0.7 * (before["high"] - before["low"]) / before["value"]
    # The valley is flat, so the convention of FLOPs moves the optimum, but hardly its loss.
    assert after.loss.low < float(optimum(1e15, TRUTH)[2]) < after.loss.high


@pytest.mark.slow
def test_it_ends_when_the_flops_are_spent_the_interval_is_narrow_or_too_few_runs_are_done(tmp_path: Path) -> None:
    config = adaptive_settings()
    sweep = write_sweep(tmp_path / "poor", config)
    assert ask_round(sweep, config) is None
    assert "has 0 finished runs" in record(sweep)["ended"]
    finish(sweep)  # as after a retry
    assert ask_round(sweep, config) is not None
    assert record(sweep)["ended"] is None
    narrow = adaptive_settings(tolerance=0.9)
    narrow.fit.targets = [2e13]
    (sweep.path / "adaptive.json").unlink()
    assert ask_round(sweep, narrow) is None
    assert "% of the loss (asked for 90.00%)" in record(sweep)["ended"]
    (sweep.path / "adaptive.json").unlink()
    assert isinstance(config.grid, AdaptiveGrid)
    config.grid.flops_budget = spent(sweep) * 1.001
    assert ask_round(sweep, config) is None
    assert record(sweep)["ended"].endswith("FLOPs are spent")
