"""Decisions of the controller: retries, tasks that a worker can claim, and jobs that a pass starts; and its effects."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import make_config, planned_run, write_sweep
from isoflop.sweeps.config import ClusterConfig, EvaluateConfig, SweepConfig
from isoflop.sweeps.execute import controller
from isoflop.sweeps.execute.conduct import renew
from isoflop.sweeps.execute.controller import (
    AVOID_SECONDS,
    EVERYTHING,
    KEEPERS,
    SCORINGS,
    Board,
    Job,
    Limits,
    Scope,
    StartKeepers,
    StartWorkers,
    Task,
    can_begin,
    next_actions,
    reconcile,
    standing,
    workers_for,
)
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.runs.attempts import CAUSES, INTERRUPTED, LONGEST_WAIT, ON_NODE, RETRIED, Attempt, Policy, decide
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.runs.journal import Scoring, Started
from isoflop.sweeps.runs.lease import Death
from isoflop.train.files import write_json
from small_runs import end, set_state

# Retries of a run


def make_attempt(number: int, cause: str, host: str | None = "node1", ended: float = 0.0) -> Attempt:
    return Attempt(
        attempt=number, began=ended - 60, ended=ended, seconds=60.0, host=host, job_id="7", cause=cause, reason=None,
        first_step=0, last_step=0, saved_step=0, flops=0.0, flops_wasted=0.0,
    )  # fmt: skip


def history(*causes: str) -> list[Attempt]:
    return [make_attempt(number, cause) for number, cause in enumerate(causes, 1)]


def random_history(rng: random.Random, causes: tuple[str, ...] = CAUSES) -> list[Attempt]:
    return [
        make_attempt(number, rng.choice(causes), rng.choice(["node1", "node2", "node3", None]), 100.0 * number)
        for number in range(1, rng.randint(1, 12) + 1)
    ]


def test_all_runs_together_have_as_many_retries_as_the_sweeps_budget_says() -> None:
    policy = Policy(sweep_retries=2)
    decisions = [decide(history("killed"), policy, spent, 0.0) for spent in range(4)]
    assert [decision.again for decision in decisions] == [True, True, False, False]
    assert "cluster.sweep_retries" in decisions[2].why
    assert decide(history("preempted"), policy, 99, 0.0).again  # a preempted run uses no retry


def test_the_pause_doubles_and_counts_from_the_end_of_the_last_attempt() -> None:
    policy = Policy(backoff_seconds=30.0, retries=99)
    pauses = [decide(history(*["killed"] * n), policy, 0, now=0.0).wait_seconds for n in range(1, 10)]
    assert pauses[:4] == [30, 60, 120, 240]
    assert pauses[-1] == LONGEST_WAIT
    assert [decide(history("lost", "disk"), policy, 0, now).wait_seconds for now in (20.0, 60.0, 1e9)] == [40, 0, 0]
    # The end may be later than `now` on another machine's clock, which must not lengthen the pause.
    assert decide(history("killed"), policy, 0, now=-1e6).wait_seconds == 30
    assert decide(history(*["killed"] * 5000), Policy(retries=10**6), 0, 0.0).wait_seconds == LONGEST_WAIT


def test_random_histories_keep_to_every_rule() -> None:
    rng = random.Random(1)
    retries = 0
    for _ in range(2000):
        attempts = random_history(rng)
        policy = Policy(*(rng.randint(0, 4) for _ in range(3)), rng.choice([0.0, 1.0, 30.0]))
        spent, now = rng.randint(0, 4), attempts[-1].ended + rng.uniform(0, 500)
        decision = decide(attempts, policy, spent, now)
        last = attempts[-1]
        causes = [attempt.cause for attempt in attempts]
        failed, stopped = sum(c in RETRIED for c in causes), sum(c in INTERRUPTED for c in causes)
        allowed = (
            (last.cause in RETRIED and failed <= policy.retries and spent < policy.sweep_retries)
            or (last.cause in INTERRUPTED and stopped <= policy.max_requeues)
            or (last.cause == "memory" and causes.count("memory") == 1)
        )
        assert decision.again == allowed
        retries += allowed
        assert 0 <= decision.wait_seconds <= policy.backoff_seconds * 2 ** max(0, failed - 1)
        if not (decision.again and last.cause in RETRIED):
            assert decision.wait_seconds == 0
        elif decision.wait_seconds > 0:  # after this wait no further wait follows
            assert decide(attempts, policy, spent, now + decision.wait_seconds).wait_seconds == 0
        assert len(set(decision.avoid)) == len(decision.avoid)
        at_fault = [a.host for a in attempts if a.cause in ON_NODE and a.host]
        assert set(decision.avoid) == set(at_fault)
        assert not at_fault or decision.avoid[-1] == at_fault[-1]
    assert 300 < retries < 1700  # both decisions occur often


# Tasks that a worker can claim


CONFIG = SweepConfig(cluster=ClusterConfig(backoff_seconds=1000.0, sweep_retries=2))


def write_plan(folder: Path, *runs: dict[str, object]) -> tuple[SweepDirectory, list[RunDirectory]]:
    write_json(folder / "plan.json", {"runs": list(runs)})
    sweep = SweepDirectory(folder)
    for run in sweep.runs():
        run.path.mkdir(parents=True)
    return sweep, sweep.runs()


def statuses(sweep: SweepDirectory, config: SweepConfig = CONFIG, scope: Scope = EVERYTHING) -> dict[str, str]:
    return {task.run.run_id: task.status for task in Board(sweep, config, scope).tasks()}


def test_a_run_is_free_waits_or_is_taken_as_its_state_says(tmp_path: Path) -> None:
    names = ["new", "sent", "runs", "done", "gone", "lost", "stop", "bad"]
    sweep, runs = write_plan(tmp_path, *map(planned_run, names))
    by_name = dict(zip(names, runs, strict=True))
    set_state(by_name["sent"], "queued")
    set_state(by_name["runs"], "running")
    for name, state in (("done", "done"), ("gone", "cancelled")):
        set_state(by_name[name], state)
    end(by_name["lost"], "killed")
    end(by_name["stop"], "preempted")
    end(by_name["bad"], "input")
    expected = {"new": "free", "sent": "free", "runs": "taken", "lost": "waiting", "stop": "free"}
    assert statuses(sweep) == expected
    (lost,) = [task for task in Board(sweep, CONFIG, EVERYTHING).tasks() if task.run.run_id == "lost"]
    assert 900 < lost.wait_seconds <= 1000


def test_the_budget_of_all_runs_together_holds(tmp_path: Path) -> None:
    sweep, runs = write_plan(tmp_path, *map(planned_run, ["a", "b", "c"]))
    config = replace(CONFIG, cluster=ClusterConfig(backoff_seconds=0.0, sweep_retries=2))
    for run in runs:
        end(run, "killed")
    assert statuses(sweep, config) == dict.fromkeys("abc", "free")
    for run in runs[:2]:
        end(run, "killed")
    assert statuses(sweep, config) == {}, "two retries were all"


def test_a_node_is_avoided_for_a_while_after_a_run_can_be_claimed_again() -> None:
    attempt = make_attempt(1, "node", "node7", ended=100.0)
    policy, free_at = Policy(backoff_seconds=30.0), 130.0
    assert standing([attempt], policy, 0, 110.0) == ("waiting", 20.0, ("node7",))
    assert standing([attempt], policy, 0, free_at) == ("free", 0.0, ("node7",))
    assert standing([attempt], policy, 0, free_at + AVOID_SECONDS) == ("free", 0.0, ())
    assert standing([attempt] * 4, policy, 0, 1e9) == ("over", 0.0, ())
    assert standing([], policy, 0, 0.0) == ("free", 0.0, ())


def test_a_branch_waits_for_the_checkpoint_of_its_trunk_or_for_its_end(tmp_path: Path) -> None:
    branch = planned_run("branch", parent="trunk", first_step=5)
    sweep, (trunk, _, _) = write_plan(tmp_path, planned_run("trunk"), branch, planned_run("twig", parent="branch"))
    assert statuses(sweep) == {"trunk": "free", "branch": "waiting", "twig": "waiting"}
    set_state(trunk, "running")
    assert statuses(sweep)["branch"] == "waiting"
    (trunk.path / "checkpoints" / "step_5").mkdir(parents=True)
    (trunk.path / "checkpoints" / "step_5" / "manifest.json").write_text("{}")
    assert statuses(sweep) == {"trunk": "taken", "branch": "free", "twig": "waiting"}
    assert not can_begin(sweep.run("branch"), trunk, 6)
    (trunk.path / "checkpoints" / "step_5" / "manifest.json").unlink()
    set_state(trunk, "diverged")
    assert statuses(sweep)["branch"] == "free", "it says itself that there is no trunk"


def test_runs_out_of_scope_are_left_until_a_user_asks_for_them(tmp_path: Path) -> None:
    sweep, (_, second) = write_plan(tmp_path, planned_run("first"), planned_run("second"))
    end(second, "preempted")
    scope = Scope({run.run_id: run.state().since for run in (second,)})
    board = Board(sweep, CONFIG, scope)
    assert [task.run.run_id for task in board.tasks()] == ["first"]
    set_state(second, "planned")
    assert [task.run.run_id for task in board.tasks()] == ["first", "second"], "of the same board"


@pytest.mark.parametrize("scores", [True, False])
def test_a_finished_run_is_scored_a_few_times_at_most(tmp_path: Path, scores: bool) -> None:
    sweep, (done, _) = write_plan(tmp_path, planned_run("done"), planned_run("open"))
    config = replace(CONFIG, evaluate=EvaluateConfig(tasks=["lambada_openai"]))
    set_state(done, "done")
    (done.path / "summary.json").write_text('{"step": 7}')
    for _ in range(SCORINGS):
        tasks = list(Board(sweep, config, Scope(scores=scores)).tasks())
        assert [(task.kind, task.run.run_id) for task in tasks] == [("train", "open"), ("score", "done")][: 1 + scores]
        done.write_event(Scoring)
    assert len(list(Board(sweep, config, Scope(scores=scores)).tasks())) == 1


# Jobs that a pass starts


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
