"""Add a user's runs, replacements of diverged runs, or a grid's next round to a sweep.

They are recorded in `added.json`, which the sweep's next plan reads.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from ...train.config import RunConfig, run_id
from ...train.errors import UserError, counted
from ...train.files import read_document
from .. import prepare
from ..config import SweepConfig, from_mapping
from ..runs import membership
from ..runs.directory import RunDirectory, SweepDirectory
from ..terminal import short
from .base import GridConfig
from .expand import expand_grid
from .tuning import Tuner

DRY_RUN = "dry_run=true"


def extend_sweep(sweep: SweepDirectory, overrides: list[str], grid_file: Path | None = None) -> list[str]:
    """Add the runs of the sweep's grid with `overrides`, or of the grid in a YAML file. Returns the new run ids.

    With dry_run=true among the overrides, print the runs and their cost, and add none.
    """
    changes = [override for override in overrides if override != DRY_RUN]
    if bool(changes) == (grid_file is not None):
        raise UserError("extend needs either overrides of the grid, such as grid.budgets=[1e19], or --grid FILE")
    config = prepare.configuration(sweep)
    grid = _overridden(config, changes) if grid_file is None else read_grid(grid_file)
    if len(changes) < len(overrides):
        before, after = (prepare.from_disk(sweep, more).plan for more in ([], _expand(sweep, config, grid)))
        present = {run.run_id for run in before.runs}
        new = [run for run in after.runs if run.run_id not in present]
        added = [f"N {short(run.N_total)} D {short(run.D)} {run.formats or run.mixture}".rstrip() for run in new]
        cost = f"{after.total_flops - before.total_flops:.3g} FLOPs (exact)"
        print("\n".join([*added, f"dry run: {counted(len(added), 'run')} would be added, for {cost}"]))
        return []
    names = add_grid(sweep, config, grid, f"extended by {grid_file or ' '.join(changes)}")
    none = f"{sweep.path} already has all of these runs; nothing was added"
    print(f"added {counted(len(names), 'run')} to {sweep.path}" if names else none)
    return names


def read_grid(file: Path) -> GridConfig:
    values = read_document(file, dict[str, Any], remedy="--grid must be a YAML mapping with kind and its fields")
    if "kind" not in values:
        raise UserError(f"--grid is {file}, which has no kind; it must be a mapping with kind and its fields")
    return as_grid(values, file)


def as_grid(values: dict[str, Any], source: object) -> GridConfig:
    remedy = "see conf/grid/ for an example of each kind with its fields"
    result = from_mapping({"grid": values}, source, remedy).grid
    assert result is not None
    return result


def add_grid(sweep: SweepDirectory, config: SweepConfig, grid: GridConfig, reason: str) -> list[str]:
    """Add the runs of a grid and print notes on the fit. Returns the new run ids."""
    return membership.add_runs(sweep, _expand(sweep, config, grid), reason)


def _expand(sweep: SweepDirectory, config: SweepConfig, grid: GridConfig) -> list[RunConfig]:
    """Return the runs of a grid, and print notes on a fit to these and the sweep's runs."""
    present = [run.config() for run in membership.members(sweep)]
    runs = expand_grid(grid, prepare.resolved_base(sweep, config), config.tuning, present)
    all_runs = list({run_id(run): run for run in (*runs, *present)}.values())
    for line in grid.notes(all_runs, Tuner(config.tuning)):
        print(f"note: {line}")
    return runs


def _overridden(config: SweepConfig, overrides: list[str]) -> GridConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if not override.startswith("grid.") or "=" not in override:
            raise UserError(
                f"extend was given {override!r}; it must be FIELD=VALUE of the grid, such as grid.sizes=[1e5]"
            )
    try:
        merged = OmegaConf.merge(OmegaConf.create({"grid": asdict(config)["grid"]}), OmegaConf.from_dotlist(overrides))
        plain = OmegaConf.to_container(merged)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"extend was given {' '.join(overrides)!r}: {reason}") from error
    assert isinstance(plain, dict)
    return as_grid(plain["grid"], f"the grid with {' '.join(overrides)!r}")


def replace_diverged(sweep: SweepDirectory, config: SweepConfig) -> list[str]:
    """Add a replacement for each diverged run if grid.diverged_rate_factor is set. Returns the new run ids."""
    factor = config.grid.diverged_rate_factor if config.grid is not None else None
    if factor is None or membership.is_stopped(sweep):
        return []
    diverged = [run for run in membership.members(sweep) if run.state().state == "diverged"]
    return [name for run in diverged for name in replace_one(sweep, run, factor)]


def replace_one(sweep: SweepDirectory, run: RunDirectory, factor: float) -> list[str]:
    """Add a copy of a run with the learning rate times `factor`. Returns [its id], or [] if the run is such a copy."""
    if run.run_id in membership.replacements(sweep):
        return []
    other = copy.deepcopy(run.config())
    other.optimizer.learning_rate *= factor
    # Not a branch: the trunk had the higher rate.
    other.parent, other.checkpoint = None, replace(other.checkpoint, at_steps=None)
    other.name = f"{other.name}_lr{short(other.optimizer.learning_rate)}"
    return membership.add_runs(sweep, [other], f"run {run.run_id} diverged", replaces=run.run_id)


def next_round(sweep: SweepDirectory, config: SweepConfig) -> bool:
    return config.grid is not None and not membership.is_stopped(sweep) and config.grid.next_round(sweep, config)
