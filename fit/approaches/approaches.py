"""The three approaches and the mixture of forms in one shape for comparison: N and D of any budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..allocation.allocation import compute_optimal
from ..errors import Array, Columns, InputError
from ..flops import convention_name, flops_per_token
from ..forecasting.forecaster import DRAWS
from ..forecasting.mixture import FormMixture
from ..laws.law import LossLaw
from ..laws.powerlaw import PowerLaw
from ..laws.registry import law_class
from ..table import RunTable
from ..uncertainty import percentile_interval, percentile_intervals, resampled_together
from .envelope import Envelope
from .isoflop import IsoflopProfiles

Law = LossLaw  # any law of N and D
Interval = tuple[float, float]
QUANTITIES = ("N", "D", "ratio", "loss")
MIXTURE_TITLE = "Mixture of forms"
MOST_FREE = 6  # largest number of parameters of a form


def fit_parametric(
    table: RunTable, N: Array, law: Law | None = None, bootstrap: int = 0, seed: int = 0
) -> tuple[Law | None, str]:
    """Fit a copy of `law` (default: Chinchilla's) to runs of sizes N (n,). Returns (law, "") or (None, reason)."""
    fitted = (law or law_class()()).clone()
    try:
        fitted.fit(N, table.D, table.loss, weight=table.weight, loss_se=table.known_se, flops=table.flops)
    except InputError as error:
        return None, str(error)
    if not fitted.converged_:
        return None, f"the fit did not converge from any of {fitted.starts_['tried']} starts."
    if bootstrap:
        with contextlib.suppress(InputError):  # too few runs to resample; the law is useful without intervals
            fitted.bootstrap(bootstrap, resampled_together(table.group, table.run_id, fitted.problem_.free), seed)
    return fitted, ""


def law_intervals(law: Law | None) -> dict[str, Interval]:
    return {} if law is None or law.draws_ is None else {name: law.interval(name) for name in law.names}


@dataclass(frozen=True)
class Estimate:
    """One approach at one budget, as in `isoflop fit --json`; None is unknown."""

    flops: float
    N: float | None
    D: float | None
    loss: float | None
    tokens_per_parameter: float | None
    N_ci: Interval | None
    D_ci: Interval | None
    loss_ci: Interval | None
    tokens_per_parameter_ci: Interval | None
    convention: str  # how `flops` are counted


@dataclass(frozen=True)
class Approach:
    """One approach; `reason` is why it has no answer, empty if it has one. `exponent` is a of N* ~ C^a."""

    key: str
    title: str
    reason: str = ""
    exponent: float | None = None
    exponent_interval: Interval | None = None
    law: Law | None = None
    flops_per_token: Callable[[Array], Array] | None = None
    profiles: IsoflopProfiles | None = None
    envelope: Envelope | None = None
    mixture: FormMixture | None = None

    @property
    def available(self) -> bool:
        return not self.reason

    @property
    def intervals(self) -> dict[str, Any]:
        """Return the weights of the mixture's forms and the kind of intervals ("mixture" or "noise"), for JSON."""
        forms = self.mixture.weights_ if self.mixture else {}
        return {"forms": forms, "intervals": "mixture" if forms else "noise"}

    def answers(self, flops: Array) -> tuple[Columns, dict[str, Array | None]]:
        """Return N, D, D/N and loss of the optimum at budgets (m,), and their intervals (m, 2), both by name.

        Unknown values are NaN; intervals are None without bootstrap draws.
        """
        source = self.profiles or self.envelope
        values: Columns = {}
        draws: Columns = {}
        if self.law is not None or self.mixture is not None:
            optimal = partial(compute_optimal, self.law) if self.mixture is None else self.mixture.optimal
            best = optimal(flops, flops_per_token=self.flops_per_token or 6.0)
            values, draws = best.values, dict(best.draws)
        elif source is not None and source.N_law_ is not None:
            laws = {"N": source.N_law_, "D": source.D_law_, "loss": source.loss_law_}
            usable = {name: law for name, law in laws.items() if law is not None and law.converged_}
            values = {name: law.predict(flops) for name, law in usable.items()}
            draws = {name: law.predict_draws(flops) for name, law in usable.items() if law.draws_ is not None}
            for columns in (values, draws):
                if columns:
                    columns["ratio"] = columns["D"] / columns["N"]
        unknown = np.full(len(flops), np.nan)
        bands = {name: percentile_intervals(draws[name], 0.95) if name in draws else None for name in QUANTITIES}
        return {name: values.get(name, unknown) for name in QUANTITIES}, bands

    def at(self, flops: float) -> Estimate:
        values, bands = self.answers(np.array([flops]))
        fields: dict[str, Any] = {}
        for name, band in bands.items():
            title = "tokens_per_parameter" if name == "ratio" else name
            fields[title] = finite_or_none(values[name][0])
            fields[f"{title}_ci"] = None if band is None or np.isnan(band[0]).all() else tuple(band[0].tolist())
        return Estimate(float(flops), **fields, convention=convention_name(self.flops_per_token))

    def to_dict(self) -> dict[str, Any]:
        return {"reason": self.reason, "exponent": self.exponent, "exponent_ci": self.exponent_interval}


def mix_forms(table: RunTable, flops_per_token: Callable[[Array], Array] | None, bootstrap: int, seed: int) -> Approach:
    mixture = FormMixture(draws=min(bootstrap, DRAWS), seed=seed)
    groups = resampled_together(table.group, table.run_id, MOST_FREE)
    try:
        mixture.fit(table.N, table.D, table.loss, weight=table.weight, flops=table.flops, groups=groups)
    except InputError as error:
        return Approach("mixture", MIXTURE_TITLE, str(error))
    # 0.5: more than half of the weight says that no best size exists.
    if (lost_weight := mixture.without_optimum(flops_per_token or 6.0)) > 0.5:
        reason = f"forms with {lost_weight:.0%} of the weight have no best size at the budgets of the runs"
        return Approach("mixture", MIXTURE_TITLE, reason)
    return mixture_approach(mixture, flops_per_token)


def mixture_approach(mixture: FormMixture, flops_per_token: Callable[[Array], Array] | None) -> Approach:
    a, low, high = mixture.size_exponent(flops_per_token=flops_per_token or 6.0)
    interval = (low, high) if mixture.draws else None
    return Approach("mixture", MIXTURE_TITLE, "", a, interval, flops_per_token=flops_per_token, mixture=mixture)


def three_approaches(
    profiles: IsoflopProfiles,
    front: Envelope,
    fitted: tuple[Law | None, str],
    table: RunTable,
    counts: tuple[Array, Array],
    bootstrap: int,
    seed: int,
) -> dict[str, Approach]:
    """Bootstrap the profiles and the envelope, and return the three approaches by name.

    `fitted` is from `fit_parametric`; `counts` are the runs' N and FLOPs, (n,) each.
    """
    if bootstrap:
        profiles.bootstrap(bootstrap, seed)
        front.bootstrap(bootstrap, table.group, seed)
    N, C = counts
    spend = flops_per_token(N, table.D, C)
    return {
        "envelope": replace(envelope(front), flops_per_token=spend),
        "isoflop": replace(isoflop(profiles), flops_per_token=spend),
        "parametric": parametric(*fitted, spend, (float(C.min()), float(C.max()))),
    }


def parametric(
    law: Law | None,
    reason: str,
    flops_per_token: Callable[[Array], Array] | None = None,
    span: tuple[float, float] | None = None,
) -> Approach:
    """Wrap a law, or the `reason` why there is none, as an `Approach`.

    If the best N is no power of the budget C, its exponent is the mean between the two budgets of `span`.
    """
    title = "Approach 3 · parametric"
    if law is None:
        return Approach("parametric", title, reason=reason)
    if unresolved := law.unresolved_:
        reason = f"the fitted loss does not change with {' or '.join(unresolved)}, so the law has no best size"
        return Approach("parametric", title, reason, law=law)
    exponent, interval = None, None
    N, D, _ = law.data_.values()
    ends = compute_optimal(law, span or float((6.0 * N * D).max()), flops_per_token or 6.0)
    if not (np.isfinite(ends.ratio) & (ends.ratio > 0)).all():
        bounds = f" ({', '.join(law.degenerate_)} at a bound)" if law.degenerate_ else ""
        return Approach("parametric", title, f"the law has no best size at the budgets of the runs{bounds}", law=law)
    if flops_per_token is None and law.power_optimum:
        exponent = finite_or_none(law.exponents_[0])
        interval = None if law.draws_ is None else law.interval("a")
    elif span is not None and span[1] > span[0]:
        # A law whose optimum is no power of C has another exponent at every budget: take the chord's.
        width = np.log(span[1] / span[0])
        with np.errstate(all="ignore"):
            exponent = finite_or_none(np.log(ends.N[1] / ends.N[0]) / width)
            if ends.draws:
                interval = percentile_interval(np.log(ends.draws["N"][1] / ends.draws["N"][0]) / width)
    return Approach("parametric", title, "", exponent, interval, law, flops_per_token)


def isoflop(profiles: IsoflopProfiles) -> Approach:
    accepted, budgets = len(profiles.accepted_), len(profiles.profiles_)
    reason = f"{accepted} of {budgets} budgets have an accepted minimum, and a law in C needs 2"
    return _of_power_law("isoflop", "Approach 2 · isoFLOP", profiles.N_law_, reason, profiles=profiles)


def envelope(envelope: Envelope) -> Approach:
    levels = len(envelope.flops_)
    subject = "level of compute improves" if levels == 1 else "levels of compute improve"
    reason = f"{levels} {subject} on all cheaper levels, and a law in C needs 2"
    return _of_power_law("envelope", "Approach 1 · envelope", envelope.N_law_, reason, envelope=envelope)


def _of_power_law(key: str, title: str, sizes: PowerLaw | None, reason: str, **source: Any) -> Approach:
    if sizes is None:
        return Approach(key, title, reason, **source)
    return Approach(key, title, "", sizes.p_, None if sizes.draws_ is None else sizes.interval("p"), **source)


def size_or_none(value: Any) -> float | None:
    return finite_or_none(value) if value > 0 else None


def finite_or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
