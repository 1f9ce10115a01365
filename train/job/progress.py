"""How far a run is, its smoothed loss, and when it counts as diverged; carried through checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import RunConfig
from ..errors import Diverged
from ..precision import MOST_OVERFLOWS

SMOOTHING = 0.95  # per step, of the training loss whose rise counts as divergence


@dataclass(frozen=True)
class PastStep:
    """What is known of a step once the host has read its results."""

    step: int
    loss: float  # of the whole batch, over all ranks
    skipped: bool  # weights and moments were left alone, on every rank


@dataclass
class RunProgress:
    """Plain numbers that a checkpoint keeps beside weights and moments."""

    step: int = 0
    seconds: float = 0.0
    smoothed_loss: float | None = None  # None before the first step
    best_loss: float | None = None
    bad_steps: int = 0  # batches without an update, because a loss or a gradient was not finite
    overflows: int = 0  # fp16: steps in a row whose gradients overflowed

    def judge(self, past: Iterable[PastStep], config: RunConfig) -> list[str]:
        """Judges steps in their order; returns a line for the log for each that made no update.

        In fp16 a finite loss with a gradient that is not finite is an overflow, which costs nothing until the loss
        scale is at its floor.

        Raises:
            Diverged: one bad batch more than `skip_bad_steps`, or the loss rose out of its band.
        """
        lines = []
        for item in past:
            finite = math.isfinite(item.loss)
            overflow = item.skipped and finite and config.precision == "fp16"
            self.overflows = self.overflows + 1 if overflow else 0
            if finite and not item.skipped:
                self._follow(item, config.max_loss_rise)
                continue
            reason = "the gradient norm is not finite" if finite else f"the loss is {item.loss}"
            if overflow:
                reason = "the gradient overflowed fp16"
            else:
                self.bad_steps += 1
            where, allowed = f"{reason} at step {item.step}", config.skip_bad_steps
            if self.overflows >= MOST_OVERFLOWS:
                raise Diverged(f"{where}, for the {self.overflows}th time in a row, at a loss scale of 1")
            if self.bad_steps > allowed:
                raise Diverged(where + (f", and skip_bad_steps {allowed} is spent" if allowed else ""))
            lines.append(f"step {item.step} made no update: {reason}")
        return lines

    def _follow(self, item: PastStep, limit: float) -> None:
        before = item.loss if self.smoothed_loss is None else self.smoothed_loss
        smoothed = self.smoothed_loss = SMOOTHING * before + (1 - SMOOTHING) * item.loss
        best = self.best_loss = smoothed if self.best_loss is None else min(self.best_loss, smoothed)
        if smoothed > best + limit:
            raise Diverged(
                f"the smoothed loss rose from {best:.3f} to {smoothed:.3f} at step {item.step}, more than "
                f"max_loss_rise {limit}"
            )
