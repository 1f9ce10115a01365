"""What of a sweep starts next: the same pass for the command, for a worker that ends, and for SLURM's keeper.

A pass reconciles runs whose worker is gone, counts the tasks that are free and the workers that can take them, and
starts the workers that are missing. It may be repeated or killed at any moment: a worker too many finds no task and
ends, a worker too few is started by the next pass. Runs are bound to no job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, Protocol

from ...train.errors import UserError, counted
from .. import prepare
from ..config import SweepConfig
from ..growth import extend
from ..prepare import Prepared
from ..results.scoring import is_scored
from ..runs import lease, membership
from ..runs.attempts import Policy
from ..runs.directory import Busy, RunDirectory, SweepDirectory
from ..runs.forms import JobShape
from ..runs.journal import Queued, Started
from ..runs.lease import Death
from .board import EVERYTHING, Board, Scope, Task

KEEPERS = 2  # that wait in the queue, so that the death of one breaks nothing


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
    room: float = math.inf  # jobs that the queue takes in addition to those that are in it
    keepers: int = 0  # jobs that must wait in the queue to look after the sweep
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
    """Return what is to be started, the most important first. Pure.

    Args:
        tasks: those that are not over, in the order in which they should start.
        jobs: the sweep's jobs, in the queue or at work.
        limits: what the backend allows.
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
    """Return how many workers tasks of these seconds are worth: one for a long task, or for enough short ones."""
    if worker_seconds <= 0:
        return len(tasks)
    return max(1, math.ceil(sum(min(1.0, seconds / worker_seconds) for seconds in tasks) - 1e-9))


class Backend(Protocol):
    """Carries out what `next_actions` says, on this machine or on SLURM."""

    marks_queued: bool  # a run whose worker waits in a queue is `queued`

    def jobs(self) -> list[Job]:
        """Return the sweep's jobs; UserError if it is not known which there are."""

    def limits(self) -> Limits: ...

    def explain(self, start: Started) -> Death:
        """Return why the process of an attempt is gone."""

    def stillborn(self) -> list[tuple[str, JobShape, Death]]:
        """Return the workers that ended before they claimed anything, each once."""

    def start_workers(self, shape: JobShape, count: int, avoid: tuple[str, ...]) -> None: ...

    def start_keepers(self, count: int) -> None: ...


def reconcile(sweep: SweepDirectory, backend: Backend, scope: Scope = EVERYTHING) -> bool:
    """Make one pass; the caller holds the sweep. Returns True if nothing is left to train or to score.

    Raises:
        UserError: SLURM does not answer, or refuses what is submitted.
    """
    config = prepare.configuration(sweep)
    board, jobs = Board(sweep, config, scope), backend.jobs()
    reconcile_lost(board, jobs, backend)
    if extend.replace_diverged(sweep, config):
        replan(prepare.from_disk(sweep))
    tasks = list(board.tasks())
    served = {job.shape for job in jobs}
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
    """Write how attempts ended whose job is gone, and count workers that died before they claimed a run."""
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
    """Write the plan of a sweep; configs on disk follow it, but for runs that are under way."""
    prepare.write_plan(prepared, command)
    by_id = prepared.by_id
    for run in prepared.directories:
        state = run.state().state
        if state == "running":
            with contextlib.suppress(UserError):  # unless its worker is gone, which nobody has noticed yet
                run.refreeze(by_id[run.run_id], timeout=0.0)
        elif state != "done":
            run.refreeze(by_id[run.run_id])  # what the plan says of where and how, as its ranks or its trunk


def grow(sweep: SweepDirectory) -> bool:
    """Add the next round of a sweep whose runs have all ended, if its grid has rounds. Returns True if it has grown."""
    if not extend.next_round(sweep, prepare.configuration(sweep)):
        return False
    replan(prepare.from_disk(sweep))
    return True


def renew(runs: Iterable[RunDirectory], policy: Policy) -> None:
    """Give a new budget of retries, or of scorings, to runs that had ended."""
    for run in runs:
        if run.state().state in ("failed", "diverged", "cancelled", "done"):
            with contextlib.suppress(Busy):
                lease.reset(run, policy)


def missing_scores(runs: Sequence[RunDirectory], config: SweepConfig) -> list[RunDirectory]:
    """Return the finished runs that lack scores."""
    settings = dataclasses.asdict(config.evaluate)
    return [run for run in runs if settings["tasks"] and run.is_done() and not is_scored(run, settings)]


def outcome(prepared: Prepared) -> int:
    """Return the exit code, after a line for every run that is not done."""
    sweep = prepared.sweep
    stands_in = {old: sweep.run(new) for new, old in membership.replacements(sweep).items()}
    missing = missing_scores(prepared.directories, prepared.config)
    code = 1 if missing else 0
    for run in [run for run in prepared.directories if not run.is_done() and run.given_up() is None]:
        print(f"run {run.run_id} is {run.state()}")
        other = stands_in.get(run.run_id)
        if other is not None and other.is_done():
            print(f"run {other.run_id} was trained in its place, at a lower learning rate")
        else:
            code = 1
    if missing:
        print(f"{counted(len(missing), 'run')} could not be scored; see {sweep.path / 'runs'}/<run>/log.txt")
    return code
