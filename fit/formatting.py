"""Numbers formatted for users: 15.2k parameters, 1.2e24 FLOPs, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np

WIDE = 1e5  # an interval wider than this factor is reported as undetermined; chosen by hand
UNDETERMINED = "undetermined"
NOTHING = "–"
INTERVALS = {  # what intervals of each kind cover
    "mixture": "Intervals of the mixture cover the noise of these runs and the choice of the law's form; those of the "
    "approaches cover the noise alone.",
    "noise": "Intervals cover the noise of these runs under one form of the law; errors of extrapolation are larger.",
}
SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(value: float | None, digits: int = 3) -> str:
    """Format a number of parameters or tokens as 15.2k or 70.3B, and 1e15 or more as 1.2e15."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value >= 9.995e14 or 0 < value < 0.01:
        return scientific(value, digits)
    for size, suffix in SUFFIXES:
        if rounded(value, digits) >= size:
            return plain(value / size, digits) + suffix
    return plain(value, digits)


def scientific(value: float | None, digits: int = 3) -> str:
    """Format a number as 1.2e24, without a plus sign or padding zeros; – if None or not finite."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def plain(value: float, digits: int = 3) -> str:
    """Format a number to `digits` significant digits: 1.20, 15.2, 482."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NOTHING
    value = rounded(value, digits)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")


def amount(value: float | None, digits: int = 3) -> str:
    """Format a number as 15.2 or, below 0.01 and from 1e5 on, as 1.2e6."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return plain(value, digits) if value == 0 or 0.01 <= value < 1e5 else scientific(value, digits)


def fixed(value: float | None, decimals: int = 3, sign: str = "") -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:{sign}.{decimals}f}"


def times(factor: float) -> str:
    """Format a factor as 2.5 times, 1,000 times or 3.3e11 times."""
    if 999.5 <= factor < 99_950:
        return f"{rounded(factor, 3):,.0f} times"
    return f"{f'{factor:.3g}' if 0.01 <= factor < 999.5 else scientific(factor, 2)} times"


def percent(value: float | None, signed: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{100 * value:{'+' if signed else ''}.{1 if abs(value) >= 0.01 else 2}f} %"


def interval(pair: tuple[float, float] | None, say: Callable[..., str], *options: Any) -> str:
    """Format (low, high) as "low to high", ends by `say(end, *options)`; "undetermined" if high / low exceeds WIDE."""
    if pair is None or math.isnan(pair[0]) or math.isnan(pair[1]):
        return "no interval"
    if pair[1] > WIDE * abs(pair[0]):
        return UNDETERMINED
    low = say(pair[0], *options) if math.isfinite(pair[0]) else "−∞"
    high = say(pair[1], *options) if math.isfinite(pair[1]) else "∞"
    return f"{low} to {high}"


def text(value: object) -> str:
    return escape(str(value), quote=True)


def plain_json(value: Any) -> Any:
    """Convert to JSON types, with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
