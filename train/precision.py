"""The number formats of a step: types, TF32, the loss scale of fp16, and which bad batches may be skipped.

Special here:
- weights and activations are in the run's precision, with no autocast; the master weights are fp32 (parallel/zero.py);
- the loss scale lives on the device and is updated there from the skip that all ranks agreed on, so it is the same
  everywhere, and no step waits for the host;
- what a skipped step means is decided on the host, later and for many steps at once (`SkipBudget`).

fp16 and dynamic loss scaling: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FIRST_SCALE, SMALLEST_SCALE, LARGEST_SCALE = 2.0**16, 1.0, 2.0**24
GROWTH_STEPS = 2000  # good steps in a row after which the scale doubles
# Overflows in a row that take the scale from its ceiling to its floor, and one more.
MOST_OVERFLOWS = round(math.log2(LARGEST_SCALE / SMALLEST_SCALE)) + 1


def compute_dtype(precision: str) -> torch.dtype:
    """Type of weights, activations and gradients in a step: fp32 | bf16 | fp16."""
    return _DTYPES[precision]


def set_matmul_precision(tf32: bool) -> None:
    """Lets fp32 matrix products on NVIDIA GPUs round their inputs to TF32, or not. CPUs are not touched.

    A setting of the process, not of a model: every run sets it, either way, so none depends on what ran before it.
    """
    # Of PyTorch's ways this one alone fits: `fp32_precision`, which is to replace it, leaves what the compiler still
    # reads in a state that it refuses (pytorch issue 166387); `set_float32_matmul_precision` changes CPUs too.
    torch.backends.cuda.matmul.allow_tf32 = tf32


class LossScaler:
    """Dynamic loss scaling for fp16: halves on a skipped step, doubles after `GROWTH_STEPS` good ones in a row.

    Attributes:
        scale: what the loss is multiplied by and gradients must be divided by, an fp32 scalar on the device; None in
            fp32 and bf16, whose range needs no scaling.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self.scale: Tensor | None = None
        if precision == "fp16":
            self.scale = torch.tensor(FIRST_SCALE, device=device)
            self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """What to call backward on."""
        return loss if self.scale is None else loss * self.scale

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """After every step, with whether all ranks skipped it, a scalar on the device. Waits for nothing."""
        if self.scale is None:
            return
        skipped = skipped.bool()
        good_steps = (self._good_steps + 1).masked_fill_(skipped, 0)
        grows = good_steps == GROWTH_STEPS
        self.scale.mul_(1 + grows - 0.5 * skipped).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
        self._good_steps.copy_(good_steps.masked_fill_(grows, 0))  # in place: a recorded step reads this tensor

    def state(self) -> dict[str, float]:
        """Plain numbers for the checkpoint; empty where there is no scale. Waits for the device."""
        if self.scale is None:
            return {}
        return {"scale": self.scale.item(), "good_steps": int(self._good_steps.item())}

    def load_state(self, state: dict[str, float]) -> None:
        """Goes on from `state()` of the same precision."""
        if self.scale is not None:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])


@dataclass(frozen=True)
class PastStep:
    """What is known of a step once the host has looked at it."""

    step: int
    loss: float  # of the whole batch, over all ranks
    skipped: bool  # weights and moments were left alone, on every rank


@dataclass
class Verdict:
    """What the steps of one look amount to."""

    trained: list[PastStep] = field(default_factory=list)  # those that changed the weights
    skipped: list[tuple[int, str]] = field(default_factory=list)  # step and reason, for the metrics
    diverged: str | None = None  # why the run must end; later steps were not judged


@dataclass
class SkipBudget:
    """Judges steps that were not normal. `bad` and `overflows` go through the checkpoint.

    A batch is bad when its loss or its gradient norm is not finite. In fp16 a finite loss with a gradient that is not
    is an overflow, which the loss scale answers, and which is free until the scale has nothing left to give.
    """

    allowed: int  # bad batches a run may have (`skip_bad_steps`); one more and it has diverged
    precision: str
    bad: int = 0  # so far
    overflows: int = 0  # in a row, up to the last step that was judged

    def judge(self, past: Iterable[PastStep]) -> Verdict:
        """Judges steps in their order; what it remembers of them are its two counts."""
        verdict = Verdict()
        for item in past:
            reason = self._count(item)
            if reason is None:
                verdict.trained.append(item)
                continue
            verdict.skipped.append((item.step, reason))
            verdict.diverged = self._end(item.step, reason)
            if verdict.diverged is not None:
                break
        return verdict

    def _count(self, item: PastStep) -> str | None:
        """Why the step was no normal one; None if it was."""
        finite = math.isfinite(item.loss)
        overflow = item.skipped and finite and self.precision == "fp16"
        self.overflows = self.overflows + 1 if overflow else 0
        if overflow:
            return "the gradient overflowed fp16"
        if finite and not item.skipped:
            return None
        self.bad += 1
        return "the gradient norm is not finite" if finite else f"the loss is {item.loss}"

    def _end(self, step: int, reason: str) -> str | None:
        """Why a run whose last step was no normal one must end; None if it goes on."""
        if self.overflows >= MOST_OVERFLOWS:
            return f"{reason} at step {step}, for the {self.overflows}th time in a row, at a loss scale of 1"
        if self.bad > self.allowed:
            spent = f", and skip_bad_steps {self.allowed} is spent" if self.allowed else ""
            return f"{reason} at step {step}{spent}"
        return None
