"""The three approaches in one shape, so that they can be laid side by side: an allocation at any budget, with draws.

Special here: the intervals are not made comparable by force. Each approach brings the uncertainty that its own method
can see; where they disagree beyond it, `checks/verdict.py` says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..allocation.allocation import compute_optimal
from ..errors import Array, InputError
from ..laws.powerlaw import PowerLaw
from ..laws.registry import law_class
from ..table import RunTable
from ..uncertainty import percentile_interval, resampled_together
from .envelope import Envelope
from .isoflop import IsoflopProfiles

Law = Any  # any law of N and D: fit, clone, bootstrap, refit, predict, constants_, draws_
Interval = tuple[float, float]
QUANTITIES = ("N", "D", "ratio", "loss")


def default_law() -> Law:
    """The law that approach 3 fits where none is given."""
    return law_class()()


def fit_parametric(
    table: RunTable, N: Array, law: Law | None = None, bootstrap: int = 0, seed: int = 0
) -> tuple[Law | None, str]:
    """A law like `law` of the runs, with N (n,) counted as given: the fit, or None and the reason why there is none."""
    fitted = (law or default_law()).clone()
    try:
        fitted.fit(N, table.D, table.loss, weight=table.weight, loss_se=table.known_se)
    except InputError as error:
        return None, str(error)
    if bootstrap:
        with contextlib.suppress(InputError):  # too few runs to resample: a law without intervals is still worth having
            fitted.bootstrap(bootstrap, resampled_together(table.group, table.run_id, fitted.problem_.free), seed)
    return fitted, ""


@dataclass(frozen=True)
class Estimate:
    """One approach at one budget. A value is None where the approach does not say; so is each interval, and each
    unbounded end.
    """

    flops: float
    N: float | None
    D: float | None
    ratio: float | None
    loss: float | None
    intervals: dict[str, Interval | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As `isoflop fit --json` says it."""
        return {
            "flops": self.flops,
            "N": self.N,
            "D": self.D,
            "loss": self.loss,
            "tokens_per_parameter": self.ratio,
            "N_ci": self.intervals["N"],
            "D_ci": self.intervals["D"],
            "loss_ci": self.intervals["loss"],
            "tokens_per_parameter_ci": self.intervals["ratio"],
        }


@dataclass(frozen=True)
class Approach:
    """One approach: `reason` says why it has no answer, and is empty when it has one.

    `exponent` is a of N* ~ C^a with its interval. `flops_per_token` is a function of N where the law allocates under
    other FLOPs than 6N a token; `profiles` and `envelope` are what approaches 2 and 1 were read off, in power laws.
    """

    key: str
    title: str
    reason: str = ""
    exponent: float | None = None
    exponent_interval: Interval | None = None
    law: Law | None = None
    flops_per_token: Callable[[Array], Array] | None = None
    profiles: IsoflopProfiles | None = None
    envelope: Envelope | None = None

    @property
    def available(self) -> bool:
        return not self.reason

    @property
    def _power_laws(self) -> tuple[PowerLaw | None, PowerLaw | None, PowerLaw | None]:
        """N*(C), D*(C) and L*(C)."""
        source = self.profiles or self.envelope
        return (None, None, None) if source is None else (source.N_law_, source.D_law_, source.loss_law_)

    def values(self, flops: Array) -> dict[str, Array]:
        """N, D, ratio and loss at budgets (m,), NaN where the approach does not say."""
        if self.law is not None:
            best = compute_optimal(self.law, flops, self.flops_per_token or 6.0)
            return {name: best.values[name] for name in QUANTITIES}
        nothing = np.full(len(flops), np.nan)
        sizes, tokens, losses = self._power_laws
        if sizes is None or tokens is None:
            return dict.fromkeys(QUANTITIES, nothing)
        N, D = sizes.predict(flops), tokens.predict(flops)
        return {"N": N, "D": D, "ratio": D / N, "loss": losses.predict(flops) if losses else nothing}

    def bands(self, flops: Array, level: float = 0.95) -> dict[str, Array | None]:
        """Intervals of the same, each (m, 2), or None without draws."""
        draws: dict[str, Array | None] = dict.fromkeys(QUANTITIES)
        sizes, tokens, losses = self._power_laws
        if self.law is not None and self.law.draws_ is not None:
            best = compute_optimal(self.law, flops, self.flops_per_token or 6.0)
            draws |= {name: best.draws[name] for name in QUANTITIES}
        elif sizes is not None and tokens is not None and sizes.draws_ is not None:
            N, D = sizes.predict_draws(flops), tokens.predict_draws(flops)
            draws |= {"N": N, "D": D, "ratio": D / N}
            if losses is not None and losses.draws_ is not None:
                draws["loss"] = losses.predict_draws(flops)
        return {
            name: None if rows is None else np.array([percentile_interval(row, level) for row in rows])
            for name, rows in draws.items()
        }

    def at(self, flops: float) -> Estimate:
        """The estimate at one budget."""
        C = np.array([flops])
        numbers = {name: finite_or_none(value[0]) for name, value in self.values(C).items()}
        intervals: dict[str, Interval | None] = {
            name: None if band is None or np.isnan(band[0]).all() else (float(band[0, 0]), float(band[0, 1]))
            for name, band in self.bands(C).items()
        }
        return Estimate(flops=float(flops), intervals=intervals, **numbers)


def parametric(
    law: Law | None,
    reason: str,
    flops_per_token: Callable[[Array], Array] | None = None,
    span: tuple[float, float] | None = None,
) -> Approach:
    """Approach 3, allocating under C = 6ND, or under C = flops_per_token(N) D. Where N*(C) is no power law the
    exponent is its mean slope over `span`, two budgets.
    """
    title = "Approach 3 · parametric"
    if law is None:
        return Approach("parametric", title, reason=reason)
    exponent, interval = None, None
    if flops_per_token is None and law.form == "chinchilla":
        exponent = finite_or_none(law.exponents_[0])
        interval = None if law.draws_ is None else law.interval("a")
    elif span is not None and span[1] > span[0]:
        ends, width = compute_optimal(law, np.array(span), flops_per_token or 6.0), np.log(span[1] / span[0])
        with np.errstate(all="ignore"):
            exponent = finite_or_none(np.log(ends.N[1] / ends.N[0]) / width)
            if ends.draws:
                interval = percentile_interval(np.log(ends.draws["N"][1] / ends.draws["N"][0]) / width)
    return Approach("parametric", title, "", exponent, interval, law, flops_per_token)


def isoflop(profiles: IsoflopProfiles) -> Approach:
    """Approach 2."""
    accepted, budgets = len(profiles.accepted_), len(profiles.profiles_)
    reason = f"{accepted} of {budgets} budgets have a minimum that can be trusted, and a law in C needs 2"
    return _of_power_law("isoflop", "Approach 2 · isoFLOP", profiles.N_law_, reason, profiles=profiles)


def envelope(envelope: Envelope) -> Approach:
    """Approach 1."""
    levels = len(envelope.flops_)
    many = "level of compute improves" if levels == 1 else "levels of compute improve"
    reason = f"{levels} {many} on cheaper ones, and a law in C needs 2"
    return _of_power_law("envelope", "Approach 1 · envelope", envelope.N_law_, reason, envelope=envelope)


def _of_power_law(key: str, title: str, sizes: PowerLaw | None, reason: str, **source: Any) -> Approach:
    if sizes is None:
        return Approach(key, title, reason, **source)
    return Approach(key, title, "", sizes.p_, None if sizes.draws_ is None else sizes.interval("p"), **source)


def finite_or_none(value: Any) -> float | None:
    """A float, or None for what is not a finite number."""
    return float(value) if np.isfinite(value) else None
