"""What a checkpoint is quantized to: format, method and group. Planning reads this without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...train.config import ModelConfig
from ...train.errors import UserError
from ...train.model.shape import matrices_of
from ...train.quantization.bits import FORMATS

CODE_BITS = {"int8": 8, "int4": 4, "int3": 3, "mxfp4": 4, "nf4": 4}
METHODS = ("rtn", "awq", "gptq")  # see methods.py
LARGEST_GROUP = 128  # as in GPTQ and AWQ
MX_GROUP = FORMATS["mxfp4"].block


@dataclass(frozen=True)
class Quantization:
    """A format, the method that chooses the codes, and how many neighbours of a row share a scale (None: `groups`)."""

    format: str
    method: str = "rtn"
    group: int | None = None

    def __post_init__(self) -> None:
        for name, accepted in (("format", tuple(CODE_BITS)), ("method", METHODS)):
            if (value := getattr(self, name)) not in accepted:
                raise UserError(f"{name} is {value!r}; it must be one of {', '.join(accepted)}")
        if self.group is not None and self.group < 1:
            raise UserError(f"group is {self.group}; it must be 1 or more weights")
        if self.format == "mxfp4" and self.group not in (None, MX_GROUP):
            raise UserError(f"group is {self.group}; it must be {MX_GROUP} with format mxfp4")

    @property
    def label(self) -> str:
        return f"{self.format}_{self.method}"

    def groups(self, model: ModelConfig) -> dict[str, int]:
        """Return the group of each matrix: by default the largest divisor of its width up to 128, of mxfp4 always 32.

        Raises UserError if a group does not divide its matrix's width.
        """
        result = {}
        for matrix in matrices_of(model):
            width, group = matrix.columns or 0, MX_GROUP if self.format == "mxfp4" else self.group
            sizes = range(min(width, LARGEST_GROUP), 0, -1)
            result[matrix.name] = group or next(size for size in sizes if width % size == 0)
            if width % result[matrix.name]:
                raise UserError(f"group is {group}; it must divide {width}, the width of {matrix.name}")
        return result


def parse(entries: Sequence[str]) -> list[Quantization]:
    """Read `evaluate.quantize`, such as [int4:awq, int8]. Raises UserError for an unknown or repeated entry."""
    try:
        pairs = [entry.partition(":") for entry in entries]
        result = [Quantization(format, method or "rtn") for format, _, method in pairs]
        if len(set(result)) < len(result):
            raise UserError("an entry must not be repeated")
    except UserError as error:
        raise UserError(f"evaluate.quantize is {list(entries)}: {error}") from None
    return result
