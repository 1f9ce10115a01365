"""`isoflop doctor`: finds what kills, full disks and lost jobs have left in a sweep, mends it, and says what it did.

Special here:
- it is safe while the sweep runs, from any node and by two people at once: it takes locks that are free and leaves the
  rest alone, and judges age by the file system's clock;
- a sweep that another version or recipe wrote is looked at, and not touched;
- it starts nothing. A run that it has settled is started by the keeper, or by `isoflop retry`.
"""

from __future__ import annotations

import csv
import fcntl
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ... import __version__
from ...train.config import RECIPE
from ...train.errors import UserError
from ...train.files import read_json
from ..config import cluster_of
from ..runs import membership, states
from ..runs.attempts import Policy
from ..runs.directory import AtWork, Busy, RunDirectory, SweepDirectory, now_on, yaml_or_empty
from ..runs.queue import Queue
from ..slurm import commands as slurm
from ..slurm import supervisor
from ..terminal import console
from .doctor_runs import Fault, faults_of, old_temporaries, remove, unreadable
from .status import lacking

LEAST_BYTES = 500e6  # that the disk must have left
# Takes the lock that the process which starts it holds; 0: it got it, so locks do nothing here.
PROBE = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@dataclass(frozen=True)
class Finding:
    """Something that was wrong with a sweep."""

    kind: str
    severity: str  # error | note; a note needs nobody to do anything
    where: str  # below the sweep's folder
    what: str
    mended: bool
    how: str  # what was done, would be done, or can be done by a person

    @property
    def is_left(self) -> bool:
        """Whether something is still wrong."""
        return self.severity == "error" and not self.mended


def examine(sweep: SweepDirectory, mend: bool, deep: bool = False) -> list[Finding]:
    """Looks for everything that may be wrong with a sweep.

    Args:
        sweep: may be at work.
        mend: whether to mend what can be mended.
        deep: whether every checkpoint is read, to see that its sums hold.
    """
    found: list[Finding] = []
    settings = yaml_or_empty(sweep.path / "sweep.yaml")
    for fault in _version(sweep, settings):
        found.append(_settle(sweep, fault, mend))
        mend = False
    if any(finding.kind == "plan" for finding in found):
        return found
    for fault in _faults(sweep, settings, deep):
        found.append(_settle(sweep, fault, mend))
    return found


def print_findings(found: list[Finding]) -> None:
    """A line a finding, then their count."""
    out = console()
    for finding in found:
        sign = "mended" if finding.mended else ("note" if finding.severity == "note" else "left")
        out.print(f"{sign}: {finding.where}: {finding.what} ({finding.how})", highlight=False, markup=False,
                  soft_wrap=True)  # fmt: skip
    count = Counter("mended" if item.mended else "left" if item.is_left else "note" for item in found)
    words = [f"{count[kind]} {kind}" for kind in ("mended", "left") if count[kind]]
    print(", ".join(words) if words else "nothing is wrong")


def _settle(sweep: SweepDirectory, fault: Fault, mend: bool) -> Finding:
    try:
        where = str(fault.where.relative_to(sweep.path))
    except ValueError:
        where = str(fault.where)
    mended, how = False, fault.how
    if fault.mend is not None and mend:
        try:
            fault.mend()
            mended = True
        except (OSError, UserError, Busy) as error:
            how = f"not mended: {error}"
    elif fault.mend is not None:
        how = f"would be {fault.how}"
    return Finding(fault.kind, fault.severity, where, fault.what, mended, how)


def _version(sweep: SweepDirectory, settings: Mapping[str, Any]) -> Iterator[Fault]:
    """A sweep that this version cannot read, or must not change."""
    again = "run sweep.py again to write it anew"
    plan = read_json(sweep.path / "plan.json")
    if plan is None or not isinstance(plan.get("runs"), list):
        yield Fault("plan", "plan.json cannot be read", sweep.path / "plan.json", None, again)
        return
    if not settings:
        yield Fault("settings", "sweep.yaml cannot be read", sweep.path / "sweep.yaml", None, again)
    wrote = {"isoflop": settings.get("isoflop_version", __version__), "recipe": settings.get("recipe", RECIPE)}
    other = [f"{name} {value}" for name, value in wrote.items() if value != {"isoflop": __version__}.get(name, RECIPE)]
    absent = lacking(plan)
    if other or absent:
        words = (
            f"{' and '.join(other) or 'another version'} wrote the sweep, and this is {__version__}, recipe {RECIPE}"
        )
        how = "nothing is mended; use the version that wrote it, or sweep into another folder"
        yield Fault("plan" if absent else "version", words, sweep.path, None, how)


def _faults(sweep: SweepDirectory, settings: Mapping[str, Any], deep: bool) -> Iterator[Fault]:
    policy = Policy.of(cluster_of(settings))
    evaluated = bool(((settings.get("config") or {}).get("evaluate") or {}).get("tasks"))
    yield from _file_system(sweep)
    yield from _files(sweep)
    yield from _orphans(sweep, policy)
    runs = {run.run_id: run for run in membership.members(sweep)}
    for run in runs.values():
        if run.path.is_dir():
            yield from faults_of(run, policy, deep, evaluated)
        else:
            yield Fault("run", "the run has no directory", run.path, None, "sweep again to make it")
    for path in sorted((sweep.path / "runs").glob("*")):
        if path.name not in runs:
            yield Fault("stranger", "it is in no plan of this sweep", path, None, "it is left as it is", "note")


def _file_system(sweep: SweepDirectory) -> Iterator[Fault]:
    free = shutil.disk_usage(sweep.path).free
    if free < LEAST_BYTES:
        yield Fault("disk", f"{free / 1e6:.0f} MB are left on the disk", sweep.path, None, "free some space")
    if not locks_work(sweep.path):
        yield Fault(
            "locks", "two processes can hold the same file lock here", sweep.path, None,
            "use a file system with locks, as NFS mounted without nolock; until then nothing keeps two jobs apart",
        )  # fmt: skip


def locks_work(folder: Path) -> bool:
    """Whether a file lock that this process holds keeps another process out."""
    path = folder / ".doctor.lock"
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return subprocess.run([sys.executable, "-ISc", PROBE, str(path)], capture_output=True).returncode != 0
    except BlockingIOError:  # another doctor
        return True
    except OSError:
        return False


def _orphans(sweep: SweepDirectory, policy: Policy) -> Iterator[Fault]:
    """Runs that say that somebody trains them, or will, where nobody does; and jobs that nobody knows."""
    live, record = None, sweep.path / "jobs" / "slurm.json"
    if read_json(record) is not None:
        live, why = _live_jobs()
        if why is not None:
            yield Fault("slurm", why, record, None, "runs that wait are not judged", "note")
        for queue in Queue.all_of(sweep):
            if lost := queue.lost():
                names = ", ".join(name for unit in lost for name in unit.runs)
                yield Fault("queue", f"the worker is gone that had {names}", queue.folder,
                            partial(supervisor.settle_queue, queue, policy), "settled")  # fmt: skip
    for run in membership.members(sweep):
        if _is_dead(run, policy):
            what = f"it says running on {run.state().host}, and its process is gone"
            mend = partial(_settle_dead, run, policy, live is not None)
            yield Fault("orphan", what, run.path, mend, "settled; it may be tried again")
    if live is None:
        return
    if waiting := _without_job(sweep, live):
        what = f"{len(waiting)} runs wait for a job that SLURM does not know: {', '.join(waiting)}"
        yield Fault("orphan", what, sweep.path / "runs", lambda: supervisor.settle_lost(sweep, policy, live),
                    "settled; they may be tried again")  # fmt: skip
    yield from _strays(sweep)


def _live_jobs() -> tuple[set[str] | None, str | None]:
    """Jobs in SLURM's queue, or why they are not known."""
    try:
        return slurm.live_jobs(patience=0.0), None
    except UserError as error:
        return None, str(error)


def _is_dead(run: RunDirectory, policy: Policy) -> bool:
    if run.state().state != "running":
        return False
    try:
        with states.hold_idle(run, policy):
            return run.state().state == "running"
    except Busy:
        return False


def _settle_dead(run: RunDirectory, policy: Policy, ask: bool) -> None:
    """Writes how a run's process ended, in SLURM's words where it can be asked."""
    state = run.state()
    states.settle_dead([run], policy, supervisor.death_of(state.job_id, state.host) if ask else states.KILLED)


def _without_job(sweep: SweepDirectory, live: set[str]) -> list[str]:
    """Runs that wait for a job that is gone. Those of a queue wait for its workers, whom the keeper sees to."""
    queued = {name for queue in Queue.all_of(sweep) for unit in queue.left() for name in unit.runs}
    states = {run.run_id: run.state() for run in membership.members(sweep) if run.run_id not in queued}
    return [
        name
        for name, state in states.items()
        if state.state == "queued" and state.job_id is not None and state.job_id not in live
    ]


def _strays(sweep: SweepDirectory) -> Iterator[Fault]:
    """Jobs of this sweep that its record does not know. One on hold was never released, and is of no use to anybody."""
    from ..slurm.record import strays

    try:
        with sweep.lock():  # else a launcher may be writing them down
            jobs = sorted(strays(sweep))
            reasons = slurm.ask("squeue", "-h", "-r", "-j", ",".join(jobs), "-o", "%i %r").stdout if jobs else ""
            held = [line.split()[0] for line in reasons.splitlines() if line.endswith(" JobHeldUser")]
            if held:
                what = f"SLURM holds jobs of this sweep that no record knows: {', '.join(held)}"
                yield Fault("jobs", what, sweep.path / "jobs", partial(slurm.cancel, held), "cancelled")
            if others := [job for job in jobs if job not in held]:
                what = f"SLURM has jobs of this sweep that no record knows: {', '.join(others)}"
                how = "they go on; the locks of runs keep them and others apart"
                yield Fault("jobs", what, sweep.path / "jobs", None, how, "note")
    except (AtWork, UserError):
        return


def _files(sweep: SweepDirectory) -> Iterator[Fault]:
    now = now_on(sweep.path)
    for name in (".", "fit", "jobs", "code", "runs"):
        yield from old_temporaries(sweep.path / name, now)
    yield from unreadable(sweep.path / "fit" / "law.json", f"removed; isoflop report {sweep.path} makes it anew")
    yield from _launch_record(sweep)
    yield from unreadable(sweep.path / "jobs" / "keeper.json", "removed; what it counts is counted anew")
    if (sweep.path / membership.ADDED).exists() and read_json(sweep.path / membership.ADDED) is None:
        yield Fault("unreadable", f"{membership.ADDED} cannot be read", sweep.path / membership.ADDED, None,
                    "remove it and extend again; runs that are done stay done")  # fmt: skip
    table = sweep.path / "table.csv"
    if table.exists() and not _is_table(table):
        yield Fault("unreadable", "table.csv cannot be read", table, lambda: remove(table),
                    f"removed; isoflop report {sweep.path} makes it anew")  # fmt: skip


def _launch_record(sweep: SweepDirectory) -> Iterator[Fault]:
    """What launchers remember. Without it jobs are found by their label, and say themselves what they are for."""
    from ..slurm.record import LaunchRecord, rebuilt

    def rewrite() -> None:
        with sweep.lock():
            if (record := rebuilt(sweep)) == LaunchRecord():
                remove(path)
            else:
                record.write(sweep)

    path = sweep.path / "jobs" / "slurm.json"
    try:
        LaunchRecord.read(sweep)
    except UserError:
        yield Fault("unreadable", f"{path.name} cannot be read", path, rewrite, "written anew from SLURM's queue")


def _is_table(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return bool(rows) and "run_id" in rows[0] and all(len(row) == len(rows[0]) for row in rows)
