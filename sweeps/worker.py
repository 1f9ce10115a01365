"""What runs inside a job: signals, attempts, one training or the scoring of some runs, and the last fit.

Special here:
- TERM and USR2 set a flag; the loop saves a checkpoint and returns, and only then is the job put back in the queue;
- a failure is a state with a reason in a sentence, and a non-zero exit, so that nothing that depends on it starts;
- every rank of a run trains, and rank 0 alone holds the lock, writes the state and puts the job back in the queue; what
  another rank fails of reaches the state through failure.json, whoever of them is left;
- a worker on this machine stops by itself when the launcher that started it is gone.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ..train.errors import UserError
from ..train.parallel.environment import Ranks, detect
from . import slurm
from .plan import describe_mesh
from .runs import RunDirectory, SweepDirectory


class RunFailed(Exception):
    """The run ended without a result; its state says why. Makes the job exit with an error."""


class Interrupt:
    """Remembers that the job was told to stop, by signal or by the loss of its launcher."""

    def __init__(self, launcher_alive: Callable[[], bool] | None = None) -> None:
        self.reason: str | None = None
        self._launcher_alive = launcher_alive
        self._asked = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:  # a preempted job gets several; the first says why
            self.reason = f"signal {signal.Signals(number).name}"

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._launcher_alive is not None and now - self._asked > 1.0:
            self._asked = now
            if not self._launcher_alive():
                self.reason = "the launcher is gone"
        return self.reason is not None


def train_run(path: str, max_requeues: int = 20, launcher: tuple[str, str] | None = None) -> None:
    """Trains the run in directory `path`, resuming what is there. Every rank of the run calls it.

    Args:
        path: the run directory; its frozen config.yaml is all that is read.
        max_requeues: times that its SLURM job is put back in the queue before the run counts as failed.
        launcher: sweep directory and lock token of a launcher on this machine, which must stay alive.

    Raises:
        RunFailed: the run failed or diverged; state.json holds the reason.
    """
    run, ranks = RunDirectory(Path(path)), detect()
    if ranks.rank > 0:
        _follow(run, ranks)
        return
    alive = None
    if launcher is not None:
        sweep = SweepDirectory(Path(launcher[0]))
        alive = lambda: sweep.launcher_alive(launcher[1])  # noqa: E731
    interrupt = Interrupt(alive)
    with run.lock():
        if run.is_done():
            return
        attempt = run.state().attempt + 1
        run.set_state("running", attempt=attempt, host=socket.gethostname(), job_id=slurm.job_id())
        run.log(f"attempt {attempt} on {socket.gethostname()}, job {slurm.job_id()}, process {os.getpid()}")
        halved = run.is_halved()
        ended, reason = _train(run, ranks, interrupt)
        if ended == "failed" and ranks.size > 1 and run.is_halved() and not halved:
            ended = "preempted"  # memory ran out on a rank, and the next start takes a smaller micro-batch
        if ended == "preempted" and slurm.inside_job():
            ended, reason = _verdict(reason, max_requeues)
        run.release()
        _set_state(run, ended, reason)
    if ended == "preempted" and slurm.inside_job():
        _back_to_the_queue(run)
    if ended not in ("done", "preempted"):
        raise RunFailed(f"run {run.run_id} {ended}: {reason}")


def _follow(run: RunDirectory, ranks: Ranks) -> None:
    """The part of every other rank: it trains, and leaves lock, state and queue to rank 0.

    That a run stops or diverges is agreed on by all ranks, and rank 0 says it: leaving with an error here would make
    SLURM end rank 0 before it has. A failure may be this rank's alone, and rank 0 may be what failed.
    """
    if run.is_done():
        return
    run.log(f"rank {ranks.rank} of {ranks.size} on {ranks.host}, process {os.getpid()}", ranks.rank)
    ended, reason = _train(run, ranks, Interrupt())
    _try_log(run, ended if reason is None else f"{ended}: {reason}", ranks.rank)
    if ended == "failed":
        run.note_failure(str(reason))
        raise RunFailed(f"rank {ranks.rank} of run {run.run_id} failed: {reason}")


def _train(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> tuple[str, str | None]:
    """The state that the training ended in, and why."""
    from ..train.loop import Diverged, Stopped, train
    from ..train.parallel.control import RankError

    def report(line: str) -> None:
        run.log(line, ranks.rank)

    try:
        config = run.config()
        if ranks.rank == 0:
            run.reserve()
            if ranks.size > 1:
                report(f"{ranks.size} ranks: {describe_mesh(config.parallel)}")
        train(config, run.path, should_stop=interrupt, report=report)
    except Stopped as stopped:
        return "preempted", f"{interrupt.reason or 'another rank was told to stop'}; {stopped}"
    except Diverged as diverged:
        return "diverged", str(diverged)
    except UserError as error:
        return "failed", str(error)
    except RankError as error:
        _try_log(run, traceback.format_exc(), ranks.rank)
        return "failed", str(error)
    except OSError as error:
        _try_log(run, traceback.format_exc(), ranks.rank)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "failed", f"the disk is full ({error.filename or run.path}); free some space and sweep again"
        return "failed", f"{type(error).__name__}: {error}"
    except Exception as error:
        # Whatever a run dies of belongs in its state, with the traceback in its log; the sweep goes on.
        _try_log(run, traceback.format_exc(), ranks.rank)
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return "done", None


def _set_state(run: RunDirectory, state: str, reason: str | None) -> None:
    try:
        run.set_state(state, reason=reason)
        run.log(state if reason is None else f"{state}: {reason}")
    except OSError:
        # A disk that is full for state.json too: the old state stays whole, and the launcher sees a worker that ended.
        if state == "done":
            raise


def _try_log(run: RunDirectory, text: str, rank: int = 0) -> None:
    try:
        run.log(text, rank)
    except OSError:
        print(text)


def _verdict(reason: str | None, max_requeues: int) -> tuple[str, str | None]:
    """What a SLURM job that was told to stop, and has saved, is to count as."""
    fate = slurm.fate(slurm.job_id(), slurm.restarts())
    if fate == "cancelled":
        return "cancelled", f"its job was cancelled in SLURM; {reason}"
    if fate != "requeued" and slurm.restarts() >= max_requeues:
        return (
            "failed",
            f"its job had to stop again after {max_requeues} requeues, all that cluster.max_requeues allows; {reason}",
        )
    return "preempted", reason


def _back_to_the_queue(run: RunDirectory) -> NoReturn:
    """Requeues this job, unless SLURM has done so, and leaves with an error: an exit with 0 would let scoring start.

    The state must be written before: a requeued job's processes may be killed at any moment.
    """
    name = slurm.job_id()
    refused = None
    if slurm.fate(name, slurm.restarts()) != "requeued":
        refused = slurm.requeue(name, slurm.restarts())
    if refused is not None:
        _set_state(run, "failed", f"preempted, and SLURM would not requeue its job ({refused}); sweep again to go on")
        raise RunFailed(f"run {run.run_id} was preempted and could not be requeued")
    # Not an Exception: submitit would record the end of a job that goes on.
    raise SystemExit(1)


def evaluate_runs(sweep_path: str, run_ids: list[str]) -> None:
    """Scores the final checkpoint of each run; the tasks are loaded once for all of them.

    Raises:
        RunFailed: a run could not be scored; the others were.
    """
    sweep = SweepDirectory.open(sweep_path)
    settings = sweep.settings()["config"]["evaluate"]
    from .evaluation import evaluate_run, open_suite

    suite = open_suite(settings)
    failures = []
    for name in run_ids:
        run = sweep.run(name)
        if not run.is_done():
            failures.append(f"run {name} is {run.state().state} and was not scored")
            continue
        try:
            with run.lock():
                evaluate_run(run, settings, suite)
        except Exception as error:
            # One checkpoint that cannot be scored must not cost the scores of the others.
            _try_log(run, traceback.format_exc())
            failures.append(f"run {name} could not be scored: {type(error).__name__}: {error}")
    if failures:
        raise RunFailed("; ".join(failures))


def finish_sweep(sweep_path: str) -> None:
    """The last job: the table, the laws and the report, from whatever the runs have written."""
    from .finish import finish

    sweep = SweepDirectory.open(sweep_path)
    settle_lost(sweep)
    finish(sweep)


def settle_lost(sweep: SweepDirectory) -> None:
    """Says how a run ended whose SLURM job is gone without a word: cancelled in the queue, out of memory, node lost."""
    try:
        live = slurm.live_jobs()
    except UserError:
        return  # who does not know what runs must not say that it has ended
    for run in sweep.runs():
        state = run.state()
        if state.state not in ("queued", "running", "preempted") or state.job_id in live:
            continue
        outcome = slurm.outcome(state.job_id)
        ended = "cancelled" if outcome == "CANCELLED" else "failed"
        word = f"which SLURM calls {outcome}" if outcome else "and SLURM has forgotten how"
        words = [f"its job {state.job_id} ended while the run was {state.state}, {word}"]
        words += [found for found in (run.failure(), _first_to_end(sweep, state.job_id)) if found is not None]
        run.set_state(ended, reason="; ".join(words))


def _first_to_end(sweep: SweepDirectory, job: str | None) -> str | None:
    """What `srun` wrote of the first task that ended badly, in the error log of the job's script."""
    for log in sweep.path.glob(f"jobs/*/{job}_0_log.err"):
        return slurm.first_to_end(log.read_text(encoding="utf-8", errors="replace"))
    return None
