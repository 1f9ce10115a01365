"""Packing puts each run into one unit, never beyond the memory, and never so that the sweep ends later."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from isoflop.sweeps.plan.packing import Clock, Unit, ensemble_speedup, pack_runs
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, run_id
from isoflop.train.ensemble.members import check_together
from isoflop.train.flops import flops_exact
from isoflop.train.memory import memory
from isoflop.train.schedule import trunk_steps

BOUND = 96.0


def unit_seconds(unit: Unit, runs: Mapping[str, RunConfig], seconds: Mapping[str, float], bound: float) -> float:
    """Estimated time of a unit alone."""
    return Clock(runs, seconds, bound).piece(unit).seconds


def run(width: int = 16, tokens: int = 2**17, seed: int = 0, **changes: Any) -> RunConfig:
    model = ModelConfig(width=width, depth=2, heads=2, vocab_size=256)
    return RunConfig(model=model, data=DataConfig(fingerprint="text"), tokens=tokens, seed=seed, **changes)


def times(runs: Sequence[RunConfig]) -> dict[str, float]:
    """Seconds alone at a rate that grows with the width; of a branch without what its trunk does for it."""
    return {
        run_id(each): flops_exact(each) / (1e9 * each.model.width / (each.model.width + BOUND))
        * (1 - trunk_steps(each) / each.steps if each.parent else 1)
        for each in runs
    }  # fmt: skip


def alone(runs: Sequence[RunConfig]) -> list[Unit]:
    seconds = times(runs)
    return [Unit("alone", (name,)) for name in sorted(seconds, key=lambda name: (-seconds[name], name))]


def clock(units: Sequence[Unit], runs: Sequence[RunConfig], places: int) -> float:
    return wall_clock(units, {run_id(each): each for each in runs}, times(runs), places)


def wall_clock(
    units: Sequence[Unit], runs: Mapping[str, RunConfig], seconds: Mapping[str, float], places: int
) -> float:
    clock = Clock(runs, seconds, BOUND)
    return clock.wall_clock([clock.piece(unit) for unit in units], places)


def packed(runs: Sequence[RunConfig], **settings: Any) -> list[Unit]:
    settings = {"places": 2, "ensembles": 8, "runs_per_gpu": 1, "room_bytes": 1e18, "device": "cpu", **settings}
    return pack_runs(Clock({run_id(each): each for each in runs}, times(runs), BOUND), **settings)


def shapes(units: Sequence[Unit]) -> list[tuple[str, int]]:
    return [(unit.how, len(unit.runs)) for unit in units]


def seeds(count: int, **changes: Any) -> list[RunConfig]:
    return [run(seed=seed, **changes) for seed in range(count)]


def family(seed: int = 0, width: int = 16) -> list[RunConfig]:
    """A trunk and branches of 1/2, 1/4 and 1/8 of its D."""
    trunk = run(width, 2**18, seed)
    return [trunk, *(replace(run(width, 2**18 // part, seed), parent=run_id(trunk)) for part in (2, 4, 8))]


def random_sweep(generator: random.Random) -> list[RunConfig]:
    runs = {}
    for seed in range(generator.randint(1, 12)):
        width, tokens = generator.choice([8, 16, 64]), 2 ** generator.randint(14, 18)
        changes = generator.choice(
            [{}, {}, {}, {"precision": "fp16"}, {"parallel": ParallelConfig(dp=2)}, {"max_loss_rise": 2.0}]
        )
        for each in family(seed, width) if generator.random() < 0.4 else [run(width, tokens, seed, **changes)]:
            runs[run_id(each)] = each
    return list(runs.values())


@pytest.mark.parametrize("seed", range(40))
def test_any_packing_keeps_its_promises(seed: int) -> None:
    generator = random.Random(seed)
    runs = random_sweep(generator)
    by_id: Mapping[str, RunConfig] = {run_id(each): each for each in runs}
    room = generator.choice([1e18, 2e6, 1e7])
    places, ensembles, sharers = generator.randint(1, 5), generator.choice([1, 2, 3, 8]), generator.choice([1, 1, 4])
    units = packed(runs, places=places, ensembles=ensembles, runs_per_gpu=sharers, room_bytes=room)
    generator.shuffle(runs)
    assert packed(runs, places=places, ensembles=ensembles, runs_per_gpu=sharers, room_bytes=room) == units

    assert sorted(name for unit in units for name in unit.runs) == sorted(by_id)
    assert clock(units, runs, places) <= clock(alone(runs), runs, places) * (1 + 1e-6)
    for unit in units:
        members = [by_id[name] for name in unit.runs]
        peaks = [memory(each, "cpu").peak for each in members]
        assert len({each.parent is None for each in members}) == 1
        if unit.how == "ensemble":
            assert 2 <= len(members) <= ensembles
            check_together(members)  # raises for what cannot be trained together
            assert sum(peaks) <= room
        elif unit.how == "shared":
            assert 2 <= len(members) <= sharers
            assert all(each.parallel.world_size == 1 for each in members)
            assert max(peaks) <= room / sharers
        else:
            assert len(members) == 1
    lengths = [unit_seconds(unit, by_id, times(runs), BOUND) for unit in units]
    assert lengths == sorted(lengths, reverse=True)


def test_places_are_filled_before_ensembles_grow() -> None:
    runs = seeds(8)
    assert shapes(packed(runs, places=1)) == [("ensemble", 8)]
    assert shapes(packed(runs, places=2)) == [("ensemble", 4)] * 2
    assert shapes(packed(runs, places=3)) == [("ensemble", 3), ("ensemble", 3), ("ensemble", 2)]
    assert shapes(packed(runs, places=8)) == [("alone", 1)] * 8
    assert shapes(packed(runs, places=1, ensembles=3)) == [("ensemble", 3), ("ensemble", 3), ("ensemble", 2)]
    assert shapes(packed(runs, places=1, ensembles=1)) == [("alone", 1)] * 8


def test_where_a_long_run_decides_the_end_short_ones_are_packed_as_large_as_may_be() -> None:
    runs = [run(width=64, tokens=2**21), *seeds(8, tokens=2**14)]
    assert shapes(packed(runs)) == [("alone", 1), ("ensemble", 8)]


def test_an_ensemble_ends_where_the_memory_does() -> None:
    runs = seeds(8)
    peak = memory(runs[0], "cpu").peak
    assert shapes(packed(runs, places=1, room_bytes=3.5 * peak)) == [("ensemble", 3), ("ensemble", 3), ("ensemble", 2)]
    assert shapes(packed(runs, places=1, room_bytes=1.5 * peak)) == [("alone", 1)] * 8
    assert shapes(packed(runs, places=1, room_bytes=0.5 * peak)) == [("alone", 1)] * 8


def test_members_may_differ_in_numbers_and_in_d_but_not_in_shape() -> None:
    runs = [
        run(), run(seed=1), run(tokens=2**16), run(optimizer=OptimizerConfig(learning_rate=1e-3)),
        run(optimizer=OptimizerConfig(batch_size=16)), run(width=24), run(precision="fp16"),
        run(seed=2, parallel=ParallelConfig(micro_batch_size=4)), run(seed=3, parallel=ParallelConfig(dp=2)),
    ]  # fmt: skip
    (together,) = [unit for unit in packed(runs, places=1) if unit.how == "ensemble"]
    assert set(together.runs) == {run_id(each) for each in runs[:4]}


def test_a_trunk_comes_before_its_branches_and_never_with_them() -> None:
    runs = [each for seed in range(4) for each in family(seed)]
    trunks = {run_id(each) for each in runs if each.parent is None}
    units = packed(runs, places=1)
    assert set(units[0].runs) == trunks
    assert all(trunks.isdisjoint(unit.runs) for unit in units[1:])


def test_of_runs_of_one_length_those_that_others_wait_for_come_first() -> None:
    runs = seeds(8, precision="fp16")
    trunk = max(runs, key=run_id)  # the last by name
    branch = replace(run(seed=8, tokens=2**14), parent=run_id(trunk))
    assert packed([*runs, branch], places=1)[0].runs == (run_id(trunk),)


def test_what_takes_long_apart_takes_the_time_that_the_phases_of_an_ensemble_take() -> None:
    """Three of 1 s and one of 3 s: a second of all four, then two of one alone."""
    runs = [*seeds(3), run(seed=9)]
    by_id, names = {run_id(each): each for each in runs}, tuple(run_id(each) for each in runs)
    seconds = dict(zip(names, (1.0, 1.0, 1.0, 3.0), strict=True))
    together = unit_seconds(Unit("ensemble", names), by_id, seconds, BOUND)
    assert together == pytest.approx(4 / ensemble_speedup(16, 4, BOUND) + 2)
    # Width 16 uses 1/7 of the device at a time, so that four side by side have room.
    assert unit_seconds(Unit("shared", names), by_id, seconds, BOUND) == pytest.approx(3)
    assert unit_seconds(Unit("shared", names), by_id, seconds, 16.0) == pytest.approx(2 * 1 + 2)


def test_a_branch_starts_as_soon_as_its_trunk_has_come_to_it() -> None:
    trunk, *branches = family()
    by_id = {run_id(each): each for each in (trunk, *branches)}
    seconds = {run_id(trunk): 10.0} | {run_id(branch): 1.0 for branch in branches}
    begin = 10 * trunk_steps(branches[0]) / trunk.steps  # the longest branch, of half the trunk's D: the last to begin
    assert begin == pytest.approx(4, abs=0.02)  # steps are whole
    units = [Unit("alone", (name,)) for name in by_id]
    assert wall_clock(units, by_id, seconds, 1) == pytest.approx(13)
    assert wall_clock(units, by_id, seconds, 2) == pytest.approx(10)
    assert wall_clock(units[:2], by_id, seconds | {run_id(branches[0]): 9.0}, 2) == pytest.approx(begin + 9)
    assert wall_clock(units[1:], by_id, seconds, 3) == pytest.approx(1)  # the trunk is there already


def test_runs_that_cannot_be_an_ensemble_share_a_device_where_that_is_asked_for() -> None:
    runs = [run(width=width, tokens=2**16, precision="fp16") for width in (16, 24, 32, 40)]
    assert shapes(packed(runs, places=1)) == [("alone", 1)] * 4
    assert shapes(packed(runs, places=1, runs_per_gpu=4)) == [("shared", 4)]
    assert shapes(packed(runs, places=1, runs_per_gpu=3)) == [("shared", 3), ("alone", 1)]
    largest = max(memory(each, "cpu").peak for each in runs)
    units = packed(runs, places=1, runs_per_gpu=4, room_bytes=3.9 * largest)
    assert sorted(shapes(units)) == [("alone", 1), ("shared", 3)]
    ranks = run(parallel=ParallelConfig(dp=2))
    assert sorted(shapes(packed([*runs, ranks], places=1, runs_per_gpu=8))) == [("alone", 1), ("shared", 4)]


def test_an_ensemble_gains_most_where_one_model_leaves_the_device_idle() -> None:
    assert ensemble_speedup(64, 1, BOUND) == 1
    gains = [ensemble_speedup(width, 8, BOUND) for width in (8, 64, 512, 8192)]
    assert gains == sorted(gains, reverse=True)
    assert all(1 < gain < 8 for gain in gains)


def test_packing_needs_no_torch() -> None:
    check = "import sys, isoflop.sweeps.plan.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
