"""A sweep grows: by budgets or sizes that somebody adds, by what is tried in place of a run that diverged, by rounds.

Special here:
- a run is added by its frozen config and a line in `added.json` (`membership.add_runs`); whoever plans the sweep next
  finds it there, be it this command, the launcher at work or the keeper;
- what takes the place of a diverged run is a new run with an identity of its own, and is not replaced in its turn.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from ...train.config import RunConfig
from ...train.errors import UserError
from .. import prepare
from ..config import GridConfig, SweepConfig, from_mapping
from ..grid import expand as grid
from ..runs import membership
from ..runs.directory import RunDirectory, SweepDirectory
from ..terminal import short


def extend_sweep(sweep: SweepDirectory, overrides: list[str], grid_file: Path | None = None) -> list[str]:
    """Adds runs to a sweep; returns the ids of those that are new.

    Args:
        sweep: may be at work.
        overrides: of the sweep's own grid, as for sweep.py: `grid.budgets=[1e19]`.
        grid_file: YAML of a whole grid, such as `isoflop suggest` writes.

    Raises:
        UserError: neither or both were given, or they make no grid.
    """
    if bool(overrides) == (grid_file is not None):
        raise UserError("extend needs what to add: overrides of the grid, such as grid.budgets=[1e19], or --grid FILE")
    config = prepare.configuration(sweep)
    if grid_file is not None:
        wanted, why = read_grid(grid_file), f"extended by {grid_file}"
    else:
        wanted, why = _overridden(config, overrides), f"extended by {' '.join(overrides)}"
    names = add_grid(sweep, config, wanted, why)
    if not names:
        print(f"every run of it is part of {sweep.path} already; nothing was added")
    else:
        print(f"added {len(names)} runs to {sweep.path}")
    return names


def read_grid(file: Path) -> GridConfig:
    """A grid from a YAML file.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--grid is {file}, which cannot be read ({_first_line(error)}); give a YAML file") from error
    if not isinstance(values, dict) or "kind" not in values:
        raise UserError(f"--grid is {file}, which holds no grid; it must be a mapping with kind and its fields")
    return as_grid(values, file)


def as_grid(values: dict[str, Any], source: object) -> GridConfig:
    """Plain values as a grid, every field checked.

    Raises:
        UserError: they are none.
    """
    remedy = "correct it; conf/grid/ has one of each kind, with its fields"
    result = from_mapping({"grid": values}, source, remedy).grid
    assert result is not None
    return result


def add_grid(sweep: SweepDirectory, config: SweepConfig, wanted: GridConfig, why: str) -> list[str]:
    """Adds a grid's runs to a sweep; returns the ids of those that are new."""
    return membership.add_runs(sweep, grid.expand_grid(wanted, prepare.resolved_base(sweep, config)), why)


def replace_diverged(sweep: SweepDirectory, config: SweepConfig) -> list[str]:
    """Adds a run for every one that diverged, where the grid asks for that; returns the ids of those that are new."""
    factor = config.grid.diverged_rate_factor if config.grid is not None else None
    if factor is None or membership.is_stopped(sweep):
        return []
    diverged = [run for run in membership.members(sweep) if run.state().state == "diverged"]
    return [name for run in diverged for name in replace_one(sweep, run, factor)]


def replace_one(sweep: SweepDirectory, run: RunDirectory, factor: float) -> list[str]:
    """Adds a run like another one with its learning rate times `factor`, unless the other one is such a run itself."""
    if run.run_id in membership.replacements(sweep):
        return []
    other = at_lower_rate(run.config(), factor)
    return membership.add_runs(sweep, [other], f"run {run.run_id} diverged", replaces=run.run_id)


def at_lower_rate(config: RunConfig, factor: float) -> RunConfig:
    """The same run with its learning rate times `factor`, without a trunk: that had the higher rate."""
    run = copy.deepcopy(config)
    run.optimizer.learning_rate *= factor
    run.parent, run.checkpoint = None, replace(run.checkpoint, at_steps=None)
    run.name = f"{config.name}_lr{short(run.optimizer.learning_rate)}"
    return run


def next_round(sweep: SweepDirectory, config: SweepConfig) -> bool:
    """Of an adaptive grid: adds the runs of its next round; False where it is over, or there is no such grid."""
    if config.grid is None or config.grid.kind != "adaptive" or membership.is_stopped(sweep):
        return False
    from . import adaptive

    wanted = adaptive.next_round(sweep, config)
    added = []
    if wanted is not None:
        added = add_grid(sweep, config, as_grid(wanted, sweep.path / "adaptive.json"), "a round of the adaptive grid")
    print(adaptive.told(sweep))
    return bool(added)


def _overridden(config: SweepConfig, overrides: list[str]) -> GridConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if not override.startswith("grid.") or "=" not in override:
            raise UserError(
                f"extend was given {override!r}; it must be FIELD=VALUE with a field of the grid, as grid.sizes=[1e5]"
            )
    try:
        merged = OmegaConf.merge(OmegaConf.create({"grid": asdict(config)["grid"]}), OmegaConf.from_dotlist(overrides))
        plain = OmegaConf.to_container(merged)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"extend was given {' '.join(overrides)!r}: {_first_line(error)}") from error
    assert isinstance(plain, dict)
    return as_grid(plain["grid"], "the grid with what extend was given")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
