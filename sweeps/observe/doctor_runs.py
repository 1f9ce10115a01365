"""What may be wrong with the directory of one run, and how it is mended.

Special here:
- everything is looked at while the run's lock is held, so nobody trains meanwhile; a run that is at work is left alone;
- what others write beside the lock (a wish to cancel, a look at the clock) is judged by its age;
- what is removed is of no use to training: a file that cannot be read, a save that was not finished, a torn line. A run
  that has lost its summary is `planned` again, and its newest checkpoint makes a new one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...train.errors import UserError
from ...train.files import read_json, write_atomic
from ..runs import attempts, states
from ..runs.attempts import Policy
from ..runs.directory import OPEN, STATES, Busy, RunDirectory, now_on

OLD_SECONDS = 600.0  # after which a temporary file is nobody's
TEMPORARY = re.compile(r"^\.(now-|.+\.)[a-z0-9_]{8}$")  # as tempfile names them, here and in train/files.py
STEP = re.compile(r"^step_(\d+)(\.request)?$")


@dataclass(frozen=True)
class Fault:
    """Something that is wrong, and what mends it."""

    kind: str
    what: str  # in a sentence
    where: Path
    mend: Callable[[], object] | None  # None: a person must
    how: str  # what `mend` does, or what a person may do
    severity: str = "error"  # error | note


def faults_of(run: RunDirectory, policy: Policy, deep: bool, evaluated: bool) -> Iterator[Fault]:
    """What is wrong with a run; its lock is held from one fault to the next.

    Args:
        run: its directory.
        policy: the sweep's.
        deep: whether checkpoints are read and their sums checked; of a run that is to go on they are not, for that
            takes minutes, and whoever is to train it waits for the lock.
        evaluated: whether the sweep wants its runs scored.
    """
    try:
        with states.hold_idle(run, policy):
            for check in (_config, _state, _leftovers, _lines):
                yield from check(run)
            yield from _checkpoints(run, deep and run.state().state not in OPEN)
            yield from _result(run, evaluated)
            yield from _scores(run)
    except Busy:
        return


def old_temporaries(folder: Path, now: float) -> Iterator[Fault]:
    """Files and folders in `folder` that a writer left behind who was killed before the rename."""
    for path in sorted(folder.glob(".*")):
        if not TEMPORARY.match(path.name):
            continue
        try:
            age = now - path.stat().st_mtime
        except OSError:  # renamed just now
            continue
        if age > OLD_SECONDS:
            yield Fault(
                "temporary", f"a write was killed {age / 60:.0f} minutes ago and left {path.name}", path,
                partial(remove, path), "removed",
            )  # fmt: skip


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unreadable(path: Path, how: str) -> Iterator[Fault]:
    """A file that is there and holds no JSON object."""
    if path.exists() and read_json(path) is None:
        yield Fault("unreadable", f"{path.name} cannot be read", path, lambda: remove(path), how)


def _config(run: RunDirectory) -> Iterator[Fault]:
    try:
        run.config()
    except UserError as error:
        yield Fault("config", str(error), run.path / "config.yaml", None, "nothing is done to such a run")


def _state(run: RunDirectory) -> Iterator[Fault]:
    path = run.path / "state.json"
    values = read_json(path)
    if values is None or values.get("state") not in STATES:
        known = run.state()
        what = "state.json cannot be read" if path.exists() else "state.json is missing"
        yield Fault(
            "state", what, path, lambda: states.restore(run),
            f"written anew as {known.state}, for {_because(run)}",
        )  # fmt: skip
    asked = run.cancel_asked()
    state = run.state().state
    if asked is not None and state == "done":
        yield Fault("cancel", f"{asked} asked to cancel a run that is done", run.path, run.forget_cancel, "forgotten")
    elif asked is not None and state != "cancelled":
        yield Fault(
            "cancel", f"{asked} asked to cancel the run, and nobody trains it", run.path,
            lambda: states.cancel(run, asked), "cancelled",
        )  # fmt: skip


def _because(run: RunDirectory) -> str:
    return "its summary is there" if run.summary() is not None else "it has no summary, and goes on from a checkpoint"


def _leftovers(run: RunDirectory) -> Iterator[Fault]:
    now = now_on(run.path)
    for folder in (run.path, run.path / "eval"):
        yield from old_temporaries(folder, now)
    for name in ("failure.json", "cancel.json", attempts.UNDER_WAY):
        yield from unreadable(run.path / name, "removed")
    if (run.path / ".reserve").exists():
        yield Fault("temporary", "disk is set aside for a run that nobody trains", run.path / ".reserve",
                    run.release, "given back")  # fmt: skip
    if run.last_sign() is not None and run.state().state != "running":
        yield Fault("heartbeat", "a sign of life is left of a run that nobody trains", run.path / "heartbeat",
                    run.forget_signs, "removed")  # fmt: skip


def _lines(run: RunDirectory) -> Iterator[Fault]:
    for name in ("metrics.jsonl", attempts.LINES):
        path = run.path / name
        try:
            content = path.read_bytes()
        except OSError:
            continue
        lines = content.split(b"\n")
        torn = lines.pop() != b""
        whole = [line for line in lines if _is_record(line)]
        if bad := len(lines) - len(whole) + torn:
            text = b"".join(line + b"\n" for line in whole).decode()
            yield Fault(
                "torn", f"{bad} of the lines of {name} cannot be read", path,
                partial(write_atomic, path, text), "cut out; every other line stays",
            )  # fmt: skip


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _checkpoints(run: RunDirectory, deep: bool) -> Iterator[Fault]:
    folder = run.path / "checkpoints"
    for path in sorted(folder.glob(".step_*")):  # the lock is held: nobody writes one
        yield Fault("half-written", f"a save was killed and left {path.name}", path,
                    partial(remove, path), "removed")  # fmt: skip
    final = (run.summary() or {}).get("checkpoint")
    for path in sorted(folder.glob("step_*")):
        if (problem := _damage(path, deep)) is None:
            continue
        if run.is_done() and final == f"checkpoints/{path.name}":
            continue  # see `_result`
        yield Fault("half-written", f"checkpoint {path.name} is damaged: {problem}", path,
                    partial(remove, path), "removed; the run goes on from the one before")  # fmt: skip


def _damage(checkpoint: Path, deep: bool) -> str | None:
    """What is wrong with a checkpoint, by the names and sizes of its files, or also by their sums."""
    if deep:
        from ...train.checkpoint.checkpoint import damage

        return damage(checkpoint)
    manifest = read_json(checkpoint / "manifest.json")
    if not manifest:
        return "its manifest.json is missing or unreadable"
    for name, entry in manifest.items():
        try:
            if (checkpoint / name).stat().st_size != entry["bytes"]:
                return f"{name} has another size than its manifest says"
        except (OSError, KeyError, TypeError):
            return f"{name} is missing"
    return None


def _result(run: RunDirectory, evaluated: bool) -> Iterator[Fault]:
    """A run that is done has a summary, and the checkpoint that this names."""
    path = run.path / "summary.json"
    if path.exists() and run.summary() is None:
        yield Fault("unreadable", "summary.json cannot be read", path, lambda: remove(path),
                    "removed; the newest checkpoint makes a new one")  # fmt: skip
    if run.state().state != "done":
        return
    summary = run.summary()
    if summary is None:
        yield Fault(
            "result", "it is done and has no summary", path,
            lambda: states.plan(run, "its summary was lost, and is made anew"),
            f"planned again, from its newest checkpoint: isoflop retry {run.path.parent.parent} {run.run_id}",
        )  # fmt: skip
        return
    checkpoint = run.path / str(summary.get("checkpoint"))
    problem = _damage(checkpoint, deep=False) if checkpoint.is_dir() else "it is gone"
    if problem is not None:
        needed = evaluated and not (run.path / "eval" / f"step_{summary.get('step')}.json").exists()
        yield Fault(
            "result", f"its last checkpoint cannot be used ({problem})", checkpoint, None,
            f"its losses stand; to train the run again, remove {path} and ask the doctor again",
            "error" if needed else "note",
        )  # fmt: skip


def _scores(run: RunDirectory) -> Iterator[Fault]:
    done = run.is_done()
    for path in sorted((run.path / "eval").glob("*.json")):
        if not STEP.match(path.stem):
            continue
        if read_json(path) is None:
            yield Fault("unreadable", f"eval/{path.name} cannot be read", path, partial(remove, path),
                        "removed; the run is scored again when the sweep goes on")  # fmt: skip
        elif not done:
            yield Fault("scores", f"eval/{path.name} scores a run that is {run.state().state}", path,
                        partial(remove, path), "removed; the run is scored when it is done")  # fmt: skip
