"""Time the handling of a thousand runs: planning, submission, status, and the overhead of each run.

    python -m isoflop.bench.thousand [--runs 1000] [--rounds 3]

Without SLURM, submission is left out and the runs are trained here. The overhead of a run is the time of all workers,
each from its first beginning to its last end, divided by the runs, less the mean of the runs' seconds (`isoflop bench
queue`). On SLURM one worker may do all runs, because so little work is not worth a second job.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..sweeps.runs.directory import SweepDirectory
from ..train.errors import UserError
from .timing import Row, isoflop

ABOUT = "overhead of a run in addition to its own time"
WORKERS = 2
# The smallest model, two steps.
TRIVIAL = [
    "+grid=product", "model.width=8", "model.depth=1", "model.heads=1", "data.sequence_length=64",
    "data.max_bytes=2000000", "data.validation_tokens=1024", "optimizer.batch_size=8", "validations=1", "tokens=1024",
    "fit.bootstrap=10", "tracker=none", "evaluate=none", "precision=fp32", "parallel.device=cpu", "tuning=fixed",
    "trunks=false", "preflight=false",
]  # fmt: skip
LOCAL = ["cluster=local", "cluster.threads_per_job=1"]
SLURM = ["cluster=slurm", "cluster.gpus_per_job=0", "cluster.cpus_per_task=1", "cluster.memory_gb=1"]


def bench_queue(runs: int = 1000, workers: int = WORKERS) -> Iterator[Row]:
    """Yield a row of the milliseconds per run that workers on this machine need in addition to the run's own time."""
    for name, value in (("runs", runs), ("workers", workers)):
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="isoflop-queue-", dir=os.environ.get("ISOFLOP_BENCH_FOLDER")) as folder:
        isoflop("sweep", *grid(Path(folder), runs), *LOCAL, f"cluster.jobs={workers}", "sweep=queue")
        result = overhead(SweepDirectory(Path(folder) / "queue"))
    row = dict.fromkeys(("peer", "peer_name", "ratio", "spread")) | {"device": f"cpu, {os.cpu_count()} cores"}
    case = f"{runs} trivial runs, {workers} workers: overhead per run"
    yield row | {"case": case, "ours": result["overhead_ms"], "unit": "ms/run"} | result


def grid(folder: Path, runs: int) -> list[str]:
    return [*TRIVIAL, f"grid.axes={{seed: {list(range(runs))}}}", f"output_root={folder}"]


def overhead(sweep: SweepDirectory) -> dict[str, float]:
    """Return the number of workers of a finished sweep, and its milliseconds per run: whole, training, overhead."""
    lines = [run.record().attempts for run in sweep.runs()]
    first = [of_run[0] for of_run in lines if len(of_run) == 1 and of_run[0].cause == "done"]
    if len(first) < len(lines):
        raise UserError(f"{len(lines) - len(first)} of {len(lines)} runs were not done at the first attempt")
    workers = {attempt.job_id for attempt in first}
    spent = 0.0
    for worker in workers:
        done = [attempt for attempt in first if attempt.job_id == worker]
        spent += max(attempt.ended for attempt in done) - min(attempt.began for attempt in done)
    whole, training = 1e3 * spent / len(first), 1e3 * statistics.mean(attempt.seconds for attempt in first)
    return {"overhead_ms": whole - training, "whole_ms": whole, "training_ms": training, "workers": len(workers)}


def show(title: str, rounds: int, measure: Callable[[int], float]) -> None:
    seconds = sorted(measure(number) for number in range(rounds))
    print(f"{title}: {statistics.median(seconds):.2f} s, {seconds[0]:.2f} to {seconds[-1]:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    on_slurm = not subprocess.run(["sh", "-c", "sinfo -h"], capture_output=True, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="thousand-") as name:
        folder = Path(name)
        runs = [*grid(folder, options.runs), *(SLURM if on_slurm else LOCAL)]
        show(f"plan {options.runs} runs", options.rounds, lambda i: isoflop("sweep", *runs, "dry_run=true"))
        if on_slurm:
            hold = "cluster.additional_parameters={hold: true}"
            show("plan and submit them", options.rounds, lambda i: isoflop("sweep", *runs, hold, f"sweep=held{i}"))
            for i in range(options.rounds):
                isoflop("cancel", str(folder / f"held{i}"))
        workers = [f"cluster.array_parallelism={WORKERS}", "wait=true"] if on_slurm else [f"cluster.jobs={WORKERS}"]
        isoflop("sweep", *runs, *workers, "sweep=queue")
        print(f"a run: {overhead(SweepDirectory(folder / 'queue'))}", flush=True)
        show("status", options.rounds, lambda i: isoflop("status", str(folder / "queue")))


if __name__ == "__main__":
    main()
