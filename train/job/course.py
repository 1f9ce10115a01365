"""How a run is going: its clock, its smoothed loss, and when it counts as diverged. Carried through checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import RunConfig
from ..errors import Diverged
from ..precision import PastStep, SkipBudget

SMOOTHING = 0.95  # per step, of the training loss whose rise tells a divergence


@dataclass
class Course:
    """What of a run's course is carried through a checkpoint beside weights and moments."""

    step: int = 0
    seconds: float = 0.0
    smoothed_loss: float | None = None  # None before the first step
    best_loss: float | None = None
    bad_steps: int = 0  # batches that made no update, because a loss or a gradient was no number
    overflows: int = 0  # fp16: steps in a row whose gradients overflowed

    def look(self, past: Sequence[PastStep], config: RunConfig) -> list[str]:
        """Looks at steps that were taken since the last look; returns what is worth a line in the log.

        Raises:
            Diverged: a loss or gradient was no number once too often, or the loss rose out of its band.
        """
        budget = SkipBudget(config.skip_bad_steps, config.precision, self.bad_steps, self.overflows)
        verdict = budget.judge(past)
        self.bad_steps, self.overflows = budget.bad, budget.overflows
        for item in verdict.trained:
            self._watch_level(item.step, item.loss, config.max_loss_rise)
        if verdict.diverged is not None:
            raise Diverged(verdict.diverged)
        return [f"step {step} made no update: {reason}" for step, reason in verdict.skipped]

    def _watch_level(self, step: int, loss: float, limit: float) -> None:
        before = loss if self.smoothed_loss is None else self.smoothed_loss
        smoothed = self.smoothed_loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        best = self.best_loss = smoothed if self.best_loss is None else min(self.best_loss, smoothed)
        if smoothed > best + limit:
            raise Diverged(
                f"the smoothed loss rose from {best:.3f} to {smoothed:.3f} at step {step}, more than "
                f"max_loss_rise {limit}"
            )
