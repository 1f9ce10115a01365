"""Drawn runs, that stop on one drawn mesh and go on on another, are those of one process.

A draw is its seed: `draw(seed, ranks)` makes it again. What fails names the seed and all that was drawn.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from isoflop.train import precision
from isoflop.train.checkpoint.checkpoint import restore_state
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import (
    AverageConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from isoflop.train.data.shards import prepare
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.job.fork import run_ranks
from isoflop.train.parallel import buckets
from isoflop.train.parallel import whole as whole_matrices
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.schedules import SCHEDULES
from isoflop.train.planner.validation import check_shapes
from meshes import Outcome, assert_same, mesh_of, outcome, started, stepper_of

STEPS = 4


@dataclass(frozen=True)
class Draw:
    seed: int
    stop: int  # the step after which it is saved
    alone: RunConfig
    legs: tuple[RunConfig, RunConfig]  # before and after

    @property
    def exact(self) -> bool:
        """In float64, for rounding decides near ties of experts."""
        return self.alone.model.experts > 0

    def __str__(self) -> str:
        legs = " | ".join(str(leg.parallel) for leg in self.legs)
        return f"seed {self.seed}, saved at {self.stop}: {self.alone.model} {self.alone.optimizer} {legs}"


def draw(seed: int, ranks: int, data: DataConfig) -> Draw:
    one = random.Random(seed)
    kind = one.choice(("gqa", "gqa", "mla", "experts", "muon"))
    alone = RunConfig(
        model=ModelConfig(
            width=32, depth=one.randint(2, 9), heads=4, vocab_size=256, tied_embeddings=one.random() < 0.5,
            window=one.choice((None, None, 5, 9)),
        ),
        data=replace(data, separate_documents=one.random() < 0.3),
        # With a small eps the rounding of a gradient near zero would be a step of its own; see test_train.py.
        optimizer=OptimizerConfig(
            batch_size=one.choice((4, 6, 8, 12)), learning_rate=1e-3, eps=1e-4, z_loss=one.choice((0.0, 1e-3)),
            gradient_clip=one.choice((1.0, 0.0)), kind="muon" if kind == "muon" else "adamw",
        ),
        schedule=ScheduleConfig(warmup_tokens=64),
        parallel=ParallelConfig(device="cpu", threads=1, timeout_seconds=60.0),
        seed=seed,
    )  # fmt: skip
    alone.tokens = STEPS * alone.optimizer.batch_size * alone.data.sequence_length
    model = alone.model
    if kind == "mla":
        model.attention, model.kv_rank, model.query_rank, model.rotary_size = "mla", 12, one.choice((None, 10)), 4
    else:
        model.kv_heads, model.head_size = one.choice((1, 2, 4)), one.choice((None, 10))
        model.qk_norm, model.qkv_bias = one.random() < 0.5, one.random() < 0.5
    if kind == "experts":
        model.experts, model.expert_hidden, model.shared_experts = one.choice((4, 8)), 8, one.randint(0, 1)
        model.dense_layers, model.gate = one.randint(0, 2) % model.depth, one.choice(("sigmoid", "softmax"))
        model.balance_rate, model.balance_loss, model.router_z_loss = 0.1, 0.05, 0.01
        alone.optimizer.gradient_clip = 0.0  # its divisor is fp32
    kept = random.Random(f"averages of {seed}")
    alone.average = AverageConfig(kept.choice(("none", "ema", "window")), kept.choice(([0.3], [0.7, 0.2])))
    return Draw(seed, one.randint(1, STEPS - 1), alone, (spread(alone, ranks, one), spread(alone, ranks, one)))


def spread(alone: RunConfig, ranks: int, one: random.Random) -> RunConfig:
    """Over a mesh of at most so many ranks, whatever is legal."""
    weights = {1: 1, 2: 1, 3: 1, 4: 4, 6: 1, 8: 3}
    worlds = [n for n, weight in weights.items() for _ in range(weight) if n <= ranks]
    while True:
        world = one.choice(worlds)
        meshes = [mesh for mesh in itertools.product((1, 2, 3, 4), repeat=4) if math.prod(mesh) == world]
        pp, cp, tp, dp = one.choice(meshes)
        for _ in range(50):  # few models and batches can be spread over some meshes
            config = copy.deepcopy(alone)
            config.parallel = replace(
                alone.parallel, pp=pp, cp=cp, tp=tp, dp=dp, ep=one.choice((1, 2, 4)) if alone.model.experts else 1,
                zero=one.randint(0, 3), schedule=one.choice(SCHEDULES), chunks=one.choice((1, 2, 3)),
                sequence_parallel=one.random() < 0.5, recompute=one.choice(("none", "selective", "full")),
                micro_batch_size=one.choice((None, 1, 2, 3, 4)),
            )  # fmt: skip
            with suppress(UserError):
                check_shapes(config)
                return config


def leg_of(each: Draw, leg: int, folder: Path) -> Outcome:
    config, root = each.legs[leg], folder / str(each.seed)
    buckets.BUCKET_MB = (0.005, 0.02, 25.0)[each.seed % 3]  # in a process of this leg's own
    try:
        mesh = mesh_of(config.parallel)
        if leg == 1:
            stepper = stepper_of(config, mesh)
            stepper.load_state(restore_state(root / f"step_{each.stop}", stepper.held(), config))
            return outcome(stepper, each.stop, STEPS)
        stepper = started(config, mesh)
        found = outcome(stepper, 0, each.stop)
        saver = Saver(root, mesh, config, ByteTokenizer())
        saver.save(each.stop, stepper.held(), stepper.state())
        saver.close()
        return found
    except Exception as error:
        error.add_note(str(each))
        raise


@pytest.mark.parametrize(
    ("seeds", "ranks"),
    [
        pytest.param(range(2), 4, id="few"),
        pytest.param(range(2, 8), 4, id="more", marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 20), 8, id=f"{n}", marks=pytest.mark.exhaustive) for n in range(100, 300, 20)),
    ],
)
def test_drawn_runs_that_move_between_meshes_are_those_of_one_process(
    seeds: range, ranks: int, small_corpus: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_corpus(256 + 16)
    prepare(data)
    monkeypatch.setattr(whole_matrices, "SMALL", 0)  # so that data-parallel ranks share the work on them out
    draws = [draw(seed, ranks, data) for seed in seeds]
    for exact in (False, True):
        monkeypatch.setitem(precision._DTYPES, "fp32", torch.float64 if exact else torch.float32)
        expected, same = dict[tuple[int, int], Outcome](), [each for each in draws if each.exact == exact]
        for each in same:
            stepper = started(each.alone, Mesh())
            for leg, (first, last) in enumerate(((0, each.stop), (each.stop, STEPS))):
                expected[each.seed, leg] = outcome(stepper, first, last)
                for held in stepper.held():  # checkpoints are in fp32
                    held.values.copy_(held.values.float())
                stepper.load_state(stepper.state())
        for leg in (0, 1):
            for world in {each.legs[leg].parallel.world_size for each in same}:
                some = [each for each in same if each.legs[leg].parallel.world_size == world]
                by_rank = run_ranks(world, lambda: [leg_of(each, leg, tmp_path) for each in some], timeout=600.0)  # noqa: B023
                for each, *answers in zip(some, *by_rank, strict=True):
                    tolerance = 1e-10 if exact and leg == 0 else 1e-5
                    assert_same(answers, expected[each.seed, leg], tolerance, (leg, str(each)))
