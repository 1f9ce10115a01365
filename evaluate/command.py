"""lm-eval's own command, whose `--model isoflop` is a checkpoint of ours.

lm-eval 0.4.13 looks for models among its own modules alone, so ours is registered before its parser runs. Tasks, shots,
limits and output are lm-eval's; what a checkpoint answers is what `isoflop evaluate` would ask it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lm_eval import _cli
from lm_eval.api import registry

from ..train.errors import UserError
from ..train.hardware import on_gpu, pick_device
from .checkpoint import BATCH_TOKENS, PRECISIONS, check_settings, load_scored
from .harness import CheckpointLM

NAME = "isoflop"


class RegisteredLM(CheckpointLM):
    """A checkpoint by the words of `--model_args`; lm-eval's sizes of batches in rows are not used."""

    def __init__(
        self,
        checkpoint: str = "",  # a checkpoint directory, or a run directory (its newest valid checkpoint)
        precision: str = "fp32",
        batch_tokens: int | None = None,
        device: str | None = None,
        **others: Any,
    ) -> None:
        if unknown := others.keys() - {"batch_size", "max_batch_size"}:
            raise UserError(
                f"--model_args has {', '.join(sorted(unknown))}; it takes checkpoint, precision, batch_tokens"
            )
        if not checkpoint:
            raise UserError("--model_args has no checkpoint; it must have checkpoint=FOLDER, of a checkpoint or a run")
        check_settings(precision, batch_tokens, None)
        # lm-eval's own default is cuda:0, where there is a GPU or not.
        picked = pick_device("auto" if device in (None, "cuda:0") else str(device), "--device")
        one = load_scored(Path(checkpoint), picked.type, PRECISIONS[precision])
        room = batch_tokens or BATCH_TOKENS["cuda" if on_gpu(picked) else "cpu"]
        super().__init__(one.model, one.tokenizer, one.config.data.sequence_length, picked.type, room)


def run_lm_eval(arguments: list[str]) -> None:
    """Runs `lm_eval ARGUMENTS`, by its own parser and with its own output."""
    if NAME not in registry.MODEL_REGISTRY:
        registry.register_model(NAME)(RegisteredLM)
    before = sys.argv
    sys.argv = ["isoflop lm_eval", *arguments]  # read there, and changed
    try:
        parser = _cli.HarnessCLI()
        parser.execute(parser.parse_args())
    finally:
        sys.argv = before
