"""SLURM's own commands: the queue, and how jobs have ended.

An array task is always named `array_task`: the last task's plain id is that of its whole array.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from ...train.errors import UserError
from ..runs.lease import KILLED, Death

SECONDS = 60  # that a busy controller may take to answer
HASTE = 5.0  # the same, if the question may be left open
PATIENCE = 20.0  # seconds for which a controller that is away is asked again
# Messages of SLURM's commands if the controller does not answer; others mean that it refuses. The last is that of
# `scontrol requeue` for a connection that failed.
AWAY = re.compile(
    r"unable to contact|connection (refused|timed out|reset)|connect failure|socket timed out|zero bytes were|"
    r"unable to establish|unexpected message received",
    re.IGNORECASE,
)
# Causes of attempts by SLURM's state of the job. The job of a node that failed may be waiting again by now. A cancelled
# job has cancelled no run.
CAUSES = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "PENDING": "node",
    "REQUEUED": "node",
    "OUT_OF_MEMORY": "memory",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "preempted",
}


@dataclass(frozen=True)
class QueuedJob:
    name: str  # its id; `array_task` for a task of an array
    is_pending: bool
    reason: str  # why it waits
    comment: str
    is_suspended: bool = False  # stopped where it runs, by an administrator or by a job of higher priority


def queue(own: bool = False, patience: float = PATIENCE) -> list[QueuedJob]:
    """Return the pending, running and suspended jobs of all users; with `own`, of this user only.

    Raises:
        UserError: SLURM does not answer within `patience` seconds.
    """
    whose = ["-u", str(os.getuid())] if own else []
    timeout = SECONDS if patience else HASTE
    answer = ask("squeue", "-h", "-r", *whose, "-o", "%i|%T|%r|%k", timeout=timeout, patience=patience)
    if answer.returncode:
        raise UserError(
            f"cluster is 'slurm', but squeue does not answer ({words(answer)}); use cluster=local, or try again later"
        )
    rows = (line.split("|", 3) for line in answer.stdout.splitlines() if line.count("|") >= 3)
    return [
        QueuedJob(name, state == "PENDING", reason, comment, state == "SUSPENDED")
        for name, state, reason, comment in rows
    ]


def release(jobs: Iterable[str]) -> None:
    if names := sorted(jobs):
        ask("scontrol", "release", ",".join(names), patience=PATIENCE)


def death_of(job: str | None, node: str | None, answers: Mapping[str, tuple[str, str | None]] | None = None) -> Death:
    """Return why the process of SLURM job `job` on `node` is gone: killed, if `job` is None.

    `answers`: a result of `outcomes`; None: ask SLURM.
    """
    if job is None:
        return KILLED
    outcome, last = (outcomes([job]) if answers is None else answers).get(job, (None, None))
    node = node or last
    where = f"its job {job} on {node}" if node else f"its job {job}"
    if outcome is None:
        return Death("lost", f"{where} is gone, and SLURM has no record of how it ended")
    return Death(CAUSES.get(outcome, "killed"), f"{where} ended without a message; SLURM reports {outcome}")


def outcomes(jobs: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Map job ids to SLURM state and nodes (as `node[1-2]`, or None).

    Asks SLURM's accounting, then its controller; jobs unknown to both are left out.
    """
    ids = {job for job in jobs if re.fullmatch(r"\d+(_\d+)?", job)}
    # By the array: a task that never started may have no record but the array's own, as 7_[0-2%2].
    by_job = _matching(ids, _accounting(ids, "JobID,State,NodeList"))
    for array in sorted({job.split("_")[0] for job in ids - by_job.keys()}):
        shown = ask("scontrol", "-o", "show", "job", array).stdout
        by_job |= _matching(ids - by_job.keys(), [_shown(line) for line in shown.splitlines()])
    return by_job


def _matching(ids: Collection[str], records: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, str | None]]:
    """Map `ids` to (state, nodes) from SLURM's (id, state, nodes) records; one record may cover several array tasks."""
    single, shared = dict[str, tuple[str, str | None]](), dict[str, tuple[str, str | None]]()
    for job, state, nodes in (record for record in records if len(record) == 3 and record[1]):
        into = shared if "[" in job else single
        into[job] = (state.split()[0], None if nodes in ("", "(null)", "None assigned") else nodes)
    covered = {job: outcome for record, outcome in shared.items() for job in ids if _covers(record, job)}
    return {job: outcome for job, outcome in (covered | single).items() if job in ids}


def _shown(line: str) -> tuple[str, str, str]:
    values: dict[str, str] = dict(re.findall(r"(?<!\w)(JobId|ArrayJobId|ArrayTaskId|JobState|NodeList)=(\S+)", line))
    job, task = values.get("ArrayJobId", values.get("JobId", "")), values.get("ArrayTaskId")
    if task is not None:
        job = f"{job}_{task}" if task.isdigit() else f"{job}_[{task}]"
    return job, values.get("JobState", ""), values.get("NodeList", "")


def elapsed(jobs: Iterable[str]) -> dict[str, float]:
    """Map job ids to the seconds that they ran, over all starts; omit jobs unknown to SLURM's accounting."""
    ids, total = set(jobs), dict[str, float]()
    # With the duplicates: each start of a requeued job has its own record.
    for job, duration in _accounting(ids, "JobID,ElapsedRaw", "-D"):
        if job in ids and duration.isdigit():
            total[job] = total.get(job, 0.0) + float(duration)
    return total


def _accounting(jobs: Iterable[str], columns: str, *options: str) -> Iterator[tuple[str, ...]]:
    """Yield the `columns` of sacct's records of `jobs` and all tasks of their arrays; `options` go to sacct."""
    arrays = sorted({job.split("_")[0] for job in jobs})
    for start in range(0, len(arrays), 200):
        names = ",".join(arrays[start : start + 200])
        answer = ask("sacct", "-n", "-X", "-P", *options, "-j", names, "-o", columns)
        yield from (tuple(line.split("|")) for line in answer.stdout.splitlines() if "|" in line)


def _covers(record: str, job: str) -> bool:
    """Return whether a record such as `7_[0-2,5%2]`, of several array tasks, covers a job."""
    array, _, task = job.partition("_")
    match = re.fullmatch(rf"{array}_\[([\d,-]+)(?:%\d+)?\]", record)
    if match is None or not task:
        return False
    ends = [part.split("-") for part in match[1].split(",")]
    return any(int(part[0]) <= int(task) <= int(part[-1]) for part in ends)


def controller_time() -> datetime | None:
    """Return the time on the controller's clock, which decides when jobs begin; None if it does not answer."""
    shown = ask("scontrol", "show", "config", timeout=HASTE).stdout
    match = re.match(r"Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
    return datetime.fromisoformat(match[1]) if match is not None else None


def first_to_end(log: str) -> str | None:
    """Return the last UserError in a job's log since its last requeue, else the rank that failed first, or None."""
    attempt = log.rpartition("DUE TO JOB REQUEUE")[2]
    if sentences := re.findall(r"^(?:\w+\.)*UserError: (.+)$", attempt, re.MULTILINE):
        return str(sentences[-1])
    match = re.search(r"^srun: error: (\S+): task(s?) ([\d,-]+): (.+)$", attempt, re.MULTILINE)
    return None if match is None else f"rank{match[2]} {match[3]} on {match[1]} ended first ({match[4]})"


def cancel(jobs: Iterable[str]) -> None:
    if names := sorted(jobs):
        ask("scancel", *names, patience=PATIENCE)


@contextlib.contextmanager
def outside_any_job() -> Iterator[None]:
    """Hide the SLURM variables of this process from jobs submitted in the block."""
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


def ask(*command: str, timeout: float = SECONDS, patience: float = 0.0) -> subprocess.CompletedProcess[str]:
    """Call a SLURM command, and repeat it for `patience` seconds while the controller is away.

    A missing command, or one that takes longer than `timeout` seconds, gives exit code 1 and the error as stderr.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        if not is_away(answer) or time.monotonic() > deadline:
            return answer
        time.sleep(1.0)


def is_away(answer: subprocess.CompletedProcess[str]) -> bool:
    return answer.returncode != 0 and AWAY.search(answer.stderr) is not None


def words(answer: subprocess.CompletedProcess[str]) -> str:
    return " ".join((answer.stderr or answer.stdout).split()) or f"exit code {answer.returncode}"


def seconds(clock: str) -> int | None:
    """Convert SLURM's `[days-]hours:minutes:seconds` to seconds; None for UNLIMITED."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", clock)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
