"""Hugging Face folders that other programs saved, as lm-eval's own model for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..train.errors import UserError
from .harness import BATCH_TOKENS
from .tasks.suite import explained, quiet


class FolderLM(HFLM):
    """lm-eval's `hf` model, which also scores continuations longer than its context, by lm-eval's rolling windows."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        advice = "save_pretrained of the model and of its tokenizer writes what is needed"
        with explained(f"{folder} cannot be loaded", advice), quiet():
            super().__init__(str(folder), device=device, dtype=dtype, batch_size="auto")
        if self.prefix_token_id is None:
            raise UserError(f"the tokenizer in {folder} has no bos_token and no eos_token; it must have one of them")
        if device == "cpu":  # there "auto" takes 64 rows, even if memory runs out
            self.batch_size_per_gpu = max(1, BATCH_TOKENS[device] // self.max_length)
        self.truncated, self.failed = set[Any](), set[Any]()  # as in CheckpointLM

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **settings: Any) -> list[tuple[float, bool]]:
        length, parts = self.max_length, list[list[Any]]()
        for strings, context, continuation in requests:
            if len(context) + len(continuation) > length + 1:
                self.truncated.add(strings)
            windows: Any = [(context, continuation)]
            if not 0 < len(continuation) <= length:
                windows = map(make_disjoint_window, get_rolling_token_windows(continuation, context[-1], length, 1))
            parts.append([(strings, *window) for window in windows])
        scores = iter(super()._loglikelihood_tokens([window for part in parts for window in part], *args, **settings))
        answers = [[next(scores) for _ in part] for part in parts]
        return [(sum(nats for nats, _ in answer), all(greedy for _, greedy in answer)) for answer in answers]
