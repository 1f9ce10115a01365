"""Suggest runs that narrow the interval at a large budget most per FLOP.

Candidates are well-shaped models with D in whole steps and new seeds; their cost depends on the checkpoints on disk.
`fit.allocation` chooses among them, by the mixture of forms or law in the sweep's `fit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...train.config import ModelConfig, RunConfig, run_id
from ...train.errors import UserError, counted
from ...train.flops import count_parameters, flops_exact, tokens_for_budget
from ...train.schedule import same_until, trunk_steps
from .. import prepare
from ..plan.trunks import Progress, merge_runs, own_flops, progress_of
from ..results.table import build_table
from ..runs import membership
from ..runs.directory import SweepDirectory
from ..terminal import console, plain_table, short
from . import architectures
from .expand import run_label
from .tuning import Tuner, whole_steps

if TYPE_CHECKING:
    from ...fit.allocation.design import Design
    from ...fit.forecasting.mixture import FormMixture
    from ...fit.laws.law import LossLaw
    from ...fit.table import RunTable
    from ..config import FitConfig, SweepConfig

LEVEL = 0.95  # of the intervals
CONSTANTS = 5  # of Chinchilla's law
BEYOND = 1000.0  # default target, as a multiple of the largest C
OF_LAW = ("form", "objective")  # fields of `fit` that determine the law
MIN_STEPS = 100  # fewest steps of a suggested run, unless the grid has `min_steps`
MAX_RUNS = 24  # default most runs of a suggestion
MAX_SEEDS = 8  # most new seeds: each adds as many candidates as there are sizes and D
BUDGETS_PER_DECADE = 8  # values of C at which each size is a candidate
SIZE_STEP = 1.32  # ratio of two neighbouring sizes, before rounding to well-shaped models
BELOW = 0.3  # cost of the cheapest candidate, relative to the cheapest run of the sweep


class NothingToSuggest(UserError):
    """Nothing can be suggested with the current runs and budget."""


@dataclass(frozen=True)
class Estimate:
    """A predicted number at the target with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        return (self.high - self.low) / self.value


@dataclass(frozen=True)
class Standing:
    """The fit to the finished runs and its prediction at the target."""

    table: RunTable
    mixture: FormMixture
    target_flops: float
    loss: Estimate
    N: Estimate


@dataclass(frozen=True)
class SuggestedRun:
    """One run to add; `narrows`: the share by which it narrows the intervals, given the runs before it."""

    run_id: str
    name: str
    N: int
    D: int
    seed: int
    flops: float  # of the whole run, exact convention
    flops_own: float  # part of `flops` that the run trains itself, without its trunk's steps
    trunk: str | None  # name of the run that it branches from
    narrows: float | None  # None: it is for a law of mixtures
    check: bool  # chosen to check the law's form


@dataclass(frozen=True)
class Suggestion:
    """Runs to add, best first, and their expected effect on the intervals."""

    budget: float
    target_flops: float | None
    runs: list[SuggestedRun]
    flops: float  # of all runs, as they would be trained
    forms: list[str]  # laws that predict the target
    before: dict[str, Estimate]  # loss and N at the target; empty for mixtures
    after: dict[str, Estimate]
    grid: dict[str, Any]  # a grid of kind points, for `isoflop extend`
    reason: str = ""  # how mixtures were chosen

    def to_dict(self) -> dict[str, Any]:
        from ...fit.formatting import plain_json

        return plain_json(asdict(self))


def suggest_runs(
    sweep: SweepDirectory,
    budget: float,
    target_flops: float | None = None,
    *,
    seeds: int = 1,
    max_flops: float | None = None,
    max_runs: int = MAX_RUNS,
    standing: Standing | None = None,
) -> Suggestion:
    """Suggest runs to add to a sweep, which may be running.

    Raises NothingToSuggest if the finished runs or the budget do not suffice.

    Args:
        budget: FLOPs (exact convention) of all new runs together.
        target_flops: Budget at which predictions should improve; default: the largest of the config's fit.targets, else
            1000 times the largest FLOPs of a run.
        seeds: Number of new seeds per size, in addition to the base run's.
        max_flops: Most FLOPs of one run.
        standing: Result of `fit_standing`, if already computed.
    """
    from ...fit import InputError
    from ...fit.allocation.design import Buyer, Candidates, Question

    for name, value in (("budget", budget), ("max_flops", max_flops)):
        if value is not None and not 0 < value < np.inf:
            raise UserError(f"{name} is {value}; it must be a positive number of FLOPs")
    if not 0 <= seeds <= MAX_SEEDS:
        raise UserError(f"seeds is {seeds}; it must be at least 0 and at most {MAX_SEEDS}")
    config = prepare.configuration(sweep)
    assert config.grid is not None
    if (suggestion := config.grid.suggest(sweep, config, budget, max_flops or math.inf, max_runs)) is not None:
        if target_flops is not None:
            remedy = "leave it out, because mixtures are suggested at the sweep's own N and D"
            raise UserError(f"target_flops is {target_flops:g}; {remedy}")
        return suggestion
    standing = standing or fit_standing(sweep, config, target_flops)
    base = replace(prepare.resolved_base(sweep, config), tokens=0)
    present, progress, labels = list[RunConfig](), {}, {}
    # Candidates next to another trainer's runs have the shapes of isoflop's own models.
    for run in [] if sweep.is_ingested else membership.members(sweep):
        present.append(run.config())
        progress[run.run_id] = progress_of(run, live=run.state().state in ("queued", "running"))
        labels[run.run_id] = trunk_of(present[-1])
    market, table = (
        Market(base, present, progress, config.trunks, Tuner(config.tuning).with_spans(present)),
        standing.table,
    )
    min_steps = getattr(config.grid, "min_steps", MIN_STEPS)
    offered = _affordable(market, table, budget, seeds, max_flops, min_steps)
    costs = ("flops", "branch_flops", "size", "trunk")
    pool = Candidates(
        inputs={"N": np.array([float(o.N) for o in offered]), "D": np.array([float(o.run.D) for o in offered])},
        **{name: np.array([getattr(offer, name) for offer in offered]) for name in costs},
    )
    try:
        used, mixture = table.weight > 0, standing.mixture
        trunks = np.array([labels.get(name, name) for name in table.run_id[used]])
        shares = [*mixture.weights_.values()]
        question = Question.of([*mixture.laws_.values()], standing.target_flops, trunks, shares=shares)
        design = Buyer(question, pool).buy(budget, max_runs)
    except InputError as error:
        raise NothingToSuggest(str(error)) from error
    return _suggestion(design, offered, market, standing, budget)


def _affordable(
    market: Market, table: RunTable, budget: float, seeds: int, max_flops: float | None, min_steps: int
) -> list[Offer]:
    """Return the candidate runs that `budget` and `max_flops` allow. Raises NothingToSuggest if there are none."""
    upper, ratios = min(budget, max_flops or budget), (table.D / table.N).tolist()
    lower = BELOW * float(min(table.flops))
    offered: list[Offer] = []
    if lower < upper:
        highest = max((run.seed for run in market.present), default=0)
        # A new seed of a size costs a separate trunk and has independent noise.
        fresh = range(highest + 1, highest + 1 + seeds)
        within = Range(lower, upper, min(ratios), max(ratios), min_steps)
        offered = market.offers([market.base.seed, *fresh], within)
    cheapest = min((offer.flops for offer in offered), default=lower)
    if not offered or cheapest > budget:
        capped = "" if max_flops is None else f" and max_flops {max_flops:.3g}"
        raise NothingToSuggest(
            f"budget is {budget:.3g} FLOPs{capped}, but the smallest run worth adding needs {cheapest:.3g}; "
            "give at least that"
        )
    return offered


def fit_standing(sweep: SweepDirectory, config: SweepConfig, target_flops: float | None = None) -> Standing:
    """Fit the finished runs and predict the best loss and N at `target_flops`. Raises NothingToSuggest if it cannot."""
    from ...fit import FormMixture, InputError, read_table
    from ...fit.approaches.recipes import kinds, split
    from ...fit.forecasting.forecaster import DRAWS
    from ...fit.uncertainty import resampled_together

    options = config.fit
    frame = build_table(sweep)
    if (done := int(frame["final"].sum())) <= CONSTANTS:
        raise NothingToSuggest(
            f"{sweep.path} has {counted(done, 'finished run')}, and the law has {CONSTANTS} constants; at least "
            f"{CONSTANTS + 1} runs must be done before others can be suggested"
        )
    try:
        table = read_table(frame)
        if len(recipes := split(table)) > 1:
            raise NothingToSuggest(
                f"{sweep.path} has the {kinds(table)} {', '.join(recipes)}; a law describes one, so give a sweep with "
                f"one, or add runs to all of them with `isoflop extend {sweep.path} grid.FIELD=VALUE`"
            )
        largest = float(table.flops.max())
        target = max(options.targets, default=BEYOND * largest) if target_flops is None else target_flops
        if not largest < target < np.inf:
            raise NothingToSuggest(
                f"target_flops is {target:.3g}; it must be above {largest:.3g}, the FLOPs of the largest finished run"
            )
        groups = resampled_together(table.group, table.run_id, CONSTANTS)
        mixture = FormMixture(_forms(options), min(options.bootstrap, DRAWS) or DRAWS, seed=0)
        mixture.fit(table.N, table.D, table.loss, **table.options | {"groups": groups})
    except InputError as error:
        raise NothingToSuggest(f"the finished runs of {sweep.path} give no law with intervals: {error}") from error
    optimum = mixture.optimal(target, LEVEL)

    def estimate(name: str) -> Estimate:
        low, high = optimum.interval(name)[0]
        return Estimate(float(optimum.values[name][0]), float(low), float(high))

    return Standing(table, mixture, float(target), estimate("loss"), estimate("N"))


def _forms(options: FitConfig) -> list[LossLaw] | None:
    from ...fit.laws.registry import loss_law

    law, usual = ({name: getattr(fit, name) for name in OF_LAW} for fit in (options, type(options)()))
    return None if law == usual and options.intervals == "mixture" else [loss_law(**law)]


def print_suggestion(suggestion: Suggestion) -> None:
    out = console()
    count = counted(len(suggestion.runs), "run")
    title = f"{count} for {suggestion.flops:.3g} of {suggestion.budget:.3g} FLOPs"
    worth = ("name",) if suggestion.reason else ("shares trunk with", "narrows", "")
    table = plain_table(("run", "N", "D", "D/N", "seed", "C", "trains", *worth), ("run", worth[0], ""), title)
    for run in suggestion.runs:
        size = (short(run.N), short(run.D), f"{run.D / run.N:.3g}", str(run.seed))
        gain: tuple[str, ...] = (run.name,)
        if run.narrows is not None:
            gain = (run.trunk or "–", f"{run.narrows:.1%}", "checks the law" if run.check else "")
        table.add_row(run.run_id, *size, f"{run.flops:.3g}", f"{run.flops_own:.3g}", *gain)
    out.print(table)
    if suggestion.reason:
        out.print(suggestion.reason, highlight=False, soft_wrap=True)
        return
    under = "the mixture of forms" if len(suggestion.forms) > 1 else suggestion.forms[0]
    when = f"95 % intervals at {suggestion.target_flops:.3g} FLOPs, now and as expected after these runs"
    out.print(f"{when}, under {under}:", highlight=False)
    for name, now in suggestion.before.items():
        then = suggestion.after[name]
        ends = (now.value, now.low, now.high, then.low, then.high)
        numbers = ["∞" if not np.isfinite(end) else short(end) if name == "N" else f"{end:.3f}" for end in ends]
        out.print("  {:4} {}  now [{}, {}]  then [{}, {}]".format(name, *numbers), highlight=False)


def _suggestion(
    design: Design, offered: Sequence[Offer], market: Market, standing: Standing, budget: float
) -> Suggestion:
    chosen = [offered[i] for i in design.chosen]
    runs = market.merge([offer.run for offer in chosen])
    names = {run_id(run): run_label(run) for run in [*market.present, *runs]}
    chosen_for = zip(runs, design.gains, design.check, strict=True)
    suggested = [suggested_run(run, names, float(-np.expm1(-gain)), check) for run, gain, check in chosen_for]
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
        forms=[*standing.mixture.laws_],
        before=before,
        after=after,
        grid={"kind": "points", "points": [point_of(run, market.base) for run in runs]},
    )


def suggested_run(
    run: RunConfig, names: Mapping[str, str], narrows: float | None = None, check: bool = False
) -> SuggestedRun:
    """Return a planned run as a suggestion. `names`: labels of runs by id, that of its trunk included."""
    return SuggestedRun(
        run_id=run_id(run),
        name=run_label(run),
        N=count_parameters(run.model).N_active,
        D=run.D,
        seed=run.seed,
        flops=flops_exact(run),
        flops_own=own_flops(run),
        trunk=None if run.parent is None else names[run.parent],
        narrows=narrows,
        check=check,
    )


def point_of(run: RunConfig, base: RunConfig) -> dict[str, Any]:
    """Return what a suggested run changes of the base run, as a point of a PointsGrid."""
    more = [name for name in ("kv_heads", "hidden") if getattr(run.model, name) != getattr(base.model, name)]
    shape = {f"model.{name}": getattr(run.model, name) for name in ("width", "depth", "heads", *more)}
    domains = run.data.domains if run.data != base.data else {}
    weights = {f"data.domains.{name}.weight": domain.weight for name, domain in domains.items()}
    return {**shape, **weights, "tokens": run.tokens, "seed": run.seed}


@dataclass(frozen=True)
class Offer:
    """A candidate run and its costs."""

    run: RunConfig
    size: float  # training FLOPs of the whole run, exact convention
    flops: float  # part that it trains itself, with the checkpoints on disk
    branch_flops: float  # the same if a longer run of its trunk is added too
    trunk: str  # shared by runs that differ only in D

    @property
    def N(self) -> int:
        return count_parameters(self.run.model).N_active


@dataclass(frozen=True)
class Range:
    """Bounds of the candidates: C and tokens per parameter."""

    least_flops: float
    most_flops: float
    least_ratio: float  # tokens per parameter
    most_ratio: float
    min_steps: int


def trunk_of(run: RunConfig) -> str:
    """Return a key that is equal for runs that differ only in D."""
    return run_id(replace(run, tokens=0))


@dataclass(frozen=True)
class Market:
    """The runs that could be added to a sweep, and their costs."""

    base: RunConfig
    present: Sequence[RunConfig]  # runs that the sweep has
    progress: Mapping[str, Progress]  # what these runs have on disk, by id
    share: bool = True  # runs that differ only in D share a trunk
    tuner: Tuner = field(default_factory=Tuner)

    def offers(self, seeds: Sequence[int], within: Range) -> list[Offer]:
        """Return the candidate runs: every model, at several D in the range, with every seed."""
        families: dict[str, list[RunConfig]] = {}
        for run in self.present if self.share else ():
            families.setdefault(trunk_of(run), []).append(run)
        taken, result = {run_id(run) for run in self.present}, []
        for model in sizes(self.base.model, within):
            for seed in seeds:
                template = replace(self.base, model=model, seed=seed, tokens=0)
                trunk = trunk_of(template)
                saved = self._saved(template, families.get(trunk, []), within)
                for tokens in [*self._lengths(template, within), *saved]:
                    run = self.tuner.tuned(replace(template, tokens=tokens))
                    if (name := run_id(run)) not in taken:
                        taken.add(name)
                        same = run.optimizer == template.optimizer and run.schedule == template.schedule
                        key = trunk if same else trunk_of(run)
                        result.append(self._offer(run, key, families.get(key, [])))
        return result

    def merge(self, chosen: Sequence[RunConfig]) -> list[RunConfig]:
        if not self.share:
            return list(chosen)
        trunks = {trunk_of(run) for run in chosen}
        mates = [run for run in self.present if trunk_of(run) in trunks]
        return merge_runs([*mates, *chosen], self.progress).runs[len(mates) :]

    def _lengths(self, template: RunConfig, within: Range) -> Iterator[int]:
        decades = math.log10(within.most_flops / within.least_flops)
        levels = max(1, round(BUDGETS_PER_DECADE * decades))
        for budget in (within.most_flops * 10 ** (-decades * i / levels) for i in range(levels + 1)):
            D: Any = tokens_for_budget(template.model, template.data.sequence_length, budget)
            run = self.tuner.tuned(replace(template, tokens=D))
            run.tokens = whole_steps(D * (1 - 1e-9), run, math.floor)
            if _lies_within(run, within):
                yield run.tokens

    def _saved(self, template: RunConfig, mates: Sequence[RunConfig], within: Range) -> Iterator[int]:
        """Yield each D within the range at which `template` can branch from a saved checkpoint of a run in `mates`."""
        if template.schedule.kind != "wsd":
            return
        for mate in mates:
            for step in self.progress.get(run_id(mate), Progress()).saved:
                if step <= trunk_steps(mate):
                    about = round(step / (1 - template.schedule.decay_share))
                    for steps in range(max(1, about - 2), about + 3):
                        run = replace(template, tokens=steps * template.batch_tokens)
                        if trunk_steps(run) == step and _lies_within(run, within):
                            yield run.tokens

    def _offer(self, run: RunConfig, trunk: str, mates: Sequence[RunConfig]) -> Offer:
        size = flops_exact(run)
        alone = own_flops(merge_runs([*mates, run], self.progress).runs[-1]) if mates else size
        begin, branch = trunk_steps(run), alone
        if self.share and 0 < begin <= same_until(replace(run, tokens=2 * run.D), run):
            branch = size * (run.steps - begin) / run.steps
        return Offer(run, size, alone, min(alone, branch), trunk)


def sizes(base: ModelConfig, within: Range) -> list[ModelConfig]:
    """Return models of all sizes that some D brings into the range `within`, smallest first."""
    low = math.sqrt(within.least_flops / (6 * within.most_ratio)) / 4  # small models spend more than 6 N a token
    high = math.sqrt(within.most_flops / (6 * within.least_ratio))
    models: dict[int, ModelConfig] = {}
    target = max(low, 1.0)
    while target <= high * SIZE_STEP:
        model = architectures.nearest_model(base, target)
        models.setdefault(count_parameters(model).N_active, model)
        target *= SIZE_STEP
    return [models[N] for N in sorted(models)]


def _lies_within(run: RunConfig, within: Range) -> bool:
    ratio = run.D / count_parameters(run.model).N_active
    return (
        run.steps >= within.min_steps
        and within.least_ratio <= ratio <= within.most_ratio
        and within.least_flops * (1 - 1e-6) <= flops_exact(run) <= within.most_flops * (1 + 1e-6)
    )
