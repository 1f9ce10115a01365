"""Grids of model sizes around the optimum of FLOP budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from ...train.config import ModelConfig, RunConfig
from ...train.errors import UserError
from ...train.fields import Count, Distinct, Fraction, Positive
from ...train.flops import count_parameters, flops_exact, tokens_for_budget, training_flops_per_token
from ...train.schedule import warmup_steps
from . import architectures
from .base import GridConfig, fit_notes, unique_tokens
from .tuning import Tuner

LEAST_PROBED = 1e11  # FLOPs of the smallest budget that a probe gives: less is too early in training for a law
EXPECTED_FLOPS = 2.5e11  # at which grid.expected_N is the best size
EXPECTED_EXPONENT = 0.55  # best N ~ C^0.55; 0.46 to 0.50 in Hoffmann et al. 2022, 0.73 in Kaplan et al. 2020
TRIES = 80  # budgets tried above and below, ten per decade


@dataclass
class IsoflopGrid(GridConfig):
    """Several sizes at each of several FLOP budgets (Hoffmann et al. 2022, approach 2).

    Sizes are log-spaced around N = expected_N (C / 2.5e11) ^ 0.55; the true optimum must lie within the span.
    """

    kind: str = "isoflop"
    budgets: Distinct[Positive] | None = None  # training FLOPs; None: the cluster's, or from a probe of this machine
    convention: Annotated[str, ("exact", "6nd")] = "exact"  # how a budget turns into D
    sizes: Count = 6  # models per budget
    span: Annotated[float, Meta(ge=1)] = 16.0  # largest over smallest N of a budget
    expected_N: Positive = 22e3  # best N at 2.5e11 FLOPs, on bytes
    min_steps: Count = 100  # points with fewer optimizer steps are left out

    def fill_budgets(self, budgets: list[float] | None, probed: Callable[[], list[float]]) -> None:
        if self.budgets is None:
            if budgets is None:
                budgets = probed()
                factor = max(1.0, LEAST_PROBED / min(budgets))
                budgets = [factor * budget for budget in budgets]
            self.budgets = budgets

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterable[RunConfig]:
        return self.isoflop_runs(base, tuner)

    def isoflop_runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        self.refuse_tokens(base)
        if not self.budgets:
            raise UserError(f"grid.budgets is {self.budgets}; give a list of training FLOPs such as [1e12,3e12]")
        N, _, smallest = architectures.well_shaped(base.model)[0]

        def spending(budget: float, model: ModelConfig) -> RunConfig | None:
            """Return a run of the model that costs this budget, or None if it has fewer than `min_steps` steps."""
            tokens: Any = tokens_for_budget(model, base.data.sequence_length, budget, self.convention)
            run = tuner.tuned(replace(base, model=model, tokens=tokens, budget=budget), whole=True)
            return run if tokens >= self.min_steps * run.batch_tokens else None

        for budget in sorted(set(self.budgets)):
            if spending(budget, smallest) is None:
                raise UserError(
                    f"grid.budgets contains {budget:.3g}, but the smallest model ({N:,} parameters) needs "
                    f"{self.least_flops(base, tuner):.2g} FLOPs for grid.min_steps {self.min_steps}; give at least that"
                )
            runs = (spending(budget, model) for model in self.models(base.model, budget))
            yield from (run for run in runs if run is not None)

    def least_flops(self, base: RunConfig, tuner: Tuner) -> float:
        """Return the FLOPs of min_steps steps of the smallest model."""
        smallest, length = architectures.well_shaped(base.model)[0][2], base.data.sequence_length
        batch = base.batch_tokens if tuner.rules.batch_tokens.k is None else length * tuner.rules.min_batch
        return training_flops_per_token(smallest, length) * float(self.min_steps * batch)

    def models(self, base: ModelConfig, budget: float) -> list[ModelConfig]:
        """Return distinct models, log-spaced over `span` around a budget's expected best N, smallest first."""
        # All budgets take their sizes from one lattice, so that runs of the same size share a trunk.
        expected = self.expected_size(base, budget)
        gap = math.log(self.span) / (self.sizes - 1) if self.sizes > 1 else 0.0
        if gap > 0:
            expected = self.expected_N * math.exp(gap * round(math.log(expected / self.expected_N) / gap))
        models: list[ModelConfig] = []
        for i in range(self.sizes):
            target = expected * math.exp(gap * (i - (self.sizes - 1) / 2))
            above = count_parameters(models[-1]).N_active if models else 0
            models.append(architectures.nearest_model(base, target, above))
        return models

    def expected_size(self, base: ModelConfig, budget: float) -> float:
        """Return the N expected to be best at a FLOP budget.

        expected_N is for models on bytes; the parameters of a larger vocabulary are added.
        """
        expected = self.expected_N * (budget / EXPECTED_FLOPS) ** EXPECTED_EXPONENT
        on_bytes = replace(base, vocab_size=256, tied_embeddings=True)
        shape = architectures.nearest_model(on_bytes, expected)
        adapted = replace(shape, vocab_size=base.vocab_size, tied_embeddings=base.tied_embeddings)
        return expected + count_parameters(adapted).N_active - count_parameters(shape).N_active

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        """Return a fit's warnings, with budgets that avoid them. Raises UserError if a budget has too few sizes."""
        from ...fit.checks.doctor import FEW_SIZES, LEAST_SIZES, MANY_EPOCHS

        more = {}
        enough, needed = min(FEW_SIZES, self.sizes), min(LEAST_SIZES, self.sizes)
        pairs = {(run.budget, count_parameters(run.model).N_active) for run in runs}
        sizes = {budget: sum(other == budget for other, _ in pairs) for budget in self.budgets or ()}
        budget = min(sizes, key=lambda budget: (sizes[budget], budget))
        if sizes[budget] < enough:
            near = self._nearest_budget(runs[0], tuner, budget, lambda tried_runs: len(tried_runs) >= enough)
            more["few_sizes"] = f" At {budget:.2g} FLOPs grid.min_steps drops some sizes; {near} would have {enough}."
            if sizes[budget] < needed:
                raise UserError(
                    f"grid.budgets contains {budget:.3g}, at which {sizes[budget]} of {self.sizes} sizes make "
                    f"grid.min_steps {self.min_steps} steps, and a profile needs {needed}; the nearest budget with "
                    f"{enough} is {near}"
                )
        longest = MANY_EPOCHS * unique_tokens(runs[0])
        if max(run.D for run in runs) > longest:
            near = self._nearest_budget(
                runs[0], tuner, max(sizes), lambda tried_runs: max(run.D for run in tried_runs) <= longest
            )
            more["repeated_data"] = f" The nearest budget that avoids this is {near} FLOPs; or use more text."
        return fit_notes(runs, more)

    def _nearest_budget(
        self, base: RunConfig, tuner: Tuner, budget: float, suffices: Callable[[list[RunConfig]], bool]
    ) -> str:
        """Return, as text, the budget nearest to `budget` whose runs satisfy `suffices`, or "none"."""
        for i in range(1, TRIES):
            for candidate in (float(f"{budget * 10 ** (way * i / 10):.1e}") for way in (1, -1)):
                try:
                    runs = list(replace(self, budgets=[candidate]).isoflop_runs(replace(base, tokens=0), tuner))
                except UserError:  # the budget is too small or too large for the models
                    continue
                if runs and suffices(runs):
                    return f"{candidate:.1e}"
        return "none"


@dataclass
class CurvesGrid(IsoflopGrid):
    """The largest budget's run of each size, and cooldowns; averaged weights give the loss at every smaller D."""

    kind: str = "curves"
    # Shares of a run's D at which three sizes also cool down: smallest, middle and largest that are warmed up by then.
    cooldowns: Distinct[Fraction] = field(default_factory=lambda: [0.05, 0.2, 0.5])

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        if not base.average.kept:
            raise UserError("average.kind is none; curves are read from averaged weights, so it must be ema or window")
        if base.schedule.kind != "wsd":
            raise UserError(
                f"schedule.kind is {base.schedule.kind}; a grid of curves needs wsd, so that cooldowns branch off"
            )
        largest = replace(self, budgets=[max(self.budgets)] if self.budgets else None)
        long = list(largest.isoflop_runs(base, tuner))
        yield from long
        for share in self.cooldowns:
            cooled = [replace(base, model=run.model, tokens=round(share * run.tokens)) for run in long]
            cooled = [tuner.tuned(run, whole=True) for run in cooled]
            # A small D cuts the warm-up short, so the run would differ from the start of the long run.
            able = [short for short, run in zip(cooled, long, strict=True) if warmup_steps(short) == warmup_steps(run)]
            yield from (able[i] for i in sorted({0, len(able) // 2, len(able) - 1}) if able)

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        """Return a note on what the same points (N, D) would cost as separate runs, or as cooldowns."""
        from ...fit.curves.averaged import SPACING

        smallest = min(self.cooldowns, default=1.0)
        shares = [SPACING**-k for k in range(1 + int(math.log(1 / smallest) / math.log(SPACING)))]
        longest: dict[int, RunConfig] = {}
        for run in sorted(runs, key=lambda run: run.D):
            longest[count_parameters(run.model).N_active] = run
        long = sum(map(flops_exact, longest.values()))
        separate, ladder = long * sum(shares), long * (1 + runs[0].schedule.decay_share * sum(shares[1:]))
        return [
            f"averages give about {len(longest) * len(shares)} points of N and D; separate runs would take "
            f"{separate:.2g} training FLOPs, and a ladder of cooldowns from the same long runs {ladder:.2g}"
        ]
