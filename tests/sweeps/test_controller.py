"""What a pass starts: the pure decision, and its effects on a sweep whose backend only writes down what it is told."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import settings, write
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
KEPT = [Job(f"k{number}", "keeper", None, waits=True) for number in range(KEEPERS)]


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
    actions = next_actions([task()] * 28 + [task(BIG, seconds=9e9)], KEPT, limits(worker_seconds=600.0))
    assert actions == [StartWorkers(ONE, 3), StartWorkers(BIG, 1)]


def test_only_what_is_missing_is_started() -> None:
    tasks = [task(ONE, "taken"), task(), task(), task(ONE, "waiting")]
    assert next_actions(tasks, KEPT, limits()) == [StartWorkers(ONE, 2)]
    busy, pending = worker(), worker(waits=True)
    assert next_actions(tasks, [*KEPT, busy], limits()) == [StartWorkers(ONE, 2)], "it has its task"
    assert next_actions(tasks, [*KEPT, busy, pending], limits()) == [StartWorkers(ONE, 1)]
    assert next_actions(tasks, [*KEPT, busy, pending, pending], limits()) == []
    assert next_actions(tasks, [*KEPT, busy, pending, worker(BIG)], limits()) == [StartWorkers(ONE, 1)]
    assert next_actions(tasks, [*KEPT, busy, pending, worker(held=True)], limits()) == [StartWorkers(ONE, 1)]
    assert next_actions([task(ONE, "taken"), task(ONE, "waiting")], KEPT, limits()) == []


def test_keepers_come_first_and_room_is_never_passed() -> None:
    assert next_actions([], [], limits()) == [StartKeepers(2)]
    assert next_actions([task()], KEPT[:1], limits()) == [StartKeepers(1), StartWorkers(ONE, 1)]
    running = replace(KEPT[0], waits=False)
    assert next_actions([], [running, KEPT[1]], limits()) == [StartKeepers(1)], "the one that runs ends soon"
    assert next_actions([task()] * 9, [], limits(room=4)) == [StartKeepers(2), StartWorkers(ONE, 2)]
    assert next_actions([task()] * 9, [], limits(room=1)) == [StartKeepers(1)]
    assert next_actions([task()] * 9, KEPT, limits(at_once=5)) == [StartWorkers(ONE, 5)]
    assert next_actions([task()] * 9, [*KEPT, worker(BIG)], limits(at_once=5)) == [StartWorkers(ONE, 4)]


def test_on_one_machine_jobs_of_one_size_stand_side_by_side() -> None:
    tasks = [task(TWO), task(ONE), task(ONE)]
    assert next_actions(tasks, KEPT, limits(one_size=True)) == [StartWorkers(TWO, 1)]
    assert next_actions(tasks, [*KEPT, worker(TWO)], limits(one_size=True)) == []
    assert next_actions(tasks[1:], KEPT, limits(one_size=True)) == [StartWorkers(ONE, 2)]


def test_each_shape_has_its_turn() -> None:
    tasks = [*[task(ONE)] * 9, *[task(BIG)] * 9]
    assert next_actions(tasks, KEPT, limits(at_once=5)) == [StartWorkers(ONE, 3), StartWorkers(BIG, 2)]


def test_nodes_where_runs_failed_are_avoided_by_the_workers_for_them() -> None:
    (action,) = next_actions([task(avoid=("b",)), task(avoid=("a", "b"))], KEPT, limits())
    assert isinstance(action, StartWorkers)
    assert action.avoid == ("a", "b")


def test_random_passes_end_with_enough_workers_and_never_too_many() -> None:
    draw = random.Random(0)
    for _ in range(500):
        at_once, room = draw.randint(1, 8), draw.randint(0, 12)
        tasks = [
            task(draw.choice((ONE, BIG)), draw.choice(("free", "waiting", "taken")), draw.choice((1.0, 1e4)))
            for _ in range(draw.randint(0, 30))
        ]
        taken = Counter(one.shape for one in tasks if one.status == "taken")
        jobs = [worker(shape) for shape in taken.elements()]
        bounds = Limits(lambda shape, most=at_once: most, room, KEEPERS, draw.choice((0.0, 600.0)))
        started = next_actions(tasks, jobs, bounds)
        count = sum(action.count for action in started)
        assert count <= room
        workers = [action for action in started if isinstance(action, StartWorkers)]
        assert len(jobs) + sum(action.count for action in workers) <= max(at_once, len(jobs))
        assert all(any(one.shape == action.shape and one.status == "free" for one in tasks) for action in workers)
        after = [*jobs, *KEPT, *(worker(action.shape) for action in workers for _ in range(action.count))]
        if room - count > 0 and len(after) - KEEPERS < at_once:
            assert next_actions(tasks, after, bounds) == [], "one pass is enough"


class Told:
    """A backend that starts nothing, and remembers what it was told to start."""

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
    """Three runs, planned."""
    config = settings(ProductGrid(axes={"seed": [0, 1, 2]}))
    config.tokens, config.cluster.backoff_seconds = 640, 1000.0
    return write(tmp_path / "sweep", config)


def test_a_pass_starts_workers_and_says_that_runs_wait_for_them(sweep: SweepDirectory) -> None:
    backend = Told()
    assert not reconcile(sweep, backend)
    (keepers, (_, count, _)) = backend.started
    assert (keepers, count) == (2, 3)
    assert [run.state().state for run in sweep.runs()] == ["queued"] * 3
    for run in sweep.runs():
        set_state(run, "done")
        (run.path / "summary.json").write_text("{}")
    assert reconcile(sweep, Told(*KEPT))
    assert reconcile(sweep, Told(*KEPT, worker(sweep.planned_runs()[0].shape))), "a worker without a task ends soon"


def test_a_run_whose_job_is_gone_is_reconciled_and_goes_on_elsewhere(sweep: SweepDirectory) -> None:
    lost, alive, _ = sweep.runs()
    for run, job in ((lost, "7"), (alive, "8")):
        run.write_event(Started, attempt=1, host="node1", job_id=job, machine="far")
    backend = Told(*KEPT, Job("8", "worker", sweep.planned_runs()[0].shape))
    lost.give_sign()
    reconcile(sweep, backend)
    assert lost.state().state == "running", "it gives signs of life"
    lost.forget_signs()
    reconcile(sweep, backend)
    assert [run.state().state for run in (lost, alive)] == ["failed", "running"]
    (attempt,) = lost.record().attempts
    assert (attempt.cause, attempt.reason) == ("node", "the node of job 7 failed")


def test_workers_that_die_before_they_claim_use_up_the_budget_of_the_runs(sweep: SweepDirectory) -> None:
    shape, backend = sweep.planned_runs()[0].shape, Told(*KEPT)
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
