"""The benchmark of the trainer's parallelism runs, and its peers train the same model."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.bench import parallel as bench_parallel
from isoflop.bench.train import bench_config, build_stepper
from isoflop.train.config import RunConfig
from isoflop.train.data.shards import prepare
from isoflop.train.job.fork import run_ranks
from isoflop.train.parallel.mesh import build_mesh

pytestmark = pytest.mark.exhaustive


def small_config(precision: str, folder: Path, compiled: bool) -> RunConfig:
    """Return the benchmark's config with a model small enough for a test."""
    config = bench_config(precision, folder, compiled)
    config.model.width, config.model.depth, config.model.heads = 32, 4, 2
    config.optimizer.batch_size, config.data.sequence_length = 4, 64
    return config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = small_config("fp32", tmp_path, compiled=False)
    prepare(config.data)
    return config


@pytest.mark.parametrize(("case", "fields", "peer"), bench_parallel.CASES, ids=lambda value: str(value))
def test_a_peer_takes_our_steps(case: str, fields: dict[str, Any], peer: str, config: RunConfig) -> None:
    config.parallel = dataclasses.replace(config.parallel, **fields)
    tp, dp = config.parallel.tp, config.parallel.dp

    def losses() -> tuple[list[float], list[float]]:
        warnings.simplefilter("ignore")
        here = build_mesh(dp, tp, torch.device("cpu"))
        ours, theirs = build_stepper(config, here), bench_parallel.build_peer(peer, config, here)
        # Fused matrices are cut elsewhere by the tensor-parallel peer, so it is the same model in its first step only.
        steps = 4 if tp == 1 else 1
        return [ours.step(n).loss.item() for n in range(steps)], [theirs(n).item() for n in range(steps)]

    answers = run_ranks(2, losses)
    for step, loss in enumerate(answers[0][0]):
        # A dp peer has the loss of its half of the batch.
        assert sum(theirs[step] for _, theirs in answers) / 2 == pytest.approx(loss, rel=1e-5)
