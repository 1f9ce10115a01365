"""What scoring costs beside the model's own passes, for the first checkpoint of a process and for the second.

A process of its own is timed from its first import on, as a worker of a sweep is one. A pass is everything from token
ids to log-probabilities on the host; the other seconds do not depend on the model, so small random ones do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ..train.config import DataConfig, ModelConfig, RunConfig
from .contenders import THREADS, Row, plain_row


def overhead(folder: Path, asked: tuple[str, int] = ("small", 100), vocab_size: int = 8192) -> Row:
    """`asked`: the tasks, and the items of each."""
    checkpoints = [_untrained(folder / f"untrained-{seed}", vocab_size, seed) for seed in range(2)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = pool.submit(seconds_beside_passes, checkpoints, *asked).result()
    tasks, items = asked
    case = f"overhead of a process's second checkpoint, {tasks}, {items} items per task"
    return plain_row(case, second, first, "its first", "s", "cpu", first / second)


def _untrained(folder: Path, vocab_size: int, seed: int) -> Path:
    """A small checkpoint of random weights, with a BPE that was trained on the standard library."""
    from ..train.checkpoint.checkpoint import ALONE, whole_weights
    from ..train.checkpoint.saver import Saver
    from ..train.data.tokenizers import load_tokenizer
    from ..train.model.parametrization import build_model

    data = DataConfig(max_bytes=1 << 22, tokenizer="bpe", vocab_size=vocab_size, sequence_length=1024)
    model = ModelConfig(width=32, depth=1, heads=2, vocab_size=vocab_size)
    config = RunConfig(model=model, data=data, seed=seed)
    gpt = build_model(model, config.optimizer, data.sequence_length, seed)
    tokenizer = load_tokenizer(data, None, folder.parent / "tokenizer")
    saver = Saver(folder, ALONE, config, tokenizer)
    path = saver.save(1, whole_weights(gpt), {})
    saver.wait()
    return path


def seconds_beside_passes(checkpoints: Sequence[Path], tasks: str, items: int) -> list[float]:
    """Scores one after the other as a worker does; the first one's begin before anything is imported."""
    found = []
    began = time.perf_counter()
    import torch

    from ..evaluate.checkpoint import Evaluator
    from ..evaluate.inference import scoring
    from ..evaluate.tasks.tasks import load_suite

    torch.set_num_threads(THREADS)
    evaluator = Evaluator(load_suite(tasks, items), device="cpu")
    passes: list[float] = []
    time_passes(scoring.Scorer, passes)
    for checkpoint in checkpoints:
        output = checkpoint.parent / "scores.json"
        # A sweep has them from the training; the windows where the loss is worst take a pass of the model.
        held_out: dict[str, Any] = {"val_loss": 0.0, "val_loss_se": None, "val_bpb": 0.0, "worst": []}
        evaluator.evaluate(checkpoint, output, held_out=held_out)
        found.append(time.perf_counter() - began - sum(passes))
        passes.clear()
        began = time.perf_counter()
    return found


def time_passes(scorer: Any, seconds: list[float]) -> None:
    """From here on every pass of the engine of log-likelihoods leaves its seconds."""
    untimed = scorer._pass

    def timed(self: Any, batch: Any) -> Any:
        start = time.perf_counter()
        try:
            return untimed(self, batch)
        finally:
            seconds.append(time.perf_counter() - start)

    scorer._pass = timed
