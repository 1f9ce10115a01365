"""Start an external program in a process group, keep its output within bounds, and end it with all its children."""

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
from types import TracebackType
from typing import Self

from ..errors import UserError

# Bytes of an attempt's output that log.txt keeps: its beginning and its end. Chosen by hand.
KEPT_FIRST, KEPT_LAST = 32 << 20, 64 << 10
# The guard is in the program's process group. It reads from a pipe whose other end this process holds, so it notices
# even a kill -9 of this process, and then kills the program's tree, also the children that have groups of their own.
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

    def __init__(self, command: Sequence[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
        """Start the program in `folder`. Raises UserError if it cannot be found."""
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise UserError(f"trainer.command begins with {command[0]!r}, which is no program on {socket.gethostname()}")
        quiet = subprocess.DEVNULL
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0
        )
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", BEGIN, "sh", *command],
            cwd=folder, env=environment, stdin=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            process_group=self._guard.pid,
        )  # fmt: skip
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self._process.pid}\n".encode())
        self._guard.stdin.flush()
        self.printed = 0  # bytes
        self.last = b""  # bytes that were printed last
        self.error: OSError | None = None  # of writing the log
        self._log = log
        self._reader = threading.Thread(target=self._copy, name="output", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, negative for a signal, or None if the program still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
            self._end()
            return code
        return None

    def stop(self, grace_seconds: float) -> bool:
        """Send TERM, and after `grace_seconds` KILL. Returns False if KILL was needed."""
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGTERM)
        return self.wait(grace_seconds) is not None or self._end()

    def last_line(self) -> str:
        lines = [line.strip() for line in self.last.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else ""

    def _end(self) -> bool:
        """End what is left of the group, and write the end of the output. Returns False."""
        guard = self._guard
        if guard.poll() is None:
            if self._process.poll() is None:
                assert guard.stdin is not None
                guard.stdin.close()  # it kills the tree
            else:
                with suppress(ProcessLookupError):
                    os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()
            self._process.wait()
            self._reader.join(1.0)  # a child that left the group may hold the pipe
        return False

    def _copy(self) -> None:
        """Copy the output to the log, in a thread of its own."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with self._log.open("ab", buffering=0) as file:
            while chunk := os.read(descriptor, 1 << 16):
                kept = chunk[: max(0, KEPT_FIRST - self.printed)]
                self.printed += len(chunk)
                self.last = (self.last + chunk)[-KEPT_LAST:]
                self._write(file.fileno(), kept)
            if (cut := self.printed - KEPT_FIRST - KEPT_LAST) > 0:
                note = f"\n… {cut:,} bytes of output are left out; these are the last {KEPT_LAST:,}:\n"
                self._write(file.fileno(), note.encode())
            if self.printed > KEPT_FIRST:
                self._write(file.fileno(), self.last[-min(KEPT_LAST, self.printed - KEPT_FIRST) :])

    def _write(self, descriptor: int, content: bytes) -> None:
        try:
            if content:
                os.write(descriptor, content)
        except OSError as error:  # a full disk; the program must not wait for a full pipe
            self.error = error


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment_of(port: int) -> dict[str, str]:
    """Return a program's environment: that of this process, an address for its ranks, and Python without buffers."""
    return os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}


def on_all_cores(ranks: int) -> None:
    """Let this thread and its children use the cores of all ranks, of which SLURM gives each its own."""
    if ranks > 1:
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
