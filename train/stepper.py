"""The optimizer steps of one rank: its rows of the batch, forward, backward, update. No step waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import RunConfig
from .data.loader import TrainStream
from .data.mixture import MixtureStream
from .data.prefetch import Prefetch
from .errors import OutOfMemory
from .files import read_json, write_json
from .flops import rank_blocks
from .hardware import on_gpu, out_of_memory, read, release_memory
from .model.compiled import set_up_compiler
from .model.gpt import sequence_losses
from .model.parametrization import empty_model, initial_weights
from .model.shape import micro_batch_of
from .optimizer.average import copies, newest_shares
from .parallel.mesh import Mesh, all_gather
from .parallel.parallelize import parallelize
from .parallel.pipeline import Pipeline
from .parallel.zero import StepResult, Zero
from .precision import LossScaler, compute_dtype
from .quantization.linear import quantize
from .schedule import learning_rate_factor


def halved_micro_batch(micro_batch: int) -> int | None:
    """Return the largest smaller divisor of a micro-batch size, which still divides the batch; None for size 1."""
    return next((micro_batch // d for d in range(2, micro_batch + 1) if micro_batch % d == 0), None)


class Stepper:
    """Model, gradients, optimizer state and loss scale of one rank."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        device: torch.device,
        stream: TrainStream | MixtureStream,
        report: Callable[[str], None] = print,
        record: Path | None = None,
    ) -> None:
        """Build the model; every rank calls this. The file `record` stores a reduced micro-batch size for restarts."""
        parallel = config.parallel
        self.config, self.mesh, self.device, self.stream, self.report = config, mesh, device, stream, report
        self.dtype = compute_dtype(config.precision)
        self.share = config.optimizer.batch_size // mesh.dp  # this rank's rows of a batch
        self.record, self.micro = record, micro_batch_of(config)  # rows of one forward pass
        halved = ((read_json(record) if record else None) or {}).get("micro_batch_size")
        self.halved = isinstance(halved, int) and halved >= 1
        if isinstance(halved, int) and self.halved:
            # A record from another mesh may not divide this rank's share.
            multiple = mesh.pp if parallel.schedule == "interleaved" else 1
            self.micro = max(n for n in range(1, min(self.micro, halved) + 1) if self.share % (n * multiple) == 0)
        self.gpt = empty_model(config.model, config.optimizer, config.data.sequence_length)
        placements = parallelize(self.gpt, mesh, parallel.sequence_parallel)
        self.noise = quantize(self.gpt, config, placements, mesh.tp_rank, device)
        if mesh.pp > 1:
            blocks = rank_blocks(config)[mesh.pp_rank]
            self.gpt.keep(blocks, blocks[0].start == 0, blocks[-1].stop == config.model.depth)
        self.gpt.place_angles(device)
        self.zero = Zero(
            self.gpt,
            config.optimizer,
            placements,
            mesh,
            stage=parallel.zero,
            dtype=self.dtype,
            device=device,
            averages=copies(config.average),
        )
        self.held = self.zero.held
        self.pipeline = Pipeline(self.gpt, mesh, self.zero.gradients, parallel) if mesh.pp > 1 else None
        self.scaler = LossScaler(config.precision, device)
        self.gpt.set_recompute(parallel.recompute)
        if config.data.separate_documents:
            self.gpt.end_of_document = stream.end_of_document
        choice = self.gpt.set_attention(parallel.attention, device, self.dtype)
        self.gpt.head.fused = parallel.cross_entropy == "auto"
        if on_gpu(device):
            report(str(choice))
        if parallel.compile:
            set_up_compiler(config, device)
            self.gpt.compile_blocks()
        self.prefetch = Prefetch(
            lambda step: stream.batch(step, config.optimizer.batch_size, mesh.dp_rank * self.share, self.share),
            (self.share, config.data.sequence_length + 1),
            device,
        )
        self.batch = torch.empty(0)  # (share, T + 1) tokens of the current step

    def start(self) -> None:
        """Load the initial weights, which are the same for any number of ranks."""
        config = self.config
        weights = initial_weights(config.model, config.optimizer, config.seed)
        self.zero.load(item for item in weights if item[0] in self.zero.names)  # a pipeline stage has only some

    def state(self) -> dict[str, Any]:
        """Return the number of optimizer updates and the loss scaler's state, for a checkpoint."""
        return {"updates": read(self.zero.updates).item(), "loss_scale": self.scaler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Call it after loading the tensors of `held()`: weights and optimizer state."""
        self.zero.updates.fill_(state["updates"])
        self.scaler.load_state(state["loss_scale"])
        self.zero.publish()

    def step(self, step: int) -> StepResult:
        """Make optimizer step `step` (0-based). Returns loss, gradient norm, and whether the update was skipped."""
        self.zero.set_rates(learning_rate_factor(self.config, step))
        self.batch = self.prefetch.take(step)
        if self.noise is not None:
            self.noise.step = step
        total = None
        while total is None:
            try:
                total = self._gradients()
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self._halve(step, error)
            if total is None:  # outside the except clause, so that the error's frames, which hold tensors, are freed
                self.zero.reset_gradients()
                release_memory(self.device)
        result = self.zero.step(total, self.scaler.scale)
        self.zero.keep_averages(newest_shares(self.config.average, step + 1))
        self.scaler.update(result.skipped)
        if step + 1 < self.config.steps:
            self.prefetch.ahead(step + 1)
        return result

    def losses(self, windows: Tensor, beat: Callable[[], None], average: int | None = None) -> Tensor:
        """Return each window's loss in nats, summed over its T targets: (n,) float64 on the CPU, equal on all ranks.

        Args:
            windows: (n, T + 1) token ids.
            beat: Called before every forward pass, to report progress.
            average: Index of the weight average to score; None scores the weights themselves.
        """
        if average is not None:
            with self.zero.with_average(average):
                return self.losses(windows, beat)
        # Each data-parallel rank scores equally many windows, the last one repeatedly if needed: under ZeRO-3 every
        # rank must make the same number of passes.
        share = -(-len(windows) // self.mesh.dp)
        rows = torch.arange(self.mesh.dp_rank * share, (self.mesh.dp_rank + 1) * share).clamp_(max=len(windows) - 1)
        self.gpt.eval()
        try:
            score = partial(sequence_losses, self.gpt) if self.pipeline is None else self.pipeline.losses
            losses = score(windows[rows], beat=beat)
        finally:
            self.gpt.train()
        if self.mesh.cp_group is not None:  # each rank has summed only its part of the tokens
            dist.all_reduce(losses := losses.to(self.device), group=self.mesh.cp_group)
        if self.mesh.dp_group is None:
            return read(losses)
        all_losses = torch.empty(self.mesh.dp * share, dtype=losses.dtype, device=self.device)
        all_gather(all_losses, losses.to(self.device), group=self.mesh.dp_group)
        return read(all_losses[: len(windows)])

    def loads(self) -> Tensor | None:
        """Count each expert's tokens since the last call: (blocks with experts, experts); None without experts."""
        experts = self.config.model.experts
        loads = self.pipeline.loads() if self.pipeline is not None and experts else self.gpt.loads()
        if loads is not None and self.mesh.data_group is not None:
            dist.all_reduce(loads, group=self.mesh.data_group)
        return None if loads is None else read(loads)

    def _gradients(self) -> Tensor:
        """Run forward and backward over this rank's rows. Returns their part of the batch's mean loss, a scalar."""
        passes, z_loss = self.batch.split(self.micro), self.config.optimizer.z_loss
        share = self.micro / self.config.optimizer.batch_size / self.mesh.cp
        if self.pipeline is not None:
            return self.pipeline.step(passes, share, z_loss, self.scaler.scaled)
        total = torch.zeros((), dtype=self.zero.wide, device=self.device)
        for number, rows in enumerate(passes, start=1):
            with self.zero.gradients.micro_batch(last=number * self.micro == self.share):
                loss = self.gpt.loss(rows[:, :-1], rows[:, 1:], z_loss=z_loss) * share
                self.scaler.scaled(loss).backward()
            total += loss.detach()
        return total

    def _halve(self, step: int, error: Exception) -> None:
        """Reduce the micro-batch size after an out-of-memory error; raise OutOfMemory if it is 1 or was reduced before.

        With several ranks always raise, because the other ranks wait in a collective; a restart uses the new size.
        """
        smaller = None if self.halved else halved_micro_batch(self.micro)
        message = f"out of memory at step {step} with parallel.micro_batch_size {self.micro}"
        if smaller is None:
            raise OutOfMemory(f"{message}; set parallel.recompute=full, or use more ranks") from error
        message += f"; it is {smaller} from now on, and optimizer.batch_size stays {self.config.optimizer.batch_size}"
        if self.record is not None:
            write_json(self.record, {"micro_batch_size": smaller, "reason": message})
        if self.mesh.size > 1:
            raise OutOfMemory(message, goes_on=True) from error
        self.report(message)
        self.micro, self.halved = smaller, True
