"""Sweeps on the cluster that the tests marked `slurm` find: started, looked at, waited for."""

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
DEADLINE = 240.0  # seconds after which something that should have happened is taken never to
SMALL = [
    "cluster.gpus_per_job=0", "cluster.cpus_per_task=1", "cluster.memory_gb=1", "cluster.time_minutes=5",
    "cluster.array_parallelism=2", "precision=fp32", "tracker=none", "evaluate=none",
    "parallel.device=cpu", "tuning=fixed", "preflight=false",
    # Every run has a worker, and nothing is tried again: slurm/test_keeper.py has that.
    "cluster.queue_minutes=0", "cluster.retries=0", "cluster.keeper_seconds=5", "cluster.heartbeat_seconds=1",
]  # fmt: skip
EVERY = "worker,fit,keeper"  # kinds of jobs
# One size, long enough (seconds) to be disturbed on the way, in as many runs as there are seeds.
LONG = [
    "+grid=product", "model.width=16", "model.depth=2", "model.heads=2", "data.sequence_length=64",
    "data.max_bytes=2000000", "data.validation_tokens=16384", "optimizer.batch_size=8", "validations=2",
    "fit.bootstrap=50",
]  # fmt: skip


class Sweep:
    """One sweep of a test: its folder, its command, its jobs."""

    def __init__(self, name: str, output_root: Path, source: Path = ROOT) -> None:
        self.name, self.output_root, self.source = name, output_root, source
        self.path = output_root / name

    def command(self, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python sweep.py`, without a terminal; neither success nor failure is expected."""
        command = [
            sys.executable,
            "sweep.py",
            *SMALL,
            f"sweep={self.name}",
            f"output_root={self.output_root}",
            *overrides,
        ]
        return subprocess.run(
            command, cwd=self.source, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE, check=False,
        )  # fmt: skip

    def submit(self, *overrides: str, **environment: str) -> str:
        """The command on SLURM, which must succeed; what it printed."""
        done = self.command("cluster=slurm", *overrides, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def runs(self) -> dict[str, RunDirectory]:
        return {run.run_id: run for run in SweepDirectory.open(self.path).runs()}

    def states(self) -> list[str]:
        return sorted(run.state().state for run in self.runs().values())

    def queue(self, kind: str = "worker,fit", what: str = "%i") -> list[str]:
        """What squeue shows of the sweep's jobs."""
        names = ",".join(f"{self.name}-{part}" for part in kind.split(","))
        return slurm("squeue", "-h", "-r", f"--name={names}", "-o", what).split()

    def wait(self) -> None:
        until(lambda: not self.queue(EVERY), f"an empty queue for {self.name}")

    def losses(self) -> dict[str, float]:
        return {name: run.summary()["val_loss"] for name, run in self.runs().items()}

    def job_logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.path.glob("jobs/*/*_log.*")))


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)


def process_of(run: RunDirectory, rank: int) -> int:
    """The process of a rank's newest attempt. The cluster's nodes are this machine, so it is to be found here."""
    log = run.path / (f"log-rank{rank}.txt" if rank else "log.txt")

    def named() -> list[str]:
        return re.findall(r"process (\d+)", log.read_text()) if log.exists() else []

    until(named, f"a process in {log}")  # a run is `running` before it writes its log
    return int(named()[-1])


@contextmanager
def sweeps_in(folder: Path) -> Iterator[Callable[..., Sweep]]:
    """Makes sweeps whose jobs are gone afterwards, whatever came of them."""
    made: list[Sweep] = []

    def make(name: str, source: Path = ROOT) -> Sweep:
        made.append(Sweep(f"{name}-{os.getpid()}", folder, source))
        return made[-1]

    yield make
    for item in made:
        if jobs := item.queue(EVERY):
            slurm("scancel", *jobs)
        until(lambda: not item.queue(EVERY), f"an empty queue for {item.name}")  # noqa: B023
