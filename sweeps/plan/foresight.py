"""What the fit of a planned sweep would lack, said before a run is trained, with the nearest budgets that would do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from ...train.config import RunConfig, run_id
from ...train.data.corpora import open_corpus
from ...train.errors import UserError
from ...train.flops import count_parameters, flops_exact
from ..config import CurvesGrid, GridConfig, IsoflopGrid, LadderGrid, TuneGrid
from ..grid.expand import isoflop_runs
from ..grid.tune import rung_tokens
from ..grid.tuning import Tuner

BYTES_PER_TOKEN = 3.5  # of a BPE, about
TRIES = 80  # budgets to either side, ten a decade

Does = Callable[[list[RunConfig]], bool]


def foresee(
    grid: GridConfig | None, runs: Sequence[RunConfig], tuner: Tuner, present: Iterable[RunConfig] = ()
) -> list[str]:
    """Sentences for a person, of a grid that is there for a law; `present` are the runs that it joins.

    UserError where an isoFLOP budget is left with too few sizes for any profile.
    """
    from ...fit.checks.planned import FEW_SIZES, LEAST_SIZES, MANY_EPOCHS, examine_plan

    if isinstance(grid, CurvesGrid):
        return [_in_other_ways(grid, runs)]
    if type(grid) not in (IsoflopGrid, LadderGrid, TuneGrid):
        return []
    runs = list({run_id(run): run for run in (*runs, *present)}.values())
    size = open_corpus(runs[0].data).size_bytes()
    unique = math.nan if size is None else size / (1.0 if runs[0].data.tokenizer == "bytes" else BYTES_PER_TOKEN)
    if isinstance(grid, TuneGrid):
        ratios = grid.tokens_per_parameter
        longest = max(rung_tokens(grid, run, run.model, len(ratios) - 1) for run in runs)
        if longest > MANY_EPOCHS * unique:
            raise UserError(
                f"grid.tokens_per_parameter gives the largest of grid.sizes {longest:.3g} tokens, more than "
                f"{MANY_EPOCHS:g} times the corpus; give less of either, or more text"
            )
        total = sum(map(flops_exact, runs)) * sum(ratio / ratios[0] / 2**rung for rung, ratio in enumerate(ratios))
        return [f"these are the first of {len(ratios)} rungs; all take about {total:.3g} FLOPs"]
    N, D, flops = zip(*((count_parameters(run.model).N_active, run.D, flops_exact(run)) for run in runs), strict=True)
    budgets, more = [math.nan if run.budget is None else run.budget for run in runs], {}
    if isinstance(grid, IsoflopGrid):
        enough, needed = min(FEW_SIZES, grid.sizes), min(LEAST_SIZES, grid.sizes)
        pairs = set(zip(budgets, N, strict=True))
        sizes = {budget: sum(other == budget for other, _ in pairs) for budget in grid.budgets or ()}
        budget = min(sizes, key=lambda budget: (sizes[budget], budget))
        if sizes[budget] < enough:
            near = _nearest(grid, runs[0], tuner, budget, lambda found: len(found) >= enough)
            more["few_sizes"] = f" At {budget:.2g} FLOPs grid.min_steps leaves some out; {near} would have {enough}."
            if sizes[budget] < needed:
                raise UserError(
                    f"grid.budgets contains {budget:.3g}, at which {sizes[budget]} of {grid.sizes} sizes make "
                    f"grid.min_steps {grid.min_steps} steps, and a profile needs {needed}; the nearest budget with "
                    f"{enough} is {near}"
                )
        if max(D) > MANY_EPOCHS * unique:
            near = _nearest(
                grid, runs[0], tuner, max(sizes), lambda found: max(r.D for r in found) <= MANY_EPOCHS * unique
            )
            more["repeated_data"] = f" The nearest budget of which no run does is {near} FLOPs; or take more text."
    warnings = examine_plan(N, D, flops, budgets, [tokens / unique for tokens in D])
    return [f"of this plan the fit would say: {one.message}{more.get(one.code, '')}" for one in warnings]


def _in_other_ways(grid: CurvesGrid, runs: Sequence[RunConfig]) -> str:
    """What the points of a grid of curves would cost as runs of their own, and as a ladder of cooldowns."""
    from ...fit.curves.averaged import SPACING

    least = min(grid.cooldowns, default=1.0)
    shares = [SPACING**-k for k in range(1 + int(math.log(1 / least) / math.log(SPACING)))]
    longest: dict[int, RunConfig] = {}
    for run in sorted(runs, key=lambda run: run.D):
        longest[count_parameters(run.model).N_active] = run
    long = sum(map(flops_exact, longest.values()))
    decay = runs[0].schedule.decay_share
    apart, ladder = long * sum(shares), long * (1 + decay * sum(shares[1:]))
    return (
        f"averages give about {len(longest) * len(shares)} points of N and D; with a run for each they would take "
        f"{apart:.2g} training FLOPs, as a ladder of cooldowns from the same long runs {ladder:.2g}"
    )


def _nearest(grid: IsoflopGrid, base: RunConfig, tuner: Tuner, budget: float, does: Does) -> str:
    """The budget nearest to one whose runs will do, in two digits."""
    for i in range(1, TRIES):
        for tried in (float(f"{budget * 10 ** (way * i / 10):.1e}") for way in (1, -1)):
            try:
                other = dataclasses.replace(grid, budgets=[tried])
                found = list(isoflop_runs(other, dataclasses.replace(base, tokens=0), tuner))
            except UserError:  # too small for one model, or too large for any
                continue
            if found and does(found):
                return f"{tried:.1e}"
    return "none"
