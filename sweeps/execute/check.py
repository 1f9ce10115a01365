"""`isoflop tune --check`: what a grid's settings cost at its corners, by runs at half and twice the rate and batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ...train.config import RunConfig, canonical_json, flatten, identity
from ...train.errors import UserError
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
    """The shortest and the longest run of the smallest and of the largest model."""
    sizes: dict[int, list[RunDirectory]] = {}
    for run in runs:
        sizes.setdefault(count_parameters(run.config().model).N_active, []).append(run)
    ends = sorted({min(sizes), max(sizes)}) if sizes else ()
    found = [end(sizes[N], key=lambda run: run.config().D) for N in ends for end in (min, max)]
    return list({run.run_id: run for run in found}.values())


def variants(run: RunConfig) -> list[dict[str, Any] | None]:
    """A corner as a point of a grid; with another seed; at half and twice the rate, and half and twice the batch (None
    where there is none).
    """
    own = {k: v for k, v in flatten(identity(run)).items() if k.partition(".")[0] not in ("data", "recipe")}
    rate, batch = "optimizer.learning_rate", "optimizer.batch_size"
    changes = [{"seed": run.seed + 1}, {rate: own[rate] / 2}, {rate: own[rate] * 2}]
    changes += [{batch: own[batch] // 2}, {batch: own[batch] * 2}]
    return [own, *(None if change.get(batch) == 0 else own | change for change in changes)]


def check_corners(sweep: SweepDirectory) -> int:
    """Trains them in SWEEP/check, where an interrupted check goes on; writes SWEEP/untuned.csv, and the report anew."""
    from ...fit.hyperparameters.tuning import excess_with_error

    at = corners([run for run in members(sweep) if run.is_done()])
    if len(at) < 2:
        raise UserError(f"{sweep.path} has {len(at)} runs done, and a check compares the corners of a finished grid")
    config, runs = prepare.configuration(sweep), [run.config() for run in at]
    points = [variants(run) for run in runs]
    asked = [point for each in points for point in each[1:] if point is not None]
    config = replace(config, grid=CheckGrid(points=asked), tokens=None, data=runs[0].data, tuning=TuningConfig())
    config = replace(config, evaluate=EvaluateConfig(), output_root=str(sweep.path), sweep=FOLDER)
    code = conduct(config, ["isoflop", "tune", "--check", str(sweep.path)])
    losses = {}
    for run in [*at, *members(SweepDirectory(sweep.path / FOLDER))]:
        if run.is_done():
            losses[canonical_json(variants(run.config())[0])] = (run.summary() or {})["val_loss"]
    found = np.array([[losses.get(canonical_json(point), math.nan) for point in each] for each in points])
    if np.isnan(found[:, :4]).any():
        print("some runs of this check are not done; the same command goes on with them")
        return code
    excess, error = excess_with_error(found[:, :2], found[:, 2:].reshape(-1, 2, 2))
    rows = [f"{run.run_id},{e:.6g},{se:.6g}\n" for run, e, se in zip(at, excess, error, strict=True)]
    write_atomic(sweep.path / UNTUNED, "".join(["run_id,excess,excess_se\n", *rows]))
    for corner, e, se in zip(runs, excess, error, strict=True):
        N = count_parameters(corner.model).N_active
        print(f"N {N:,}, D {corner.D:,}: {e:.2%} ± {se:.2%} above the best within a factor of 2 of its rate and batch")
    write_results(sweep)
    return code
