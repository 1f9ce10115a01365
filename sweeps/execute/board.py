"""What a sweep has to do, as its workers and its launcher see it: runs to train, and finished runs to score.

A worker claims a task by taking the run's lock (`runs/lease.py`), so the board may be out of date without harm. A
branch is free once its trunk's checkpoint exists, a scoring once its run is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from ..config import SweepConfig
from ..results.scoring import is_scored
from ..runs.attempts import RETRIED, Attempt, Policy, decide
from ..runs.directory import RunDirectory, SweepDirectory, now_on
from ..runs.forms import JobShape, PlannedRun
from ..runs.membership import retries_spent

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
    """Return whether a run whose last attempt did not finish it can be claimed, in how many seconds, and not where.

    `attempts` are those that count against the budgets, and `spent` the retries that the sweep has had. Pure.
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
    """The tasks of a sweep, as far as its `scope` goes."""

    def __init__(self, sweep: SweepDirectory, config: SweepConfig, scope: Scope) -> None:
        self.sweep, self.policy, self._skipped = sweep, Policy.of(config.cluster), scope.skipped
        self._evaluate = asdict(config.evaluate) if config.evaluate.tasks and scope.scores else None
        self._planned: dict[str, PlannedRun] = {}
        self._read_at = 0
        self._over: set[str] = set()  # runs that have ended, and need no second look
        self._scored: set[str] = set()

    def forget_ended(self) -> None:
        """Forget which runs have ended: a user may have asked for some of them again."""
        self._over.clear()

    def tasks(self) -> Iterator[Task]:
        """Yield what is not over, in the plan's order, trainings first; each run is read only when it is reached."""
        self._read_plan()
        scan = _Scan(self.sweep)
        for name in self._planned:
            if name not in self._over:
                task = self._training(name, scan)
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

    def _training(self, name: str, scan: _Scan) -> Task:
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
            status, wait, avoid = standing(attempts, self.policy, scan.retries_spent if retried else 0, scan.now)
        elif state in ("done", "diverged", "cancelled"):
            status = "over"
        elif state == "running":
            status = "taken"
        if status == "free" and not self._can_begin(planned, scan):
            status = "waiting"
        return Task("train", run, planned.shape, status, planned.estimated_seconds, wait, avoid)

    def _can_begin(self, planned: PlannedRun, scan: _Scan) -> bool:
        """Return whether a run's trunk has come to where the run begins, or never will."""
        if (parent := planned.parent) is None or parent not in self._planned:
            return True
        if can_begin(self.sweep.run(planned.run_id), self.sweep.run(parent), planned.first_step):
            return True
        return self._training(parent, scan).status == "over"

    def _scoring(self, name: str) -> Task | None:
        run = self.sweep.run(name)
        if name in self._scored or not run.is_done():
            return None
        assert self._evaluate is not None
        if is_scored(run, self._evaluate) or run.record().scorings >= SCORINGS:
            self._scored.add(name)
            return None
        return Task("score", run, self._planned[name].shape.for_one_process(), "free")


class _Scan:
    """What one look at all tasks computes at most once."""

    def __init__(self, sweep: SweepDirectory) -> None:
        self._sweep = sweep

    @cached_property
    def now(self) -> float:
        return now_on(self._sweep.path)

    @cached_property
    def retries_spent(self) -> int:
        return retries_spent(self._sweep)


def can_begin(branch: RunDirectory, trunk: RunDirectory, step: int) -> bool:
    """Return whether a branch finds a checkpoint at `step` of its trunk, or a later one of its own."""
    return step in trunk.saved_steps() or any(saved >= step for saved in branch.saved_steps())
