"""Signs of life: a thread touches a file of every run that this process trains, and ends a process that hangs.

Special here:
- a sign is the time of change of `runs/<id>/heartbeat`, and its age is told by a file touched just now on the same file
  system, so clocks of nodes may differ by hours;
- a process that is frozen, or is killed with its node, shows as an old sign to everybody else; one whose main thread is
  stuck still gives signs, so the thread also watches for steps. Building shards and scoring the held-out set count
  as steps; what has none (the first compile) must fit into `hang_seconds`, which is why that is long;
- a thread cannot wake the main one, so it writes down how the runs ended and ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from . import attempts
from .directory import RunDirectory, now_on
from .retries import Policy

MARGIN_SECONDS = 10.0  # beyond three periods, for a file server that stalls
EXIT_CODE = 124  # as `timeout` exits


class Heartbeat:
    """Gives signs of life for the runs that this process holds, while its block runs.

    Use as `with Heartbeat([run], policy) as heart:`, with the runs' locks held and a first sign given, and call
    `heart.progressed()` at every step. A run that ends inside is taken out with `leave` before its end is written.
    """

    def __init__(self, runs: Iterable[RunDirectory], policy: Policy) -> None:
        self._runs, self._policy = list(runs), policy
        self._poll = min(policy.heartbeat_seconds, policy.hang_seconds / 4)
        self._steps = 0
        self._over = threading.Event()
        self._ending = threading.Lock()  # whoever writes how a run ended
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def runs(self) -> list[RunDirectory]:
        """Those that have not left."""
        return list(self._runs)

    def progressed(self) -> None:
        """A step was taken. Costs nothing."""
        self._steps += 1

    def leave(self, run: RunDirectory) -> None:
        """From here on the run is not this one's; whoever calls writes how it ended."""
        with self._ending:
            self._runs = [other for other in self._runs if other is not run]

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with self._ending:
            self._runs = []
        self._thread.join(1.0)  # a file server that is away must not keep the end of a run from being told

    def _beat(self) -> None:
        steps, still, last = self._steps, 0.0, time.monotonic()
        while not self._over.wait(self._poll):
            for run in self.runs:
                with suppress(OSError):  # a file server that is away, or a folder that was removed
                    run.give_sign()
            now = time.monotonic()
            # A longer pause is time in which this process slept, and its main thread too.
            passed, last = min(now - last, 2 * self._poll), now
            still = still + passed if steps == self._steps else 0.0
            steps = self._steps
            if still >= self._policy.hang_seconds:
                self._end(steps)

    def _end(self, steps: int) -> None:
        with self._ending:
            if self._over.is_set() or steps != self._steps or not self._runs:
                return
            try:
                self._tell()
            finally:  # whatever is in the way of telling, such as a full disk
                os._exit(EXIT_CODE)

    def _tell(self) -> None:
        """Writes of every run that it hung, and where."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.extract_stack(frame) if frame is not None else None
        at = f", at {Path(stack[-1].filename).name}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
        reason = f"it hung: no step for {self._policy.hang_seconds:g} s{at}"
        for run in self._runs:
            with suppress(Exception):  # then whoever comes next writes it; the others must not miss their line
                run.note_failure(reason, "hung")
                attempts.settle_killed(run, "hung", reason)
            with suppress(Exception):
                run.log(reason + "\n" + "".join(stack.format() if stack else []))
        print(f"this process {reason}", flush=True)


def age(run: RunDirectory, now: float | None = None) -> float | None:
    """Seconds since the last sign of life; None where there is none: nobody has the run.

    Args:
        run: its directory.
        now: what `now_on` has just said of the same file system, for who asks about many runs; None: asked here.
    """
    seen = run.last_sign()
    return None if seen is None else max(0.0, (now_on(run.path) if now is None else now) - seen)


def limit(policy: Policy) -> float:
    """Seconds without a sign after which a run counts as dead."""
    return 3 * policy.heartbeat_seconds + MARGIN_SECONDS


def is_stale(run: RunDirectory, policy: Policy, now: float | None = None) -> bool:
    """Whether nobody seems to have a run that says `running`: no sign of life for three periods and a margin."""
    seconds = age(run, now)
    return seconds is None or seconds > limit(policy)
