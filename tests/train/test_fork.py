"""Ranks as forked processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from isoflop.train.job.fork import run_ranks


def rank_of_process() -> int:
    return dist.get_rank()


def test_a_rank_that_is_done_stays_until_all_are(tmp_path: Path) -> None:
    def on_rank() -> bool:
        if rank_of_process() == 0:
            (tmp_path / "pid").write_text(str(os.getpid()))
            return True
        time.sleep(0.5)
        os.kill(int((tmp_path / "pid").read_text()), 0)
        return True

    assert run_ranks(2, on_rank) == [True, True]


def test_the_first_failure_is_told_first_and_a_death_with_its_signal() -> None:
    def on_rank() -> None:
        if rank_of_process() == 0:
            time.sleep(0.5)
            raise ValueError("a consequence")
        if rank_of_process() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError) as raised:
        run_ranks(3, on_rank)
    cause, _, consequence = str(raised.value).partition("\n")
    assert cause == "rank 1: ended without a result (exit code -9)"
    assert "a consequence" in consequence
    assert "rank 2" not in consequence


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1: no answer within 2 s"):
        run_ranks(2, lambda: time.sleep(60 * rank_of_process()), timeout=2.0)
