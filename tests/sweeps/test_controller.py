"""Jobs that a pass of the controller starts: the pure decision, and its effects with a backend that records calls."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import make_config, write_sweep
from isoflop.sweeps.execute import controller
from isoflop.sweeps.execute.conduct import renew
from isoflop.sweeps.execute.controller import (
    KEEPERS,
    Job,
    Limits,
    StartKeepers,
    StartWorkers,
    Task,
    next_actions,
    reconcile,
    workers_for,
)
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.runs.journal import Started
from isoflop.sweeps.runs.lease import Death
from small_runs import end, set_state

ONE, TWO, BIG = JobShape(0, 1, 1.0, 60), JobShape(0, 1, 1.0, 60, ranks_per_node=2), JobShape(8, 4, 32.0, 240)
PENDING_KEEPERS = [Job(f"k{number}", "keeper", None, waits=True) for number in range(KEEPERS)]


def task(shape: JobShape = ONE, status: Any = "free", seconds: float = 60.0, avoid: tuple[str, ...] = ()) -> Task:
    return Task("train", RunDirectory(Path("run")), shape, status, seconds, avoid=avoid)


def worker(shape: JobShape = ONE, **options: Any) -> Job:
    return Job("w", "worker", shape, **options)


def limits(at_once: int = 100, **options: Any) -> Limits:
    return Limits(lambda shape: at_once, keepers=KEEPERS, **options)


def test_long_tasks_have_a_worker_each_and_short_ones_share() -> None:
    assert workers_for([600.0] * 3, 600.0) == 3
    assert workers_for([60.0] * 28, 600.0) == 3
    assert workers_for([1e5, *[60.0] * 10], 600.0) == 2, "a task of days is one worker's"
    assert workers_for([0.0], 600.0) == 1
    assert workers_for([60.0] * 7, 0.0) == 7
    actions = next_actions([task()] * 28 + [task(BIG, seconds=9e9)], PENDING_KEEPERS, limits(worker_seconds=600.0))
    assert actions == [StartWorkers(ONE, 3), StartWorkers(BIG, 1)]


def test_only_what_is_missing_is_started() -> None:
    tasks = [task(ONE, "taken"), task(), task(), task(ONE, "waiting")]
    assert next_actions(tasks, PENDING_KEEPERS, limits()) == [StartWorkers(ONE, 2)]
    busy, pending = worker(), worker(waits=True)
    assert next_actions(tasks, [*PENDING_KEEPERS, busy], limits()) == [StartWorkers(ONE, 2)], (
        "the busy worker has its own task"
    )
    assert next_actions(tasks, [*PENDING_KEEPERS, busy, pending], limits()) == [StartWorkers(ONE, 1)]
    assert next_actions(tasks, [*PENDING_KEEPERS, busy, pending, pending], limits()) == []
    assert next_actions(tasks, [*PENDING_KEEPERS, busy, pending, worker(BIG)], limits()) == [StartWorkers(ONE, 1)]
    assert next_actions(tasks, [*PENDING_KEEPERS, busy, pending, worker(held=True)], limits()) == [StartWorkers(ONE, 1)]
    assert next_actions([task(ONE, "taken"), task(ONE, "waiting")], PENDING_KEEPERS, limits()) == []


def test_keepers_come_first_and_room_is_never_passed() -> None:
    assert next_actions([], [], limits()) == [StartKeepers(2)]
    assert next_actions([task()], PENDING_KEEPERS[:1], limits()) == [StartKeepers(1), StartWorkers(ONE, 1)]
    running = replace(PENDING_KEEPERS[0], waits=False)
    assert next_actions([], [running, PENDING_KEEPERS[1]], limits()) == [StartKeepers(1)], (
        "the running keeper ends soon"
    )
    assert next_actions([task()] * 9, [], limits(room=4)) == [StartKeepers(2), StartWorkers(ONE, 2)]
    assert next_actions([task()] * 9, [], limits(room=1)) == [StartKeepers(1)]
    assert next_actions([task()] * 9, PENDING_KEEPERS, limits(at_once=5)) == [StartWorkers(ONE, 5)]
    assert next_actions([task()] * 9, [*PENDING_KEEPERS, worker(BIG)], limits(at_once=5)) == [StartWorkers(ONE, 4)]


def test_on_one_machine_jobs_of_one_size_stand_side_by_side() -> None:
    tasks = [task(TWO), task(ONE), task(ONE)]
    assert next_actions(tasks, PENDING_KEEPERS, limits(one_size=True)) == [StartWorkers(TWO, 1)]
    assert next_actions(tasks, [*PENDING_KEEPERS, worker(TWO)], limits(one_size=True)) == []
    assert next_actions(tasks[1:], PENDING_KEEPERS, limits(one_size=True)) == [StartWorkers(ONE, 2)]


def test_each_shape_has_its_turn() -> None:
    tasks = [*[task(ONE)] * 9, *[task(BIG)] * 9]
    assert next_actions(tasks, PENDING_KEEPERS, limits(at_once=5)) == [StartWorkers(ONE, 3), StartWorkers(BIG, 2)]


def test_random_passes_end_with_enough_workers_and_never_too_many() -> None:
    rng = random.Random(0)
    for _ in range(500):
        at_once, room = rng.randint(1, 8), rng.randint(0, 12)
        tasks = [
            task(rng.choice((ONE, BIG)), rng.choice(("free", "waiting", "taken")), rng.choice((1.0, 1e4)))
            for _ in range(rng.randint(0, 30))
        ]
        taken_shapes = Counter(queued.shape for queued in tasks if queued.status == "taken")
        jobs = [worker(shape) for shape in taken_shapes.elements()]
        bounds = Limits(lambda shape, limit=at_once: limit, room, KEEPERS, rng.choice((0.0, 600.0)))
        actions = next_actions(tasks, jobs, bounds)
        count = sum(action.count for action in actions)
        assert count <= room
        workers = [action for action in actions if isinstance(action, StartWorkers)]
        assert len(jobs) + sum(action.count for action in workers) <= max(at_once, len(jobs))
        assert all(
            any(queued.shape == action.shape and queued.status == "free" for queued in tasks) for action in workers
        )
        after = [*jobs, *PENDING_KEEPERS, *(worker(action.shape) for action in workers for _ in range(action.count))]
        if room - count > 0 and len(after) - KEEPERS < at_once:
            assert next_actions(tasks, after, bounds) == [], "one pass is enough"


class RecordingBackend:
    """A backend that records the jobs it should start."""

    marks_queued = True

    def __init__(self, *jobs: Job) -> None:
        self.queue = list(jobs)
        self.dead: list[tuple[str, JobShape, Death]] = []
        self.started: list[Any] = []

    def jobs(self) -> list[Job]:
        return self.queue

    def limits(self) -> Limits:
        return limits()

    def explain(self, start: Started) -> Death:
        return Death("node", f"the node of job {start.job_id} failed")

    def stillborn(self) -> list[tuple[str, JobShape, Death]]:
        dead, self.dead = self.dead, []
        return dead

    def start_workers(self, shape: JobShape, count: int, avoid: tuple[str, ...]) -> None:
        self.started.append((shape, count, avoid))

    def start_keepers(self, count: int) -> None:
        self.started.append(count)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    """Write a sweep of three planned runs."""
    config = make_config(ProductGrid(axes={"seed": [0, 1, 2]}))
    config.tokens, config.cluster.backoff_seconds = 640, 1000.0
    return write_sweep(tmp_path / "sweep", config)


def test_a_run_whose_job_is_gone_is_reconciled_and_goes_on_elsewhere(sweep: SweepDirectory) -> None:
    lost, alive, _ = sweep.runs()
    for run, job in ((lost, "7"), (alive, "8")):
        run.write_event(Started, attempt=1, host="node1", job_id=job, machine="far")
    backend = RecordingBackend(*PENDING_KEEPERS, Job("8", "worker", sweep.planned_runs()[0].shape))
    lost.give_sign()
    reconcile(sweep, backend)
    assert lost.state().state == "running", "it gives signs of life"
    lost.forget_signs()
    reconcile(sweep, backend)
    assert [run.state().state for run in (lost, alive)] == ["failed", "running"]
    (attempt,) = lost.record().attempts
    assert (attempt.cause, attempt.reason) == ("node", "the node of job 7 failed")


def test_workers_that_die_before_they_claim_use_up_the_budget_of_the_runs(sweep: SweepDirectory) -> None:
    shape, backend = sweep.planned_runs()[0].shape, RecordingBackend(*PENDING_KEEPERS)
    for run in sweep.runs()[1:]:
        end(run, "input")
    run = sweep.runs()[0]
    backend.dead = [("7", shape, Death("killed", "job 7 left no log")), ("8", shape, Death("killed", "nor did 8"))]
    reconcile(sweep, backend)
    assert [attempt.reason for attempt in run.record().attempts] == ["job 7 left no log"], "both are one failure"
    assert run.record().attempts[0].host is None


def test_a_run_that_is_tried_again_by_a_user_has_a_new_budget(sweep: SweepDirectory) -> None:
    first, second, third = sweep.runs()
    end(first, "input")
    set_state(second, "cancelled")
    renew(sweep.runs(), controller.Policy())
    assert [run.state().state for run in sweep.runs()] == ["planned"] * 3
    assert [run.record().budget for run in (first, second, third)] == [1, 1, 0]
