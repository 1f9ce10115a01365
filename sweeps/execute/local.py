"""A sweep's jobs on this machine: processes that submitit starts, and that end with the process that asked for them.

Special here:
- submitit has no throttle here, so a job is started when a place comes free, with as many threads per rank as its share
  of the cores;
- runs of one rank go through a queue with one worker per place, so that PyTorch is imported once per worker, and no
  place idles while anything can run; a worker that was killed is replaced;
- a process that is frozen cannot see that it hangs: whoever started it does, by its runs' signs of life.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.core.utils import environment_variables

from ...train.errors import UserError
from ...train.job.failure import Cause, Failure, note_failure
from ..plan import rates
from ..plan.sweep_plan import Plan
from ..prepare import Prepared
from ..runs.attempts import Policy
from ..runs.directory import OPEN, RunDirectory, SweepDirectory, lock_token, this_node
from ..runs.queue import Queue, Unit
from ..runs.states import KILLED
from ..slurm.supervisor import settle_queue
from . import worker
from .attempt import THREADS
from .hopeless import Judge

POLL_SECONDS = 0.25
LOOK_SECONDS = 1.0  # between two looks for signs of life
GRACE_SECONDS = 30.0  # what a worker gets to save a checkpoint before it is killed
STILLBORN = 3  # workers that end before they have claimed anything, after which no more are started


@dataclass
class LocalJob:
    """What every rank of one job calls, and its handle."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    ranks: int = 1
    unit: Unit | None = None  # all that it trains; None: a worker's queue
    handle: Any = None
    place: int = 0
    signs: list[float] = field(default_factory=list)  # of life, of its runs, when somebody last looked
    still: float = 0.0  # seconds for which they have been the same

    @property
    def running(self) -> bool:
        return self.handle._process.poll() is None


@dataclass
class Listed:
    """Jobs that are known from the start, in order."""

    jobs: list[LocalJob]

    def take(self, place: int) -> LocalJob | None:
        return self.jobs.pop(0) if self.jobs else None

    def left(self) -> bool:
        return bool(self.jobs)

    def at_work(self, job: LocalJob) -> list[RunDirectory]:
        """None that gives signs of life."""
        return []

    def ended(self, job: LocalJob) -> None: ...


class LocalBackend:
    """Where `advance` starts the runs of one command."""

    def __init__(self, prepared: Prepared, only: set[str] | None = None) -> None:
        self._sweep, self._config, self._rate = prepared.sweep, prepared.config, prepared.rate
        others = [run for run in prepared.directories if only is not None and run.run_id not in only]
        # When the state was written that a run was last started in, or is left in.
        self._tried = {run.run_id: run.state().since for run in others}
        self._runs = prepared.directories
        self._scored: set[str] = set()
        self._fitted = False

    def asked(self) -> list[str]:
        open_runs = [run.run_id for run in self._runs if not run.is_done() and run.given_up() is None]
        return [name for name in open_runs if name not in self._tried]

    def is_taken(self, run: RunDirectory) -> bool:
        """Whether a run was not asked for again since it was last started here."""
        state = run.state()
        return state.state != "planned" or state.since <= self._tried.get(run.run_id, -1.0)

    def to_score(self, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        """Each run once."""
        return [run for run in runs if run.run_id not in self._scored]

    def in_queue(self) -> set[str]:
        """No job: all have ended when `start` returns."""
        return set()

    def refill(self) -> None:
        """Lost workers are replaced while `start` runs."""

    def start(self, plan: Plan, units: Sequence[Unit], unscored: Sequence[RunDirectory], *_: object) -> None:
        """Trains, or scores, to the end; there is one node, so none to avoid."""
        self._fitted = False
        if units:
            self._train(plan, units)
        elif unscored:
            self._scored |= {run.run_id for run in unscored}
            self._score(plan, unscored)

    def fit(self) -> bool:
        """Fits the laws once after whatever was started."""
        from ..results.finish import write_results

        if self._fitted or not any(run.is_done() for run in self._sweep.runs()):
            return False
        self._fitted = True
        write_results(self._sweep)
        return True

    def _train(self, plan: Plan, units: Sequence[Unit]) -> None:
        from .display import Display

        planned = {run.run_id: run for run in plan.runs}
        names = [name for unit in units for name in unit.runs]
        runs = [self._sweep.run(name) for name in names]
        self._tried |= {run.run_id: run.state().since for run in runs}
        ranks = {name: planned[name].shape.ranks for name in names}  # a grid may vary the ranks of its runs
        most = max(ranks.values())
        pool = self._pool(most)
        parents = {name: (run.parent, run.first_step) for name in names if (run := planned[name]).parent is not None}
        queue = Queue.create(self._sweep, pool.folder / f"queue-{os.urandom(4).hex()}", units, parents)
        training = Workers(self._sweep, queue, Policy.of(self._config.cluster), ranks if most > 1 else None)
        judge = Judge.of(self._sweep)
        with Display(plan, self._sweep, runs) as display:

            def tick() -> None:
                left, fresh = training.news()
                display.update(left, fresh)
                if judge is not None:
                    judge.look(left)

            pool.run(training, tick)

    def _score(self, plan: Plan, unscored: Sequence[RunDirectory]) -> None:
        from ..results.scoring import stage
        from .display import Display

        try:
            stage(self._config.evaluate.tasks)
        except UserError as error:
            print(f"not scored: {error}")  # the laws of the loss need no benchmark, so the sweep goes on
            return
        pool, sweep = self._pool(1), str(self._sweep.path.resolve())
        # One job per core with its share of the checkpoints: the tasks are loaded once per job.
        shares = [unscored[i :: pool.places] for i in range(min(pool.places, len(unscored)))]
        jobs = [LocalJob(worker.evaluate_runs, (sweep, [run.run_id for run in share])) for share in shares]
        with Display(plan, self._sweep, [], scoring=list(unscored)) as display:
            pool.run(Listed(jobs), display.update_scores)

    def _pool(self, ranks: int) -> LocalPool:
        # A folder per pool: submitit names its files by process id, and process ids come round again.
        folder = self._sweep.path / "jobs" / f"local-{os.urandom(4).hex()}"
        cluster = self._config.cluster
        room, policy = rates.places(cluster, ranks, self._rate), Policy.of(cluster)
        most = max(policy.hang_seconds, policy.silence_seconds)
        return LocalPool(folder, room.jobs, room.threads, cluster.gpus_per_job, cluster.runs_per_gpu, most)


@dataclass
class LocalPool:
    """Runs so many jobs at a time."""

    folder: Path
    places: int
    threads: int  # of a rank
    gpus_per_rank: int = 0
    jobs_per_gpu: int = 1
    hang_seconds: float = math.inf  # without a sign of life, after which a job is killed

    def run(self, jobs: Listed | Workers, tick: Callable[[], None]) -> None:
        """Runs every job to its end, calling `tick` several times a second; Ctrl-C or TERM lets them save."""
        running: list[LocalJob] = []
        looked = time.monotonic()
        try:
            with _handling(signal.SIGTERM, signal.default_int_handler):  # such as of a closed allocation
                while running or jobs.left():
                    for place in sorted(set(range(self.places)) - {job.place for job in running}):
                        if (job := jobs.take(place)) is not None:
                            running.append(self._start(job, place))
                    time.sleep(POLL_SECONDS)
                    for job in [job for job in running if not job.running]:
                        running.remove(job)
                        jobs.ended(job)
                    if (passed := time.monotonic() - looked) > LOOK_SECONDS:
                        looked += passed
                        for job in running:  # a longer pause is time in which this process slept
                            self._look(job, jobs.at_work(job), min(passed, 2 * LOOK_SECONDS))
                    tick()
        except BaseException:
            self._stop(running)
            raise

    def _start(self, job: LocalJob, place: int) -> LocalJob:
        executor = submitit.LocalExecutor(folder=self.folder)
        gpus = job.ranks * self.gpus_per_rank
        first = place // self.jobs_per_gpu * gpus
        executor.update_parameters(
            timeout_min=60 * 24 * 365,  # submitit ends a local job after that; a run here has no limit but its D
            tasks_per_node=job.ranks,
            gpus_per_node=gpus,
            visible_gpus=tuple(range(first, first + gpus)),
        )
        # Pinned threads: two processes with two threads each on two cores crawl.
        pinned = environment_variables(**dict.fromkeys(THREADS, self.threads))
        # Children inherit an ignored SIGINT: Ctrl-C reaches the launcher alone, which tells them to save with TERM.
        with pinned, _handling(signal.SIGINT, signal.SIG_IGN):
            job.handle = executor.submit(job.function, *job.arguments)
        job.place = place
        return job

    def _look(self, job: LocalJob, runs: Sequence[RunDirectory], passed: float) -> None:
        """Kills a job that has hung; a job whose runs give no signs yet, or that has none, may only not be stopped."""
        signs = [sign for run in runs if (sign := run.last_sign()) is not None]
        processes = processes_of(job.handle._process.pid)
        hangs = signs == job.signs if signs else "T" in processes.values()
        job.signs, job.still = signs, job.still + passed if hangs else 0.0
        if job.still < self.hang_seconds:
            return
        reason = f"it hung: no sign of life for {self.hang_seconds:g} s, as of a process that is frozen"
        for run in runs:
            note_failure(run.path, Failure(Cause.HUNG, reason, host=this_node()))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.still = 0.0

    def _stop(self, running: list[LocalJob]) -> None:
        for job in running:
            job.handle._process.terminate()  # submitit's controller passes TERM on to every rank
        deadline = time.monotonic() + GRACE_SECONDS
        while any(job.running for job in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for job in running:
            if job.running:
                job.handle._process.kill()


def processes_of(root: int) -> dict[int, str]:
    """A process, those that it has started and so on, each with its state in Linux's letter."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):  # it has just ended
        found[root] = Path(f"/proc/{root}/stat").read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{root}/task").glob("*/children"):
            for child in path.read_text().split():
                found |= processes_of(int(child))
    return found


@contextlib.contextmanager
def _handling(
    number: signal.Signals, handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@dataclass
class Workers:
    """The runs of one launch and their queue: a worker per place goes through it; with `ranks` each unit is a job."""

    sweep: SweepDirectory
    queue: Queue
    policy: Policy
    ranks: Mapping[str, int] | None = None  # by run id, where a run has several
    began: float = field(default_factory=time.time)
    stillborn: int = 0  # workers in a row that had claimed nothing
    _said: set[str] = field(default_factory=set)
    _claimed: dict[int, int] = field(default_factory=dict)  # by a place, when its worker was started

    def left(self) -> bool:
        return bool(self.queue.left())

    def take(self, place: int) -> LocalJob | None:
        sweep = str(self.sweep.path.resolve())
        launcher = sweep, lock_token(self.sweep.path)
        if self.ranks is None:
            if not self.left():
                return None
            self._claimed[place] = self.queue.claimed(place)
            return LocalJob(worker.work, (sweep, str(self.queue.folder.resolve()), self.policy, place, launcher))
        if (unit := self.queue.claim(place)) is None:
            return None
        (name,) = unit.runs
        arguments = str(self.sweep.run(name).path.resolve()), self.policy, launcher
        return LocalJob(worker.train_run, arguments, self.ranks[name], unit)

    def at_work(self, job: LocalJob) -> list[RunDirectory]:
        """The runs that a job trains now."""
        units = [unit for unit, place in self.queue.running().items() if place == job.place]
        return [self.sweep.run(name) for unit in units for name in unit.runs]

    def ended(self, job: LocalJob) -> None:
        """Settles what it was at; UserError where one worker after the other ended before it had begun."""
        if job.unit is not None:
            self.queue.settle(job.unit, self.policy, KILLED)
            return
        settle_queue(self.queue, self.policy)
        # What submitit's controller exits with says nothing of its task.
        born = self.queue.claimed(job.place) > self._claimed[job.place] or not self.left()
        self.stillborn = 0 if born else self.stillborn + 1
        if self.stillborn >= STILLBORN:
            raise UserError(
                f"workers end before they train anything, {self.stillborn} of them; see {job.handle.paths.stderr}, "
                "and sweep again"
            )

    def news(self) -> tuple[list[str], list[str]]:
        """Runs that train now, and those that have just ended."""
        running = self.queue.running()
        open_units = {*self.queue.left(), *running}
        ended = [name for unit in self.queue.units if unit not in open_units for name in unit.runs]
        left = list[str]()
        for name in [name for unit in running for name in unit.runs]:
            state = self.sweep.run(name).state()
            over = state.state not in OPEN and state.since >= self.began
            (ended if over else left).append(name)
        fresh = [name for name in dict.fromkeys(ended) if name not in self._said]
        self._said.update(fresh)
        return left, fresh
