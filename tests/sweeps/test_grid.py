"""Grids expand, as pure functions of their config, to distinct, well-shaped runs."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_sweep
import pytest
import yaml
from isoflop import fit
from isoflop.sweeps.grid import architectures
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.adaptive import AdaptiveGrid
from isoflop.sweeps.grid.base import GridConfig
from isoflop.sweeps.grid.expand import expand_grid
from isoflop.sweeps.grid.isoflop import CurvesGrid, IsoflopGrid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.product import PointsGrid, ProductGrid
from isoflop.sweeps.grid.tune import TuneGrid
from isoflop.sweeps.grid.tuning import Tuner, TuningConfig
from isoflop.sweeps.plan.trunks import Progress, merge_runs, own_flops, own_steps
from isoflop.sweeps.results.finish import write_results
from isoflop.sweeps.results.table import write_curves
from isoflop.train.checkpoint.heldout import validation_steps
from isoflop.train.config import AverageConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, flops_6nd, flops_exact
from isoflop.train.planner.validation import validate
from isoflop.train.schedule import learning_rate_factor, same_until, trunk_steps, warmup_steps


def base(**changes: object) -> RunConfig:
    run = RunConfig(model=ModelConfig(vocab_size=256), tokens=0)
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def ladder(**changes: object) -> LadderGrid:
    return LadderGrid(sizes=[1e4, 3e4], tokens_per_parameter=[20, 40], **changes)  # type: ignore[arg-type]


BUDGETS = [1e11, 2e11, 5e11, 1e12]


def test_every_isoflop_run_spends_its_budget_to_within_a_step() -> None:
    runs = grid.expand_grid(IsoflopGrid(budgets=BUDGETS), base())
    for run in runs:
        step = flops_exact(run) / run.steps
        assert run.budget is not None
        assert abs(flops_exact(run) - run.budget) <= step / 2 * (1 + 1e-9)


def test_the_expected_optimum_grows_by_the_tables_of_a_larger_vocabulary() -> None:
    points = IsoflopGrid(expected_N=22e3)
    # To the last bit, so that run ids do not change.
    assert points.expected_size(ModelConfig(vocab_size=256), 2.5e11) == 22e3
    width = architectures.nearest_model(ModelConfig(vocab_size=256), 22e3).width
    assert points.expected_size(ModelConfig(vocab_size=4096), 2.5e11) == 22e3 + (4096 - 256) * width
    untied = ModelConfig(vocab_size=256, tied_embeddings=False)
    assert points.expected_size(untied, 2.5e11) == 22e3 + 256 * width


def test_the_6nd_convention_spends_6nd() -> None:
    for run in grid.expand_grid(IsoflopGrid(budgets=[1e12], convention="6nd"), base()):
        assert flops_6nd(run) == pytest.approx(1e12, rel=0.5 / run.steps)


def cluster_run() -> RunConfig:
    run = base(model=ModelConfig(vocab_size=32768), optimizer=OptimizerConfig(batch_size=256))
    run.data.sequence_length = 1024
    return run


@pytest.mark.parametrize(
    ("template", "budgets", "share"),
    [
        (base(), [5e10, 1e11, 2.5e11, 5e11], 0.77),
        (base(), BUDGETS, 0.77),
        (cluster_run(), [1e18, 2e18, 5e18, 1e19], 0.89),  # here many D are too short for the warm-up of their N
    ],
)
def test_neighbouring_budgets_share_sizes_and_trunks(template: RunConfig, budgets: list[float], share: float) -> None:
    runs = grid.expand_grid(IsoflopGrid(budgets=budgets), template)
    assert len(runs) == 24
    assert len({(run.budget, count_parameters(run.model).N_total) for run in runs}) == 24
    assert len({count_parameters(run.model).N_total for run in runs}) <= 9
    assert sum(map(own_flops, merge_runs(runs).runs)) <= share * sum(map(flops_exact, runs))


@pytest.mark.parametrize("sizes", [1, 2, 5, 6])
def test_the_lattice_moves_the_middle_by_half_a_gap_at_most(sizes: int) -> None:
    points = IsoflopGrid(sizes=sizes, span=16)
    for budget in [10 ** (16 + i / 7) for i in range(28)]:
        model = ModelConfig(vocab_size=32768)
        parameter_counts = [count_parameters(m).N_total for m in points.models(model, budget)]
        expected = points.expected_size(model, budget)
        middle = math.fsum(map(math.log, parameter_counts)) / sizes
        half = math.log(16) / (sizes - 1) / 2 if sizes > 1 else 0.0
        assert abs(middle - math.log(expected)) <= half + 0.2  # the nearest well-shaped model is up to 20 % off


def test_a_point_that_is_no_training_is_left_out() -> None:
    runs = grid.expand_grid(IsoflopGrid(budgets=[2e10], min_steps=200), base())
    assert 0 < len(runs) < 6
    assert all(run.steps >= 200 for run in runs)


@pytest.mark.parametrize("seed", range(2))
def test_architectures_tile_well(seed: int) -> None:
    """Check that any size gives whole heads of a size that suits kernels, at a depth near the rule."""
    rng = random.Random(seed)
    for _ in range(50):
        size = 10 ** rng.uniform(4, 10)
        kv_groups = rng.choice([1, 2, 4])
        template = ModelConfig(vocab_size=rng.choice([256, 32768]), heads=4, kv_heads=4 // kv_groups)
        model = architectures.nearest_model(template, size)
        assert model.width % model.heads == 0
        assert model.heads % model.num_kv_heads == 0
        assert model.width < 32 or model.head_dim in (16, 32, 64, 128)
        assert 0.4 < model.depth / (0.5 * model.width**0.5) < 2.6


def test_a_ladder_is_every_size_times_every_d() -> None:
    runs = grid.expand_grid(LadderGrid(sizes=[1e4, 1e5], tokens_per_parameter=[20, 40]), base())
    ratios = sorted(run.D / count_parameters(run.model).N_total for run in runs)
    assert len(runs) == 4
    # D is rounded to whole steps of 1024 tokens, and the config has the rounded value.
    assert all(run.tokens == run.D for run in runs)
    assert ratios == pytest.approx([20, 20, 40, 40], rel=512 / 2e5)
    twice = LadderGrid(sizes=[1e4, 1.001e4], tokens=[1, 10_000, 10_300])  # both sizes are the same model
    assert [run.D for run in grid.expand_grid(twice, base())] == [1024, 10240]


def test_a_product_is_every_combination_and_takes_dotted_or_nested_names() -> None:
    axes = ({"optimizer.learning_rate": [1e-3, 2e-3]}, {"optimizer": {"learning_rate": [1e-3, 2e-3]}})
    dotted, nested = (grid.expand_grid(ProductGrid(axes=a | {"seed": [0, 1, 2]}), base(tokens=4096)) for a in axes)
    assert len(dotted) == 6
    assert [run_id(run) for run in dotted] == [run_id(run) for run in nested]
    assert {(run.optimizer.learning_rate, run.seed) for run in dotted} == {
        (r, s) for r in (1e-3, 2e-3) for s in range(3)
    }


def test_points_are_runs_one_by_one_and_take_dotted_or_nested_names() -> None:
    dotted = [{"model.width": 32, "model.heads": 2, "tokens": 4096}, {"tokens": 8192, "seed": 3}]
    nested = [{"model": {"width": 32, "heads": 2}, "tokens": 4096}, {"tokens": 8192, "seed": 3}]
    runs = grid.expand_grid(PointsGrid(points=dotted), base())
    assert [(run.model.width, run.model.heads, run.tokens, run.seed) for run in runs] == [
        (32, 2, 4096, 0), (64, 4, 8192, 3),
    ]  # fmt: skip
    assert [run_id(run) for run in grid.expand_grid(PointsGrid(points=nested), base())] == [run_id(run) for run in runs]
    assert len(grid.expand_grid(PointsGrid(points=[dotted[0], dotted[0]], seeds=[0, 1]), base())) == 2


REFUSED = [  # numbers out of range: test_fields.py
    (IsoflopGrid(budgets=[1e6]), {}, r"grid.budgets contains 1e\+06.*needs .*FLOPs"),
    (IsoflopGrid(budgets=[]), {}, "give a list"),
    (IsoflopGrid(budgets=[1e12], convention="7nd"), {}, "must be one of exact, 6nd"),
    (IsoflopGrid(budgets=[1e12]), {"tokens": 5}, "chooses D itself"),
    (LadderGrid(sizes=[1e4]), {}, "exactly one of them"),
    (LadderGrid(sizes=[], tokens=[1]), {}, "grid has no runs"),
    (LadderGrid(sizes=[1e4, 2e4, 1e4], tokens=[1]), {}, "grid.sizes contains 10000.0 more than once"),
    (LadderGrid(sizes=[1e4], tokens=[1], seeds=[0, 0]), {}, "grid.seeds contains 0 more than once"),
    (ProductGrid(axes={}), {"tokens": 1}, "grid.axes is empty"),
    (ProductGrid(axes=[1, 2]), {"tokens": 1}, "must map fields to values"),
    (ProductGrid(axes={"seed": [0]}), {}, "tokens is not set"),
    (ProductGrid(axes={"seed": 3}), {"tokens": 1}, "must be a list"),
    (ProductGrid(axes={"optimizer.inertia": [1]}), {"tokens": 1}, "not a field of a run"),
    (ProductGrid(axes={"log_every": [1, 2]}), {"tokens": 1}, "'log_every', which does not change what a run learns"),
    (ProductGrid(axes={"optimizer": [1]}), {"tokens": 1}, "names the group 'optimizer'"),
    (ProductGrid(axes={"seed": ["many"]}), {"tokens": 1}, "grid.axes.seed contains 'many'"),
    (PointsGrid(), {}, "grid.points is None; it must be a list of runs"),
    (PointsGrid(points=[7]), {}, "grid.points\\[0\\] is 7; it must map fields to values"),
    (PointsGrid(points=[{"tokens": 1}, {"seed": 1}]), {}, "grid.points\\[1\\] has no tokens"),
    (PointsGrid(points=[{"model.heads": 5, "tokens": 1}]), {}, "model.heads is 5; it must divide model.width 64"),
    (
        AdaptiveGrid(budgets=[1e12], flops_budget=1e10),
        {},
        "grid.flops_budget is 1e\\+10, .* too little for a first round",
    ),
    (CurvesGrid(budgets=[1e12]), {}, "average.kind is none; curves are read from averaged weights"),
    (
        CurvesGrid(),
        {"average": AverageConfig("ema"), "schedule": ScheduleConfig("cosine")},
        "kind is cosine; .* needs wsd",
    ),
    (CurvesGrid(), {"average": AverageConfig("ema"), "tokens": 1000}, "a grid of kind curves chooses D itself"),
    (AdaptiveGrid(variants={"a": {"model.qk_norm": True}}), {}, "grid.recipes or an adaptive grid"),
    (ladder(variants=[1]), {}, "grid.variants is \\[1\\]; it must map names"),
    (ladder(variants={"a": {}}), {}, "grid.variants.a is {}; it must be overrides that change a run"),
    (ladder(variants={"a": {"data.validation_tokens": 5}}), {}, "a changes data.validation_tokens; variants share"),
    (ladder(variants={"a": {"log_every": 5}}), {}, "grid.variants.a has the same run as base"),
    (GridConfig(kind="spiral"), {}, "one of adaptive, check, curves, isoflop, ladder, mixture, points, precision, "),
]


def test_an_empty_list_of_budgets_does_not_ask_for_a_probe() -> None:
    for points in (IsoflopGrid(), TuneGrid(sizes=[1e4], tokens_per_parameter=[5.0])):
        points.fill_budgets([], lambda: [1e12])
        with pytest.raises(UserError, match=r"grid.budgets is \[\]; give a list|grid.flops_budget is 0"):
            grid.expand_grid(points, base())


def test_variants_have_the_points_and_seeds_of_the_base_and_their_own_runs() -> None:
    variants = {"norm": {"model.qk_norm": True}, "hot": {"optimizer.learning_rate": 0.012, "optimizer.beta2": 0.9}}
    runs = grid.expand_grid(ladder(variants=variants, seeds=[0, 1]), base())
    base_runs = grid.expand_grid(ladder(seeds=[0, 1]), base())
    by_variant = {name: [run for run in runs if run.variant == name] for name in ("base", "norm", "hot")}
    assert [run_id(run) for run in by_variant["base"]] == [run_id(run) for run in base_runs]
    assert len({run_id(run) for run in runs}) == len(runs) == 3 * len(base_runs)
    for name in variants:
        expected = [(run.seed, run.model.width) for run in base_runs]
        assert [(run.seed, run.model.width) for run in by_variant[name]] == expected
    # With a norm there are more parameters, so D differs.
    assert [run.D for run in by_variant["hot"]] == [run.D for run in base_runs]
    assert all(run.model.qk_norm for run in by_variant["norm"])
    assert {run.optimizer.learning_rate for run in by_variant["hot"]} == {0.012}
    assert (by_variant["hot"][0].name or "").endswith("_s0_hot")


@pytest.mark.parametrize(("points", "changes", "sentence"), REFUSED)
def test_bad_grids_are_refused_in_one_sentence(points: GridConfig, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        grid.expand_grid(points, base(**changes))
    assert "\n" not in str(error.value)


# Runs that share a trunk


ROOT = Path(__file__).resolve().parents[2]
HALF_TO_EIGHT = (0.5, 1, 2, 4, 8)


def scheduled(**schedule: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=256), tokens=0, schedule=ScheduleConfig(**schedule))


def large() -> RunConfig:
    """Return the template of a run with steps of 262,144 tokens, as on a cluster."""
    run = scheduled()
    run.model.vocab_size, run.optimizer.batch_size, run.data.sequence_length = 32768, 256, 1024
    return run


def by_steps(*steps: int, **schedule: Any) -> list[RunConfig]:
    """Return runs that differ only in their number of steps."""
    template = scheduled(**{"warmup_tokens": 2048, **schedule})
    return [replace(template, name=f"D{number}", tokens=number * template.batch_tokens) for number in steps]


DEFAULTS = yaml.safe_load((ROOT / "conf" / "grid" / "ladder.yaml").read_text())
SIZES = [float(size) for size in DEFAULTS["sizes"]]  # YAML 1.1 reads 8.0e3 as a string; Hydra reads a number
LADDERS = [
    (scheduled(), SIZES, DEFAULTS["tokens_per_parameter"]),
    (scheduled(), SIZES, [20 * multiple for multiple in HALF_TO_EIGHT]),
    (scheduled(), [3e3, 1e5, 1e6], [20 * multiple for multiple in HALF_TO_EIGHT]),
    (large(), [2e7, 1e8, 4e8, 1e9, 7e9], [20 * multiple for multiple in HALF_TO_EIGHT]),
]


@pytest.mark.parametrize(("template", "sizes", "ratios"), LADDERS)
def test_trunks_save_38_percent_of_a_ladder(template: RunConfig, sizes: list[float], ratios: list[float]) -> None:
    """Check 61.3 %: 1/2 + 1 + 2 + 4 + 8 is 15.5 units; a trunk of 8 and four decays of a fifth are 9.5."""
    runs = grid.expand_grid(LadderGrid(sizes=sizes, tokens_per_parameter=ratios), template)
    merged = merge_runs(runs)
    assert len(runs) == len(ratios) * len(sizes)
    parents = [run.parent for run in merged.runs if run.parent is not None]
    assert len(parents) == (len(ratios) - 1) * len(sizes)
    assert len(set(parents)) == len(sizes)  # one trunk per rung
    assert sum(map(own_flops, merged.runs)) <= 0.62 * sum(map(flops_exact, runs))
    (remark,) = merged.remarks
    assert f"{len(parents)} of {len(runs)} runs branch from {len(sizes)} trunks" in remark
    assert remark.endswith("39% fewer")


def test_parents_and_named_checkpoints_leave_ids_and_arguments_alone() -> None:
    runs = by_steps(100, 50, 200)
    before = copy.deepcopy(runs)
    merged = merge_runs(runs).runs
    assert runs == before
    assert [run_id(run) for run in merged] == [run_id(run) for run in runs]
    trunk = run_id(runs[2])
    assert [run.parent for run in merged] == [trunk, trunk, None]
    assert [run.checkpoint.at_steps for run in merged] == [None, None, [40, 80]]
    assert [own_steps(run) for run in merged] == [20, 10, 200]
    assert merge_runs(merged).runs == merged


def random_progress(rng: random.Random, run: RunConfig) -> Progress:
    saved = frozenset(rng.sample(range(1, run.steps + 1), min(run.steps, rng.randrange(4))))
    fixed = rng.random() < 0.3
    return Progress(fixed, run.steps if fixed else max(saved, default=0), saved)


@pytest.mark.parametrize("seed", range(8))
def test_every_branch_has_a_trunk_that_saves_it_steps(seed: int) -> None:
    rng = random.Random(seed)
    template = scheduled(
        kind=rng.choice(["wsd", "wsd", "wsd", "cosine", "constant"]),
        warmup_per_parameter=rng.choice([0.0, 0.1, 1.0]),
        warmup_max_share=rng.choice([0.0, 0.05, 0.1]),
        decay_share=rng.choice([0.0, 0.1, 0.2, 0.9]),
    )
    lengths = [rng.choice([1, 2, 3, 10, 47, 100, 333, 1000]) * template.batch_tokens for _ in range(5)]
    token_counts = {tokens - rng.randrange(2) for tokens in lengths}  # some round to the same number of steps
    models = [replace(template.model, width=width) for width in (16, 64)]
    runs = [
        replace(template, model=m, tokens=tokens, seed=s)
        for m in models
        for tokens in sorted(token_counts)
        for s in (0, 1)
    ]
    rng.shuffle(runs)
    progress = {run_id(run): random_progress(rng, run) for run in runs if rng.random() < 0.3}
    merged = merge_runs(runs, progress).runs
    assert [run_id(run) for run in merged] == [run_id(run) for run in runs]
    by_id = {run_id(run): run for run in merged}
    for run in merged:
        validate(run)
        assert 0 < own_flops(run) <= flops_exact(run)
        if run.parent is None:
            continue
        trunk, begin = by_id[run.parent], trunk_steps(run)
        assert max(1, warmup_steps(run)) <= begin <= same_until(trunk, run)
        assert begin < trunk.steps
        assert begin in (trunk.checkpoint.at_steps or ())
        assert progress.get(run.parent, Progress()).can_save(begin)
        assert not progress.get(run_id(run), Progress()).fixed
        assert trunk.parent is None  # a trunk is no branch itself
    if not progress and template.schedule.kind == "wsd" and template.schedule.warmup_max_share == 0:
        trunks = [run for run in merged if run.parent is None and trunk_steps(run) > 0]
        # One per family, so that most steps are shared.
        assert len(trunks) == len({(run.seed, run.model.width) for run in trunks})


def test_runs_whose_rate_depends_on_d_are_not_merged_and_the_plan_says_why() -> None:
    cosine = merge_runs(by_steps(50, 100, 200, 400, 800, kind="cosine"))
    assert all(run.parent is None and run.checkpoint.at_steps is None for run in cosine.runs)
    (remark,) = cosine.remarks
    assert "(D400, D200, D100 and 1 more): with schedule.kind cosine the learning rate of every step depends" in remark
    template = scheduled()  # warm-up of 1 token per parameter: 10 tokens per parameter are too few, 20 are enough
    ladder = grid.expand_grid(LadderGrid(sizes=[6e4], tokens_per_parameter=[5, 20, 40]), template)
    merged = merge_runs(ladder)
    assert [run.parent for run in merged.runs] == [None, run_id(ladder[2]), None]
    assert merged.remarks[0].startswith("1 of 3 runs branch from 1 trunk: ")
    assert f"({ladder[0].name}): schedule.warmup_max_share 0.1 shortens a warm-up" in merged.remarks[1]
    assert "from 10 tokens a parameter on it does not" in merged.remarks[1]
    fixed = merge_runs(by_steps(10, 1000, warmup_tokens=1024 * 50))
    assert fixed.remarks[0].endswith("depends on D; from 512k tokens on it does not")
    hasty = merge_runs(by_steps(10, 20, decay_share=0.99, warmup_max_share=0.01))
    assert hasty.remarks[0].endswith("schedule.decay_share 0.99 leaves no step before the decay")


def test_runs_that_differ_in_more_than_d_are_not_merged() -> None:
    short, long = by_steps(50, 100)
    other = replace(long, optimizer=replace(long.optimizer, learning_rate=1.0))
    assert merge_runs([short, other]).remarks == []
    assert [run.parent for run in merge_runs([short, other]).runs] == [None, None]


def test_what_never_decays_leaves_its_last_step_to_the_branch() -> None:
    for schedule in ({"kind": "constant"}, {"decay_share": 0.0}):
        merged = merge_runs(by_steps(50, 100, **schedule)).runs
        assert own_steps(merged[0]) == 1
        assert merged[1].checkpoint.at_steps == [49]


def test_a_run_that_is_past_a_step_it_has_not_saved_is_no_trunk_there() -> None:
    runs = by_steps(50, 100, 200, 400)
    names = [run_id(run) for run in runs]

    def parents(**progress: Progress) -> list[int | None]:
        merged = merge_runs(runs, {names[int(key[1:])]: value for key, value in progress.items()}).runs
        return [None if run.parent is None else names.index(run.parent) for run in merged]

    assert parents() == [3, 3, 3, None]
    # The longest run is done and has only its last checkpoint: the next longest is the trunk of the others.
    assert parents(_3=Progress(True, 400, frozenset({400}))) == [2, 2, None, None]
    assert parents(_3=Progress(True, 400, frozenset({80, 400}))) == [2, 3, None, None]
    # It continues from step 60: it can be the trunk of branches at 80 or 160, not at 40.
    assert parents(_3=Progress(False, 60, frozenset({60}))) == [None, 3, 3, None]
    # A run that is done, running or past its beginning does not become a branch, but remains one.
    assert parents(_1=Progress(True, 100, frozenset({100}))) == [3, None, 3, None]
    assert parents(_1=Progress(True, 100, frozenset({100}), names[3])) == [3, 3, 3, None]
    assert parents(_1=Progress(False, 81, frozenset({81}))) == [3, None, 3, None]
    assert parents(_1=Progress(False, 79, frozenset({79}))) == [3, 3, 3, None]
    remarks = merge_runs(runs, {names[3]: Progress(True, 400, frozenset({400})), names[2]: Progress(True, 200)}).remarks
    assert "(D100): the possible trunk is past the step where they would begin, and has kept no" in remarks[1]


# Grids of curves


GRID = CurvesGrid(budgets=[1e11, 1e12], sizes=6)
BASE = RunConfig(model=ModelConfig(vocab_size=256), tokens=0, average=AverageConfig("ema", [0.1, 0.2]), validations=32)


def test_cooldowns_branch_from_one_long_run_per_size() -> None:
    runs = expand_grid(GRID, BASE, TuningConfig(horizon="size"))
    long_runs, cooled = runs[:6], runs[6:]
    assert len({count_parameters(run.model).N_active for run in long_runs}) == 6
    assert all(flops_exact(run) == pytest.approx(1e12, rel=0.01) for run in long_runs)
    assert len(cooled) == 8  # at a twentieth of D only two sizes have finished their warm-up
    merged = merge_runs(runs).runs
    assert [run.parent is None for run in merged] == [True] * 6 + [False] * 8
    for run in cooled:
        (trunk,) = (long_run for long_run in long_runs if long_run.model == run.model)
        assert min(abs(run.D / trunk.D - share) for share in GRID.cooldowns) < 0.01
        assert warmup_steps(run) == warmup_steps(trunk)
    (note,) = GRID.notes(runs, Tuner())
    shares = [2 ** (-k / 2) for k in range(1 + int(math.log2(20) * 2))]
    assert f"about {6 * len(shares)} points" in note
    assert f"{6e12 * sum(shares):.2g} training FLOPs" in note


@pytest.mark.usefixtures("quick_pictures")
def test_a_sweep_of_curves_is_fitted_with_its_averages(tmp_path: Path) -> None:
    """Check with runs, cooldowns and averages of a known law that the report uses the averages and recovers the law."""
    config = fake_sweep.make_config(GRID)
    config.average, config.tuning.horizon, config.validations = BASE.average, "size", 32
    config.fit.bootstrap, config.fit.intervals = 10, "noise"
    sweep = fake_sweep.write_sweep(tmp_path / "curves", config)
    fake_sweep.finish(sweep)
    for run in sweep.runs():
        run_config = run.config()
        N, lines = count_parameters(run_config.model).N_active, []
        for step in sorted(validation_steps(run_config)):
            D = step * run_config.batch_tokens
            gap_factor = math.exp(0.001 + 0.002 * math.log(D / 1e6))
            lines.append({
                "step": step, "tokens": D, "lr": learning_rate_factor(run_config, step - 1), "smoothed_loss": 3.0,
                "val_loss": 3.0, "val_loss_ema_0.1": fake_sweep.true_loss(N, D) * gap_factor, "val_loss_ema_0.2": 3.0,
            })  # fmt: skip
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = write_curves(sweep)
    assert {"val_loss_ema_0.1", "val_loss_ema_0.2"} <= set(curves)
    write_results(sweep)
    runs = fit.read_table(sweep.path)
    assert len(runs.N) > 30
    assert any("of 6 long runs, minus the gap that 8 cooldowns measured" in note for note in runs.notes)
    page = (sweep.path / "fit" / "report.html").read_text()
    assert "averaged weights (val_loss_ema_0.1)" in page
    assert f"from all {len(runs)} points, and from the 14 finished runs alone." in page
    written = json.loads((sweep.path / "fit" / "law.json").read_text())
    assert written["runs_alone"]["runs"] == 14
    for optimum, of_runs_alone in zip(written["optimal"], written["runs_alone"]["optimal"], strict=True):
        assert optimum["flops"] == of_runs_alone["flops"]
        assert optimum["N"] != of_runs_alone["N"]
    law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss)
    assert law.predict(3e5, 1e7) == pytest.approx(fake_sweep.true_loss(3e5, 1e7), rel=0.01)  # runs have noise of 0.4 %
