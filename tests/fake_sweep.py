"""Sweeps on disk whose runs are not trained: their losses come from a known law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from isoflop.sweeps.config import ClusterConfig, FitConfig, SweepConfig, base_run
from isoflop.sweeps.grid import expand as grid
from isoflop.sweeps.grid.base import GridConfig
from isoflop.sweeps.plan.sweep_plan import plan_runs
from isoflop.sweeps.plan.trunks import merge_runs
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.forms import JobShape, PlannedRun
from isoflop.train.config import RunConfig, run_id
from isoflop.train.files import write_json
from isoflop.train.flops import count_parameters, flops_exact
from small_runs import set_state

TRUTH = {"E": 1.0, "A": 12.0, "B": 40.0, "alpha": 0.3, "beta": 0.32}  # chosen by hand, near tiny byte-level models
NOISE = 0.004  # standard deviation of the log loss


def make_config(points: GridConfig) -> SweepConfig:
    config = SweepConfig(grid=points, fit=FitConfig(bootstrap=100), cluster=ClusterConfig(flops_per_second=1e9))
    config.model.vocab_size, config.tracker.kind = 256, "none"
    return config


def true_loss(N: float, D: float) -> float:
    return float(TRUTH["E"] + TRUTH["A"] * N ** -TRUTH["alpha"] + TRUTH["B"] * D ** -TRUTH["beta"])


def with_fingerprints(run: RunConfig) -> RunConfig:
    return replace(run, data=replace(run.data, fingerprint="fake", tokenizer_fingerprint="bytes"))


def write_sweep(folder: Path, config: SweepConfig) -> SweepDirectory:
    """Write a planned sweep to a folder; `finish` ends its runs."""
    sweep = SweepDirectory(folder)
    assert config.grid is not None
    runs = grid.expand_grid(config.grid, with_fingerprints(base_run(config)), config.tuning)
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"config": asdict(config)}))
    replan(sweep, config, runs)
    return sweep


def replan(sweep: SweepDirectory, config: SweepConfig, runs: Sequence[RunConfig]) -> None:
    planned = merge_runs(runs).runs
    for run in planned:
        sweep.run(run_id(run)).freeze(run)
    write_json(sweep.path / "plan.json", plan_runs(planned, config.cluster, 1e9, 2).to_dict())


def planned_run(run_id: str, **changes: Any) -> dict[str, Any]:
    """Return the entry of a run in plan.json."""
    run = PlannedRun(
        run_id=run_id, name=run_id, N_total=1, N_non_embedding=1, N_kaplan=1, D=1, flops_6nd=1.0, flops_exact=1.0,
        flops_own=1.0, budget=None, width=8, depth=1, heads=1, steps=10, seed=0, sequence_length=8, precision="fp32",
        shape=JobShape(0, 1, 1.0, 60), mesh="", estimated_seconds=60.0,
    )  # fmt: skip
    return asdict(replace(run, **changes))


def finish(sweep: SweepDirectory, seed: int = 0) -> None:
    """Give every unfinished run a loss: that of the law, times noise determined by the run's id."""
    for directory in sweep.runs():
        if directory.is_done():
            continue
        run = directory.config()
        N = count_parameters(run.model).N_total
        noise = np.random.default_rng([seed, int(directory.run_id, 16)]).normal(0.0, NOISE)
        write_json(
            directory.path / "summary.json",
            {
                "step": run.steps, "D": run.D, "N_total": N, "flops_exact": flops_exact(run),
                "val_loss": true_loss(N, run.D) * float(np.exp(noise)), "val_loss_se": 0.01,
            },
        )  # fmt: skip
        set_state(directory, "done")
