"""Run and sweep directories: identity, frozen config, locks, and the files by which processes communicate.

Locks are advisory file locks, which the kernel drops when their holder dies.
A run's state comes from its own files (`journal.py`), never from a scheduler.
"""

from __future__ import annotations

import errno
import getpass
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ...train.config import RunConfig, from_dict, run_id, to_dict
from ...train.errors import UserError
from ...train.files import HALVED, read_document, read_json, write_atomic, write_json
from ...train.planner.command import PROGRAM, newest_checkpoint
from .forms import Identity, Metrics, PlanFile, PlannedRun, Settings, Summary
from .journal import JOURNAL, STATES, VIEW, Event, RunRecord, State, append, read_record

ENDS = STATES[3:]
FIT_FAILURE = "fit_failure.json"  # of a sweep: why its last fit failed; absent where it did not
OPEN = ("running", "preempted", "queued", "planned")  # states that a run leaves by itself
CANCEL = "cancel.json"
HEARTBEAT = "heartbeat"
IDENTITY = "identity.json"
INGESTED = "ingest.json"  # of a folder with the runs of another trainer: where each was read from
ANEW = "run the same sweep.py command again to rewrite it, or use the version that wrote it"
# A thousand runs are planned in a second, and 4 ms a config in Python would be as much again to write them.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class Busy(Exception):
    """Another process holds the lock; the message says which."""


class AtWork(UserError):
    """Another process holds the sweep's lock."""


class RunDirectory:
    """One run on disk: outputs/<sweep>/runs/<run_id>."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name

    def freeze(self, config: RunConfig) -> None:
        """Write config.yaml, unless the run has one."""
        if run_id(config) != self.run_id:
            raise ValueError(f"run {run_id(config)} does not belong in {self.path}")
        if not (self.path / "config.yaml").exists():
            self._write_config(config)

    def refreeze(self, config: RunConfig, timeout: float = 60.0) -> None:
        """Rewrite config.yaml if `config` differs. Raises UserError if a worker holds the run for `timeout` seconds."""
        if self.config() == config:
            return
        try:
            with self.lock(timeout):
                self._write_config(config)
        except Busy as error:
            raise UserError(
                f"{error}; settings such as parallel.* cannot change while it trains, so cancel it or wait for its end"
            ) from error

    def _write_config(self, config: RunConfig) -> None:
        write_atomic(self.path / "config.yaml", str(yaml.dump(to_dict(config), Dumper=_DUMPER, sort_keys=False)))

    def config(self) -> RunConfig:
        """Read config.yaml. Raises UserError if it is missing, unreadable, or that of another run."""
        path = self.path / "config.yaml"
        try:
            config = from_dict(RunConfig, read_document(path, dict[str, Any]))
            described = run_id(config)
        except (UserError, ValueError) as error:  # of a value that is infinite or no number there is no id
            raise UserError(
                f"{path} cannot be read as a run's config ({error}); remove the run directory and start the sweep again"
            ) from error
        if described != self.run_id:
            raise UserError(
                f"{path} describes run {described} and not {self.run_id}; it was edited, or written by another "
                "version, so remove the run directory and start the sweep again"
            )
        return config

    def state(self) -> State:
        """Return the state in state.json; if that file is missing, damaged or outdated, take it from the journal."""
        view = self.path / VIEW
        with suppress(UserError, OSError):
            if view.stat().st_mtime_ns >= (self.path / JOURNAL).stat().st_mtime_ns:
                return read_document(view, State)
        return self.record().state

    def record(self) -> RunRecord:
        return read_record(self.path)

    def write_event(self, kind: type[Event], flush: bool = False, **values: Any) -> RunRecord:
        """Append `kind(**values)` to the journal; the caller holds the run's lock. Raises OSError if that fails."""
        return append(self.path, kind(at=now_on(self.path), **values), flush=flush)

    def is_done(self) -> bool:
        """Return whether the state is `done` and the summary can be read."""
        return self.state().state == "done" and self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        return read_json(self.path / "summary.json", Summary)

    def lock(self, timeout: float = 60.0) -> AbstractContextManager[object]:
        """Take the run's lock. Raises Busy if another process held it for `timeout` seconds."""
        return locked(self.path / ".lock", timeout, f"run {self.run_id}")

    def reserve(self) -> None:
        """Reserve disk space, so that the run's end can be recorded on a full disk."""
        (self.path / ".reserve").write_bytes(b"\0" * 16384)

    def release(self) -> None:
        (self.path / ".reserve").unlink(missing_ok=True)

    def log(self, message: str, rank: int = 0) -> None:
        """Append a line to log.txt (rank 0) or log-rank<r>.txt."""
        name = f"log-rank{rank}.txt" if rank else "log.txt"
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def ask_cancel(self, by: str, expected_loss: float | None = None) -> None:
        """Ask the run's worker to save and stop; `expected_loss` is the forecast loss of a hopeless run."""
        write_json(self.path / CANCEL, {"by": by, "at": now_on(self.path), "expected_loss": expected_loss})

    def given_up(self) -> float | None:
        """Return the expected final loss of a run that was stopped as hopeless, else None."""
        if self.state().state != "cancelled":
            return None
        return (read_json(self.path / CANCEL) or {}).get("expected_loss")

    def cancel_asked(self) -> str | None:
        """Return who asked to cancel the run, or None."""
        if not (self.path / CANCEL).exists():
            return None
        return str((read_json(self.path / CANCEL) or {}).get("by", "a user"))

    def forget_cancel(self) -> None:
        (self.path / CANCEL).unlink(missing_ok=True)

    def give_sign(self) -> None:
        """Set the heartbeat file's time to now, by the file system's clock."""
        path = self.path / HEARTBEAT
        try:
            os.utime(path)  # without a time: on NFS the server's own
        except FileNotFoundError:
            path.touch()

    def last_sign(self) -> float | None:
        """Return the time of the last heartbeat, in seconds since the epoch, or None."""
        try:
            with (self.path / HEARTBEAT).open("rb") as file:  # NFS asks its server again only where a file is opened
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return None

    def forget_signs(self) -> None:
        (self.path / HEARTBEAT).unlink(missing_ok=True)

    def is_halved(self) -> bool:
        """Return whether the micro-batch is halved, because the run ran out of memory once."""
        return (self.path / HALVED).exists()

    def saved_steps(self) -> list[int]:
        """Return the steps of checkpoints with a manifest; their files are not read."""
        manifests = (self.path / "checkpoints").glob("step_*/manifest.json")
        names = (path.parent.name.removeprefix("step_") for path in manifests)
        return sorted(int(name) for name in names if name.isdigit())

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint whose files have the right sizes, or None; hashes are not read."""
        if (folder := self.path / PROGRAM).is_dir():
            with suppress(UserError):  # of a program's checkpoint, the number in its name, or else the last logged step
                if newest := newest_checkpoint(config := self.config(), folder):
                    return min(newest[0] or int(self.last_metrics().get("step", 0)), config.steps)
            return None
        folders = {step: self.path / "checkpoints" / f"step_{step}" for step in reversed(self.saved_steps())}
        return next((step for step, folder in folders.items() if visible_damage(folder) is None), None)

    def last_metrics(self) -> dict[str, Any]:
        """Return the newest complete record of metrics.jsonl, or an empty dict."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4096))
                lines = file.read().split(b"\n")
        except OSError:
            return {}
        for line in reversed(lines[:-1]):
            try:
                record = json.loads(line)
                msgspec.convert(record, Metrics)
            except (ValueError, RecursionError):
                continue
            return dict(record)
        return {}


class SweepDirectory:
    """One sweep on disk: outputs/<sweep>."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path | str) -> SweepDirectory:
        """Open an existing sweep. Raises UserError if the folder is not one."""
        directory = cls(Path(path))
        if not (directory.path / "plan.json").is_file():
            raise UserError(f"{path} is not a sweep directory (it has no plan.json); give a folder that sweep.py wrote")
        return directory

    def run(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.path / "runs" / run_id)

    @property
    def is_ingested(self) -> bool:
        """Return whether another program trained the runs, and `isoflop ingest` wrote the folder."""
        return (self.path / INGESTED).is_file()

    def plan(self) -> dict[str, Any]:
        """Return plan.json, with defaults for missing fields. Raises UserError if it cannot be read."""
        checked = msgspec.to_builtins(read_document(self.path / "plan.json", PlanFile, remedy=ANEW))
        return (read_json(self.path / "plan.json") or {}) | checked

    def planned_runs(self) -> list[PlannedRun]:
        """Return the plan's runs in starting order. Raises UserError if plan.json cannot be read."""
        return read_document(self.path / "plan.json", PlanFile, remedy=ANEW)["runs"]

    def runs(self) -> list[RunDirectory]:
        """Return the runs of the current plan, in its order."""
        return [self.run(run["run_id"]) for run in self.plan()["runs"]]

    def settings(self) -> dict[str, Any]:
        """Return sweep.yaml: the resolved config, and the command and version it came from."""
        return dict(read_document(self.path / "sweep.yaml", Settings, remedy=ANEW))

    def lock(self, timeout: float = 0.0) -> AbstractContextManager[object]:
        """Take the sweep's lock. Raises AtWork if another process held it for `timeout` seconds."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return locked(self.path / ".lock", timeout, "sweep")
        except Busy as error:
            raise AtWork(
                f"{self.path} is in use ({error}); wait for it, or choose another folder with sweep=NAME"
            ) from error
        except OSError as error:
            raise UserError(
                f"output_root is {str(self.path.parent)!r}, which cannot be written ({error.strerror or error}); "
                "name another folder"
            ) from error

    def copied_from(self) -> SweepDirectory | None:
        """Return the sweep that this folder is a copy of; None for an original, even if it was moved."""
        identity = read_json(self.path / IDENTITY, Identity)
        if identity is None:
            return None
        original = SweepDirectory(Path(identity["folder"]))
        other = read_json(original.path / IDENTITY, Identity)
        if other is None or other["token"] != identity["token"] or os.path.samefile(original.path, self.path):
            return None
        return original

    def launcher_alive(self, token: str) -> bool:
        """Return whether the process that took the sweep's lock with `token` still holds it."""
        if lock_token(self.path) != token:
            return False
        from filelock import FileLock, Timeout  # which takes longer than all of `status` on a small sweep

        try:
            with FileLock(self.path / ".lock", timeout=0):
                return False
        except Timeout:
            return True


def visible_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with the names or sizes of a checkpoint's files, or None."""
    manifest = read_json(checkpoint / "manifest.json")
    if not manifest:
        return "its manifest.json is missing or unreadable"
    for name, entry in manifest.items():
        try:
            if (checkpoint / name).stat().st_size != entry["bytes"]:
                return f"the size of {name} differs from its manifest"
        except (OSError, ValueError, KeyError, TypeError):
            return f"{name} is missing"
    return None


def now_on(folder: Path) -> float:
    """Return the seconds since the epoch by the clock of a folder's file system, which all nodes share.

    Without write access, use this machine's clock.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=".now-", dir=folder)
    except OSError:
        return time.time()
    try:
        os.close(handle)
        os.utime(name)
        return os.stat(name).st_mtime
    finally:
        os.unlink(name)


def this_node() -> str:
    """Return the name of this process's node; inside a job, SLURM's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def inside_job() -> bool:
    """Return whether this process was submitted to SLURM."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def job_id() -> str:
    """Return this SLURM job's id, as `<array>_<task>` in an array; outside SLURM, the process id."""
    if not inside_job():
        return os.environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def own_job() -> str | None:
    """Return the id of this process's SLURM job, or None outside SLURM."""
    return job_id() if inside_job() else None


def job_seconds(environment: Mapping[str, str]) -> float:
    """Read a SLURM job's time limit in seconds from `environment`; inf without a limit or before SLURM 23.02."""
    try:
        begins, ends = (int(environment[f"SLURM_JOB_{name}_TIME"]) for name in ("START", "END"))
    except (KeyError, ValueError):
        return math.inf
    return ends - begins


def job_restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def this_user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for a user
        name = f"user {os.getuid()}"
    return f"{name} on {this_node()}"


def yaml_or_empty(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping, empty if it is missing or unreadable."""
    with suppress(UserError):
        return read_document(path, dict[str, Any])
    return {}


def lock_token(path: Path) -> str:
    return str((read_json(path / ".lock.owner") or {}).get("token"))


def locked(path: Path, timeout: float, what: str) -> AbstractContextManager[object]:
    """Take a lock on `path`, and record this process as owner; raise Busy, naming `what`, after `timeout` seconds."""
    from filelock import FileLock, Timeout

    owner_file, lock = path.with_name(path.name + ".owner"), FileLock(path)
    try:
        held = lock.acquire(timeout=timeout)
    except Timeout as error:
        owner = read_json(owner_file) or {}
        raise Busy(f"{what} is held by process {owner.get('pid', '?')} on {owner.get('host', '?')}") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(
            f"{path.parent} is on a file system without locks on {this_node()} ({error.strerror}), which would let two "
            "workers train one run; mount it with locks (NFS: without nolock), or choose another output_root"
        ) from error
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "token": os.urandom(8).hex()}
        write_json(owner_file, owner, flush=False)
    except BaseException:
        lock.release()
        raise
    return held
