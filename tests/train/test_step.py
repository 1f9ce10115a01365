"""A step reads its own rows, and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from isoflop.train.config import DataConfig, RunConfig
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.prefetch import Prefetch
from isoflop.train.data.shards import prepare
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.stepper import Stepper
from small_runs import forty_steps

CPU = torch.device("cpu")
ROWS, LENGTH, STEPS = 4, 16, 9


@pytest.fixture
def config(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return replace(forty_steps(small_corpus(512)), tokens=STEPS * ROWS * LENGTH)


def build(config: RunConfig, device: torch.device = CPU, report: Callable[[str], None] = print) -> Stepper:
    stream = TrainStream(prepare(config.data), LENGTH, config.seed)
    stepper = Stepper(config, Mesh(), device, stream, report)
    stepper.start()
    return stepper


def rows_of(step: int) -> np.ndarray:
    return np.full((ROWS, LENGTH + 1), step, np.int64) + np.arange(ROWS)[:, None]


def test_rows_are_those_of_their_step_whatever_is_asked_for_in_between() -> None:
    gathered: list[int] = []

    def gather(step: int) -> np.ndarray:
        gathered.append(step)
        return rows_of(step)

    prefetch = Prefetch(gather, (ROWS, LENGTH + 1), CPU)
    # In order, taken twice (memory ran out), resumed elsewhere, back again, and far ahead.
    for step in [0, 1, 2, 2, 3, 4, 4, 5, 40, 41, 7, 8, 0, 1, 100]:
        assert np.array_equal(prefetch.take(step).numpy(), rows_of(step))
        assert np.array_equal(prefetch.take(step).numpy(), rows_of(step))
        prefetch.ahead(step + 1)
    straight = Prefetch(gather, (ROWS, LENGTH + 1), CPU)
    gathered.clear()
    for step in range(10):
        straight.take(step)
        straight.ahead(step + 1)
    assert gathered == list(range(10))  # each once


@pytest.mark.gpu
def test_no_step_on_a_gpu_synchronizes(config: RunConfig, tmp_path: Path) -> None:
    config.parallel.device = "cuda"
    stepper = build(config, torch.device("cuda"))
    for step in range(3):
        stepper.step(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, STEPS):
            stepper.step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
