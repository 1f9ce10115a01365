"""Runs that could be added to a sweep: well-shaped models, D in whole steps, other seeds, and what each would cost.

Special here:
- what a run costs by itself is asked of `trunks.merge`, with what is on disk: only its own steps where a trunk has kept
  the checkpoint that it begins at, else all of them;
- a trunk that is done has kept few checkpoints, so the D that begin at one of them are offered too: they are cheap;
- sizes and D stay where runs have shown that the law holds: tokens a parameter within what was tried, and C not far
  below the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...train.config import ModelConfig, RunConfig, run_id
from ...train.flops import count_parameters, flops_exact, tokens_for_budget
from ...train.schedule import same_until, trunk_steps
from ..grid import architectures
from ..grid.expand import whole_steps
from ..grid.trunks import Progress, merge_runs, own_flops

BUDGETS_A_DECADE = 8
SIZE_STEP = 1.32  # between two sizes, before the nearest well-shaped one is taken
BELOW = 0.3  # of the smallest C that was tried: the least that is offered


@dataclass(frozen=True)
class Offer:
    """A run that could be added."""

    run: RunConfig
    size: float  # training FLOPs of the whole run, exact convention
    flops: float  # of them, what it trains itself given what is there
    branch_flops: float  # the same where a longer run of its trunk is added too
    trunk: str  # runs of one trunk differ in D alone

    @property
    def N(self) -> int:
        return count_parameters(self.run.model).N_total


@dataclass(frozen=True)
class Range:
    """Where runs are offered."""

    least_flops: float
    most_flops: float
    least_ratio: float  # tokens a parameter
    most_ratio: float
    min_steps: int

    @classmethod
    def around(
        cls, N: Sequence[float], D: Sequence[float], flops: Sequence[float], most_flops: float, min_steps: int
    ) -> Range:
        """From the runs that are done."""
        ratios = [d / n for n, d in zip(N, D, strict=True)]
        return cls(BELOW * min(flops), most_flops, min(ratios), max(ratios), min_steps)


def trunk_of(run: RunConfig) -> str:
    """The same for runs that differ in D alone."""
    return run_id(replace(run, tokens=0))


def offers(
    base: RunConfig,
    seeds: Sequence[int],
    within: Range,
    known: Sequence[RunConfig],
    progress: Mapping[str, Progress],
    share: bool = True,
) -> list[Offer]:
    """Every run that could be added.

    Args:
        base: what they share with the sweep's runs, complete.
        seeds: each run is offered with each.
        within: what they may be.
        known: the sweep's runs, none of which is offered again.
        progress: what they have on disk, by run id.
        share: whether runs that differ in D alone may share a trunk.
    """
    families: dict[str, list[RunConfig]] = {}
    for run in known:
        families.setdefault(trunk_of(run), []).append(run)
    taken = {run_id(run) for run in known}
    found: dict[str, Offer] = {}
    for model in sizes(base.model, within, base.data.sequence_length):
        for seed in seeds:
            template = replace(base, model=model, seed=seed, tokens=0)
            trunk = trunk_of(template)
            mates = families.get(trunk, []) if share else []
            for tokens in dict.fromkeys([*_lengths(template, within), *_saved(template, mates, progress, within)]):
                run = replace(template, tokens=tokens)
                name = run_id(run)
                if name not in taken and name not in found:
                    found[name] = _offer(run, trunk, mates, progress, share)
    return list(found.values())


def merged(
    chosen: Sequence[RunConfig], known: Sequence[RunConfig], progress: Mapping[str, Progress], share: bool
) -> list[RunConfig]:
    """The chosen runs as they would be trained beside those that are known: branches with their `parent`."""
    if not share:
        return list(chosen)
    trunks = {trunk_of(run) for run in chosen}
    mates = [run for run in known if trunk_of(run) in trunks]
    return merge_runs([*mates, *chosen], progress).runs[len(mates) :]


def sizes(base: ModelConfig, within: Range, sequence_length: int) -> list[ModelConfig]:
    """Well-shaped models of which some D lies within the range, smallest first."""
    low = math.sqrt(within.least_flops / (6 * within.most_ratio)) / 4  # small models spend more than 6 N a token
    high = math.sqrt(within.most_flops / (6 * within.least_ratio))
    models: dict[int, ModelConfig] = {}
    wanted = max(low, 1.0)
    while wanted <= high * SIZE_STEP:
        model = architectures.nearest_model(base, wanted)
        models.setdefault(count_parameters(model).N_total, model)
        wanted *= SIZE_STEP
    return [models[N] for N in sorted(models)]


def _budgets(within: Range) -> list[float]:
    decades = math.log10(within.most_flops / within.least_flops)
    levels = max(1, round(BUDGETS_A_DECADE * decades))
    return [within.most_flops * 10 ** (-decades * i / levels) for i in range(levels + 1)]


def _lengths(template: RunConfig, within: Range) -> Iterator[int]:
    """Every D of a model, in whole steps, that lies within the range."""
    for budget in _budgets(within):
        D = tokens_for_budget(template.model, template.data.sequence_length, budget)
        tokens = whole_steps(D * (1 - 1e-9), template, math.floor)
        if _lies_within(replace(template, tokens=tokens), within):
            yield tokens


def _saved(
    template: RunConfig, mates: Sequence[RunConfig], progress: Mapping[str, Progress], within: Range
) -> Iterator[int]:
    """Every D whose decay begins where a run of the trunk has kept a checkpoint."""
    if template.schedule.kind != "wsd":
        return
    for mate in mates:
        for step in progress.get(run_id(mate), Progress()).saved:
            if step <= trunk_steps(mate):
                about = round(step / (1 - template.schedule.decay_share))
                for steps in range(max(1, about - 2), about + 3):
                    run = replace(template, tokens=steps * template.batch_tokens)
                    if trunk_steps(run) == step and _lies_within(run, within):
                        yield run.tokens


def _lies_within(run: RunConfig, within: Range) -> bool:
    ratio = run.D / count_parameters(run.model).N_total
    return (
        run.steps >= within.min_steps
        and within.least_ratio <= ratio <= within.most_ratio
        and within.least_flops * (1 - 1e-6) <= flops_exact(run) <= within.most_flops * (1 + 1e-6)
    )


def _offer(
    run: RunConfig, trunk: str, mates: Sequence[RunConfig], progress: Mapping[str, Progress], share: bool
) -> Offer:
    size = flops_exact(run)
    if not share:
        return Offer(run, size, size, size, trunk)
    alone = own_flops(merged([run], mates, progress, share)[0]) if mates else size
    begin = trunk_steps(run)
    longer = replace(run, tokens=2 * run.D)
    branches = 0 < begin <= same_until(longer, run)
    branch = size * (run.steps - begin) / run.steps if branches else alone
    return Offer(run, size, alone, min(alone, branch), trunk)
