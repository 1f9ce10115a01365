"""Prefetch: a step's rows are gathered and copied to the device while the step before runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..hardware import CUDA, on_gpu

RING = 3  # slots: one being read, one waiting, one being gathered

Gather = Callable[[int], npt.NDArray[np.int64]]  # the rows of a step, (rows, T + 1)


@dataclass(eq=False)
class Slot:
    pages: Tensor  # (rows, T + 1) on the host, pinned
    rows: Tensor  # the same on the device
    step: int | None = None  # to which the rows belong
    events: dict[str, Any] = field(default_factory=dict)  # `copied` and `read`, set by the lane


class Lane:
    """A separate CUDA stream that copies slots (buffers of rows) to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = CUDA.stream(device)

    def slot(self, shape: tuple[int, int]) -> Slot:
        slot = Slot(CUDA.pinned(shape, torch.int64), torch.empty(shape, dtype=torch.int64, device=self.device))
        CUDA.keep_for(slot.rows, self.stream)
        slot.events = {"copied": CUDA.event(), "read": CUDA.event()}
        self.leave(slot)  # reused memory may still be read by earlier work
        return slot

    def start(self, slot: Slot) -> None:
        """Start copying a slot's rows to the device, after queued work that reads its previous rows."""
        with CUDA.work_on(self.stream):
            slot.events["read"].wait()
            CUDA.copy(slot.rows, slot.pages)
            slot.events["copied"].record()

    def arrive(self, slot: Slot) -> None:
        """Make work queued later on the compute stream wait for the slot's copy."""
        slot.events["copied"].wait(CUDA.current_stream(self.device))

    def leave(self, slot: Slot) -> None:
        slot.events["read"].record(CUDA.current_stream(self.device))

    def pages_free(self, slot: Slot) -> None:
        """Block until the slot's copy has ended, so that its host memory may be overwritten."""
        slot.events["copied"].synchronize()


class Prefetch:
    """A loader of each step's token rows ahead of time. `gather` must be a pure function of the step."""

    def __init__(self, gather: Gather, shape: tuple[int, int], device: torch.device, lane: Lane | None = None) -> None:
        self.gather = gather
        if lane is None and on_gpu(device):
            lane = Lane(device)
        self._lane = lane
        self._ring = [] if lane is None else [lane.slot(shape) for _ in range(RING)]
        self._read: Slot | None = None  # the slot whose rows are in use

    def take(self, step: int) -> Tensor:
        """Return a step's token ids (rows, T + 1) on the device, valid until the next call of `ahead`."""
        if self._lane is None:
            return torch.from_numpy(self.gather(step))
        slot = self._ring[step % RING]
        if self._read is not slot:
            self._release(self._lane)
        self._fill(self._lane, slot, step)
        self._lane.arrive(slot)
        self._read = slot
        return slot.rows

    def ahead(self, step: int) -> None:
        """Gather a later step's rows and start their copy. Call it after queueing the current step's work."""
        if self._lane is not None:
            self._release(self._lane)
            self._fill(self._lane, self._ring[step % RING], step)

    def _release(self, lane: Lane) -> None:
        if self._read is not None:
            lane.leave(self._read)
            self._read = None

    def _fill(self, lane: Lane, slot: Slot, step: int) -> None:
        if slot.step == step:
            return
        slot.step = None  # stays None if gathering fails
        lane.pages_free(slot)
        np.copyto(slot.pages.numpy(), self.gather(step))
        lane.start(slot)
        slot.step = step
