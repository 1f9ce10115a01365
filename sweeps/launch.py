"""Jobs go to submitit: SLURM arrays that outlive this process, or processes on this machine that do not.

Special here:
- on this machine submitit has no throttle, so runs are started one by one as places come free, longest first, with as
  many threads each as their share of the cores;
- on SLURM there is one array a job shape, scoring depends on each array task's success, and the fit on everything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from ..train.errors import UserError
from . import worker
from .config import ClusterConfig
from .plan import JobShape, Plan
from .runs import FINAL, RunDirectory, SweepDirectory, lock_token

POLL_SECONDS = 0.25
GRACE_SECONDS = 30.0  # what a worker gets to save a checkpoint before it is killed


@dataclass
class LocalJob:
    """One process on this machine: a label, what to call, and, once it is started, its handle."""

    label: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    handle: Any = None
    place: int = 0

    @property
    def running(self) -> bool:
        return self.handle is not None and self.handle._process.poll() is None


@dataclass
class LocalPool:
    """Runs LocalJobs, `places` at a time, in the order given."""

    folder: Path
    places: int
    threads: int
    gpus_per_job: int = 0

    def run(self, jobs: list[LocalJob], tick: Callable[[list[LocalJob], list[LocalJob]], None]) -> None:
        """Runs every job to its end. `tick(running, ended)` is called several times a second, for the display.

        On Ctrl-C or TERM every running job gets TERM, so that it saves, and KeyboardInterrupt goes on.
        """
        waiting, running = list(jobs), list[LocalJob]()
        try:
            with _terminate_as_interrupt():
                while waiting or running:
                    free = sorted(set(range(self.places)) - {job.place for job in running})
                    for place in free[: len(waiting)]:
                        running.append(self._start(waiting.pop(0), place))
                    time.sleep(POLL_SECONDS)
                    ended = [job for job in running if not job.running]
                    running = [job for job in running if job.running]
                    tick(running, ended)
        except BaseException:
            self._stop(running)
            raise

    def _start(self, job: LocalJob, place: int) -> LocalJob:
        executor = submitit.LocalExecutor(folder=self.folder)
        gpus = tuple(range(place * self.gpus_per_job, (place + 1) * self.gpus_per_job))
        # submitit ends a local job after timeout_min; a run here has no limit but its D.
        executor.update_parameters(timeout_min=60 * 24 * 365, gpus_per_node=self.gpus_per_job, visible_gpus=gpus)
        with _environment(self.threads), _ignored_interrupts():
            job.handle = executor.submit(job.function, *job.arguments)
        job.place = place
        return job

    def _stop(self, running: list[LocalJob]) -> None:
        for job in running:
            job.handle._process.terminate()  # submitit's controller passes TERM on to the worker
        deadline = time.monotonic() + GRACE_SECONDS
        while any(job.running for job in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for job in running:
            if job.running:
                job.handle._process.kill()


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Environment of a job: pinned threads, because two processes with two threads each on two cores crawl."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Children inherit an ignored SIGINT: Ctrl-C reaches the launcher alone, which tells them to save with TERM."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """TERM to the launcher (a closed allocation, a shutdown) is handled as Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def training_jobs(sweep: SweepDirectory, runs: list[RunDirectory], cluster: ClusterConfig) -> list[LocalJob]:
    """One job a run, bound to the life of this launcher."""
    token = (str(sweep.path.resolve()), lock_token(sweep.path))
    return [
        LocalJob(run.run_id, worker.train_run, (str(run.path.resolve()), cluster.max_requeues, token)) for run in runs
    ]


def settle(run: RunDirectory) -> None:
    """After a local worker has ended: a run that still says `running` was killed, and its state must say so."""
    state = run.state()
    if state.state in ("running", "queued"):
        run.set_state("failed", reason=f"its worker was killed; sweep again to go on, or see {run.path / 'log.txt'}")


# --- SLURM -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submission:
    """Job ids of what was submitted."""

    training: list[str]
    evaluation: list[str]
    finish: str


def submit_to_slurm(sweep: SweepDirectory, plan: Plan, runs: list[RunDirectory], cluster: ClusterConfig, evaluate: bool) -> Submission:
    """Submits training, scoring and the fit as arrays that depend on each other, and returns.

    Raises:
        UserError: sbatch is missing, or SLURM refuses the job; its own words are passed on.
    """
    shapes: dict[JobShape, list[RunDirectory]] = {}
    by_id = {run.run_id: run for run in plan.runs}
    for run in runs:
        shapes.setdefault(by_id[run.run_id].shape, []).append(run)
    training, scoring = [], []
    for shape, members in shapes.items():
        calls = [(worker.train_run, (str(run.path.resolve()), cluster.max_requeues)) for run in members]
        names = _submit(sweep, cluster, shape, "train", calls)
        training += names
        for run, name in zip(members, names, strict=True):
            run.set_state("queued", job_id=name, host=None)
        if evaluate:
            array = names[0].split("_")[0]
            dependency = f"{'aftercorr' if len(names) > 1 else 'afterok'}:{array}"
            calls = [(worker.evaluate_runs, (str(sweep.path.resolve()), [run.run_id])) for run in members]
            scoring += _submit(sweep, cluster, shape, "evaluate", calls, dependency)
    arrays = sorted({name.split("_")[0] for name in [*training, *scoring]})
    light = JobShape(0, 1, min(8.0, cluster.memory_gb), min(60, cluster.time_minutes))
    last = [(worker.finish_sweep, (str(sweep.path.resolve()),))]
    dependency = "afterany:" + ":".join(arrays) if arrays else None
    (finish,) = _submit(sweep, cluster, light, "fit", last, dependency)
    return Submission(training, scoring, finish)


def _submit(
    sweep: SweepDirectory, cluster: ClusterConfig, shape: JobShape, kind: str,
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]], dependency: str | None = None,
) -> list[str]:  # fmt: skip
    try:
        executor = submitit.SlurmExecutor(folder=sweep.path.resolve() / "jobs")
    except RuntimeError as error:
        raise UserError("cluster is 'slurm' and there is no sbatch on the PATH; use cluster=local or load SLURM") from error
    extra = {str(key): value for key, value in cluster.additional_parameters.items()}
    if dependency is not None:
        # A task whose run failed can never start: without this it would wait in the queue for ever.
        extra["kill-on-invalid-dep"] = "yes"
    executor.update_parameters(
        job_name=f"{sweep.path.name}-{kind}", time=shape.time_minutes, nodes=1, ntasks_per_node=1,
        cpus_per_task=shape.cpus, mem=f"{round(shape.memory_gb * 1024)}M", gpus_per_node=shape.gpus or None,
        partition=cluster.partition, account=cluster.account, qos=cluster.qos, dependency=dependency,
        array_parallelism=cluster.array_parallelism, signal_delay_s=min(120, 30 * shape.time_minutes),
        setup=[f"export OMP_NUM_THREADS={shape.cpus}", *cluster.setup],
        additional_parameters={"requeue": True, **extra},
    )  # fmt: skip
    try:
        jobs = executor.submit_array([_Call(function, arguments) for function, arguments in calls])
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"SLURM refused the {kind} job: {words}; nothing of it was started, sweep again once it is mended") from error
    return [job.job_id for job in jobs]


@dataclass(frozen=True)
class _Call:
    """A function with its arguments, as submitit wants it for an array."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        self.function(*self.arguments)


def live_slurm_jobs() -> set[str] | None:
    """Ids of this user's jobs that SLURM still has, `array_task` for array tasks; None where it does not answer."""
    import getpass
    import subprocess

    try:
        shown = subprocess.run(
            ["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%i"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return set(shown.stdout.split())


def to_start(runs: list[RunDirectory], live: set[str] | None) -> list[RunDirectory]:
    """Runs that are not done and that no live job has: what a launch must start."""
    wanted = []
    for run in runs:
        state = run.state()
        has_job = state.job_id is not None and live is not None and state.job_id in live
        if not run.is_done() and not (state.state in ("queued", "running", "preempted") and has_job):
            wanted.append(run)
    return wanted


def wait_for_slurm(submission: Submission, runs: list[RunDirectory], tick: Callable[[], None]) -> None:
    """Returns once every run is in a final state and the last job has left the queue."""
    names = {*submission.training, *submission.evaluation, submission.finish}
    while True:
        live = live_slurm_jobs()
        tick()
        if live is not None and not (names & live):
            return
        if live is None and all(run.state().state in FINAL for run in runs):
            return
        time.sleep(1.0)
