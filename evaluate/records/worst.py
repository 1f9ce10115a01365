"""What a checkpoint fails on: the held-out windows of its own corpus with the highest loss, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...train.checkpoint.heldout import score_windows

if TYPE_CHECKING:
    from ...train.checkpoint.checkpoint import LoadedCheckpoint


def worst_windows(loaded: LoadedCheckpoint, count: int = 20) -> dict[str, Any]:
    """Held-out loss of a checkpoint on the data that its run was trained beside, and where it is worst.

    Returns:
        val_loss (nats a token), val_loss_se, val_bpb, and `worst`: up to `count` windows of {index, loss (nats a
        token), text (of the predicted tokens)}, highest loss first; windows of equal loss in their order. A loss
        that is no number comes first.

    Raises:
        UserError: where the corpus is not at hand, or has changed.
    """
    windows, losses, numbers = score_windows(loaded)
    length = windows.shape[1] - 1
    order = torch.sort(losses, descending=True, stable=True).indices[:count].tolist()  # NaN counts as the largest
    worst = [
        {"index": i, "loss": losses[i].item() / length, "text": loaded.tokenizer.decode(windows[i, 1:])} for i in order
    ]
    return vars(numbers) | {"worst": worst}
