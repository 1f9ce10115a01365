"""A grid config becomes a list of RunConfigs. Pure: the same config gives the same runs, everywhere."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ...train.config import ModelConfig, RunConfig, run_id
from ...train.data.recipe import recipe
from ...train.errors import UserError
from ...train.flops import count_parameters, tokens_for_budget, training_flops_per_token
from ...train.planner.validation import check_fields, validate
from ...train.schedule import warmup_steps
from ..config import (
    AdaptiveGrid,
    CheckGrid,
    CurvesGrid,
    GridConfig,
    IsoflopGrid,
    LadderGrid,
    PointsGrid,
    ProductGrid,
    TuneGrid,
    TuningConfig,
)
from ..terminal import short
from . import architectures
from .trunks import merge_runs, own_flops
from .tune import rung_runs
from .tuning import Tuner

BASE = "base"  # the name of the base among its variants
CUT = ("data.recipe", "data.sequence_length", "data.separate_documents")  # what a variant may change of the data
FIRST_BUDGETS, FIRST_SIZES = 3, 4  # of an adaptive grid's first round: enough to fit a law's five constants
FIRST_STEP = 3.0  # between two of these budgets
FIRST_TRIES = 81  # budgets that are tried for the largest of them, over four decades
FIRST_SHARE = 0.2  # of an adaptive grid's FLOPs, for its first round
EXPECTED_FLOPS = 2.5e11  # at which grid.expected_N is the best size
EXPECTED_EXPONENT = 0.55  # of the best N in C; 0.46 to 0.50 in Hoffmann et al. 2022, 0.73 in Kaplan et al. 2020


def expand_grid(
    grid: GridConfig, base: RunConfig, tuning: TuningConfig | None = None, present: Iterable[RunConfig] = ()
) -> list[RunConfig]:
    """Every run of a grid over `base`, once each, in the grid's own order; `present` are the runs that it joins."""
    if type(grid) not in KINDS:
        raise UserError(f"grid.kind is {grid.kind!r}; it must be one of {', '.join(node().kind for node in KINDS)}")
    check_fields(grid, "grid.")
    tuner = Tuner(tuning or TuningConfig())
    check_fields(tuner.rules, "tuning.")
    if batch := tuner.rules.batch_tokens.batch:
        raise UserError(f"tuning.batch_tokens.batch is {batch}; it must be 0, for this rule is the batch's own")
    points = list[RunConfig]()
    for each, own in [(base, tuner)] if grid.variants is None else _variants(grid, base, tuner):
        found: Iterable[RunConfig] = KINDS[type(grid)](grid, each, own)
        if own.rules.horizon == "size":
            found = KINDS[type(grid)](grid, each, own.with_spans([*found, *present]))
        points.extend(found)
    runs: dict[str, RunConfig] = {}
    fingerprints: dict[tuple[str, ...], str | None] = {}  # a model of gigabytes is read once, not once per run
    for point in points:
        recipes = grid.recipes if grid.recipes is not None else [point.data.recipe]
        seeds = grid.seeds if grid.seeds is not None else [point.seed]
        for words, seed in itertools.product(recipes, seeds):
            steps = tuple(recipe.canonical(words))
            if steps not in fingerprints:
                recipe.require(steps)
                fingerprints[steps] = recipe.fingerprint(steps)
            data = replace(point.data, recipe=list(steps), recipe_fingerprint=fingerprints[steps])
            run = replace(point, data=data, seed=seed)
            validate(run)
            if (other := runs.setdefault(run_id(run), run)).variant != run.variant:
                said = f"grid.variants.{run.variant} has the same run as {other.variant}, {run_label(other)}"
                raise UserError(f"{said}; what is compared must share no run")
    if not runs:
        raise UserError("grid has no runs; give it at least one size and one D")
    for run in runs.values():
        run.name = run_label(run)
    return list(runs.values())


def run_label(run: RunConfig) -> str:
    named = f"N{short(count_parameters(run.model).N_active)}_D{short(run.D)}_s{run.seed}"
    named += f"_{run.variant}" if run.variant else ""
    return f"{named}_{recipe.recipe_label(run.data.recipe)}" if run.data.recipe else named


def _variants(grid: GridConfig, base: RunConfig, tuner: Tuner) -> Iterator[tuple[RunConfig, Tuner]]:
    """The base and each variant, with the rules of those fields that it does not name itself."""
    if grid.recipes is not None or isinstance(grid, AdaptiveGrid):
        raise UserError("grid.variants goes neither with grid.recipes nor with an adaptive grid; leave one out")
    if not isinstance(grid.variants, dict) or not grid.variants or BASE in grid.variants:
        said = f"grid.variants is {grid.variants!r}; it must map names, other than {BASE}, to overrides"
        raise UserError(f"{said}, as {{muon:[optimizer=muon]}}")
    yield replace(base, variant=BASE), tuner
    for name, changes in grid.variants.items():
        where, run = f"grid.variants.{name}", copy.deepcopy(replace(base, variant=str(name)))
        if not isinstance(changes, dict) or not changes:
            raise UserError(f"{where} is {changes!r}; it must be overrides that change a run, as [optimizer=muon]")
        for field, value in _dotted(changes):
            if field in ("seed", "tokens") or (field.startswith("data.") and field not in CUT):
                said = f"{where} changes {field}; variants share text, tokenizer, D and seeds"
                raise UserError(f"{said} (sweep apart what does not, and give both sweeps to `isoflop compare`)")
            _assign(run, field, value, where)
        keep = [*tuner.rules.keep, *(field for field, _ in _dotted(changes))]
        yield run, replace(tuner, rules=replace(tuner.rules, keep=keep))


def isoflop_runs(grid: IsoflopGrid, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
    _refuse_tokens(grid, base)
    if not grid.budgets:
        raise UserError(f"grid.budgets is {grid.budgets}; give a list of training FLOPs such as [1e12,3e12]")
    N, _, smallest = architectures.well_shaped(base.model)[0]

    def spending(budget: float, model: ModelConfig) -> RunConfig | None:
        """None where the steps would be too few."""
        tokens: Any = tokens_for_budget(model, base.data.sequence_length, budget, grid.convention)
        run = tuner.tuned(replace(base, model=model, tokens=tokens, budget=budget), whole=True)
        return run if tokens >= grid.min_steps * run.batch_tokens else None

    for budget in sorted(set(grid.budgets)):
        if spending(budget, smallest) is None:
            raise UserError(
                f"grid.budgets contains {budget:.3g}, and the smallest model ({N:,} parameters) needs "
                f"{_least_flops(grid, base, tuner):.2g} FLOPs for grid.min_steps {grid.min_steps}; give at least that"
            )
        found = (spending(budget, model) for model in isoflop_sizes(grid, base.model, budget))
        yield from (run for run in found if run is not None)


def _least_flops(grid: IsoflopGrid, base: RunConfig, tuner: Tuner) -> float:
    """Of the smallest model for the fewest steps, of one sequence where a rule chooses the batch."""
    smallest, length = architectures.well_shaped(base.model)[0][2], base.data.sequence_length
    least = float(grid.min_steps * (base.batch_tokens if tuner.rules.batch_tokens.k is None else length))
    return training_flops_per_token(smallest, length) * least


def _first_round(grid: AdaptiveGrid, base: RunConfig, tuner: Tuner) -> list[RunConfig]:
    """The largest small isoFLOP grid that FIRST_SHARE of the FLOPs pays for."""
    if grid.recipes is not None and len(grid.recipes) != 1:
        raise UserError(
            f"grid.recipes has {len(grid.recipes)} recipes; an adaptive grid suggests runs for one law, so it takes one"
        )
    total = adaptive_flops(grid, base, tuner)
    top, each = largest_flops(grid), _least_flops(grid, base, tuner)
    for i in range(FIRST_TRIES):
        budgets = [top * 10 ** (-4 * i / (FIRST_TRIES - 1)) / FIRST_STEP**j for j in range(FIRST_BUDGETS)]
        if budgets[-1] < each:
            break
        small = replace(grid, budgets=budgets, sizes=FIRST_SIZES)
        runs = list(isoflop_runs(small, base, tuner))
        if trained_flops(runs) <= FIRST_SHARE * total:
            return runs
    raise UserError(
        f"grid.flops_budget is {total:.3g}, of which {FIRST_SHARE:.0%} pay for no first round of "
        f"{FIRST_BUDGETS} budgets and {FIRST_SIZES} sizes of at least grid.min_steps {grid.min_steps} steps; give more"
    )


def largest_flops(grid: AdaptiveGrid) -> float:
    """The most that one run of an adaptive grid may cost."""
    return grid.max_flops or max(grid.budgets or [math.inf])


def adaptive_flops(grid: AdaptiveGrid, base: RunConfig, tuner: Tuner) -> float:
    """Of all rounds together."""
    return grid.flops_budget or trained_flops(list(isoflop_runs(grid, base, tuner)))


def trained_flops(runs: list[RunConfig]) -> float:
    """Of runs that share their trunks."""
    return sum(map(own_flops, merge_runs(runs).runs))


def isoflop_sizes(grid: IsoflopGrid, base: ModelConfig, budget: float) -> list[ModelConfig]:
    """Distinct models, log-spaced by grid.span around the expected optimum of a budget, smallest first."""
    # All budgets take their sizes from one lattice, so that runs of one size share a trunk.
    expected = expected_size(grid, base, budget)
    gap = math.log(grid.span) / (grid.sizes - 1) if grid.sizes > 1 else 0.0
    if gap > 0:
        expected = grid.expected_N * math.exp(gap * round(math.log(expected / grid.expected_N) / gap))
    models: list[ModelConfig] = []
    for i in range(grid.sizes):
        target = expected * math.exp(gap * (i - (grid.sizes - 1) / 2))
        above = count_parameters(models[-1]).N_active if models else 0
        models.append(architectures.nearest_model(base, target, above))
    return models


def expected_size(grid: IsoflopGrid, base: ModelConfig, budget: float) -> float:
    """N_total of the expected optimum: grid.expected_N is that of models on bytes, whose blocks stay as they are while
    the tables grow with the vocabulary.
    """
    expected = grid.expected_N * (budget / EXPECTED_FLOPS) ** EXPECTED_EXPONENT
    on_bytes = replace(base, vocab_size=256, tied_embeddings=True)
    shape = architectures.nearest_model(on_bytes, expected)
    own = replace(shape, vocab_size=base.vocab_size, tied_embeddings=base.tied_embeddings)
    return expected + count_parameters(own).N_active - count_parameters(shape).N_active


def _ladder(grid: LadderGrid, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
    _refuse_tokens(grid, base)
    if (grid.tokens is None) == (grid.tokens_per_parameter is None):
        raise UserError(
            f"grid.tokens is {grid.tokens} and grid.tokens_per_parameter is {grid.tokens_per_parameter}; "
            "a ladder needs exactly one of them"
        )
    for size in grid.sizes:
        model = architectures.nearest_model(base.model, size)
        N = count_parameters(model).N_active
        multiples: list[Any] = [ratio * N for ratio in grid.tokens_per_parameter or ()]
        for tokens in multiples if grid.tokens is None else grid.tokens:
            yield tuner.tuned(replace(base, model=model, tokens=tokens), whole=True)


def _curves(grid: CurvesGrid, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
    if not base.average.kept:
        raise UserError("average.kind is none; a grid of curves reads averaged weights, so it must be ema or window")
    if base.schedule.kind != "wsd":
        raise UserError(
            f"schedule.kind is {base.schedule.kind}; a grid of curves needs wsd, so that cooldowns branch off"
        )
    long = list(isoflop_runs(replace(grid, budgets=[max(grid.budgets)] if grid.budgets else None), base, tuner))
    yield from long
    for share in grid.cooldowns:
        cooled = [replace(base, model=run.model, tokens=round(share * run.tokens)) for run in long]
        cooled = [tuner.tuned(run, whole=True) for run in cooled]
        # A warm-up that is cut short by a small D is not that of the long run.
        able = [one for one, run in zip(cooled, long, strict=True) if warmup_steps(one) == warmup_steps(run)]
        yield from (able[i] for i in sorted({0, len(able) // 2, len(able) - 1}) if able)


def _product(grid: ProductGrid, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
    if grid.axes is not None and not isinstance(grid.axes, dict):
        raise UserError(f"grid.axes is {grid.axes!r}; it must map fields to values, as {{seed:[0,1]}}")
    axes = dict(_dotted(grid.axes or {}))
    if not axes:
        raise UserError(
            "grid.axes is empty; name at least one field and its values, as {optimizer.learning_rate:[4e-3,8e-3]}"
        )
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.axes.{name} is {values!r}; it must be a list of values")
    for combination in itertools.product(*axes.values()):
        run = copy.deepcopy(base)
        for name, value in zip(axes, combination, strict=True):
            _assign(run, name, value)
        if (run := tuner.dialled(run)).tokens <= 0:
            raise UserError("tokens is not set; a product grid needs tokens=… or an axis of that name")
        yield tuner.tuned(run, kept=axes)


def _points(grid: PointsGrid, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
    if not isinstance(grid.points, list) or not grid.points:
        raise UserError(
            f"grid.points is {grid.points!r}; it must be a list of runs, each a mapping as {{tokens:1000000,seed:1}}"
        )
    for number, point in enumerate(grid.points):
        where = f"grid.points[{number}]"
        if not isinstance(point, dict) or not point:
            raise UserError(f"{where} is {point!r}; it must map fields to values, as {{tokens:1000000,seed:1}}")
        run, given = copy.deepcopy(base), dict(_dotted(point))
        for name, value in given.items():
            _assign(run, name, value, where)
        if (run := tuner.dialled(run)).tokens <= 0:
            raise UserError(f"{where} has no tokens; give it, or tokens=… for all points")
        yield tuner.tuned(run, kept=given)


def _dotted(axes: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{a: {b: [1]}} and {a.b: [1]} both mean the axis a.b."""
    for name, value in axes.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _assign(run: RunConfig, name: str, value: Any, where: str = "grid.axes") -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    *groups, last = name.split(".")
    node: Any = run
    for group in groups:
        node = getattr(node, group, None)
    if not dataclasses.is_dataclass(node) or last not in {item.name for item in dataclasses.fields(node)}:
        raise UserError(f"{where} names {name!r}, which is not a field of a run; see conf/ for the fields")
    if dataclasses.is_dataclass(below := getattr(node, last)):
        first = dataclasses.fields(below)[0].name
        raise UserError(f"{where} names the group {name!r}; name one of its fields, such as {name}.{first}")
    kind: Any = type(node)
    typed = _typed(kind)
    try:
        typed[last] = value
    except OmegaConfBaseException as error:
        raise UserError(f"{where}.{name} contains {value!r}: {str(error).splitlines()[0]}") from error
    found = typed[last]
    setattr(node, last, OmegaConf.to_container(found) if OmegaConf.is_config(found) else found)


@functools.cache
def _typed(kind: type) -> Any:
    """Takes for each field of a dataclass only what it may be; making one takes milliseconds."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(kind)


def _refuse_tokens(grid: GridConfig, base: RunConfig) -> None:
    if base.tokens:
        raise UserError(f"tokens is {base.tokens}, but a grid of kind {grid.kind} chooses D itself; leave tokens out")


KINDS: dict[type, Callable[[Any, RunConfig, Tuner], Iterable[RunConfig]]] = {
    AdaptiveGrid: _first_round,
    IsoflopGrid: isoflop_runs,
    LadderGrid: _ladder,
    CurvesGrid: _curves,
    ProductGrid: _product,
    PointsGrid: _points,
    CheckGrid: _points,
    TuneGrid: rung_runs,
}
