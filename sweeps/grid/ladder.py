"""The ladder grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...train.config import RunConfig
from ...train.errors import UserError
from ...train.fields import Count, Distinct, Positive, Ratio
from ...train.flops import count_parameters
from . import architectures
from .base import GridConfig, fit_notes
from .tuning import Tuner


@dataclass
class LadderGrid(GridConfig):
    """Rungs of growing N, each trained on several D."""

    kind: str = "ladder"
    sizes: Distinct[Positive] = field(default_factory=list)  # target N; the nearest well-shaped model is used
    tokens_per_parameter: Distinct[Ratio] | None = None  # D as multiples of N; exactly one of this and `tokens`
    tokens: Distinct[Count] | None = None  # D in tokens, rounded to whole steps

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        self.refuse_tokens(base)
        if (self.tokens is None) == (self.tokens_per_parameter is None):
            raise UserError(
                f"grid.tokens is {self.tokens} and grid.tokens_per_parameter is {self.tokens_per_parameter}; "
                "a ladder needs exactly one of them"
            )
        for size in self.sizes:
            model = architectures.nearest_model(base.model, size)
            N = count_parameters(model).N_active
            multiples: list[Any] = [ratio * N for ratio in self.tokens_per_parameter or ()]
            for tokens in multiples if self.tokens is None else self.tokens:
                yield tuner.tuned(replace(base, model=model, tokens=tokens), whole=True)

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        return fit_notes(runs, {})
