"""Scoring the runs of a sweep: which checkpoints are wanted, which have scores, and the call into the evaluate room.

A checkpoint that a run was not told to keep, because `evaluate.every` was set later, is not missed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...train.files import read_json, read_json_lines, write_json
from ..plan.trunks import checkpoint_folder, has_checkpoint, steps_between
from ..runs.directory import RunDirectory

if TYPE_CHECKING:
    from ...evaluate.checkpoint import Evaluator


def stage(tasks: list[str]) -> None:
    """Fetches what the tasks need while there is a network; compute nodes may have none."""
    from ...evaluate.tasks.tasks import stage_tasks

    stage_tasks(tasks, progress=print)


def is_scored(run: RunDirectory, settings: dict[str, Any]) -> bool:
    """Whether every wanted checkpoint has been scored on these tasks, over as many items."""
    return all(_is_scored(run, step, settings) for step in wanted_steps(run, settings))


def wanted_steps(run: RunDirectory, settings: dict[str, Any]) -> list[int]:
    """Steps of a finished run whose checkpoints are to be scored, as far as they were kept; the final one last."""
    last = (run.summary() or {}).get("step")
    steps = steps_between(run.config(), settings["every"]) if settings.get("every") is not None else []
    kept = [step for step in steps if has_checkpoint(run, step)]
    return [*kept, last] if isinstance(last, int) else kept


def _is_scored(run: RunDirectory, step: int, settings: dict[str, Any]) -> bool:
    # A group of lm-eval tasks is recorded by its members, so the request itself is kept beside the scores.
    scores, request = (read_json(run.path / "eval" / f"step_{step}{kind}.json") for kind in ("", ".request"))
    return scores is not None and request == _request(settings)


def _request(settings: dict[str, Any]) -> dict[str, Any]:
    asked = {"tasks": list(settings["tasks"]), "limit": settings["limit"], "ngram": settings.get("ngram")}
    return asked | {name: settings[name] for name in ("decode", "average") if settings.get(name)}


def open_evaluator(settings: dict[str, Any], say: Callable[[str], None]) -> Evaluator:
    """Load a sweep's tasks, for all checkpoints that this process scores."""
    from ...evaluate.checkpoint import Evaluator
    from ...evaluate.tasks.tasks import load_suite

    allow_code = bool(settings.get("allow_code"))  # sweeps of earlier versions lack it
    return Evaluator(
        load_suite(settings["tasks"], settings["limit"], progress=say, allow_code=allow_code),
        batch_tokens=settings["batch_tokens"],
        average=settings.get("average"),
        ngram=settings.get("ngram"),
    )


def evaluate_run(run: RunDirectory, settings: dict[str, Any], evaluator: Evaluator) -> None:
    """Score the wanted checkpoints that have no scores yet, into eval/step_<n>.json."""

    def log_step(step: int, line: str) -> None:
        run.log(f"step {step}: {line}")

    for step in wanted_steps(run, settings):
        if _is_scored(run, step, settings):
            continue
        is_last = step == (run.summary() or {}).get("step")
        evaluator.evaluate(
            checkpoint_folder(run, step),
            run.path / "eval" / f"step_{step}.json",
            held_out=None if settings.get("average") else _held_out(run, step),
            keep_items=is_last,
            decode=is_last and bool(settings.get("decode")),
            progress=partial(log_step, step),
        )
        write_json(run.path / "eval" / f"step_{step}.request.json", _request(settings))


def _held_out(run: RunDirectory, step: int) -> dict[str, Any] | None:
    """The held-out loss of a step, where the training computed it."""
    lines = [run.summary() or {}, *read_json_lines(run.path / "metrics.jsonl")]
    names = ("val_loss", "val_loss_se", "val_bpb")
    for line in lines:
        if line.get("step") == step and all(name in line for name in names):
            return {name: line[name] for name in names}
    return None
