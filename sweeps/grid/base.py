"""Base class of all kinds of grid. A kind is a dataclass in this folder, whose fields are its config."""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...train.config import DataConfig, RunConfig
from ...train.errors import UserError
from ...train.fields import Distinct, Fraction
from ...train.flops import count_parameters, flops_exact
from .tuning import Tuner

BYTES_PER_TOKEN = 3.5  # rough value for a BPE tokenizer


@dataclass
class GridConfig:
    """Fields and defaults that all kinds of grid share."""

    kind: str = "product"  # names the class
    seeds: Distinct[int] | None = None  # every point once per seed; None: the base run's seed
    recipes: Distinct[list[str]] | None = None  # every point once per data recipe; None: the base run's data.recipe
    # Every point once as the base run and once per variant, given as {muon: [optimizer=muon]} and recorded as the
    # fields that change, {muon: {optimizer.kind: muon}}. A mapping, as ProductGrid.axes is.
    variants: Any = None
    # A run that diverges is repeated once, as a new run, with its learning rate times this; None: no new run.
    diverged_rate_factor: Fraction | None = None
    stop_hopeless: bool = False  # tune only: stop runs that can no longer win; a law needs every run to finish

    takes_variants: ClassVar[bool] = True
    grows: ClassVar[bool] = False  # its later rounds may have other batches than the first
    tries_settings: ClassVar[bool] = False  # its runs compete with different settings, independent of the rules

    def set_first_text(self, base: RunConfig) -> None:
        """Set the training corpus of `base` to that of the grid's first run, if the grid varies it."""

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterable[RunConfig]:
        """Return the initial runs of a variant, `base`, in order, before they are repeated per seed and recipe."""
        raise UserError(f"grid.kind is {self.kind!r}; it must be one of {', '.join(grid_kinds())}")

    def fill_budgets(self, budgets: list[float] | None, probed: Callable[[], list[float]]) -> None:
        """Set missing budgets to `budgets`, or if that is None to the result of `probed`."""

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        """Return notes on planned runs, such as limits of their fit; may raise UserError."""
        return []

    def suggest(self, sweep: Any, config: Any, budget: float, max_flops: float, max_runs: int) -> Any:
        """Return a Suggestion of runs for a SweepDirectory, or None for the runs that narrow a law of N and D."""
        return None

    def next_round(self, sweep: Any, config: Any) -> bool:
        """Add further runs to a SweepDirectory whose runs have ended. Returns False if none were added."""
        return False  # the two types are not imported, because their modules import this one

    @classmethod
    def results(cls, sweep: Any) -> dict[str, Any] | None:
        """Return what this kind of grid writes to law.json, or None to fit a law of the loss."""
        return None

    def refuse_tokens(self, base: RunConfig) -> None:
        if base.tokens:
            raise UserError(
                f"tokens is {base.tokens}, but a grid of kind {self.kind} chooses D itself; leave tokens out"
            )


@functools.cache
def grid_kinds() -> dict[str, type[GridConfig]]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")

    def below(node: type[GridConfig]) -> list[type[GridConfig]]:
        return [kind for child in node.__subclasses__() for kind in (child, *below(child))]

    return {node.kind: node for node in sorted(below(GridConfig), key=lambda node: node.kind)}


def text_tokens(data: DataConfig) -> dict[str, float]:
    """Estimate the number of tokens in each domain of a text, or in its only one; nan if unknown."""
    from ...train.data.corpora import open_corpus
    from ...train.data.text import domains_of

    bytes_per_token = 1.0 if data.tokenizer == "bytes" else BYTES_PER_TOKEN
    sizes = {name: open_corpus(domain).size_bytes() for name, domain in domains_of(data).items()}
    return {name: math.nan if size is None else size / bytes_per_token for name, size in sizes.items()}


def unique_tokens(run: RunConfig) -> float:
    """Estimate how many tokens the run can train on before text is repeated, nan if a text's size is unknown."""
    tokens = text_tokens(run.data)
    if run.data.domains is None:
        return sum(tokens.values())
    return min(
        (domain.unique_tokens or tokens[name]) / domain.weight
        for name, domain in run.data.domains.items()
        if domain.weight
    )


def fit_notes(runs: Sequence[RunConfig], more: Mapping[str, str]) -> list[str]:
    """Return the warnings that a fit of planned runs would give. `more` maps warning codes to text to append."""
    from ...fit.checks.doctor import examine_plan

    unique = unique_tokens(runs[0])
    N, D, flops = zip(*((count_parameters(run.model).N_active, run.D, flops_exact(run)) for run in runs), strict=True)
    budgets = [math.nan if run.budget is None else run.budget for run in runs]
    warnings = examine_plan(N, D, flops, budgets, [tokens / unique for tokens in D])
    return [f"the fit of this plan would warn: {warning.message}{more.get(warning.code, '')}" for warning in warnings]
