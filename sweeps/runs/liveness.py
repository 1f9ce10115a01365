"""A thread that updates the heartbeat of the run that this process trains, and ends a process that hangs.

- The heartbeat is the modification time of `runs/<run_id>/heartbeat`.
- The thread also watches for steps. A phase without steps (the first compile) must fit into `hang_seconds`.
- The thread records how the run ended before it ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ...train.job.failure import Cause, Failure, note_failure
from . import lease
from .attempts import Policy
from .directory import RunDirectory, this_node

EXIT_CODE = 124  # as `timeout` exits


class Heartbeat:
    """The heartbeat thread, which lives during its `with` block."""

    def __init__(self, run: RunDirectory, policy: Policy) -> None:
        self.run, self._policy = run, policy
        self.folder = run.path.stat()  # tells whether the run's folder was moved or replaced since
        self._poll = min(policy.heartbeat_seconds, policy.hang_seconds / 4)
        self._steps = 0
        self._over = threading.Event()
        self._ending = threading.Lock()  # held by the thread that writes how the run ended
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def progressed(self) -> None:
        """Count a training step as a sign of life."""
        self._steps += 1

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        with self._ending:  # a process that is being ended stays here
            pass
        self._thread.join(1.0)  # a file server that is away must not hold up the end of a run

    def _beat(self) -> None:
        steps, still, last = self._steps, 0.0, time.monotonic()
        while not self._over.wait(self._poll):
            with suppress(OSError):  # a file server that is away, or a folder that was removed
                self.run.give_sign()
            now = time.monotonic()
            # A longer pause is time in which this process slept, and its main thread too.
            passed, last = min(now - last, 2 * self._poll), now
            still = still + passed if steps == self._steps else 0.0
            steps = self._steps
            if still >= self._policy.hang_seconds:
                self._end(steps)

    def _end(self, steps: int) -> None:
        with self._ending:
            if self._over.is_set() or steps != self._steps:
                return
            try:
                frame = sys._current_frames().get(self._main)
                stack = traceback.extract_stack(frame) if frame is not None else None
                at = f", at {Path(stack[-1].filename).name}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
                reason = f"it hung: no step for {self._policy.hang_seconds:g} s{at}"
                with suppress(Exception):
                    note_failure(self.run.path, Failure(Cause.HUNG, reason, host=this_node()))
                    lease.conclude(self.run, lease.Ending("failed", reason, Cause.HUNG), ended=self.run.last_sign())
                with suppress(Exception):
                    self.run.log(reason + "\n" + "".join(stack.format() if stack else []))
                print(f"this process is ended: {reason}", flush=True)
            finally:  # even if the disk is full
                os._exit(EXIT_CODE)
