"""Jobs go to SLURM through submitit, and outlive this process. (`local.py` has the jobs of this machine.)

Special here:
- a rank of a run is a task of its job;
- there is one array a job shape; branches wait for their trunk's task, scoring for each task's success, and the fit
  for everything.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from ..train.errors import UserError
from ..train.files import read_json, write_json
from . import slurm, worker
from .config import ClusterConfig
from .packing import Unit
from .plan import JobShape, Plan, PlannedRun
from .runs import Busy, RunDirectory, SweepDirectory

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
        self.training: dict[str, str] = {}  # run id -> job id, of what is submitted here

    def in_queue(self, runs: list[RunDirectory]) -> set[str]:
        """Jobs of this sweep that wait or run: training, scoring and the fit."""
        named = {run.state().job_id for run in runs} | set(self.scoring.values()) | {self.last}
        return {job for job in named if job is not None} & self.live

    def to_score(self, runs: list[RunDirectory]) -> list[RunDirectory]:
        """Of runs that have no scores yet, those that no scoring job in the queue will score."""
        return [run for run in runs if self.scoring.get(run.run_id) not in self.live]

    def submit(self, plan: Plan, units: Sequence[Unit], unscored: list[RunDirectory], evaluate: bool) -> None:
        """Submits training, scoring and the fit as arrays that depend on each other.

        Args:
            plan: gives every run its job shape, and a branch its trunk.
            units: of runs to train, and with `evaluate` to score thereafter.
            unscored: trained already, to score.
            evaluate: whether there is anything to score on.

        Raises:
            UserError: SLURM refuses a job, in its own words; everything submitted here is cancelled again.
        """
        planned = {run.run_id: run for run in plan.runs}
        before = self.in_queue([self.sweep.run(name) for name in planned]) - {self.last}
        # After those without a parent every branch's trunk has a job.
        trunks = [unit for unit in units if all(planned[name].parent is None for name in unit.runs)]
        branches = [unit for unit in units if unit not in trunks]
        try:
            for part in (trunks, branches):
                for shape, dependency, members in _arrays(part, planned, self._job_of):
                    self._train(shape, members, dependency, evaluate)
            for shape, _, members in _arrays([Unit("alone", (run.run_id,)) for run in unscored], planned):
                self._score(shape, members, None)
            light = JobShape(0, 1, min(8.0, self.cluster.memory_gb), min(60, self.cluster.time_minutes))
            arrays = sorted({name.split("_")[0] for name in [*self.submitted, *before]})
            fit = Scripted(worker.finish_sweep, (str(self.sweep.path.resolve()),))
            (self.last,) = self.submit_array(light, "fit", [fit], "afterany:" + ":".join(arrays))
        except UserError:
            slurm.cancel(self.submitted)
            for unit in units:
                for name in unit.runs:
                    self.sweep.run(name).set_state("planned", job_id=None)
            raise
        write_json(self.record, {"evaluate": self.scoring, "fit": self.last})

    def _job_of(self, run: str) -> str | None:
        """The job that trains a run, submitted here or before; None where it is over."""
        job = self.training.get(run) or self.sweep.run(run).state().job_id
        return job if job in self.submitted or job in self.live else None

    def _train(self, shape: JobShape, units: list[Unit], dependency: str | None, evaluate: bool) -> None:
        calls = []
        for unit in units:  # before the job exists: from then on the state is the worker's
            for name in unit.runs:
                run = self.sweep.run(name)
                run.forget_failure()
                run.set_state("queued", host=None, job_id=None)
            calls.append(self._call(unit))
        names = self.submit_array(shape, "train", calls, dependency)
        for unit, job in zip(units, names, strict=True):
            for name in unit.runs:
                self.training[name] = job
                _note_job(self.sweep.run(name), job)
        if evaluate:
            array = names[0].split("_")[0]
            self._score(shape, units, f"{'aftercorr' if len(names) > 1 else 'afterok'}:{array}")

    def _call(self, unit: Unit) -> Scripted:
        paths = [str(self.sweep.run(name).path.resolve()) for name in unit.runs]
        if unit.how == "alone":
            return Scripted(worker.train_run, (paths[0], self.cluster.max_requeues))
        return Scripted(worker.train_unit, (unit.how, paths, self.cluster.max_requeues))

    def _score(self, shape: JobShape, units: list[Unit], dependency: str | None) -> None:
        sweep = str(self.sweep.path.resolve())
        calls = [Scripted(worker.evaluate_runs, (sweep, list(unit.runs))) for unit in units]
        names = self.submit_array(shape.for_one_process(), "evaluate", calls, dependency)
        self.scoring |= {name: job for unit, job in zip(units, names, strict=True) for name in unit.runs}

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


def _arrays(
    units: Sequence[Unit], planned: Mapping[str, PlannedRun], job_of: Callable[[str], str | None] = lambda run: None
) -> Iterator[tuple[JobShape, str | None, list[Unit]]]:
    """Units of one shape that wait for the same trunk, together, in the order given; no more than an array may hold.

    What trains several runs is an array of its own, for what depends on it depends on all of them.

    Args:
        units: what jobs train.
        planned: every run of the plan, by id.
        job_of: the job that trains a run, None where there is none to wait for.
    """
    alike: dict[tuple[JobShape, str | None, int], list[Unit]] = {}
    for number, unit in enumerate(units):
        parents = sorted({parent for name in unit.runs if (parent := planned[name].parent) is not None})
        jobs = sorted({job for parent in parents if (job := job_of(parent)) is not None})
        # However the trunk ends: where its checkpoint is there the branch can be trained, and else it says so.
        dependency = "afterany:" + ":".join(jobs) if jobs else None
        alike.setdefault((_shape(unit, planned), dependency, -1 if unit.how == "alone" else number), []).append(unit)
    for (shape, dependency, _), members in alike.items():
        for start in range(0, len(members), ARRAY_LIMIT):
            yield shape, dependency, members[start : start + ARRAY_LIMIT]


def _shape(unit: Unit, planned: Mapping[str, PlannedRun]) -> JobShape:
    """Runs that share a device as processes have cores and memory each; those of an ensemble are one process."""
    shape = planned[unit.runs[0]].shape
    if unit.how != "shared":
        return shape
    return replace(shape, cpus=shape.cpus * len(unit.runs), memory_gb=shape.memory_gb * len(unit.runs))


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
