"""Time a whole sweep with shared trunks and without: `isoflop bench grid`.

Ours is `isoflop sweep`, from its start to its report. The peer is the same with `trunks=false`: every run trains from its
first step. Neither is scored, and shards are built before. A row states the largest difference of the final held-out
losses of both, in nats, and the share of FLOPs that trunks need.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..sweeps.entry import compose
from ..sweeps.plan.rates import core_flops_per_second
from ..sweeps.prepare import resolve_runs
from ..train.errors import UserError
from ..train.files import read_json
from .timing import Row, timed_row

ABOUT = "training and fit of a whole sweep, without scoring; FLOPs by the exact convention"
GRACE_SECONDS = 40.0  # that an interrupted sweep has to save
# With fixed tuning, runs of one size share trunks. The ladder has 1/2, 1, 2, 4 and 8 times 20 tokens per parameter.
CASES = {
    "ladder": ["+grid=ladder", "grid.tokens_per_parameter=[10,20,40,80,160]", "tuning=fixed"],
    "chinchilla": ["+grid=chinchilla", "tuning=fixed"],
}


def bench_grid(minutes: float = 4.5, rounds: int = 2, cases: Sequence[str] = tuple(CASES)) -> Iterator[Row]:
    """Yield FLOPs and wall clock of whole sweeps; budgets of chinchilla are chosen to train for `minutes`."""
    for case in cases:
        if case not in CASES:
            raise UserError(f"--case is {case!r}; it must be {' or '.join(CASES)}")
    if not minutes > 0:
        raise UserError(f"--minutes is {minutes}; it must be greater than 0")
    common = ["cluster=local", "tracker=none", "evaluate=none", "preflight=false", f"cluster.minutes={minutes}"]
    common.append(f"cluster.flops_per_second={core_flops_per_second():.4g}")
    for case in cases:
        yield _row(case, [*CASES[case], *common], rounds)


def _row(case: str, overrides: list[str], rounds: int) -> Row:
    from ..train.data.shards import prepare

    prepare(resolve_runs(compose(overrides))[0][0].data)
    seconds: tuple[list[float], list[float]] = ([], [])
    difference = share = 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder, losses, flops = Path(name), [], []
            for side, trunks in enumerate(("true", "false")):
                root = folder / trunks
                options = [f"trunks={trunks}", "sweep=measured", f"output_root={root}"]
                command = [sys.executable, "-m", "isoflop", "sweep", *overrides, *options]
                seconds[side].append(run_alone(command, folder))
                losses.append(final_losses(root / "measured"))
                plan = read_json(root / "measured" / "plan.json") or {}
                flops.append(sum(run["flops_own"] for run in plan["runs"]))
            difference, share = max(difference, largest_gap(*losses)), flops[0] / flops[1]
    case = f"{case}: {len(losses[0])} runs of {flops[1]:.2g} FLOPs"
    row = timed_row(case, 3600.0, "sweeps/hour", *seconds, "trunks=false", torch.device("cpu"))
    return row | {
        "seconds": 3600.0 / row["ours"],
        "peer_seconds": 3600.0 / row["peer"],
        "flops_share": share,
        "difference": difference,
    }


def final_losses(sweep: Path) -> dict[str, float]:
    """Return the final held-out loss of each run, by run id."""
    summaries = {path.name: read_json(path / "summary.json") for path in sorted((sweep / "runs").iterdir())}
    missing = [name for name, summary in summaries.items() if summary is None]
    if missing:
        raise UserError(f"run {missing[0]} of the measured sweep did not end, so its time cannot be compared")
    return {name: float(summary["val_loss"]) for name, summary in summaries.items() if summary is not None}


def largest_gap(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Return the largest difference of two losses of the same run."""
    if ours.keys() != theirs.keys():
        raise UserError("the two sides of the benchmark trained different runs; nothing can be compared")
    return max(abs(ours[name] - theirs[name]) for name in ours)


def run_alone(command: list[str], folder: Path) -> float:
    """Return the wall-clock seconds of a command; all of its processes are ended, even after an interrupt."""
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
        lines = output.read().strip().splitlines()
    if code:
        raise UserError(f"a measured sweep ended with {code}: {lines[-1] if lines else 'it printed nothing'}")
    return seconds
