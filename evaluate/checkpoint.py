"""One checkpoint in, one file of scores out.

Special here:
- The file is complete after every task (written aside, renamed), so a killed evaluation goes on at the next task.
- A task is not scored twice: a score stands while checkpoint, items, prompts, lm-eval, precision and our own scoring
  are the same. A file that cannot be read is moved aside, never trusted and never deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..train.config import run_id
from ..train.errors import UserError
from ..train.files import read_json, write_json
from ..train.flops import count_parameters
from .harness import make_lm, score_task
from .tasks import DEFAULT_LIMIT, Report, Suite, load_suite

SCORING = 1  # bumped when our arithmetic changes, so that an old score is never taken for a new one
# Small enough on a CPU to stay in its caches, large enough on a GPU to fill it.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def evaluate_checkpoint(
    path: Path | str,
    tasks: str | Sequence[str] = "small",
    output: Path | str = "scores.json",
    *,
    limit: int | None = DEFAULT_LIMIT,
    batch_tokens: int | None = None,
    held_out: dict[str, Any] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    suite: Suite | None = None,
    cache: Path | str | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Scores a checkpoint and writes the scores as JSON.

    Args:
        path: a checkpoint directory, or a run directory (its newest valid checkpoint).
        tasks: a suite, or lm-eval task names; unused when `suite` is given.
        output: where the scores go; tasks that it holds already for this very checkpoint are kept.
        limit: items a task; None means all.
        batch_tokens: bound on rows times length of one forward pass; default: what suits the device.
        held_out: val_loss, val_loss_se, val_bpb, where the training has them; computed otherwise.
        device: auto (CUDA where there is one), cpu or cuda.
        precision: fp32 or bf16, of the weights.
        suite: loaded tasks, to share between the checkpoints of one process.
        cache: folder of the staged benchmarks.
        progress: called with a line of text a task.

    Raises:
        UserError: no checkpoint there, an unknown task, data that cannot be had, or an output that cannot be written.
    """
    say = progress or (lambda line: None)
    output = Path(output)
    device = choose_device(device)
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; it must be 1 or more")
    loaded = _load(Path(path), device, PRECISIONS[precision])
    suite = suite or load_suite(tasks, limit, cache=cache, progress=progress)
    scores = _header(loaded, device, precision)
    kept = _kept(output, scores, suite, say)
    scores["tasks"], scores["held_out"] = kept.get("tasks", {}), held_out or kept.get("held_out")
    lm = make_lm(loaded, device, batch_tokens or BATCH_TOKENS[device])
    for name, entry in suite.tasks.items():
        if name in scores["tasks"]:
            continue
        start = time.perf_counter()
        result = score_task(lm, entry)
        scores["tasks"][name] = {**result, "seconds": round(time.perf_counter() - start, 3)}
        _write(output, scores)
        say(f"{name}: {_in_words(result)}")
    if scores["held_out"] is None:
        scores["held_out"] = _held_out(loaded)
    _write(output, scores)
    return scores


def choose_device(device: str) -> str:
    """`auto` is CUDA where there is one.

    Raises:
        UserError: no such device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"device is {device!r}; it must be one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but torch sees no CUDA device; use auto or cpu")
    return device


def _load(path: Path, device: str, dtype: torch.dtype) -> Any:
    from ..train.checkpoint import load_for_evaluation

    return load_for_evaluation(path, device, dtype)


def _held_out(loaded: Any) -> dict[str, Any]:
    """Held-out loss on the run's own corpus. Where that is not at hand (another machine), the reason instead."""
    from ..train.heldout import validate_checkpoint

    try:
        return dict(validate_checkpoint(loaded))
    except UserError as error:
        return {"val_loss": None, "val_loss_se": None, "val_bpb": None, "withheld": str(error)}


def _header(loaded: Any, device: str, precision: str) -> dict[str, Any]:
    config = loaded.config
    return {
        "checkpoint": str(loaded.path),
        "checkpoint_sha256": loaded.checksum,
        "run_id": run_id(config),
        "step": loaded.step,
        "N_total": count_parameters(config.model).N_total,
        "tokens": loaded.step * config.batch_tokens,
        "sequence_length": config.data.sequence_length,
        "lm_eval_version": version("lm_eval"),
        "scoring": SCORING,
        "precision": precision,
        "device": device,
    }


def _kept(output: Path, header: dict[str, Any], suite: Suite, say: Report) -> dict[str, Any]:
    """What an earlier file says about this checkpoint, less the tasks of this suite whose items or prompts changed."""
    if not output.exists():
        return {}
    old = read_json(output)
    if old is None or not _is_whole(old):
        aside = _free_name(output)
        os.replace(output, aside)
        say(f"{output} is not a file of scores; moved to {aside.name}, scoring again")
        return {}
    same = ("checkpoint_sha256", "lm_eval_version", "scoring", "precision")
    if any(old.get(key) != header[key] for key in same):
        return {}
    tasks = {
        name: scores
        for name, scores in old["tasks"].items()
        if name not in suite.tasks or scores["subset"] == suite.tasks[name].subset
    }
    return {"tasks": tasks, "held_out": old.get("held_out")}


def _is_whole(old: dict[str, Any]) -> bool:
    tasks = old.get("tasks")
    return isinstance(tasks, dict) and all(
        isinstance(scores, dict) and isinstance(scores.get("subset"), dict) and "items" in scores
        for scores in tasks.values()
    )


def _free_name(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}.corrupt-{number}") for number in range(1, 1_000_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _write(output: Path, scores: dict[str, Any]) -> None:
    scores["seconds"] = round(sum(task["seconds"] for task in scores["tasks"].values()), 3)
    try:
        write_json(output, scores)
    except OSError as error:
        raise UserError(
            f"scores cannot be written to {output} ({error.strerror or error}); free space or choose another output"
        ) from error


def _in_words(result: dict[str, Any]) -> str:
    if result["withheld"]:
        return f"withheld, {result['withheld']}"
    parts = []
    if result["acc"] is not None:
        parts.append(f"accuracy {result['acc']:.3f} (chance {result['chance']:.3f})")
    if result["gold_bpb"] is not None:
        parts.append(f"gold BPB {result['gold_bpb']:.3f}")
    return ", ".join(parts) or f"{result['items']} items"
