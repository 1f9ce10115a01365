"""The queue of one launch on this machine: a folder where worker processes claim units, each unit once.

Special here:
- a claim is an empty file beside a lock that its owner holds while it works, so the kernel says who is alive: after a
  kill -9 the claim stands and the lock is free, and the launcher settles that unit's runs and ends it;
- a branch is handed out once its trunk's checkpoint is there, while the trunk still trains; or when nothing will bring
  that checkpoint any more, and then the branch says in its state what it lacks;
- a unit is tried once a launch. What failed is tried again by the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from ..train.files import read_json, write_json
from .packing import Unit
from .runs import SweepDirectory
from .trunks import can_start

CONTENTS = "units.json"


class Queue:
    """The units of one launch and who has them. Launcher and workers each open their own on the same folder."""

    def __init__(
        self, sweep: SweepDirectory, folder: Path, units: Sequence[Unit], parents: Mapping[str, tuple[str, int]]
    ) -> None:
        self.units, self.parents = tuple(units), dict(parents)
        self._sweep, self.folder = sweep, folder
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._home = {name: index for index, unit in enumerate(self.units) for name in unit.runs}
        self._mine: dict[int, FileLock] = {}  # what this process has claimed

    @classmethod
    def create(
        cls, sweep: SweepDirectory, folder: Path, units: Sequence[Unit], parents: Mapping[str, tuple[str, int]]
    ) -> Queue:
        """A new queue.

        Args:
            sweep: whose runs the units train.
            folder: of this launch alone; created where it is missing.
            units: in the order in which they are to start.
            parents: of every branch, by run id: its trunk's run id, and the step whose checkpoint it begins from.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            folder / CONTENTS, {"units": [{"how": unit.how, "runs": unit.runs} for unit in units], "parents": parents}
        )
        return cls(sweep, folder, units, parents)

    @classmethod
    def open(cls, sweep: SweepDirectory, folder: Path) -> Queue:
        """The queue that `create` has written."""
        contents = read_json(folder / CONTENTS)
        if contents is None:
            raise ValueError(f"{folder} holds no queue")
        units = [Unit(unit["how"], tuple(unit["runs"])) for unit in contents["units"]]
        return cls(sweep, folder, units, {name: (trunk, step) for name, (trunk, step) in contents["parents"].items()})

    def claim(self, place: int) -> Unit | None:
        """The first unit, in order, that nobody has had and that can start; it is this process' until `end`.

        None where there is none at the moment; `left` says whether there will be.
        """
        with self._mutex():
            claims, ended = self._claims(), self._ended()
            left = [index for index in range(len(self.units)) if index not in claims and index not in ended]
            index = next((index for index in left if self._ready(index, ended)), None)
            if index is None and left and claims.keys() <= ended:
                index = left[0]  # nobody works who could bring what it waits for
            if index is None:
                return None
            lock = self._lock(index)
            lock.acquire(timeout=0)
            self._mine[index] = lock
            (self.folder / f"{index:05d}.claim.{place}").touch()
            return self.units[index]

    def end(self, unit: Unit) -> None:
        """Marks a unit as over, whatever came of its runs; by its worker, or by the launcher for one that is lost."""
        index = self._index[unit]
        (self.folder / f"{index:05d}.ended").touch()
        if (lock := self._mine.pop(index, None)) is not None:
            lock.release()

    def left(self) -> list[Unit]:
        """Units that nobody has claimed, in order."""
        taken = self._claims().keys() | self._ended()
        return [unit for index, unit in enumerate(self.units) if index not in taken]

    def claimed(self, place: int) -> int:
        """Units that this place has ever claimed."""
        return sum(claimed == place for claimed in self._claims().values())

    def running(self) -> dict[Unit, int]:
        """Units at work, and the place of each."""
        with self._mutex():
            return {self.units[index]: place for index, place in self._open().items() if self._alive(index)}

    def lost(self) -> list[Unit]:
        """Units whose worker died before their end, for the launcher to settle their runs and to `end`."""
        with self._mutex():
            return [self.units[index] for index in self._open() if not self._alive(index)]

    def _ready(self, index: int, ended: set[int]) -> bool:
        for name in self.units[index].runs:
            if (begins := self.parents.get(name)) is None:
                continue
            trunk, step = begins
            home = self._home.get(trunk)
            waits = home is not None and home != index and home not in ended
            if waits and not can_start(self._sweep.run(name), self._sweep.run(trunk), step):
                return False
        return True

    def _alive(self, index: int) -> bool:
        """Whether the process that claimed a unit lives. Under the mutex, for to look is to hold the lock."""
        if index in self._mine:
            return True
        lock = self._lock(index)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def _open(self) -> dict[int, int]:
        ended = self._ended()
        return {index: place for index, place in sorted(self._claims().items()) if index not in ended}

    def _claims(self) -> dict[int, int]:
        """Place that claimed it, by unit."""
        names = (path.name.split(".") for path in self.folder.glob("*.claim.*"))
        return {int(name[0]): int(name[2]) for name in names}

    def _ended(self) -> set[int]:
        return {int(path.name.split(".")[0]) for path in self.folder.glob("*.ended")}

    def _lock(self, index: int) -> FileLock:
        return FileLock(self.folder / f"{index:05d}.lock")

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        with FileLock(self.folder / ".lock"):
            yield
