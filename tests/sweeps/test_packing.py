"""Packing puts each run into one unit, never beyond the memory, and never so that the sweep ends later."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from isoflop.sweeps.plan.packing import Clock, Unit, pack_runs
from isoflop.train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, run_id
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
    clock = Clock({run_id(each): each for each in runs}, times(runs), BOUND)
    return clock.wall_clock([clock.piece(unit) for unit in units], places)


def packed(runs: Sequence[RunConfig], **settings: Any) -> list[Unit]:
    settings = {"places": 2, "ensembles": 8, "runs_per_gpu": 1, "room_bytes": 1e18, "device": "cpu", **settings}
    return pack_runs(Clock({run_id(each): each for each in runs}, times(runs), BOUND), **settings)


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


@pytest.mark.parametrize("seed", range(10))
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
