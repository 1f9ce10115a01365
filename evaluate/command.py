"""Run lm-eval's own command with `--model isoflop`, which is one of our checkpoints.

lm-eval 0.4.13 searches only its own modules for models, so ours is registered before its parser runs. Shots, limits and
output are lm-eval's; answers and staged data are those of `isoflop evaluate`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lm_eval import _cli
from lm_eval.api import registry

from ..train.errors import UserError
from ..train.hardware import pick_device
from .checkpoint import PRECISIONS, check_settings, load_scored
from .harness import CheckpointLM
from .tasks.tasks import staged_by_name

NAME = "isoflop"


class RegisteredLM(CheckpointLM):
    """The lm-eval model of the checkpoint that `--model_args` names."""

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
                f"--model_args has {', '.join(sorted(unknown))}; it accepts checkpoint, precision and batch_tokens"
            )
        if not checkpoint:
            raise UserError("--model_args has no checkpoint; add checkpoint=FOLDER, the folder of a checkpoint or run")
        check_settings(precision, batch_tokens, None)
        # lm-eval's own default is cuda:0, where there is a GPU or not.
        picked = pick_device("auto" if device in (None, "cuda:0") else str(device), "--device")
        loaded = load_scored(Path(checkpoint), picked.type, PRECISIONS[precision])
        length = loaded.config.data.sequence_length
        super().__init__(loaded.model, loaded.tokenizer, length, picked.type, batch_tokens)


def run_lm_eval(arguments: list[str]) -> None:
    if NAME not in registry.MODEL_REGISTRY:
        registry.register_model(NAME)(RegisteredLM)
    before = sys.argv
    sys.argv = ["isoflop lm_eval", *arguments]  # lm-eval reads and changes it
    try:
        parser = _cli.HarnessCLI()
        with staged_by_name(lambda line: print(line, file=sys.stderr)):
            parser.execute(parser.parse_args())
    finally:
        sys.argv = before
