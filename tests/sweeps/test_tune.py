"""`isoflop tune`: its rungs, the file that it writes and a sweep reads, and the check of a grid's corners."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from fake_sweep import complete, replan, settings, write
from isoflop.sweeps import prepare
from isoflop.sweeps.config import CheckGrid, LadderGrid, SweepConfig, TuneGrid, TuningConfig, base_run
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.execute.check import check_corners, corners, variants
from isoflop.sweeps.execute.hopeless import Judge
from isoflop.sweeps.execute.local import LocalBackend
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.tune import rung_tokens, settings_of, tune_models
from isoflop.sweeps.grid.tuning import Tuner, read_rules
from isoflop.sweeps.growth import extend
from isoflop.sweeps.plan.foresight import foresee
from isoflop.sweeps.results.tuned import tried_settings, write_tuning
from isoflop.sweeps.runs import states
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.membership import members
from isoflop.train.config import RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from isoflop.train.flops import count_parameters, flops_exact
from isoflop.train.job.progress import SMOOTHING

TRUE = {"learning_rate": (0.01, 0.0, -0.05), "batch": (3.0, 0.0, 0.45), "timescale": (3.0, 0.4, -0.4)}


def tune_settings(**changes: object) -> SweepConfig:
    given = {"sizes": [6e3, 15e3, 37e3], "tokens_per_parameter": [10, 40, 160], "flops_budget": 1.8e13}
    return settings(TuneGrid(**given | changes))


def finish(sweep: SweepDirectory) -> None:
    """Gives every run a loss of which the best settings are known."""
    for directory in members(sweep):
        run = directory.config()
        N = count_parameters(run.model).N_total
        off = np.log(settings_of(run)) - [math.log(k * N**a * run.D**b) for k, a, b in TRUE.values()]
        luck = np.random.default_rng(int(directory.run_id, 16)).normal(0.0, 0.003)
        loss = (1.2 + 40 / N**0.5 + 300 / run.D**0.45) * math.exp(0.01 * (off**2).sum() + luck)
        summary = {"step": run.steps, "D": run.D, "N_total": N, "flops_exact": flops_exact(run)}
        write_json(directory.path / "summary.json", {**summary, "val_loss": loss, "val_loss_se": 0.01})
        directory.set_state("done")


def first_rung(config: SweepConfig) -> list[RunConfig]:
    assert config.grid is not None
    return expand_grid(config.grid, complete(base_run(config)), config.tuning)


def test_the_first_rung_spreads_settings_around_the_base_at_one_D() -> None:
    config = tune_settings()
    runs = first_rung(config)
    sizes = {count_parameters(run.model).N_total: [] for run in runs}
    for run in runs:
        sizes[count_parameters(run.model).N_total].append(run)
    assert len(sizes) == 3
    for mates in sizes.values():
        assert len({run.D for run in mates}) == 1
        assert {run.seed for run in mates} == {0}
        assert len(mates) == len({run_id(run) for run in mates})
        tried = np.log([settings_of(run) for run in mates])
        assert np.ptp(tried[:, 0]) > 0.9 * 2 * math.log(8)
        assert max(run.steps for run in mates) <= mates[0].D // 128
        assert min(run.steps for run in mates) >= 25
        assert (np.exp(tried[:, 2]) * [run.steps for run in mates] >= 3.0).all()  # weights are not forgotten at once


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_rungs_halve_towards_the_best_and_a_sweep_reads_their_rules(tmp_path: Path, kind: str) -> None:
    config = tune_settings()
    config.optimizer.kind = kind
    sweep = write(tmp_path / "tune", config)
    first = len(sweep.runs())
    for rung in (1, 2):
        finish(sweep)
        known = {run.run_id for run in members(sweep)}
        assert extend.next_round(sweep, config)
        fresh = [run for run in members(sweep) if run.run_id not in known]
        assert len(fresh) == 3 * (first // 3 >> rung)
        replan(sweep, config, [run.config() for run in members(sweep)])
        N = min(count_parameters(run.config().model).N_total for run in fresh)
        here = [run.config() for run in fresh if count_parameters(run.config().model).N_total == N]
        k, a, b = TRUE["learning_rate"]
        middle = np.exp(np.mean([math.log(run.optimizer.learning_rate) for run in here]))
        assert 0.4 < middle / (k * N**a * here[0].D ** b) < 2.5
    finish(sweep)
    assert not extend.next_round(sweep, config)
    law = write_tuning(sweep, config)
    assert "rules for tuning=law tuning.file=" in law["verdict"]
    content = yaml.safe_load((sweep.path / "tuning.yaml").read_text())
    low, high = content["intervals"]["batch_tokens"]["D"]
    assert low - 0.1 < 0.45 < high + 0.1
    base = complete(base_run(config))
    rules, remarks = read_rules(TuningConfig(file=str(sweep.path / "tuning.yaml")), base)
    assert remarks == []
    assert rules.batch_tokens is not None
    assert content["tuning"]["batch_tokens"]["D"] == rules.batch_tokens.D
    tuned = expand_grid(LadderGrid(sizes=[1e4], tokens=[10**6]), base, rules)[0]
    off = np.log(np.array(settings_of(tuned)) / [k * 1e4**a * 1e6**b for k, a, b in TRUE.values()])
    assert 0.01 * (off**2).sum() < 0.005  # the batch is rounded too


def test_runs_that_failed_are_no_settings_and_a_size_without_any_ends(tmp_path: Path) -> None:
    config = tune_settings()
    sweep = write(tmp_path / "tune", config)
    finish(sweep)
    smallest = min(count_parameters(run.config().model).N_total for run in sweep.runs())
    for run in sweep.runs():
        if count_parameters(run.config().model).N_total == smallest:
            run.set_state("diverged")
            (run.path / "summary.json").unlink()
    assert len(tried_settings(sweep)) == 2
    assert extend.next_round(sweep, config)
    fresh = [run.config() for run in members(sweep)][len(sweep.runs()) :]
    assert smallest not in {count_parameters(run.model).N_total for run in fresh}


def test_a_rung_with_the_tokens_of_a_larger_models_rung_before_is_another(tmp_path: Path) -> None:
    """The larger one is out of it, for its runs failed."""
    sweep = write(tmp_path / "tune", config := tune_settings(sizes=[7.4e3, 14.7e3], tokens_per_parameter=[10, 20]))
    finish(sweep)
    tokens = [run.config().tokens for run in sweep.runs()]
    assert max(tokens) == 2 * min(tokens)
    for run in sweep.runs():
        if run.config().tokens == max(tokens):
            run.set_state("diverged")
            (run.path / "summary.json").unlink()
    assert extend.next_round(sweep, config)


def test_bad_designs_are_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"grid.flops_budget is 1e\+09, and this design needs .* for 16 runs per size"):
        first_rung(tune_settings(flops_budget=1e9))
    config = tune_settings(tokens_per_parameter=[10, 1e5], flops_budget=1e18)
    with pytest.raises(UserError, match=r"grid.tokens_per_parameter gives .* times the corpus"):
        foresee(config.grid, first_rung(config), Tuner())
    with pytest.raises(UserError, match=r"grid.tokens_per_parameter is \[40.0, 10.0\]; a tune needs"):
        first_rung(tune_settings(tokens_per_parameter=[40.0, 10.0]))
    with pytest.raises(UserError, match=r"grid.sizes is \[\]"):
        first_rung(tune_settings(sizes=[]))


def test_every_batch_divides_D_in_every_rung() -> None:
    config = tune_settings()
    base = complete(base_run(config))
    assert isinstance(config.grid, TuneGrid)
    for model in tune_models(config.grid, base):
        tokens = [rung_tokens(config.grid, base, model, rung) for rung in range(3)]
        assert tokens[1:] == [4 * tokens[0], 16 * tokens[0]]
        assert tokens[0] % (128 * 192) == 0


def test_corners_are_compared_at_their_own_D_with_all_else_as_it_is(tmp_path: Path) -> None:
    config = settings(LadderGrid(sizes=[8e3, 2e4, 5e4], tokens=[2**17, 2**18, 2**19]))
    sweep = write(tmp_path / "grid", config)
    at = corners(sweep.runs())
    assert [run.config().D for run in at] == [2**17, 2**19] * 2
    assert len({count_parameters(run.config().model).N_total for run in at}) == 2
    run = replace(at[0].config(), parent=None)
    points = variants(run)
    base = complete(base_run(config))
    trained = expand_grid(CheckGrid(points=[point for point in points if point is not None]), base)
    assert run_id(trained[0]) == at[0].run_id  # what is the grid's own is known by the same fields
    assert [one.seed for one in trained] == [0, 1, 0, 0, 0, 0]
    assert [one.optimizer.learning_rate for one in trained] == [6e-3, 6e-3, 3e-3, 12e-3, 6e-3, 6e-3]
    assert [one.optimizer.batch_size for one in trained] == [8, 8, 8, 8, 4, 16]
    assert {one.D for one in trained} == {2**17}
    run.optimizer.batch_size = 1
    assert variants(run)[4] is None


# One thread a job: where others are at work on the cores, two that wait for each other crawl.
SMALL = [
    *("data.max_bytes=1000000", "data.validation_tokens=4096", "data.sequence_length=32", "fit.bootstrap=50"),
    *("cluster=local", "cluster.jobs=1", "cluster.threads_per_job=1", "tracker=none", "evaluate=none"),
    *("grid.sizes=[2.5e3,5e3]", "grid.tokens_per_parameter=[5,20]"),
]


@pytest.mark.slow
def test_a_tune_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["+grid=tune", *SMALL, f"output_root={tmp_path}", "grid.flops_budget=8.4e10", "grid.max_steps=100"]
    assert sweep_main(asked) == 0
    file = tmp_path / "tune" / "tuning.yaml"
    assert f"rules for tuning=law tuning.file={file}" in capfd.readouterr().out.replace("\n", "")
    first = file.read_text()
    assert yaml.safe_load(first)["tuning"]["base_depth"] == 2
    assert yaml.safe_load(first)["runs"] == len(list((tmp_path / "tune" / "runs").glob("*/summary.json")))
    assert sweep_main(asked) == 0
    assert "rung 2 of 2" not in capfd.readouterr().out  # there was nothing left to train
    assert file.read_text() == first


@pytest.mark.slow
def test_the_check_of_a_grid_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep_main(["+grid=ladder", *SMALL, f"output_root={tmp_path}", "tuning=fixed"]) == 0
    sweep = SweepDirectory(tmp_path / "ladder")
    assert check_corners(sweep) == 0
    assert len(list((sweep.path / "check" / "runs").iterdir())) == 20
    table = pd.read_csv(sweep.path / "table.csv")
    assert table["excess"].notna().sum() == 4
    assert (table["excess_se"].dropna() > 0).all()
    assert capfd.readouterr().out.count("above the best within a factor of 2") == 4
    before = (sweep.path / "untuned.csv").read_text()
    assert check_corners(sweep) == 0
    assert (sweep.path / "untuned.csv").read_text() == before
    print(table[["N", "D", "loss", "learning_rate", "batch_size", "excess", "excess_se"]].to_string())


def log_losses(run: RunDirectory, excess: float, share: float = 1.0) -> None:
    """A run's metrics up to a share of its steps; smoothed as the trainer does it."""
    config, smoothed, lines = run.config(), None, []
    for step in range(1, round(share * config.steps) + 1):
        loss = 2.0 * math.exp(0.3 * ((step / config.steps) ** -0.4 - 1) + excess)
        smoothed = loss if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
        lines.append(json.dumps({"step": step, "tokens": step * config.batch_tokens, "smoothed_loss": smoothed}) + "\n")
    (run.path / "metrics.jsonl").write_text("".join(lines))


def test_runs_of_a_tune_that_cannot_win_are_stopped_for_good(tmp_path: Path) -> None:
    config = tune_settings(stop_hopeless=True, sizes=[6e3], flops_budget=1.2e12)
    sweep = write(tmp_path / "tune", config)
    runs = members(sweep)
    finish(sweep)
    for run in runs:
        log_losses(run, math.log((run.summary() or {})["val_loss"] / 2.0))
    best = min(runs, key=lambda run: (run.summary() or {})["val_loss"])
    others = [run for run in runs if run is not best]
    for run, excess in ((others[0], 3.0), (others[1], -1.0)):
        (run.path / "summary.json").unlink()
        run.set_state("running")
        log_losses(run, excess, 0.4)
    judge = Judge.of(sweep)
    assert judge is not None
    judge.look([run.run_id for run in others[:2]])
    assert others[1].cancel_asked() is None
    said = others[0].cancel_asked()
    assert said is not None
    assert re.search(r"cannot win any more: probability \S+ at (39|40) % of its steps", said)
    assert others[0].given_up() is None  # it has yet to stop
    states.cancel(others[0], said)
    assert "cannot win" in str(others[0].state().reason)
    loss = others[0].given_up()
    assert loss is not None
    assert loss > (best.summary() or {})["val_loss"]
    (cell,) = tried_settings(sweep).values()
    assert len(cell) == len(runs) - 1
    assert (settings_of(others[0].config()), loss) in cell
    backend = LocalBackend(prepare.from_disk(sweep))
    assert backend.asked() == [others[1].run_id]
    states.retry_by_hand(others[0])  # unless a person asks for it
    assert len(LocalBackend(prepare.from_disk(sweep)).asked()) == 2
