"""Times the whole product: the plan, a grid from nothing to its report, and the same again; and its peak memory.

    python benchmarks/grid.py [Hydra overrides]         default: +grid=chinchilla cluster=local

Memory is the sum of the proportional set sizes of every process of the sweep, sampled twice a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Measured:
    """One command: wall clock and peak memory of its process tree."""

    seconds: float
    peak_bytes: int
    output: str


def descendants(pid: int) -> list[int]:
    """A process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def memory(pid: int) -> int:
    """Proportional set size of a process in bytes: shared pages count by their share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def measure(arguments: list[str]) -> Measured:
    """Runs sweep.py to its end.

    Raises:
        SystemExit: it failed; its output is printed.
    """
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, str(ROOT / "sweep.py"), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            peak = max(peak, sum(memory(pid) for pid in descendants(process.pid)))
            time.sleep(0.5)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(text)
    return Measured(seconds, peak, text)


def main() -> None:
    overrides = sys.argv[1:] or ["+grid=chinchilla", "cluster=local"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*overrides, f"output_root={folder}", "sweep=measured"]
        dry = measure([*arguments, "dry_run=true"])
        first = measure(arguments)
        metrics = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("metrics.jsonl")}
        again = measure(arguments)
        trained = sum(path.stat().st_mtime_ns != before for path, before in metrics.items())
        law = json.loads((Path(folder) / "measured" / "fit" / "law.json").read_text())
        print(first.output)
    print(f"dry run                {dry.seconds:8.1f} s")
    print(f"first run, all stages  {first.seconds:8.1f} s   {len(metrics)} runs")
    print(f"the same again         {again.seconds:8.1f} s   {trained} runs trained")
    print(f"peak memory            {first.peak_bytes / 2**30:8.2f} GiB")
    profiles = law["profiles"]
    print(f"interior minima        {law['interior_minima']:8d}     of {len(profiles)} budgets")
    print(f"cores {len(os.sched_getaffinity(0))}, load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
