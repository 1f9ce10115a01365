"""Gathers the rows of a step, and copies them to the device, while the step before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..hardware import CUDA, on_gpu

RING = 3  # steps whose rows are on their way: being read, waiting, and being gathered

Gather = Callable[[int], npt.NDArray[np.int64]]  # the rows of a step, (rows, T + 1)


@dataclass(eq=False)
class Slot:
    pages: Tensor  # (rows, T + 1) on the host, pinned
    rows: Tensor  # the same on the device
    step: int | None = None  # whose rows these are
    events: dict[str, Any] = field(default_factory=dict)  # `copied` and `read`, kept by the lane


class Lane:
    """Copies pages to rows, on a stream of its own beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = CUDA.stream(device)

    def slot(self, shape: tuple[int, int]) -> Slot:
        slot = Slot(CUDA.pinned(shape, torch.int64), torch.empty(shape, dtype=torch.int64, device=self.device))
        CUDA.keep_for(slot.rows, self.stream)
        slot.events = {"copied": CUDA.event(), "read": CUDA.event()}
        self.leave(slot)  # the memory may be one that is still read under another name
        return slot

    def start(self, slot: Slot) -> None:
        """Begins to copy pages to rows, once the rows are no longer read."""
        with CUDA.work_on(self.stream):
            slot.events["read"].wait()
            CUDA.copy(slot.rows, slot.pages)
            slot.events["copied"].record()

    def arrive(self, slot: Slot) -> None:
        """What is computed from here on finds the rows."""
        slot.events["copied"].wait(CUDA.current_stream(self.device))

    def leave(self, slot: Slot) -> None:
        """What was computed up to here is the last that reads the rows."""
        slot.events["read"].record(CUDA.current_stream(self.device))

    def pages_free(self, slot: Slot) -> None:
        """Returns when the pages may be written to."""
        slot.events["copied"].synchronize()


class Prefetch:
    """Hands out the rows of steps. `gather` is called ahead of time, so it must be a pure function of the step."""

    def __init__(self, gather: Gather, shape: tuple[int, int], device: torch.device, lane: Lane | None = None) -> None:
        self.gather = gather
        if lane is None and on_gpu(device):
            lane = Lane(device)
        self._lane = lane
        self._ring = [] if lane is None else [lane.slot(shape) for _ in range(RING)]
        self._read: Slot | None = None  # the place whose rows are in use

    def take(self, step: int) -> Tensor:
        """(rows, T + 1) of a step on the device. They stay as they are until the next call of `ahead`."""
        if self._lane is None:
            return torch.from_numpy(self.gather(step))
        slot = self._ring[step % RING]
        if self._read is not slot:
            self._let_go(self._lane)
        self._fill(self._lane, slot, step)
        self._lane.arrive(slot)
        self._read = slot
        return slot.rows

    def ahead(self, step: int) -> None:
        """Starts on the rows of a step to come, after the work on those in use was given to the device."""
        if self._lane is not None:
            self._let_go(self._lane)
            self._fill(self._lane, self._ring[step % RING], step)

    def _let_go(self, lane: Lane) -> None:
        if self._read is not None:
            lane.leave(self._read)
            self._read = None

    def _fill(self, lane: Lane, slot: Slot, step: int) -> None:
        if slot.step == step:
            return
        slot.step = None  # until the rows are there, should gathering fail
        lane.pages_free(slot)
        np.copyto(slot.pages.numpy(), self.gather(step))
        lane.start(slot)
        slot.step = step
