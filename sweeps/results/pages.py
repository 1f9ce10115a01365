"""The pages of a sweep's benchmarks: one of the sweep, and one of each of its best checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.files import write_atomic
from ..runs.directory import SweepDirectory
from .table import evaluations

if TYPE_CHECKING:
    import pandas as pd

    from ...evaluate.pages.paired import Answers

MOST = 24  # checkpoints of a sweep that get a page, which takes a tenth of a second or more
ABOUT = ("run_id", "name", "step", "final", "N", "D", "flops", "loss", "recipe", "budget")


def final_answers(sweep: SweepDirectory) -> dict[str, Answers]:
    """What each finished run's last checkpoint scored on each item, where that was kept."""
    from ...evaluate.pages.paired import answers_of
    from ...evaluate.records import items_path, read_items

    finals = {run: (run.summary() or {}).get("step") for run in sweep.runs() if run.is_done()}
    files = {run.run_id: items_path(run.path / "eval" / f"step_{step}.json") for run, step in finals.items()}
    return {run_id: answers_of(read_items(file)) for run_id, file in files.items() if file.is_file()}


def write_pages(sweep: SweepDirectory, table: pd.DataFrame, answers: Mapping[str, Answers]) -> Path | None:
    """Writes fit/evaluation.html and runs/<id>/eval/step_<n>.html; None where nothing has been scored."""
    from ...evaluate.pages.report import checkpoint_page
    from ...evaluate.pages.sweep_report import sweep_page
    from ...evaluate.records import items_path, read_items
    from ...fit.formatting import plain_json

    scores = {run_id: evaluations(sweep.run(run_id)) for run_id in table["run_id"].unique()}
    rows = [
        {name: row[name] for name in ABOUT if name in row} | {"tasks": found["tasks"]}
        for row in plain_json(table.to_dict("records"))
        if (found := scores[row["run_id"]].get(row["step"])) is not None
    ]
    if not rows:
        return None
    finals = [row for row in rows if row["final"]]
    shown = {(row["run_id"], row["step"]) for row in chosen_checkpoints(finals)}
    links = {}
    for row in finals:
        file = sweep.run(row["run_id"]).path / "eval" / f"step_{row['step']}.json"
        page = file.with_suffix(".html")
        is_new = page.exists() and page.stat().st_mtime_ns > file.stat().st_mtime_ns
        if (row["run_id"], row["step"]) in shown and not is_new:
            own = scores[row["run_id"]][row["step"]] | {"name": row["name"]}
            write_atomic(page, checkpoint_page(own, read_items(items_path(file))))
        if page.exists():
            links[row["run_id"]] = f"../runs/{row['run_id']}/eval/{page.name}"
    path = sweep.path / "fit" / "evaluation.html"
    write_atomic(path, sweep_page(rows, answers, sweep.path.name, links))
    return path


def chosen_checkpoints(finals: list[dict[str, Any]], most: int = MOST) -> list[dict[str, Any]]:
    """Those of the lowest loss in each budget, then those of most FLOPs."""
    best: dict[Any, dict[str, Any]] = {}
    for row in finals:
        group = row["budget"] if row["budget"] is not None else round(math.log2(max(row["flops"], 1.0)))
        if group not in best or row["loss"] < best[group]["loss"]:
            best[group] = row
    first = [id(row) for row in best.values()]
    return sorted(finals, key=lambda row: (id(row) not in first, -row["flops"]))[:most]
