"""Score checkpoints on a suite of tasks, and write the scores and every item.

Both files are complete after every task, and a killed evaluation continues with the same numbers. A recorded score is
reused until items, prompts, lm-eval's version, the precision or our scoring change.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..train.checkpoint.checkpoint import quantization
from ..train.checkpoint.heldout import score_windows
from ..train.config import canonical_json, run_id, to_dict
from ..train.data.storage import checksum
from ..train.errors import UserError, counted
from ..train.files import file_sha256
from ..train.flops import count_parameters, training_flops_per_token
from ..train.hardware import pick_device
from ..train.job.control import run_on_ranks
from ..train.parallel.mesh import Mesh
from .harness import ALONE, CheckpointLM, WindowCache, answer_task
from .inference.generate import decode_speed
from .items import as_dicts
from .metrics import task_scores
from .quantization.quantize import quantized_loss
from .quantization.settings import Quantization
from .records import SETTINGS, Record, only_one
from .tasks.suite import Suite, SuiteTask, expand, quiet, suite_names
from .tasks.tasks import Report

WORST = 20  # windows of held-out text that are kept
SCORING = 2  # raised when our arithmetic changes, so that old scores are computed again
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
Contamination = tuple[dict[str, set[int]], str | None]  # contaminated items by task, or why they are unknown


@dataclass
class Evaluator:
    """Scores checkpoints on one suite, with the same settings.

    Attributes:
        suite: Loaded tasks (see `tasks.load_suite`).
        device: "auto", "cpu" or "cuda".
        precision: Type of the weights, "fp32" or "bf16".
        batch_tokens: Bound on rows times length of one forward pass; None takes the device's default.
        average: Span of the weight average to score, as a share of the steps so far; None scores the weights.
        ngram: Consecutive words that make an item contaminated if the training text has them; None skips the search.
        ranks: Processes that share the work (see `ranks.on_ranks`); only rank 0 writes.
    """

    suite: Suite
    device: str = "auto"
    precision: str = "fp32"
    batch_tokens: int | None = None
    average: float | None = None
    ngram: int | None = None
    ranks: Mesh = ALONE
    windows: dict[tuple[str, int], WindowCache] = field(default_factory=dict, repr=False)  # by tokenizer and length
    contaminated: dict[str, Contamination] = field(default_factory=dict, repr=False)  # by corpus, for this suite

    def __post_init__(self) -> None:
        check_settings(self.precision, self.batch_tokens, self.ngram)

    def evaluate(
        self,
        path: Path | str,
        output: Path | str = "scores.json",
        *,
        held_out: dict[str, Any] | None = None,
        keep_items: bool = True,
        decode: bool = False,
        quantize: Sequence[Quantization] = (),
        progress: Report = lambda line: None,
    ) -> dict[str, Any]:
        """Score a checkpoint, write the scores as JSON and every item next to them, and return the scores.

        Earlier scores of this checkpoint in `output` are kept, also of other tasks.

        Args:
            path: Checkpoint, or run directory (its newest valid checkpoint is used).
            output: File of scores; `items_path(output)` is the file of items.
            held_out: val_loss, val_loss_se and val_bpb as measured in training; None computes them.
            keep_items: Whether to write items; an existing file of items is always updated.
            decode: Whether to time one generated token, once per checkpoint.
            quantize: Formats in which to measure the held-out loss, once per checkpoint.
            progress: Called with each line of progress.

        Raises:
            UserError: There is no checkpoint, or the output cannot be written.
        """
        say = progress if self.ranks.rank == 0 else lambda line: None
        output, device = Path(output), pick_device(self.device, "device").type
        dtype = PRECISIONS[self.precision]
        loaded = run_on_ranks(self.ranks, lambda: load_scored(Path(path), device, dtype, self.average))
        header = _header(loaded, device, self.precision)
        with only_one(output, say, self.ranks):
            record = Record(output, header, self.suite, self.ngram, say, self.ranks, keep_items)
            if held_out is not None:
                worst = (record.scores["held_out"] or {}).get("worst")
                record.scores["held_out"] = held_out if worst is None else held_out | {"worst": worst}
            if missing := [task for name, task in self.suite.items() if name not in record.tasks]:
                self._score(record, loaded, device, missing, say)
            if decode and record.scores.get("decode") is None:
                record.scores["decode"] = run_on_ranks(self.ranks, lambda: decode_speed(loaded.model), only_first=True)
            for settings in quantize:
                losses = record.scores.setdefault("quantized", {})
                if settings.label not in losses:
                    measure = partial(quantized_loss, loaded, settings)
                    losses[settings.label] = run_on_ranks(self.ranks, measure, only_first=True)
                    say(f"{settings.label}: held-out loss {losses[settings.label]}")
            record.scores["tasks"] = {name: record.tasks[name] for name in (*self.suite, *record.tasks)}
            record.finish(lambda: _held_out(loaded), _suites())
        return record.scores

    def evaluate_folder(self, folder: Path, output: Path, summary: dict[str, Any], say: Report) -> None:
        """Score the Hugging Face folder of a run, in one process, and write scores and items as `evaluate` does."""
        from .external import FolderLM  # brings transformers

        device = pick_device(self.device, "device").type
        lm = FolderLM(folder, device, PRECISIONS[self.precision])
        content = checksum([(path.name, file_sha256(path)) for path in sorted(folder.iterdir()) if path.is_file()])
        header = {"checkpoint": str(folder), "checkpoint_sha256": content, "sequence_length": lm.max_length}
        header |= {name: summary.get(name) for name in ("run_id", "step", "N_total", "N_active", "N_non_embedding")}
        header |= {"tokens": summary.get("D"), "flops": summary.get("flops_exact"), "device": device}
        header |= {"lm_eval_version": version("lm_eval"), "scoring": SCORING, "precision": self.precision}
        with only_one(output, say, ALONE):
            record = Record(output, header, self.suite, None, say, ALONE, keep_items=True)
            for task in sorted(self.suite.values(), key=lambda task: task.cost):
                if task.name not in record.tasks:
                    _score_task(record, lm, task, None, None)
                    say(f"{task.name}: {_in_words(record.tasks[task.name])}")
            record.scores["tasks"] = {name: record.tasks[name] for name in (*self.suite, *record.tasks)}
            record.scores["contamination_withheld"] = reason = "the program's training text is not known"
            record.finish(lambda: _NO_LOSS | {"withheld": reason}, _suites())

    def _score(self, record: Record, loaded: Any, device: str, missing: list[SuiteTask], say: Report) -> None:
        contaminated, record.scores["contamination_withheld"] = self._contamination(loaded, say)
        length = loaded.config.data.sequence_length
        windows = self.windows.setdefault((loaded.tokenizer.fingerprint, length), {})
        missing = sorted(missing, key=lambda task: task.cost)
        items, of = (sum(task.subset[count] for task in missing) for count in ("items", "of"))
        requests = counted(sum(len(task.task.instances) for task in missing), "request")
        say(f"{counted(len(missing), 'task')}, the cheapest first: {items:,} of {counted(of, 'item')}, {requests}")
        with record.answers() as answers:
            lm = CheckpointLM(
                loaded.model,
                loaded.tokenizer,
                length,
                device,
                self.batch_tokens,
                windows=windows,
                answers=answers,
                ranks=self.ranks,
                say=say,
            )
            for number, task in enumerate(missing, 1):
                answers.begin(f"{task.name} ({number} of {len(missing)})")
                _score_task(record, lm, task, self.ngram, contaminated.get(task.name))
                say(f"{task.name}: {_in_words(record.tasks[task.name])}")

    def _contamination(self, loaded: Any, say: Report) -> Contamination:
        """Return the indices of contaminated items by task, and None; if they are unknown, {} and the reason."""
        key = canonical_json([to_dict(loaded.config.data), self.ngram])
        if key not in self.contaminated:
            self.contaminated[key] = run_on_ranks(
                self.ranks, lambda: _contamination(loaded, self.suite, self.ngram, say), only_first=True
            )
        return self.contaminated[key]


def _score_task(record: Record, lm: Any, task: SuiteTask, ngram: int | None, contaminated: set[int] | None) -> None:
    start = time.perf_counter()
    with quiet(progress_bars=True):  # keeps the templates that lm-eval compiles until all items have been read
        items, others = answer_task(lm, task)
    scores = task_scores(items, contaminated)
    scores |= dict.fromkeys(others) if scores["withheld"] else others
    scores |= {"subset": task.subset, "version": task.version, "shots": task.shots, "ngram": ngram}
    scores |= {key: record.scores[key] for key in SETTINGS}
    scores["seconds"] = round(time.perf_counter() - start, 3)
    record.enter(task.name, scores, as_dicts(task.name, items, contaminated))


def _contamination(loaded: Any, suite: Suite, ngram: int | None, say: Report) -> Contamination:
    if ngram is None:
        return {}, None
    from ..train.data.text import text_at_hand
    from .contamination import overlaps

    try:
        texts = text_at_hand(loaded.config.data, loaded.tokenizer).values()
        results = [overlaps(shards, suite, ngram, say) for shards in texts]
        return {name: set[int]().union(*(result[name] for result in results)) for name in suite}, None
    except UserError as error:  # the training text is on another machine
        return {}, str(error)


def check_settings(precision: str, batch_tokens: int | None, ngram: int | None) -> None:
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens is {batch_tokens}; it must be 1 or more")
    if ngram is not None and ngram < 1:
        raise UserError(
            f"ngram is {ngram}; it must be 1 or more words (to skip the search: --ngram 0, or null in a sweep)"
        )


def load_scored(path: Path, device: str, dtype: torch.dtype, average: float | None = None) -> Any:
    from ..train.checkpoint.checkpoint import find, load_for_evaluation

    return load_for_evaluation(find(path), device, dtype, average)


def _held_out(loaded: Any) -> dict[str, Any]:
    """Call `worst_windows`; without a finite loss, return losses of None and the reason as `withheld`."""
    try:
        losses = worst_windows(loaded)
    except UserError as error:  # the corpus is on another machine
        return _NO_LOSS | {"withheld": str(error)}
    if not math.isfinite(losses["val_loss"]):
        return _NO_LOSS | {"withheld": f"the held-out loss is {losses['val_loss']}"}
    return losses


def worst_windows(loaded: Any) -> dict[str, Any]:
    """Compute the held-out loss on the run's own corpus: val_loss (nats per token), val_loss_se, val_bpb, worst.

    `worst` lists the `WORST` windows of highest loss (NaN first) as {index, loss, text of the predicted tokens}. Raises
    UserError if the corpus is not on this machine or has changed.
    """
    windows, losses, scores = score_windows(loaded)
    length = windows.shape[1] - 1
    order = torch.sort(losses, descending=True, stable=True).indices[:WORST].tolist()  # NaN counts as the largest
    worst = [
        {"index": i, "loss": losses[i].item() / length, "text": loaded.tokenizer.decode(windows[i, 1:])} for i in order
    ]
    return scores | {"worst": worst}


_NO_LOSS = {"val_loss": None, "val_loss_se": None, "val_bpb": None}


def _suites() -> dict[str, list[str]]:
    members = {}
    for name in suite_names():
        with contextlib.suppress(UserError):  # the suite needs evaluate.path, or has no tasks
            members[name] = expand([name])
    return members


def _header(loaded: Any, device: str, precision: str) -> dict[str, Any]:
    config, bits = loaded.config, quantization(loaded.path)
    counts, length = count_parameters(config.model), config.data.sequence_length
    tokens = loaded.step * config.batch_tokens
    return {
        "checkpoint": str(loaded.path),
        "checkpoint_sha256": loaded.checksum,
        "run_id": run_id(config),
        "name": config.name,
        "step": loaded.step,
        **({} if loaded.average is None else {"average": loaded.average}),
        **({} if bits is None else {"quantization": f"{bits['format']}_{bits['method']}"}),
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
