"""`isoflop doctor`: find and repair the traces of killed processes, full disks and lost jobs in a sweep.

It is safe while the sweep runs: it takes only free locks, and removes nothing that training could use.
"""

from __future__ import annotations

import csv
import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from ... import __version__
from ...train.config import RECIPE
from ...train.errors import UserError, counted
from ...train.files import read_document, read_json, write_atomic
from ...train.flops import count_parameters
from ...train.job.failure import Failure
from ...train.preflight.preflight import FAILED, REPLACED
from ...train.schedule import trunk_steps
from ..config import OTHER_VERSION, Recorded, recorded
from ..execute.identity import refusal
from ..runs import membership
from ..runs.attempts import Policy, unrecorded_steps
from ..runs.directory import ANEW, OPEN, Busy, RunDirectory, SweepDirectory, now_on, visible_damage, yaml_or_empty
from ..runs.forms import NEEDED, PlanFile, Summary
from ..runs.journal import JOURNAL, OLD_LINES, VIEW, Planned, Started, State, read_event, write_view
from ..runs.lease import KILLED, Death, cancel, hold_idle, reconcile_idle
from ..runs.preflight import FILE as PREFLIGHT
from ..runs.preflight import read_record
from ..slurm import commands as slurm
from ..slurm.jobs import LAUNCH, LaunchFile, Memory, is_unattended, jobs_of
from ..terminal import say
from .status import BRING_BACK, NO_KEEPER, fit_failure

LEAST_BYTES = 500e6  # free disk space below which a fault is reported; chosen by hand
# Tries to take the lock that its parent process holds; exit code 0: it succeeded, so locks do not work here.
PROBE = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
OLD_SECONDS = 600.0  # age after which a temporary file belongs to no running process
TEMPORARY = re.compile(r"^\.(now-|.+\.)[a-z0-9_]{8}$")  # names from tempfile, here and in train/files.py
ALIKE, LEAST_CURVES = 1.3, 5  # curves are compared within this ratio of D/N, and only if there are this many
STEP = re.compile(r"^step_(\d+)(\.request)?$")


@dataclass
class Fault:
    kind: str
    what: str  # description in one sentence
    where: Path
    repair: Callable[[], object] | None = field(repr=False)  # repairs it; None: only the user can
    how: str  # a participle for what `repair` does ("moved to trash"), or what the user can do
    severity: str = "error"  # error | note; a note requires no action
    mended: bool = False

    @property
    def is_left(self) -> bool:
        return self.severity == "error" and not self.mended

    def to_dict(self, sweep: SweepDirectory) -> dict[str, Any]:
        where = self.where.relative_to(sweep.path) if self.where.is_relative_to(sweep.path) else self.where
        rest = {name: value for name, value in vars(self).items() if name != "repair"}
        return rest | {"where": str(where)}


def examine_sweep(sweep: SweepDirectory, repair: bool, deep: bool = False) -> list[Fault]:
    """Find a sweep's faults; with `repair`, repair them; with `deep`, verify checksums of ended runs' checkpoints."""
    settings = yaml_or_empty(sweep.path / "sweep.yaml")
    faults = [_repaired(fault, repair=False) for fault in _version(sweep, settings)]
    if any(fault.kind == "plan" for fault in faults):
        return faults
    repair = repair and not faults
    return faults + [_repaired(fault, repair) for fault in _faults(sweep, settings, deep)]


def print_faults(sweep: SweepDirectory, faults: list[Fault]) -> None:
    count = Counter[str]()
    for fault in faults:
        sign = "repaired" if fault.mended else "not repaired" if fault.is_left else "note"
        say(escape(f"{sign}: {fault.to_dict(sweep)['where']}: {fault.what} ({fault.how})"))
        count[sign] += 1
    counts = [f"{count[kind]} {kind}" for kind in ("repaired", "not repaired") if count[kind]]
    print(", ".join(counts) if counts else "nothing else is wrong" if faults else "nothing is wrong")


def _repaired(fault: Fault, repair: bool) -> Fault:
    if fault.repair is not None and repair:
        try:
            fault.repair()
            fault.mended = True
        except (OSError, UserError, Busy) as error:
            fault.how = f"the repair failed: {error}"
    elif fault.repair is not None:
        fault.how = f"would be {fault.how}"
    return fault


def _version(sweep: SweepDirectory, settings: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if this version cannot read the sweep or must not change it."""
    for fault in unreadable(sweep.path / "plan.json", ANEW, PlanFile, "plan"):
        yield replace(fault, repair=None)
        return
    try:
        recorded(sweep.settings())
    except UserError as error:
        yield Fault("settings", str(error).rpartition("; ")[0], sweep.path / "sweep.yaml", None, ANEW)
    if (message := refusal(sweep)) is not None:
        what, _, how = message.partition("; ")
        yield Fault("copy", what, sweep.path, None, how)
    ours = (("isoflop", "isoflop_version", __version__), ("recipe", "recipe", RECIPE))
    other = [f"{name} {settings[key]}" for name, key, current in ours if settings.get(key, current) != current]
    if other:
        what = f"the sweep was written with {', '.join(other)}; this is isoflop {__version__}, recipe {RECIPE}"
        how = f"nothing is repaired; {OTHER_VERSION}"
        yield Fault("version", what, sweep.path, None, how)


def _faults(sweep: SweepDirectory, settings: Mapping[str, Any], deep: bool) -> Iterator[Fault]:
    config = Recorded()
    with suppress(UserError):  # see `_version`
        config = recorded(settings)
    policy = Policy.of(config.cluster)
    yield from _disk(sweep)
    yield from _files(sweep)
    if (problem := lock_problem(sweep.path)) is not None:
        how = "use a file system with locks, such as NFS without nolock; until then two jobs may train the same run"
        yield Fault("locks", f"{problem}, so runs were not checked", sweep.path, None, how)
        return
    yield from _orphans(sweep, policy)
    yield from _nodes(sweep)
    runs = {run.run_id: run for run in _members(sweep)}
    for run in runs.values():
        if run.path.is_dir():
            yield from faults_of(run, policy, deep, config.evaluate.scores)
        else:
            yield Fault("run", "the run has no directory", run.path, None, "start the sweep again to create it")
    yield from _curves_apart(sweep)
    for path in sorted((sweep.path / "runs").glob("*")):
        if path.name not in runs:
            yield Fault("stranger", "it is not a run of this sweep's plan", path, None, "left as it is", "note")


def _curves_apart(sweep: SweepDirectory) -> Iterator[Fault]:
    """Yield a note for each done run whose normalised loss curve differs from others of similar D/N.

    Branches are skipped.
    """
    from ... import fit
    from ..results.table import sweep_curves

    alike = defaultdict[Any, list[str]](list)
    for run in (run for run in sweep.runs() if run.is_done()):
        with suppress(UserError):  # `_config` reports it
            config = run.config()
            ratio = config.D / count_parameters(config.model).N_active
            shape = replace(config.schedule, warmup_tokens=None)
            if config.parent is None:  # a branch's curve begins with that of its trunk
                alike[str(shape), round(math.log(ratio) / math.log(ALIKE))].append(run.run_id)
    law = (read_json(sweep.path / "fit" / "law.json") or {}).get("law") or {}
    for names in (names for names in alike.values() if len(names) >= LEAST_CURVES):
        curves = sweep_curves(sweep, set(names)).dropna(subset=["loss"]).drop(columns="val_loss")
        floor = min(float(law.get("E") or 0.0), 0.99 * float(curves["loss"].min()))
        try:
            collapsed = fit.collapse(curves, floor)
        except fit.InputError:  # the curves have too few lines
            continue
        for name, row in collapsed[collapsed["noted"]].iterrows():
            what = (
                f"its normalised loss curve deviates by {row['deviation']:.1%} from {len(names) - 1} runs with "
                f"a similar D/N (median {collapsed['deviation'].median():.1%}); its settings may not suit it"
            )
            how = "see its curve in the report; `isoflop tune --check` tries other settings"
            yield Fault("curve", what, sweep.run(str(name)).path, None, how, "note")


def _disk(sweep: SweepDirectory) -> Iterator[Fault]:
    free = shutil.disk_usage(sweep.path).free
    if free < LEAST_BYTES:
        yield Fault("disk", f"only {free / 1e6:.0f} MB are free on the disk", sweep.path, None, "free some space")


def _nodes(sweep: SweepDirectory) -> Iterator[Fault]:
    """Yield the faults that preflight found on each node."""
    for host, node in read_record(sweep).nodes.items():
        for finding in (*node.findings, *node.of_kind):
            if finding.outcome in (FAILED, REPLACED):
                how = "exclude it with cluster.exclude" if finding.outcome == FAILED else "no action is needed"
                severity = "error" if finding.outcome == FAILED else "note"
                yield Fault("node", f"{host}: {finding.said}", sweep.path / PREFLIGHT, None, how, severity)


def lock_problem(folder: Path) -> str | None:
    """Return the problem if a file lock in `folder` does not exclude other processes, else None."""
    path = folder / ".doctor.lock"
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe = subprocess.run([sys.executable, "-ISc", PROBE, str(path)], capture_output=True)
    except BlockingIOError:  # another doctor process holds it, so locks work
        return None
    except OSError as error:
        return f"no file can be locked in {folder} ({error.strerror})"
    return "two processes can hold the same file lock here" if probe.returncode == 0 else None


def _orphans(sweep: SweepDirectory, policy: Policy) -> Iterator[Fault]:
    on_slurm = (sweep.path / "jobs" / LAUNCH).exists()

    def explain(start: Started) -> Death:
        return slurm.death_of(start.job_id, start.host) if on_slurm else KILLED

    for run in _members(sweep):
        if _is_dead(run, policy):
            what = f"its state is running on {run.state().host}, but its process is gone"
            repair = partial(reconcile_idle, run, policy, explain)
            yield Fault("orphan", what, run.path, repair, "reconciled; the run may be retried")
    if on_slurm and not any(unreadable(sweep.path / "jobs" / LAUNCH, "", LaunchFile)):  # see `_files`
        try:
            jobs = jobs_of(sweep, patience=0.0)
        except UserError as error:
            yield Fault("slurm", str(error), sweep.path / "jobs", None, "its jobs were not checked", "note")
            return
        if is_unattended(sweep, jobs):
            yield Fault("keepers", NO_KEEPER, sweep.path / "jobs", None, BRING_BACK)
        if suspended := [job.name for job in jobs if job.suspended]:
            what = f"{counted(len(suspended), 'job is', 'jobs are')} suspended by SLURM"
            how = f"wait, or ask an administrator for `scontrol resume {','.join(suspended)}`"
            yield Fault("suspended", what, sweep.path / "jobs", None, how, "note")


def _members(sweep: SweepDirectory) -> list[RunDirectory]:
    with suppress(UserError):
        return membership.members(sweep)
    return sweep.runs()


def _is_dead(run: RunDirectory, policy: Policy) -> bool:
    if run.record().open is not None:
        with suppress(Busy), hold_idle(run, policy):
            return run.record().open is not None
    return False


def _files(sweep: SweepDirectory) -> Iterator[Fault]:
    now = now_on(sweep.path)
    for name in (".", "fit", "jobs", "code", "runs"):
        yield from old_temporaries(sweep.path / name, now)
    again = f"moved to trash; write it again with `isoflop report {sweep.path}`"
    yield from unreadable(sweep.path / "fit" / "law.json", again)
    how = "moved to trash; the next launch writes it again, and queued jobs continue"
    yield from unreadable(sweep.path / "jobs" / LAUNCH, how, LaunchFile)
    yield from unreadable(
        sweep.path / "jobs" / "keeper.json", "moved to trash; the fit's tries are counted from 0", Memory
    )
    stays = "finished runs stay done"
    for fault in unreadable(sweep.path / membership.ADDED, f"remove it and extend again; {stays}", membership.Added):
        yield replace(fault, repair=None)
    if (table := sweep.path / "table.csv").exists() and not _is_table(table):
        yield Fault("unreadable", "table.csv cannot be read", table, partial(remove, table), again)
    if (reason := fit_failure(sweep)) is not None:
        how = f"correct the cause, then fit again with `isoflop report {sweep.path}`"
        yield Fault("fit", f"the fit failed: {reason}", sweep.path / "fit", None, how)


def _is_table(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, strict=True))
        return bool(rows) and "run_id" in rows[0] and all(len(row) == len(rows[0]) for row in rows)
    return False


def faults_of(run: RunDirectory, policy: Policy, deep: bool, evaluated: bool) -> Iterator[Fault]:
    """Yield a run's faults unless a process trains it. `deep`: verify checksums. `evaluated`: scores are expected."""
    with suppress(Busy), hold_idle(run, policy):
        for check in (_config, _state, _leftovers, _lines):
            yield from check(run)
        # No checksums for a run that will continue: they take minutes, and its trainer waits for the lock.
        yield from _checkpoints(run, deep and run.state().state not in OPEN)
        yield from _result(run, evaluated)
        yield from _scores(run)
        yield from _books(run)


def old_temporaries(folder: Path, now: float) -> Iterator[Fault]:
    """Yield a fault for each old temporary file that an interrupted write left in a folder; `now`: current time."""
    for path in sorted(folder.glob(".*")):
        if not TEMPORARY.match(path.name):
            continue
        try:
            age = now - path.stat().st_mtime
        except OSError:  # renamed just now
            continue
        if age > OLD_SECONDS:
            what = f"a write was interrupted {age / 60:.0f} minutes ago and left {path.name}"
            yield Fault("temporary", what, path, partial(remove, path), "moved to trash")


def remove(path: Path) -> None:
    """Move a file or folder of a sweep to the sweep's `trash`, under the same relative path."""
    sweep = next(folder for folder in path.parents if (folder / "plan.json").exists())
    place = sweep / "trash" / path.relative_to(sweep)
    if os.path.lexists(place):
        place = place.with_name(f"{place.name}.{os.urandom(4).hex()}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.rename(place)


def unreadable(
    path: Path,
    how: str,
    form: Any = dict[str, Any],
    kind: str = "unreadable",
    repair: Callable[[], object] | None = None,
) -> Iterator[Fault]:
    """Yield a fault if a file exists but is not JSON of type `form`. `how` describes `repair` (default: `remove`)."""
    try:
        if path.exists():
            read_document(path, form)
    except UserError as error:
        what = str(error).replace(str(path), path.name).rpartition("; ")[0]
        yield Fault(kind, what, path, repair or partial(remove, path), how)


def _config(run: RunDirectory) -> Iterator[Fault]:
    try:
        run.config()
    except UserError as error:
        yield Fault("config", str(error), run.path / "config.yaml", None, "the run is left as it is")


def _state(run: RunDirectory) -> Iterator[Fault]:
    record, path = run.record(), run.path / VIEW
    how, repair = f"written again from the journal, as {record.state.state}", partial(write_view, run.path, record)
    if not path.exists():
        yield Fault("state", "state.json is missing", path, repair, how)
    yield from unreadable(path, how, State, "state", repair)
    with suppress(UserError):  # `unreadable` reports it
        if (view := read_document(path, State)) != record.state:
            yield Fault("state", f"state.json ({view.state}) differs from the journal", path, repair, how)
    asked, state = run.cancel_asked(), record.state.state
    if asked is not None and state == "done":
        yield Fault("cancel", f"{asked} asked to cancel a run that is done", run.path, run.forget_cancel, "withdrawn")
    elif asked is not None and state != "cancelled":
        what = f"{asked} asked to cancel the run, and no worker is training it"
        yield Fault("cancel", what, run.path, partial(cancel, run, f"cancelled by {asked}"), "cancelled")


def _leftovers(run: RunDirectory) -> Iterator[Fault]:
    now = now_on(run.path)
    for folder in (run.path, run.path / "eval"):
        yield from old_temporaries(folder, now)
    for name, form in (("failure.json", Failure), ("cancel.json", dict[str, Any])):
        yield from unreadable(run.path / name, "moved to trash", form)
    if (path := run.path / ".reserve").exists():
        yield Fault("temporary", "disk is reserved for a run that no worker trains", path, run.release, "released")
    if run.last_sign() is not None and run.state().state != "running":
        what = "a heartbeat is left from a run that is not running"
        yield Fault("heartbeat", what, run.path / "heartbeat", run.forget_signs, "moved to trash")


def _lines(run: RunDirectory) -> Iterator[Fault]:
    for name, is_record in (("metrics.jsonl", _is_record), (OLD_LINES, _is_record), (JOURNAL, read_event)):
        path = run.path / name
        try:
            *lines, torn = path.read_bytes().split(b"\n")
        except OSError:
            continue
        whole = [line for line in lines if is_record(line)]
        if bad := len(lines) - len(whole) + (torn != b""):
            text = b"".join(line + b"\n" for line in whole).decode()
            what = f"{counted(bad, 'line')} of {name} cannot be read"
            yield Fault(
                "torn", what, path, partial(write_atomic, path, text), "moved to trash; all other lines are kept"
            )


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _checkpoints(run: RunDirectory, deep: bool) -> Iterator[Fault]:
    damage: Callable[[Path], str | None] = visible_damage  # by names and sizes
    if deep:  # also by sums
        from ...train.checkpoint.checkpoint import damage
    folder = run.path / "checkpoints"
    for path in sorted(folder.glob(".step_*")):  # the lock is held, so no process is writing one
        what = f"saving a checkpoint was interrupted and left {path.name}"
        yield Fault("half-written", what, path, partial(remove, path), "moved to trash")
    final = (run.summary() or {}).get("checkpoint")
    for path in sorted(folder.glob("step_*")):
        if (problem := damage(path)) is None:
            continue
        if run.is_done() and final == f"checkpoints/{path.name}":
            continue  # see `_result`
        what, how = (
            f"checkpoint {path.name} is damaged: {problem}",
            "moved to trash; the run continues from the previous one",
        )
        yield Fault("half-written", what, path, partial(remove, path), how)


def _result(run: RunDirectory, evaluated: bool) -> Iterator[Fault]:
    path = run.path / "summary.json"
    yield from unreadable(path, "moved to trash; it is written again from the newest checkpoint", Summary)
    if run.state().state != "done":
        return
    summary = run.summary()
    if summary is None:
        repair = partial(run.write_event, Planned, reason="its summary was lost and must be written again")
        how = f"planned again; continue it with `isoflop retry {run.path.parent.parent} {run.run_id}`"
        yield Fault("result", "the run is done but has no readable summary", path, repair, how)
        return
    if absent := [name for name in NEEDED if name not in summary]:
        how = "remove it and run isoflop doctor again; it is then written again from the newest checkpoint"
        yield Fault("result", f"summary.json lacks {', '.join(absent)}", path, None, how)
    checkpoint = run.path / str(summary.get("checkpoint"))
    problem = visible_damage(checkpoint) if checkpoint.is_dir() else "it is gone"
    if problem is not None and "checkpoint" in summary:  # an external program names none
        needed = evaluated and not (run.path / "eval" / f"step_{summary.get('step')}.json").exists()
        what = f"its last checkpoint cannot be used ({problem})"
        how = f"its losses remain valid; to train the run again, remove {path} and run isoflop doctor again"
        yield Fault("result", what, checkpoint, None, how, "error" if needed else "note")


def _books(run: RunDirectory) -> Iterator[Fault]:
    if not run.is_done():
        return
    with suppress(UserError):  # see `_config`
        config = run.config()
        begins = trunk_steps(config) if config.parent is not None else 0
        steps = unrecorded_steps(run.record().attempts, begins, config.steps)
        # The run's folder was removed and copied back in part.
        lost = [f"the attempts that trained {steps} of its {config.steps} steps"] * (steps > 0)
        last = run.last_metrics().get("step", 0)
        if not (run.path / "metrics.jsonl").exists():
            lost.append("metrics.jsonl with its curve")
        elif last + config.log_every <= config.steps and config.trainer.kind != "command":
            lost.append(f"the curve after step {last} of {config.steps}")
        if lost:
            how = (
                f"its result remains valid, but hours are undercounted; to train it again, remove {run.path} and retry"
            )
            yield Fault("books", f"no record of {' and '.join(lost)}", run.path, None, how, "note")


def _scores(run: RunDirectory) -> Iterator[Fault]:
    done = run.is_done()
    for path in sorted((run.path / "eval").glob("*.json")):
        if not STEP.match(path.stem):
            continue
        if read_json(path) is None:
            yield from unreadable(path, "moved to trash; the run is scored again when the sweep continues")
        elif not done:
            what = f"eval/{path.name} has scores of a run that is {run.state().state}, not done"
            yield Fault(
                "scores", what, path, partial(remove, path), "moved to trash; the run is scored when it is done"
            )
