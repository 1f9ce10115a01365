"""Time our evaluation and lm-eval's `hf` model, and check that they agree: `isoflop bench evaluate`.

Both sides answer the same requests through lm-eval's evaluator, from one checkpoint and its export. The model is
trained for a moment, so that its answers are not random; the peer gets its fastest batch size.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.errors import UserError
from .timing import Contender, Row, fastest, isoflop, measuring_on, plain_row, require, take_turns, timed_row

if TYPE_CHECKING:
    import torch

    from ..evaluate.metrics import ItemResult
    from ..evaluate.tasks.suite import SuiteTask

ABOUT = "ratio: ours over the peer's, more is better; for nats, the allowed difference over the largest one"
CASES = ("agreement", "throughput")
ITEMS, ALLOWED_NATS = 500, 1e-3
PEER = "lm-eval hf"
BATCH_SIZES = (8, 16, 32, 64)  # of the peer; its `auto` finds 64 on a CPU
TRIAL_ITEMS = 50  # by which its batch size is chosen
MODEL = ["model.width=256", "model.depth=10", "model.heads=8", "data.vocab_size=8192", "data.max_bytes=8388608",
         "data.sequence_length=1024", "tokens=65536"]  # fmt: skip
TRAINING = ["+grid=product", "grid.axes={seed:[0]}", "data.tokenizer=bpe", "data.validation_tokens=4096",
            "optimizer.batch_size=2", "schedule.warmup_tokens=0", "validations=1", "tuning=fixed", "cluster=local",
            "tracker=none", "evaluate=none", "preflight=false", "fit.bootstrap=0", "sweep=trained"]  # fmt: skip


def bench_evaluate(
    device: str = "auto", rounds: int = 3, items: int = ITEMS, cases: Sequence[str] = CASES,
    overrides: Sequence[str] = MODEL, generation: tuple[int, int] = (20, 64),
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of each case.

    Each task has `items` items, but ARC-E is whole from `items` = 500 on, and GSM8K has (prompts, new tokens) =
    `generation`. `overrides` configure the model.
    """
    for case in cases:
        if case not in CASES:
            raise UserError(f"--case is {case!r}; it must be one of {', '.join(CASES)}")
    require("transformers", "which is the benchmark's peer")
    require("accelerate", "which lm-eval's hf model needs")
    with measuring_on(device) as place, tempfile.TemporaryDirectory() as folder:
        pair = Pair.make(Path(folder), overrides, place)
        if "agreement" in cases:
            yield from pair.agreement(items, *generation)
        if "throughput" in cases:
            yield pair.throughput(items, rounds)


def trained(folder: Path, overrides: Sequence[str]) -> Path:
    """Train a model for a moment and return its checkpoint."""
    isoflop("sweep", *TRAINING, *overrides, f"output_root={folder}")
    return max(folder.glob("trained/runs/*/checkpoints/step_*"))


@dataclass
class Pair:
    """One checkpoint and its export."""

    loaded: Any
    exported: Path
    device: torch.device

    @classmethod
    def make(cls, folder: Path, overrides: Sequence[str], device: torch.device) -> Pair:
        from ..evaluate.export.export import export_checkpoint
        from ..train.checkpoint.checkpoint import load_for_evaluation

        checkpoint = trained(folder, overrides)
        exported = export_checkpoint(checkpoint, folder / "hf").folder
        return cls(load_for_evaluation(checkpoint, device.type), exported, device)

    def ours(self) -> Any:
        """Return our model for lm-eval, with empty caches."""
        from ..evaluate.harness import CheckpointLM

        length = self.loaded.config.data.sequence_length
        return CheckpointLM(self.loaded.model, self.loaded.tokenizer, length, self.device)

    def peer(self, batch_size: int) -> Any:
        from lm_eval.models.huggingface import HFLM

        with redirect_stderr(io.StringIO()):  # hides progress bars
            lm = HFLM(str(self.exported), dtype="float32", device=self.device.type, batch_size=batch_size)
        lm.truncated, lm.failed = set(), set()  # attributes of our side that `answer_task` reads
        return lm

    def agreement(self, items: int, prompts: int, new: int) -> Iterator[Row]:
        """Yield rows for each task: how many items both answer alike, and the largest difference of log-likelihoods."""
        from ..train.hardware import device_name

        place, ours, peer = device_name(self.device), self.ours(), self.peer(BATCH_SIZES[1])
        limits = {"hellaswag": items, "arc_easy": None if items >= ITEMS else items, "lambada_openai": items}
        for name, limit in (limits | {"gsm8k": min(prompts, items)}).items():
            entry = load_entry(name, limit)
            for request in entry.task.instances:
                if request.request_type == "generate_until":
                    context, settings = request.args
                    request.arguments = (context, settings | {"max_gen_toks": new})
            pairs = list(zip(answers(ours, entry), answers(peer, entry), strict=True))
            equal = sum(same_answer(a, b) for a, b in pairs)
            case = f"{name}, {len(pairs)} items: the same answer"
            yield plain_row(case, equal, len(pairs), PEER, "items equal", place)
            if any(a.log_probabilities for a, _ in pairs):
                nats = max(nats_apart(a, b) for a, b in pairs)
                case, ratio = f"{name}: largest difference of log-likelihoods", ALLOWED_NATS / max(nats, 1e-12)
                yield plain_row(case, nats, ALLOWED_NATS, "allowed", "max nats", place, ratio)

    def throughput(self, items: int, rounds: int) -> Row:
        """Return a row of HellaSwag items per second, from prompts to answers; ours encodes all text in each turn."""
        from ..train.flops import count_parameters

        trial, entry = load_entry("hellaswag", min(items, TRIAL_ITEMS)), load_entry("hellaswag", items)
        peers = {size: self.peer(size) for size in BATCH_SIZES}
        trials = [Contender(str(size), partial(answers, lm, trial)) for size, lm in peers.items()]
        take_turns([*trials, Contender("ours", lambda: answers(self.ours(), trial))], 1, 1, self.device)
        size = int(fastest(trials).name)
        ours = Contender("ours", lambda: answers(self.ours(), entry))
        peer = Contender(PEER, lambda: answers(peers[size], entry))
        take_turns([ours, peer], rounds, 1, self.device)
        millions = count_parameters(self.loaded.config.model).N_total / 1e6
        case = f"HellaSwag, {len(entry.indices)} items, {millions:.1f}M parameters, fp32"
        name = f"{PEER}, batch size {size}"
        return timed_row(case, len(entry.indices), "items/s", ours.seconds, peer.seconds, name, self.device)


def load_entry(name: str, limit: int | None) -> SuiteTask:
    from ..evaluate.tasks.tasks import load_suite

    return next(iter(load_suite(name, limit).values()))


def answers(lm: Any, entry: SuiteTask) -> list[ItemResult]:
    """Return the result of each item, answered by the model `lm` through lm-eval's evaluator."""
    from ..evaluate.harness import answer_task

    with redirect_stderr(io.StringIO()):  # hides the peer's progress bars
        return answer_task(lm, entry)[0]


def same_answer(ours: ItemResult, theirs: ItemResult) -> bool:
    """Return whether both sides gave the same answer, with equal metrics of lm-eval."""

    def choice(item: ItemResult) -> int | None:
        nats = item.log_probabilities
        return nats.index(max(nats)) if nats else None

    first, second = ((item.index, item.values, item.answer, choice(item)) for item in (ours, theirs))
    return first == second


def nats_apart(ours: ItemResult, theirs: ItemResult) -> float:
    """Return the largest difference of two items' log-likelihoods; infinite if one is not a number."""
    differences = [abs(a - b) for a, b in zip(ours.log_probabilities, theirs.log_probabilities, strict=True)]
    return max((math.inf if math.isnan(d) else d for d in differences), default=0.0)
