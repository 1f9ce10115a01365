"""Scoring the runs of a sweep: which are scored already, and the call into the evaluate room for the others."""

from __future__ import annotations

from typing import Any

from ..train.files import read_json, write_json
from .runs import RunDirectory


def stage(tasks: list[str]) -> None:
    """Fetches what the tasks need while there is a network; compute nodes may have none."""
    from ..evaluate.staging import BENCHMARKS, stage_benchmarks
    from ..evaluate.tasks import task_names

    if set(task_names(tasks)) & set(BENCHMARKS):
        stage_benchmarks(progress=print)


def is_scored(run: RunDirectory, settings: dict[str, Any]) -> bool:
    """Whether the final checkpoint has been scored on these tasks, over as many items.

    A group of lm-eval tasks is recorded by its members, so the request itself is kept beside the scores.
    """
    step = (run.summary() or {}).get("step")
    scores, request = (read_json(run.path / "eval" / f"step_{step}{kind}.json") for kind in ("", ".request"))
    return scores is not None and request == _request(settings)


def _request(settings: dict[str, Any]) -> dict[str, Any]:
    return {"tasks": list(settings["tasks"]), "limit": settings["limit"]}


def open_suite(settings: dict[str, Any]) -> Any:
    """The tasks, loaded once for every checkpoint of this process."""
    from ..evaluate.tasks import load_suite

    return load_suite(settings["tasks"], settings["limit"])


def evaluate_run(run: RunDirectory, settings: dict[str, Any], suite: Any) -> None:
    """Scores the final checkpoint of a run into eval/step_<n>.json."""
    from ..evaluate.checkpoint import evaluate_checkpoint

    summary = run.summary()
    assert summary is not None
    held_out = {name: summary[name] for name in ("val_loss", "val_loss_se", "val_bpb")}
    evaluate_checkpoint(
        run.path / summary["checkpoint"], output=run.path / "eval" / f"step_{summary['step']}.json",
        held_out=held_out, batch_tokens=settings["batch_tokens"], suite=suite, progress=run.log,
    )  # fmt: skip
    write_json(run.path / "eval" / f"step_{summary['step']}.request.json", _request(settings))
