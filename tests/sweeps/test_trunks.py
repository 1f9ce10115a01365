"""Runs that differ in D alone share a trunk: fewer FLOPs, and every id as it was."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.sweeps.config import LadderGrid
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.trunks import Progress, merge_runs, own_flops, own_steps
from isoflop.train.config import ModelConfig, RunConfig, ScheduleConfig, run_id
from isoflop.train.flops import flops_exact
from isoflop.train.planner.validation import validate
from isoflop.train.schedule import same_until, trunk_steps, warmup_steps

ROOT = Path(__file__).resolve().parents[2]
HALF_TO_EIGHT = (0.5, 1, 2, 4, 8)


def base(**schedule: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(vocab_size=256), tokens=0, schedule=ScheduleConfig(**schedule))


def large() -> RunConfig:
    """What a cluster would train: steps of 262,144 tokens."""
    run = base()
    run.model.vocab_size, run.optimizer.batch_size, run.data.sequence_length = 32768, 256, 1024
    return run


def by_steps(*steps: int, **schedule: Any) -> list[RunConfig]:
    """Runs of so many steps, which share all else."""
    template = base(**{"warmup_tokens": 2048, **schedule})
    return [replace(template, name=f"D{number}", tokens=number * template.batch_tokens) for number in steps]


DEFAULTS = yaml.safe_load((ROOT / "conf" / "grid" / "ladder.yaml").read_text())
SIZES = [float(size) for size in DEFAULTS["sizes"]]  # YAML 1.1 takes 8.0e3 for a word, and Hydra does not
LADDERS = [
    (base(), SIZES, DEFAULTS["tokens_per_parameter"]),
    (base(), SIZES, [20 * multiple for multiple in HALF_TO_EIGHT]),
    (base(), [3e3, 1e5, 1e6], [20 * multiple for multiple in HALF_TO_EIGHT]),
    (large(), [2e7, 1e8, 4e8, 1e9, 7e9], [20 * multiple for multiple in HALF_TO_EIGHT]),
]


@pytest.mark.parametrize(("template", "sizes", "ratios"), LADDERS)
def test_a_ladder_of_half_to_eight_times_a_d_costs_at_most_62_percent(
    template: RunConfig, sizes: list[float], ratios: list[float]
) -> None:
    """1/2 + 1 + 2 + 4 + 8 is 15.5 units; a trunk of 8 and four decays of a fifth is 9.5, which is 61.3 %."""
    apart = grid.expand_grid(LadderGrid(sizes=sizes, tokens_per_parameter=ratios), template)
    merged = merge_runs(apart)
    assert len(apart) == len(ratios) * len(sizes)
    parents = [run.parent for run in merged.runs if run.parent is not None]
    assert len(parents) == (len(ratios) - 1) * len(sizes)
    assert len(set(parents)) == len(sizes)  # one trunk a rung
    assert sum(map(own_flops, merged.runs)) <= 0.62 * sum(map(flops_exact, apart))
    (remark,) = merged.remarks
    assert f"{len(parents)} of {len(apart)} runs branch from {len(sizes)} trunks" in remark
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


def random_progress(chooser: random.Random, run: RunConfig) -> Progress:
    saved = frozenset(chooser.sample(range(1, run.steps + 1), min(run.steps, chooser.randrange(4))))
    fixed = chooser.random() < 0.3
    return Progress(fixed, run.steps if fixed else max(saved, default=0), saved)


@pytest.mark.parametrize("seed", range(12))
def test_every_branch_has_a_trunk_that_saves_it_steps(
    seed: int,
) -> None:
    chooser = random.Random(seed)
    template = base(
        kind=chooser.choice(["wsd", "wsd", "wsd", "cosine", "constant"]),
        warmup_per_parameter=chooser.choice([0.0, 0.1, 1.0]),
        warmup_max_share=chooser.choice([0.0, 0.05, 0.1]),
        decay_share=chooser.choice([0.0, 0.1, 0.2, 0.9]),
    )
    lengths = [chooser.choice([1, 2, 3, 10, 47, 100, 333, 1000]) * template.batch_tokens for _ in range(5)]
    odd = {tokens - chooser.randrange(2) for tokens in lengths}  # with an equal too that is said otherwise
    models = [replace(template.model, width=width) for width in (16, 64)]
    runs = [replace(template, model=m, tokens=tokens, seed=s) for m in models for tokens in sorted(odd) for s in (0, 1)]
    chooser.shuffle(runs)
    progress = {run_id(run): random_progress(chooser, run) for run in runs if chooser.random() < 0.3}
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
        assert trunk.parent is None  # a trunk makes its steps itself
    if not progress and template.schedule.kind == "wsd" and template.schedule.warmup_max_share == 0:
        roots = [run for run in merged if run.parent is None and trunk_steps(run) > 0]
        assert len(roots) == len({(run.seed, run.model.width) for run in roots})  # one a family: the most is shared


def test_runs_whose_rate_depends_on_d_are_not_merged_and_the_plan_says_why() -> None:
    cosine = merge_runs(by_steps(50, 100, 200, 400, 800, kind="cosine"))
    assert all(run.parent is None and run.checkpoint.at_steps is None for run in cosine.runs)
    assert cosine.remarks == [
        "4 runs differ from a longer one in D alone and cannot branch from it (D400, D200, D100 and 1 more): with "
        "schedule.kind cosine the learning rate of every step depends on D; with wsd it would not"
    ]
    template = base()  # 1 token of warm-up a parameter: 10 parameters' worth of D are too few, 20 are enough
    ladder = grid.expand_grid(LadderGrid(sizes=[6e4], tokens_per_parameter=[5, 20, 40]), template)
    merged = merge_runs(ladder)
    assert [run.parent for run in merged.runs] == [None, run_id(ladder[2]), None]
    assert merged.remarks[0].startswith("1 of 3 runs branch from 1 trunk: ")
    assert merged.remarks[1] == (
        f"1 run differs from a longer one in D alone and cannot branch from it ({ladder[0].name}): "
        "schedule.warmup_max_share 0.1 cuts a warm-up, which so depends on D; from 10 tokens a parameter on it does not"
    )
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
    # The longest is done, and has saved its end alone: the next one is the trunk of the others.
    assert parents(_3=Progress(True, 400, frozenset({400}))) == [2, 2, None, None]
    assert parents(_3=Progress(True, 400, frozenset({80, 400}))) == [2, 3, None, None]
    # It goes on from step 60: what begins at 40 has no trunk in it, what begins at 80 or 160 has.
    assert parents(_3=Progress(False, 60, frozenset({60}))) == [None, 3, 3, None]
    # Nobody is made a branch any more that is done, at work, or past its beginning; what it was it stays.
    assert parents(_1=Progress(True, 100, frozenset({100}))) == [3, None, 3, None]
    assert parents(_1=Progress(True, 100, frozenset({100}), names[3])) == [3, 3, 3, None]
    assert parents(_1=Progress(False, 81, frozenset({81}))) == [3, None, 3, None]
    assert parents(_1=Progress(False, 79, frozenset({79}))) == [3, 3, 3, None]
    said = merge_runs(runs, {names[3]: Progress(True, 400, frozenset({400})), names[2]: Progress(True, 200)}).remarks
    assert said[1] == (
        "1 run differs from a longer one in D alone and cannot branch from it (D100): what could be the trunk is past "
        "the step where they would begin, and has kept no checkpoint of it"
    )
