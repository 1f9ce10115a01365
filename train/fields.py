"""What fields of a config may be: bounds beside their type, and whether they belong to a run's identity. No torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

from msgspec import Meta

# What a field accepts stands beside its type: bounds, or a tuple of all its values.
Natural = Annotated[int, Meta(ge=0, le=10**18)]
Natural4 = Annotated[int, Meta(ge=0, le=10**4)]
Count = Annotated[int, Meta(ge=1, le=10**18)]
Count4 = Annotated[int, Meta(ge=1, le=10**4)]  # beyond such limits planning would hang, or fill the memory
Count6 = Annotated[int, Meta(ge=1, le=10**6)]
Count9 = Annotated[int, Meta(ge=1, le=10**9)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Exponent = Annotated[float, Meta(ge=-10, le=10)]
Precision = Annotated[str, ("fp32", "bf16", "fp16")]


def cosmetic(default: Any) -> Any:
    """A field that says how or where, never what."""
    return field(default=default, metadata={"cosmetic": True})


def later(default: Any) -> Any:
    """A field that came after runs had ids: left out of the identity at its default, so old ids stand."""
    return field(default=default, metadata={"later": True})
