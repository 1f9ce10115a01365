"""The precision grid: a ladder in each of several number formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...train.config import FORMATS, PASSES, QuantizationConfig, RunConfig
from ...train.errors import UserError
from ...train.fields import Distinct
from .ladder import LadderGrid
from .tuning import Tuner


@dataclass
class PrecisionGrid(LadderGrid):
    """The same models, text and seeds in each number format; the unquantized ladder is always part of it."""

    kind: str = "precision"
    # Names for weights, activations and gradients alike, or weights/activations/gradients, such as int4/int8/none.
    formats: Distinct[str] = field(default_factory=list)

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        for name, value in base.quantization.formats.items():
            if value != "none":
                raise UserError(f"quantization.{name} is {value}; leave it out, and list the formats in grid.formats")
        settings = {"": QuantizationConfig()}
        for name in self.formats:
            parts = name.split("/") if "/" in name else [name] * len(PASSES)
            if len(parts) != len(PASSES) or not {*parts} <= {*FORMATS}:
                accepted = f"it must be one of {', '.join(FORMATS)}, or three of them, such as int4/int8/none"
                raise UserError(f"grid.formats contains {name!r}; {accepted}")
            weights, activations, gradients = parts
            chosen = replace(base.quantization, weights=weights, activations=activations, gradients=gradients)
            chosen.rounding = "nearest" if gradients == "none" else chosen.rounding
            settings.setdefault(chosen.label, chosen)
        if len(settings) == 1:
            raise UserError(f"grid.formats is [{', '.join(self.formats)}]; it must contain a format other than none")
        for run in super().runs(base, tuner):
            yield from (replace(run, quantization=quantization) for quantization in settings.values())

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        return super().notes([run for run in runs if not run.quantization.used], tuner)
