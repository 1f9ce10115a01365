"""The three approaches in one shape, so that they can be laid side by side: an allocation at any budget, with draws.

Special here: the intervals are not made comparable by force. Each approach brings the uncertainty that its own method
can see; when two of them disagree beyond their intervals, that is said (`checks.py`) and not averaged away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chinchilla import ChinchillaLaw
from .envelope import Envelope
from .errors import Array
from .isoflop import IsoflopProfiles
from .powerlaw import PowerLaw
from .uncertainty import percentile_interval

QUANTITIES = ("N", "D", "ratio", "loss")


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
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Approach:
    """One approach: `reason` says why it has no answer, and is empty when it has one.

    `exponent` is a of N* ~ C^a with its interval.
    """

    key: str
    title: str
    reason: str = ""
    exponent: float | None = None
    exponent_interval: tuple[float, float] | None = None
    law: ChinchillaLaw | None = None
    N_law: PowerLaw | None = None
    D_law: PowerLaw | None = None
    loss_law: PowerLaw | None = None

    @property
    def available(self) -> bool:
        return not self.reason

    def values(self, flops: Array) -> dict[str, Array]:
        """N, D, ratio and loss at budgets (m,), NaN where the approach does not say."""
        if self.law is not None:
            best = self.law.optimal(flops)
            return {"N": best.N, "D": best.D, "ratio": best.ratio, "loss": best.loss}
        nothing = np.full(len(flops), np.nan)
        if self.N_law is None or self.D_law is None:
            return dict.fromkeys(QUANTITIES, nothing)
        N, D = self.N_law.predict(flops), self.D_law.predict(flops)
        return {"N": N, "D": D, "ratio": D / N, "loss": self.loss_law.predict(flops) if self.loss_law else nothing}

    def bands(self, flops: Array, level: float = 0.95) -> dict[str, Array | None]:
        """Intervals of the same, each (m, 2), or None without draws."""
        draws: dict[str, Array | None] = dict.fromkeys(QUANTITIES)
        if self.law is not None and self.law.draws_ is not None:
            draws = dict(self.law.optimal_draws(flops))
        elif self.N_law is not None and self.D_law is not None and self.N_law.draws_ is not None:
            N, D = self.N_law.predict_draws(flops), self.D_law.predict_draws(flops)
            draws = {"N": N, "D": D, "ratio": D / N, "loss": None}
            if self.loss_law is not None and self.loss_law.draws_ is not None:
                draws["loss"] = self.loss_law.predict_draws(flops)
        return {
            key: None if rows is None else np.array([percentile_interval(row, level) for row in rows])
            for key, rows in draws.items()
        }

    def at(self, flops: float) -> Estimate:
        """The estimate at one budget."""
        C = np.array([flops])
        values, bands = self.values(C), self.bands(C)
        numbers = {key: _number(values[key][0]) for key in QUANTITIES}
        intervals: dict[str, tuple[float, float] | None] = {}
        for key in QUANTITIES:
            band = bands[key]
            known = band is not None and not np.isnan(band[0]).all()
            intervals[key] = (float(band[0, 0]), float(band[0, 1])) if known and band is not None else None
        return Estimate(flops=float(flops), intervals=intervals, **numbers)


def parametric(law: ChinchillaLaw | None, reason: str) -> Approach:
    title = "Approach 3 · parametric"
    if law is None:
        return Approach("parametric", title, reason=reason)
    interval = None if law.draws_ is None else law.interval("a")
    return Approach("parametric", title, exponent=_number(law.exponents_[0]), exponent_interval=interval, law=law)


def isoflop(profiles: IsoflopProfiles) -> Approach:
    title = "Approach 2 · isoFLOP"
    if profiles.N_law_ is None:
        accepted, budgets = len(profiles.accepted_), len(profiles.profiles_)
        reason = f"{accepted} of {budgets} budgets have a minimum that can be trusted, and a law in C needs 2"
        return Approach("isoflop", title, reason=reason)
    return _from_laws("isoflop", title, profiles.N_law_, profiles.D_law_, profiles.loss_law_)


def envelope(envelope: Envelope) -> Approach:
    title = "Approach 1 · envelope"
    if envelope.N_law_ is None:
        reason = f"{len(envelope.flops_)} level of compute improves on cheaper ones, and a law in C needs 2"
        return Approach("envelope", title, reason=reason)
    return _from_laws("envelope", title, envelope.N_law_, envelope.D_law_, envelope.loss_law_)


def _from_laws(key: str, title: str, N: PowerLaw, D: PowerLaw | None, loss: PowerLaw | None) -> Approach:
    interval = None if N.draws_ is None else N.interval("p")
    return Approach(key, title, exponent=N.p_, exponent_interval=interval, N_law=N, D_law=D, loss_law=loss)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
