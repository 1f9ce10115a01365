"""A grid that grows in rounds.

A round is written to adaptive.json before its runs are added, so that a killed sweep repeats the same round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...train.config import RunConfig, run_id
from ...train.errors import UserError, counted
from ...train.fields import Count, Positive
from ...train.files import read_json, write_json
from ..config import SweepConfig
from ..plan.trunks import own_flops, trained_flops
from ..prepare import resolved_base
from ..runs import membership
from ..runs.directory import SweepDirectory
from .expand import expand_grid
from .isoflop import IsoflopGrid
from .product import PointsGrid
from .tuning import Tuner

FIRST_BUDGETS, FIRST_SIZES = 3, 4  # of the first round: 12 runs, enough to fit a law's five constants
FIRST_STEP = 3.0  # ratio of two neighbouring budgets
FIRST_TRIES = 81  # values tried for the largest of these budgets, over four decades
FIRST_SHARE = 0.2  # share of the FLOPs for the first round
RECORD = "adaptive.json"
GROWTH = 1.7  # ratio of the FLOPs of two successive rounds: later rounds choose better
ROUND_RUNS = 16  # most runs of a round
SPENT = 0.02  # share of the FLOPs below which no further round starts


@dataclass
class AdaptiveGrid(IsoflopGrid):
    """A small isoFLOP grid, then rounds of runs that `isoflop suggest` chooses, each after a fit."""

    kind: str = "adaptive"
    flops_budget: Positive | None = None  # training FLOPs of all rounds; None: the cost of that isoFLOP grid
    tolerance: Positive | None = 0.02  # stop when the relative width of the loss's 95 % interval falls below this
    rounds: Count = 3  # most rounds of suggested runs

    takes_variants: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    @property
    def largest_flops(self) -> float:
        """Return the largest of `budgets`, which no run may exceed."""
        return max(self.budgets or [math.inf])

    def total_flops(self, base: RunConfig, tuner: Tuner) -> float:
        return self.flops_budget or trained_flops(list(self.isoflop_runs(base, tuner)))

    def runs(self, base: RunConfig, tuner: Tuner) -> list[RunConfig]:
        """Return the first round: the isoFLOP grid of largest budgets that costs at most FIRST_SHARE of all FLOPs."""
        if self.recipes is not None and len(self.recipes) != 1:
            raise UserError(
                f"grid.recipes has {counted(len(self.recipes), 'recipe')}; it must have one, because an adaptive grid "
                "suggests runs for one law"
            )
        total, smallest = self.total_flops(base, tuner), self.least_flops(base, tuner)
        for i in range(FIRST_TRIES):
            top = self.largest_flops * 10 ** (-4 * i / (FIRST_TRIES - 1))
            budgets = [top / FIRST_STEP**j for j in range(FIRST_BUDGETS)]
            if budgets[-1] < smallest:
                break
            runs = list(replace(self, budgets=budgets, sizes=FIRST_SIZES).isoflop_runs(base, tuner))
            if trained_flops(runs) <= FIRST_SHARE * total:
                return runs
        raise UserError(
            f"grid.flops_budget is {total:.3g}, and {FIRST_SHARE:.0%} of it is too little for a first round of "
            f"{FIRST_BUDGETS} budgets and {FIRST_SIZES} sizes of at least grid.min_steps {self.min_steps} steps; "
            "give more"
        )

    def notes(self, *_: Any) -> list[str]:
        return []  # the first round alone need not suffice for a fit

    def next_round(self, sweep: SweepDirectory, config: SweepConfig) -> bool:
        added = []
        if (points := self.ask_round(sweep, config)) is not None:
            runs = _expanded(points, sweep, config, [run.config() for run in membership.members(sweep)])
            added = membership.add_runs(sweep, runs, "a round of the adaptive grid")
        print(round_summary(sweep))
        return bool(added)

    def ask_round(self, sweep: SweepDirectory, config: SweepConfig) -> dict[str, Any] | None:
        """Choose and record the next round. Returns its grid (of kind points), or None if no round follows."""
        from .suggest import NothingToSuggest

        record = _record(sweep)
        rounds = record["rounds"]
        unfinished = ("planned", "queued", "running")
        ended = {run.run_id for run in membership.members(sweep) if run.state().state not in unfinished}
        if rounds and not ended.issuperset(rounds[-1]["runs"]):  # the newest round is still the next one
            return dict(rounds[-1]["grid"])
        try:
            asked = self._ask(sweep, config, len(rounds))
        except NothingToSuggest as error:
            # Not final: the grid continues if failed runs are retried or its settings ask for more.
            write_json(sweep.path / RECORD, record | {"ended": str(error)})
            return None
        write_json(sweep.path / RECORD, {"rounds": [*rounds, asked], "ended": None})
        return dict(asked["grid"])

    def _ask(self, sweep: SweepDirectory, config: SweepConfig, number: int) -> dict[str, Any]:
        from .suggest import NothingToSuggest, fit_standing, suggest_runs

        base = replace(resolved_base(sweep, config), tokens=0)
        cap, total = self.largest_flops, self.total_flops(base, Tuner(config.tuning))
        standing = fit_standing(sweep, config, max(config.fit.targets, default=1000.0 * cap))
        if self.tolerance is not None and (width := standing.loss.relative_width) <= self.tolerance:
            width_text = f"{width:.2%} of the loss (asked for {self.tolerance:.2%})"
            raise NothingToSuggest(f"the 95 % interval at {standing.target_flops:.3g} FLOPs is {width_text}")
        if number >= self.rounds:
            raise NothingToSuggest(f"all {counted(self.rounds, 'round')} are done")
        planned = {run["run_id"]: float(run["flops_own"]) for run in sweep.plan()["runs"]}
        present = {run.run_id: run.config() for run in membership.members(sweep)}
        added = [run for name, run in present.items() if name not in planned]
        spent = sum(planned.values()) + sum(map(own_flops, added))  # failed runs included
        remaining = total - spent
        if remaining < SPENT * total:
            raise NothingToSuggest(f"{spent:.3g} of {total:.3g} FLOPs are spent")
        shares = [GROWTH**i for i in range(number, self.rounds)]
        budget = remaining * shares[0] / sum(shares)
        suggestion = suggest_runs(sweep, budget, max_flops=cap, max_runs=ROUND_RUNS, standing=standing)
        expected = suggestion.to_dict()
        runs = _expanded(suggestion.grid, sweep, config, list(present.values()))
        return {
            "runs": list(map(run_id, runs)),
            "flops": suggestion.flops,
            "flops_before": spent,
            "flops_budget": total,
            "target_flops": standing.target_flops,
            "before": expected["before"],
            "expected": expected["after"],
            "grid": suggestion.grid,
        }


def _expanded(
    points: dict[str, Any], sweep: SweepDirectory, config: SweepConfig, present: list[RunConfig]
) -> list[RunConfig]:
    return expand_grid(PointsGrid(points=points["points"]), resolved_base(sweep, config), config.tuning, present)


def round_summary(sweep: SweepDirectory) -> str:
    """Describe the newest round and its expected effect on the loss's 95 % interval, or why no round follows."""
    record = _record(sweep)
    if record["ended"] is not None or not record["rounds"]:
        return f"the adaptive grid is over: {record['ended']}"
    newest = record["rounds"][-1]

    def interval(when: str) -> str:
        ends = (newest[when]["loss"][end] for end in ("low", "high"))
        return "[" + ", ".join("unbounded" if end is None else f"{end:.3f}" for end in ends) + "]"

    return (
        f"round {len(record['rounds'])}: {counted(len(newest['runs']), 'run')} of {newest['flops']:.3g} FLOPs; the "
        f"95 % interval of the loss at {newest['target_flops']:.3g} FLOPs is {interval('before')}, and should become "
        f"{interval('expected')}"
    )


def _record(sweep: SweepDirectory) -> dict[str, Any]:
    return read_json(sweep.path / RECORD) or {"rounds": [], "ended": None}
