"""`isoflop tune --check`: measure a grid's settings at its corners against half and twice the rate and batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ...train.config import RunConfig, canonical_json, flatten, identity
from ...train.errors import UserError, counted
from ...train.files import write_atomic
from ...train.flops import count_parameters
from .. import prepare
from ..config import EvaluateConfig, TuningConfig
from ..grid.product import CheckGrid
from ..results.finish import write_results
from ..results.table import UNTUNED
from ..runs.directory import RunDirectory, SweepDirectory
from ..runs.membership import members
from .conduct import conduct

FOLDER = "check"  # of the sweep of these runs, in the folder of the one that is checked


def corners(runs: list[RunDirectory]) -> list[RunDirectory]:
    """Return the shortest and the longest run of the smallest and of the largest model."""
    sizes: dict[int, list[RunDirectory]] = {}
    for run in runs:
        sizes.setdefault(count_parameters(run.config().model).N_active, []).append(run)
    ends = sorted({min(sizes), max(sizes)}) if sizes else ()
    longest_and_shortest = [end(sizes[N], key=lambda run: run.config().D) for N in ends for end in (min, max)]
    return list({run.run_id: run for run in longest_and_shortest}.values())


def variants(run: RunConfig) -> list[dict[str, Any] | None]:
    """Return six settings of a run: its own, another seed, half and twice the learning rate, half and twice the batch.

    A setting whose batch is not a positive multiple of parallel.dp is None.
    """
    values = {k: v for k, v in flatten(identity(run)).items() if k.partition(".")[0] not in ("data", "recipe")}
    rate, batch, dp = "optimizer.learning_rate", "optimizer.batch_size", run.parallel.dp
    changes = [{"seed": run.seed + 1}, {rate: values[rate] / 2}, {rate: values[rate] * 2}]
    changes += [{batch: values[batch] // 2}, {batch: values[batch] * 2}]
    shared = [(size := change.get(batch, dp)) >= dp and size % dp == 0 for change in changes]
    return [values, *(values | change if fits else None for change, fits in zip(changes, shared, strict=True))]


def check_corners(sweep: SweepDirectory) -> int:
    """Train a sweep's corner runs with other settings, and write how far each loss is above the best to untuned.csv.

    Returns the exit code.
    """
    from ...fit.hyperparameters.tuning import excess_with_error

    corner_runs = corners([run for run in members(sweep) if run.is_done()])
    if len(corner_runs) < 2:
        raise UserError(
            f"{sweep.path} has {counted(len(corner_runs), 'finished run')}; --check needs at least 2, at the corners "
            "of its grid"
        )
    config, runs = prepare.configuration(sweep), [run.config() for run in corner_runs]
    points = [variants(run) for run in runs]
    new_points = [point for corner in points for point in corner[1:] if point is not None]
    config = replace(config, grid=CheckGrid(points=new_points), tokens=None, data=runs[0].data, tuning=TuningConfig())
    config = replace(config, evaluate=EvaluateConfig(), output_root=str(sweep.path), sweep=FOLDER)
    code = conduct(config, ["isoflop", "tune", "--check", str(sweep.path)])
    losses = {}
    for run in [*corner_runs, *members(SweepDirectory(sweep.path / FOLDER))]:
        if run.is_done():
            losses[canonical_json(variants(run.config())[0])] = (run.summary() or {})["val_loss"]
    corner_losses = np.array([[losses.get(canonical_json(point), math.nan) for point in corner] for corner in points])
    if np.isnan(corner_losses[:, :4]).any():
        print("some runs of this check are not done; run the same command again to continue them")
        return code
    excess, error = excess_with_error(corner_losses[:, :2], corner_losses[:, 2:].reshape(-1, 2, 2))
    rows = [f"{run.run_id},{value:.6g},{se:.6g}\n" for run, value, se in zip(corner_runs, excess, error, strict=True)]
    write_atomic(sweep.path / UNTUNED, "".join(["run_id,excess,excess_se\n", *rows]))
    for corner, value, se in zip(runs, excess, error, strict=True):
        N = count_parameters(corner.model).N_active
        print(
            f"N {N:,}, D {corner.D:,}: loss {value:.2%} ± {se:.2%} above the best within a factor of 2 of its learning "
            "rate and batch size"
        )
    write_results(sweep)
    return code
