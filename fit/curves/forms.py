"""Forms of a law of curves: L = E + F N^-a + A N^-b S^-alpha - B N^-c S^-d sum over drops of the rate of drop x kernel.

S is the sum of rates; the papers have d = 0. Inside, rates are relative to the largest one, S to the largest sum and N
to a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import Array, InputError
from .features import Design

Kernel = Callable[[Design, dict[str, float], bool], tuple[Array, dict[str, Array]]]


@dataclass(frozen=True)
class Constant:
    """Bounds and starts of a constant; with `log` its logarithm is fitted."""

    low: float
    high: float
    starts: tuple[float, ...]
    log: bool = True


@dataclass(frozen=True)
class Form:
    name: str
    kernel: Kernel
    constants: dict[str, Constant]  # of the kernel
    rises: bool = False  # warm-up counts, as a negative drop


TREND = {"E": Constant(1e-8, 1e3, (0.5,)), "A": Constant(1e-8, 1e4, (0.2,)), "alpha": Constant(0.01, 5, (0.3, 0.8))}
SIZES = {
    "F": Constant(1e-8, 1e3, (0.2,)),
    "a": Constant(0.02, 3, (0.3,)),
    "b": Constant(-2, 2, (0.0,), log=False),
}
DROPS = {"B": Constant(1e-8, 1e3, (0.05,))}
FADING = {"d": Constant(-1, 2, (0.1,), log=False)}
DROP_SIZE = {"c": Constant(-2, 2, (0.0,), log=False)}
TWO_SIZES = 0.34  # a, which two sizes cannot determine: alpha of Hoffmann et al. 2022


def _power(d: Design, k: dict[str, float], slopes: bool) -> tuple[Array, dict[str, Array]]:
    """Return each drop's kernel 1 - (1 + C rate^-gamma S)^-beta, S the sum of rates since the drop (Luo et al. 2025).

    With `slopes`, also returns its derivatives by the constants.
    """
    x = k["C"] * d.since if not (gamma := k.get("gamma", 0.0)) else k["C"] * d.since * np.exp(-gamma * d.log_rate)
    log_u = np.log1p(x)
    rest = np.exp(-k["beta"] * log_u)
    if not slopes:
        return 1 - rest, {}
    by_c = k["beta"] * rest * x / (1 + x)
    derivatives = {"C": by_c / k["C"], "beta": rest * log_u}
    return 1 - rest, derivatives if "gamma" not in k else derivatives | {"gamma": -by_c * d.log_rate}


def _momentum(d: Design, k: dict[str, float], slopes: bool) -> tuple[Array, dict[str, Array]]:
    """Return each drop's kernel 1 - e^(-steps since / r) (Tissue et al. 2024); `slopes` as in `_power`."""
    rest = np.exp(-d.steps / k["r"])
    return 1 - rest, {"r": -rest * d.steps / k["r"] ** 2} if slopes else {}


KERNEL = {"C": Constant(1e-2, 1e6, (20.0, 500.0)), "beta": Constant(0.02, 20, (0.5,))}
FORMS = {
    "multi-power": Form("multi-power", _power, KERNEL | {"gamma": Constant(0, 2, (0.4,), log=False)}),
    "annealing": Form("annealing", _momentum, {"r": Constant(1, 1e7, (100.0, 3000.0))}),
    # Integration by parts turns its noise, the sum of rate^2 (1 + C S)^-(1 + beta), into a sum over drops from zero.
    "functional": Form("functional", _power, KERNEL, rises=True),
}


def form_named(name: str) -> Form:
    if name not in FORMS:
        raise InputError(f"form is {name!r}; choose one of {', '.join(FORMS)}.")
    return FORMS[name]


def declared(form: Form, sizes: int, has_drops: bool, fading: bool) -> dict[str, Constant]:
    """Return the constants of `form` that loss curves of `sizes` model sizes can determine.

    `has_drops` adds the constants of learning-rate drops and, with `fading`, d, by which a drop's gain changes in
    training.
    """
    constants = dict(TREND)
    if sizes > 1:
        constants |= SIZES
        if sizes == 2:
            constants["a"] = Constant(TWO_SIZES * 0.999, TWO_SIZES * 1.001, (TWO_SIZES,))
    if has_drops:
        constants |= DROPS | form.constants | (FADING if fading else {}) | (DROP_SIZE if sizes > 1 else {})
    return constants


def losses(form: Form, d: Design, k: dict[str, float], slopes: bool = False) -> tuple[Array, dict[str, Array]]:
    """Return losses (rows,) at constants k, and with `slopes` their derivatives by each constant (rows,)."""
    log_n, log_s = np.log(d.size), np.log(np.maximum(d.area, 1e-300))
    trend = k["A"] * np.exp(-k["alpha"] * log_s - k.get("b", 0.0) * log_n)
    by: dict[str, Array] = {}
    loss = k["E"] + trend
    if slopes:
        by = {"E": np.ones_like(loss), "A": trend / k["A"], "alpha": -trend * log_s, "b": -trend * log_n}
    if "F" in k:
        floor = k["F"] * np.exp(-k["a"] * log_n)
        loss = loss + floor
        by |= {"F": floor / k["F"], "a": -floor * log_n}
    if "B" in k and len(d.knot):
        scale = k["B"] * np.exp(-k.get("c", 0.0) * log_n - k.get("d", 0.0) * log_s)
        value, kernel_by = form.kernel(d, k, slopes)

        def summed(values: Array) -> Array:
            return d.between @ np.bincount(d.knot, d.drop * values, minlength=d.between.shape[1])

        gain = scale * summed(value)
        loss = loss - gain
        if slopes:
            by |= {"B": -gain / k["B"], "c": gain * log_n, "d": gain * log_s}
            by |= {name: -scale * summed(slope) for name, slope in kernel_by.items()}
    elif slopes and "B" in k:
        by |= dict.fromkeys(("B", "c", "d", *form.constants), np.zeros_like(loss))
    return loss, by


def paper(form: Form, k: dict[str, float], unit: float, horizon: float, reference: float) -> dict[str, float]:
    """Convert constants to the units of the papers.

    The given ones are for rates over `unit`, sums of rates over `horizon` and N over `reference`. For "annealing" r
    becomes lambda, and B the paper's C.
    """
    converted = dict(k)
    converted["A"] *= (unit * horizon) ** k["alpha"] * reference ** k.get("b", 0.0)
    if "F" in k:
        converted["F"] *= reference ** k["a"]
    if "B" in k:
        converted["B"] *= reference ** k.get("c", 0.0) * (unit * horizon) ** k.get("d", 0.0) / unit
        if "C" in k:
            converted["C"] *= unit ** (k.get("gamma", 0.0) - 1) / horizon
        if "r" in k:
            converted["lambda"] = float(np.exp(-1 / converted.pop("r")))
            converted["B"] *= 1 - converted["lambda"]
    return converted
