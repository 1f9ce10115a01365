"""InputError, the only exception for bad input in this folder, and the checks of numbers that all laws share."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPREAD = 1.05  # largest over smallest N or D below which differences count as rounding; chosen by hand
FLAT = 1e-6  # relative difference up to which losses are equal; far above rounding, far below any noise
LEAST, MOST = 1e-60, 1e60  # accepted range; squares and products of two such numbers stay finite
Array = NDArray[np.float64]
Column = ArrayLike | None  # of a table; None: not given
Columns = dict[str, Array]
Constants = Mapping[str, Any]  # of a law: name -> number or array
Say = Callable[[str], str]  # formats the constant of that name


def floats(values: Any) -> Array:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{reprlib.repr(values)} was given, and numbers are expected.") from None


def unboxed(value: Any) -> Any:
    array = floats(value)
    return float(array) if array.ndim == 0 else array


class InputError(ValueError):
    """Bad input. The message is one sentence with the field, its value and what is accepted."""


def positive(name: str, values: ArrayLike, rows: Any = None) -> Array:
    """Return `values` as a float64 array (n,); `rows` names its rows in errors.

    Raises InputError if a value lies outside [LEAST, MOST].
    """
    numbers = check_numbers(name, values, rows, "a finite number above zero", lambda v: v > 0)
    return check_numbers(name, numbers, rows, f"from {LEAST:g} to {MOST:g}", lambda v: (v >= LEAST) & (v <= MOST))


def check_weights(values: ArrayLike | None, points: int, rows: Any = None) -> Array:
    if values is None:
        return np.ones(points)
    checked = check_numbers("weight", values, rows, "a finite number, zero or more", lambda v: v >= 0)
    inside = f"zero, or from {LEAST:g} to {MOST:g}"
    checked = check_numbers("weight", checked, rows, inside, lambda v: (v == 0) | (v >= LEAST) & (v <= MOST))
    if not checked.any():
        raise InputError("weight is zero in every row; at least one row must count.")
    return checked


def one_of(name: str, value: Any, accepted: Collection[str]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise InputError(f"{name} is {value!r}; choose one of {', '.join(accepted)}.")


def need(name: str, value: Any, attribute: str, what: str) -> None:
    """Raise InputError unless `value` has `attribute`; the message states that it must be `what`."""
    if not hasattr(value, attribute):
        raise InputError(f"{name} is of type {type(value).__name__}; it must be {what}.")


def check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; it must lie between 0 and 1, for example 0.95.")


def same_length(**columns: Array) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InputError(f"columns differ in length ({listing}); each must have one value per run.")


def enough(points: int, parameters: int, what: str) -> None:
    if points <= parameters:
        size = "1 point" if points == 1 else f"{points} different points"
        raise InputError(
            f"{what} has {parameters} parameters and the table has {size}; it needs at least {parameters + 1}."
        )


def is_uneven(loss: Array) -> bool:
    """Return whether losses are finite and differ by more than rounding."""
    return bool(np.isfinite(loss).all() and np.ptp(loss) > FLAT * np.abs(loss).max())


def need_uneven(name: str, values: Array, required: int = 2) -> None:
    """Raise InputError if positive `values` take fewer than `required` different values, to within FLAT."""
    levels = len(np.unique(np.floor(np.log(values / values.min()) / FLAT)))
    if levels < required:
        extent = f"is {values[0]:.6g} in every row" if levels == 1 else f"has only {levels} different values"
        raise InputError(
            f"{name} {extent} (relative differences up to {FLAT:g} do not count); this law needs at least {required}."
        )


def identifiable(N: Array, D: Array) -> None:
    """Raise InputError if N or D hardly varies, or if log N and log D lie on a line."""
    for name, values, what in (("N", N, "size"), ("D", D, "number of tokens")):
        low, high = values.min(), values.max()
        if high / low < SPREAD:
            extent = f"is {low:.4g} in every row" if high / low < 1.001 else f"is only {low:.4g} to {high:.4g}"
            raise InputError(f"{name} {extent}; a law in N and D needs more than one {what}.")
    centred = np.stack([np.log(N) - np.log(N).mean(), np.log(D) - np.log(D).mean()])
    spread = np.linalg.svd(centred / np.linalg.norm(centred, axis=1, keepdims=True), compute_uv=False)
    # A smaller spread comes from rounding to whole batches and not from design.
    if spread[1] < 0.01 * spread[0]:
        raise InputError(
            "all runs are collinear in (log N, log D), so alpha and beta cannot be told apart; "
            "add runs with other tokens per parameter."
        )


def check_numbers(name: str, values: ArrayLike, rows: Any, expected: str, accept: Any) -> Array:
    """Return `values` as a float64 array (n,) of finite numbers that `accept` accepts, or raise InputError."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "bcmM":
            raise TypeError  # NumPy would read booleans, complex numbers, durations and dates as numbers
        numbers = array.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} holds a value that is not a number; each must be {expected}.") from None
    if numbers.ndim != 1:
        raise InputError(f"{name} has shape {numbers.shape}; one flat column of numbers is expected.")
    if numbers.size == 0:
        raise InputError(f"{name} is empty; at least one run is needed.")
    with np.errstate(invalid="ignore"):
        bad = ~(np.isfinite(numbers) & accept(numbers))
    if bad.any():
        first = int(np.argmax(bad))
        where = first if rows is None else rows[first]
        raise InputError(f"{name} is {numbers[first]:g} in row {where}; it must be {expected}.")
    return numbers
