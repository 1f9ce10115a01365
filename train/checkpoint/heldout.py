"""Loss on the fixed held-out set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..config import RunConfig
from ..data.loader import bytes_of, validation_windows
from ..data.shards import at_hand
from ..model.gpt import sequence_losses

if TYPE_CHECKING:
    from .checkpoint import LoadedCheckpoint


@dataclass(frozen=True)
class HeldOut:
    val_loss: float  # nats per token
    val_loss_se: float | None  # standard error over windows of T tokens; None for a single window
    val_bpb: float  # bits per byte of the text itself


def held_out(per_window: Tensor, length: int, text_bytes: int) -> HeldOut:
    """Compute the held-out loss from the summed loss of each window in nats, `per_window`, (n,).

    Each window has `length` targets; all targets together stand for `text_bytes` bytes of text.
    """
    mean = per_window.mean().item() / length
    error = per_window.std().item() / length / math.sqrt(len(per_window)) if len(per_window) > 1 else None
    return HeldOut(mean, error, per_window.sum().item() / math.log(2) / text_bytes)


def validation_steps(config: RunConfig) -> set[int]:
    """Return the steps after which the held-out set is scored: evenly spaced, including the last one."""
    return {math.ceil(config.steps * i / config.validations) for i in range(1, config.validations + 1)}


def score_windows(loaded: LoadedCheckpoint) -> tuple[np.ndarray, Tensor, HeldOut]:
    """Score a checkpoint on its held-out text. Return token windows (n, T + 1), the nats of each (n,), and the loss."""
    config = loaded.config
    length = config.data.sequence_length
    windows = validation_windows(at_hand(config.data, loaded.tokenizer), length, config.data.validation_tokens)
    losses = sequence_losses(loaded.model, torch.from_numpy(windows))
    return windows, losses, held_out(losses, length, bytes_of(windows[:, 1:], loaded.tokenizer))
