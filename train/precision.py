"""The number formats of a step: types, TF32, and the loss scale of fp16.

Weights and activations have the run's precision, without autocast; the master weights are fp32 (parallel/zero.py).
fp16 and dynamic loss scaling: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .hardware import read

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# FIRST_SCALE and GROWTH_STEPS are the defaults of torch.amp.GradScaler; the limits are chosen by hand.
FIRST_SCALE, SMALLEST_SCALE, LARGEST_SCALE = 2.0**16, 1.0, 2.0**24
GROWTH_STEPS = 2000  # good steps in a row after which the scale doubles
# Overflows in a row that reduce the scale from its maximum to its minimum, plus one.
MOST_OVERFLOWS = round(math.log2(LARGEST_SCALE / SMALLEST_SCALE)) + 1


def compute_dtype(precision: str) -> torch.dtype:
    return _DTYPES[precision]


def set_matmul_precision(tf32: bool) -> None:
    """Set whether fp32 matrix products on NVIDIA GPUs round their inputs to TF32, for the whole process."""
    # PyTorch's other settings do not work here: `fp32_precision`, which will replace this one, leaves a state that the
    # compiler rejects (pytorch issue 166387); `set_float32_matmul_precision` also changes CPUs.
    torch.backends.cuda.matmul.allow_tf32 = tf32


class LossScaler:
    """Dynamic loss scale for fp16: halved at a skipped step, doubled after `GROWTH_STEPS` good ones in a row."""

    def __init__(self, precision: str, device: torch.device) -> None:
        # () fp32 on the device, updated there, so that no step waits for the host; None in fp32 and bf16.
        self.scale: Tensor | None = None
        if precision == "fp16":
            self.scale = torch.tensor(FIRST_SCALE, device=device)
            self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else loss * self.scale

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Update the loss scale after a step; `skipped` () is nonzero if the step changed no weights."""
        if self.scale is None:
            return
        skipped = skipped.bool()
        good_steps = (self._good_steps + 1).masked_fill_(skipped, 0)
        grows = good_steps == GROWTH_STEPS
        self.scale.mul_(1 + grows - 0.5 * skipped).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
        self._good_steps = good_steps.masked_fill_(grows, 0)

    def state(self) -> dict[str, float]:
        """Return the loss scale and the number of good steps in a row, for a checkpoint; {} without a scale."""
        if self.scale is None:
            return {}
        return {"scale": read(self.scale).item(), "good_steps": int(read(self._good_steps).item())}

    def load_state(self, state: dict[str, float]) -> None:
        if self.scale is not None:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
