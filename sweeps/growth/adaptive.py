"""The loop of an adaptive grid: after each fit, the runs of the next round, until it is over.

Special here:
- adaptive.json in the sweep's folder holds what was asked and why it ended. A round is written there before anybody
  adds its runs, so a kill in between loses nothing: the same round is asked for again until its runs have been tried;
- what is spent is counted from plan.json, runs that failed included;
- an end is written down and not held to: where runs were tried again since, or the grid asks for more, it goes on;
- later rounds are larger, for they know more of where runs are worth having.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.config import run_id
from ...train.errors import UserError
from ...train.files import read_json, write_json
from .. import prepare
from ..config import AdaptiveGrid, PointsGrid
from ..grid import expand as grid
from ..grid.trunks import own_flops
from ..runs import membership
from ..runs.directory import SweepDirectory
from .suggest import NothingToSuggest, Standing, stand, suggest_from

if TYPE_CHECKING:
    from ..config import SweepConfig

RECORD = "adaptive.json"
GROWTH = 1.7  # FLOPs of a round over those of the round before
SPENT = 0.02  # of the FLOPs: less than this is no round


def next_round(sweep: SweepDirectory, config: SweepConfig) -> dict[str, Any] | None:
    """The points grid of the next round; None where the grid is over, and adaptive.json then says why.

    To be called when nothing of the sweep is left to run, by whoever holds the sweep. While runs of the newest round
    have not been started, or go on, the answer is that round again.

    Raises:
        UserError: the sweep's grid is no adaptive one, or its folder cannot be read.
    """
    points = config.grid
    if not isinstance(points, AdaptiveGrid):
        raise UserError(f"grid.kind of {sweep.path} is {getattr(points, 'kind', None)!r}; only adaptive has rounds")
    record = read_json(_file(sweep)) or {"rounds": [], "ended": None}
    rounds = record["rounds"]
    if rounds and _is_under_way(sweep, rounds[-1]["runs"]):
        return dict(rounds[-1]["grid"])
    try:
        asked = _ask(sweep, config, points, len(rounds))
    except NothingToSuggest as error:
        asked = str(error)
    if isinstance(asked, str):
        write_json(_file(sweep), record | {"ended": asked})
        return None
    write_json(_file(sweep), {"rounds": [*rounds, asked], "ended": None})
    return dict(asked["grid"])


def told(sweep: SweepDirectory) -> str:
    """What adaptive.json says last, for people: the newest round and what it should bring, or why there is no more."""
    record = read_json(_file(sweep)) or {"rounds": [], "ended": None}
    if record["ended"] is not None or not record["rounds"]:
        return f"the adaptive grid is over: {record['ended']}"
    newest = record["rounds"][-1]

    def interval(when: str) -> str:
        ends = (newest[when]["loss"][end] for end in ("low", "high"))
        return "[" + ", ".join("unbounded" if end is None else f"{end:.3f}" for end in ends) + "]"

    return (
        f"round {len(record['rounds'])}: {len(newest['runs'])} runs of {newest['flops']:.3g} FLOPs; the 95 % interval "
        f"of the loss at {newest['target_flops']:.3g} FLOPs is {interval('before')}, and should come to "
        f"{interval('expected')}"
    )


def _ask(sweep: SweepDirectory, config: SweepConfig, points: AdaptiveGrid, number: int) -> dict[str, Any] | str:
    """The next round as adaptive.json holds it, or why there is none."""
    base = prepare.resolved_base(sweep, config)
    base.tokens = 0
    cap = grid.largest_flops(points)
    total = grid.adaptive_flops(points, base)
    target = points.target_flops or max(config.fit.targets, default=1000.0 * cap)
    standing = stand(sweep, config, target)
    reached = _reached(points, standing)
    if reached is not None:
        return reached
    if number >= points.rounds:
        return f"all {points.rounds} rounds are over"
    spent = _spent(sweep)
    left = total - spent
    if left < SPENT * total:
        return f"{spent:.3g} of {total:.3g} FLOPs are spent"
    shares = [GROWTH**i for i in range(number, points.rounds)]
    found = suggest_from(
        sweep, config, standing, left * shares[0] / sum(shares), max_flops=cap, max_runs=points.round_runs
    )
    said = found.to_dict()
    added = grid.expand_grid(PointsGrid(points=found.grid["points"]), base)
    return {
        "runs": [run_id(run) for run in added],
        "flops": found.flops,
        "flops_before": spent,
        "flops_budget": total,
        "target_flops": standing.target_flops,
        "before": said["before"],
        "expected": said["after"],
        "grid": found.grid,
    }


def _reached(points: AdaptiveGrid, standing: Standing) -> str | None:
    """A sentence, where the intervals at the target are as narrow as was asked for."""
    asked = [
        (name, estimate.relative_width, limit)
        for name, estimate, limit in (
            ("loss", standing.loss, points.tolerance),
            ("N", standing.N, points.size_tolerance),
        )
        if limit is not None
    ]
    if not asked or not all(width <= limit for _, width, limit in asked):
        return None
    said = " and ".join(f"{width:.2%} of the {name} (asked for {limit:.2%})" for name, width, limit in asked)
    return f"the 95 % interval at {standing.target_flops:.3g} FLOPs is {said}"


def _is_under_way(sweep: SweepDirectory, runs: list[str]) -> bool:
    """Whether a run of a round is not part of the sweep yet, or has not ended."""
    members = {run.run_id: run for run in membership.members(sweep)}
    return any(name not in members or members[name].state().state in ("planned", "queued", "running") for name in runs)


def _spent(sweep: SweepDirectory) -> float:
    """Training FLOPs of all runs of the plan; of runs that were added since, what they cost by themselves."""
    planned = {run["run_id"]: float(run["flops_own"]) for run in sweep.plan()["runs"]}
    later = [run.config() for run in membership.members(sweep) if run.run_id not in planned]
    return sum(planned.values()) + sum(map(own_flops, later))


def _file(sweep: SweepDirectory) -> Path:
    return sweep.path / RECORD
