"""A failed process records its cause, rank, host and step, and one sentence."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from isoflop.train import loop
from isoflop.train.config import DataConfig, RunConfig
from isoflop.train.errors import OutOfMemory, Stopped, UserError
from isoflop.train.hardware import out_of_memory
from isoflop.train.job.failure import Cause, Failure, RankError, cause_of, note_failure, read_failure
from isoflop.train.stepper import Stepper
from small_runs import forty_steps


@pytest.fixture
def config(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return forty_steps(small_corpus(512, ["tensor", "of", "the"]))


def test_the_first_word_of_a_failure_stays_and_leaves_no_other_file(tmp_path: Path) -> None:
    first = Failure(Cause.HUNG, "rank 2 on a hung", 2, "a", 40, ("a", "b"))
    note_failure(tmp_path, first)
    note_failure(tmp_path, Failure(Cause.KILLED, "rank 1 on b died"))
    assert read_failure(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


@pytest.mark.parametrize(
    ("error", "cause", "step"),
    [(ValueError("the disk ate it"), "error", 3), (RuntimeError("can't allocate memory: 12"), "error", 2)],
)
def test_a_run_that_fails_leaves_what_where_and_when(
    error: Exception, cause: str, step: int, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients(self: Stepper) -> torch.Tensor:
        if next(steps) >= step:
            raise error
        return real(self)

    real, steps = Stepper._gradients, itertools.count()
    monkeypatch.setattr(Stepper, "_gradients", gradients)
    with pytest.raises((ValueError, OutOfMemory)):
        loop.train(config, tmp_path, report=lambda line: None)
    failure = read_failure(tmp_path)
    host = socket.gethostname()
    assert (failure.cause, failure.rank, failure.host, failure.step, failure.hosts) == (cause, 0, host, step, (host,))
    monkeypatch.setattr(Stepper, "_gradients", real)
    with pytest.raises(Stopped):
        loop.train(config, tmp_path, lambda: True, report=lambda line: None)
    assert read_failure(tmp_path) is None, "a stopped run has not failed, and a new start clears the record"


def test_errors_have_causes() -> None:
    assert cause_of(UserError("x")) == Cause.INPUT
    assert cause_of(RankError(Failure(Cause.NODE, "x"))) == Cause.NODE
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"))
