"""Rules set hyperparameters from N and D; without rules nothing changes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from fake_sweep import make_config, replan, with_fingerprints, write_sweep
from isoflop.fit import published_law
from isoflop.sweeps import prepare
from isoflop.sweeps.config import SweepConfig, base_run
from isoflop.sweeps.entry import CONFIG, compose, sweep_main
from isoflop.sweeps.execute.check import check_corners, corners, variants
from isoflop.sweeps.execute.conduct import open_runs
from isoflop.sweeps.execute.hopeless import Judge
from isoflop.sweeps.grid import extend
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.isoflop import IsoflopGrid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.product import CheckGrid, PointsGrid, ProductGrid
from isoflop.sweeps.grid.tune import TuneGrid, settings_of, tried_settings, write_tuning
from isoflop.sweeps.grid.tuning import PowerRule, Tuner, TuningConfig, batch_size, family, power, weight_decay
from isoflop.sweeps.plan.trunks import merge_runs
from isoflop.sweeps.prepare import read_rules
from isoflop.sweeps.runs import lease
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.membership import members
from isoflop.train.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from isoflop.train.flops import count_parameters, flops_exact
from isoflop.train.job.progress import SMOOTHING
from isoflop.train.model.parametrization import empty_model, parameter_groups
from small_runs import Capture, set_state

BUDGETS = ["grid.budgets=[1e11,3e11,1e12]"]
POINT = "{model.width:32,model.depth:2,model.heads:2,tokens:1000000}"
# Run ids from before there were rules, by grid of conf/grid: their number, and the start of the SHA-256 of all ids.
IDS = {
    "adaptive": (BUDGETS, 11, "5d7b0e2ba9"),
    "chinchilla": (BUDGETS, 18, "8643efd110"),
    "data_recipe": ([], 48, "73a7b4ba3b"),
    "ladder": ([], 20, "bf4882c941"),
    "smoke": ([], 4, "3ccd9dc676"),
    "points": ([f"grid.points=[{POINT}]"], 1, "1f32316431"),
    "product": (
        ["grid.axes={optimizer.learning_rate:[4e-3,8e-3],seed:[0,1]}", "tokens=1000000"], 4, "edc008acc0"
    ),
}  # fmt: skip
RULES = TuningConfig(
    base_depth=4,
    batch_tokens=PowerRule(k=2.0, D=0.45),
    learning_rate=PowerRule(k=2e-3, D=-0.05, batch=0.25),
    timescale=PowerRule(k=1.084, N=0.527, D=-0.527),
)


def base(**changes: Any) -> RunConfig:
    return dataclasses.replace(RunConfig(model=ModelConfig(vocab_size=256), tokens=0), **changes)


@pytest.mark.parametrize("name", IDS)
def test_without_rules_every_grid_has_the_run_ids_of_before(name: str) -> None:
    overrides, number, digest = IDS[name]
    # On a cluster the default precision differs.
    config = compose([f"+grid={name}", *overrides, "tuning=fixed", "cluster=local"])
    run = base_run(config)
    run.model.vocab_size = 256
    assert config.grid is not None
    ids = [run_id(tuned) for tuned in expand_grid(config.grid, run, config.tuning)]
    assert (len(ids), hashlib.sha256(" ".join(ids).encode()).hexdigest()[:10]) == (number, digest)


def test_every_value_is_that_of_its_rule_at_the_runs_own_N_D_and_batch() -> None:
    for grid in (IsoflopGrid(budgets=[1e11, 1e12]), LadderGrid(sizes=[8e3, 6e4], tokens_per_parameter=[20, 320])):
        for run in expand_grid(grid, base(), RULES):
            N, D, B, optimizer = count_parameters(run.model).N_total, run.D, run.batch_tokens, run.optimizer
            assert run.tokens == D  # whole steps of the run's own batch
            assert 0.8 <= B / (2.0 * D**0.45) <= 1.25
            assert run.steps >= 100
            assert optimizer.base_depth == 4
            assert optimizer.learning_rate == pytest.approx(2e-3 * D**-0.05 * B**0.25, rel=1e-12)
            # The time scale of weight decay is the same share of the run for every matrix, with its rate and decay.
            gpt = empty_model(run.model, optimizer, 8)
            for group in parameter_groups(gpt, optimizer):
                if group.weight_decay:
                    tau = B / (group.learning_rate * group.weight_decay * D)
                    assert tau == pytest.approx(1.084 * (D / N) ** -0.527, rel=1e-9), group.name


def test_decay_under_muon_counts_with_the_rate_of_its_matrices() -> None:
    config = compose(["+grid=product", "optimizer=muon", "tokens=1048576", "grid.axes={model.width:[32,128]}"])
    rules = dataclasses.replace(config.tuning, timescale=PowerRule(k=0.2))
    run = base_run(config)
    run.model.vocab_size = 256
    for tuned in expand_grid(config.grid or ProductGrid(), with_fingerprints(run), rules):
        groups = parameter_groups(empty_model(tuned.model, tuned.optimizer, 8), tuned.optimizer)
        rates = [group.learning_rate * group.weight_decay for group in groups if group.optimizer == "muon"]
        assert rates
        assert tuned.batch_tokens / np.array(rates) / tuned.D == pytest.approx(0.2, rel=1e-12)


def test_the_published_rules_in_the_default_are_those_of_the_records() -> None:
    """Compare rules in tokens with records in sequences of 2048 tokens or in FLOPs."""
    text = (CONFIG / "tuning" / "transfer.yaml").read_text().partition("# Published")[2]
    power_lines, step_law, deepseek = (
        PowerRule(**yaml.safe_load(rule)) for rule in re.findall(r"batch_tokens: ({.*?})", text)
    )
    for N, D in ((1e8, 2e9), (1e10, 1e12)):
        assert power(power_lines, N, D, 1.0) == pytest.approx(2048 * published_law("bergsma2025_batch")(D), rel=1e-3)
        assert power(step_law, N, D, 1.0) == pytest.approx(published_law("steplaw2025_batch")(D), rel=1e-12)
        assert power(deepseek, N, D, 1.0) == pytest.approx(published_law("deepseek2024_batch")(6 * N * D), rel=1e-3)
    assert yaml.safe_load(re.findall(r"timescale: ({.*?})", text)[0]) == {"k": 1.084, "N": 0.527, "D": -0.527}
    tau = power(PowerRule(k=1.084, N=0.527, D=-0.527), 1e8, 2e9, 1.0)
    assert tau == pytest.approx(1.084 * 20**-0.527, rel=1e-12)
    assert tau is not None
    assert weight_decay(tau, 6e-3, 2e9, 2**19) == pytest.approx(2**19 / (6e-3 * tau * 2e9))


def test_a_point_is_tuned_as_the_grid_that_it_comes_from() -> None:
    runs = expand_grid(IsoflopGrid(budgets=[1e11, 2e11, 5e11, 1e12]), base(), RULES)
    points = [
        {**{f"model.{name}": getattr(run.model, name) for name in ("width", "depth", "heads")}, "tokens": run.tokens}
        for run in runs
    ]
    assert list(map(run_id, expand_grid(PointsGrid(points=points), base(), RULES))) == list(map(run_id, runs))


def test_what_a_user_names_wins_over_its_rule_and_the_rest_follows_it() -> None:
    grid = PointsGrid(points=[{"tokens": 10**6, "optimizer.batch_size": 32}, {"optimizer": {"learning_rate": 0.5}}])
    large, fast = expand_grid(grid, base(tokens=10**6), RULES)
    assert large.optimizer.batch_size == 32
    assert large.optimizer.learning_rate == pytest.approx(2e-3 * 1e6**-0.05 * large.batch_tokens**0.25)
    assert fast.optimizer.learning_rate == 0.5
    assert fast.optimizer.batch_size == 8
    config = compose(["+grid=ladder", "tuning=transfer", "optimizer.batch_size=5", "tuning.learning_rate.k=1e-4"])
    assert config.tuning.keep == ["optimizer.batch_size"]
    run = base_run(config)
    run.model.vocab_size = 256
    assert config.grid is not None
    assert {tuned.optimizer.batch_size for tuned in expand_grid(config.grid, run, config.tuning)} == {5}


def test_a_batch_takes_no_steps_from_a_short_run_and_is_whole_sequences() -> None:
    rules = TuningConfig(batch_tokens=PowerRule(k=4096.0), min_steps=100)
    for D, expected in ((2**20, 32), (2**18, 16), (2**16, 4), (2**13, 1)):
        assert batch_size(rules, 1e4, D, D, 128) == expected
    rules.batch_tokens.k = 6 * 128 * 1.01
    for least, size in {1: 6, 2: 6, 3: 6, 4: 8, 5: 5, 6: 6, 8: 8, 200: 200}.items():  # with 200, few steps
        assert batch_size(replace(rules, min_batch=least), 1e4, 2**20, 2**20, 128) == size
    grid = ProductGrid(axes={"tokens": [10**6, 10**5]})
    rules.batch_tokens = PowerRule(k=1e-4, D=1.0)  # 100 and 10 tokens
    small = expand_grid(grid, base(), rules)
    assert [run.optimizer.batch_size for run in small] == [1, 1]
    assert [Tuner(rules).misses_batch(run) for run in small] == [False, True]
    assert not any(Tuner(dataclasses.replace(rules, keep=["optimizer.batch_size"])).misses_batch(run) for run in small)
    rules.batch_tokens = PowerRule(k=2e6)
    with pytest.raises(UserError, match=r"batch_tokens gives 2e\+06 tokens at N .* and D .*; it must be at most D"):
        expand_grid(grid, base(), rules)


SMOKE = ["+grid=smoke"]
LARGE = ["+grid=ladder", "grid.sizes=[2e6]", "grid.tokens=[100000]", "grid.tokens_per_parameter=null"]
MESHES = (  # a grid, a mesh, and the tuning.min_batch that both need together
    (SMOKE, {"tp": 2, "cp": 2, "pp": 2}, 1),
    ([*SMOKE, "tuning.horizon=size"], {"dp": 3, "zero": 3}, 3),
    (SMOKE, {"dp": 2, "micro_batch_size": 2}, 4),
    (LARGE, {"pp": 2, "schedule": "interleaved", "chunks": 2}, 2),
    (["+grid=adaptive", "grid.budgets=[1e16]"], {"dp": 2}, 2),  # a later round may have odd batches
    (["+grid=tune", "grid.flops_budget=1e13", "tuning=fixed"], {"dp": 2}, 2),
    ([*SMOKE, "optimizer.batch_size=7"], {"dp": 2}, None),  # the rules do not choose it
)


@pytest.mark.parametrize(("overrides", "mesh", "least"), MESHES)
def test_a_mesh_must_divide_the_batch(overrides: list[str], mesh: dict[str, Any], least: int | None) -> None:
    config = compose([*overrides, "cluster=local"])
    alone = base_run(config)
    alone.model.vocab_size = 256
    meshed = replace(alone, parallel=ParallelConfig(**mesh))
    assert config.grid is not None
    if least != 1:
        remedy = "7: 1, 7$" if least is None else rf"; or set tuning\.min_batch={least}, so that"
        with pytest.raises(UserError, match=rf"parallel\.\w+ is \d.*{remedy}"):
            expand_grid(config.grid, meshed, config.tuning)
    if least is not None:
        config.tuning.min_batch = least
        runs = expand_grid(config.grid, meshed, config.tuning)
        assert list(map(run_id, runs)) == list(map(run_id, expand_grid(config.grid, alone, config.tuning)))
        assert all(run.optimizer.batch_size % least == 0 for run in runs)


def test_a_sweep_of_an_earlier_version_grows_by_batches_that_its_mesh_divides(tmp_path: Path) -> None:
    """Remove min_batch from its settings: the rules chose multiples of parallel.dp."""
    config = make_config(LadderGrid(sizes=[8e3], tokens=[2**18]))
    config.tuning, config.parallel.dp = TuningConfig(batch_tokens=PowerRule(k=400.0), min_batch=2), 2
    sweep = write_sweep(tmp_path / "old", config)
    settings = yaml.safe_load((sweep.path / "sweep.yaml").read_text())
    del settings["config"]["tuning"]["min_batch"]
    (sweep.path / "sweep.yaml").write_text(yaml.safe_dump(settings))
    (name,) = extend.extend_sweep(sweep, ["grid.tokens=[524288]"])
    assert sweep.run(name).config().optimizer.batch_size == 4


def test_values_of_the_longest_run_of_a_size_keep_its_trunk() -> None:
    grid = LadderGrid(sizes=[8e3, 3e4], tokens_per_parameter=[40, 80, 320])
    by_run = merge_runs(expand_grid(grid, base(), RULES)).runs
    assert not [run for run in by_run if run.parent]
    shared = merge_runs(expand_grid(grid, base(), dataclasses.replace(RULES, horizon="size"))).runs
    assert sum(run.parent is not None for run in shared) == 4
    for longest in (shared[2], shared[5]):
        tuned = Tuner(RULES).tuned(dataclasses.replace(longest))
        assert tuned.optimizer == longest.optimizer
    # A run that is added later has the values of the runs of its size.
    shape = {f"model.{name}": getattr(shared[2].model, name) for name in ("width", "depth", "heads")}
    points, size = PointsGrid(points=[shape | {"tokens": 10**6}]), dataclasses.replace(RULES, horizon="size")
    (joined,) = expand_grid(points, base(), size, shared)
    assert joined.optimizer == shared[2].optimizer


def test_one_dial_gives_the_shape_and_D() -> None:
    config = compose(["+grid=one", "model=dial", "model.depth=6", "tuning=transfer"])
    run = base_run(config)
    run.model.vocab_size = 256
    assert config.grid is not None
    (dialed,) = expand_grid(config.grid, run, config.tuning)
    assert (dialed.model.width, dialed.model.depth, dialed.model.heads) == (128, 6, 8)
    assert dialed.tokens == 20 * count_parameters(dialed.model).N_total
    assert dialed.optimizer.base_depth == 2
    assert dialed.optimizer.batch_size != run.optimizer.batch_size
    dialed = expand_grid(ProductGrid(axes={"model.depth": [2, 12]}), run, config.tuning)[1]
    assert (dialed.model.width, dialed.model.heads) == (576, 9)


def test_a_file_of_rules_names_what_differs_and_refuses_another_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    tuning = {"learning_rate": {"k": 0.01, "D": -0.1}, "base_depth": 2, "min_steps": 50}
    values = {"tuning": tuning, "family": family(base()), "intervals": {"learning_rate": {"k": [0.009, 0.011]}}}
    path.write_text(yaml.safe_dump(values))
    requested = TuningConfig(file=str(path), base_depth=8, horizon="size")
    rules, remarks = read_rules(requested, base())
    assert remarks == []
    assert rules.file is None
    assert rules.horizon == "size"
    assert (rules.learning_rate, rules.base_depth, rules.min_steps) == (PowerRule(k=0.01, D=-0.1), 8, 50)
    # The rules choose the rate, so its difference is not reported.
    other = base(optimizer=OptimizerConfig(learning_rate=1.0, z_loss=1e-4))
    (remark,) = read_rules(requested, other)[1]
    assert "optimizer.z_loss 0.0 (here 0.0001)" in remark
    assert "learning_rate" not in remark
    with pytest.raises(UserError, match=r"vocab_size 256; it must be 512"):
        read_rules(requested, base(model=ModelConfig(vocab_size=512)))
    for text, problem in (
        ("tuning: {rate: 1}\nfamily: {}", "rate"),
        ("tuning: {learning_rate: fast}\nfamily: {}", "not a subclass of PowerRule"),
        ("family: {}", "tuning"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=problem):
            read_rules(requested, base())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"min_steps": 0}, r"tuning\.min_steps is 0; it must be 1 or more"),
        ({"timescale": PowerRule(k=-1.0)}, r"tuning\.timescale\.k is -1\.0; it must be greater than 0"),
        ({"timescale": PowerRule(k=1.0, D=math.inf)}, r"tuning\.timescale\.D is inf"),
        ({"batch_tokens": PowerRule(k=1e3, batch=0.5)}, r"tuning\.batch_tokens\.batch is 0\.5; it must be 0"),
        ({"horizon": "all"}, r"tuning\.horizon is 'all'; it must be one of run, size"),
        ({"keep": ["optimizer.rate"]}, r"tuning\.keep contains 'optimizer\.rate'; it must be one of"),
    ],
)
def test_rules_that_make_no_sense_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        expand_grid(ProductGrid(axes={"seed": [0]}), base(tokens=10**6), TuningConfig(**changes))


# The command tune


TRUE = {"learning_rate": (0.01, 0.0, -0.05), "batch": (3.0, 0.0, 0.45), "timescale": (3.0, 0.4, -0.4)}


def tune_settings(**changes: object) -> SweepConfig:
    design = {"sizes": [6e3, 15e3, 37e3], "tokens_per_parameter": [10, 40, 160], "flops_budget": 1.8e13}
    return make_config(TuneGrid(**design | changes))


def finish(sweep: SweepDirectory) -> None:
    """Give every run a loss whose best settings are known."""
    for directory in members(sweep):
        run = directory.config()
        N = count_parameters(run.model).N_total
        distance = np.log(settings_of(run)) - [math.log(k * N**a * run.D**b) for k, a, b in TRUE.values()]
        noise = np.random.default_rng(int(directory.run_id, 16)).normal(0.0, 0.003)
        loss = (1.2 + 40 / N**0.5 + 300 / run.D**0.45) * math.exp(0.01 * (distance**2).sum() + noise)
        summary = {"step": run.steps, "D": run.D, "N_total": N, "flops_exact": flops_exact(run)}
        write_json(directory.path / "summary.json", {**summary, "val_loss": loss, "val_loss_se": 0.01})
        set_state(directory, "done")


def first_rung(config: SweepConfig) -> list[RunConfig]:
    assert config.grid is not None
    return expand_grid(config.grid, with_fingerprints(base_run(config)), config.tuning)


def test_the_first_rung_spreads_settings_around_the_base_at_one_D() -> None:
    config = tune_settings()
    runs = first_rung(config)
    sizes = {count_parameters(run.model).N_total: [] for run in runs}
    for run in runs:
        sizes[count_parameters(run.model).N_total].append(run)
    assert len(sizes) == 3
    for same_size in sizes.values():
        assert len({run.D for run in same_size}) == 1
        assert {run.seed for run in same_size} == {0}
        assert len(same_size) == len({run_id(run) for run in same_size})
        tried = np.log([settings_of(run) for run in same_size])
        assert np.ptp(tried[:, 0]) > 0.9 * 2 * math.log(8)
        assert max(run.steps for run in same_size) <= same_size[0].D // 128
        assert min(run.steps for run in same_size) >= 25
        # Weights do not decay within a few steps.
        assert (np.exp(tried[:, 2]) * [run.steps for run in same_size] >= 3.0).all()


def test_rungs_halve_towards_the_best_and_a_sweep_reads_their_rules(tmp_path: Path) -> None:
    config = tune_settings()
    sweep = write_sweep(tmp_path / "tune", config)
    first = len(sweep.runs())
    for rung in (1, 2):
        finish(sweep)
        earlier = {run.run_id for run in members(sweep)}
        assert extend.next_round(sweep, config)
        new_runs = [run for run in members(sweep) if run.run_id not in earlier]
        assert len(new_runs) == 3 * (first // 3 >> rung)
        replan(sweep, config, [run.config() for run in members(sweep)])
        N = min(count_parameters(run.config().model).N_total for run in new_runs)
        smallest = [run.config() for run in new_runs if count_parameters(run.config().model).N_total == N]
        k, a, b = TRUE["learning_rate"]
        middle = np.exp(np.mean([math.log(run.optimizer.learning_rate) for run in smallest]))
        assert 0.4 < middle / (k * N**a * smallest[0].D ** b) < 2.5
    finish(sweep)
    assert not extend.next_round(sweep, config)
    law = write_tuning(sweep, config)
    assert "rules for tuning=law tuning.file=" in law["verdict"]
    content = yaml.safe_load((sweep.path / "tuning.yaml").read_text())
    low, high = content["intervals"]["batch_tokens"]["D"]
    assert low - 0.1 < 0.45 < high + 0.1
    base = with_fingerprints(base_run(config))
    rules, remarks = read_rules(TuningConfig(file=str(sweep.path / "tuning.yaml")), base)
    assert remarks == []
    assert rules.batch_tokens is not None
    assert content["tuning"]["batch_tokens"]["D"] == rules.batch_tokens.D
    tuned = expand_grid(LadderGrid(sizes=[1e4], tokens=[10**6]), base, rules)[0]
    distance = np.log(np.array(settings_of(tuned)) / [k * 1e4**a * 1e6**b for k, a, b in TRUE.values()])
    assert 0.01 * (distance**2).sum() < 0.005  # the batch is also rounded


def test_runs_that_failed_are_no_settings_and_a_size_without_any_ends(tmp_path: Path) -> None:
    config = tune_settings()
    sweep = write_sweep(tmp_path / "tune", config)
    finish(sweep)
    smallest = min(count_parameters(run.config().model).N_total for run in sweep.runs())
    for run in sweep.runs():
        if count_parameters(run.config().model).N_total == smallest:
            set_state(run, "diverged")
            (run.path / "summary.json").unlink()
    assert len(tried_settings(sweep)) == 2
    assert extend.next_round(sweep, config)
    new_configs = [run.config() for run in members(sweep)][len(sweep.runs()) :]
    assert smallest not in {count_parameters(run.model).N_total for run in new_configs}


def test_bad_designs_are_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"grid.flops_budget is 1e\+09, but this design needs .* for 16 runs per size"):
        first_rung(tune_settings(flops_budget=1e9))
    config = tune_settings(tokens_per_parameter=[10, 1e5], flops_budget=1e18)
    with pytest.raises(UserError, match=r"grid.tokens_per_parameter gives .* times the corpus"):
        config.grid.notes(first_rung(config), Tuner())
    with pytest.raises(UserError, match=r"grid.tokens_per_parameter is \[40.0, 10.0\]; a tune needs"):
        first_rung(tune_settings(tokens_per_parameter=[40.0, 10.0]))
    with pytest.raises(UserError, match=r"grid.sizes is \[\]"):
        first_rung(tune_settings(sizes=[]))


def test_corners_are_compared_at_their_own_D_with_all_else_as_it_is(tmp_path: Path) -> None:
    config = make_config(LadderGrid(sizes=[8e3, 2e4, 5e4], tokens=[2**17, 2**18, 2**19]))
    sweep = write_sweep(tmp_path / "grid", config)
    corner_runs = corners(sweep.runs())
    assert [run.config().D for run in corner_runs] == [2**17, 2**19] * 2
    assert len({count_parameters(run.config().model).N_total for run in corner_runs}) == 2
    run = replace(corner_runs[0].config(), parent=None)
    points = variants(run)
    base = with_fingerprints(base_run(config))
    trained = expand_grid(CheckGrid(points=[point for point in points if point is not None]), base)
    assert run_id(trained[0]) == corner_runs[0].run_id  # the unchanged variant is the run of the grid
    assert [variant.seed for variant in trained] == [0, 1, 0, 0, 0, 0]
    assert [variant.optimizer.learning_rate for variant in trained] == [6e-3, 6e-3, 3e-3, 12e-3, 6e-3, 6e-3]
    assert [variant.optimizer.batch_size for variant in trained] == [8, 8, 8, 8, 4, 16]
    assert {variant.D for variant in trained} == {2**17}
    for run.optimizer.batch_size, run.parallel.dp in ((1, 1), (2, 2)):
        assert [point is None for point in variants(run)] == [False] * 4 + [True, False]


# One thread per job: on busy cores two threads with a barrier are very slow.
SMALL = [
    *("data.max_bytes=1000000", "data.validation_tokens=4096", "data.sequence_length=32", "fit.bootstrap=50"),
    *("cluster=local", "cluster.jobs=1", "cluster.threads_per_job=1", "tracker=none", "evaluate=none"),
    *("grid.sizes=[2.5e3,5e3]", "grid.tokens_per_parameter=[5,20]"),
]


@pytest.mark.slow
def test_a_tune_end_to_end(tmp_path: Path, capfd: Capture) -> None:
    arguments = ["+grid=tune", *SMALL, f"output_root={tmp_path}", "grid.flops_budget=8.4e10", "grid.max_steps=100"]
    assert sweep_main(arguments) == 0
    file = tmp_path / "tune" / "tuning.yaml"
    assert f"rules for tuning=law tuning.file={file}" in capfd.readouterr().out.replace("\n", "")
    first = file.read_text()
    assert yaml.safe_load(first)["tuning"]["base_depth"] == 2
    assert yaml.safe_load(first)["runs"] == len(list((tmp_path / "tune" / "runs").glob("*/summary.json")))
    assert sweep_main(arguments) == 0
    assert "rung 2 of 2" not in capfd.readouterr().out  # nothing was left to train
    assert file.read_text() == first


@pytest.mark.slow
def test_the_check_of_a_grid_end_to_end(tmp_path: Path, capfd: Capture) -> None:
    arguments = ["+grid=ladder", *SMALL, "grid.tokens_per_parameter=[5,10]", "tuning=fixed"]
    assert sweep_main([*arguments, f"output_root={tmp_path}"]) == 0
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


def log_losses(run: RunDirectory, excess: float, share: float = 1.0) -> None:
    """Write a run's metrics up to a share of its steps, smoothed as the trainer does."""
    config, smoothed, lines = run.config(), None, []
    for step in range(1, round(share * config.steps) + 1):
        loss = 2.0 * math.exp(0.3 * ((step / config.steps) ** -0.4 - 1) + excess)
        smoothed = loss if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
        lines.append(json.dumps({"step": step, "tokens": step * config.batch_tokens, "smoothed_loss": smoothed}) + "\n")
    (run.path / "metrics.jsonl").write_text("".join(lines))


def test_runs_of_a_tune_that_cannot_win_are_stopped_for_good(tmp_path: Path) -> None:
    config = tune_settings(stop_hopeless=True, sizes=[6e3], flops_budget=1.2e12)
    sweep = write_sweep(tmp_path / "tune", config)
    runs = members(sweep)
    finish(sweep)
    for run in runs:
        log_losses(run, math.log((run.summary() or {})["val_loss"] / 2.0))
    best = min(runs, key=lambda run: (run.summary() or {})["val_loss"])
    others = [run for run in runs if run is not best]
    for run, excess in ((others[0], 3.0), (others[1], -1.0)):
        (run.path / "summary.json").unlink()
        set_state(run, "running")
        log_losses(run, excess, 0.4)
    judge = Judge.of(sweep)
    assert judge is not None
    judge.stop_hopeless([run.run_id for run in others[:2]])
    assert others[1].cancel_asked() is None
    request = others[0].cancel_asked()
    assert request is not None
    assert re.search(r"can no longer win: probability \S+ at (39|40) % of its steps", request)
    assert others[0].given_up() is None  # it has not stopped yet
    lease.cancel(others[0], f"cancelled by {request}")
    assert "can no longer win" in str(others[0].state().reason)
    loss = others[0].given_up()
    assert loss is not None
    assert loss > (best.summary() or {})["val_loss"]
    (cell,) = tried_settings(sweep).values()
    assert len(cell) == len(runs) - 1
    assert (settings_of(others[0].config()), loss) in cell
    assert [run.run_id for run in open_runs(prepare.from_disk(sweep), None)] == [others[1].run_id]
    lease.reset(others[0], lease.Policy())  # unless the user asks for it
    assert len(open_runs(prepare.from_disk(sweep), None)) == 2
