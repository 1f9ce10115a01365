"""How the evaluation writes numbers: what is missing is a dash, never a zero; minus is the sign, not the hyphen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeGuard

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number; True and False are none."""
    # The usual ones first: asking an abstract class is slow, and a page asks a million times.
    is_one = isinstance(value, int | float) or (value is not None and isinstance(value, Real))
    return is_one and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """0.123; with `sign` "+" a positive one has its sign too."""
    return f"{value:{sign}.{digits}f}".replace("-", "−") if is_number(value) else "–"


def with_error(value: float | None, error: float | None, digits: int = 3) -> str:
    """0.123 ± 0.004, or the value alone."""
    return number(value, digits) + (f" ± {error:.{digits}f}" if is_number(value) and is_number(error) else "")


def scored(scores: Mapping[str, Any], metric: str, digits: int = 3) -> str:
    return with_error(scores.get(metric), scores.get(f"{metric}_se"), digits)


def short_count(value: float | None) -> str:
    """1234567 -> 1.23M; three digits."""
    if not is_number(value):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.3g}"


def grouped(value: Any) -> str:
    """1234567 -> 1,234,567."""
    return f"{value:,}" if is_number(value) else str(value)


def compute(value: float | None) -> str:
    """FLOPs as 1.23×10¹⁹."""
    if not is_number(value) or value <= 0:
        return "–"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
