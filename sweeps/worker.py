"""What runs inside a job: signals, attempts, one training or the scoring of some runs, and the last fit.

Special here:
- TERM and USR2 set a flag; the loop saves a checkpoint and returns, and only then is the job put back in the queue;
- a failure is a state with a reason in a sentence, and a non-zero exit, so that nothing that depends on it starts;
- a worker on this machine stops by itself when the launcher that started it is gone.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ..train.errors import UserError
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
        self.reason = f"signal {signal.Signals(number).name}"

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._launcher_alive is not None and now - self._asked > 1.0:
            self._asked = now
            if not self._launcher_alive():
                self.reason = "the launcher is gone"
        return self.reason is not None


def train_run(path: str, max_requeues: int = 20, launcher: tuple[str, str] | None = None) -> None:
    """Trains the run in directory `path`, resuming what is there.

    Args:
        path: the run directory; its frozen config.yaml is all that is read.
        max_requeues: attempts after which a run that keeps being preempted counts as failed.
        launcher: sweep directory and lock token of a launcher on this machine, which must stay alive.

    Raises:
        RunFailed: the run failed or diverged; state.json holds the reason.
    """
    run = RunDirectory(Path(path))
    alive = None
    if launcher is not None:
        sweep = SweepDirectory(Path(launcher[0]))
        alive = lambda: sweep.launcher_alive(launcher[1])  # noqa: E731
    interrupt = Interrupt(alive)
    with run.lock():
        if run.is_done():
            return
        attempt = run.state().attempt + 1
        run.set_state("running", attempt=attempt, host=socket.gethostname(), job_id=job_id())
        run.log(f"attempt {attempt} on {socket.gethostname()}, job {job_id()}, process {os.getpid()}")
        ended, reason = _train(run, interrupt)
        run.release()
        _set_state(run, ended, reason)
    if ended == "preempted":
        _requeue(run, attempt, max_requeues)
    elif ended != "done":
        raise RunFailed(f"run {run.run_id} {ended}: {reason}")


def _train(run: RunDirectory, interrupt: Interrupt) -> tuple[str, str | None]:
    """The state that the training ended in, and why."""
    from ..train.loop import Diverged, Stopped, train

    try:
        run.reserve()
        train(run.config(), run.path, should_stop=interrupt, report=run.log)
    except Stopped as stopped:
        return "preempted", f"{interrupt.reason}; {stopped}"
    except Diverged as diverged:
        return "diverged", str(diverged)
    except UserError as error:
        return "failed", str(error)
    except OSError as error:
        _try_log(run, traceback.format_exc())
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "failed", f"the disk is full ({error.filename or run.path}); free some space and sweep again"
        return "failed", f"{type(error).__name__}: {error}"
    except Exception as error:
        # Whatever a run dies of belongs in its state, with the traceback in its log; the sweep goes on.
        _try_log(run, traceback.format_exc())
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


def _try_log(run: RunDirectory, text: str) -> None:
    try:
        run.log(text)
    except OSError:
        print(text)


def job_id() -> str:
    """The scheduler's id of this job, `array_task` for a task of an array; the process id on this machine."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID") or str(os.getpid())


def _requeue(run: RunDirectory, attempt: int, max_requeues: int) -> None:
    """Puts a SLURM job back in the queue, unless somebody cancelled it; on this machine the launcher decides."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    if attempt > max_requeues:
        run.set_state("failed", reason=f"preempted {attempt} times, more than cluster.max_requeues {max_requeues}")
        raise RunFailed(f"run {run.run_id} was preempted {attempt} times")
    name = job_id()
    shown = subprocess.run(["scontrol", "show", "job", name], capture_output=True, text=True, timeout=60, check=False).stdout
    if "JobState=CANCELLED" in shown:
        run.set_state("cancelled", reason="the job was cancelled in SLURM")
        raise RunFailed(f"run {run.run_id} was cancelled")
    run.log(f"requeueing job {name}")
    subprocess.run(["scontrol", "requeue", name], timeout=60, check=True)
    # SLURM ends this process when it takes the job back; returning first would end the job as completed.
    time.sleep(120)


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

    finish(SweepDirectory.open(sweep_path))
