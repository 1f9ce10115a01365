"""A run through the stages of a pipeline is the run of one process, whatever the schedule and the rest of the mesh."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from isoflop.train import loop, precision
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
)
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.shards import prepare
from isoflop.train.files import read_json_lines
from isoflop.train.job.fork import run_ranks
from isoflop.train.model.later import Left, add_ready
from isoflop.train.model.shape import micro_batch_of
from isoflop.train.parallel import whole as whole_matrices
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.parallel.pipeline import Messages
from isoflop.train.planner.validation import check_shapes
from isoflop.train.stepper import Stepper
from test_train import assert_same_steps, boxes_of, stop_at, take_steps, train_on_ranks, whole, with_experts

CPU, STEPS = torch.device("cpu"), 5


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    """Five blocks, so that no number of stages divides them; the table is tied."""
    config = RunConfig(
        model=ModelConfig(width=32, depth=5, heads=4, kv_heads=2, vocab_size=256, qk_norm=True, qkv_bias=True),
        data=small_corpus(256 + 16),
        # With a small eps the rounding of a gradient near zero would be a step of its own; see test_train.py.
        optimizer=OptimizerConfig(batch_size=8, learning_rate=1e-3, eps=1e-4),
        schedule=ScheduleConfig(warmup_tokens=256),
        parallel=ParallelConfig(device="cpu", threads=1, bucket_mb=0.02, timeout_seconds=30.0),
        checkpoint=CheckpointConfig(every_seconds=1e9),
        tracker=TrackerConfig(kind="none"),
        tokens=STEPS * 128,
        log_every=1,
        validations=2,
    )
    prepare(config.data)
    return config


class Case(NamedTuple):
    """One run over a mesh."""

    pp: int
    tp: int
    dp: int
    zero: int
    schedule: str
    chunks: int
    sequence_parallel: bool
    passes: int  # of a rank in one step
    recompute: str
    kind: str  # of model or optimizer

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def of(self, config: RunConfig) -> RunConfig:
        config = copy.deepcopy(config)
        share = config.optimizer.batch_size // self.dp
        own = {name: getattr(self, name) for name in self._fields if name not in ("passes", "kind")}
        ep = self.dp if self.kind == "experts" else 1
        config.parallel = replace(config.parallel, **own, ep=ep, micro_batch_size=share // self.passes)
        return config


# In float64, where no rounding decides near ties of experts, and a sum that is slightly wrong is seen.
EXACT = ("experts", "latent")


def of_kind(base: RunConfig, kind: str) -> RunConfig:
    config = copy.deepcopy(base)
    if kind == "experts":
        config = with_experts(config)
        config.model = replace(config.model, depth=5)
    elif kind == "latent":
        latent = {"kv_heads": None, "qk_norm": False, "qkv_bias": False, "attention": "mla"}
        config.model = replace(config.model, **latent, kv_rank=12, query_rank=10, rotary_size=4)
        config.optimizer = replace(config.optimizer, gradient_clip=0.0)  # its divisor is fp32
    elif kind == "untied":  # one key/value head is every tensor-parallel rank's
        config.model = replace(config.model, kv_heads=1, tied_embeddings=False)
    elif kind == "muon":
        config.optimizer = replace(config.optimizer, kind="muon", matrix_multiplier=10.0)
    return config


AXES: dict[str, Sequence[Any]] = {
    "pp": (2, 4), "tp": (1, 2), "dp": (1, 2), "zero": (0, 1, 2), "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1"),
    "chunks": (1, 2), "sequence_parallel": (True, False), "passes": (1, 2, 4, 8),
    "recompute": ("none", "selective", "full"), "kind": ("tied", "untied", "experts", "latent", "muon"),
}  # fmt: skip


def cases(**fixed: Sequence[Any]) -> list[Case]:
    """Every legal one of up to 8 ranks. Four stages of two chunks want more blocks, and come where runs are moved."""
    every = itertools.starmap(Case, itertools.product(*(AXES | fixed).values()))
    return [
        case
        for case in every
        if case.ranks <= 8
        and 8 // case.dp % case.passes == 0
        and (case.chunks == 2) == (case.schedule == "interleaved")
        and (case.chunks == 1 or (case.pp == 2 and case.passes % 2 == 0))
        and (case.sequence_parallel or case.tp == 2)
    ]


def pairs(case: Case) -> set[tuple[int, int, Any, Any]]:
    return {(i, j, case[i], case[j]) for i, j in itertools.combinations(range(len(case)), 2)}


def cover(legal: Sequence[Case]) -> list[Case]:
    """Few that have every pair of values of two axes that any legal one has: the best of some drawn ones, each time."""
    generator, left, chosen = random.Random(0), set().union(*map(pairs, legal)), list[Case]()
    while left:
        drawn = [case for case in generator.sample(legal, min(200, len(legal))) if pairs(case) & left]
        best = max(drawn or [next(case for case in legal if pairs(case) & left)], key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def assert_those_of_one_process(
    base: RunConfig, several: Sequence[Case], monkeypatch: pytest.MonkeyPatch, steps: int = STEPS
) -> None:
    for kind, group in by(several, lambda case: case.kind):
        config, exact = of_kind(base, kind), kind in EXACT
        with monkeypatch.context() as patch:
            patch.setattr(whole_matrices, "SMALL", 0)  # so that data-parallel ranks share the work on them out
            patch.setitem(precision._DTYPES, "fp32", torch.float64 if exact else torch.float32)
            losses, norms, weights = take_steps(config, Mesh(), steps)
            expected = losses, norms, whole([(losses, norms, weights)])
            for ranks, some in by(group, lambda case: case.ranks):
                answers = run_ranks(ranks, lambda: [steps_of(case, config, steps) for case in some], timeout=900.0)  # noqa: B023
                assert_same_steps(answers, some, expected, 1e-10 if exact else 1e-5)


def by(some: Sequence[Case], key: Callable[[Case], Any]) -> list[tuple[Any, list[Case]]]:
    return [(value, list(group)) for value, group in itertools.groupby(sorted(some, key=key), key=key)]


def steps_of(case: Case, config: RunConfig, steps: int) -> Any:
    own = case.of(config)
    check_shapes(own)
    return take_steps(own, build_mesh(case.dp, case.tp, CPU, own.parallel.ep, pp=case.pp), steps)


def test_steps_of_a_cover_of_meshes_schedules_and_models_are_those_of_one_process(
    base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [case for case in cases() if case.ranks <= 4]
    assert_those_of_one_process(base, cover(few), monkeypatch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", AXES["schedule"])
def test_five_steps_on_every_mesh_with_every_schedule_are_those_of_one_process(
    name: str, base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other axes by turns, in a cover of their own."""
    legal, chosen = cases(schedule=(name,)), list[Case]()
    for _, same in by(legal, lambda case: case[:4]):
        chosen.append(same[len(chosen) * 7919 % len(same)])
    left = [case for case in cover(legal) if case not in chosen]
    assert_those_of_one_process(base, [*chosen, *left], monkeypatch)
