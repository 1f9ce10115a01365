"""Submission of jobs to SLURM through submitit: the options of sbatch, and its answers.

- `cluster.setup` runs in the folder of the first launch, the job in that of its pickles, with the sweep's copy of the
  code first on PYTHONPATH.
- Keeper and fit ask for no GPU and run on the launcher's interpreter: they call sbatch, which images may lack.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from ...train.errors import UserError
from ..config import ClusterConfig
from ..runs.forms import JobShape
from . import commands as slurm

# SLURM's messages if the queue may hold no more jobs of a user, an account, a QOS, or in total.
FULL = re.compile(r"SubmitJob|MaxJobCount|job submit limit|temporarily unable to accept", re.IGNORECASE)
# Raw #SBATCH keys that would contradict a setting of ours, and the setting.
TAKEN = {
    "account": "cluster.account",
    "array": "cluster.array_parallelism",
    "begin": "cluster.keeper_seconds",
    "constraint": "cluster.constraint",
    "cpus-per-task": "cluster.cpus_per_task",
    "gpus-per-node": "cluster.gpus_per_job",
    "mem": "cluster.memory_gb",
    "nodes": "parallel.*",
    "ntasks-per-node": "cluster.ranks_per_node",
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "time": "cluster.time_minutes",
    "job-name": "sweep",
    "chdir": "cluster.setup",
    "output": None,
    "error": None,
    "open-mode": None,
    "signal": None,
    "requeue": None,
}
MERGED = {"exclude": ",", "comment": " "}  # keys that are joined with ours, and by what
# submitit does not replace the partial result that an earlier start of the same job left on a full disk.
STALE = (
    'rm -f "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"_*_result.pkl.save_tmp'
)
HEAVY = ("exclusive", "gres", "gpus", "gpus-per-task", "cpus-per-gpu", "mem-per-gpu")  # raw keys that no light job has


class QueueFull(UserError):
    """SLURM takes no more jobs for now."""


@dataclass(frozen=True)
class Request:
    """The description of a job, or of an array of equal jobs."""

    kind: str  # worker | fit | keeper
    shape: JobShape
    comment: str  # by which squeue finds the sweep's jobs
    avoid: tuple[str, ...] = ()  # nodes, in addition to cluster.exclude
    light: bool = False  # keeper and fit, which go to cluster.keeper_partition
    begin: str | None = None


@dataclass(frozen=True)
class Submission:
    """The folders of a request's files, and of the code that its jobs run."""

    name: str  # of the sweep
    cluster: ClusterConfig
    folder: Path  # of this request alone, for pickles, scripts and logs
    started_from: Path
    code: Path  # folder that holds the package

    def submit(self, request: Request, call: Callable[[], Any], count: int = 1) -> list[str]:
        """Submit a call as a job, or `count` equal jobs as one array. Returns their ids.

        Raises:
            QueueFull: SLURM takes no more jobs for now.
            UserError: SLURM refuses; the message has its reason.
        """
        executor = submitit.SlurmExecutor(folder=self.folder, python=self._python(request))
        executor.update_parameters(**self.parameters(request))
        deadline = time.monotonic() + slurm.PATIENCE
        while True:
            try:
                # submitit prints SLURM's words as well as raising them.
                with slurm.outside_any_job(), contextlib.redirect_stderr(io.StringIO()):
                    return [str(job.job_id) for job in executor.submit_array([call] * count)]
            except (FailedJobError, FailedSubmissionError) as error:
                reason = " ".join(str(error).split()) or "it gave no reason"
                if FULL.search(reason):
                    raise QueueFull(f"SLURM accepts no more jobs for now ({reason}); try again later") from error
                if slurm.AWAY.search(reason) is None or time.monotonic() > deadline:
                    raise UserError(
                        f"SLURM refused the {request.kind} job ({reason}); correct the cluster.* setting that it names "
                        "and start the sweep again"
                    ) from error
                time.sleep(1.0)

    def parameters(self, request: Request) -> dict[str, Any]:
        cluster, shape, light = self.cluster, request.shape, request.light
        # From SLURM 22.05 on srun does not hand a task the CPUs that its job asked for, unless told so again. One
        # rank that fails takes the others down, and neighbouring ranks, which may split a model, share a node.
        srun = [f"--cpus-per-task={shape.cpus}", "--kill-on-bad-exit=1", "--distribution=block"]
        if cluster.container is not None and not light:
            cache = Path(os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop").absolute()
            folders = dict.fromkeys((self.folder.parent.parent, cache, self.started_from))
            mounts = ",".join(f"{folder}:{folder}" for folder in folders)
            srun += [f"--container-image={cluster.container}", f"--container-mounts={mounts}"]
        code = shlex.quote(str(self.code))
        return {
            **needs(cluster, shape, light),
            "job_name": f"{self.name}-{request.kind}",
            "array_parallelism": cluster.array_parallelism,  # which submitit wants to know; no array is larger
            "signal_delay_s": min(120, 30 * shape.time_minutes),
            "setup": [
                f"export OMP_NUM_THREADS={shape.cpus}",
                *cluster.setup,
                f"cd {shlex.quote(str(self.folder))}",
                STALE,
                # A keeper passes its environment on to the next, so the path must not grow with every one.
                f"[[ $PYTHONPATH == {code}* ]] || export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}",
            ],
            "srun_args": srun,
            "additional_parameters": self._raw(request),
        }

    def _raw(self, request: Request) -> dict[str, Any]:
        """Return the #SBATCH keys that submitit has no parameter for, with those of cluster.additional_parameters."""
        usable = avoidable(request.avoid, request.shape.nodes, self.cluster) if request.avoid else ()
        ours: dict[str, Any] = {"requeue": True, "comment": request.comment, "chdir": self.started_from}
        if request.begin is not None:
            ours["begin"] = request.begin
        if excluded := ",".join(part for part in (self.cluster.exclude, *usable) if part):
            ours["exclude"] = excluded
        for key, value in raw_keys(self.cluster).items():
            if key in ours and key in MERGED:
                ours[key] = f"{ours[key]}{MERGED[key]}{value}"
            elif key not in ours and not (request.light and key in HEAVY):
                ours[key] = value
        return {key: value for key, value in ours.items() if value is not None and value is not False}

    def _python(self, request: Request) -> str:
        python = shlex.quote(sys.executable)
        command = python if request.light else self.cluster.python or ("python3" if self.cluster.container else python)
        # The signal of a preemption would kill an interpreter that has not yet said what it does about it. SLURM takes
        # a job that ends in its grace for ended, and does not put it back in the queue.
        return f'sh -c \'trap "" USR2; exec "$@"\' sh {command}'


def needs(cluster: ClusterConfig, shape: JobShape, light: bool = False) -> dict[str, Any]:
    """Return the resources of a job as submitit's parameters; with `light`, of a keeper or fit job."""
    return {
        "partition": (cluster.keeper_partition if light else None) or cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": None if light else cluster.constraint,
        "time": shape.time_minutes,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks_per_node,
        "cpus_per_task": shape.cpus,
        "mem": f"{round(shape.memory_gb * shape.ranks_per_node * 1024)}M",
        "gpus_per_node": shape.gpus * shape.ranks_per_node or None,
    }


def raw_keys(cluster: ClusterConfig) -> dict[str, Any]:
    """Return cluster.additional_parameters by SLURM's names. Raises UserError for a key that another setting sets."""
    keys = {str(key).replace("_", "-"): value for key, value in (cluster.additional_parameters or {}).items()}
    for key in keys:
        if key in TAKEN:
            setting = TAKEN[key]
            raise UserError(
                f"cluster.additional_parameters has {key}, which "
                + ("the sweep sets itself; leave it out" if setting is None else f"{setting} sets; use that instead")
            )
    return keys


def is_held(cluster: ClusterConfig) -> bool:
    return bool(raw_keys(cluster).get("hold"))


def avoidable(avoid: Sequence[str], needed: int, cluster: ClusterConfig) -> tuple[str, ...]:
    """Return the nodes `avoid` if at least `needed` other nodes are up, else an empty tuple."""
    partition = [] if cluster.partition is None else [f"--partition={cluster.partition}"]
    up = set(slurm.ask("sinfo", "-h", "-N", "-r", "-t", "idle,mix,alloc,comp", "-o", "%N", *partition).stdout.split())
    if cluster.exclude is not None:
        up -= set(slurm.ask("scontrol", "show", "hostnames", cluster.exclude).stdout.split())
    return tuple(avoid) if len(up - set(avoid)) >= needed else ()
