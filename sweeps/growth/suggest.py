"""Which runs a sweep should buy next: those that narrow the interval at a large budget most for their FLOPs.

Special here:
- what is known comes from the runs that are done, fitted as the report fits them; what could be added from
  `suggest_candidates`, each at what it costs given the trunks on disk; which of it to buy from `fit.design`;
- the interval that is expected afterwards is today's, narrowed by as much as the design says. It takes the law to be
  right, so a share of the budget goes to runs that check it (marked), as large as can be paid;
- a second seed of a size is offered beside the first: it costs a trunk of its own, and errs on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...train.config import ModelConfig, RunConfig, run_id
from ...train.errors import UserError
from .. import prepare
from ..grid.expand import label
from ..grid.trunks import Progress, own_flops, progress_of
from ..results.table import build_table
from ..runs import membership
from ..runs.directory import SweepDirectory
from ..terminal import console, short
from . import candidates
from .candidates import Offer, Range, trunk_of

if TYPE_CHECKING:
    from ...fit.allocation.design import Design
    from ...fit.laws.chinchilla import ChinchillaLaw
    from ...fit.table import RunTable
    from ..config import SweepConfig

LEVEL = 0.95
RESAMPLES = 200  # of the bootstrap, at least
BEYOND = 1000.0  # times the largest C: what is asked about where nothing is named
MIN_STEPS = 100  # of a suggested run, where the sweep's grid names no other number
MAX_RUNS = 24  # of a suggestion, where nothing is named
MAX_SEEDS = 8  # new ones; with each, every size is offered and judged once more


class NothingToSuggest(UserError):
    """The runs that are done, or the budget, allow of no suggestion; other runs or another budget may."""


@dataclass(frozen=True)
class Estimate:
    """A number at the target with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """Of the interval, over the value."""
        return (self.high - self.low) / self.value


@dataclass(frozen=True)
class Standing:
    """What the runs that are done say of the target."""

    table: RunTable
    law: ChinchillaLaw
    target_flops: float
    loss: Estimate
    N: Estimate


@dataclass(frozen=True)
class SuggestedRun:
    """One run to buy. `narrows` is the share by which it narrows the intervals, given the runs before it."""

    run_id: str
    name: str
    N: int
    D: int
    seed: int
    flops: float  # of the whole run, exact convention
    flops_own: float  # of them, what it trains itself
    trunk: str | None  # the name of the run that it branches from
    narrows: float
    check: bool  # there to check the law's form


@dataclass(frozen=True)
class Suggestion:
    """Runs to buy, best first, and what they are expected to do."""

    budget: float
    target_flops: float
    runs: list[SuggestedRun]
    flops: float  # of all runs, as they would be trained
    before: dict[str, Estimate]  # loss and N at the target
    after: dict[str, Estimate]
    grid: dict[str, Any]  # kind points: what `isoflop extend` adds

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an end of an interval that is no finite number is None."""
        from ...fit.formatting import plain_json

        return plain_json(asdict(self))


def suggest(
    sweep: SweepDirectory,
    budget: float,
    target_flops: float | None = None,
    *,
    seeds: int = 1,
    max_flops: float | None = None,
    max_runs: int = MAX_RUNS,
    check_share: float | None = None,
) -> Suggestion:
    """The runs to add to a sweep.

    Args:
        sweep: some of its runs are done; it may be at work.
        budget: training FLOPs (exact convention) that the new runs may cost together.
        target_flops: the budget asked about; by default the largest of fit.targets, else 1000 times the largest C.
        seeds: new seeds that each size is offered with, beside the sweep's own; at most 8.
        max_flops: the most that one run may cost.
        max_runs: how many to suggest at most.
        check_share: share of the budget for runs that check the law's form; None: a fifth.

    Raises:
        UserError: a number makes no sense, too few runs are done, the target lies within the data, or the budget pays
            for no run.
    """
    _refuse(budget, seeds, max_flops, max_runs, check_share)
    config = prepare.configuration(sweep)
    standing = stand(sweep, config, target_flops)
    return suggest_from(sweep, config, standing, budget, seeds, max_flops, max_runs, check_share)


def suggest_from(
    sweep: SweepDirectory, config: SweepConfig, standing: Standing, budget: float, seeds: int = 1,
    max_flops: float | None = None, max_runs: int = MAX_RUNS, check_share: float | None = None,
) -> Suggestion:  # fmt: skip
    """`suggest` where it is known what the runs so far say."""
    from ...fit.allocation.design import CHECK_SHARE

    base = prepare.resolved_base(sweep, config)
    base.tokens = 0
    members = membership.members(sweep)
    known, progress = [run.config() for run in members], {}
    for run in members:
        progress[run.run_id] = progress_of(run, live=run.state().state in ("queued", "running"))
    table = standing.table
    most = min(budget, max_flops or budget)
    within = Range.around(
        table.N.tolist(), table.D.tolist(), table.flops.tolist(), most, getattr(config.grid, "min_steps", MIN_STEPS)
    )
    if within.least_flops >= most:
        raise NothingToSuggest(_too_small(budget, max_flops, within.least_flops))
    highest = max(run.seed for run in known)
    offered = candidates.offers(
        base, [base.seed, *range(highest + 1, highest + 1 + seeds)], within, known, progress, config.trunks
    )
    if not offered:
        raise NothingToSuggest(_too_small(budget, max_flops, within.least_flops))
    cheapest = min(offer.flops for offer in offered)
    if cheapest > budget:
        raise NothingToSuggest(_too_small(budget, max_flops, cheapest))
    labels = {run.run_id: trunk_of(config) for run, config in zip(members, known, strict=True)}
    design = _design(
        standing, offered, [labels.get(name, name) for name in table.run_id], budget, max_runs,
        CHECK_SHARE if check_share is None else check_share,
    )  # fmt: skip
    return _told(design, offered, known, progress, standing, budget, base, config.trunks)


def stand(sweep: SweepDirectory, config: SweepConfig, target_flops: float | None = None) -> Standing:
    """Fits the runs that are done, as the report does, and asks for the target.

    Raises:
        NothingToSuggest: too few runs are done, or the target lies within the data.
    """
    from ...fit import ChinchillaLaw, InputError, compute_optimal, read_table
    from ...fit.approaches.recipes import split
    from ...fit.flops import flops_per_token
    from ...fit.uncertainty import resampled_together

    options = config.fit
    law = ChinchillaLaw(options.objective, options.delta, options.tied, options.E)
    free = 5 - options.tied - (options.E is not None)
    frame = build_table(sweep)
    if (done := int(frame["final"].sum()) if len(frame) else 0) <= free:
        raise NothingToSuggest(
            f"{done} runs of {sweep.path} are done, and the law has {free} constants; at least {free + 1} runs "
            "must be done before others can be suggested"
        )
    try:
        table = read_table(frame)
        if len(recipes := split(table)) > 1:
            raise NothingToSuggest(
                f"{sweep.path} has the data recipes {', '.join(recipes)}; a law is of one, so give it a sweep of one"
            )
        law.fit(table.N, table.D, table.loss, table.weight, table.known_se)
        groups = resampled_together(table.group, table.run_id, law.problem_.free)
        law.bootstrap(max(options.bootstrap, RESAMPLES), groups, options.seed)
    except InputError as error:
        raise NothingToSuggest(f"the runs of {sweep.path} that are done give no law with intervals: {error}") from error
    largest = float(table.flops.max())
    target = max(options.targets, default=BEYOND * largest) if target_flops is None else target_flops
    if not largest < target < np.inf:
        raise NothingToSuggest(
            f"target_flops is {target:.3g}, and the largest run that is done has {largest:.3g}; give more than that"
        )
    spend = flops_per_token(table.N, table.D, table.flops)
    found = compute_optimal(law, target, 6.0 if spend is None else spend, LEVEL)

    def estimate(name: str) -> Estimate:
        low, high = found.interval(name)[0]
        return Estimate(float(found.values[name][0]), float(low), float(high))

    return Standing(table, law, float(target), estimate("loss"), estimate("N"))


def print_suggestion(suggestion: Suggestion) -> None:
    """The runs in a table, then what they are expected to do."""
    from rich import box
    from rich.table import Table

    out = console()
    title = f"{len(suggestion.runs)} runs for {suggestion.flops:.3g} of {suggestion.budget:.3g} FLOPs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    columns = ("run", "N", "D", "D/N", "seed", "C", "trains", "shares trunk with", "narrows", "")
    for column in columns:
        table.add_column(column, justify="left" if column in ("run", "shares trunk with", "") else "right")
    for run in suggestion.runs:
        table.add_row(
            run.run_id, short(run.N), short(run.D), f"{run.D / run.N:.3g}", str(run.seed), f"{run.flops:.3g}",
            f"{run.flops_own:.3g}", run.trunk or "–", f"{run.narrows:.1%}", "checks the law" if run.check else "",
        )  # fmt: skip
    out.print(table)
    out.print(f"at {suggestion.target_flops:.3g} FLOPs, 95 % intervals now, and as expected after these runs:")
    for name, number in {"loss": lambda value: f"{value:.3f}", "N": short}.items():

        def say(value: float, number: Callable[[float], str] = number) -> str:
            return number(value) if np.isfinite(value) else "∞"

        now, then = suggestion.before[name], suggestion.after[name]
        out.print(
            f"  {name:4} {say(now.value)}  now [{say(now.low)}, {say(now.high)}]"
            f"  then [{say(then.low)}, {say(then.high)}]",
            highlight=False,
        )


def _design(
    standing: Standing, offered: Sequence[Offer], trunks: list[str], budget: float, max_runs: int, check_share: float
) -> Design:
    from ...fit import InputError
    from ...fit.allocation.design import Buyer, Candidates, Question

    pool = Candidates(
        N=np.array([offer.N for offer in offered], dtype=float),
        D=np.array([offer.run.D for offer in offered], dtype=float),
        flops=np.array([offer.flops for offer in offered]),
        branch_flops=np.array([offer.branch_flops for offer in offered]),
        size=np.array([offer.size for offer in offered]),
        trunk=np.array([offer.trunk for offer in offered]),
    )
    try:
        question = Question.of(standing.law, standing.target_flops, np.array(trunks))
        return Buyer(question, pool).buy(budget, max_runs, check_share)
    except InputError as error:
        raise NothingToSuggest(str(error)) from error


def _told(
    design: Design, offered: Sequence[Offer], known: Sequence[RunConfig], progress: Mapping[str, Progress],
    standing: Standing, budget: float, base: RunConfig, share: bool,
) -> Suggestion:  # fmt: skip
    chosen = [offered[i] for i in design.chosen]
    runs = candidates.merged([offer.run for offer in chosen], known, progress, share)
    names = {run_id(run): label(run) for run in [*known, *runs]}
    suggested = [
        SuggestedRun(
            run_id=run_id(run), name=label(run), N=offer.N, D=run.D, seed=run.seed, flops=offer.size,
            flops_own=own_flops(run), trunk=None if run.parent is None else names[run.parent],
            narrows=float(-np.expm1(-gain)), check=check,
        )
        for offer, run, gain, check in zip(chosen, runs, design.gains, design.check, strict=True)
    ]  # fmt: skip
    before = {"loss": standing.loss, "N": standing.N}
    after = {
        name: Estimate(now.value, *design.narrowed(name, now.value, (now.low, now.high)))
        for name, now in before.items()
    }
    return Suggestion(
        budget=budget,
        target_flops=standing.target_flops,
        runs=suggested,
        flops=sum(run.flops_own for run in suggested),
        before=before,
        after=after,
        grid={"kind": "points", "points": [point(run, base.model) for run in runs]},
    )


def point(run: RunConfig, base: ModelConfig) -> dict[str, Any]:
    """A run as a points grid has it: what it changes of the base run."""
    shape = {f"model.{name}": getattr(run.model, name) for name in ("width", "depth", "heads")}
    for name in ("kv_heads", "hidden"):
        if getattr(run.model, name) != getattr(base, name):
            shape[f"model.{name}"] = getattr(run.model, name)
    return {**shape, "tokens": run.tokens, "seed": run.seed}


def _refuse(budget: float, seeds: int, max_flops: float | None, max_runs: int, check_share: float | None) -> None:
    for name, value in (("budget", budget), ("max_flops", max_flops)):
        if value is not None and not 0 < value < np.inf:
            raise UserError(f"{name} is {value}; it must be a positive number of FLOPs")
    if not 0 <= seeds <= MAX_SEEDS:
        raise UserError(f"seeds is {seeds}; it must be at least 0 and at most {MAX_SEEDS}")
    if max_runs < 1:
        raise UserError(f"max_runs is {max_runs}; it must be 1 or more")
    if check_share is not None and not 0 <= check_share <= 1:
        raise UserError(f"check_share is {check_share}; it must be at least 0 and at most 1")


def _too_small(budget: float, max_flops: float | None, least: float) -> str:
    capped = "" if max_flops is None else f" and max_flops {max_flops:.3g}"
    return (
        f"budget is {budget:.3g} FLOPs{capped}, and the smallest run worth adding needs {least:.3g}; give at least that"
    )
