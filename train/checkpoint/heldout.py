"""Loss on the fixed held-out set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..config import RunConfig
from ..data.mixture import HeldOutText
from ..data.text import PLAIN, text_at_hand
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


def score_domains(text: HeldOutText, per_window: Tensor) -> dict[str, float | None]:
    """Compute val_loss, val_loss_se and val_bpb from each window's summed loss in nats, (n,).

    They are means over the domains by their target shares; a mixture also has val_loss_<domain>.
    """
    length = text.windows.shape[1] - 1
    losses, bits, errors, by_domain = 0.0, 0.0, list[float | None](), dict[str, float | None]()
    for name, part in text.parts.items():
        score = held_out(per_window[part.rows], length, part.text_bytes)
        losses += part.share * score.val_loss
        bits += part.share * score.val_bpb
        errors.append(None if score.val_loss_se is None else part.share * score.val_loss_se)
        if name != PLAIN:
            by_domain[f"val_loss_{name}"] = score.val_loss
    finite = [error for error in errors if error is not None]
    error = math.hypot(*finite) if len(finite) == len(errors) else None
    return {"val_loss": losses, "val_loss_se": error, "val_bpb": bits, **by_domain}


def validation_steps(config: RunConfig) -> set[int]:
    """Return the steps after which the held-out set is scored: evenly spaced, including the last one."""
    return {math.ceil(config.steps * i / config.validations) for i in range(1, config.validations + 1)}


def score_windows(loaded: LoadedCheckpoint) -> tuple[np.ndarray, Tensor, dict[str, float | None]]:
    """Score a checkpoint on its held-out text.

    Returns token windows (n, T + 1), the nats of each (n,), and the losses of `score_domains`.
    """
    text = HeldOutText.of(loaded.config.data, text_at_hand(loaded.config.data, loaded.tokenizer))
    losses = sequence_losses(loaded.model, torch.from_numpy(text.windows))
    return text.windows, losses, score_domains(text, losses)
