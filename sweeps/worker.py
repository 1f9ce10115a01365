"""What jobs call: one training, several in one job, the queue of this machine, scoring, and the last fit.

Special here:
- on this machine a worker goes through the queue of its launch, unit after unit, so that torch is imported once; what
  ends a run, or a unit, never ends the worker. It stops by itself when the launcher that started it is gone;
- every rank of a run trains, and rank 0 alone holds the lock, writes the state and puts the job back in the queue; what
  another rank fails of reaches the state through failure.json, whoever of them is left;
- a job of several runs that was not stopped succeeds if any of them is done: those can be scored and branched from, and
  the others say in their states why they cannot.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from pathlib import Path

from ..train.errors import UserError
from ..train.parallel.environment import Ranks, detect
from . import slurm, together
from .attempt import (
    Interrupt,
    RunFailed,
    back_to_the_queue,
    settle_free,
    stopped_in,
    tidy,
    train_one,
    train_rank,
    try_log,
)
from .queue import Queue
from .runs import Busy, RunDirectory, SweepDirectory

POLL_SECONDS = 0.2  # while everything that is left waits for a trunk


def train_run(path: str, max_requeues: int = 20, launcher: tuple[str, str] | None = None) -> None:
    """Trains the run in directory `path`, resuming what is there. Every rank of the run calls it.

    Args:
        path: the run directory; its frozen config.yaml is all that is read, and of a branch its trunk's checkpoint.
        max_requeues: times that its SLURM job is put back in the queue before the run counts as failed.
        launcher: sweep directory and lock token of a launcher on this machine, which must stay alive.

    Raises:
        RunFailed: the run failed or diverged; state.json holds the reason.
        Busy: somebody else has the run.
    """
    run, ranks = RunDirectory(Path(path)), detect()
    if ranks.rank > 0:
        _follow(run, ranks)
        return
    ended, reason = train_one(run, ranks, _interrupt(launcher), slurm.job_id())
    if ended == "preempted" and slurm.inside_job():
        back_to_the_queue([run], max_requeues)
    if ended not in ("done", "preempted"):
        raise RunFailed(f"run {run.run_id} {ended}: {reason}")


def train_unit(how: str, paths: list[str], max_requeues: int = 20) -> None:
    """Trains several runs as one SLURM job, which is requeued once for all that were stopped.

    Args:
        how: ensemble | shared.
        paths: the run directories.
        max_requeues: see `train_run`.

    Raises:
        RunFailed: none of the runs is done; their states hold the reasons.
    """
    runs = [RunDirectory(Path(path)) for path in paths]
    _train(how, runs, Interrupt())
    stopped = stopped_in(runs, slurm.job_id())
    if stopped and slurm.inside_job():
        back_to_the_queue(stopped, max_requeues)
    if not stopped and not any(run.is_done() for run in runs):
        raise RunFailed("; ".join(f"run {run.run_id} {run.state().state}: {run.state().reason}" for run in runs))


def work(sweep_path: str, queue_folder: str, place: int, launcher: tuple[str, str] | None = None) -> None:
    """Works at one place of this machine: trains unit after unit of a launch's queue until none is left to begin.

    What comes of the runs is in their states. Units of several ranks have no place here.

    Args:
        sweep_path: the sweep directory.
        queue_folder: where `Queue.create` wrote the queue.
        place: a number, by which the launcher knows who trains what.
        launcher: sweep directory and lock token of the launcher, which must stay alive.
    """
    import torch

    gc.freeze()  # else each `tidy` would look through all that PyTorch has made on import
    sweep, interrupt, threads = SweepDirectory(Path(sweep_path)), _interrupt(launcher), torch.get_num_threads()
    queue = Queue.open(sweep, Path(queue_folder))
    while not interrupt():
        unit = queue.claim(place)
        if unit is None:
            if not queue.left():
                return
            time.sleep(POLL_SECONDS)
            continue
        try:
            _train(unit.how, [sweep.run(name) for name in unit.runs], interrupt)
        except Exception:
            # Such as a disk too full to say that a run has begun; the other units may be better off.
            traceback.print_exc()
        finally:
            for name in unit.runs:  # of those whose end could not be written
                settle_free(sweep.run(name))
            queue.end(unit)
        torch.set_num_threads(threads)  # a run may have asked for its own number
        tidy()


def _interrupt(launcher: tuple[str, str] | None) -> Interrupt:
    if launcher is None:
        return Interrupt()
    sweep, token = SweepDirectory(Path(launcher[0])), launcher[1]
    return Interrupt(lambda: sweep.launcher_alive(token))


def _train(how: str, runs: list[RunDirectory], interrupt: Interrupt) -> None:
    """Trains a unit in this process and those that it starts. How each run ended is in its state."""
    job = slurm.job_id()
    if how == "ensemble":
        together.train_ensemble(runs, interrupt, job)
    elif how == "shared":
        together.train_shared(runs, interrupt, job)
    else:
        try:
            train_one(runs[0], detect(), interrupt, job)
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
    ended, reason = train_rank(run, ranks, Interrupt())
    try_log(run, ended if reason is None else f"{ended}: {reason}", ranks.rank)
    if ended == "failed":
        run.note_failure(str(reason))
        raise RunFailed(f"rank {ranks.rank} of run {run.run_id} failed: {reason}")


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
            try_log(run, traceback.format_exc())
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
