"""What a tune came to: tuning.yaml, which the next sweep takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import yaml

from ...train.files import write_atomic
from ...train.flops import count_parameters
from ..config import PowerRule, SweepConfig
from ..grid.tune import Settings, Tried, settings_of
from ..grid.tuning import family
from ..runs.directory import SweepDirectory
from ..runs.membership import members

FILE = "tuning.yaml"
OTHERS = ("base_depth", "min_steps")  # which the tune has taken as they were


def tried_settings(sweep: SweepDirectory) -> Tried:
    """Of the runs that are done, and with the loss expected of them those stopped because they cannot win."""
    found: dict[tuple[int, int], list[Any]] = {}
    for run in members(sweep):
        summary = run.summary() if run.is_done() else None
        if (loss := run.given_up() if summary is None else summary["val_loss"]) is not None:
            config = run.config()
            cell = found.setdefault((count_parameters(config.model).N_active, config.D), [])
            cell.append((settings_of(config), loss))
    return found


def write_tuning(sweep: SweepDirectory, config: SweepConfig) -> dict[str, Any]:
    """Fits the rules and writes them; returns what law.json says. InputError where the runs give none."""
    from ...fit.hyperparameters.tuning import tuning_rules

    tried = tried_settings(sweep).items()
    rows = [(*cell, *settings, loss) for cell, runs in tried for settings, loss in runs]
    columns = dict(zip(("N", "D", *Settings._fields, "loss"), np.array(rows, dtype=float).T, strict=True))
    found = tuning_rules(columns, config.fit.bootstrap, seed=0)
    taken, unset = asdict(config.tuning), (None, asdict(PowerRule()))
    others = {name: taken[name] for name in OTHERS if taken[name] not in unset}
    command = sweep.settings().get("command") or ()
    content = {"command": " ".join(command), **found, "family": family(sweep.runs()[0].config())}
    content["tuning"] = others | found["tuning"]
    write_atomic(sweep.path / FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    said = yaml.safe_dump(found["tuning"], sort_keys=False)
    verdict = f"rules for tuning=law tuning.file={sweep.path / FILE}, which has their intervals:\n{said}"
    return {"verdict": verdict, "warnings": found["warnings"]}
