"""A run's progress, its smoothed loss and the test for divergence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import RunConfig
from ..errors import Diverged
from ..precision import MOST_OVERFLOWS

SMOOTHING = 0.95  # per step, of the training loss that is tested for divergence; chosen by hand


@dataclass
class RunProgress:
    """The plain numbers that a checkpoint stores in addition to weights and moments."""

    step: int = 0
    seconds: float = 0.0
    smoothed_loss: float | None = None  # None before the first step
    best_loss: float | None = None
    bad_steps: int = 0  # batches without an update, because the loss or a gradient was not finite
    overflows: int = 0  # fp16: steps in a row whose gradients overflowed

    def judge(self, first: int, results: Iterable[tuple[float, bool]], config: RunConfig) -> list[str]:
        """Check finished steps for divergence; return a log line for each step that made no update.

        In fp16 a finite loss with a gradient that is not finite is an overflow, harmless until the loss scale is at its
        minimum.

        Args:
            first: Number of the first step.
            results: For each step, the loss of the whole batch, and whether every rank skipped the update.

        Raises:
            Diverged: Overflows at the minimal loss scale, more than `skip_bad_steps` other bad steps, or a smoothed
                loss that rose by more than `max_loss_rise`.
        """
        lines = []
        for step, (loss, skipped) in enumerate(results, first):
            finite = math.isfinite(loss)
            overflow = skipped and finite and config.precision == "fp16"
            self.overflows = self.overflows + 1 if overflow else 0
            if finite and not skipped:
                self._follow(step, loss, config.max_loss_rise)
                continue
            reason = "the gradient norm is not finite" if finite else f"the loss is {loss}"
            if overflow:
                reason = "the gradient overflowed fp16"
            else:
                self.bad_steps += 1
            where, allowed = f"{reason} at step {step}", config.skip_bad_steps
            if self.overflows >= MOST_OVERFLOWS:
                raise Diverged(f"{where}, {self.overflows} times in a row, down to a loss scale of 1")
            if self.bad_steps > allowed:
                raise Diverged(where + (f", and skip_bad_steps allows only {allowed}" if allowed else ""))
            lines.append(f"step {step} made no update: {reason}")
        return lines

    def _follow(self, step: int, loss: float, limit: float) -> None:
        before = loss if self.smoothed_loss is None else self.smoothed_loss
        smoothed = self.smoothed_loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        best = self.best_loss = smoothed if self.best_loss is None else min(self.best_loss, smoothed)
        if smoothed > best + limit:
            raise Diverged(
                f"the smoothed loss rose from {best:.3f} to {smoothed:.3f} at step {step}, more than "
                f"max_loss_rise {limit}"
            )
