"""One optimizer step of one rank: its rows of the batch, forward, backward, update.

Special here:
- everything is a pure function of the config and the step: which rows a rank reads, at which learning rate;
- nothing in a step waits for the device: losses, norms and skips stay there until somebody looks;
- a step is a function of buffers on the device (rows, learning rates, weights, moments, loss scale), so that where
  launching its kernels is what takes time it is recorded and replayed (graphs.py);
- a micro-batch that does not fit into memory is halved once, and the step starts anew with the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import RunConfig
from .data.loader import TrainStream
from .data.prefetch import Prefetch
from .errors import OutOfMemory
from .files import read_json, write_json
from .hardware import out_of_memory
from .memory import halved_micro_batch
from .model.compiled import Compiled
from .model.gpt import sequence_losses
from .model.graphs import CudaGraph, Recording, flops_per_launch, launch_bound
from .model.parametrization import empty_model, initial_weights, parameter_groups
from .model.shape import micro_batch_of
from .parallel.mesh import Mesh, all_gather
from .parallel.tensor import split_model
from .parallel.zero import StepResult, Zero
from .precision import LossScaler, compute_dtype
from .schedule import learning_rate_factor


class Stepper:
    """Model, gradients, Adam's state and loss scale of one rank."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, device: torch.device, stream: TrainStream,
        report: Callable[[str], None] = print, record: Path | None = None,
    ) -> None:  # fmt: skip
        """On every rank at the same time. The file `record` remembers a halved micro-batch for the next start."""
        parallel = config.parallel
        self.config, self.mesh, self.device, self.stream, self.report = config, mesh, device, stream, report
        self.dtype = compute_dtype(config.precision)
        self.share = config.optimizer.batch_size // mesh.dp  # rows of a batch that are this rank's
        self.record = record
        halved = None if record is None else read_json(record)
        self.halved = halved is not None
        wanted = micro_batch_of(config)
        if halved is not None:
            # A record of another mesh need not divide this one's share.
            wanted = max(n for n in range(1, min(wanted, halved["micro_batch_size"]) + 1) if self.share % n == 0)
        self.micro = wanted  # rows of one forward pass
        self.gpt = empty_model(config.model, config.optimizer, config.data.sequence_length)
        placements = split_model(self.gpt, mesh, parallel.sequence_parallel)
        self.gpt.place_angles(device)
        self.zero = Zero(
            self.gpt, parameter_groups(self.gpt, config.optimizer), placements, mesh, stage=parallel.zero,
            dtype=self.dtype, optimizer=config.optimizer, bucket_mb=parallel.bucket_mb, device=device,
        )  # fmt: skip
        self.scaler = LossScaler(config.precision, device)
        self.gpt.set_recompute(parallel.recompute)
        if config.data.separate_documents:
            self.gpt.separate_documents(stream.end_of_document)
        choice = self.gpt.set_attention(parallel.attention, device, self.dtype)
        if device.type == "cuda":
            report(str(choice))
        self.compiled: Compiled | None = None
        if parallel.compile:
            self.compiled = Compiled(config, self.micro, device, mesh.rank == 0, report)
            self.compiled.load()
            self.gpt.compile_blocks()
        shape = (self.share, config.data.sequence_length + 1)
        self.prefetch = Prefetch(self._gather, shape, device)
        self.batch = torch.empty(0)  # (share, T + 1) tokens of the step at hand
        self.recording = self._recording(shape)

    def start(self) -> None:
        """Initial weights, the same whatever the mesh."""
        config = self.config
        self.zero.load(initial_weights(config.model, config.optimizer, config.seed))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and moments: plain numbers."""
        return {"updates": self.zero.updates.item(), "loss_scale": self.scaler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over `state`, after weights and moments were written to `zero.held()`."""
        self.zero.updates.fill_(state["updates"])
        self.scaler.load_state(state["loss_scale"])
        self.zero.publish()

    def step(self, step: int) -> StepResult:
        """One optimizer step (0-based): the batch's mean loss, the norm before clipping, and whether it was skipped."""
        self.zero.set_rates(learning_rate_factor(self.config, step))
        self.batch = self.prefetch.take(step)
        result = self._plain(step) if self.recording is None else self._recorded(self.recording, step)
        if step + 1 < self.config.steps:
            self.prefetch.ahead(step + 1)
        if self.compiled is not None:
            self.compiled.keep()
        return result

    def _plain(self, step: int) -> StepResult:
        """The step, kernel by kernel."""
        total = None
        while total is None:
            try:
                total = self._gradients(step)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self._halve(step, error)
        return self._update(total)

    def _recorded(self, recording: Recording, step: int) -> StepResult:
        """The step out of the recording, or one of those that come before it."""
        recording.rows.copy_(self.batch)
        self.batch = recording.rows
        if not recording.warm:
            with recording.aside():
                return self._plain(step)
        try:
            return StepResult(*recording.run(lambda: self._whole(step)))
        except RuntimeError as error:
            if recording.results is not None:  # it could be recorded: this is an error of the step
                raise
            self.report(f"the step is not recorded as a CUDA graph: {str(error).splitlines()[0]}")
            self.recording = None
            self.zero.reset_gradients()
            return self._plain(step)

    def _whole(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The step as it is recorded."""
        result = self._update(self._gradients(step))
        return result.loss, result.norm, result.skipped

    def _update(self, total: Tensor) -> StepResult:
        """What follows the gradients of the batch."""
        result = self.zero.step(None, total, self.scaler.scale)
        self.scaler.update(result.skipped)
        return result

    def _recording(self, shape: tuple[int, int]) -> Recording | None:
        """Where a step is to be recorded. Said, for it changes what a profile shows."""
        config = self.config
        if self.device.type != "cuda" or self.mesh.world is not None or not config.parallel.cuda_graphs:
            return None
        pays = launch_bound(config, self.micro)
        self.report(
            f"CUDA graphs: {'on' if pays else 'off'} (about {flops_per_launch(config, self.micro):.1e} FLOPs a kernel)"
        )
        if not pays:
            return None
        return Recording(CudaGraph(self.device), torch.zeros(shape, dtype=torch.int64, device=self.device))

    def losses(self, windows: Tensor, beat: Callable[[], None]) -> Tensor:
        """Summed nats of each window of tokens (n, T + 1) -> (n,) float64 on the CPU, the same on every rank.

        `beat` is called before every forward pass, for it may be many.
        """
        # Each data-parallel rank scores an equal share, the last windows twice where it does not divide: under ZeRO-3
        # every rank must make the same number of passes.
        share = -(-len(windows) // self.mesh.dp)
        mine = torch.arange(self.mesh.dp_rank * share, (self.mesh.dp_rank + 1) * share).clamp_(max=len(windows) - 1)
        self.gpt.eval()
        try:
            losses = sequence_losses(self.gpt, windows[mine], beat=beat)
        finally:
            self.gpt.train()
        if self.mesh.dp_group is None:
            return losses
        everyone = torch.empty(self.mesh.dp * share, dtype=losses.dtype, device=self.device)
        all_gather(everyone, losses.to(self.device), group=self.mesh.dp_group)
        return everyone[: len(windows)].cpu()

    def _gradients(self, step: int) -> Tensor:
        """Forward and backward over this rank's rows; returns its part () of the batch's mean loss, on the device."""
        batch, z_loss = self.config.optimizer.batch_size, self.config.optimizer.z_loss
        total = torch.zeros((), device=self.device)
        for start in range(0, self.share, self.micro):
            rows = self._rows(step, start)
            with self.zero.micro_batch(last=start + self.micro == self.share):
                loss = self.gpt.loss(rows[:, :-1], rows[:, 1:], z_loss=z_loss) * (self.micro / batch)
                self.scaler.scaled(loss).backward()
            total += loss.detach()
        return total

    def _gather(self, step: int) -> npt.NDArray[np.int64]:
        """This rank's rows of a step, (share, T + 1)."""
        return self.stream.batch(step, self.config.optimizer.batch_size, self.mesh.dp_rank * self.share, self.share)

    def _rows(self, step: int, start: int) -> Tensor:
        """(micro, T + 1) rows of the step at hand, from this rank's row `start` on."""
        return self.batch[start : start + self.micro]

    def _halve(self, step: int, error: Exception) -> None:
        """Once per run: half the micro-batch, the same batch. Of several ranks the others wait inside a collective
        that this one will never join, so there the halving is for the next start.
        """
        smaller = None if self.halved else halved_micro_batch(self.micro)
        words = f"out of memory at step {step} with parallel.micro_batch_size {self.micro}"
        if smaller is None:
            raise OutOfMemory(words) from error
        words += f"; it is {smaller} from here on, and the batch stays {self.config.optimizer.batch_size}"
        if self.record is not None:
            write_json(self.record, {"micro_batch_size": smaller, "reason": words})
        if self.mesh.size > 1:
            raise OutOfMemory(words, goes_on=True) from error
        self.report(words)
        self.recording = None  # it would hold a step's memory beside that of every other use
        self.zero.reset_gradients()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.micro, self.halved = smaller, True
