"""A whole grid beside the same grid with one fresh process per run: `isoflop bench grid`.

Ours is `python sweep.py`, from its start to its report; the peer has no trunks, ensembles and workers: every run is a
new process from its first step, longest first, then the same table, laws and report. Neither is scored, and shards are
built before. A row tells the largest difference between the final held-out losses of both, in nats.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..sweeps.config import LadderGrid, SweepConfig
from ..sweeps.entry import compose
from ..sweeps.grid.trunks import merge_runs
from ..sweeps.plan.rates import core_flops_per_second, fill_budgets, places
from ..sweeps.plan.sweep_plan import Plan, plan_runs
from ..sweeps.prepare import Prepared, resolve_runs, write_plan
from ..sweeps.runs.directory import RunDirectory, SweepDirectory
from ..train.config import RunConfig
from ..train.errors import UserError
from ..train.files import read_json
from .contenders import Row, contract_row, plain_row

ABOUT = "training and fit of a whole sweep, not its scoring; FLOPs by the exact convention"
MULTIPLES = (10, 20, 40, 80, 160)  # tokens per parameter: 1/2, 1, 2, 4 and 8 times twenty
GRACE_SECONDS = 40.0  # what an interrupted sweep gets to save
CASES = ("ladder", "chinchilla")
PEER = "one process per run, from its first step"


def bench_grid(minutes: float = 4.5, rounds: int = 2, cases: Sequence[str] = CASES) -> Iterator[Row]:
    """FLOPs and wall clock of whole sweeps that may train `minutes`.

    Cases: ladder (trunks alone: exactly the same losses, as many sizes as fit) | chinchilla (as it comes).
    """
    for case in cases:
        if case not in CASES:
            raise UserError(f"--case is {case!r}; it must be {' or '.join(CASES)}")
    if not minutes > 0:
        raise UserError(f"--minutes is {minutes}; it must be greater than 0")
    common = [
        "cluster=local",
        "tracker=none",
        "evaluate=none",
        "tuning=fixed",  # so that runs of one size share trunks
        "preflight=false",
        f"cluster.minutes={minutes}",
        f"cluster.flops_per_second={core_flops_per_second():.4g}",
    ]
    if "ladder" in cases:
        ladder = ["+grid=ladder", f"grid.tokens_per_parameter={list(MULTIPLES)}", *common]
        yield flops_row(ladder)
        yield _clock_row("ladder, trunks alone", [*_shortened(ladder, minutes), "ensembles=1"], rounds)
    if "chinchilla" in cases:
        yield _clock_row("chinchilla", ["+grid=chinchilla", *common], rounds)


@dataclass(frozen=True)
class Planned:
    """A sweep as it would be started."""

    config: SweepConfig
    runs: list[RunConfig]  # every one from its first step
    plan: Plan

    @classmethod
    def of(cls, overrides: Sequence[str]) -> Planned:
        config = compose(list(overrides))
        rate = config.cluster.flops_per_second or core_flops_per_second()
        fill_budgets(config.grid, config.cluster, rate)
        room = places(config.cluster, 1, rate)
        runs, _ = resolve_runs(config)
        return cls(config, runs, plan_runs(runs, config.cluster, room.flops_per_second, room.jobs))


def flops_row(overrides: Sequence[str]) -> Row:
    """What the trunks of a grid save: an exact count from the plan."""
    planned = Planned.of(overrides)
    merged = plan_runs(merge_runs(planned.runs).runs, planned.config.cluster, 1.0, 1)
    ours, theirs = merged.total_flops, merged.separate_flops
    case = f"ladder, {len(planned.runs)} runs, D of {', '.join(map(str, MULTIPLES))} tokens per parameter: FLOPs"
    peer, place, rates = "every run from its first step", "none: counted from the plan", (1e15 / ours, 1e15 / theirs)
    return plain_row(case, *rates, peer, "sweeps/PFLOP", place, theirs / ours) | {"flops_share": ours / theirs}


def _shortened(ladder: list[str], minutes: float) -> list[str]:
    """With as many of the ladder's sizes as are estimated to train within so many minutes."""
    planned = Planned.of(ladder)
    grid, cluster = planned.config.grid, planned.config.cluster
    assert isinstance(grid, LadderGrid)
    room = places(cluster, 1, cluster.flops_per_second or 1.0)
    fits = 1
    for count in range(2, len(grid.sizes) + 1):
        some = plan_runs(planned.runs[: count * len(MULTIPLES)], cluster, room.flops_per_second, room.jobs)
        if some.estimated_seconds <= 60 * minutes:
            fits = count
    return [*ladder, f"grid.sizes={list(grid.sizes[:fits])}"]


def _clock_row(name: str, overrides: list[str], rounds: int) -> Row:
    from ..train.data.shards import prepare

    planned = Planned.of(overrides)
    prepare(planned.runs[0].data)
    sweep = [sys.executable, "-c", "import sys; from isoflop.sweeps.entry import sweep_main; sys.exit(sweep_main())"]
    peer = [
        sys.executable,
        "-c",
        "import sys; from isoflop.bench.grid import peer_main; peer_main(sys.argv[1:])",
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    difference = 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            losses = []
            for side, command in enumerate((sweep, peer)):
                root = Path(folder) / str(side)
                seconds[side].append(
                    _run([*command, *overrides, "sweep=measured", f"output_root={root}"], Path(folder))
                )
                losses.append(final_losses(root / "measured"))
            difference = max(difference, *_differences(*losses))
    case = f"{name}: {len(planned.runs)} runs of {planned.plan.total_flops:.2g} FLOPs"
    row = contract_row(case, 3600.0, "sweeps/hour", *seconds, PEER, torch.device("cpu"))
    return row | {
        "device": f"cpu {platform.machine()}, {planned.plan.jobs_at_once} processes at a time",
        "seconds": 3600.0 / row["ours"],
        "peer_seconds": 3600.0 / row["peer"],
        "rounds": rounds,
        "difference": difference,
    }


def final_losses(sweep: Path) -> dict[str, float]:
    """The held-out loss that each run ended with, by run id."""
    found = {path.name: read_json(path / "summary.json") for path in sorted((sweep / "runs").iterdir())}
    missing = [name for name, summary in found.items() if summary is None]
    if missing:
        raise UserError(f"run {missing[0]} of the measured sweep did not end; nothing can be said of its time")
    return {name: float(summary["val_loss"]) for name, summary in found.items() if summary is not None}


def _differences(ours: dict[str, float], theirs: dict[str, float]) -> list[float]:
    if ours.keys() != theirs.keys():
        raise UserError("the two sides of the benchmark trained different runs; nothing can be compared")
    return [abs(ours[name] - theirs[name]) for name in ours]


def _run(command: list[str], folder: Path) -> float:
    """Wall clock of a command in seconds; whatever happens, none of its processes is left."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", dir=folder) as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True)
        try:
            code = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - start
        output.seek(0)
        said = output.read().strip().splitlines()
    if code:
        raise UserError(f"a sweep that was to be measured ended with {code}: {said[-1] if said else 'it said nothing'}")
    return seconds


def peer_main(overrides: list[str]) -> None:
    """The whole sweep with one process per run: plan, training, table, laws and report."""
    from ..sweeps.results.finish import write_results

    planned = Planned.of([item for item in overrides if not item.startswith("sweep=")])
    config, rate = planned.config, planned.config.cluster.flops_per_second
    assert rate is not None
    sweep = SweepDirectory(Path(config.output_root) / "measured")
    prepared = Prepared(sweep, config, planned.runs, planned.plan, rate, remarks=[])
    write_plan(prepared, ["isoflop", "bench", "grid"])
    room = places(config.cluster, 1, rate)
    one_process_a_run(prepared.directories, room.jobs, room.threads)
    write_results(sweep)


def one_process_a_run(runs: Sequence[RunDirectory], at_once: int, threads: int) -> None:
    """Trains runs in the order given, each in a process of its own."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, str(threads))}
    program = (
        "import sys; from isoflop.sweeps.runs.attempts import Policy; "
        "from isoflop.sweeps.execute.worker import train; "
        "train('alone', [sys.argv[1]], Policy())"
    )
    waiting, running = list(runs), list[subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            running = [process for process in running if process.poll() is None]
            while waiting and len(running) < at_once:
                command = [sys.executable, "-c", program, str(waiting.pop(0).path.resolve())]
                running.append(subprocess.Popen(command, env=environment))
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()
