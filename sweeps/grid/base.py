"""What every kind of grid is, and which kinds there are.

A kind is a dataclass in a file of this folder: its fields are its config, and what the rest of a sweep asks of it are
its methods. Nothing else names it but its YAML in conf/grid/.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...train.config import RunConfig
from ...train.errors import UserError
from ...train.fields import Fraction
from ...train.flops import count_parameters, flops_exact
from .tuning import Tuner

BYTES_PER_TOKEN = 3.5  # of a BPE, about


@dataclass
class GridConfig:
    """Fields of every kind, and what a kind is where it does not say otherwise."""

    kind: str = "product"  # names the class
    seeds: list[int] | None = None  # every point once per seed; None: the run's own seed
    recipes: list[list[str]] | None = None  # every point once per data recipe; None: the run's own, data.recipe
    # Every point once as it is, and once per variant: names and overrides, {muon: [optimizer=muon]}, which are recorded
    # as the fields that they change, {muon: {optimizer.kind: muon}}. A mapping, as ProductGrid.axes is.
    variants: Any = None
    # A run that diverges is tried once more, as a new run, with its learning rate times this; None: it is not.
    diverged_rate_factor: Fraction | None = None
    stop_hopeless: bool = False  # tune: ends runs that cannot win any more; no other kind takes it, for a law needs all

    takes_variants: ClassVar[bool] = True
    tries_settings: ClassVar[bool] = False  # whatever the rules say: its runs compete, and the best settings count

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterable[RunConfig]:
        """Return the runs that it begins with, in its own order, with one seed, recipe and variant."""
        raise UserError(f"grid.kind is {self.kind!r}; it must be one of {', '.join(grid_kinds())}")

    def fill_budgets(self, given: list[float] | None, probed: Callable[[], list[float]]) -> None:
        """Set the budgets that it does not name: those `given` by the cluster, else those of a probe."""

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        """Return what a user should know of these planned runs, such as what their fit will lack; may refuse them."""
        return []

    def next_round(self, sweep: Any, config: Any) -> bool:
        """Add runs to a SweepDirectory whose runs have ended, planned by a SweepConfig. Returns False if none is left.

        What the two are is not imported, because both of them know this file.
        """
        return False

    @classmethod
    def results(cls, sweep: Any) -> dict[str, Any] | None:
        """Return what law.json holds in place of a law of the loss, or None for a grid that has such a law."""
        return None

    def refuse_tokens(self, base: RunConfig) -> None:
        if base.tokens:
            raise UserError(
                f"tokens is {base.tokens}, but a grid of kind {self.kind} chooses D itself; leave tokens out"
            )


@functools.cache
def grid_kinds() -> dict[str, type[GridConfig]]:
    """Every kind by its name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")

    def below(node: type[GridConfig]) -> list[type[GridConfig]]:
        return [found for child in node.__subclasses__() for found in (child, *below(child))]

    return {node.kind: node for node in sorted(below(GridConfig), key=lambda node: node.kind)}


def unique_tokens(run: RunConfig) -> float:
    """Return about how many tokens the run's corpus has, nan where its size is not known."""
    from ...train.data.corpora import open_corpus

    size = open_corpus(run.data).size_bytes()
    return math.nan if size is None else size / (1.0 if run.data.tokenizer == "bytes" else BYTES_PER_TOKEN)


def fit_notes(runs: Sequence[RunConfig], more: Mapping[str, str]) -> list[str]:
    """Return what the fit of a plan would warn of, each with what `more` adds to the warning of that code."""
    from ...fit.checks.doctor import examine_plan

    unique = unique_tokens(runs[0])
    N, D, flops = zip(*((count_parameters(run.model).N_active, run.D, flops_exact(run)) for run in runs), strict=True)
    budgets = [math.nan if run.budget is None else run.budget for run in runs]
    warnings = examine_plan(N, D, flops, budgets, [tokens / unique for tokens in D])
    return [f"of this plan the fit would say: {one.message}{more.get(one.code, '')}" for one in warnings]
