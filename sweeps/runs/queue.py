"""A queue of units that workers go through, on this machine or on many hosts: each unit is one worker's at a time.

Special here:
- the truth is one file, journal.jsonl: one line per claim, release and end, appended whole under one lock;
- a reader remembers how far it has read: a claim costs the same with ten thousand units as with ten;
- a worker holds a file lock for its life, and its claims name it. After a kill -9 the claim stands and the lock is
  free; whoever sees that first settles the unit;
- a branch is handed out once its trunk's checkpoint is there, or when nothing will bring it any more;
- a node that a unit avoids does not get it for AVOID_SECONDS; after that any node does, so that no queue starves.

Where a shared file system carries no locks from node to node, a run's signs of life (`states.held`) keep a second
worker out.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...train.files import read_document, write_json
from . import states
from .attempts import Policy
from .directory import RunDirectory, SweepDirectory, own_job, this_node
from .forms import FolderName
from .states import Death

CONTENTS, JOURNAL = "units.json", "journal.jsonl"
AVOID_SECONDS = 900.0  # counted from when the unit can be claimed again


@dataclass(frozen=True)
class Unit:
    """What one job trains."""

    runs: tuple[FolderName, ...]  # run ids: one, or of an earlier version several that it trained together

    @property
    def name(self) -> str:
        """For people: the first run, and how many more."""
        return self.runs[0] + (f"+{len(self.runs) - 1}" if len(self.runs) > 1 else "")


@dataclass(frozen=True)
class Contents:
    """What units.json holds."""

    units: list[Unit]
    parents: dict[str, tuple[FolderName, int]]


@dataclass(frozen=True)
class Claim:
    """Who has a unit."""

    worker: str  # names its lock file, and no other process ever
    place: int
    host: str
    job: str | None  # its SLURM job; None on this machine


@dataclass(frozen=True)
class Hold:
    """What keeps a released unit from being claimed."""

    until: float = 0.0  # by the file system's clock
    avoid: tuple[str, ...] = ()  # nodes


FREE = Hold()


class Queue:
    """Units and who has them; every process opens its own on the same folder."""

    def __init__(
        self, sweep: SweepDirectory, folder: Path, units: Sequence[Unit], parents: Mapping[str, tuple[str, int]]
    ) -> None:
        self.units, self.parents = tuple(units), dict(parents)
        self.sweep, self.folder = sweep, folder
        self.worker = f"{this_node()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._home = {name: index for index, unit in enumerate(self.units) for name in unit.runs}
        self._lock: int | None = None  # descriptor of this worker's lock, from its first claim on
        self._dead: set[str] = set()  # workers; none comes back to life
        # What the journal says, as far as it has been read.
        self._offset = 0
        self._left = list(range(len(self.units)))  # can be claimed, or will be; in order
        self._open: dict[int, Claim] = {}
        self._ended: set[int] = set()
        self._holds: dict[int, Hold] = {}
        self._claims = Counter[int]()  # that each place has made

    @classmethod
    def create(
        cls, sweep: SweepDirectory, folder: Path, units: Sequence[Unit], parents: Mapping[str, tuple[str, int]]
    ) -> Queue:
        """A new queue in a folder of its own; units in the order in which they start.

        `parents` are of every branch, by run id: its trunk's run id, and the step whose checkpoint it begins from.
        """
        (folder / "workers").mkdir(parents=True, exist_ok=True)
        (folder / JOURNAL).touch()
        write_json(folder / CONTENTS, {"units": [asdict(unit) for unit in units], "parents": parents})
        return cls(sweep, folder, units, parents)

    @classmethod
    def open(cls, sweep: SweepDirectory, folder: Path) -> Queue:
        contents = read_document(folder / CONTENTS, Contents)
        return cls(sweep, folder, contents.units, contents.parents)

    @classmethod
    def all_of(cls, sweep: SweepDirectory) -> list[Queue]:
        """The queues of a sweep's SLURM jobs."""
        return [cls.open(sweep, path.parent) for path in sorted((sweep.path / "jobs").glob(f"queue-*/{CONTENTS}"))]

    def close(self) -> None:
        """Releases this worker's lock: units that it has count as lost."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self, place: int, host: str | None = None) -> Unit | None:
        """The first unit that can start, or None at the moment; with a `host` those that avoid it are passed over."""
        if self._lock is None:
            self._lock = _locked(self._lock_of(self.worker), fcntl.LOCK_EX)
        with self._mutex():
            index = self._next(host)
            if index is None:
                return None
            claim = Claim(self.worker, place, host or this_node(), own_job())
            self._append({"event": "claim", "unit": index, "runs": self.units[index].name, **asdict(claim)})
            return self.units[index]

    def settle(self, unit: Unit, policy: Policy, death: Death) -> None:
        """Ends or releases a unit of this process, by what became of its runs."""
        states.settle_dead(self._runs(self._index[unit]), policy, death)
        with self._mutex():
            if self._may_settle(index := self._index[unit]):
                self._decide(index, policy)

    def settle_lost(self, unit: Unit, claim: Claim, policy: Policy, death: Death) -> bool:
        """The same for a unit whose worker died; False where somebody was faster."""
        index = self._index[unit]
        with self._mutex():
            if self._open.get(index) != claim or not states.settle_dead(self._runs(index), policy, death):
                return False
            self._decide(index, policy)
            return True

    def left(self, host: str | None = None) -> list[Unit]:
        """Units that nobody has claimed and, with a host, that do not avoid it."""
        self._refresh()
        now = self._now() if host is not None and self._holds else 0.0
        return [self.units[index] for index in self._left if not self._avoids(index, host, now)]

    def ready(self) -> list[Unit]:
        self._refresh()
        now = self._now() if self._holds else 0.0
        free = [index for index in self._left if self._holds.get(index, FREE).until <= now]
        return [self.units[index] for index in free if self._ready(index)]

    def ready_in(self) -> float | None:
        """Seconds until the wait of one of the units left is over."""
        self._refresh()
        now = self._now() if self._holds else 0.0
        return min((max(0.0, self._holds.get(index, FREE).until - now) for index in self._left), default=None)

    def avoided(self) -> tuple[str, ...]:
        """Nodes that a worker added for the first unit left should exclude."""
        self._refresh()
        hold = self._holds.get(self._left[0], FREE) if self._left else FREE
        return hold.avoid if self._now() < hold.until + AVOID_SECONDS else ()

    def was_claimed(self) -> bool:
        self._refresh()
        return bool(self._claims)

    def claimed(self, place: int) -> int:
        self._refresh()
        return self._claims[place]

    def running(self) -> dict[Unit, int]:
        """Units at work, with their places."""
        self._refresh()
        return {self.units[index]: claim.place for index, claim in self._open.items() if self._alive(claim.worker)}

    def lost(self) -> dict[Unit, Claim]:
        """Units whose worker died before their end."""
        self._refresh()
        return {self.units[index]: claim for index, claim in self._open.items() if not self._alive(claim.worker)}

    def _next(self, host: str | None) -> int | None:
        now = self._now() if self._holds else 0.0
        waiting = None  # the first that waits for a trunk alone
        for index in self._left:
            if self._holds.get(index, FREE).until > now or self._avoids(index, host, now):
                continue
            if self._ready(index):
                return index
            waiting = index if waiting is None else waiting
        # Nobody works, and nobody will, who could bring what it waits for: it says so in its state.
        return waiting if not self._open and not self._holds else None

    def _ready(self, index: int) -> bool:
        for name in self.units[index].runs:
            if (begins := self.parents.get(name)) is None:
                continue
            trunk, step = begins
            home = self._home.get(trunk)
            if home is None or home == index or home in self._ended:
                continue
            if not can_begin(self.sweep.run(name), self.sweep.run(trunk), step):
                return False
        return True

    def _avoids(self, index: int, host: str | None, now: float) -> bool:
        hold = self._holds.get(index, FREE)
        return host in hold.avoid and now < hold.until + AVOID_SECONDS

    def _may_settle(self, index: int) -> bool:
        """Whether this worker has a unit, or no live one."""
        claim = self._open.get(index)
        return claim is not None and (claim.worker == self.worker or not self._alive(claim.worker))

    def _runs(self, index: int) -> list[RunDirectory]:
        return [self.sweep.run(name) for name in self.units[index].runs]

    def _decide(self, index: int, policy: Policy) -> None:
        going = states.runs_to_go_on(self._runs(index), policy, self._now())
        if not going:
            self._end(index)
            return
        avoid = {node for _, decision in going for node in decision.avoid}
        self._release(index, max(decision.wait_seconds for _, decision in going), sorted(avoid))
        for run, decision in going:
            states.queue_again(run, decision)

    def _end(self, index: int) -> None:
        self._append({"event": "end", "unit": index})

    def _release(self, index: int, wait_seconds: float, avoid: Sequence[str]) -> None:
        until = self._now() + wait_seconds if wait_seconds > 0 or avoid else 0.0
        self._append({"event": "release", "unit": index, "until": until, "avoid": list(avoid)})

    # The journal

    def _append(self, event: dict[str, Any]) -> None:
        """Adds a line, whole or not at all, and reads it."""
        line = json.dumps({"at": round(self._now(), 3), **event}).encode() + b"\n"
        descriptor = os.open(self.folder / JOURNAL, os.O_WRONLY | os.O_APPEND)
        try:
            if os.fstat(descriptor).st_size > self._offset:  # a line torn by a kill
                os.ftruncate(descriptor, self._offset)
            written = os.write(descriptor, line)
            if written < len(line):
                os.ftruncate(descriptor, self._offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / JOURNAL))
        finally:
            os.close(descriptor)
        self._refresh()

    def _refresh(self) -> None:
        """Reads what was added to the journal."""
        with (self.folder / JOURNAL).open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            # Of a line that somebody damaged the worst is that a unit is claimed again, and its runs are found done.
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                self._apply(json.loads(line))

    def _apply(self, event: dict[str, Any]) -> None:
        index, kind, hold = event["unit"], event["event"], msgspec.convert(event, Hold)
        if kind == "claim":
            claim = msgspec.convert(event, Claim)
            self._left.remove(index)
            self._holds.pop(index, None)
            self._open[index] = claim
            self._claims[claim.place] += 1
            return
        del self._open[index]
        if kind == "end":
            self._ended.add(index)
            return
        bisect.insort(self._left, index)
        if hold != FREE:
            self._holds[index] = hold

    def _now(self) -> float:
        os.utime(self.folder / JOURNAL)
        return (self.folder / JOURNAL).stat().st_mtime

    # Locks

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        descriptor = _locked(self.folder / ".lock", fcntl.LOCK_EX)
        try:
            self._refresh()
            yield
        finally:
            os.close(descriptor)

    def _alive(self, worker: str) -> bool:
        if worker == self.worker:
            return self._lock is not None
        if worker in self._dead:
            return False
        try:
            descriptor = _locked(self._lock_of(worker), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        os.close(descriptor)
        self._dead.add(worker)
        return False

    def _lock_of(self, worker: str) -> Path:
        return self.folder / "workers" / f"{worker}.lock"


def can_begin(branch: RunDirectory, trunk: RunDirectory, step: int) -> bool:
    """Whether a branch finds a checkpoint at `step` of its trunk, or one of its own."""
    return step in trunk.saved_steps() or any(own >= step for own in branch.saved_steps())


def _locked(path: Path, how: int) -> int:
    """A descriptor that holds a file lock until it is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
