"""Start an external program, keep its output within bounds, and end it with all its children."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from ..errors import UserError

# Bytes of an attempt's output that log.txt keeps: its beginning and its end. Chosen by hand.
KEPT_FIRST, KEPT_LAST = 32 << 20, 64 << 10
# The guard is in the program's process group. Its pipe closes when this process ends, even by kill -9; then it kills
# the program's tree, also children in other groups.
GUARD = """
trap '' TERM USR2 INT HUP
tree() { for child in $(cat /proc/$1/task/*/children 2>/dev/null); do tree "$child"; done; kill -KILL "$1"; }
read -r root
cat >/dev/null
[ -n "$root" ] && tree "$root" 2>/dev/null
kill -KILL 0
"""
# SLURM sends its warning to all processes of a job, and a program that does not know USR2 would die of it.
BEGIN = 'trap "" USR2; exec "$@"'


class Program(AbstractContextManager["Program"]):
    """A running program; leaving its `with` block ends it and its children."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        """Start the program in `folder`. Raises UserError if it does not exist."""
        if shutil.which(command[0]) is None:
            raise UserError(f"trainer.command begins with {command[0]!r}; {socket.gethostname()} has no such program")
        no, pipe, shell = subprocess.DEVNULL, subprocess.PIPE, ["/bin/sh", "-c"]
        here: Any = {"cwd": folder, "env": os.environ | {"PYTHONUNBUFFERED": "1"}, "stderr": subprocess.STDOUT}
        self._guard = subprocess.Popen([*shell, GUARD], stdin=pipe, stdout=no, stderr=no, process_group=0)
        begin = [*shell, BEGIN, "sh", *command]
        self._process = subprocess.Popen(begin, stdin=no, stdout=pipe, process_group=self._guard.pid, **here)
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self._process.pid}\n".encode())
        self._guard.stdin.flush()
        self.printed, self.last = 0, b""  # bytes: how many, and the last of them
        self.error: OSError | None = None  # of writing the log
        self._reader = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._reader.start()

    def __exit__(self, *error: object) -> None:
        """End the processes that still run, and finish the log."""
        if self._process.poll() is None and self._guard.stdin is not None:
            self._guard.stdin.close()  # it kills the tree
        else:
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()
        self._process.kill()  # in case that the guard itself was killed
        self._process.wait()
        self._reader.join(1.0)  # a child that left the group may still hold the pipe

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, negative for a signal, or None if the program still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def stop(self, grace_seconds: float) -> bool:
        """Send TERM. Returns False if the program still runs after `grace_seconds`."""
        os.killpg(self._guard.pid, signal.SIGTERM)
        return self.wait(grace_seconds) is not None

    def last_line(self) -> str:
        return ([""] + [line for line in self.last.decode(errors="replace").splitlines() if line.strip()])[-1][-300:]

    def _copy(self, log: Path) -> None:
        """Copy the output to the log, in a separate thread."""
        assert self._process.stdout is not None
        while True:
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            written = chunk[: max(0, KEPT_FIRST - self.printed)]
            if not chunk and (left := self.printed - KEPT_FIRST) > 0:
                end = self.last[-left:]
                written = f"\n… {left - len(end):,} bytes are left out\n".encode() + end
            self.printed += len(chunk)
            self.last = (self.last + chunk)[-KEPT_LAST:]
            try:
                with log.open("ab") as file:
                    file.write(written)
            except OSError as error:  # a full disk; the program must not wait for a full pipe
                self.error = error
            if not chunk:
                return
