"""Decide what starts next, for the command, a worker that ends, and SLURM's keeper.

A pass (`reconcile`) may be repeated or killed at any moment: a surplus worker finds no task and ends, a missing one is
started by the next pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import Literal, Protocol

from ...train.errors import UserError
from .. import prepare
from ..config import SweepConfig
from ..grid import extend
from ..prepare import Prepared
from ..results.scoring import is_scored
from ..runs import lease
from ..runs.attempts import RETRIED, Attempt, Policy, decide
from ..runs.directory import Busy, RunDirectory, SweepDirectory, now_on
from ..runs.forms import JobShape, PlannedRun
from ..runs.journal import Queued, Started
from ..runs.lease import Death
from ..runs.membership import retries_spent
from . import identity

KEEPERS = 2  # that wait in the queue, so that the death of one breaks nothing
AVOID_SECONDS = 900.0  # from when a run can be claimed again, for which a node where it failed does not get it
SCORINGS = 3  # times that a run is scored
Status = Literal["free", "waiting", "taken", "over"]


@dataclass(frozen=True)
class Task:
    """A run to train or to score."""

    kind: Literal["train", "score"]
    run: RunDirectory
    shape: JobShape  # of the workers that can do it
    status: Status
    seconds: float = 0.0  # estimate
    wait_seconds: float = 0.0  # until it is free, as far as that is known
    avoid: tuple[str, ...] = ()  # nodes that must not have it


def standing(
    attempts: Sequence[Attempt], policy: Policy, spent: int, now: float
) -> tuple[Status, float, tuple[str, ...]]:
    """Return a stopped run's status (free, waiting or over), the seconds until it can be claimed, and nodes to avoid.

    `attempts`: since a user last asked for a retry. `spent`: retries of the whole sweep.
    """
    ended = attempts[-1].ended if attempts else now
    decision = decide(attempts, policy, spent, ended)
    if not decision.again:
        return "over", 0.0, ()
    free_at = ended + decision.wait_seconds
    avoid = decision.avoid if now < free_at + AVOID_SECONDS else ()
    return ("waiting" if now < free_at else "free"), max(0.0, free_at - now), avoid


@dataclass(frozen=True)
class Scope:
    """Which tasks of a sweep a command asks for."""

    skipped: Mapping[str, float] = field(default_factory=dict)  # runs that stay as they are, until their state changes
    scores: bool = True


EVERYTHING = Scope()


class Board:
    """The tasks of a sweep that are in `scope`."""

    def __init__(self, sweep: SweepDirectory, config: SweepConfig, scope: Scope) -> None:
        self.sweep, self.policy, self._skipped = sweep, Policy.of(config.cluster), scope.skipped
        self._evaluate = dataclasses.asdict(config.evaluate) if config.evaluate.scores and scope.scores else None
        self._planned: dict[str, PlannedRun] = {}
        self._read_at = 0
        self._over: set[str] = set()  # runs that have ended, and need no second look
        self._scored: set[str] = set()

    def forget_ended(self) -> None:
        self._over.clear()

    def tasks(self) -> Iterator[Task]:
        """Yield unfinished tasks in the plan's order, trainings before scorings; read each run when it is reached."""
        self._read_plan()
        now, spent = now_on(self.sweep.path), cache(partial(retries_spent, self.sweep))
        for name in self._planned:
            if name not in self._over:
                task = self._training(name, now, spent)
                if task.status != "over":
                    yield task
                elif name not in self._skipped:
                    self._over.add(name)
        if self._evaluate is not None:
            yield from filter(None, map(self._scoring, self._planned))

    def _read_plan(self) -> None:
        if (changed := (self.sweep.path / "plan.json").stat().st_mtime_ns) != self._read_at:
            self._planned = {run.run_id: run for run in self.sweep.planned_runs()}
            self._read_at = changed

    def _training(self, name: str, now: float, spent: Callable[[], int]) -> Task:
        run, planned = self.sweep.run(name), self._planned[name]
        current = run.state()
        state = current.state
        status: Status = "free"
        wait, avoid = 0.0, tuple[str, ...]()
        if self._skipped.get(name) == current.since:
            status = "over"
        elif state in ("preempted", "failed"):
            attempts = run.record().recent
            retried = bool(attempts) and attempts[-1].cause in RETRIED
            status, wait, avoid = standing(attempts, self.policy, spent() if retried else 0, now)
        elif state in ("done", "diverged", "cancelled"):
            status = "over"
        elif state == "running":
            status = "taken"
        if status == "free" and not self._can_begin(planned, now, spent):
            status = "waiting"
        return Task("train", run, planned.shape, status, planned.estimated_seconds, wait, avoid)

    def _can_begin(self, planned: PlannedRun, now: float, spent: Callable[[], int]) -> bool:
        """Return whether a run has no trunk, or one that saved the run's first step or never will. `spent`: retries."""
        if (parent := planned.parent) is None or parent not in self._planned:
            return True
        if can_begin(self.sweep.run(planned.run_id), self.sweep.run(parent), planned.first_step):
            return True
        return self._training(parent, now, spent).status == "over"

    def _scoring(self, name: str) -> Task | None:
        run = self.sweep.run(name)
        if name in self._scored or not run.is_done():
            return None
        assert self._evaluate is not None
        if is_scored(run, self._evaluate) or run.record().scorings >= SCORINGS:
            self._scored.add(name)
            return None
        return Task("score", run, self._planned[name].shape.for_one_process(), "free")


def can_begin(branch: RunDirectory, trunk: RunDirectory, step: int) -> bool:
    """Return whether a branch can train: the trunk has saved `step`, or the branch itself has saved `step` or later."""
    return step in trunk.saved_steps() or any(saved >= step for saved in branch.saved_steps())


@dataclass(frozen=True)
class Job:
    """A job of the sweep that waits or runs."""

    name: str
    kind: Literal["worker", "keeper", "fit"]
    shape: JobShape | None  # of a worker
    waits: bool = False
    held: bool = False  # in the queue, and not to be started


@dataclass(frozen=True)
class Limits:
    """How many jobs a backend may start."""

    at_once: Callable[[JobShape], int]  # workers side by side
    room: float = math.inf  # further jobs that the queue takes
    keepers: int = 0  # jobs that must wait in the queue to supervise the sweep
    worker_seconds: float = 0.0  # that the tasks of a worker should last together; 0: each free task has its worker
    one_size: bool = False  # workers side by side have the same number of ranks


@dataclass(frozen=True)
class StartKeepers:
    count: int


@dataclass(frozen=True)
class StartWorkers:
    shape: JobShape
    count: int
    avoid: tuple[str, ...] = ()  # nodes


Action = StartKeepers | StartWorkers


def next_actions(tasks: Iterable[Task], jobs: Sequence[Job], limits: Limits) -> list[Action]:
    """Return what to start, the most important first, in addition to pending or running `jobs`.

    `tasks`: unfinished, in starting order.
    """
    waiting_keepers = sum(job.kind == "keeper" and job.waits and not job.held for job in jobs)
    keepers = int(min(max(0, limits.keepers - waiting_keepers), limits.room))
    actions: list[Action] = [StartKeepers(keepers)] if keepers else []
    free, taken = defaultdict[JobShape, list[Task]](list), defaultdict[JobShape, int](int)
    for task in tasks:
        if task.status == "free":
            free[task.shape].append(task)
        taken[task.shape] += task.status == "taken"
    workers = [job for job in jobs if job.kind == "worker" and not job.held]
    sizes = {job.shape.ranks for job in workers if job.shape is not None}
    turns = list[tuple[int, JobShape]]()
    for shape, group in free.items():
        if limits.one_size and sizes - {shape.ranks}:
            continue
        sizes.add(shape.ranks)
        idle = max(0, sum(job.shape == shape for job in workers) - taken[shape])
        missing = workers_for([task.seconds for task in group], limits.worker_seconds) - idle
        turns += [(turn, shape) for turn in range(missing)]
    started = Counter[JobShape]()
    for _, shape in sorted(turns, key=itemgetter(0)):  # each shape in its turn, so that none starves
        count = started.total()
        if count + keepers < limits.room and len(workers) + count < limits.at_once(shape):
            started[shape] += 1
    for shape, count in started.items():
        nodes = sorted({node for task in free[shape] for node in task.avoid})
        actions.append(StartWorkers(shape, count, tuple(nodes)))
    return actions


def workers_for(tasks: Sequence[float], worker_seconds: float) -> int:
    """Return the number of workers for tasks of these seconds; short tasks share a worker, up to `worker_seconds`."""
    if worker_seconds <= 0:
        return len(tasks)
    return max(1, math.ceil(sum(min(1.0, seconds / worker_seconds) for seconds in tasks) - 1e-9))


class Backend(Protocol):
    """Starts the jobs of `next_actions`, on this machine or on SLURM."""

    marks_queued: bool  # a run whose worker waits in a queue is `queued`

    def jobs(self) -> list[Job]:
        """Return the sweep's pending and running jobs. Raises UserError if SLURM does not answer."""

    def limits(self) -> Limits: ...

    def explain(self, start: Started) -> Death:
        """Return why the process that began the attempt `start` is gone."""

    def stillborn(self) -> list[tuple[str, JobShape, Death]]:
        """Return, only once, each worker that died before it claimed a task: job id, shape and cause of death."""

    def start_workers(self, shape: JobShape, count: int, avoid: tuple[str, ...]) -> None: ...

    def start_keepers(self, count: int) -> None: ...


def reconcile(sweep: SweepDirectory, backend: Backend, scope: Scope = EVERYTHING) -> bool:
    """Record attempts whose process is gone, and start workers for tasks in `scope`. Returns True if no task is left.

    The caller holds the sweep's lock. Raises UserError if SLURM does not answer or refuses a job.
    """
    config = prepare.configuration(sweep)
    board, jobs = Board(sweep, config, scope), backend.jobs()
    reconcile_lost(board, jobs, backend)
    if extend.replace_diverged(sweep, config):
        replan(prepare.from_disk(sweep))
    tasks = list(board.tasks())
    served = {job.shape for job in jobs if job.kind == "worker"}
    for action in next_actions(tasks, jobs, backend.limits()):
        if isinstance(action, StartKeepers):
            backend.start_keepers(action.count)
        else:
            backend.start_workers(action.shape, action.count, action.avoid)
            served.add(action.shape)
    if backend.marks_queued:
        _mark_queued(task for task in tasks if task.shape in served)
    return not tasks  # workers without one are about to end


def reconcile_lost(board: Board, jobs: Sequence[Job], backend: Backend) -> None:
    """Record the end of attempts whose job is gone.

    A worker that died before it claimed a run counts as a failed attempt of each free run that it could have claimed.
    """
    alive = {job.name for job in jobs}
    for task in board.tasks():
        is_lost = task.status == "taken" and task.run.state().job_id not in alive
        if is_lost and lease.reconcile_idle(task.run, board.policy, backend.explain):
            print(f"run {task.run.run_id} was lost: {task.run.state().reason}", flush=True)
    charged = set[JobShape]()
    for name, shape, death in backend.stillborn():
        if shape not in charged:  # several that die at once are one failure of each run
            charged.add(shape)
            for task in board.tasks():
                if task.kind == "train" and task.shape == shape and task.status == "free":
                    lease.charge(task.run, board.policy, name, death)


def _mark_queued(tasks: Iterable[Task]) -> None:
    for task in tasks:
        if task.run.state().state == "planned":
            with contextlib.suppress(Busy), task.run.lock(timeout=0.0):
                task.run.write_event(Queued)


def replan(prepared: Prepared, command: list[str] | None = None) -> None:
    """Write the plan of a sweep and the configs of its runs, except running and finished ones."""
    identity.claim(prepared.sweep)
    by_id = prepared.by_id
    present = [run for run in prepared.directories if (run.path / "config.yaml").exists()]
    prepare.write_plan(prepared, command)
    for run in present:
        state = run.state().state
        if state == "running":
            with contextlib.suppress(UserError):  # a worker that is gone holds no lock
                run.refreeze(by_id[run.run_id], timeout=0.0)
        elif state != "done":
            run.refreeze(by_id[run.run_id])  # the ranks, the device or the trunk may have changed


def grow(sweep: SweepDirectory) -> bool:
    """Add the next round of a sweep's grid. Returns False if there is none."""
    if not extend.next_round(sweep, prepare.configuration(sweep)):
        return False
    replan(prepare.from_disk(sweep))
    return True
