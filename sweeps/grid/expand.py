"""Expand a grid config to a list of RunConfigs. Pure: the same config gives the same runs on every machine."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ...train.config import RunConfig, mixture_label, run_id, with_shares
from ...train.data.recipe import recipe
from ...train.errors import UserError, counted
from ...train.flops import count_parameters
from ...train.planner.validation import check_fields, validate
from ..terminal import short
from .base import GridConfig
from .product import assign, dotted
from .tuning import Tuner, TuningConfig

BASE = "base"  # the name of the base among its variants
CUT = ("data.recipe", "data.sequence_length", "data.separate_documents")  # data fields that a variant may change


def expand_grid(
    grid: GridConfig, base: RunConfig, tuning: TuningConfig | None = None, present: Iterable[RunConfig] = ()
) -> list[RunConfig]:
    """Return a grid's distinct runs in order.

    `present`: earlier runs of the sweep; tuning.horizon=size depends on the D of all runs of a size.
    """
    check_fields(grid, "grid.")
    tuner = Tuner(tuning or TuningConfig())
    check_fields(tuner.rules, "tuning.")
    if batch := tuner.rules.batch_tokens.batch:
        raise UserError(f"tuning.batch_tokens.batch is {batch}; it must be 0, because this rule sets the batch")
    points = list[RunConfig]()
    for variant, variant_tuner in [(base, tuner)] if grid.variants is None else _variants(grid, base, tuner):
        variant_runs: Iterable[RunConfig] = grid.runs(variant, variant_tuner)
        if variant_tuner.rules.horizon == "size":
            variant_runs = grid.runs(variant, variant_tuner.with_spans([*variant_runs, *present]))
        points.extend(variant_runs)
    runs: dict[str, RunConfig] = {}
    fingerprints: dict[tuple[str, ...], str | None] = {}  # cached: a recipe's model can have gigabytes
    for point in points:
        recipes = grid.recipes if grid.recipes is not None else [point.data.recipe]
        seeds = grid.seeds if grid.seeds is not None else [point.seed]
        for names, seed in itertools.product(recipes, seeds):
            steps = tuple(recipe.canonical(names))
            if steps not in fingerprints:
                recipe.require(steps)
                fingerprints[steps] = recipe.fingerprint(steps)
            data = replace(with_shares(point.data), recipe=list(steps), recipe_fingerprint=fingerprints[steps])
            run = replace(point, data=data, seed=seed)
            check_run(run, grid, tuner.rules)
            if (other := runs.setdefault(run_id(run), run)).variant != run.variant:
                same = f"grid.variants.{run.variant} has the same run as {other.variant}, {run_label(other)}"
                raise UserError(f"{same}; variants must not share a run, so remove one")
    if not runs:
        raise UserError("grid has no runs; give it at least one size and one D")
    for run in runs.values():
        run.name = run_label(run)
    return list(runs.values())


def check_run(run: RunConfig, grid: GridConfig, rules: TuningConfig) -> None:
    """Validate a run. If its mesh does not divide a batch that the rules chose, the error names tuning.min_batch."""

    def refusal(**optimizer: Any) -> UserError | None:
        try:
            validate(replace(run, optimizer=replace(run.optimizer, **optimizer)))
        except UserError as error:
            return error
        return None

    chosen = grid.tries_settings or rules.choose_batch
    error, parallel, when = refusal(), run.parallel, ""
    if error is None and chosen and grid.grows:
        error = refusal(batch_size=rules.min_batch)  # which divides the batches of all rounds
        when = f"a later round may choose a batch of {counted(rules.min_batch, 'sequence')}: "
    if error is None:
        return
    multiple = (
        parallel.dp * (parallel.micro_batch_size or 1) * (parallel.pp if parallel.schedule == "interleaved" else 1)
    )
    if chosen and refusal(batch_size=multiple) is None:
        remedy = f"set tuning.min_batch={multiple}, so that the tuning rules choose multiples of {multiple}"
        raise UserError(f"{when}{error}; or {remedy}")
    raise error


def run_label(run: RunConfig) -> str:
    named = f"N{short(count_parameters(run.model).N_active)}_D{short(run.D)}_s{run.seed}"
    named += f"_{run.variant}" if run.variant else ""
    named += f"_{run.quantization.label}" if run.quantization.label else ""
    named += f"_{mixture_label(run.data.weights)}" if run.data.domains else ""
    return f"{named}_{recipe.recipe_label(run.data.recipe)}" if run.data.recipe else named


def _variants(grid: GridConfig, base: RunConfig, tuner: Tuner) -> Iterator[tuple[RunConfig, Tuner]]:
    """Yield the base run, then each variant, each with a tuner that keeps the fields that the variant sets."""
    if grid.recipes is not None or not grid.takes_variants:
        raise UserError("grid.variants cannot be combined with grid.recipes or an adaptive grid; leave one out")
    if not isinstance(grid.variants, dict) or not grid.variants or BASE in grid.variants:
        problem = f"grid.variants is {grid.variants!r}; it must map names, other than {BASE}, to overrides"
        raise UserError(f"{problem}, such as {{muon:[optimizer=muon]}}")
    yield replace(base, variant=BASE), tuner
    for name, changes in grid.variants.items():
        where, run = f"grid.variants.{name}", copy.deepcopy(replace(base, variant=str(name)))
        if not isinstance(changes, dict) or not changes:
            raise UserError(f"{where} is {changes!r}; it must be overrides that change a run, such as [optimizer=muon]")
        for field, value in dotted(changes):
            if field in ("seed", "tokens") or (field.startswith("data.") and field not in CUT):
                problem = f"{where} changes {field}; variants share text, tokenizer, D and seeds"
                raise UserError(f"{problem}; run a separate sweep, and give both sweeps to `isoflop compare`")
            assign(run, field, value, where)
        keep = [*tuner.rules.keep, *(field for field, _ in dotted(changes))]
        yield run, replace(tuner, rules=replace(tuner.rules, keep=keep))
