"""A small run on a corpus that is prepared once, and imports that all ranks share."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable

import pytest
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
from isoflop.train.data.shards import prepare
from isoflop.train.parallel import buckets


@pytest.fixture(scope="session", autouse=True)
def imported_before_forks() -> None:
    """Import slow modules once, which every rank would otherwise import again."""
    for module in ("torch._dynamo", "isoflop.train.checkpoint.shards"):
        importlib.import_module(module)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split a small model into several buckets."""
    monkeypatch.setattr(buckets, "BUCKET_MB", 0.04)


@pytest.fixture(scope="session")
def small_run(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(
            width=32, depth=2, heads=4, kv_heads=2, vocab_size=256, qk_norm=True, head_size=10, qkv_bias=True
        ),
        data=small_corpus(256 + 16),
        # Adam follows the sign of a gradient down to eps. With 1e-8 the rounding of a gradient near zero would decide
        # a whole step, even between one process and itself with other micro-batches.
        optimizer=OptimizerConfig(batch_size=8, learning_rate=1e-3, eps=1e-4),
        schedule=ScheduleConfig(warmup_tokens=256),
        parallel=ParallelConfig(device="cpu", threads=1, timeout_seconds=30.0),
        checkpoint=CheckpointConfig(every_seconds=1e9),
        tracker=TrackerConfig(kind="none"),
        tokens=12 * 128,
        log_every=1,
        validations=2,
    )  # fmt: skip
    prepare(config.data)
    return config


@pytest.fixture
def config(small_run: RunConfig) -> RunConfig:
    """Return a copy of the small run, which a test may change."""
    return copy.deepcopy(small_run)
