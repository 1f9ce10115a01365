"""A run's journal: each event is one line of runs/<run_id>/events.jsonl, and the run's state is a fold over them.

- Only the process that holds the run's lock appends, and a line is written whole or not at all.
- state.json shows the current state to users, and is rewritten after every event.
- Earlier versions kept other files, which the first event of such a run adopts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ...train.errors import UserError
from ...train.files import read_document, read_json, read_json_lines, write_json
from ...train.job.failure import Cause
from ..terminal import printable
from .attempts import CAUSES, Attempt, with_waste
from .forms import Amount, Count, Summary

JOURNAL, VIEW = "events.jsonl", "state.json"
OLD_LINES, OLD_OPEN = "attempts.jsonl", "attempt.json"  # of earlier versions
Name = Literal["planned", "queued", "running", "done", "failed", "diverged", "preempted", "cancelled"]
STATES: tuple[str, ...] = get_args(Name)
ENDS_AS: dict[str, Name] = {
    "done": "done", "preempted": "preempted", "time_limit": "preempted", "cancelled": "cancelled",
    "diverged": "diverged",
}  # fmt: skip  # the state in which a cause ends a run; any other is `failed`


@dataclass(frozen=True)
class State:
    """What state.json holds."""

    state: Name
    attempt: Count = 0  # times a worker has started on the run
    host: str | None = None
    job_id: str | None = None
    since: float = 0.0  # seconds since the epoch
    reason: str | None = None  # why, in a sentence, for everything but success

    def __post_init__(self) -> None:
        for name in ("host", "job_id", "reason"):
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, printable(text))

    def __str__(self) -> str:
        return self.state if self.reason is None else f"{self.state}: {self.reason}"


class Event(msgspec.Struct, kw_only=True, tag_field="event", tag=str.lower, omit_defaults=True):
    """A line of the journal."""

    at: Amount  # seconds since the epoch, by the file system's clock


class Planned(Event):
    """The run is part of the plan."""

    reason: str | None = None


class Queued(Event):
    """Workers were started that can take the run."""


class Started(Event):
    """An attempt begins."""

    attempt: Count  # counts from 1
    host: str | None = None  # the node of its first rank, as SLURM names it; None: it could not begin
    job_id: str | None = None
    machine: str | None = None  # whose kernel keeps its lock
    steps: Count = 0  # of the whole run
    begins: Count = 0  # step of the run's own first: 0, or where a branch leaves its trunk
    first_step: Count = 0
    metrics_bytes: Count = 0  # size of metrics.jsonl: what is beyond is this attempt's
    flops_per_step: Amount = 0.0
    gpus: Amount = 0.0
    share: Amount = 1.0  # of its process, which earlier versions divided between runs


class Stopped(Event):
    """The attempt under way has ended."""

    attempt: Count
    state: Name
    cause: str  # one of attempts.CAUSES
    ended: Amount  # of an attempt that was killed: its last sign of life
    reason: str | None = None
    last_step: Count = 0
    saved_step: Count = 0
    at_fault: tuple[str, ...] = ()  # nodes, if its ranks were on several
    cpu_seconds: Amount | None = None  # see Attempt


class Failed(Event):
    """A run that was stopped does not go on."""

    reason: str


class Cancelled(Event):
    """A run that no worker held was cancelled."""

    reason: str


class Reset(Event):
    """A user asked for another try: the run is planned again, with a new budget of retries."""

    by: str


class Scoring(Event):
    """A worker begins to score the run."""


class Adopted(Event):
    """The state in which an earlier version left the run."""

    state: State
    open: Started | None = None


_DECODER = msgspec.json.Decoder(Planned | Queued | Started | Stopped | Failed | Cancelled | Reset | Scoring | Adopted)


@dataclass(frozen=True)
class RunRecord:
    """A run's state and attempts, from its journal."""

    state: State
    attempts: tuple[Attempt, ...] = ()  # that have ended, oldest first
    open: Started | None = None  # the attempt under way
    budget: int = 0  # times that a user has asked for a retry
    scorings: int = 0  # begun since then

    @property
    def recent(self) -> list[Attempt]:
        """Return the attempts since a user last asked for a retry."""
        return [attempt for attempt in self.attempts if attempt.budget == self.budget]

    @property
    def next_attempt(self) -> int:
        return max([self.state.attempt, *(attempt.attempt for attempt in self.attempts)]) + 1


def fold(events: Iterable[Event], before: RunRecord) -> RunRecord:
    """Return the record of a run after `events` (oldest first), given its record `before` them."""
    for event in events:
        before = _apply(before, event)
    return replace(before, attempts=tuple(with_waste(before.attempts)))


def _apply(record: RunRecord, event: Event) -> RunRecord:
    """Return the record after an event; an event that contradicts the record changes nothing."""
    state = record.state

    def to(name: Name, reason: str | None = None, **changes: Any) -> State:
        return replace(state, state=name, reason=reason, since=event.at, **changes)

    match event:
        case Planned() if record.open is None:
            return replace(record, state=to("planned", event.reason, job_id=None))
        case Queued() if state.state == "planned":
            return replace(record, state=to("queued", host=None, job_id=None))
        case Started() if record.open is None and event.attempt >= record.next_attempt and state.state != "done":
            running = to("running", attempt=event.attempt, host=event.host, job_id=event.job_id)
            return replace(record, state=running, open=event)
        case Stopped() if record.open is not None and event.attempt == record.open.attempt:
            ended = _ended(record.open, event, record.budget)
            return replace(record, state=to(event.state, event.reason), attempts=(*record.attempts, ended), open=None)
        case Failed() if state.state == "preempted":
            return replace(record, state=to("failed", event.reason))
        case Cancelled() if record.open is None and state.state != "done":
            return replace(record, state=to("cancelled", event.reason))
        case Reset() if record.open is None:
            planned = state if state.state == "done" else to("planned", host=None, job_id=None)
            return replace(record, state=planned, budget=record.budget + 1, scorings=0)
        case Scoring():
            return replace(record, scorings=record.scorings + 1)
        case Adopted():
            return replace(record, state=event.state, open=event.open)
    return record


def _ended(start: Started, stop: Stopped, budget: int) -> Attempt:
    ended, last = max(start.at, stop.ended), max(start.first_step, stop.last_step)
    return Attempt(
        attempt=start.attempt,
        began=start.at,
        ended=ended,
        seconds=ended - start.at,
        host=start.host,
        job_id=start.job_id,
        cause=stop.cause if stop.cause in CAUSES else str(Cause.UNKNOWN),
        reason=stop.reason,
        first_step=start.first_step,
        last_step=last,
        saved_step=stop.saved_step,
        flops=start.flops_per_step * (last - start.first_step),
        flops_wasted=0.0,
        gpus=start.gpus,
        share=start.share,
        at_fault=stop.at_fault,
        cpu_seconds=stop.cpu_seconds,
        budget=budget,
    )


def read_record(folder: Path) -> RunRecord:
    """Return the record of the run in `folder` from its journal, ignoring damaged lines."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines()
    except OSError:
        return read_old(folder)
    attempts, budget = read_old_attempts(folder)
    events = filter(None, map(read_event, lines))
    return fold(events, RunRecord(State("planned"), tuple(attempts), budget=budget))


def read_event(line: bytes) -> Event | None:
    """Parse a line of the journal; return None if it is damaged."""
    with suppress(msgspec.MsgspecError, RecursionError):
        return _DECODER.decode(line)
    return None


def append(folder: Path, *events: Event, flush: bool = False) -> RunRecord:
    """Append events to a run's journal, all or none, and rewrite state.json; the caller holds the run's lock.

    Args:
        events: oldest first.
        flush: wait for the disk, so that a power cut loses none of them.

    Raises:
        OSError: the events could not be written, and the journal is as before.
    """
    path = folder / JOURNAL
    if not path.exists() and (old := read_old(folder)) != RunRecord(State("planned")):
        events = (Adopted(at=events[0].at, state=old.state, open=old.open), *events)
    _append_lines(path, b"".join(msgspec.json.encode(event) + b"\n" for event in events), flush)
    record = read_record(folder)
    try:
        write_view(folder, record)
    except OSError:  # a full disk: without a view the journal is read, and the next event writes the view again
        with suppress(OSError):
            (folder / VIEW).unlink(missing_ok=True)
    return record


def write_view(folder: Path, record: RunRecord) -> None:
    write_json(folder / VIEW, asdict(record.state), flush=False)


def _append_lines(path: Path, lines: bytes, flush: bool) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        whole = os.pread(descriptor, size, 0).rfind(b"\n") + 1
        if whole < size:  # a line torn by a kill
            os.ftruncate(descriptor, whole)
        if os.pwrite(descriptor, lines, whole) < len(lines):
            os.ftruncate(descriptor, whole)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if flush:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_old(folder: Path) -> RunRecord:
    """Build a run's record from the files of an earlier version; its state is `planned` if there are none."""
    attempts, budget = read_old_attempts(folder)
    state, start = State("planned" if read_json(folder / "summary.json", Summary) is None else "done"), None
    with suppress(UserError):
        state = read_document(folder / VIEW, State)
    with suppress(UserError, KeyError, msgspec.ValidationError):
        values = read_document(folder / OLD_OPEN, dict[str, Any])
        start = msgspec.convert(values | {"event": "started", "at": values["began"]}, Started)
        if start.attempt in {attempt.attempt for attempt in attempts}:
            start = None
    if start is None and state.state == "running":  # attempt.json is lost, as after a power cut
        start = Started(at=state.since, attempt=state.attempt, host=state.host, job_id=state.job_id)
    return RunRecord(state, tuple(attempts), start, budget)


def read_old_attempts(folder: Path) -> tuple[list[Attempt], int]:
    """Return the attempts of attempts.jsonl, oldest first, and how often a user asked for a retry."""
    attempts: dict[int, Attempt] = {}
    budget = 0
    if not (path := folder / OLD_LINES).exists():
        return [], 0
    for line in read_json_lines(path):
        if line.get("event") == "retry":
            budget += 1
            continue
        values = {"cause": str(Cause.UNKNOWN), **line, "budget": budget, "at_fault": line.get("at_fault") or ()}
        with suppress(msgspec.ValidationError, RecursionError):
            attempt = msgspec.convert(values, Attempt)
            if attempt.cause in CAUSES:
                attempts.setdefault(attempt.attempt, attempt)
    return with_waste(list(attempts.values())), budget
