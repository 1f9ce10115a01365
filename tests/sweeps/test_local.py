"""Workers on this machine as their launcher sees them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from isoflop.sweeps.execute.local import STILLBORN, LocalJob, Workers
from isoflop.sweeps.plan.packing import Unit
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.queue import Queue
from isoflop.train.errors import UserError
from isoflop.train.files import JsonLines
from small_runs import end_unit


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


def test_a_worker_that_has_trained_something_may_be_replaced_for_ever(workers: Workers) -> None:
    for _ in range(STILLBORN - 1):
        workers.ended(started(workers))
    job = started(workers)
    unit = workers.queue.claim(0)
    assert unit is not None
    end_unit(workers.queue, unit)
    workers.ended(job)
    for _ in range(STILLBORN - 1):
        workers.ended(started(workers))  # it counts anew


def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines._file.close()
    lines._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": 1})
    lines.close()
