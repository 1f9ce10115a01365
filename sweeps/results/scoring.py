"""Score a sweep's checkpoints with the package `evaluate`, read the scores, and write their pages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...evaluate.quantization.settings import parse
from ...train.config import domain_losses
from ...train.files import read_json, read_json_lines, write_atomic, write_json
from ...train.planner.command import PROGRAM, model_folder
from ..plan.trunks import checkpoint_folder, has_checkpoint, steps_between
from ..runs.directory import RunDirectory, SweepDirectory

if TYPE_CHECKING:
    import pandas as pd

    from ...evaluate.checkpoint import Evaluator
    from ...evaluate.pages.paired import Answers

MOST = 24  # checkpoints of a sweep that get a page, because a page takes 0.1 s or more
AHEAD, POINTS = 10.0, 16  # times the largest compute to which tasks are forecast, and at how many values of it
ABOUT = ("run_id", "name", "step", "final", "N", "D", "flops", "loss", "recipe", "budget")


def stage(tasks: list[str]) -> None:
    """Download the data of the tasks now, because compute nodes may have no network."""
    from ...evaluate.tasks.tasks import stage_tasks

    stage_tasks(tasks, progress=print)


def is_scored(run: RunDirectory, settings: dict[str, Any]) -> bool:
    """Return whether all `wanted_steps` of a run have scores with these `evaluate` settings."""
    return all(_is_scored(run, step, settings) for step in wanted_steps(run, settings))


def wanted_steps(run: RunDirectory, settings: dict[str, Any]) -> list[int]:
    """Return the steps at which to score a finished run: the checkpoints at `steps_between`, then its last step."""
    last = (run.summary() or {}).get("step")
    if why_unscored(run) is not None:
        return []
    steps = steps_between(run.config(), settings["every"]) if settings.get("every") is not None else []
    saved = [step for step in steps if has_checkpoint(run, step)]
    return [*saved, last] if isinstance(last, int) else saved


def _is_scored(run: RunDirectory, step: int, settings: dict[str, Any]) -> bool:
    # Scores name the members of an lm-eval group, not the group, so the request is saved in a separate file.
    scores, request = (read_json(run.path / "eval" / f"step_{step}{kind}.json") for kind in ("", ".request"))
    return scores is not None and request == _request(settings)


def _request(settings: dict[str, Any]) -> dict[str, Any]:
    asked = {"tasks": list(settings["tasks"]), "limit": settings["limit"], "ngram": settings.get("ngram")}
    return asked | {name: settings[name] for name in ("decode", "average", "quantize") if settings.get(name)}


def open_evaluator(settings: dict[str, Any], say: Callable[[str], None]) -> Evaluator:
    from ...evaluate.checkpoint import Evaluator
    from ...evaluate.tasks.tasks import load_suite

    tasks, allow_code = settings["tasks"], bool(settings.get("allow_code"))  # sweeps of earlier versions lack it
    return Evaluator(
        load_suite(tasks, settings["limit"], progress=say, allow_code=allow_code) if tasks else {},
        average=settings.get("average"),
        ngram=settings.get("ngram"),
    )


def evaluate_run(run: RunDirectory, settings: dict[str, Any], evaluator: Evaluator) -> None:
    """Score a run's checkpoints at `wanted_steps` that have no scores yet, and write eval/step_<n>.json."""

    def log_step(step: int, line: str) -> None:
        run.log(f"step {step}: {line}")

    quantize = parse(settings.get("quantize") or ())
    for step in wanted_steps(run, settings):
        if _is_scored(run, step, settings):
            continue
        if (folder := model_folder(run.config(), run.path / PROGRAM)) is not None:
            scores = run.path / "eval" / f"step_{step}.json"
            evaluator.evaluate_folder(folder, scores, run.summary() or {}, partial(log_step, step))
            write_json(scores.with_suffix(".request.json"), _request(settings))
            continue
        is_last = step == (run.summary() or {}).get("step")
        evaluator.evaluate(
            checkpoint_folder(run, step),
            run.path / "eval" / f"step_{step}.json",
            held_out=None if settings.get("average") else _held_out(run, step),
            keep_items=is_last,
            decode=is_last and bool(settings.get("decode")),
            quantize=quantize if is_last else (),
            progress=partial(log_step, step),
        )
        write_json(run.path / "eval" / f"step_{step}.request.json", _request(settings))


def why_unscored(run: RunDirectory) -> str | None:
    """Return why a finished run of an external program cannot be scored, and what to do; else None."""
    if not (run.path / PROGRAM).is_dir():
        return None
    if model_folder(config := run.config(), run.path / PROGRAM) is None:
        place = f"the program left no Hugging Face folder (trainer.hf_folder is {config.trainer.hf_folder!r})"
        return f"{place}; put one into {{run}}, and give the command again"
    if not all(map(find_spec, ("transformers", "accelerate"))):
        return "transformers or accelerate is missing; pip install 'isoflop[bench]', and give the command again"
    return None


def _held_out(run: RunDirectory, step: int) -> dict[str, Any] | None:
    """Return the held-out loss that training computed at a step, None if it did not."""
    lines = [run.summary() or {}, *read_json_lines(run.path / "metrics.jsonl")]
    names = ("val_loss", "val_loss_se", "val_bpb")
    for line in lines:
        if line.get("step") == step and all(name in line for name in names):
            by_domain = {f"val_loss_{name}": loss for name, loss in domain_losses(line).items()}
            return {name: line[name] for name in names} | by_domain
    return None


def evaluations(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Return the scores of a run's checkpoints, by step."""
    result = {}
    for path in (run.path / "eval").glob("step_*.json"):
        step = path.stem.removeprefix("step_")
        if step.isdigit() and isinstance((scores := read_json(path) or {}).get("tasks"), dict):
            result[int(step)] = scores
    return dict(sorted(result.items()))


def final_answers(sweep: SweepDirectory) -> dict[str, Answers]:
    """Map ids of finished runs to their last checkpoint's scores of single task items; omit runs without these."""
    from ...evaluate.items import items_path, read_items
    from ...evaluate.pages.paired import answers_of

    finals = {run: (run.summary() or {}).get("step") for run in sweep.runs() if run.is_done()}
    files = {run.run_id: items_path(run.path / "eval" / f"step_{step}.json") for run, step in finals.items()}
    return {run_id: answers_of(read_items(file)) for run_id, file in files.items() if file.is_file()}


def write_pages(sweep: SweepDirectory, table: pd.DataFrame, answers: Mapping[str, Answers]) -> None:
    """Write fit/evaluation.html and runs/<id>/eval/step_<n>.html if there are scores."""
    from ...evaluate.items import items_path, read_items, with_earlier
    from ...evaluate.pages.report import checkpoint_page
    from ...evaluate.pages.sweep_report import sweep_page
    from ...fit.formatting import plain_json

    scores = {run_id: evaluations(sweep.run(run_id)) for run_id in table["run_id"].unique()}
    rows = [
        {name: row[name] for name in ABOUT if name in row} | {"tasks": final["tasks"]}
        for row in plain_json(table.to_dict("records"))
        if (final := scores[row["run_id"]].get(row["step"])) is not None and final["tasks"]
    ]
    if not rows:
        return
    finals = [row for row in rows if row["final"]]
    shown = {(row["run_id"], row["step"]) for row in chosen_checkpoints(finals)}
    links = {}
    for row in finals:
        file = sweep.run(row["run_id"]).path / "eval" / f"step_{row['step']}.json"
        page = file.with_suffix(".html")
        is_new = page.exists() and page.stat().st_mtime_ns > file.stat().st_mtime_ns
        if (row["run_id"], row["step"]) in shown and not is_new:
            checkpoint = checkpoint_folder(sweep.run(row["run_id"]), row["step"])
            result = scores[row["run_id"]][row["step"]] | {"name": row["name"]}
            result, items = with_earlier(result, read_items(items_path(file)), checkpoint / "scores.json")
            write_atomic(page, checkpoint_page(result, items))
        if page.exists():
            links[row["run_id"]] = f"../runs/{row['run_id']}/eval/{page.name}"
    forecasts = plain_json(forecast_scores(table, answers))
    write_atomic(sweep.path / "fit" / "evaluation.html", sweep_page(rows, answers, sweep.path.name, links, forecasts))


def forecast_scores(table: pd.DataFrame, answers: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """Forecast the tasks of the base recipe along its best runs' N and D, to AHEAD times the largest compute."""
    import numpy as np
    import pandas as pd

    from ... import fit
    from ...fit.approaches.recipes import split
    from ...fit.flops import flops_per_token

    try:
        runs = next(iter(split(fit.read_table(table)).values()))
        profiles = runs.budget if np.isfinite(runs.budget).all() else runs.flops
        best = pd.Series(runs.loss).groupby(profiles).idxmin().to_numpy()
        compute = np.geomspace(runs.flops.min(), AHEAD * runs.flops.max(), POINTS)
        line = np.polyfit(np.log(runs.flops[best]), np.log(runs.N[best]), min(len(best) - 1, 1))
        N = np.exp(np.polyval(line, np.log(compute)))
        margins = defaultdict[str, dict[str, Any]](dict)
        for run, of_run in answers.items():
            for task, measures in of_run.items():
                if "margin" in measures:
                    margins[task][run] = pd.Series(measures["margin"])
        items = {task: pd.DataFrame(by_run).T.dropna(axis=1) for task, by_run in margins.items()}
        spend = flops_per_token(runs.N, runs.D, runs.flops)
        D = compute / (6.0 * N if spend is None else spend(N))
        ahead = fit.forecast_tasks(runs, N, D, items=items)
    except fit.InputError:  # no task, or a table without a law
        return []
    return ahead.to_dict("records")  # type: ignore[return-value]


def chosen_checkpoints(finals: list[dict[str, Any]], limit: int = MOST) -> list[dict[str, Any]]:
    """Choose at most `limit` final checkpoints: first each budget's lowest loss, then the rest by falling FLOPs."""
    best: dict[Any, dict[str, Any]] = {}
    for row in finals:
        group = row["budget"] if row["budget"] is not None else round(math.log2(max(row["flops"], 1.0)))
        if group not in best or row["loss"] < best[group]["loss"]:
            best[group] = row
    first = [id(row) for row in best.values()]
    return sorted(finals, key=lambda row: (id(row) not in first, -row["flops"]))[:limit]
