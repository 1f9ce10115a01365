"""Random runs that stop on one random mesh and continue on another equal runs of one process.

`draw(seed, ranks, data)` repeats a draw. Failures name the seed and everything that was drawn.
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
        """Return whether the run needs float64, because rounding decides near ties of experts."""
        return self.alone.model.experts > 0

    def __str__(self) -> str:
        legs = " | ".join(str(leg.parallel) for leg in self.legs)
        return f"seed {self.seed}, saved at {self.stop}: {self.alone.model} {self.alone.optimizer} {legs}"


def draw(seed: int, ranks: int, data: DataConfig) -> Draw:
    rng = random.Random(seed)
    kind = rng.choice(("gqa", "gqa", "mla", "experts", "muon"))
    alone = RunConfig(
        model=ModelConfig(
            width=32, depth=rng.randint(2, 9), heads=4, vocab_size=256, tied_embeddings=rng.random() < 0.5,
            window=rng.choice((None, None, 5, 9)),
        ),
        data=replace(data, separate_documents=rng.random() < 0.3),
        # With a small eps the rounding of a gradient near zero would decide a whole step; see conftest.py.
        optimizer=OptimizerConfig(
            batch_size=rng.choice((4, 6, 8, 12)), learning_rate=1e-3, eps=1e-4, z_loss=rng.choice((0.0, 1e-3)),
            gradient_clip=rng.choice((1.0, 0.0)), kind="muon" if kind == "muon" else "adamw",
        ),
        schedule=ScheduleConfig(warmup_tokens=64),
        parallel=ParallelConfig(device="cpu", threads=1, timeout_seconds=60.0),
        seed=seed,
    )  # fmt: skip
    alone.tokens = STEPS * alone.optimizer.batch_size * alone.data.sequence_length
    model = alone.model
    if kind == "mla":
        model.attention, model.kv_rank, model.query_rank, model.rotary_size = "mla", 12, rng.choice((None, 10)), 4
    else:
        model.kv_heads, model.head_size = rng.choice((1, 2, 4)), rng.choice((None, 10))
        model.qk_norm, model.qkv_bias = rng.random() < 0.5, rng.random() < 0.5
    if kind == "experts":
        model.experts, model.expert_hidden, model.shared_experts = rng.choice((4, 8)), 8, rng.randint(0, 1)
        model.dense_layers, model.gate = rng.randint(0, 2) % model.depth, rng.choice(("sigmoid", "softmax"))
        model.balance_rate, model.balance_loss, model.router_z_loss = 0.1, 0.05, 0.01
        alone.optimizer.gradient_clip = 0.0  # its divisor is fp32
    average_rng = random.Random(f"averages of {seed}")
    alone.average = AverageConfig(
        average_rng.choice(("none", "ema", "window")), average_rng.choice(([0.3], [0.7, 0.2]))
    )
    return Draw(seed, rng.randint(1, STEPS - 1), alone, (spread(alone, ranks, rng), spread(alone, ranks, rng)))


def spread(alone: RunConfig, ranks: int, rng: random.Random) -> RunConfig:
    """Return the run with a random legal mesh of at most `ranks` ranks."""
    weights = {1: 1, 2: 1, 3: 1, 4: 4, 6: 1, 8: 3}
    worlds = [n for n, weight in weights.items() for _ in range(weight) if n <= ranks]
    while True:
        world = rng.choice(worlds)
        meshes = [mesh for mesh in itertools.product((1, 2, 3, 4), repeat=4) if math.prod(mesh) == world]
        pp, cp, tp, dp = rng.choice(meshes)
        for _ in range(50):  # few models and batches can be spread over some meshes
            config = copy.deepcopy(alone)
            config.parallel = replace(
                alone.parallel, pp=pp, cp=cp, tp=tp, dp=dp, ep=rng.choice((1, 2, 4)) if alone.model.experts else 1,
                zero=rng.randint(0, 3), schedule=rng.choice(SCHEDULES), chunks=rng.choice((1, 2, 3)),
                sequence_parallel=rng.random() < 0.5, recompute=rng.choice(("none", "selective", "full")),
                micro_batch_size=rng.choice((None, 1, 2, 3, 4)),
            )  # fmt: skip
            with suppress(UserError):
                check_shapes(config)
                return config


def leg_of(case: Draw, leg: int, folder: Path) -> Outcome:
    config, root = case.legs[leg], folder / str(case.seed)
    buckets.BUCKET_MB = (0.005, 0.02, 25.0)[case.seed % 3]  # in this leg's separate process
    try:
        mesh = mesh_of(config.parallel)
        if leg == 1:
            stepper = stepper_of(config, mesh)
            stepper.load_state(restore_state(root / f"step_{case.stop}", stepper.held(), config))
            return outcome(stepper, case.stop, STEPS)
        stepper = started(config, mesh)
        result = outcome(stepper, 0, case.stop)
        saver = Saver(root, mesh, config, ByteTokenizer())
        saver.save(case.stop, stepper.held(), stepper.state())
        saver.close()
        return result
    except Exception as error:
        error.add_note(str(case))
        raise


@pytest.mark.parametrize(
    ("seeds", "ranks"),
    [
        pytest.param(range(1, 2), 4, id="one"),
        pytest.param(range(2, 8), 4, id="more", marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 20), 8, id=f"{n}", marks=pytest.mark.exhaustive) for n in range(100, 300, 20)),
    ],
)
def test_drawn_runs_that_move_between_meshes_are_those_of_one_process(
    seeds: range, ranks: int, small_corpus: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_corpus(256 + 16)
    prepare(data)
    monkeypatch.setattr(whole_matrices, "SMALL", 0)  # so that data-parallel ranks share the work on matrices
    draws = [draw(seed, ranks, data) for seed in seeds]
    for exact in (False, True):
        monkeypatch.setitem(precision._DTYPES, "fp32", torch.float64 if exact else torch.float32)
        expected, selected = dict[tuple[int, int], Outcome](), [case for case in draws if case.exact == exact]
        for case in selected:
            stepper = started(case.alone, Mesh())
            for leg, (first, last) in enumerate(((0, case.stop), (case.stop, STEPS))):
                expected[case.seed, leg] = outcome(stepper, first, last)
                for held in stepper.held():  # checkpoints are in fp32
                    held.values.copy_(held.values.float())
                stepper.load_state(stepper.state())
        for leg in (0, 1):
            for world in {case.legs[leg].parallel.world_size for case in selected}:
                group = [case for case in selected if case.legs[leg].parallel.world_size == world]
                by_rank = run_ranks(world, lambda: [leg_of(case, leg, tmp_path) for case in group], timeout=600.0)  # noqa: B023
                for case, *answers in zip(group, *by_rank, strict=True):
                    tolerance = 1e-10 if exact and leg == 0 else 1e-5
                    assert_same(answers, expected[case.seed, leg], tolerance, (leg, str(case)))
