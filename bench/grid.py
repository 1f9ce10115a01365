"""Time a whole sweep with shared trunks and without: `isoflop bench grid`.

Ours is `isoflop sweep`, from its start to its report, without scoring. The peer is the same with `trunks=false`: every
run trains from its first step. A row has the largest difference of final losses, and the share of FLOPs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..sweeps.entry import compose
from ..sweeps.plan.rates import core_flops_per_second
from ..sweeps.prepare import resolve_runs
from ..train.errors import UserError
from ..train.files import read_json
from .timing import Row, isoflop, timed_row

ABOUT = "training and fit of a whole sweep, without scoring; FLOPs by the exact convention"
# With fixed tuning, runs of one size share trunks. The ladder has 1/2, 1, 2, 4 and 8 times 20 tokens per parameter.
CASES = {
    "ladder": ["+grid=ladder", "grid.tokens_per_parameter=[10,20,40,80,160]", "tuning=fixed"],
    "chinchilla": ["+grid=chinchilla", "tuning=fixed"],
}


def bench_grid(minutes: float = 4.5, rounds: int = 2, cases: Sequence[str] = tuple(CASES)) -> Iterator[Row]:
    """Yield rows of whole sweeps with and without trunks; budgets of chinchilla are chosen to train for `minutes`."""
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
                seconds[side].append(isoflop("sweep", *overrides, *options))
                losses.append(final_losses(root / "measured"))
                plan = read_json(root / "measured" / "plan.json") or {}
                flops.append(sum(run["flops_own"] for run in plan["runs"]))
            difference, share = max(difference, largest_gap(*losses)), flops[0] / flops[1]
    case = f"{case}: {len(losses[0])} runs of {flops[1]:.2g} FLOPs"
    row = timed_row(case, 3600.0, "sweeps/hour", *seconds, "trunks=false", torch.device("cpu"))
    return row | {"flops_share": share, "difference": difference}


def final_losses(sweep: Path) -> dict[str, float]:
    """Return the final held-out loss of each run, by run id."""
    summaries = {path.name: read_json(path / "summary.json") for path in sorted((sweep / "runs").iterdir())}
    missing = [name for name, summary in summaries.items() if summary is None]
    if missing:
        raise UserError(f"run {missing[0]} of the measured sweep did not finish, so its time cannot be compared")
    return {name: float(summary["val_loss"]) for name, summary in summaries.items() if summary is not None}


def largest_gap(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Return the largest difference between the two sides' losses of the same run."""
    if ours.keys() != theirs.keys():
        raise UserError("the two sides of the benchmark trained different runs; nothing can be compared")
    return max(abs(ours[name] - theirs[name]) for name in ours)
