"""What a checkpoint fails on: the held-out windows of its own corpus with the highest loss, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..train.data.loader import bytes_of, validation_windows
from ..train.data.shards import at_hand
from ..train.heldout import held_out
from ..train.model import sequence_losses

if TYPE_CHECKING:
    from ..train.checkpoint import LoadedCheckpoint


def worst_windows(loaded: LoadedCheckpoint, count: int = 20) -> dict[str, Any]:
    """Held-out loss of a checkpoint on the data that its run was trained beside, and where it is worst.

    The numbers are those of `train.heldout.validate_checkpoint`, from the same single pass.

    Returns:
        val_loss (nats a token), val_loss_se, val_bpb, and `worst`: up to `count` windows of {index, loss (nats a
        token), text (of the predicted tokens)}, highest loss first; windows of equal loss in their order. A loss
        that is no number comes first.

    Raises:
        UserError: where the corpus is not at hand, or has changed.
    """
    config = loaded.config
    length = config.data.sequence_length
    windows = validation_windows(at_hand(config.data, loaded.tokenizer), length, config.data.validation_tokens)
    losses = sequence_losses(loaded.model, torch.from_numpy(windows))  # (n,) nats
    numbers = held_out(losses, length, bytes_of(windows[:, 1:], loaded.tokenizer))
    order = torch.sort(losses, descending=True, stable=True).indices[:count].tolist()  # NaN counts as the largest
    worst = [
        {"index": i, "loss": losses[i].item() / length, "text": loaded.tokenizer.decode(windows[i, 1:])} for i in order
    ]
    return vars(numbers) | {"worst": worst}
