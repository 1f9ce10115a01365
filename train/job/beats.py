"""What the ranks of a job publish of themselves, and which of them, by that, keeps the others from going on.

Special here:
- when one rank hangs, all of them soon wait for it. At fault are those whose whole process is silent, else those at the
  earliest step, else those that are somewhere in the code where fewest others are;
- a process that is gone is seen at once by a rank of its node, from its id; everywhere else it is only silent.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Beat:
    """What a rank last published of itself."""

    pulse: int = 0  # times that it has published: its process lives
    count: int = 0  # times that its main thread has beaten: it makes progress
    step: int | None = None  # None before the first
    doing: str = "starting"
    at: str = ""  # where its main thread is in the code
    pid: int = 0
    space: str = ""  # in which pid means something; empty where nobody can tell
    ended: bool = False  # it left in good order


@dataclass(frozen=True)
class Seen:
    """A rank's last beat, and when on the observer's clock it was new, in seconds."""

    beat: Beat
    moved: float  # its main thread made progress
    alive: float  # its process published

    def update(self, beat: Beat, now: float) -> Seen:
        return Seen(
            beat,
            moved=self.moved if beat.count == self.beat.count else now,
            alive=self.alive if beat.pulse == self.beat.pulse else now,
        )

    def is_silent(self, now: float, timeout: float) -> bool:
        """Whether the process has not published for so long that it is no mere witness of a hang."""
        return now - self.alive >= timeout / 2


def at_fault(seen: Mapping[int, Seen], now: float, timeout: float) -> list[int]:
    """Ranks that keep the job from going on.

    None as long as all processes have published, and any rank has made progress, within `timeout` seconds: the others
    may well be waiting for what that one does.
    """
    running = {rank: entry for rank, entry in seen.items() if not entry.beat.ended}
    silent = [rank for rank, entry in running.items() if entry.is_silent(now, timeout)]
    if any(now - running[rank].alive >= timeout for rank in silent):
        return silent
    if any(now - entry.moved < timeout for entry in running.values()):
        return []
    if silent:
        return silent
    company = Counter(entry.beat.at for entry in running.values())

    def suspicion(rank: int) -> tuple[int, int]:
        beat = running[rank].beat
        return -1 if beat.step is None else beat.step, company[beat.at]

    least = min(map(suspicion, running), default=None)
    return [rank for rank in running if suspicion(rank) == least]


def pid_space() -> str:
    """Names the set of processes to which this one's id belongs: a boot of a machine, or a container in it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie; a stopped one runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
