"""What jobs call: training a run, a queue of units, scoring, and the last fit.

Special here:
- what ends a run never ends the worker. On this machine it stops when its launcher is gone; a SLURM job
  that is told to stop gives its unit back and is requeued;
- rank 0 alone holds the lock, writes the state and requeues the job; why another rank fails reaches the state through
  failure.json.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout

from ...train.errors import UserError
from ...train.job.environment import Ranks, detect
from ...train.job.failure import Cause, Failure, note_failure
from ...train.job.session import session
from ..config import recorded
from ..prepare import configuration
from ..runs import attempts, states
from ..runs.attempts import Policy
from ..runs.directory import (
    Busy,
    RunDirectory,
    SweepDirectory,
    inside_job,
    job_id,
    job_restarts,
    job_seconds,
    this_node,
)
from ..runs.preflight import check_first_job
from ..runs.queue import Queue
from ..runs.states import UNWRITTEN
from ..slurm import commands as slurm
from ..slurm.supervisor import settle_lost, settle_queue
from .attempt import Interrupt, tidy, train_one, train_rank, try_log

POLL_SECONDS, LONGEST_PAUSE = 0.2, 5.0  # between two looks at a queue that has nothing to claim
SETTLE_SECONDS = 60.0  # that somebody else may hold a sweep before its laws are fitted without a look for lost runs
IDLE_SECONDS = 60.0  # for which a SLURM job waits for something to claim
MOST_WARNING = 120.0  # seconds before its time limit that a job is told to stop; half of the limit where that is less
LEAST_SECONDS = 60.0  # that must be left until then to begin a unit; a tenth of the limit where that is less


class RunFailed(Exception):
    """No run has a result; their states say why. Makes the job exit with an error."""


def train_run(path: str, policy: Policy, launcher: tuple[str, str] | None = None) -> None:
    """Trains a run as one job, resuming what is there. Every rank calls it.

    Of the run directory `path` only the frozen config.yaml is read, and of a branch its trunk's checkpoint.
    `launcher` is the sweep directory and the lock token of a launcher on this machine, which must stay alive. RunFailed
    where the run is not done; UserError where this node does not see the sweep.
    """
    run, job, ranks = RunDirectory(Path(path)), job_id(), detect()
    sweep = check_shared(run.path.parent.parent)
    if inside_job() and ranks.local_rank == 0:
        look_at_node(sweep, ranks.local_size)
    if ranks.rank > 0:
        _follow(run, ranks)
        return
    try:
        train_one(run, ranks, _interrupt(launcher), job, policy)
    except Busy as error:
        print(f"left out: {error}")
    state = run.state()
    if state.state == "preempted" and state.job_id == job:
        if inside_job():
            requeue_stopped(run, policy)
    elif not run.is_done():
        raise RunFailed(f"run {run.run_id} {state}")


def work(
    sweep_path: str, queue_folder: str, policy: Policy, place: int = 0, launcher: tuple[str, str] | None = None
) -> None:
    """Trains unit after unit of a queue, until none is left that this worker may begin.

    In a SLURM job that is told to stop, or close to its time limit, it gives back what it was at and has its job
    requeued, unless nothing is left there. Cancelling such a job cancels no run. By its `place` a launcher on this
    machine knows who trains what. UserError where this node does not see the sweep.
    """
    sweep, interrupt = check_shared(sweep_path), _interrupt(launcher)
    queue = Queue.open(sweep, Path(queue_folder))
    node, until = None, math.inf
    if inside_job():
        look_at_node(sweep)
        node, until = this_node(), last_start(os.environ)
        place = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    with contextlib.closing(queue), session():
        _go_through(queue, policy, interrupt, place, node, until)
        stopped = interrupt.reason or ("its time is nearly over" if time.monotonic() > until else None)
        if node is not None and stopped is not None and queue.left(node):
            _requeue_worker(stopped)


def look_at_node(sweep: SweepDirectory, ranks: int = 1) -> None:
    """Whether this node computes what it should, before the first job of a sweep on its kind trains anything."""
    try:
        config, runs = configuration(sweep), [run.config() for run in sweep.runs()]
    except UserError as error:  # which costs no run that can be read
        print(f"preflight is left out: {error}")
        return
    if config.preflight:
        for line in check_first_job(sweep, runs, ranks):
            print(line, flush=True)


def _go_through(queue: Queue, policy: Policy, interrupt: Interrupt, place: int, node: str | None, until: float) -> None:
    import torch

    gc.freeze()  # else each `tidy` would look through all that PyTorch has made on import
    threads, pause, idle_since = torch.get_num_threads(), POLL_SECONDS, time.monotonic()
    while not interrupt() and time.monotonic() <= until:
        unit = queue.claim(place, node)
        if unit is None:
            settle_queue(queue, policy)
            if not queue.left(node):
                return
            if node is not None:  # what is left is for those at work, and the device for others
                idle = time.monotonic() - idle_since
                if (queue.ready_in() or 0.0) > IDLE_SECONDS or (idle > IDLE_SECONDS and queue.running()):
                    return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            continue
        try:
            for run in [queue.sweep.run(name) for name in unit.runs]:
                if not run.is_done():
                    train_one(run, detect(), interrupt, job_id(), policy)
        except Busy as error:
            print(f"left out: {error}")
        except Exception:
            # Such as a disk too full to say that a run has begun; the other units may be better off.
            traceback.print_exc()
        queue.settle(unit, policy, UNWRITTEN)
        torch.set_num_threads(threads)  # a run may have asked for its own number
        tidy()
        pause, idle_since = POLL_SECONDS, time.monotonic()


def _requeue_worker(why: str) -> NoReturn:
    """Puts this worker's job back in SLURM's queue, unless SLURM has done so or somebody has cancelled it."""
    job, restarts = job_id(), job_restarts()
    fate = slurm.fate(job, restarts)
    if fate == "cancelled":
        print(f"{why}; its job was cancelled in SLURM, so the other workers go on without it")
    elif fate != "requeued" and (refused := slurm.requeue(job, restarts)) is not None:
        print(f"{why}; SLURM would not requeue the job ({refused}), so the keeper starts another")
    # Not an Exception: submitit would record the end of a job that goes on.
    raise SystemExit(1)


def requeue_stopped(run: RunDirectory, policy: Policy) -> NoReturn:
    """Requeues a SLURM job whose run was stopped, and has saved, unless SLURM has done so.

    Leaves with an error in any case (RunFailed: the job is cancelled, or not requeued): an exit with 0 would let
    scoring start. The state is written before, for the processes of a requeued job may be killed at any moment; SLURM
    may take minutes to say what corrects it. Where it refuses or is away the run stays `preempted`, for whoever looks
    after the sweep.
    """
    job, restarts = job_id(), job_restarts()
    fate, reason = slurm.fate(job, restarts), run.state().reason
    if fate == "cancelled":
        why = "its job was cancelled in SLURM"
        states.correct(run, "cancelled", f"{why}; {reason}", "cancelled")
        raise RunFailed(f"run {run.run_id} cancelled: {why}")
    if fate == "timeout":
        states.correct(run, "preempted", reason, "time_limit")
    decision = attempts.decide(attempts.current(run), policy, 0, 0.0)
    if not decision.again:
        states.correct(run, "failed", f"{decision.why}; {reason}")
        raise RunFailed(f"run {run.run_id} failed: {decision.why}")
    if fate != "requeued" and (refused := slurm.requeue(job, restarts)) is not None:
        why = f"SLURM would not requeue its job ({refused})"
        states.correct(run, "preempted", f"{reason}; {why}, so sweep again to go on")
        raise RunFailed(f"run {run.run_id} preempted: {why}")
    # Not an Exception: submitit would record the end of a job that goes on.
    raise SystemExit(1)


def last_start(environment: Mapping[str, str]) -> float:
    """By time.monotonic(), after when a unit that is begun in a SLURM job would have to be given back at once.

    By what SLURM says of the job; without a word, or without a limit, never.
    """
    # The difference, because the controller's clock need not be this node's. A worker starts seconds after its job.
    seconds = job_seconds(environment)
    warning = min(MOST_WARNING, seconds / 2)
    return time.monotonic() + seconds - (warning + min(LEAST_SECONDS, seconds / 10))


def check_shared(path: Path | str) -> SweepDirectory:
    """The sweep directory; UserError where this node does not see it, for the output folder is not shared."""
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
    return Interrupt(lambda: SweepDirectory(Path(launcher[0])).launcher_alive(launcher[1]))


def _follow(run: RunDirectory, ranks: Ranks) -> None:
    """The part of every other rank: it trains, and leaves lock, state and queue to rank 0."""
    if run.is_done():
        return
    run.log(f"rank {ranks.rank} of {ranks.size} on {ranks.host}, process {os.getpid()}", ranks.rank)
    ending = train_rank(run, ranks, Interrupt())
    try_log(run, ending.state if ending.reason is None else f"{ending.state}: {ending.reason}", ranks.rank)
    # That a run stops or diverges is agreed on by all ranks, and rank 0 says it: leaving with an error here would make
    # SLURM end rank 0 before it has. A failure may be this rank's alone, and rank 0 may be what failed.
    if ending.state == "failed":
        cause = Cause(str(ending.cause))
        note_failure(run.path, Failure(cause, str(ending.reason), ranks.rank, ranks.host, hosts=(ranks.host,)))
        raise RunFailed(f"rank {ranks.rank} of run {run.run_id} failed: {ending.reason}")


def evaluate_runs(sweep_path: str, run_ids: list[str]) -> None:
    """Scores the wanted checkpoints of each run that have no scores yet; the tasks are loaded once for all of them.

    RunFailed where a run could not be scored, after the others; UserError where this node does not see the sweep.
    """
    from ..results.scoring import evaluate_run, is_scored, open_evaluator
    from ..results.tracking import push_scores

    sweep = check_shared(sweep_path)
    settings = asdict(recorded(sweep.settings()).evaluate)
    evaluator, failures = None, []
    for name in run_ids:
        run = sweep.run(name)
        if not run.is_done():
            failures.append(f"run {name} is {run.state().state} and was not scored")
            continue
        try:
            # Not the run's own lock: nobody trains what is done, and a command must not wait for a scoring.
            with FileLock(run.path / ".scoring.lock", timeout=0):
                if not is_scored(run, settings):
                    evaluator = evaluator or open_evaluator(settings, run.log)
                    evaluate_run(run, settings, evaluator)
                    push_scores(run, run.log)
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

    sweep, live = check_shared(sweep_path), None
    try:
        with sweep.lock(SETTLE_SECONDS):
            with contextlib.suppress(UserError):  # SLURM does not answer
                live = slurm.live_jobs()
            settle_lost(sweep, Policy.of(configuration(sweep).cluster), live)
    except UserError as error:  # as where somebody else holds it; there is a report all the same
        print(f"nobody looked for lost runs: {error}")
    write_results(sweep)
