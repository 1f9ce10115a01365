"""What a run costs beside its training, in a queue and as an array task: `isoflop bench queue`.

The runs are the smallest model for two steps. Overhead per run = (wall clock x workers - what the runs' own calls of
`train` took) / runs; the wall clock is from the first claim to the last end of a unit, so that imports, paid once per
worker, are a column of their own. The peer is submitit alone: an array of tasks that do nothing, as many at a time as
there are workers; it needs SLURM.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..sweeps.runs.attempts import Policy
from ..sweeps.runs.directory import SweepDirectory
from ..sweeps.runs.queue import JOURNAL, Queue, Unit
from ..sweeps.slurm import commands as slurm
from ..train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
    run_id,
)
from ..train.errors import UserError
from ..train.files import read_json_lines, write_json
from .contenders import Row

LENGTH = 32  # tokens of a sequence
PEER = "submitit, one array task per run"
TIMES = "bench-times"  # folder of the seconds that each worker spent in `train`


def bench_queue(runs: int = 1000, workers: int = 2, tasks: int = 50) -> Iterator[Row]:
    """Overhead per run, in milliseconds; `tasks` array tasks of the peer."""
    for name, value, least in (("runs", runs, 1), ("workers", workers, 1), ("tasks", tasks, 0)):
        if value < least:
            raise UserError(f"--{name} is {value}; it must be {least} or more")
    with tempfile.TemporaryDirectory(prefix="isoflop-queue-", dir=os.environ.get("ISOFLOP_BENCH_FOLDER")) as folder:
        ours = measure_queue(Path(folder), runs, workers)
        peer = measure_submitit(Path(folder), tasks, workers) if tasks and shutil.which("sbatch") else None
    yield {
        "case": f"{runs} trivial runs, {workers} workers: overhead per run beside its training",
        "ours": ours["overhead_ms"],
        "peer": peer and peer["milliseconds"],
        "peer_name": PEER,
        "unit": "ms/run",
        "ratio": peer and peer["milliseconds"] / ours["overhead_ms"],
        "spread": ours["spread"],
        "device": f"cpu, {os.cpu_count()} cores",
        **ours,
    }


def trivial_sweep(folder: Path, runs: int) -> tuple[SweepDirectory, Queue]:
    """Runs of two steps, each with its own seed, and a queue of them."""
    from ..train.data.corpora import open_corpus

    text = folder / "text"
    text.mkdir()
    for part in range(20):
        words = (f"word{part * place % 97}" for place in range(400))
        (text / f"{part:02d}.txt").write_text(" ".join(words))
    data = DataConfig(
        corpus="text", path=str(text), sequence_length=LENGTH, validation_tokens=4 * LENGTH, validation_fraction=0.2
    )
    data.fingerprint = open_corpus(data).fingerprint()
    base = RunConfig(
        model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256),
        data=data,
        optimizer=OptimizerConfig(batch_size=1),
        schedule=ScheduleConfig(warmup_tokens=0),
        parallel=ParallelConfig(device="cpu"),
        tracker=TrackerConfig(kind="none"),
        tokens=2 * LENGTH,
        validations=1,
    )
    sweep = SweepDirectory(folder / "sweep")
    names = []
    for seed in range(runs):
        config = replace(base, seed=seed)
        run = sweep.run(run_id(config))
        run.freeze(config)
        run.set_state("planned")
        names.append(run.run_id)
    write_json(sweep.path / "plan.json", {"runs": [{"run_id": name} for name in names]})
    (sweep.path / TIMES).mkdir()
    return sweep, Queue.create(sweep, sweep.path / "jobs" / "queue-bench", [Unit((n,)) for n in names], {})


def measure_queue(folder: Path, runs: int, workers: int) -> dict[str, Any]:
    """Milliseconds per run, and where they went."""
    sweep, queue = trivial_sweep(folder, runs)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = time.time()
    command = [sys.executable, "-m", __spec__.name, str(sweep.path), str(queue.folder)]
    processes = [subprocess.Popen([*command, str(place)], env=environment) for place in range(workers)]
    codes = [process.wait() for process in processes]
    undone = [run.run_id for run in sweep.runs() if not run.is_done()]
    if any(codes) or undone:
        raise UserError(f"{len(undone)} of the benchmark's {runs} runs did not end; its workers exited with {codes}")
    events = read_json_lines(queue.folder / JOURNAL)
    wall = events[-1]["at"] - events[0]["at"]
    calls = [json.loads(path.read_text()) for path in sorted((sweep.path / TIMES).iterdir())]
    own = [seconds for call in calls for seconds in call]
    ends = [event["at"] for event in events if event["event"] == "end"]
    fifths = [ends[len(ends) * part // 5 - 1] if part else events[0]["at"] for part in range(6)]
    pace = [later - earlier for earlier, later in pairwise(fifths)]
    return {
        "overhead_ms": 1e3 * (wall * workers - sum(own)) / runs,
        "whole_ms": 1e3 * wall * workers / runs,
        "training_ms": 1e3 * sum(own) / runs,
        "steps_ms": 1e3 * statistics.mean((run.summary() or {})["seconds"] for run in sweep.runs()),
        "start_up_s": events[0]["at"] - started,
        "runs_per_s": runs / wall,
        # Of the fifths of the queue: a journal that slows down as it grows would show.
        "spread": statistics.pstdev(pace) / statistics.mean(pace),
        "last_over_first": pace[-1] / pace[0],
    }


def timed_worker(sweep_path: str, queue_folder: str, place: int) -> None:
    """A worker that writes down how long each of its trainings took."""
    from ..sweeps.execute import worker
    from ..train import loop

    train, seconds = loop.train, list[float]()

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return train(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    loop.train = timed
    worker.work(sweep_path, queue_folder, Policy(), place)
    (Path(sweep_path) / TIMES / f"{place}.json").write_text(json.dumps(seconds))


def measure_submitit(folder: Path, tasks: int, workers: int) -> dict[str, float]:
    """Milliseconds of one place's time that an array task costs which does nothing."""
    import submitit

    executor = submitit.SlurmExecutor(folder=folder / "submitit")
    executor.update_parameters(
        job_name="isoflop-bench",
        time=5,
        cpus_per_task=1,
        mem="200M",
        array_parallelism=workers,
        stderr_to_stdout=True,
        additional_parameters={"chdir": str(folder)},
    )
    began = time.time()
    with slurm.outside_any_job():
        jobs = executor.map_array(int, range(tasks))
    names = {str(job.job_id) for job in jobs}
    while names & slurm.live_jobs():
        time.sleep(0.2)
    wall = time.time() - began
    if missing := [job.job_id for job in jobs if not job.paths.result_pickle.exists()]:
        raise UserError(f"{len(missing)} of the peer's array tasks left no result, the first of them {missing[0]}")
    return {"milliseconds": 1e3 * wall * workers / tasks, "wall_s": wall}


if __name__ == "__main__":
    sweep_path, queue_folder, place = sys.argv[1:]
    timed_worker(sweep_path, queue_folder, int(place))
