"""A whole step as a CUDA graph: recorded once, replayed after, so that launching it costs one call.

Special here:
- small models are bound by the host, which needs some microseconds to launch a kernel whatever the kernel does;
  `launch_bound` says from sizes alone whether that is so;
- what is recorded are the kernels and the addresses that they work on. So a step must be a function of buffers that
  stay where they are: its rows and learning rates are written into theirs before each replay, and what it returns
  is cloned, for the next replay writes over it;
- the first steps run as they are, on the stream where they will be recorded: libraries and compiled blocks set
  themselves up there. Recording runs nothing, and the replay that follows is the step itself, so the steps of a run
  are the same with and without.

Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs", pytorch.org/blog/accelerating-pytorch-with-cuda-graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..config import RunConfig
from ..flops import training_flops_per_token

WARM_UP = 3  # steps before recording
# Operations that are no views: of a block, forward and backward, and of all that comes once in a step (look-up, last
# norm, head, loss, clipping, update); counted on a CPU, plain. Fused kernels are fewer: this is an estimate.
LAUNCHES_A_BLOCK, LAUNCHES_ONCE = 83, 86
# What a GPU does in the 5 microseconds that a launch takes, at 2e14 FLOP/s; both are round numbers.
FLOPS_A_LAUNCH = 1e9


def flops_per_launch(config: RunConfig, rows: int) -> float:
    """FLOPs of a step over kernels launched, with `rows` sequences in a micro-batch."""
    flops = training_flops_per_token(config.model, config.data.sequence_length) * rows * config.data.sequence_length
    return flops / (LAUNCHES_A_BLOCK * config.model.depth + LAUNCHES_ONCE)


def launch_bound(config: RunConfig, rows: int) -> bool:
    """Whether launching the kernels of a step is what takes its time."""
    return flops_per_launch(config, rows) < FLOPS_A_LAUNCH


Results = Sequence[Tensor]


class Graph(Protocol):
    """What records: `CudaGraph`, or a stand-in for it."""

    def aside(self) -> AbstractContextManager[None]:
        """Steps before the recording run in here."""

    def capture(self, function: Callable[[], Results]) -> Results:
        """Records what a function does, without doing it; its results have values after a replay."""

    def replay(self) -> None:
        """Does it."""


class CudaGraph:
    """A CUDA graph of one device."""

    def __init__(self, device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream(device)

    def aside(self) -> AbstractContextManager[None]:
        return _Aside(self.stream)

    def capture(self, function: Callable[[], Results]) -> Results:
        # thread_local: what other threads do meanwhile (a checkpoint that is written) does not spoil the recording.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self.graph.replay()


class _Aside(AbstractContextManager[None]):
    """Work on another stream, after all that was given to the present one, and before all that follows."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.present = stream, torch.cuda.current_stream(stream.device)
        self.inside = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.stream.wait_stream(self.present)
        self.inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inside.__exit__(*error)
        self.present.wait_stream(self.stream)


class Recording:
    """A step that is run a few times, then recorded, then replayed.

    Args:
        graph: what records.
        rows: (rows, T + 1) of a step; replays read theirs at this address.
    """

    def __init__(self, graph: Graph, rows: Tensor) -> None:
        self.graph, self.rows = graph, rows
        self.steps = 0  # taken before the recording
        self.results: Results | None = None

    @property
    def warm(self) -> bool:
        """Whether a step can be recorded."""
        return self.steps >= WARM_UP

    def aside(self) -> AbstractContextManager[None]:
        """A step before the recording; counts it."""
        self.steps += 1
        return self.graph.aside()

    def run(self, function: Callable[[], Results]) -> list[Tensor]:
        """What `function` gives, recorded at the first call, and replayed.

        Raises:
            RuntimeError: it cannot be recorded; nothing was done then.
        """
        if self.results is None:
            self.results = self.graph.capture(function)
        self.graph.replay()
        return [result.clone() for result in self.results]
