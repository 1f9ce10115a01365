"""Run directories: identity, frozen config, state and lock. The only writer of state.json.

State is what our own files say, never what a scheduler says. A lock is an advisory file lock, which the kernel drops
when its holder dies, so a kill -9 leaves nothing to clean. Of several ranks the first alone writes the state; another
one notes in failure.json what it died of.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ...train.config import RunConfig, from_dict, run_id, to_dict
from ...train.errors import UserError
from ...train.files import FAILURE, HALVED, create_json, read_json, write_atomic, write_json

ENDS = ("done", "failed", "diverged", "preempted", "cancelled")
OPEN = ("running", "preempted", "queued", "planned")  # states that a run leaves by itself
CANCEL = "cancel.json"
HEARTBEAT = "heartbeat"
# A thousand runs are planned in a second, and 4 ms a config in Python would be as much again to read them.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
STATES = ("planned", "queued", "running", "done", "failed", "diverged", "preempted", "cancelled")


class Busy(Exception):
    """Another process holds the lock; the message says which."""


class AtWork(UserError):
    """Another process holds the sweep."""


@dataclass(frozen=True)
class State:
    """What state.json holds."""

    state: str = "planned"
    attempt: int = 0  # times a worker has started on the run
    host: str | None = None
    job_id: str | None = None
    since: float = 0.0  # seconds since the epoch
    reason: str | None = None  # why, in a sentence, for everything but success


class RunDirectory:
    """One run on disk: outputs/<sweep>/runs/<run_id>."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name

    def freeze(self, config: RunConfig) -> None:
        """Writes config.yaml, all that a job will read; a run that has one keeps it, the science being the same."""
        if run_id(config) != self.run_id:
            raise ValueError(f"run {run_id(config)} does not belong in {self.path}")
        if not (self.path / "config.yaml").exists():
            write_atomic(self.path / "config.yaml", _dump(to_dict(config)))

    def refreeze(self, config: RunConfig, timeout: float = 60.0) -> None:
        """Writes config.yaml anew where it says something else of where or how: other ranks, another device.

        Raises:
            UserError: it says something else, and somebody has run it for the whole of `timeout` seconds.
        """
        if self.config() == config:
            return
        try:
            with self.lock(timeout):
                write_atomic(self.path / "config.yaml", _dump(to_dict(config)))
        except Busy as error:
            raise UserError(
                f"{error}, and until it ends its settings (parallel.* and the like) stay as they are; stop it, or wait"
            ) from error

    def config(self) -> RunConfig:
        """The frozen config.

        Raises:
            UserError: config.yaml is missing, unreadable, or no longer the run that the directory is named after.
        """
        path = self.path / "config.yaml"
        try:
            values = read_yaml(path)
            config = from_dict(RunConfig, values)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} cannot be read as a run's config ({error}); remove the run directory and sweep again"
            ) from error
        if run_id(config) != self.run_id:
            raise UserError(
                f"{path} describes run {run_id(config)} and not {self.run_id}; it was edited or written by another "
                "version, so remove the run directory and sweep again"
            )
        return config

    def state(self) -> State:
        """The run's state.

        A state.json that is missing or damaged says nothing. Then a run with a summary, which is written last of all,
        is `done`; any other is `planned`, for its checkpoints are found by whoever starts it.
        """
        values = read_json(self.path / "state.json") or {}
        known = {key: values[key] for key in State.__dataclass_fields__ if key in values}
        state = State(**known)
        whole = state.state in STATES and isinstance(state.attempt, int) and isinstance(state.since, int | float)
        if whole and known:
            return state
        return State() if self.summary() is None else State("done")

    def set_state(self, state: str, **changes: Any) -> State:
        """Replaces state.json atomically; fields that are not named keep their value, the reason does not.

        How a run ended is on the disk on return. That it waits or runs is not, for a power cut loses nothing with it.
        """
        if state not in STATES:
            raise ValueError(f"{state!r} is not a state")
        if state in ("planned", "queued"):
            self.forget_failure()
        values = {**asdict(self.state()), "reason": None, "since": now_on(self.path), **changes, "state": state}
        write_json(self.path / "state.json", values, flush=state in ENDS)
        return State(**values)

    def is_done(self) -> bool:
        """Our own marker: state `done` and a summary that can be read."""
        return self.state().state == "done" and self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        return read_json(self.path / "summary.json")

    @contextmanager
    def lock(self, timeout: float = 60.0) -> Iterator[None]:
        """Holds the run: one writer at a time.

        Raises:
            Busy: somebody else has held it for the whole of `timeout` seconds.
        """
        with _lock(self.path / ".lock", timeout, f"run {self.run_id}"):
            yield

    def reserve(self) -> None:
        """Sets some disk aside, so that a disk filled by the run still has room to say that it is full."""
        (self.path / ".reserve").write_bytes(b"\0" * 16384)

    def release(self) -> None:
        """Gives back what `reserve` set aside."""
        (self.path / ".reserve").unlink(missing_ok=True)

    def log(self, message: str, rank: int = 0) -> None:
        """Appends a line to log.txt, or to log-rank<r>.txt for any rank but the first, with the time."""
        name = f"log-rank{rank}.txt" if rank else "log.txt"
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def note_failure(self, reason: str, cause: str | None = None) -> None:
        """Leaves word of what ended an attempt, for whoever sets the state: any rank may, and the first word stays.

        `train` does the same with more that it knows, see `train/job/failure.py`.
        """
        create_json(self.path / FAILURE, {"reason": reason, "cause": cause})

    def failure(self) -> str | None:
        """What a rank noted of the newest attempt."""
        reason = (read_json(self.path / FAILURE) or {}).get("reason")
        return None if reason is None else str(reason)

    def failure_cause(self) -> str | None:
        """The cause that went with it, one of `retries.CAUSES`, where it was known."""
        cause = (read_json(self.path / FAILURE) or {}).get("cause")
        return None if cause is None else str(cause)

    def forget_failure(self) -> None:
        """For a new attempt."""
        (self.path / FAILURE).unlink(missing_ok=True)

    def ask_cancel(self, by: str) -> None:
        """Asks whoever trains the run, on whatever node, to save and end it; and everybody else not to start it."""
        write_json(self.path / CANCEL, {"by": by, "at": now_on(self.path)})

    def cancel_asked(self) -> str | None:
        """Who has asked to cancel the run; None where nobody has."""
        asked = read_json(self.path / CANCEL)
        if asked is None:
            return "somebody" if (self.path / CANCEL).exists() else None
        return str(asked.get("by", "somebody"))

    def forget_cancel(self) -> None:
        """The run may be trained again."""
        (self.path / CANCEL).unlink(missing_ok=True)

    def give_sign(self) -> None:
        """A sign of life of the process that trains the run, by the clock of the run's file system."""
        path = self.path / HEARTBEAT
        try:
            os.utime(path)  # without a time: on NFS the server's own
        except FileNotFoundError:
            path.touch()

    def last_sign(self) -> float | None:
        """When the last sign of life was given, by the same clock; None where nobody has the run."""
        try:
            with (self.path / HEARTBEAT).open("rb") as file:  # NFS asks its server again only where a file is opened
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return None

    def forget_signs(self) -> None:
        """Nobody has the run any longer."""
        (self.path / HEARTBEAT).unlink(missing_ok=True)

    def is_halved(self) -> bool:
        """Whether memory ran out once, and the micro-batch is halved from then on."""
        return (self.path / HALVED).exists()

    def last_metrics(self) -> dict[str, Any]:
        """The newest whole line of metrics.jsonl, read from the end of the file."""
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
            except ValueError:
                continue
            return record if isinstance(record, dict) else {}
        return {}


class SweepDirectory:
    """One sweep on disk: outputs/<sweep>."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path | str) -> SweepDirectory:
        """An existing sweep.

        Raises:
            UserError: the folder is not a sweep.
        """
        directory = cls(Path(path))
        if not (directory.path / "plan.json").is_file():
            raise UserError(f"{path} is not a sweep directory (it has no plan.json); give a folder that sweep.py wrote")
        return directory

    def run(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.path / "runs" / run_id)

    def plan(self) -> dict[str, Any]:
        """plan.json.

        Raises:
            UserError: it cannot be read.
        """
        plan = read_json(self.path / "plan.json")
        if plan is None or not isinstance(plan.get("runs"), list):
            raise UserError(f"{self.path / 'plan.json'} cannot be read; run sweep.py again to write it anew")
        return plan

    def runs(self) -> list[RunDirectory]:
        """The runs of the current plan, in its order."""
        return [self.run(run["run_id"]) for run in self.plan()["runs"]]

    def settings(self) -> dict[str, Any]:
        """sweep.yaml: the resolved config that made the current plan, and where it came from."""
        path = self.path / "sweep.yaml"
        try:
            return dict(read_yaml(path))
        except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); run sweep.py again to write it anew") from error

    @contextmanager
    def lock(self, timeout: float = 0.0) -> Iterator[None]:
        """Holds the sweep while runs are planned and launched.

        Args:
            timeout: seconds to wait for somebody else who holds it.

        Raises:
            AtWork: another process is at work in this folder.
            UserError: the folder cannot be written.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_lock(self.path / ".lock", timeout, "sweep"))
            except Busy as error:
                raise AtWork(
                    f"{self.path} is in use ({error}); wait for it, or choose another folder with sweep=NAME"
                ) from error
            except OSError as error:
                raise UserError(
                    f"output_root is {str(self.path.parent)!r}, which cannot be written ({error.strerror or error}); "
                    "name a folder that can"
                ) from error
            yield

    def launcher_alive(self, token: str) -> bool:
        """Whether the launcher that wrote `token` still holds the sweep."""
        owner = read_json(self.path / ".lock.owner") or {}
        if owner.get("token") != token:
            return False
        from filelock import FileLock, Timeout  # which takes longer than all of `status` on a small sweep

        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False


def now_on(folder: Path) -> float:
    """Seconds since the epoch by the clock of a folder's file system, which is the same for all nodes that share it.

    It is when a file was changed that is touched there just now. Who may write nothing there gets this machine's clock.
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
    """The node of this process, as SLURM names it where this is a job of SLURM's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def this_user() -> str:
    """Who runs this process, and where."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for a user
        name = f"user {os.getuid()}"
    return f"{name} on {this_node()}"


def read_yaml(path: Path) -> Any:
    """What a YAML file of a sweep holds; the errors are those of reading and of YAML."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)


def yaml_or_empty(path: Path) -> dict[str, Any]:
    """A YAML mapping, or nothing where there is none."""
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        value = read_yaml(path)
        if isinstance(value, dict):
            return value
    return {}


def lock_token(path: Path) -> str:
    """The token that the current holder of a sweep's lock wrote."""
    return str((read_json(path / ".lock.owner") or {}).get("token"))


def _dump(config: dict[str, Any]) -> str:
    return str(yaml.dump(config, Dumper=_DUMPER, sort_keys=False))


@contextmanager
def _lock(path: Path, timeout: float, what: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    owner_file = path.with_name(path.name + ".owner")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout)
    except Timeout as error:
        owner = read_json(owner_file) or {}
        raise Busy(f"{what} is held by process {owner.get('pid', '?')} on {owner.get('host', '?')}") from error
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "token": os.urandom(8).hex()}
        write_json(owner_file, owner, flush=False)
        yield
    finally:
        lock.release()
