"""A sweep grows: by what somebody adds, by what replaces a run that diverged, by an adaptive grid's rounds.

Whoever plans the sweep next finds the runs in `added.json`. A round is written to adaptive.json before its runs are
added, so that after a kill the same round is asked for again.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from ...train.config import run_id
from ...train.errors import UserError, counted
from ...train.files import read_document, read_json, write_json
from .. import prepare
from ..config import AdaptiveGrid, GridConfig, PointsGrid, SweepConfig, TuneGrid, from_mapping
from ..grid import expand as grid
from ..grid.trunks import own_flops
from ..grid.tune import rung_runs
from ..grid.tuning import Tuner
from ..plan.foresight import foresee
from ..results.tuned import tried_settings
from ..runs import membership
from ..runs.directory import RunDirectory, SweepDirectory
from ..terminal import short

RECORD = "adaptive.json"
GROWTH = 1.7  # FLOPs of a round over those of the one before: later ones know more of where runs are worth having
SPENT = 0.02  # of the FLOPs: less than this is no round


def extend_sweep(sweep: SweepDirectory, overrides: list[str], grid_file: Path | None = None) -> list[str]:
    """Adds runs, by `overrides` of the sweep's own grid or a YAML file of a whole one; returns the new ids."""
    if bool(overrides) == (grid_file is not None):
        raise UserError("extend needs what to add: overrides of the grid, such as grid.budgets=[1e19], or --grid FILE")
    config = prepare.configuration(sweep)
    wanted = _overridden(config, overrides) if grid_file is None else read_grid(grid_file)
    names = add_grid(sweep, config, wanted, f"extended by {grid_file or ' '.join(overrides)}")
    none = f"every run of it is part of {sweep.path} already; nothing was added"
    print(f"added {counted(len(names), 'run')} to {sweep.path}" if names else none)
    return names


def read_grid(file: Path) -> GridConfig:
    values = read_document(file, dict[str, Any], remedy="--grid takes YAML, a mapping with kind and its fields")
    if "kind" not in values:
        raise UserError(f"--grid is {file}, which holds no grid; it must be a mapping with kind and its fields")
    return as_grid(values, file)


def as_grid(values: dict[str, Any], source: object) -> GridConfig:
    remedy = "correct it; conf/grid/ has one of each kind, with its fields"
    result = from_mapping({"grid": values}, source, remedy).grid
    assert result is not None
    return result


def add_grid(sweep: SweepDirectory, config: SweepConfig, wanted: GridConfig, why: str) -> list[str]:
    """Returns the ids of the runs that are new; says what the fit of all of them would lack."""
    present = [run.config() for run in membership.members(sweep)]
    runs = grid.expand_grid(wanted, prepare.resolved_base(sweep, config), config.tuning, present)
    for line in foresee(wanted, runs, Tuner(config.tuning), present):
        print(f"note: {line}")
    return membership.add_runs(sweep, runs, why)


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


def replace_diverged(sweep: SweepDirectory, config: SweepConfig) -> list[str]:
    """Adds a run for every one that diverged, where the grid asks for that; returns the new ids."""
    factor = config.grid.diverged_rate_factor if config.grid is not None else None
    if factor is None or membership.is_stopped(sweep):
        return []
    diverged = [run for run in membership.members(sweep) if run.state().state == "diverged"]
    return [name for run in diverged for name in replace_one(sweep, run, factor)]


def replace_one(sweep: SweepDirectory, run: RunDirectory, factor: float) -> list[str]:
    """Adds a run with the learning rate times `factor`, unless the other one is such a run itself."""
    if run.run_id in membership.replacements(sweep):
        return []
    other = copy.deepcopy(run.config())
    other.optimizer.learning_rate *= factor
    # Without a trunk: that had the higher rate.
    other.parent, other.checkpoint = None, replace(other.checkpoint, at_steps=None)
    other.name = f"{other.name}_lr{short(other.optimizer.learning_rate)}"
    return membership.add_runs(sweep, [other], f"run {run.run_id} diverged", replaces=run.run_id)


def next_round(sweep: SweepDirectory, config: SweepConfig) -> bool:
    """Adds the next round of an adaptive grid, or rung of a tune; False where it is over, or the grid is another."""
    if membership.is_stopped(sweep):
        return False
    if isinstance(config.grid, TuneGrid):
        return _next_rung(sweep, config, config.grid)
    if not isinstance(config.grid, AdaptiveGrid):
        return False
    wanted = ask_round(sweep, config)
    added = wanted and add_grid(sweep, config, as_grid(wanted, sweep.path / RECORD), "a round of the adaptive grid")
    print(round_summary(sweep))
    return bool(added)


def _next_rung(sweep: SweepDirectory, config: SweepConfig, wanted: TuneGrid) -> bool:
    base, tried = prepare.resolved_base(sweep, config), tried_settings(sweep)
    there = [(config.model, config.tokens) for config in (run.config() for run in membership.members(sweep))]
    for rung in range(1, len(wanted.tokens_per_parameter)):
        runs = list(rung_runs(wanted, base, Tuner(config.tuning), rung, tried))
        if not all((run.model, run.tokens) in there for run in runs):
            print(f"rung {rung + 1} of {len(wanted.tokens_per_parameter)}: {counted(len(runs), 'run')}")
            named = [replace(run, name=grid.run_label(run)) for run in runs]
            return bool(membership.add_runs(sweep, named, f"rung {rung + 1} of the tune"))
    return False


def ask_round(sweep: SweepDirectory, config: SweepConfig) -> dict[str, Any] | None:
    """The points grid of the next round; None where the grid is over, and adaptive.json then says why."""
    points = config.grid
    if not isinstance(points, AdaptiveGrid):
        raise UserError(f"grid.kind of {sweep.path} is {getattr(points, 'kind', None)!r}; only adaptive has rounds")
    from .suggest import NothingToSuggest

    record = _record(sweep)
    rounds = record["rounds"]
    left = ("planned", "queued", "running")
    over = {run.run_id for run in membership.members(sweep) if run.state().state not in left}
    if rounds and not over.issuperset(rounds[-1]["runs"]):  # the newest round is still the next one
        return dict(rounds[-1]["grid"])
    try:
        asked = _ask(sweep, config, points, len(rounds))
    except NothingToSuggest as error:
        # This end is not final: where runs were tried again since, or the grid asks for more, it goes on.
        write_json(sweep.path / RECORD, record | {"ended": str(error)})
        return None
    write_json(sweep.path / RECORD, {"rounds": [*rounds, asked], "ended": None})
    return dict(asked["grid"])


def round_summary(sweep: SweepDirectory) -> str:
    """The newest round and what it should bring, or why there is no more."""
    record = _record(sweep)
    if record["ended"] is not None or not record["rounds"]:
        return f"the adaptive grid is over: {record['ended']}"
    newest = record["rounds"][-1]

    def interval(when: str) -> str:
        ends = (newest[when]["loss"][end] for end in ("low", "high"))
        return "[" + ", ".join("unbounded" if end is None else f"{end:.3f}" for end in ends) + "]"

    return (
        f"round {len(record['rounds'])}: {counted(len(newest['runs']), 'run')} of {newest['flops']:.3g} FLOPs; the "
        f"95 % interval of the loss at {newest['target_flops']:.3g} FLOPs is {interval('before')}, and should come to "
        f"{interval('expected')}"
    )


def _record(sweep: SweepDirectory) -> dict[str, Any]:
    return read_json(sweep.path / RECORD) or {"rounds": [], "ended": None}


def _ask(sweep: SweepDirectory, config: SweepConfig, points: AdaptiveGrid, number: int) -> dict[str, Any]:
    from .suggest import NothingToSuggest, fit_standing, suggest_from

    base = prepare.resolved_base(sweep, config)
    base.tokens = 0
    cap = grid.largest_flops(points)
    total = grid.adaptive_flops(points, base, Tuner(config.tuning))
    standing = fit_standing(sweep, config, points.target_flops or max(config.fit.targets, default=1000.0 * cap))
    if points.tolerance is not None and (width := standing.loss.relative_width) <= points.tolerance:
        said = f"{width:.2%} of the loss (asked for {points.tolerance:.2%})"
        raise NothingToSuggest(f"the 95 % interval at {standing.target_flops:.3g} FLOPs is {said}")
    if number >= points.rounds:
        raise NothingToSuggest(f"all {points.rounds} rounds are over")
    planned = {run["run_id"]: float(run["flops_own"]) for run in sweep.plan()["runs"]}
    present = {run.run_id: run.config() for run in membership.members(sweep)}
    added = [run for name, run in present.items() if name not in planned]
    spent = sum(planned.values()) + sum(map(own_flops, added))  # of runs that failed too
    left = total - spent
    if left < SPENT * total:
        raise NothingToSuggest(f"{spent:.3g} of {total:.3g} FLOPs are spent")
    shares = [GROWTH**i for i in range(number, points.rounds)]
    budget = left * shares[0] / sum(shares)
    found = suggest_from(sweep, config, standing, budget, seeds=1, max_flops=cap, max_runs=points.round_runs)
    expected = found.to_dict()
    runs = grid.expand_grid(PointsGrid(points=found.grid["points"]), base, config.tuning, present.values())
    return {
        "runs": list(map(run_id, runs)),
        "flops": found.flops,
        "flops_before": spent,
        "flops_budget": total,
        "target_flops": standing.target_flops,
        "before": expected["before"],
        "expected": expected["after"],
        "grid": found.grid,
    }
