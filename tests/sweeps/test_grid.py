"""A grid is a pure function from its config to real, distinct, well-shaped runs."""

from __future__ import annotations

import math
import random

import pytest
from isoflop.sweeps.config import AdaptiveGrid, GridConfig, IsoflopGrid, LadderGrid, PointsGrid, ProductGrid
from isoflop.sweeps.grid import architectures
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.trunks import merge_runs, own_flops
from isoflop.train.config import ModelConfig, OptimizerConfig, RunConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, flops_6nd, flops_exact


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
    points = IsoflopGrid(expected_N=22e3, expected_flops=2.5e11)
    assert grid.expected_size(points, ModelConfig(vocab_size=256), 2.5e11) == 22e3  # to the last bit: run ids stand
    width = architectures.nearest_model(ModelConfig(vocab_size=256), 22e3).width
    assert grid.expected_size(points, ModelConfig(vocab_size=4096), 2.5e11) == 22e3 + (4096 - 256) * width
    untied = ModelConfig(vocab_size=256, tied_embeddings=False)
    assert grid.expected_size(points, untied, 2.5e11) == 22e3 + 256 * width


def test_the_6nd_convention_spends_6nd() -> None:
    for run in grid.expand_grid(IsoflopGrid(budgets=[1e12], convention="6nd"), base()):
        assert flops_6nd(run) == pytest.approx(1e12, rel=0.5 / run.steps)


def test_each_budget_has_distinct_sizes_around_the_expected_optimum() -> None:
    points = IsoflopGrid(budgets=BUDGETS, sizes=6, span=16)
    runs = grid.expand_grid(points, base())
    for budget in BUDGETS:
        sizes = [count_parameters(run.model).N_total for run in runs if run.budget == budget]
        expected = points.expected_N * (budget / points.expected_flops) ** points.expected_exponent
        assert len(set(sizes)) == 6
        assert min(sizes) < expected < max(sizes)


def on_a_cluster() -> RunConfig:
    run = base(model=ModelConfig(vocab_size=32768), optimizer=OptimizerConfig(batch_size=256))
    run.data.sequence_length = 1024
    return run


@pytest.mark.parametrize(
    ("template", "budgets", "share"),
    [
        (base(), [5e10, 1e11, 2.5e11, 5e11], 0.77),
        (base(), BUDGETS, 0.77),
        (on_a_cluster(), [1e18, 2e18, 5e18, 1e19], 0.89),  # here many a D is too short for the warm-up of its N
    ],
)
def test_neighbouring_budgets_share_sizes_and_save_what_trunks_can(
    template: RunConfig, budgets: list[float], share: float
) -> None:
    runs = grid.expand_grid(IsoflopGrid(budgets=budgets), template)
    assert len(runs) == 24
    assert len({count_parameters(run.model).N_total for run in runs}) <= 9
    assert sum(map(own_flops, merge_runs(runs).runs)) <= share * sum(map(flops_exact, runs))


@pytest.mark.parametrize("sizes", [1, 2, 5, 6])
def test_the_lattice_moves_the_middle_by_half_a_gap_at_most(sizes: int) -> None:
    points = IsoflopGrid(sizes=sizes, span=16)
    for budget in [10 ** (16 + i / 7) for i in range(28)]:
        model = ModelConfig(vocab_size=32768)
        found = [count_parameters(m).N_total for m in grid.isoflop_sizes(points, model, budget)]
        expected = grid.expected_size(points, model, budget)
        middle = math.fsum(map(math.log, found)) / sizes
        half = math.log(16) / (sizes - 1) / 2 if sizes > 1 else 0.0
        assert abs(middle - math.log(expected)) <= half + 0.2  # the nearest well-shaped model is up to 20 % off


def test_a_point_that_is_no_training_is_left_out() -> None:
    runs = grid.expand_grid(IsoflopGrid(budgets=[2e10], min_steps=200), base())
    assert 0 < len(runs) < 6
    assert all(run.steps >= 200 for run in runs)


@pytest.mark.parametrize("seed", range(2))
def test_architectures_tile_well(seed: int) -> None:
    """Any wanted size gives whole heads of a size that kernels like, at a depth near the rule."""
    chooser = random.Random(seed)
    for _ in range(50):
        wanted = 10 ** chooser.uniform(4, 10)
        kv_groups = chooser.choice([1, 2, 4])
        template = ModelConfig(vocab_size=chooser.choice([256, 32768]), heads=4, kv_heads=4 // kv_groups)
        model = architectures.nearest_model(template, wanted)
        assert model.width % model.heads == 0
        assert model.heads % model.num_kv_heads == 0
        assert model.width < 32 or model.head_dim in (16, 32, 64, 128)
        assert 0.4 < model.depth / (0.5 * model.width**0.5) < 2.6


def test_a_ladder_is_every_size_times_every_d() -> None:
    runs = grid.expand_grid(LadderGrid(sizes=[1e4, 1e5], tokens_per_parameter=[20, 40]), base())
    ratios = sorted(run.D / count_parameters(run.model).N_total for run in runs)
    assert len(runs) == 4
    # D is the nearest whole number of steps of 1024 tokens, and written as what it is.
    assert all(run.tokens == run.D for run in runs)
    assert ratios == pytest.approx([20, 20, 40, 40], rel=512 / 2e5)
    assert [run.D for run in grid.expand_grid(LadderGrid(sizes=[1e4], tokens=[1, 10_000, 10_300]), base())] == [
        1024,
        10240,
    ]


def test_a_product_is_every_combination_and_takes_dotted_or_nested_names() -> None:
    dotted = grid.expand_grid(
        ProductGrid(axes={"optimizer.learning_rate": [1e-3, 2e-3], "seed": [0, 1, 2]}), base(tokens=4096)
    )
    nested = grid.expand_grid(
        ProductGrid(axes={"optimizer": {"learning_rate": [1e-3, 2e-3]}, "seed": [0, 1, 2]}), base(tokens=4096)
    )
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


def test_expansion_is_deterministic_and_free_of_duplicates() -> None:
    points = LadderGrid(sizes=[1e4, 1.001e4], tokens=[4096])
    first, second = grid.expand_grid(points, base()), grid.expand_grid(points, base())
    assert [run_id(run) for run in first] == [run_id(run) for run in second]
    assert len(first) == 1  # both wanted sizes are the same model


REFUSED = [  # numbers out of range: test_fields.py
    (IsoflopGrid(budgets=[1e6]), {}, r"grid.budgets contains 1e\+06.*needs .*FLOPs"),
    (IsoflopGrid(budgets=[]), {}, "give a list"),
    (IsoflopGrid(budgets=[1e12], convention="7nd"), {}, "must be one of exact, 6nd"),
    (IsoflopGrid(budgets=[1e12]), {"tokens": 5}, "chooses D itself"),
    (LadderGrid(sizes=[1e4]), {}, "exactly one of them"),
    (LadderGrid(sizes=[1e4], tokens=[1], tokens_per_parameter=[1]), {}, "exactly one of them"),
    (LadderGrid(sizes=[], tokens=[1]), {}, "grid has no runs"),
    (ProductGrid(axes={}), {"tokens": 1}, "grid.axes is empty"),
    (ProductGrid(axes=[1, 2]), {"tokens": 1}, "must map fields to values"),
    (ProductGrid(axes={"seed": [0]}), {}, "tokens is not set"),
    (ProductGrid(axes={"seed": 3}), {"tokens": 1}, "must be a list"),
    (ProductGrid(axes={"optimizer.inertia": [1]}), {"tokens": 1}, "not a field of a run"),
    (ProductGrid(axes={"optimizer": [1]}), {"tokens": 1}, "names the group 'optimizer'"),
    (ProductGrid(axes={"seed": ["many"]}), {"tokens": 1}, "grid.axes.seed contains 'many'"),
    (ProductGrid(axes={"model.heads": [5]}), {"tokens": 1}, "model.heads is 5; it must divide model.width 64"),
    (PointsGrid(), {}, "grid.points is None; it must be a list of runs"),
    (PointsGrid(points=[]), {}, "grid.points is \\[\\]; it must be a list of runs"),
    (PointsGrid(points=[7]), {}, "grid.points\\[0\\] is 7; it must map fields to values"),
    (PointsGrid(points=[{"tokens": 1}, {"seed": 1}]), {}, "grid.points\\[1\\] has no tokens"),
    (PointsGrid(points=[{"tokens": "many"}]), {}, "grid.points\\[0\\].tokens contains 'many'"),
    (PointsGrid(points=[{"optimizer.inertia": 1}]), {"tokens": 1}, "grid.points\\[0\\] names 'optimizer.inertia'"),
    (PointsGrid(points=[{"model.heads": 5, "tokens": 1}]), {}, "model.heads is 5; it must divide model.width 64"),
    (AdaptiveGrid(budgets=[1e12], flops_budget=1e10), {}, "grid.flops_budget is 1e\\+10, of which .* no first round"),
    (AdaptiveGrid(), {}, "grid.budgets is None; give a list"),
    (AdaptiveGrid(variants={"a": {"model.qk_norm": True}}), {}, "neither with grid.recipes nor with an adaptive grid"),
    (ladder(variants=[1]), {}, "grid.variants is \\[1\\]; it must map names"),
    (ladder(variants={"base": {"model.qk_norm": True}}), {}, "other than base, to overrides"),
    (ladder(variants={"a": {}}), {}, "grid.variants.a is {}; it must be overrides that change a run"),
    (ladder(variants={"a": {"data.validation_tokens": 5}}), {}, "a changes data.validation_tokens; variants share"),
    (ladder(variants={"a": {"seed": 5}}), {}, "grid.variants.a changes seed; variants share"),
    (ladder(variants={"a": {"model.foo": 5}}), {}, "grid.variants.a names 'model.foo', which is not a field"),
    (ladder(variants={"a": {"log_every": 5}}), {}, "grid.variants.a has the same run as base"),
    (GridConfig(kind="spiral"), {}, "one of adaptive, isoflop, ladder, curves, product, points, check, tune"),
]


def test_variants_have_the_points_and_seeds_of_the_base_and_their_own_runs() -> None:
    variants = {"norm": {"model.qk_norm": True}, "hot": {"optimizer.learning_rate": 0.012, "optimizer.beta2": 0.9}}
    runs = grid.expand_grid(ladder(variants=variants, seeds=[0, 1]), base())
    alone = grid.expand_grid(ladder(seeds=[0, 1]), base())
    apart = {name: [run for run in runs if run.variant == name] for name in ("base", "norm", "hot")}
    assert [run_id(run) for run in apart["base"]] == [run_id(run) for run in alone]
    assert len({run_id(run) for run in runs}) == len(runs) == 3 * len(alone)
    for name in variants:
        same = [(run.seed, run.model.width) for run in alone]
        assert [(run.seed, run.model.width) for run in apart[name]] == same
    assert [run.D for run in apart["hot"]] == [run.D for run in alone]  # a norm has parameters, and so its own D
    assert all(run.model.qk_norm for run in apart["norm"])
    assert {run.optimizer.learning_rate for run in apart["hot"]} == {0.012}
    assert (apart["hot"][0].name or "").endswith("_s0_hot")


@pytest.mark.parametrize(("points", "changes", "sentence"), REFUSED)
def test_bad_grids_are_refused_in_one_sentence(points: GridConfig, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        grid.expand_grid(points, base(**changes))
    assert "\n" not in str(error.value)
