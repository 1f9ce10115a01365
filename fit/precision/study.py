"""The part of an analysis on number formats: answers as JSON, sentences and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..formatting import amount, count, fixed, percent, scientific
from ..table import RunTable
from .formats import NONE, PARTS, read_formats
from .precisionlaw import DRAWS, PrecisionLaw

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PrecisionStudy:
    """The runs of one table, the names of their formats (n,), the law or the reason for none, and its answers."""

    runs: RunTable
    format: np.ndarray
    reason: str = ""
    law: PrecisionLaw | None = None
    answers: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"reason": self.reason, **(self.answers or {})}


def by_precision(
    runs: RunTable, targets: tuple[float, ...], bootstrap: int, seed: int, speedup: Mapping[str, float] | None = None
) -> PrecisionStudy | None:
    """Fit a PrecisionLaw, with answers at `targets` FLOPs; return None if the table has no formats."""
    parts = [part for members in PARTS.values() for part in members]
    if not any({part, f"{part}_format", f"{part}_bits"} & {*map(str, runs.frame.columns)} for part in parts):
        return None
    format = np.full(len(runs), NONE, dtype=object)
    try:
        format = read_formats(runs)[0]
        law = PrecisionLaw(draws=min(bootstrap, DRAWS) or DRAWS, seed=seed).fit(runs)
        return PrecisionStudy(runs, format, "", law, law.to_dict(targets, speedup))
    except InputError as error:
        if speedup:
            raise
        return PrecisionStudy(runs, format, str(error))


def precision_text(content: Mapping[str, Any]) -> tuple[list[str], dict[str, pd.DataFrame]]:
    """Return the answers of a `to_dict` as sentences, and as tables of text by title."""
    import pandas as pd

    if content["reason"]:
        return [f"No law of precision: {content['reason']}"], {}

    def shown(row: Mapping[str, Any], name: str, say: Any, prefix: str = "") -> str:
        value, low, high = (
            "∞" if row[k] in (None, np.inf) else say(row[k]) for k in (name, f"{prefix}low", f"{prefix}high")
        )
        return f"{value} [{low}, {high}]"

    best, after, sentences = content["best"], content["after_training"], list[str]()
    for flops in dict.fromkeys(row["flops"] for row in best):
        row = next(row for row in best if row["flops"] == flops)  # the lowest loss is first
        sentences.append(
            f"In the time of {scientific(flops)} FLOPs without quantization, the lowest loss is that of format "
            f"{row['format']}, with a probability of {percent(row['wins'])}: {fixed(row['loss'], 4)} for N = "
            f"{count(row['N'])} and D = {count(row['D'])}, at {amount(row['speedup'])} times the speed."
        )
    names = {"N": "e_N", "D": "e_D", "speedup": "pays from a speedup of"}
    tables = {
        "Efficiency of formats": [
            {"format": row["format"], **{title: shown(row, k, amount, f"{k}_") for k, title in names.items()}}
            for row in content["efficiencies"]
            if row["format"] != NONE
        ],
        "Best model in the time of a budget": [
            {"FLOPs": scientific(row["flops"]), "format": row["format"], "speedup": amount(row["speedup"])}
            | {"N": count(row["N"]), "D": count(row["D"]), "loss": shown(row, "loss", lambda v: fixed(v, 4))}
            | {"wins": percent(row["wins"])}
            for row in best
        ],
        "Forms, by hold-outs": [
            {"form": name, "share": percent(share), "error": percent(error)}
            for name, (share, error) in content["forms"].items()
        ],
    }
    if after:
        D, N = (f"{v:.2f} [{low:.2f}, {high:.2f}]" for v, low, high in (after["exponents"][k] for k in "DN"))
        sentences.append(
            f"Quantization after training adds a loss that grows as D to the power {D} and falls as N to {N}."
        )
        tables["More tokens make the quantized model worse from"] = [
            {"quantized": row["way"], "N": count(row["N"]), "D/N": shown(row, "ratio", amount)}
            for row in after["turning_points"]
        ]
    return sentences + content["notes"], {title: pd.DataFrame(rows) for title, rows in tables.items()}
