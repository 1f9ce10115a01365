"""Jobs go to submitit: SLURM arrays that outlive this process, or processes on this machine that do not.

Special here:
- a rank of a run is a task of its job, here and on SLURM;
- on this machine submitit has no throttle, so runs are started one by one as places come free, longest first, with as
  many threads a rank as its share of the cores;
- on SLURM there is one array a job shape, scoring depends on each array task's success, and the fit on everything.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from ..train.errors import UserError
from ..train.files import read_json, write_json
from . import slurm, worker
from .config import ClusterConfig
from .plan import JobShape, Plan
from .runs import Busy, RunDirectory, SweepDirectory, lock_token

POLL_SECONDS = 0.25
GRACE_SECONDS = 30.0  # what a worker gets to save a checkpoint before it is killed


@dataclass
class LocalJob:
    """One job on this machine: a label, what every rank calls, and, once it is started, its handle."""

    label: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    ranks: int = 1
    handle: Any = None
    place: int = 0

    @property
    def running(self) -> bool:
        return self.handle is not None and self.handle._process.poll() is None


@dataclass
class LocalPool:
    """Runs LocalJobs of as many ranks each, `places` at a time, in the order given."""

    folder: Path
    places: int
    threads: int  # of a rank
    gpus_per_rank: int = 0

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
        gpus = job.ranks * self.gpus_per_rank
        executor.update_parameters(
            timeout_min=60 * 24 * 365,  # submitit ends a local job after that; a run here has no limit but its D
            tasks_per_node=job.ranks, gpus_per_node=gpus, visible_gpus=tuple(range(place * gpus, (place + 1) * gpus)),
        )  # fmt: skip
        with _environment(self.threads), _ignored_interrupts():
            job.handle = executor.submit(job.function, *job.arguments)
        job.place = place
        return job

    def _stop(self, running: list[LocalJob]) -> None:
        for job in running:
            job.handle._process.terminate()  # submitit's controller passes TERM on to every rank
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
    for run in runs:
        run.forget_failure()
    return [
        LocalJob(
            run.run_id, worker.train_run, (str(run.path.resolve()), cluster.max_requeues, token),
            run.config().parallel.world_size,
        )
        for run in runs
    ]  # fmt: skip


def settle(run: RunDirectory) -> None:
    """After a local job has ended: of a run that still says `running` rank 0 was killed, and its state must say so."""
    state = run.state()
    if state.state in ("running", "queued"):
        noted = run.failure()
        found = "" if noted is None else f" ({noted})"
        run.set_state(
            "failed", reason=f"its worker was killed{found}; sweep again to go on, or see {run.path / 'log.txt'}"
        )


# --- SLURM -----------------------------------------------------------------------------------------------------------

ARRAY_LIMIT = 1000  # tasks of one array; SLURM's own default limit


@dataclass(frozen=True)
class Scripted:
    """A function with its arguments, as submitit wants it for an array."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        self.function(*self.arguments)


@dataclass
class SlurmLauncher:
    """Submits one sweep's jobs. What was submitted before is in jobs/slurm.json, so that nothing is submitted twice."""

    sweep: SweepDirectory
    cluster: ClusterConfig
    live: set[str]  # ids of the jobs in the queue when this launcher began

    def __post_init__(self) -> None:
        self.record = self.sweep.path / "jobs" / "slurm.json"
        known = read_json(self.record) or {}
        self.scoring: dict[str, str] = dict(known.get("evaluate") or {})  # run id -> job id
        self.last: str | None = known.get("fit")
        # Never a folder of an earlier submission: where job ids start anew, a job would find another's files there.
        self.folder = self.sweep.path.resolve() / "jobs" / f"slurm-{os.urandom(4).hex()}"
        self.submitted: list[str] = []

    def in_queue(self, runs: list[RunDirectory]) -> set[str]:
        """Jobs of this sweep that wait or run: training, scoring and the fit."""
        named = {run.state().job_id for run in runs} | set(self.scoring.values()) | {self.last}
        return {job for job in named if job is not None} & self.live

    def to_score(self, runs: list[RunDirectory]) -> list[RunDirectory]:
        """Of runs that have no scores yet, those that no scoring job in the queue will score."""
        return [run for run in runs if self.scoring.get(run.run_id) not in self.live]

    def submit(self, plan: Plan, runs: list[RunDirectory], unscored: list[RunDirectory], evaluate: bool) -> None:
        """Submits training, scoring and the fit as arrays that depend on each other.

        Args:
            plan: gives every run its job shape.
            runs: to train, and with `evaluate` to score thereafter.
            unscored: trained already, to score.
            evaluate: whether there is anything to score on.

        Raises:
            UserError: SLURM refuses a job, in its own words; everything submitted here is cancelled again.
        """
        shapes = {run.run_id: run.shape for run in plan.runs}
        before = self.in_queue([self.sweep.run(name) for name in shapes]) - {self.last}
        try:
            for shape, members in _arrays(runs, shapes):
                self._train(shape, members, evaluate)
            for shape, members in _arrays(unscored, shapes):
                self._score(shape, members, None)
            light = JobShape(0, 1, min(8.0, self.cluster.memory_gb), min(60, self.cluster.time_minutes))
            arrays = sorted({name.split("_")[0] for name in [*self.submitted, *before]})
            fit = Scripted(worker.finish_sweep, (str(self.sweep.path.resolve()),))
            (self.last,) = self.submit_array(light, "fit", [fit], "afterany:" + ":".join(arrays))
        except UserError:
            slurm.cancel(self.submitted)
            for run in runs:
                run.set_state("planned", job_id=None)
            raise
        write_json(self.record, {"evaluate": self.scoring, "fit": self.last})

    def _train(self, shape: JobShape, runs: list[RunDirectory], evaluate: bool) -> None:
        for run in runs:  # before the job exists: from then on the state is the worker's
            run.forget_failure()
            run.set_state("queued", host=None, job_id=None)
        requeues = self.cluster.max_requeues
        calls = [Scripted(worker.train_run, (str(run.path.resolve()), requeues)) for run in runs]
        names = self.submit_array(shape, "train", calls)
        for run, name in zip(runs, names, strict=True):
            _note_job(run, name)
        if evaluate:
            array = names[0].split("_")[0]
            self._score(shape, runs, f"{'aftercorr' if len(names) > 1 else 'afterok'}:{array}")

    def _score(self, shape: JobShape, runs: list[RunDirectory], dependency: str | None) -> None:
        sweep = str(self.sweep.path.resolve())
        calls = [Scripted(worker.evaluate_runs, (sweep, [run.run_id])) for run in runs]
        names = self.submit_array(shape.for_one_process(), "evaluate", calls, dependency)
        self.scoring |= {run.run_id: name for run, name in zip(runs, names, strict=True)}

    def submit_array(
        self, shape: JobShape, kind: str, calls: list[Scripted], dependency: str | None = None
    ) -> list[str]:
        """Submits calls of one shape as one array, to start when `dependency` allows; returns their job ids."""
        cluster = self.cluster
        extra = {"requeue": True} | {str(key): value for key, value in (cluster.additional_parameters or {}).items()}
        if dependency is not None:
            # A task whose run failed can never start: without this it would wait in the queue for ever.
            extra["kill-on-invalid-dep"] = "yes"
            if "dependency" in extra:
                extra["dependency"] = f"{dependency},{extra['dependency']}"
        executor = submitit.SlurmExecutor(folder=self.folder)
        executor.update_parameters(
            job_name=f"{self.sweep.path.name}-{kind}", time=shape.time_minutes,
            nodes=shape.nodes, ntasks_per_node=shape.ranks_per_node, cpus_per_task=shape.cpus,
            mem=f"{round(shape.memory_gb * shape.ranks_per_node * 1024)}M",
            gpus_per_node=shape.gpus * shape.ranks_per_node or None,
            partition=cluster.partition, account=cluster.account, qos=cluster.qos, dependency=dependency,
            array_parallelism=cluster.array_parallelism, signal_delay_s=min(120, 30 * shape.time_minutes),
            setup=[f"export OMP_NUM_THREADS={shape.cpus}", *cluster.setup],
            # From SLURM 22.05 on srun does not hand a task the CPUs that its job asked for, unless told so again. One
            # rank that fails takes the others down, and neighbouring ranks, which may split a model, share a node.
            srun_args=[f"--cpus-per-task={shape.cpus}", "--kill-on-bad-exit=1", "--distribution=block"],
            additional_parameters=extra,
        )  # fmt: skip
        try:
            # submitit prints SLURM's words as well as raising them.
            with slurm.outside_any_job(), contextlib.redirect_stderr(io.StringIO()):
                jobs = executor.submit_array(calls)
        except (FailedJobError, FailedSubmissionError) as error:
            words = " ".join(str(error).split()) or "it gave no reason"
            raise UserError(
                f"SLURM refused the {kind} job ({words}); nothing is left in the queue, "
                "mend the cluster.* setting that it names and sweep again"
            ) from error
        names = [str(job.job_id) for job in jobs]
        self.submitted += names
        return names


def _arrays(runs: list[RunDirectory], shapes: dict[str, JobShape]) -> Iterator[tuple[JobShape, list[RunDirectory]]]:
    """Runs of one shape together, in the order given, no more of them than an array may hold."""
    by_shape: dict[JobShape, list[RunDirectory]] = {}
    for run in runs:
        by_shape.setdefault(shapes[run.run_id], []).append(run)
    for shape, members in by_shape.items():
        for start in range(0, len(members), ARRAY_LIMIT):
            yield shape, members[start : start + ARRAY_LIMIT]


def _note_job(run: RunDirectory, name: str) -> None:
    """Writes down which job a queued run has; a worker that has started already has done so itself."""
    with contextlib.suppress(Busy), run.lock(timeout=0.0):
        if run.state().state == "queued":
            run.set_state("queued", job_id=name)


def to_start(runs: list[RunDirectory], live: set[str] | None) -> list[RunDirectory]:
    """Runs that are not done and that no live job has: what a launch must start."""
    wanted = []
    for run in runs:
        state = run.state()
        has_job = state.job_id is not None and live is not None and state.job_id in live
        if not run.is_done() and not (state.state in ("queued", "running", "preempted") and has_job):
            wanted.append(run)
    return wanted


def wait_for_slurm(jobs: set[str]) -> None:
    """Returns once none of the jobs is in the queue; a controller that is away for a while is waited for."""
    while True:
        with contextlib.suppress(UserError):
            if not jobs & slurm.live_jobs():
                return
        time.sleep(1.0)
