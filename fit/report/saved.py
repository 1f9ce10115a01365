"""A law that an earlier fit saved, asked about other budgets; nothing is fitted again.

Special here: the answer has the shape of `isoflop fit --json` and the warnings that the report had: a number that was
doubtful when it was fitted is no better for having been saved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..approaches.approaches import parametric
from ..errors import InputError, positive
from ..formatting import plain_json, scientific, times
from ..laws.persistence import read_law

FAR = 100.0  # times the largest run
DEFAULT_TARGETS = (10.0, 100.0, 1000.0)


def answer(source: str | Path, targets: Sequence[float] | None = None) -> dict[str, Any]:
    """N*, D* and loss at FLOP budgets `targets` (by default 10, 100 and 1000 times the largest run) under C = 6ND.

    `source` is a file of `to_json` or a report's law.json. Raises InputError for what is no law of this version.
    """
    law = read_law(source)
    if tuple(law.inputs) != ("N", "D"):
        raise InputError(f"{source} holds a law of {', '.join(law.inputs)}; a law of N and D is expected.")
    largest = float((6.0 * law.data_["N"] * law.data_["D"]).max())
    goals = positive("target", np.asarray(targets or [largest * factor for factor in DEFAULT_TARGETS]))
    approach = parametric(law, "")
    estimates = [approach.at(float(C)).to_dict() for C in goals]
    content = json.loads(Path(source).read_text()) if Path(source).is_file() else {}
    warnings = [w for w in content.get("warnings", ()) if w.get("code") != "extrapolation"]
    if "warnings" not in content:  # of a law alone, what it knows of itself
        if not law.converged_:
            warnings.append(
                {"code": "not_converged", "message": "The fit of this law did not converge; do not use it."}
            )
        if law.degenerate_:
            held = ", ".join(law.degenerate_)
            warnings.append({"code": "at_bound", "message": f"{held} could not be determined and stopped at a bound."})
    far = [float(C) for C in goals if FAR * largest < C]
    if far:
        said = ", ".join(f"{scientific(C)} FLOPs ({times(C / largest)})" for C in far)
        message = f"The target {said} lies beyond {FAR:g} times the largest run."
        warnings.append({"code": "extrapolation", "message": message})
    return plain_json(
        {
            "law": {"form": law.form} | law.constants_,
            "ci": {} if law.draws_ is None else {name: law.interval(name) for name in law.names},
            "starts": law.starts_,
            "objective": law.objective_,
            "optimal": estimates,
            "approaches": {"parametric": {"optimal": estimates}},
            "backtest": {},
            "warnings": warnings,
            "runs": len(law.weight_),
            "converged": law.converged_,
        }
    )
