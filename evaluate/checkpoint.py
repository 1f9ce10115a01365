"""One checkpoint in, one file of scores out, and beside it one of all items.

Both are complete after every task, and a killed evaluation goes on at the next request with the same numbers. A score
of this checkpoint stands until its task is asked with other items, prompts, lm-eval, precision or scoring of ours.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..train.checkpoint.heldout import score_windows
from ..train.config import canonical_json, run_id, to_dict
from ..train.errors import UserError
from ..train.flops import count_parameters, training_flops_per_token
from ..train.hardware import on_gpu, pick_device
from ..train.job.control import run_on_ranks
from ..train.parallel.mesh import Mesh
from .harness import ALONE, CheckpointLM, TokenCache, answer_task
from .inference.generate import decode_speed
from .metrics import task_scores
from .records.items import as_dicts
from .records.record import SETTINGS, Record, only_one
from .tasks.suite import Suite, SuiteTask, expand, quiet, suite_names
from .tasks.tasks import DEFAULT_LIMIT, Report, load_suite

SCORING = 2  # bumped when our arithmetic changes, so that an old score is never taken for a new one
# Small enough on a CPU to stay in its caches, large enough on a GPU to fill it.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
Contamination = tuple[dict[str, set[int]], str | None]  # contaminated items by task; why there are none to be had
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def evaluate_checkpoint(
    path: Path | str,  # a checkpoint directory, or a run directory (its newest valid checkpoint)
    tasks: str | Sequence[str] = "small",  # see `tasks.load_suite`; unused when `suite` is given
    output: Path | str = "scores.json",
    *,
    limit: int | None = DEFAULT_LIMIT,  # items per task; None means all
    batch_tokens: int | None = None,  # bound on rows times length of one forward pass; None: what suits the device
    held_out: dict[str, Any] | None = None,  # val_loss, val_loss_se, val_bpb of the training; computed otherwise
    device: str = "auto",
    precision: str = "fp32",  # of the weights
    suite: Suite | None = None,  # loaded tasks
    tokens: dict[str, TokenCache] | None = None,  # by tokenizer
    overlaps: dict[str, Contamination] | None = None,  # by corpus
    cache: Path | str | None = None,  # folder of the staged benchmarks
    average: float | None = None,  # span of the average of the weights that is scored; None: the weights
    ngram: int | None = None,  # words in a row shared with the training text make an item contaminated; None: not asked
    ranks: Mesh = ALONE,  # the processes that share the work (`ranks.on_ranks`); only the first one writes
    keep_items: bool = True,  # whether to write the items too; they are kept up where there are some
    decode: bool = False,  # whether to measure the time of a generated token, once
    progress: Report = lambda line: None,
) -> dict[str, Any]:
    """Scores a checkpoint and writes the scores as JSON, and every item beside them (see `items.items_path`).

    Scores that `output` holds of this checkpoint are kept, of other tasks too. `suite`, `tokens` and `overlaps` are to
    be shared between the checkpoints of one process; the last two are filled in here. `progress` is called with a line
    of text for each task, and every few seconds of a long one. Raises UserError: no checkpoint there, an unknown task,
    data that cannot be had, or an output that cannot be written.
    """
    say = progress if ranks.rank == 0 else lambda line: None
    output, device = Path(output), pick_device(device, "device").type
    check_settings(precision, batch_tokens, ngram)
    loaded = run_on_ranks(ranks, lambda: load_scored(Path(path), device, PRECISIONS[precision], average))
    suite = suite or run_on_ranks(ranks, lambda: load_suite(tasks, limit, cache=cache, progress=say))
    header = _header(loaded, device, precision)
    with only_one(output, say, ranks):
        record = Record(output, header, suite, ngram, say, ranks, keep_items)
        if held_out is not None:
            worst = (record.scores["held_out"] or {}).get("worst")
            record.scores["held_out"] = held_out if worst is None else held_out | {"worst": worst}
        if missing := [entry for name, entry in suite.tasks.items() if name not in record.tasks]:
            known = overlaps if overlaps is not None else {}
            corpus = canonical_json([to_dict(loaded.config.data), ngram])
            if corpus not in known:
                known[corpus] = run_on_ranks(
                    ranks, lambda: _contamination(loaded, suite, ngram, cache, say), only_first=True
                )
            found, record.scores["contamination_withheld"] = known[corpus]
            fingerprint = loaded.tokenizer.fingerprint
            shared = (tokens if tokens is not None else {}).setdefault(fingerprint, TokenCache())
            with record.answers() as answers:
                length = loaded.config.data.sequence_length
                room = batch_tokens or BATCH_TOKENS["cuda" if on_gpu(torch.device(device)) else "cpu"]
                told: dict[str, Any] = {"tokens": shared, "answers": answers, "ranks": ranks, "say": say}
                lm = CheckpointLM(loaded.model, loaded.tokenizer, length, device, room, **told)
                for place, entry in enumerate(missing, 1):
                    answers.begin(f"{entry.name} ({place} of {len(missing)})")
                    _score(record, lm, entry, ngram, found.get(entry.name))
                    say(f"{entry.name}: {_in_words(record.tasks[entry.name])}")
        if decode and record.scores.get("decode") is None:
            record.scores["decode"] = run_on_ranks(ranks, lambda: decode_speed(loaded.model), only_first=True)
        record.finish(lambda: _held_out(loaded), _suites())
    return record.scores


def _score(record: Record, lm: Any, entry: SuiteTask, ngram: int | None, contaminated: set[int] | None) -> None:
    start = time.perf_counter()
    with quiet(progress_bars=True):  # keeps the templates that lm-eval compiles until all of its items are read
        items, others = answer_task(lm, entry)
    scores = task_scores(items, contaminated)
    scores |= dict.fromkeys(others) if scores["withheld"] else others
    scores |= {"subset": entry.subset, "version": entry.version, "shots": entry.shots, "ngram": ngram}
    scores |= {key: record.scores[key] for key in SETTINGS}
    scores["seconds"] = round(time.perf_counter() - start, 3)
    record.enter(entry.name, scores, as_dicts(entry.name, items, contaminated))


def check_settings(precision: str, batch_tokens: int | None, ngram: int | None) -> None:
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; it must be 1 or more")
    if ngram is not None and ngram < 1:
        raise UserError(f"ngram is {ngram}; it must be 1 or more words (--ngram 0, or null in a sweep, does not ask)")


def load_scored(path: Path, device: str, dtype: torch.dtype, average: float | None = None) -> Any:
    from ..train.checkpoint.checkpoint import find, load_for_evaluation

    try:
        found = find(path)
    except UserError:
        for one in (path, *path.glob("checkpoints/step_*")):
            if (one / "manifest.json").is_file() and not (one / "tokenizer").is_dir():
                raise UserError(
                    f"checkpoint {one} has no tokenizer, so no text can be scored; put the folder `tokenizer` of "
                    "another checkpoint of its run there"
                ) from None
        raise
    return load_for_evaluation(found, device, dtype, average)


def _held_out(loaded: Any) -> dict[str, Any]:
    """Held-out loss on the run's own corpus, and where it is worst; the reason where there is none."""
    try:
        found = worst_windows(loaded)
    except UserError as error:  # the corpus is on another machine
        return _NO_LOSS | {"withheld": str(error)}
    if not math.isfinite(found["val_loss"]):
        return _NO_LOSS | {"withheld": f"the held-out loss is {found['val_loss']}"}
    return dict(found)


def worst_windows(loaded: Any, count: int = 20) -> dict[str, Any]:
    """Held-out loss of a checkpoint on its run's own corpus: val_loss (nats per token), val_loss_se, val_bpb.

    `worst` has up to `count` windows of {index, loss, text (of the predicted tokens)}, highest loss first and NaN
    before all; windows of equal loss in their order. Raises UserError: the corpus is not at hand, or has changed.
    """
    windows, losses, numbers = score_windows(loaded)
    length = windows.shape[1] - 1
    order = torch.sort(losses, descending=True, stable=True).indices[:count].tolist()  # NaN counts as the largest
    worst = [
        {"index": i, "loss": losses[i].item() / length, "text": loaded.tokenizer.decode(windows[i, 1:])} for i in order
    ]
    return vars(numbers) | {"worst": worst}


_NO_LOSS = {"val_loss": None, "val_loss_se": None, "val_bpb": None}


def _contamination(
    loaded: Any, suite: Suite, ngram: int | None, cache: Path | str | None, say: Report
) -> Contamination:
    """Items of each task that the training text holds; where it is not at hand, none and the reason."""
    if ngram is None:
        return {}, None
    from ..train.data.shards import at_hand
    from .contamination.contamination import overlaps
    from .tasks.staging import cache_root

    try:
        return overlaps(at_hand(loaded.config.data, loaded.tokenizer), suite, ngram, cache_root(cache), say), None
    except UserError as error:
        return {}, str(error)


def _suites() -> dict[str, list[str]]:
    """The tasks of each suite that has a list of its own."""
    members = {}
    for name in suite_names():
        with contextlib.suppress(UserError):  # it waits for a path, or has no tasks
            members[name] = expand([name])
    return members


def _header(loaded: Any, device: str, precision: str) -> dict[str, Any]:
    config = loaded.config
    counts, length = count_parameters(config.model), config.data.sequence_length
    tokens = loaded.step * config.batch_tokens
    return {
        "checkpoint": str(loaded.path),
        "checkpoint_sha256": loaded.checksum,
        "run_id": run_id(config),
        "step": loaded.step,
        **({} if loaded.average is None else {"average": loaded.average}),
        "N_total": counts.N_total,
        "N_active": counts.N_active,
        "N_non_embedding": counts.N_non_embedding,
        "tokens": tokens,
        "flops": float(training_flops_per_token(config.model, length)) * tokens,
        "sequence_length": length,
        "tokenizer": loaded.tokenizer.fingerprint,
        "lm_eval_version": version("lm_eval"),
        "scoring": SCORING,
        "precision": precision,
        "device": device,
    }


def _in_words(scores: dict[str, Any]) -> str:
    if scores["withheld"]:
        return f"withheld, {scores['withheld']}"
    parts = []
    if scores["acc"] is not None:
        parts.append(f"accuracy {scores['acc']:.3f} (chance {scores['chance'] or 0.0:.3f})")
    if scores["gold_bpb"] is not None:
        parts.append(f"gold BPB {scores['gold_bpb']:.3f}")
    if scores["bpb"] is not None:
        parts.append(f"{scores['bpb']:.3f} bits per byte")
    return ", ".join(parts) or f"items: {scores['items']}"
