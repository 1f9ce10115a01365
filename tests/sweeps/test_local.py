"""Workers on this machine as their launcher sees them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from isoflop.sweeps.execute import local
from isoflop.sweeps.execute.local import STILLBORN, LocalJob, LocalPool, Workers
from isoflop.sweeps.plan.packing import Unit
from isoflop.sweeps.runs import states
from isoflop.sweeps.runs.attempts import Policy, read
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.queue import Queue
from isoflop.train.config import DataConfig
from isoflop.train.errors import UserError
from small_runs import forty_steps, planned

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    sweep = SweepDirectory(tmp_path / "sweep")
    units = [Unit("alone", (name,)) for name in ("a", "b")]
    for unit in units:
        (sweep.path / "runs" / unit.runs[0]).mkdir(parents=True)
    return Workers(sweep, Queue.create(sweep, sweep.path / "jobs", units, {}), Policy())


def started(workers: Workers) -> LocalJob:
    job = workers.take(0)
    assert job is not None
    job.handle = SimpleNamespace(paths=SimpleNamespace(stderr="worker.err"))
    return job


def test_workers_that_die_before_they_begin_end_the_launch_with_a_sentence(workers: Workers) -> None:
    for _ in range(STILLBORN - 1):
        workers.ended(started(workers))
    with pytest.raises(UserError, match=r"^workers end before they train anything, 3 of them; see worker\.err, and"):
        workers.ended(started(workers))


def work(workers: Workers, freezes: bool) -> None:
    """Freezes in the middle of the first run, or where there is nothing left to train."""
    queue = Queue.open(workers.sweep, workers.queue.folder)
    while (unit := queue.claim(0)) is not None:
        run = workers.sweep.run(unit.runs[0])
        with states.held(run, "7", workers.policy):
            if freezes:
                os.kill(os.getpid(), signal.SIGSTOP)
            (run.path / "summary.json").write_text("{}")
            states.conclude(run, "done")
        queue.settle(unit, workers.policy, states.KILLED)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_frozen_worker_counts_as_hung_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = SweepDirectory(tmp_path / "sweep")
    runs = [planned(sweep.path, replace(forty_steps(DataConfig()), seed=seed)) for seed in (0, 1)]
    policy = Policy(backoff_seconds=0.0)
    units = [Unit("alone", (run.run_id,)) for run in runs]
    workers = Workers(sweep, Queue.create(sweep, sweep.path / "jobs", units, {}), policy)
    started: list[object] = []

    def start(pool: LocalPool, job: LocalJob, place: int) -> LocalJob:
        process = FORK.Process(target=work, args=(workers, not started))
        process.start()
        started.append(process)
        job.handle = SimpleNamespace(_process=SimpleNamespace(pid=process.pid, poll=lambda: process.exitcode))
        return job

    monkeypatch.setattr(LocalPool, "_start", start)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.1)
    LocalPool(tmp_path, places=1, threads=1, hang_seconds=1.0).run(workers, lambda: None)
    assert len(started) == 2
    histories = [[(attempt.cause, attempt.attempt) for attempt in read(run)] for run in runs]
    assert histories == [[("hung", 1), ("done", 2)], [("done", 1)]]
    assert "no sign of life for 1 s" in (read(runs[0])[0].reason or "")
    assert {run.state().state for run in runs} == {"done"}
