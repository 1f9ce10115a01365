"""Types of config fields: accepted values, and whether a field counts in the run id."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, TypeVar

from msgspec import Meta

# The accepted values of a field follow its type: bounds, or a tuple of all values.
Natural = Annotated[int, Meta(ge=0, le=10**18)]
Natural4 = Annotated[int, Meta(ge=0, le=10**4)]
Count = Annotated[int, Meta(ge=1, le=10**18)]
Count4 = Annotated[int, Meta(ge=1, le=10**4)]  # with larger values planning would hang or run out of memory
Count6 = Annotated[int, Meta(ge=1, le=10**6)]
Count9 = Annotated[int, Meta(ge=1, le=10**9)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Ratio = Annotated[float, Meta(ge=1e-3)]  # tokens per parameter; the smallest model then gets a few tokens
Share = Annotated[float, Meta(ge=0, lt=1)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Exponent = Annotated[float, Meta(ge=-10, le=10)]
Precision = Annotated[str, ("fp32", "bf16", "fp16")]
UNIQUE = Meta(extra_json_schema={"uniqueItems": True})
T = TypeVar("T")
Distinct = Annotated[list[T], UNIQUE]  # no value may be repeated


def cosmetic(default: Any) -> Any:
    """Declare a config field that run ids leave out, because it does not change the result."""
    return field(default=default, metadata={"cosmetic": True})


def later(default: Any) -> Any:
    """Declare a config field added later: run ids leave it out at its default, so old ids stay the same."""
    return field(default=default, metadata={"later": True})
