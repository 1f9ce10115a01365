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
        quantizations = self._quantizations(base.quantization)
        for run in super().runs(base, tuner):
            yield from (replace(run, quantization=quantization) for quantization in quantizations)

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        return super().notes([run for run in runs if not run.quantization.used], tuner)

    def _quantizations(self, base: QuantizationConfig) -> list[QuantizationConfig]:
        """Return the unquantized setting, then that of each format, with the block, rounding and rotation of `base`."""
        for name, value in base.formats.items():
            if value != "none":
                raise UserError(f"quantization.{name} is {value}; leave it out, and list the formats in grid.formats")
        result = {"": QuantizationConfig()}
        for name in self.formats:
            parts = name.split("/") if "/" in name else [name] * len(PASSES)
            if len(parts) != len(PASSES) or not {*parts} <= {*FORMATS}:
                accepted = f"it must be one of {', '.join(FORMATS)}, or three of them, such as int4/int8/none"
                raise UserError(f"grid.formats contains {name!r}; {accepted}")
            rounding = "nearest" if parts[2] == "none" else base.rounding
            chosen = replace(base, weights=parts[0], activations=parts[1], gradients=parts[2], rounding=rounding)
            result.setdefault(chosen.label, chosen)
        if len(result) == 1:
            raise UserError(f"grid.formats is [{', '.join(self.formats)}]; it must contain a format other than none")
        return [*result.values()]
