"""SLURM's own commands, called and read: what is in the queue, what became of a job, and back into the queue with it.

Special here:
- a job that is being cancelled and one that is being put back in the queue both read COMPLETING; the count of restarts
  tells them apart, so that a cancelled job is never brought back;
- an array task is always named `array_task`: the last task's plain id is the id of its whole array, and requeueing that
  would restart every task.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Iterator

from ..train.errors import UserError

SECONDS = 60  # that a busy controller may take to answer


def inside_job() -> bool:
    """Whether this process is a job that was submitted to SLURM, and not a local one inside somebody's allocation."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def job_id() -> str:
    """The id of this job, `array_task` for a task of an array; the process id where this is no SLURM job."""
    if not inside_job():
        return str(os.getpid())
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def restarts() -> int:
    """How often this job has been put back in the queue before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def live_jobs() -> set[str]:
    """Ids of this user's jobs that wait or run, `array_task` for tasks of arrays.

    Raises:
        UserError: SLURM does not answer.
    """
    answer = _ask("squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i")
    if answer.returncode:
        raise UserError(
            f"cluster is 'slurm' and squeue does not answer ({_words(answer)}); use cluster=local, or try later"
        )
    return set(answer.stdout.split())


def fate(job: str, restarts_before: int) -> str:
    """What SLURM does with a job that still runs: `running`, `requeued`, `cancelled`, or `timeout` (over its limit).

    Args:
        job: the id, `array_task` for a task of an array.
        restarts_before: how often the job had been requeued when it started.
    """
    shown = _ask("scontrol", "-o", "show", "job", job).stdout
    fields = dict(re.findall(r"\b(JobState|Restarts|RunTime|TimeLimit)=(\S+)", shown))
    if int(fields.get("Restarts", 0)) > restarts_before:
        return "requeued"
    if fields.get("JobState") not in ("COMPLETING", "CANCELLED"):
        return "running"
    limit = _seconds(fields.get("TimeLimit", ""))
    over = limit is not None and (_seconds(fields.get("RunTime", "")) or 0) >= limit
    return "timeout" if over else "cancelled"


def requeue(job: str, restarts_before: int) -> str | None:
    """Puts this job back in the queue; returns SLURM's words where it refuses."""
    answer = _ask("scontrol", "requeue", job)
    # SLURM takes a requeued job's processes away, and that can hit the command before it has heard the answer.
    if answer.returncode and fate(job, restarts_before) != "requeued":
        return _words(answer)
    return None


def outcome(job: str | None) -> str | None:
    """How a job ended, in SLURM's word (COMPLETED, CANCELLED, OUT_OF_MEMORY, …), or None where nobody remembers."""
    if job is None:
        return None
    words = _ask("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").stdout.split()
    if words:
        return words[0]
    found = re.search(r"\bJobState=(\S+)", _ask("scontrol", "-o", "show", "job", job).stdout)
    return found[1] if found else None


def first_to_end(log: str) -> str | None:
    """Which task of a job's last attempt ended badly before others did, as `srun` wrote in the job's error log."""
    attempt = log.rpartition("DUE TO JOB REQUEUE")[2]
    found = re.search(r"^srun: error: (\S+): task(s?) ([\d,-]+): (.+)$", attempt, re.MULTILINE)
    return None if found is None else f"rank{found[2]} {found[3]} on {found[1]} ended first ({found[4]})"


def cancel(jobs: Iterable[str]) -> None:
    """Cancels jobs; those that have ended already are no error."""
    if names := sorted(jobs):
        _ask("scancel", *names)


@contextlib.contextmanager
def outside_any_job() -> Iterator[None]:
    """Hides an allocation that this process runs in: its variables would become those of the jobs submitted from it."""
    prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
    hidden = {key: value for key, value in os.environ.items() if key.startswith(prefixes) and key != "SLURM_CONF"}
    if "SLURM_JOB_ID" not in hidden:
        hidden = {}
    for key in hidden:
        del os.environ[key]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _words(answer: subprocess.CompletedProcess[str]) -> str:
    return " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"


def _seconds(clock: str) -> int | None:
    """`[days-]hours:minutes:seconds` in seconds; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", clock)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
