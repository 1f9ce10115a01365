"""The three approaches in one shape, so that they can be laid side by side: an allocation at any budget, with draws.

Special here:
- The intervals are not made comparable by force. Each approach brings the uncertainty that its own method can see; when
  two of them disagree beyond their intervals, that is said (`verdict`), with what the runs themselves say about why
  (suspects.py), and not averaged away.
- Agreement between intervals that span a factor of 30 is worth little, so the verdict says how wide they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from ..allocation.allocation import Optimum, compute_optimal
from ..checks.suspects import find_suspects
from ..errors import Array
from ..formatting import WIDE, amount, count, scientific
from ..laws.chinchilla import ChinchillaLaw
from ..laws.powerlaw import PowerLaw
from ..table import RunTable
from ..uncertainty import percentile_interval
from .envelope import Envelope
from .isoflop import IsoflopProfiles

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

    `exponent` is a of N* ~ C^a with its interval. `flops_per_token` is a function of N where the law allocates under
    other FLOPs than 6N a token; `profiles` and `envelope` are what approaches 2 and 1 were read off.
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
    flops_per_token: Callable[[Array], Array] | None = None
    profiles: IsoflopProfiles | None = None
    envelope: Envelope | None = None

    @property
    def available(self) -> bool:
        return not self.reason

    def values(self, flops: Array) -> dict[str, Array]:
        """N, D, ratio and loss at budgets (m,), NaN where the approach does not say."""
        if self.law is not None:
            best = _optimum(self.law, flops, self.flops_per_token)
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
            draws = dict(_optimum(self.law, flops, self.flops_per_token).draws)
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


def parametric(
    law: ChinchillaLaw | None,
    reason: str,
    flops_per_token: Callable[[Array], Array] | None = None,
    span: tuple[float, float] | None = None,
) -> Approach:
    """Approach 3, allocating under C = 6ND, or under C = flops_per_token(N) D. There N*(C) is no power law, and the
    exponent is its mean slope over `span`, two budgets.
    """
    title = "Approach 3 · parametric"
    if law is None:
        return Approach("parametric", title, reason=reason)
    if flops_per_token is None:
        interval = None if law.draws_ is None else law.interval("a")
        return Approach("parametric", title, exponent=_number(law.exponents_[0]), exponent_interval=interval, law=law)
    exponent, interval = (None, None) if span is None else _slope(law, span, flops_per_token)
    return Approach(
        "parametric",
        title,
        exponent=exponent,
        exponent_interval=interval,
        law=law,
        flops_per_token=flops_per_token,
    )


def isoflop(profiles: IsoflopProfiles) -> Approach:
    title = "Approach 2 · isoFLOP"
    if profiles.N_law_ is None:
        accepted, budgets = len(profiles.accepted_), len(profiles.profiles_)
        reason = f"{accepted} of {budgets} budgets have a minimum that can be trusted, and a law in C needs 2"
        return Approach("isoflop", title, reason=reason, profiles=profiles)
    laws = (profiles.N_law_, profiles.D_law_, profiles.loss_law_)
    return replace(_from_laws("isoflop", title, *laws), profiles=profiles)


def envelope(envelope: Envelope) -> Approach:
    title = "Approach 1 · envelope"
    if envelope.N_law_ is None:
        levels = len(envelope.flops_)
        many = "level of compute improves" if levels == 1 else "levels of compute improve"
        reason = f"{levels} {many} on cheaper ones, and a law in C needs 2"
        return Approach("envelope", title, reason=reason, envelope=envelope)
    laws = (envelope.N_law_, envelope.D_law_, envelope.loss_law_)
    return replace(_from_laws("envelope", title, *laws), envelope=envelope)


@dataclass(frozen=True)
class Clash:
    """Two approaches whose N* intervals do not overlap at a budget: the sizes that they ask for."""

    flops: float
    keys: tuple[str, str]
    N: tuple[float, float]

    def __str__(self) -> str:
        (one, two), (low, high) = self.keys, self.N
        return f"{one} asks for {count(low)} parameters and {two} for {count(high)} at {scientific(self.flops)} FLOPs"


@dataclass(frozen=True)
class Verdict:
    """Whether the approaches agree (None: cannot be judged), in one sentence; where they do not, what may be why, each
    suspect a sentence with its evidence from these runs.
    """

    agree: bool | None
    sentence: str
    suspects: tuple[str, ...] = ()


def clashes(approaches: Mapping[str, Approach], budgets: Sequence[float]) -> list[Clash]:
    """Every pair of approaches whose 95 % intervals of N* do not overlap, at each budget."""
    found = []
    for C in sorted(set(budgets)):
        estimates = {key: approach.at(C) for key, approach in approaches.items() if approach.available}
        for (one, left), (two, right) in combinations(estimates.items(), 2):
            i, j = left.intervals["N"], right.intervals["N"]
            if i and j and left.N and right.N and (i[1] < j[0] or j[1] < i[0]):
                found.append(Clash(C, (one, two), (left.N, right.N)))
    return found


def verdict(approaches: Mapping[str, Approach], targets: Sequence[float], table: RunTable) -> Verdict:
    """Judged at the largest budget run and at every target, by the intervals of N*."""
    able = {key: approach for key, approach in approaches.items() if approach.available}
    if len(able) < 2:
        return Verdict(None, "Fewer than two approaches have an answer, so nothing confirms it.")
    largest = float(table.flops.max())
    found = clashes(able, (largest, *targets))
    if found:
        said = "; ".join(map(str, found))
        suspects = find_suspects(able, {clash.flops for clash in found}, table)
        return Verdict(False, f"The approaches disagree beyond their intervals: {said}.", suspects)
    spans = [approach.at(targets[0]).intervals["N"] for approach in able.values()]
    if any(span is None for span in spans):
        return Verdict(None, "Not every approach has an interval, so agreement cannot be judged.")
    with np.errstate(divide="ignore"):
        widest = max(float(np.divide(span[1], span[0])) for span in spans if span)
    wide = f"a factor of {amount(widest, 2)}" if widest < WIDE else "over five decades"
    return Verdict(True, f"The approaches agree within their intervals, which span up to {wide} in N.")


def _slope(
    law: ChinchillaLaw, span: tuple[float, float], flops_per_token: Callable[[Array], Array]
) -> tuple[float | None, tuple[float, float] | None]:
    """Mean slope of log N* against log C between two budgets, and its interval."""
    if span[1] <= span[0]:
        return None, None
    ends, width = _optimum(law, np.array(span), flops_per_token), np.log(span[1] / span[0])
    with np.errstate(all="ignore"):
        draws = {name: np.log(N[1] / N[0]) / width for name, N in ends.draws.items() if name == "N"}
        exponent = _number(np.log(ends.N[1] / ends.N[0]) / width)
    return exponent, percentile_interval(draws["N"]) if draws else None


def _optimum(law: ChinchillaLaw, flops: Array, flops_per_token: Callable[[Array], Array] | None) -> Optimum:
    return law.optimal(flops) if flops_per_token is None else compute_optimal(law, flops, flops_per_token)


def _from_laws(key: str, title: str, N: PowerLaw, D: PowerLaw | None, loss: PowerLaw | None) -> Approach:
    interval = None if N.draws_ is None else N.interval("p")
    return Approach(key, title, exponent=N.p_, exponent_interval=interval, N_law=N, D_law=D, loss_law=loss)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
