"""One table in, everything that can be said about it out: three approaches, intervals, a backtest, and the warnings.

Special here: an approach that cannot be fitted does not stop the others. It becomes `None` with a warning, so that a
report can always be written; only a table that no approach can read (bad numbers) is an InputError.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import approaches as side
from .approaches import Approach, Estimate
from .backtest import backtest
from .checks import Warning, disagreements, run_checks
from .chinchilla import NAMES, ChinchillaLaw
from .envelope import Envelope
from .errors import InputError, positive
from .isoflop import IsoflopProfiles
from .table import RunTable


@dataclass
class Analysis:
    """What `analyze` found. `approaches` maps envelope, isoflop and parametric to an `Approach`; `law` is None where it
    has no fit.
    """

    table: RunTable
    targets: tuple[float, ...]
    law: ChinchillaLaw | None
    profiles: IsoflopProfiles
    envelope: Envelope
    approaches: dict[str, Approach]
    backtest: dict[str, Any]
    resamples: int
    seed: int
    warnings: tuple[Warning, ...] = ()

    @property
    def interior_minima(self) -> int:
        """Budgets whose isoFLOP vertex is accepted: a minimum inside of the sizes tried."""
        return len(self.profiles.accepted_)

    @property
    def verdict(self) -> str:
        """Whether the approaches that answer agree, in one sentence."""
        able = [a for a in self.approaches.values() if a.available]
        if len(able) < 2:
            return "Fewer than two approaches have an answer, so nothing confirms it."
        if disagreements(self):
            return "The approaches disagree beyond their intervals."
        if self.resamples == 0 or any(a.at(self.targets[0]).intervals["N"] is None for a in able):
            return "Not every approach has an interval, so agreement cannot be judged."
        return "The approaches agree within their intervals."

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `isoflop fit --json`: finite numbers, null where there is none (an unbounded end of an interval,
        too).
        """
        law = self.law
        return _plain(
            {
                "law": None if law is None else {"form": law.form} | {name: getattr(law, name + "_") for name in NAMES},
                "ci": {} if law is None or law.draws_ is None else {name: law.interval(name) for name in NAMES},
                "starts": {"tried": 0, "agreeing": 0} if law is None else law.starts_,
                "objective": None if law is None else law.objective_,
                "optimal": [] if law is None else self._estimates(self.approaches["parametric"]),
                "backtest": self.backtest,
                "warnings": [{"code": w.code, "message": w.message} for w in self.warnings],
                "approaches": {
                    key: {
                        "reason": approach.reason,
                        "exponent": approach.exponent,
                        "exponent_ci": approach.exponent_interval,
                        "optimal": self._estimates(approach) if approach.available else [],
                    }
                    for key, approach in self.approaches.items()
                },
                "verdict": self.verdict,
                "interior_minima": self.interior_minima,
                "profiles": [
                    {
                        "flops": p.flops,
                        "sizes": len(np.unique(p.N)),
                        "N": p.N_best,
                        "D": p.D_best,
                        "loss": p.loss_best,
                        "N_ci": p.interval(),
                        "accepted": p.accepted,
                        "reason": p.reason,
                    }
                    for p in self.profiles.profiles_
                ],
                "runs": len(self.table),
                "converged": None if law is None else law.converged_,
                "bootstrap": {"resamples": self.resamples, "seed": self.seed},
                "notes": list(self.table.notes),
            }
        )

    def _estimates(self, approach: Approach) -> list[dict[str, Any]]:
        return [_estimate(approach.at(C)) for C in self.targets]

    def __repr__(self) -> str:
        budgets = len(self.profiles.profiles_)
        lines = [f"{len(self.table)} runs, {self.interior_minima} of {budgets} budgets with an interior minimum"]
        lines.append(f"law: {self.law!r}" if self.law else "law: none")
        for C in self.targets:
            for approach in self.approaches.values():
                e = approach.at(C) if approach.available else None
                said = f"N = {e.N:.3g}, D = {e.D:.3g}" if e and e.N and e.D else "no answer"
                lines.append(f"  at {C:.3g} FLOPs, {approach.title}: {said}")
        lines += [f"  warning ({w.code}): {w.message}" for w in self.warnings]
        return "\n".join(lines)


def analyze(
    table: RunTable, targets: Sequence[float] = (1e24,), bootstrap: int = 1000, seed: int = 0, delta: float = 1e-3
) -> Analysis:
    """Fit all three approaches to a table of finished runs.

    targets: FLOP budgets to answer for. bootstrap: resamples over runs, 0 for no intervals. delta: of the log-Huber
    objective. Raises InputError when a target is not a positive number or the bootstrap is negative.
    """
    goals = tuple(float(C) for C in positive("target", np.atleast_1d(np.asarray(targets, dtype=np.float64))))
    if bootstrap < 0:
        raise InputError(
            f"bootstrap is {bootstrap}; zero (no intervals) or a positive number of resamples is expected."
        )
    law, reason = _parametric(table, bootstrap, seed, delta)
    profiles = IsoflopProfiles().fit(table.N, table.D, table.loss, table.flops, table.budget, table.weight)
    envelope = Envelope().fit(table.N, table.D, table.loss, table.flops, table.budget)
    if bootstrap:
        profiles.bootstrap(bootstrap, seed)
        envelope.bootstrap(bootstrap, table.run_id, seed)
    found = Analysis(
        table=table,
        targets=goals,
        law=law,
        profiles=profiles,
        envelope=envelope,
        approaches={
            "envelope": side.envelope(envelope),
            "isoflop": side.isoflop(profiles),
            "parametric": side.parametric(law, reason),
        },
        backtest=backtest(table, profiles, law, goals[0]),
        resamples=bootstrap,
        seed=seed,
    )
    found.warnings = run_checks(found)
    return found


def _parametric(table: RunTable, bootstrap: int, seed: int, delta: float) -> tuple[ChinchillaLaw | None, str]:
    try:
        law = ChinchillaLaw(delta).fit(table.N, table.D, table.loss, table.weight)
    except InputError as error:
        return None, str(error)
    if bootstrap:
        # With too few runs to resample, a law without intervals is still worth its warning.
        with contextlib.suppress(InputError):
            law.bootstrap(bootstrap, table.run_id, seed)
    return law, ""


def _estimate(e: Estimate) -> dict[str, Any]:
    return {
        "flops": e.flops,
        "N": e.N,
        "D": e.D,
        "loss": e.loss,
        "tokens_per_parameter": e.ratio,
        "N_ci": e.intervals["N"],
        "D_ci": e.intervals["D"],
        "loss_ci": e.intervals["loss"],
        "tokens_per_parameter_ci": e.intervals["ratio"],
    }


def _plain(value: Any) -> Any:
    """JSON's own types: no NumPy scalars, no tuples, null for what is not a finite number."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
