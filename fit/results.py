"""The result of an analysis, and the JSON of `isoflop fit --json`, in which a saved law also answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from .approaches.approaches import Approach, Law, law_intervals, mixture_approach, parametric
from .approaches.conventions import ConventionRow
from .approaches.envelope import Envelope
from .approaches.experts import ExpertStudy
from .approaches.isoflop import IsoflopProfiles
from .approaches.recipes import RecipeLaw, sentences
from .checks.doctor import Warning, extrapolation
from .checks.verdict import Verdict
from .downstream.decisions import Decisions
from .downstream.downstream import TaskVerdict
from .errors import Array, Columns, InputError, one_of, positive
from .files import read_document
from .flops import CONVENTIONS, FlopsPerToken, convention_name, flops_per_token
from .forecasting.mixture import FormMixture, SavedMixture
from .formatting import INTERVALS, plain_json
from .laws.persistence import read_law
from .table import RunTable

if TYPE_CHECKING:
    from .precision.precisionlaw import PrecisionLaw

PREFERRED = ("parametric", "isoflop", "envelope")  # order of the approaches where none backtests best
FAR = ("extrapolation", "backtest_short")  # codes of warnings that depend on the targets
BUDGETS = 50  # points of a line of optima by budget, which is nearly straight
DEFAULT_TARGETS = (10.0, 100.0, 1000.0)  # times the largest run


class SavedReport(TypedDict, total=False):
    """Entries of a report's law.json other than the law."""

    warnings: list[dict[str, str]]
    mixture: SavedMixture | None
    backtest: dict[str, Any]


@dataclass
class Analysis:
    """The result of `analyze`.

    `approaches` maps envelope, isoflop and parametric to an `Approach`. `law` is None if its fit failed. `mixture`, if
    available, answers first.
    """

    table: RunTable
    targets: tuple[float, ...]
    law: Law | None
    profiles: IsoflopProfiles
    envelope: Envelope
    approaches: dict[str, Approach]
    mixture: Approach | None
    backtest: dict[str, Any]
    verdict: Verdict
    conventions: list[ConventionRow]
    tasks: list[TaskVerdict]
    resamples: int
    seed: int
    recipes: list[RecipeLaw] = field(default_factory=list)
    decisions: Decisions | None = None
    experts: ExpertStudy | None = None
    precision: PrecisionLaw | None = None
    speedup: Mapping[str, float] | None = None  # of number formats
    warnings: tuple[Warning, ...] = ()

    @property
    def convention(self) -> str:
        """Return "6nd" if the table's FLOPs are 6ND, else "table"."""
        t = self.table
        return convention_name(flops_per_token(t.N, t.D, t.flops))

    @cached_property
    def by_budget(self) -> tuple[Array, list[tuple[Approach, Columns, dict[str, Array | None]]]]:
        """Return budgets (m,) from half of the smallest run to twice the farthest target, with all targets.

        Also each approach of `ranked` with its optimal values (m,) and intervals (m, 2) or None there, by quantity.
        """
        runs, targets = self.table.flops, np.array(self.targets)
        farthest = max(10 * runs.max(), *self.targets)
        C = np.unique(np.concatenate([np.geomspace(runs.min() / 2, 2 * farthest, BUDGETS), targets, [runs.min()]]))
        return C, [(approach, *approach.answers(C)) for approach in self.ranked]

    @property
    def interior_minima(self) -> int:
        """Return the number of budgets whose isoFLOP minimum is accepted."""
        return len(self.profiles.accepted_)

    @property
    def lead(self) -> Approach:
        """Return the approach to answer with: the mixture if available, else the parametric law."""
        return self.mixture if self.mixture and self.mixture.available else self.approaches["parametric"]

    @property
    def ranked(self) -> list[Approach]:
        """Return the approaches with an answer: the mixture, then the one with the best backtest, then the others."""
        best = (self.backtest.get("tested") or {}).get("best")
        order = sorted(PREFERRED, key=lambda key: key != best)
        approaches = [self.lead, *(self.approaches[key] for key in order)]
        return [approach for i, approach in enumerate(approaches) if approach.available and (i or approach.mixture)]

    def to_dict(self) -> dict[str, Any]:
        """Return the analysis as JSON types, with null for numbers that are not finite."""
        approaches = {
            key: approach.to_dict()
            | {"optimal": [vars(approach.at(C)) for C in self.targets] if approach.available else []}
            for key, approach in self.approaches.items()
        }
        return plain_json(
            _law_to_dict(self.law)
            | {
                "convention": self.convention,
                "optimal": [vars(self.lead.at(C)) for C in self.targets] if self.lead.available else [],
                **self.lead.intervals,
                "backtest": self.backtest,
                "warnings": list(map(vars, self.warnings)),
                "approaches": approaches,
                "verdict": self.verdict.sentence,
                "suspects": self.verdict.suspects,
                "conventions": [row.to_dict() for row in self.conventions],
                "tasks": [task.to_dict() for task in self.tasks],
                "recipes": [one.to_dict() for one in self.recipes],
                "recipes_compared": sentences(self.recipes),
                "decisions": self.decisions and self.decisions.to_dict(),
                "experts": self.experts and self.experts.to_dict(),
                "precision": self.precision and self.precision.to_dict(self.targets, self.speedup),
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
                "bootstrap": {"resamples": self.resamples, "seed": self.seed},
                "notes": self.table.notes,
            }
        )

    def __repr__(self) -> str:
        budgets = len(self.profiles.profiles_)
        lines = [f"{len(self.table)} runs, {self.interior_minima} of {budgets} budgets with an interior minimum"]
        lines.append(f"law: {self.law!r}" if self.law else "law: none")
        for C in self.targets:
            for approach in self.ranked:
                e = approach.at(C)
                estimate = f"N = {e.N:.3g}, D = {e.D:.3g}" if e.N and e.D else "no answer"
                lines.append(f"  at {C:.3g} FLOPs, {approach.title}: {estimate}")
        lines += [f"  warning ({w.code}): {w.message}" for w in self.warnings]
        return "\n".join(lines)


def _law_to_dict(law: Law | None) -> dict[str, Any]:
    return {
        "law": law and {"form": law.form} | law.constants_,
        "ci": law_intervals(law),
        "starts": law.starts_ if law else {"tried": 0, "agreeing": 0},
        "objective": law and law.objective_,
        "converged": law and law.converged_,
    }


def answer(
    source: str | Path,
    targets: Sequence[float] | None = None,
    convention: str = "table",
    intervals: str = "mixture",
) -> dict[str, Any]:
    """Return a saved law's optimal N, D and loss at `targets`, as a dictionary for JSON.

    Parameters
    ----------
    source
        A report's law.json, or a file of the law's `to_json`.
    targets
        FLOP budgets, by default 10, 100 and 1000 times the largest run.
    convention
        "table" counts FLOPs as the fitted table does, "6nd" as 6ND.
    intervals
        "mixture" to answer by the saved mixture of law forms, if any; "noise" for the law alone.
    """
    law = read_law(source)
    if tuple(law.inputs) != ("N", "D"):
        raise InputError(f"{source} holds a law of {', '.join(law.inputs)}; a law of N and D is expected.")
    one_of("convention", convention, CONVENTIONS)
    one_of("intervals", intervals, INTERVALS)
    if not law.converged_:
        raise InputError(f"{source} holds a law whose fit did not converge; fit its table again.")
    spend = None if convention == "6nd" else law.flops_per_token_
    largest = float(((spend or FlopsPerToken())(law.data_["N"]) * law.data_["D"]).max())
    goals = positive("target", targets or [largest * factor for factor in DEFAULT_TARGETS])
    approach = parametric(law, "", spend)
    content: SavedReport = read_document(Path(source), SavedReport) if Path(source).is_file() else {}
    saved, lead = content.get("mixture"), approach
    if intervals == "mixture" and saved:
        lead = mixture_approach(FormMixture.from_saved(saved, source), spend)
    by_law, estimates = ([vars(a.at(float(C))) for C in goals] if a.available else [] for a in (approach, lead))
    warnings: list[Any] = [w for w in content.get("warnings", ()) if w.get("code") not in FAR]
    reach = (content.get("backtest", {}).get("tested") or {}).get("reach")
    law_warnings = []  # warnings for a law that was saved without a report
    if not approach.available:
        law_warnings.append(Warning("no_parametric", f"{approach.title} has no answer: {approach.reason}."))
    if law.degenerate_:
        held = ", ".join(law.degenerate_)
        law_warnings.append(
            Warning("at_bound", f"The fit does not determine {held}, which stopped at the end of the allowed range.")
        )
    new_warnings = [*([] if "warnings" in content else law_warnings), *extrapolation(largest, goals, reach)]
    return plain_json(
        _law_to_dict(law)
        | {
            "convention": convention_name(spend),
            "optimal": estimates,
            **lead.intervals,
            "approaches": {"parametric": {"optimal": by_law}},
            "backtest": {},
            "warnings": warnings + list(map(vars, new_warnings)),
            "runs": len(law.weight_),
        }
    )
