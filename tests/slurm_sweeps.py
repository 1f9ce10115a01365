"""Helpers that start, inspect and wait for sweeps on a real SLURM cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 600.0  # seconds to wait for an event before the test fails; a loaded machine needs 200 for some
SMALL = [
    "cluster.gpus_per_job=0", "cluster.cpus_per_task=1", "cluster.memory_gb=1", "cluster.time_minutes=5",
    "cluster.array_parallelism=2", "precision=fp32", "tracker=none", "evaluate=none",
    "parallel.device=cpu", "tuning=fixed", "preflight=false",
    # Every run has a worker, and no run is retried: slurm/test_keeper.py tests retries.
    "cluster.queue_minutes=0", "cluster.retries=0", "cluster.keeper_seconds=15", "cluster.heartbeat_seconds=1",
]  # fmt: skip
EVERY = "worker,fit,keeper"  # kinds of jobs
# One model size that trains for seconds, so that a test can disturb it; one run per seed.
LONG = [
    "+grid=product", "model.width=16", "model.depth=2", "model.heads=2", "data.sequence_length=64",
    "data.max_bytes=2000000", "data.validation_tokens=16384", "optimizer.batch_size=8", "validations=2",
    "fit.bootstrap=50",
]  # fmt: skip


class Sweep:
    """The folder, command and jobs of one sweep."""

    def __init__(self, name: str, output_root: Path, source: Path = ROOT) -> None:
        self.name, self.output_root, self.source = name, output_root, source
        self.path = output_root / name

    def command(self, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `python sweep.py` without a terminal and return the process; any exit code is accepted."""
        places = [f"sweep={self.name}", f"output_root={self.output_root}"]
        command = [sys.executable, "sweep.py", *SMALL, *places, *overrides]
        return subprocess.run(
            command, cwd=self.source, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE, check=False,
        )  # fmt: skip

    def submit(self, *overrides: str, **environment: str) -> str:
        """Submit the sweep to SLURM, which must succeed, and return the output."""
        process = self.command("cluster=slurm", *overrides, **environment)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def runs(self) -> dict[str, RunDirectory]:
        return {run.run_id: run for run in SweepDirectory.open(self.path).runs()}

    def states(self) -> list[str]:
        return sorted(run.state().state for run in self.runs().values())

    def queue(self, kind: str = "worker,fit", output_format: str = "%i") -> list[str]:
        """Return a field that squeue shows for each of the sweep's jobs, by default the id."""
        names = ",".join(f"{self.name}-{part}" for part in kind.split(","))
        return slurm("squeue", "-h", "-r", f"--name={names}", "-o", output_format).split()

    def wait(self) -> None:
        until(lambda: not self.queue(EVERY), f"an empty queue for {self.name}")

    def cancel_jobs(self, kind: str = EVERY) -> None:
        """Cancel jobs until none is in the queue, because a job that ends may have submitted others."""

        def none_is_left() -> bool:
            if jobs := self.queue(kind):
                subprocess.run(["scancel", *jobs], capture_output=True, timeout=60, check=False)  # some may have ended
            return not jobs

        until(none_is_left, f"an empty queue for {self.name}")

    def losses(self) -> dict[str, float]:
        return {name: run.summary()["val_loss"] for name, run in self.runs().items()}

    def job_logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.path.glob("jobs/*/*_log.*")))


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def until(condition: Callable[[], Any], event: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never: {event}"
        time.sleep(0.2)


def process_of(run: RunDirectory, rank: int) -> int:
    """Return the process id of a rank's newest attempt; the cluster's nodes are this machine."""
    log = run.path / (f"log-rank{rank}.txt" if rank else "log.txt")

    def process_ids() -> list[str]:
        return re.findall(r"process (\d+)", log.read_text()) if log.exists() else []

    until(process_ids, f"a process in {log}")  # a run is `running` before it writes its log
    return int(process_ids()[-1])


@contextmanager
def sweeps_in(folder: Path) -> Iterator[Callable[..., Sweep]]:
    """Yield a function that makes sweeps; their jobs are cancelled when the block ends."""
    sweeps: list[Sweep] = []

    def make(name: str, source: Path = ROOT) -> Sweep:
        sweeps.append(Sweep(f"{name}-{os.getpid()}", folder, source))
        return sweeps[-1]

    yield make
    for sweep in sweeps:
        sweep.cancel_jobs()
