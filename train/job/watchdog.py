"""Watchdog that ends the whole job with a reason if one of its ranks dies, hangs or raises.

| event on a rank | the others end within |
| --- | --- |
| raises, or dies while another rank of its node sees it | 2 polls + GRACE_SECONDS |
| dies with its node, is frozen, or hangs until no rank makes progress | timeout * 17 / 16 + 2 polls + GRACE_SECONDS |

A poll is a 16th of the timeout, at most a second. Add LAST_WORDS_SECONDS if `on_loss` hangs, and GRACE_SECONDS if rank
0 is frozen. Only the observer's clock counts, while it runs, because nodes' clocks differ and jobs get suspended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store

from ..errors import COLLECTIVE
from ..parallel.mesh import Mesh
from .control import SHARED
from .failure import Cause, Failure, RankError, cause_of, describe_error, failure_at, parse_failure
from .rendezvous import FAREWELL_SECONDS, farewell, leave

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the input, try again
GRACE_SECONDS = 1.0  # for the main thread to raise the error itself; chosen by hand
LAST_WORDS_SECONDS = 10.0  # for `on_loss`; chosen by hand
NAMED = 3  # ranks named in a message; the others are counted
FAILED = "failed"  # store key of the reason why the job ends, from the first rank that found it


@dataclass(frozen=True)
class Beat:
    """The status that a rank last published."""

    pulse: int = 0  # grows while its process is alive
    count: int = 0  # grows while its main thread makes progress
    step: int | None = None  # None before the first
    doing: str = "starting"
    at: str = ""  # code position of its main thread
    pid: int = 0
    space: str = ""  # see `pid_space`; empty if unknown
    ended: bool = False  # it left normally


@dataclass(frozen=True)
class Seen:
    beat: Beat
    moved: float  # when its main thread made progress
    alive: float  # when its process published

    def is_silent(self, now: float, timeout: float) -> bool:
        """Return whether the process published nothing for half of `timeout` seconds. Waiting ranks do publish."""
        return now - self.alive >= timeout / 2


def at_fault(seen: Mapping[int, Seen], now: float, timeout: float) -> list[int]:
    """Return the ranks that block the job: ranks that publish nothing or, if there are none, the ranks furthest behind.

    Returns [] until a rank has published nothing, or all have made no progress, for `timeout` seconds. Furthest behind
    are ranks at the earliest step and, among these, at the code position with the fewest ranks.
    """
    running = {rank: entry for rank, entry in seen.items() if not entry.beat.ended}
    silent = [rank for rank, entry in running.items() if entry.is_silent(now, timeout)]
    if any(now - running[rank].alive >= timeout for rank in silent):
        return silent
    if any(now - entry.moved < timeout for entry in running.values()):
        return []
    if silent:
        return silent
    ranks_at = Counter(entry.beat.at for entry in running.values())
    beats = {rank: entry.beat for rank, entry in running.items()}
    places = {rank: (-1 if beat.step is None else beat.step, ranks_at[beat.at]) for rank, beat in beats.items()}
    earliest = min(places.values(), default=None)
    return [rank for rank, place in places.items() if place == earliest]


def pid_space() -> str:
    """Return an id of this machine's boot and PID namespace, within which process ids are unique; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie. A stopped one counts as running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Watchdog:
    """A monitor of a job's ranks while its block runs.

    All ranks enter it, and call `beat` at every step and during long work. Without a store (one process without a
    launcher) it does nothing.

    Raises:
        RankError: A lost rank, named in the message, caused the error in the block; or, on entry, a rank is missing.
    """

    def __init__(
        self, mesh: Mesh, store: Store | None, timeout_seconds: float, on_loss: Callable[[Failure], None]
    ) -> None:
        """Set up the watchdog. Just before it ends this process with EXIT_CODE, it calls `on_loss` with the reason."""
        self._mesh, self._timeout, self._on_loss = mesh, timeout_seconds, on_loss
        self._poll = min(1.0, timeout_seconds / 16)
        self._base = store
        self._keys = [f"beat/{rank}" for rank in range(mesh.size)]  # store keys by rank
        self._beat = Beat(pid=os.getpid(), space=pid_space())
        self._seen: dict[int, Seen] = {}
        self._clock = 0.0  # seconds that this process has been watching
        self._read_at = 0.0
        self._answers = 0  # that the store gave
        self._silence = float("inf")  # seconds without a pulse after which a process counts as dead
        self._failure: Failure | None = None
        self._failure_is_set = threading.Event()
        self._left = threading.Event()  # the main thread has left the block
        self._publishing = threading.Lock()  # so that nothing is published after `ended`
        self._threads: list[threading.Thread] = []

    def beat(self, step: int, doing: str = "in the step") -> None:
        """Report progress of the main thread: its step, and what it is doing."""
        self._beat = replace(self._beat, count=self._beat.count + 1, step=step, doing=doing)

    @property
    def step(self) -> int | None:
        return self._beat.step

    def __enter__(self) -> Watchdog:
        if self._base is None:
            return self
        # A separate connection, because an operation that waits blocks its connection.
        self._client = self._base.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store = dist.PrefixStore("watchdog", self._client)
        self._main = threading.get_ident()
        self._publish()
        try:
            self._store.wait(self._keys, timedelta(seconds=self._timeout))
        except dist.DistError as error:
            missing = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
            reason = f"{self._names(missing)} did not start within {self._timeout:g} s"
            raise RankError(failure_at(self._mesh.hosts, missing, Cause.NODE, reason, None)) from error
        self._read()
        # Calls to the store hang if the rank that serves it is frozen, so another thread keeps time.
        for target in (self._talk, self._keep_time):
            thread = threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._base is None:
            return
        explained = error if error is None or isinstance(error, COLLECTIVE) else self.explain(error)
        self._beat = replace(self._beat, ended=True)
        with suppress(dist.DistError):  # the rank that serves the store may be the one that died
            self._publish()
            # `set` is not acknowledged, and a busy store might read it after others see that this process is gone.
            # `check` waits for an answer.
            self._store.check([self._keys[self._mesh.rank]])
        self._left.set()
        for thread in self._threads:
            thread.join(2 * self._poll)
        if explained is not error and explained is not None:
            raise explained from error

    def explain(self, error: BaseException) -> BaseException:
        """Return a RankError if a lost rank caused `error`; otherwise tell the other ranks of `error` and return it."""
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            self._silence = max(1.0, 4 * self._poll)
            self._failure_is_set.wait(2 * self._silence + 2 * self._poll)
            if self._failure is not None:
                return RankError(self._failure)
        if SHARED not in getattr(error, "__notes__", ()):
            rank = self._mesh.rank
            reason = f"{self._mesh.name(rank)}: {describe_error(error)}"
            with suppress(dist.DistError):
                self._blame(failure_at(self._mesh.hosts, [rank], cause_of(error), reason, self.step))
        return error

    # Methods of the thread that talks to the store.

    def _talk(self) -> None:
        while not self._left.wait(self._poll) and self._failure is None:
            try:
                self._exchange()
            except dist.DistError:
                if not self._left.is_set():
                    self._set_failure(self._death_of([0]))
            self._answers += 1

    def _exchange(self) -> None:
        self._publish()
        if self._store.check([FAILED]):
            self._set_failure(parse_failure(json.loads(self._store.get(FAILED))))
            return
        # Every rank reads all beats, so it does so rarely, in order not to overload the store.
        if self._clock - self._read_at >= min(self._silence / 4, self._timeout / 16):
            self._read()
        if dead := self._dead():
            self._accuse(self._death_of(dead), dead)
        elif lost := at_fault(self._seen, self._clock, self._timeout):
            self._accuse(
                self._stall_of(lost), [rank for rank in lost if self._seen[rank].is_silent(self._clock, self._timeout)]
            )

    def _accuse(self, failure: Failure, silent: list[int]) -> None:
        self._set_failure(self._blame(failure))
        for rank in silent:
            self._client.set(farewell(rank), "")  # because it will not report that itself

    def _dead(self) -> list[int]:
        def dead(entry: Seen) -> bool:
            gone = self._beat.space and entry.beat.space == self._beat.space and not is_running(entry.beat.pid)
            return bool(gone) or self._clock - entry.alive >= self._silence

        if any(dead(entry) and not entry.beat.ended for entry in self._seen.values()):
            self._read()  # its last beat may report a normal end
        return [rank for rank, entry in self._seen.items() if dead(entry) and not entry.beat.ended]

    def _publish(self) -> None:
        frame = sys._current_frames().get(self._main)
        at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
        with self._publishing:
            beat = replace(self._beat, pulse=self._answers + 1, at=at)
            self._store.set(self._keys[self._mesh.rank], json.dumps(asdict(beat)))

    def _read(self) -> None:
        values = self._store.multi_get(self._keys)
        self._read_at = now = self._clock
        for rank, value in enumerate(values):
            beat = Beat(**json.loads(value))
            last = self._seen.get(rank, Seen(beat, now, now))
            moved = last.moved if beat.count == last.beat.count else now
            self._seen[rank] = Seen(beat, moved, last.alive if beat.pulse == last.beat.pulse else now)

    def _blame(self, failure: Failure) -> Failure:
        """Publish why the job ends, unless another rank did so first. Return the published failure."""
        return parse_failure(json.loads(self._store.compare_set(FAILED, "", json.dumps(asdict(failure)))))

    # Methods of the thread that keeps time.

    def _keep_time(self) -> None:
        answers, unanswered, last = 0, 0.0, time.monotonic()
        while not self._left.is_set() and not self._failure_is_set.wait(self._poll):
            now = time.monotonic()
            passed, last = min(now - last, self._timeout / 4), now  # a longer gap means that this process was suspended
            self._clock += passed
            unanswered = unanswered + passed if answers == self._answers else 0.0
            answers = self._answers
            if unanswered >= self._timeout:
                self._set_failure(self._stall_of([0]))
        if self._failure is not None and not self._left.wait(GRACE_SECONDS):
            self._end(self._failure)

    def _end(self, failure: Failure) -> None:  # a thread cannot wake the main thread from a collective
        _within(LAST_WORDS_SECONDS, lambda: self._on_loss(failure))
        _within(FAREWELL_SECONDS if self._mesh.rank == 0 else GRACE_SECONDS, self._leave_store)
        os._exit(EXIT_CODE)

    def _leave_store(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        leave(self._client, self._mesh.rank, self._mesh.size, FAREWELL_SECONDS)

    def _set_failure(self, failure: Failure) -> None:
        self._failure = failure
        self._failure_is_set.set()

    # Descriptions of failures.

    def _death_of(self, ranks: list[int]) -> Failure:
        step = self._last_step(ranks[0])
        reason = f"{self._names(ranks)} died {'before the first step' if step is None else f'at step {step}'}"
        return failure_at(self._mesh.hosts, ranks, Cause.KILLED, reason, step)

    def _stall_of(self, ranks: list[int]) -> Failure:
        has = f"{self._names(ranks)} {'has' if len(ranks) == 1 else 'have'} made no progress"
        if self._seen[ranks[0]].is_silent(self._clock, self._timeout):
            step, where, reason, cause = self._last_step(ranks[0]), "", ": frozen, or its node is lost", Cause.NODE
        else:
            beats = [self._seen[rank].beat for rank in ranks]
            step, reason, cause = beats[0].step, "", Cause.HUNG
            places = [f"{beat.doing}, at {beat.at}" for beat in beats[:NAMED]]
            where = f" ({'; '.join(places)})"
        since = "the start" if step is None else f"step {step}"
        return failure_at(
            self._mesh.hosts, ranks, cause, f"{has} since {since}{where} for {self._timeout:g} s{reason}", step
        )

    def _last_step(self, rank: int) -> int | None:
        """Return the later of the step that a silent rank last published and this rank's; None before the first."""
        steps = [step for step in (self._seen[rank].beat.step, self._beat.step) if step is not None]
        return max(steps, default=None)

    def _names(self, ranks: list[int]) -> str:
        named = [self._mesh.name(rank) for rank in ranks[:NAMED]]
        if len(ranks) > NAMED:
            named.append(f"{len(ranks) - NAMED} more")
        return " and ".join(named)


def _within(seconds: float, function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
