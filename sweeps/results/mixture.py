"""The best mixture of a sweep's domains, by the sweep's own target and base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ...train.files import read_json
from ..runs.directory import SweepDirectory
from ..terminal import print_rows, say
from .table import build_table

if TYPE_CHECKING:
    from ...fit.report.mixture import MixtureStudy


def study_mixtures(source: Path, seed: int = 0, **options: Any) -> MixtureStudy:
    """Fit a table, or a sweep's finished runs, with the sweep's target and base unless others are given."""
    from ...fit.report.mixture import MixtureStudy

    if not (source / "plan.json").exists():
        return MixtureStudy.of(source, seed, **options)
    sweep = SweepDirectory.open(source)
    table, config = build_table(sweep), sweep.settings()["config"]
    if "trunk" in table:
        table["group"] = table["trunk"].fillna(table["run_id"])
    data, weights = (
        config["data"],
        {name: domain["weight"] for name, domain in (config["data"].get("domains") or {}).items()},
    )
    options["target"] = options.get("target") or data.get("target")
    options["base"] = options.get("base") or config["grid"].get("base") or weights
    return MixtureStudy.of(table, seed, data.get("epochs_of") or 0.0, **options)


def write_mixture(sweep: SweepDirectory) -> dict[str, Any]:
    """Write the report of a sweep of mixtures. Returns the content of law.json."""
    study, command = study_mixtures(sweep.path), " ".join(sweep.settings().get("command") or ())
    study.write(sweep.path / "fit", sweep.path.name, {"command": command}, read_json(sweep.path / "costs.json"))
    return study.to_dict()


def print_mixture(law: Mapping[str, Any]) -> None:
    """Print a law.json on mixtures: the answer, its tables and warnings."""
    from ...fit.report.mixture import mixture_tables

    say(escape(law["verdict"]))
    for title, table in mixture_tables(law).items():
        print_rows([*table], ("domain", "form"), title, table.to_numpy().tolist())
    for warning in law["warnings"]:
        if warning["code"] != "no_mixture_answer":  # begins the verdict
            say(f"[yellow]{warning['code']}[/]: {escape(warning['message'])}")
