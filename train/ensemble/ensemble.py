"""Runs of one shape trained together, each with its own identity, directory, metrics and checkpoints.

Each member has a `Trainer` of its own, the same that keeps the books of a run alone, so a run can go on alone or in an
ensemble. What goes wrong with one member ends that member; what goes wrong in the shared step ends all that are left.
While E members train, each pays 1/E of the clock, so the seconds of all runs add up to those of the device.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..data.shards import Shards
from ..errors import Diverged, Stopped, UserError
from ..hardware import kept_peak, out_of_memory
from ..job.failure import Cause, cause_of, describe_error, forget_failure, note_failure
from ..job.job import Job, join
from ..loop import Trainer, open_run_shards
from ..parallel.zero import StepResult
from ..planner.validation import validate
from ..precision import set_matmul_precision
from .members import check_together
from .stacked import Member, StackedStepper


@dataclass(frozen=True)
class Ended:
    kind: str  # done | diverged | failed | stopped
    reason: str | None = None  # in a sentence; None when done
    summary: dict[str, Any] | None = None  # what summary.json holds; of a run that is done
    error: Exception | None = None  # what was raised; of a run that failed


def train_together(
    configs: Sequence[RunConfig],
    directories: Sequence[Path],
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[int, str], None] = lambda index, line: print(line),
    on_end: Callable[[int, Ended], None] = lambda index, ended: None,
    shards: Shards | None = None,
    alive: Callable[[], object] = lambda: None,
) -> list[Ended]:
    """Trains runs of one shape as one ensemble, each resuming from its own newest checkpoint.

    Args:
        configs: complete and resolved, of different runs that `members.check_together` accepts.
        directories: of the runs, in the same order.
        should_stop: asked after every step; True saves every member that still trains, and ends it with `stopped`.
        report: gets the index of a member and a line for a person.
        on_end: gets the index of a member and how it ended; the others may go on.
        shards: tokens to train on; prepared from the config when not given.
        alive: called in work that takes long and has no steps, such as preparing the data.

    Returns:
        How each ended, in the order of `configs`.

    Raises:
        UserError: these runs cannot be trained together, or not here.
    """
    check_together(configs)
    for config in configs:
        validate(config)
    first = configs[0]
    if first.parallel.threads is not None:
        torch.set_num_threads(first.parallel.threads)
    set_matmul_precision(first.parallel.tf32)
    with join(first, directories[0], partial(report, 0)) as job:
        opened = open_run_shards(first, shards, job, alive)
        together = _Together(configs, directories, opened, job, report, on_end, alive)
        try:
            together.start()
            while together.members:
                together.step(should_stop)
        finally:
            for trainer in together.trainers.values():
                trainer.close()
            together.stepper.close()
    return [together.ended[index] for index in range(len(configs))]


class SharedClock:
    """Seconds that each of `payers` pays for: the wall's, shared out equally among those who are left."""

    def __init__(self, payers: int) -> None:
        self.payers = payers
        self._paid, self._looked = 0.0, time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        self._paid += (now - self._looked) / max(1, self.payers)
        self._looked = now
        return self._paid

    def leave(self) -> None:
        self()
        self.payers -= 1


@dataclass
class _Together:
    """The trainers of an ensemble, the stepper that they share, and who is left."""

    configs: Sequence[RunConfig]
    directories: Sequence[Path]
    shards: Shards
    job: Job
    report: Callable[[int, str], None]
    on_end: Callable[[int, Ended], None]
    alive: Callable[[], object]

    def __post_init__(self) -> None:
        self.clock = SharedClock(len(self.configs))
        self.stepper = StackedStepper(self.configs, self.job.device, self.shards, partial(self.report, 0))
        self.members = list(self.stepper.members)  # that have not ended
        self.trainers: dict[int, Trainer] = {}
        self.ended: dict[int, Ended] = {}

    def start(self) -> None:
        """Resumes or starts every member; one that had taken all its steps ends here."""
        peak = kept_peak(self.job.device, self.stepper.dtype)
        for member in self.stepper.members:
            self._guarded(member, partial(self._open, member, peak))
        for trainer in self.trainers.values():
            trainer.start_clock()
        for member in list(self.members):
            trainer = self.trainers[member.index]
            if not trainer.goes_on:
                self._guarded(member, partial(_keep_books, trainer, None, False))
        self._leave()

    def step(self, should_stop: Callable[[], bool]) -> None:
        steps = [self.trainers[member.index].progress.step for member in self.members]
        self.job.watchdog.beat(min(steps), f"in a step of an ensemble of {len(steps)}")
        try:
            results = self.stepper.step(steps)
        except Exception as error:
            reason = describe_error(error)
            if out_of_memory(error):
                reason = f"out of memory in an ensemble of {len(steps)}; a smaller one needs less ({reason})"
            for member in list(self.members):
                self._end(member, Ended("failed", reason, error=error))
            return
        stop = should_stop()
        for member, result in zip(list(self.members), results, strict=True):
            self._guarded(member, partial(_keep_books, self.trainers[member.index], result, stop))
        self._leave()

    def _open(self, member: Member, peak: float) -> None:
        index = member.index
        forget_failure(self.directories[index])  # of an earlier attempt, or a larger ensemble
        self.trainers[index] = Trainer(
            member.config,
            self.directories[index],
            partial(self.report, index),
            self.shards,
            self.job,
            member,
            peak,
            ensemble=len(self.configs),
            clock=self.clock,
            alive=self.alive,
        )

    def _guarded(self, member: Member, action: Callable[[], Ended | None]) -> None:
        """Whatever goes wrong in the books of one member ends that member alone."""
        try:
            ended = action()
        except Stopped as stopped:
            ended = Ended("stopped", str(stopped))
        except Diverged as diverged:
            ended = Ended("diverged", str(diverged))
        except Exception as error:
            ended = Ended("failed", describe_error(error), error=error)
        if ended is not None:
            self._end(member, ended)

    def _end(self, member: Member, ended: Ended) -> None:
        self.members.remove(member)
        if (trainer := self.trainers.pop(member.index, None)) is not None:
            trainer.close()
        if ended.error is not None and not isinstance(ended.error, UserError):
            self.report(member.index, "".join(traceback.format_exception(ended.error)))
        if ended.kind in ("diverged", "failed") and ended.reason is not None:
            cause = Cause.DIVERGED if ended.error is None else cause_of(ended.error)
            note_failure(self.directories[member.index], self.job.failure(cause, ended.reason))
        self.ended[member.index] = ended
        self.on_end(member.index, ended)

    def _leave(self) -> None:
        gone = [member for member in self.stepper.members if member not in self.members]
        for _ in gone:
            self.clock.leave()
        if gone and self.members:
            self.stepper.drop(gone)


def _keep_books(trainer: Trainer, result: StepResult | None, stop: bool) -> Ended | None:
    """After a step, or without a result at the start of a run that had taken all its steps."""
    if result is not None:
        trainer.record_step(result)
    if not trainer.goes_on:
        return Ended("done", summary=trainer.finish())
    trainer.pause(stop, trainer.save_is_due())
    return None
