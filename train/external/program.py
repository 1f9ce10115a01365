"""Start an external program, keep its output within bounds, and end it with all its children."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from ..errors import UserError

# Bytes of an attempt's output that log.txt keeps: its beginning and its end. Chosen by hand.
KEPT_FIRST, KEPT_LAST = 32 << 20, 64 << 10
# The guard is in the program's process group. Its pipe closes when this process ends, even by kill -9; then it kills
# the program's tree, also children that have groups of their own.
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


class Program:
    """A running program; leaving its `with` block ends it and its children."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        """Start the program in `folder`. Raises UserError if it does not exist."""
        if shutil.which(command[0]) is None:
            raise UserError(f"trainer.command begins with {command[0]!r}; {socket.gethostname()} has no such program")
        no, pipe, shell = subprocess.DEVNULL, subprocess.PIPE, ["/bin/sh", "-c"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._guard = subprocess.Popen([*shell, GUARD], stdin=pipe, stdout=no, stderr=no, process_group=0)
        self._process = subprocess.Popen(
            [*shell, BEGIN, "sh", *command], cwd=folder, env=environment, stdin=no, stdout=pipe,
            stderr=subprocess.STDOUT, process_group=self._guard.pid,
        )  # fmt: skip
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self._process.pid}\n".encode())
        self._guard.stdin.flush()
        self.printed, self.last = 0, b""  # bytes: how many, and the last of them
        self.error: OSError | None = None  # of writing the log
        self._reader = threading.Thread(target=self._copy, args=(log,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End what is left of the program, and finish its log."""
        assert self._guard.stdin is not None
        if self._process.poll() is None:
            self._guard.stdin.close()  # it kills the tree
        else:
            os.killpg(self._guard.pid, signal.SIGKILL)  # the guard is in the group, which therefore exists
        self._guard.wait()
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
        while chunk := os.read(self._process.stdout.fileno(), 1 << 16):
            self._write(log, chunk[: max(0, KEPT_FIRST - self.printed)])
            self.printed += len(chunk)
            self.last = (self.last + chunk)[-KEPT_LAST:]
        if (left := self.printed - KEPT_FIRST) > 0:
            end = self.last[-left:]
            self._write(log, f"\n… {left - len(end):,} bytes are left out\n".encode() + end)

    def _write(self, log: Path, content: bytes) -> None:
        if content:
            try:
                with log.open("ab", buffering=0) as file:
                    file.write(content)
            except OSError as error:  # a full disk; the program must not wait for a full pipe
                self.error = error
