"""What jobs call: one training, several in one job, a queue of them, scoring, and the last fit.

Special here:
- a worker goes through a queue, unit after unit, so that torch is imported once; what ends a run, or a unit, never ends
  the worker. On this machine it stops by itself when the launcher that started it is gone; in a SLURM job it gives its
  unit back when it is told to stop, and has its job put back in SLURM's queue;
- every rank of a run trains, and rank 0 alone holds the lock, writes the state and puts the job back in the queue; what
  another rank fails of reaches the state through failure.json, whoever of them is left;
- a job of several runs that was not stopped succeeds if any of them is done: those can be scored and branched from, and
  the others say in their states why they cannot;
- a job begins by looking for the sweep's plan. Where that is not to be seen the job fails with a sentence in its log;
  where not even the log can be written, `recovery.settle_lost` says so of the runs, on a node that sees them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout

from ...train.errors import UserError
from ...train.job.environment import Ranks, detect
from ...train.job.session import session
from ..prepare import configuration
from ..runs.directory import Busy, RunDirectory, SweepDirectory, this_node
from ..runs.retries import Policy
from ..slurm import commands as slurm
from . import together
from .attempt import Interrupt, RunFailed, back_to_the_queue, stopped_in, tidy, train_one, train_rank, try_log
from .queue import Queue
from .recovery import UNWRITTEN, settle_lost

POLL_SECONDS, LONGEST_PAUSE = 0.2, 5.0  # between two looks at a queue that has nothing to claim
SETTLE_SECONDS = 60.0  # that somebody else may hold a sweep before its laws are fitted without a look for lost runs
IDLE_SECONDS = 60.0  # for which a SLURM job waits for something to claim
MOST_WARNING = 120.0  # seconds before its time limit that a job is told to stop; half of the limit where that is less
LEAST_SECONDS = 60.0  # that must be left until then to begin a unit; a tenth of the limit where that is less


def train_run(path: str, policy: Policy, launcher: tuple[str, str] | None = None) -> None:
    """Trains the run in directory `path`, resuming what is there. Every rank of the run calls it.

    Args:
        path: the run directory; its frozen config.yaml is all that is read, and of a branch its trunk's checkpoint.
        policy: how often it goes back to the queue, and when it counts as hung.
        launcher: sweep directory and lock token of a launcher on this machine, which must stay alive.

    Raises:
        RunFailed: the run failed or diverged; state.json holds the reason.
        Busy: somebody else has the run.
        UserError: this node does not see the sweep.
    """
    run, ranks = RunDirectory(Path(path)), detect()
    check_shared(run.path.parent.parent)
    if ranks.rank > 0:
        _follow(run, ranks)
        return
    ended, reason = train_one(run, ranks, _interrupt(launcher), slurm.job_id(), policy)
    if ended == "preempted" and slurm.inside_job():
        back_to_the_queue([run], policy)
    if ended not in ("done", "preempted"):
        raise RunFailed(f"run {run.run_id} {ended}: {reason}")


def train_unit(how: str, paths: list[str], policy: Policy) -> None:
    """Trains several runs as one SLURM job, which is requeued once for all that were stopped.

    Args:
        how: ensemble | shared.
        paths: the run directories.
        policy: see `train_run`.

    Raises:
        RunFailed: none of the runs is done; their states hold the reasons.
        UserError: this node does not see the sweep.
    """
    runs = [RunDirectory(Path(path)) for path in paths]
    check_shared(runs[0].path.parent.parent)
    _train(how, runs, Interrupt(), policy)
    stopped = stopped_in(runs, slurm.job_id())
    if stopped and slurm.inside_job():
        back_to_the_queue(stopped, policy)
    if not stopped and not any(run.is_done() for run in runs):
        raise RunFailed("; ".join(f"run {run.run_id} {run.state().state}: {run.state().reason}" for run in runs))


def work(
    sweep_path: str, queue_folder: str, place: int, policy: Policy, launcher: tuple[str, str] | None = None
) -> None:
    """Works at one place of this machine: trains unit after unit of a launch's queue until none is left to begin.

    What comes of the runs is in their states. Units of several ranks have no place here.

    Args:
        sweep_path: the sweep directory.
        queue_folder: where `Queue.create` wrote the queue.
        place: a number, by which the launcher knows who trains what.
        policy: what is tried again.
        launcher: sweep directory and lock token of the launcher, which must stay alive.
    """
    queue = Queue.open(SweepDirectory(Path(sweep_path)), Path(queue_folder))
    with contextlib.closing(queue), session():
        _go_through(queue, policy, _interrupt(launcher), place)


def work_queue(sweep_path: str, queue_folder: str, policy: Policy) -> None:
    """Works through a queue in a SLURM job, until nothing is left that this node may take.

    Told to stop, or close to its time limit, it gives back what it was at and has its job put back in SLURM's queue,
    unless there is nothing left for it there. To cancel such a job takes a worker away and no run: those are cancelled
    by `isoflop cancel`.

    Args:
        sweep_path: the sweep directory.
        queue_folder: where `Queue.create` wrote the queue.
        policy: what is tried again.

    Raises:
        UserError: this node does not see the sweep.
    """
    clock = JobClock.of(os.environ)
    sweep, interrupt, node = check_shared(Path(sweep_path)), Interrupt(), this_node()
    queue = Queue.open(sweep, Path(queue_folder))
    with contextlib.closing(queue), session():
        _go_through(queue, policy, interrupt, int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")), node, clock)
        stopped = interrupt.reason or ("its time is nearly over" if clock.is_short() else None)
        if stopped is not None and queue.left(node):
            _requeue(stopped)


def _go_through(
    queue: Queue, policy: Policy, interrupt: Interrupt, place: int, node: str | None = None,
    clock: JobClock | None = None,
) -> None:  # fmt: skip
    """Trains unit after unit. What ends a run, or a unit, never ends this."""
    import torch

    gc.freeze()  # else each `tidy` would look through all that PyTorch has made on import
    threads, pause, idle_since = torch.get_num_threads(), POLL_SECONDS, time.monotonic()
    while not interrupt() and not (clock is not None and clock.is_short()):
        unit = queue.claim(place, node)
        if unit is None:
            queue.recover(policy)
            if not queue.left(node) or (node is not None and _had_better_leave(queue, time.monotonic() - idle_since)):
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            continue
        try:
            runs = [queue.sweep.run(name) for name in unit.runs]
            if wanted := [run for run in runs if not run.is_done()]:
                _train(unit.how, wanted, interrupt, policy)
        except Exception:
            # Such as a disk too full to say that a run has begun; the other units may be better off.
            traceback.print_exc()
        queue.settle(unit, policy, UNWRITTEN)
        torch.set_num_threads(threads)  # a run may have asked for its own number
        tidy()
        pause, idle_since = POLL_SECONDS, time.monotonic()


def _had_better_leave(queue: Queue, idle: float) -> bool:
    """Whether a worker that finds nothing to claim leaves its device to others, and what is left to who is at work."""
    if (queue.ready_in() or 0.0) > IDLE_SECONDS:
        return True
    return idle > IDLE_SECONDS and bool(queue.running())


def _requeue(why: str) -> NoReturn:
    """Puts this worker's job back in SLURM's queue, unless SLURM has done so or somebody has cancelled it."""
    job, restarts = slurm.job_id(), slurm.restarts()
    fate = slurm.fate(job, restarts)
    if fate == "cancelled":
        print(f"{why}; its job was cancelled in SLURM, so the other workers go on without it")
    elif fate != "requeued" and (refused := slurm.requeue(job, restarts)) is not None:
        print(f"{why}; SLURM would not requeue the job ({refused}), so the keeper starts another")
    # Not an Exception: submitit would record the end of a job that goes on.
    raise SystemExit(1)


@dataclass(frozen=True)
class JobClock:
    """How much time the SLURM job of this process has left."""

    ends: float  # by time.monotonic(); the job is told to stop a while before
    margin: float  # seconds before the end from which on nothing new is begun

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> JobClock:
        """By what SLURM says of the job; with no word of it, or no limit, there is no end."""
        try:
            start, end = (int(environment[f"SLURM_JOB_{name}_TIME"]) for name in ("START", "END"))
        except (KeyError, ValueError):
            return cls(math.inf, 0.0)
        # The difference, because the controller's clock need not be this node's. A worker starts seconds after its job.
        seconds = end - start
        warning = min(MOST_WARNING, seconds / 2)
        return cls(time.monotonic() + seconds, warning + min(LEAST_SECONDS, seconds / 10))

    def is_short(self) -> bool:
        """Whether a unit that is begun now would have to be given back at once."""
        return time.monotonic() > self.ends - self.margin


def check_shared(path: Path | str) -> SweepDirectory:
    """The sweep directory, as this node sees it.

    Raises:
        UserError: it is not there: the output folder is not shared with this node.
    """
    sweep = SweepDirectory(Path(path))
    if not (sweep.path / "plan.json").is_file():
        came_from = os.environ.get("SLURM_SUBMIT_HOST")
        whence = f", where {came_from} has it" if came_from else ""
        raise UserError(
            f"{sweep.path} holds no plan.json on node {this_node()}{whence}: the output folder is not shared with this "
            "node; set output_root to a folder that every node sees, or keep the node out with cluster.exclude"
        )
    return sweep


def _interrupt(launcher: tuple[str, str] | None) -> Interrupt:
    if launcher is None:
        return Interrupt()
    sweep, token = SweepDirectory(Path(launcher[0])), launcher[1]
    return Interrupt(lambda: sweep.launcher_alive(token))


def _train(how: str, runs: list[RunDirectory], interrupt: Interrupt, policy: Policy) -> None:
    """Trains a unit in this process and those that it starts. How each run ended is in its state."""
    job = slurm.job_id()
    if how == "ensemble":
        together.train_ensemble(runs, interrupt, job, policy)
    elif how == "shared":
        together.train_shared(runs, interrupt, job, policy)
    else:
        try:
            train_one(runs[0], detect(), interrupt, job, policy)
        except Busy as error:
            print(f"left out: {error}")


def _follow(run: RunDirectory, ranks: Ranks) -> None:
    """The part of every other rank: it trains, and leaves lock, state and queue to rank 0.

    That a run stops or diverges is agreed on by all ranks, and rank 0 says it: leaving with an error here would make
    SLURM end rank 0 before it has. A failure may be this rank's alone, and rank 0 may be what failed.
    """
    if run.is_done():
        return
    run.log(f"rank {ranks.rank} of {ranks.size} on {ranks.host}, process {os.getpid()}", ranks.rank)
    ending = train_rank(run, ranks, Interrupt())
    try_log(run, ending.state if ending.reason is None else f"{ending.state}: {ending.reason}", ranks.rank)
    if ending.state == "failed":
        run.note_failure(str(ending.reason), ending.cause)
        raise RunFailed(f"rank {ranks.rank} of run {run.run_id} failed: {ending.reason}")


def evaluate_runs(sweep_path: str, run_ids: list[str]) -> None:
    """Scores the wanted checkpoints of each run that have no scores yet; the tasks are loaded once for all of them.

    Raises:
        RunFailed: a run could not be scored; the others were.
        UserError: this node does not see the sweep.
    """
    sweep = check_shared(sweep_path)
    settings = sweep.settings()["config"]["evaluate"]
    from ..results.scoring import evaluate_run, is_scored, open_suite

    scoring, failures = None, []
    for name in run_ids:
        run = sweep.run(name)
        if not run.is_done():
            failures.append(f"run {name} is {run.state().state} and was not scored")
            continue
        try:
            # Not the run's own lock: nobody trains what is done, and a command must not wait for a scoring.
            with FileLock(run.path / ".scoring.lock", timeout=0):
                if not is_scored(run, settings):
                    scoring = scoring or open_suite(settings, run.log)
                    evaluate_run(run, settings, scoring)
        except Timeout:
            print(f"left out: somebody else scores run {name}")
        except Exception as error:
            # One checkpoint that cannot be scored must not cost the scores of the others.
            try_log(run, traceback.format_exc())
            failures.append(f"run {name} could not be scored: {type(error).__name__}: {error}")
    if failures:
        raise RunFailed("; ".join(failures))


def finish_sweep(sweep_path: str) -> None:
    """The last job: the table, the laws and the report, from whatever the runs have written."""
    from ..results.finish import write_results

    sweep = check_shared(sweep_path)
    try:
        with sweep.lock(SETTLE_SECONDS):
            settle_lost(sweep, Policy.of(configuration(sweep).cluster), _live_jobs())
    except UserError as error:  # as where somebody else holds it; there is a report all the same
        print(f"nobody looked for lost runs: {error}")
    write_results(sweep)


def _live_jobs() -> set[str] | None:
    """The jobs in SLURM's queue; None where it does not answer."""
    try:
        return slurm.live_jobs()
    except UserError:
        return None
