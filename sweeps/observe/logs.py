"""Print the logs of runs and the output of their jobs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import cluster_of
from ..runs.attempts import Policy
from ..runs.directory import RunDirectory, SweepDirectory
from ..runs.membership import find_runs, is_over, members
from ..terminal import printable

POLL_SECONDS = 0.5  # sizes are polled, which works on every file system
TAIL_BYTES = 16384  # read from the end of a file for its newest lines
JOB_LINES = 10  # newest lines of a job's output, after the log of its run
LINES = 3  # newest lines per run if no run is named


def print_log(sweep: SweepDirectory, prefix: str, follow: bool) -> None:
    """Print a run's log and its job's newest output; with `follow`, print both in full until the run is over."""
    (run,) = find_runs(sweep, [prefix])
    files = [run.path / "log.txt", *sorted(run.path.glob("log-rank*.txt"))]
    if follow:

        def files_now() -> list[tuple[str, Path]]:
            paths = [*files, *job_files(sweep, run)]
            return [("" if path.name == "log.txt" else f"{path.name}: ", path) for path in paths]

        _follow(sweep, [run], files_now)
        return
    if not any(path.exists() for path in files):
        print(f"run {run.run_id} has not started")
    for path in files:
        with contextlib.suppress(OSError):
            print(printable(path.read_text(encoding="utf-8", errors="replace")), end="")
    for path in job_files(sweep, run):
        if lines := last_lines(path, JOB_LINES):
            print(f"newest lines of {path}:", *lines, sep="\n")


def print_newest_lines(sweep: SweepDirectory, follow: bool) -> None:
    """Print the newest lines of running and failed runs; with `follow`, go on until all runs are over."""
    runs = members(sweep)
    states = {run.run_id: run.state().state for run in runs}
    shown = [run for run in runs if states[run.run_id] in ("running", "failed", "diverged")]
    for run in shown:
        for line in last_lines(run.path / "log.txt", LINES):
            print(f"{run.run_id} {states[run.run_id]}: {line}")
    if not shown:
        counts = Counter(states.values())
        print(f"no run is running or failed ({', '.join(f'{count} {state}' for state, count in counts.items())})")
    if follow:
        logs = [(f"{run.run_id}: ", run.path / "log.txt") for run in runs]
        _follow(sweep, runs, lambda: logs, from_start=False)


def job_files(sweep: SweepDirectory, run: RunDirectory) -> list[Path]:
    """Return the output files of all ranks of a run's newest job."""
    job = run.state().job_id
    return [] if job is None else sorted(sweep.path.glob(f"jobs/*/{job}_*_log.*"))


def last_lines(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
            return [printable(line) for line in text.splitlines()[-lines:]]
    except OSError:
        return []


@dataclass
class Follower:
    """A reader of the new lines of a growing file."""

    path: Path
    position: int = 0
    inode: int | None = None
    rest: bytes = b""  # beginning of an incomplete line

    def skip(self) -> None:
        with contextlib.suppress(OSError):
            status = self.path.stat()
            self.position, self.inode = status.st_size, status.st_ino

    def lines(self) -> list[str]:
        """Return the complete new lines; a replaced or truncated file is read from its start."""
        try:
            status = self.path.stat()
            if status.st_ino != self.inode or status.st_size < self.position:
                self.position, self.inode, self.rest = 0, status.st_ino, b""
            if status.st_size == self.position:
                return []
            with self.path.open("rb") as file:
                file.seek(self.position)
                content = file.read()
        except OSError:
            return []
        self.position += len(content)
        *whole, self.rest = (self.rest + content).split(b"\n")
        return [printable(line.decode("utf-8", errors="replace")) for line in whole]


def _follow(
    sweep: SweepDirectory,
    runs: Iterable[RunDirectory],
    files: Callable[[], Iterable[tuple[str, Path]]],
    from_start: bool = True,
) -> None:
    """Print lines of the growing files that `files()` lists as (prefix, path), until all runs are over or Ctrl-C.

    If `from_start` is False, skip the lines that exist at first.
    """
    followers: dict[Path, Follower] = {}
    policy = Policy.of(cluster_of(sweep.settings()))
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            # Before reading the files, so that lines written just before the end are printed.
            over = all(is_over(run, policy) for run in runs)
            for label, path in files():
                if path not in followers:
                    followers[path] = Follower(path)
                    if not from_start:
                        followers[path].skip()
                for line in followers[path].lines():
                    print(f"{label}{line}", flush=True)
            from_start = True  # files that appear later are printed whole
            if over:
                return
            time.sleep(POLL_SECONDS)
