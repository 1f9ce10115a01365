"""A thousand runs: how long it takes to plan them, to submit them, to look at them, and to go through a queue of them.

    python benchmarks/thousand.py [--runs 1000] [--rounds 3] [--folder FOLDER]

Planning and status need no SLURM; the rest is left out where `sinfo` does not answer. A figure is of a whole command,
Python's start included, where it names one; `stages` takes what lies between apart. Of the queue it is what a run costs
beside the time from its beginning to its end, which holds its own start-up: (last end - first beginning) * workers -
the runs' own seconds, over the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from isoflop.sweeps import prepare
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute import conduct
from isoflop.sweeps.runs import attempts
from isoflop.sweeps.runs.directory import SweepDirectory

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
# The smallest model, two steps.
TRIVIAL = [
    "+grid=product", "model.width=8", "model.depth=1", "model.heads=1", "data.sequence_length=64",
    "data.max_bytes=2000000", "data.validation_tokens=1024", "optimizer.batch_size=8", "validations=1", "tokens=1024",
    "fit.bootstrap=10", "tracker=none", "evaluate=none", "cluster=slurm", "cluster.gpus_per_job=0",
    "cluster.cpus_per_task=1", "cluster.memory_gb=1", "precision=fp32", "parallel.device=cpu", "ensembles=1",
]  # fmt: skip


def main() -> None:
    """Prints a line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the sweeps are written; default: a temporary one")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="thousand-"))
    grid = [*TRIVIAL, f"grid.axes={{seed: {list(range(options.runs))}}}", f"output_root={folder}"]
    try:
        planned = [timed(*grid, "sweep=plan", "dry_run=true") for _ in range(options.rounds)]
        show(f"plan {options.runs} runs (sweep.py, dry run)", planned)
        if subprocess.run(["sinfo", "-h"], capture_output=True, check=False).returncode:
            print("no SLURM: the rest is left out")
            return
        held = "cluster.additional_parameters={hold: true}"
        for way, minutes in (("array tasks", 0), ("a queue", 10)):
            name = f"held{minutes}"
            show(
                f"plan and submit {options.runs} runs as {way}",
                [
                    timed(*grid, f"sweep={name}{i}", held, f"cluster.queue_minutes={minutes}")
                    for i in range(options.rounds)
                ],
            )
            for i in range(options.rounds):
                isoflop("cancel", str(folder / f"{name}{i}"))
            stages(folder, [*grid, held, f"cluster.queue_minutes={minutes}"], way, options.rounds)
        per_run(folder, grid, options.runs)
        looks = [timed_isoflop("status", str(folder / "queue"), *flags) for flags in ([], ["--json"])
                 for _ in range(options.rounds)]  # fmt: skip
        show(f"status of {options.runs} runs", looks[: options.rounds])
        show(f"status --json of {options.runs} runs", looks[options.rounds :])
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def stages(folder: Path, grid: list[str], way: str, rounds: int) -> None:
    """Times the stages of one submission within this process."""
    took: dict[str, list[float]] = {"planning": [], "writing": [], "submission": []}
    for i in range(rounds):
        config = compose(grid)
        config.sweep = f"stages-{way.split()[-1]}{i}"
        clock = [time.perf_counter()]
        prepared = prepare.from_config(config)
        clock.append(time.perf_counter())
        prepare.write_plan(prepared, ["benchmark"])
        clock.append(time.perf_counter())
        with contextlib.redirect_stdout(io.StringIO()):
            conduct.submit(prepared)
        clock.append(time.perf_counter())
        for name, (first, last) in zip(took, pairwise(clock), strict=True):
            took[name].append(last - first)
        isoflop("cancel", str(folder / config.sweep))
    for name, seconds in took.items():
        show(f"  of which {name}, as {way}", seconds)


def per_run(folder: Path, grid: list[str], runs: int) -> None:
    """Trains all runs through a queue of two workers, and says what one costs."""
    timed(*grid, "sweep=queue", f"cluster.array_parallelism={WORKERS}", "cluster.queue_minutes=0.001", "wait=true",
          "cluster.keeper_seconds=10")  # fmt: skip
    sweep = SweepDirectory(folder / "queue")
    past = [attempts.read(run) for run in sweep.runs()]
    once = [tries[0] for tries in past if len(tries) == 1 and tries[0].cause == "done"]
    assert len(once) == runs, f"{len(once)} of {runs} runs were done at the first attempt"
    span = max(attempt.ended for attempt in once) - min(attempt.began for attempt in once)
    own = sum(attempt.seconds for attempt in once)
    whole, mine = 1000 * span * WORKERS / runs, 1000 * own / runs
    print(
        f"a run of a queue with {WORKERS} workers: {whole:.1f} ms in all, {mine:.1f} of them from its beginning to its "
        f"end; overhead {whole - mine:.1f} ms",
        flush=True,
    )


def timed(*overrides: str) -> float:
    """Seconds that `python sweep.py` takes."""
    started = time.perf_counter()
    command = [sys.executable, "sweep.py", *overrides]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return time.perf_counter() - started


def timed_isoflop(*arguments: str) -> float:
    """Seconds that an `isoflop` command takes."""
    started = time.perf_counter()
    isoflop(*arguments)
    return time.perf_counter() - started


def isoflop(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "isoflop.sweeps.cli.main", *arguments], cwd=ROOT, capture_output=True, check=True
    )


def show(what: str, seconds: list[float]) -> None:
    print(f"{what}: {statistics.median(seconds):.2f} s ({json.dumps([round(one, 2) for one in seconds])})", flush=True)


if __name__ == "__main__":
    main()
