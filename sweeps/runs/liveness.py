"""A thread that gives signs of life of every run that this process trains, and ends a process that hangs.

Special here:
- a sign is the time of change of `runs/<id>/heartbeat`; its age is measured by the file system's clock, so clocks of
  nodes may differ by hours;
- a process that is frozen or killed stops giving signs; one whose main thread is stuck still gives them, so the thread
  also watches for steps. What has none (the first compile) must fit into `hang_seconds`;
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

from ...train.job.failure import Cause, Failure, note_failure
from . import states
from .attempts import Policy
from .directory import RunDirectory, this_node

EXIT_CODE = 124  # as `timeout` exits


class Heartbeat:
    """Gives signs of life of runs that are held while its block runs."""

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
        return list(self._runs)

    def progressed(self) -> None:
        """Called at every step; costs nothing."""
        self._steps += 1

    def leave(self, run: RunDirectory) -> None:
        """Gives no more signs of a run, before its end is written."""
        with self._ending:
            self._runs = [other for other in self._runs if other is not run]

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        with self._ending:
            self._runs = []
        self._thread.join(1.0)  # a file server that is away must not hold up the end of a run

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
                frame = sys._current_frames().get(self._main)
                stack = traceback.extract_stack(frame) if frame is not None else None
                at = f", at {Path(stack[-1].filename).name}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
                reason = f"it hung: no step for {self._policy.hang_seconds:g} s{at}"
                for run in self._runs:
                    with suppress(Exception):  # whoever comes next writes it; the others must not miss their line
                        note_failure(run.path, Failure(Cause.HUNG, reason, host=this_node()))
                        states.settle_killed(run, Cause.HUNG, reason)
                    with suppress(Exception):
                        run.log(reason + "\n" + "".join(stack.format() if stack else []))
                print(f"this process {reason}", flush=True)
            finally:  # even where the disk is full
                os._exit(EXIT_CODE)
