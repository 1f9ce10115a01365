"""One optimizer step of an ensemble: every member's rows of its batch, forward, backward, update.

Special here:
- a member is at a step of its own, on a schedule of its own; what all share is the shape of their batches;
- to its trainer a member is what a `Stepper` is, but for the step, which is taken for all at once;
- nothing in a step waits for the device, as in `stepper.py`;
- on CPUs each thread takes some members through their whole step: cutting every operation in two would have threads
  wait for one another some hundred times a step. It takes as many at a time as the cache holds streams of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..data.loader import TrainStream
from ..data.shards import Shards
from ..model.compiled import Compiled
from ..model.gpt import SCORED_TOKENS
from ..model.parametrization import empty_model, initial_weights, output_scale
from ..parallel.layout import Held
from ..parallel.zero import StepResult
from ..precision import compute_dtype
from ..schedule import learning_rate_factor
from .rows import Rows
from .stacked import StackedGPT

# Elements of the residual streams of members that a CPU's thread works on together: 1 MiB in fp32, what a core's
# second cache holds.
STREAM_AT_A_TIME = 2**18


class Member:
    """One run's part of an ensemble, to its trainer what a `Stepper` is."""

    def __init__(self, stepper: StackedStepper, index: int, config: RunConfig, stream: TrainStream) -> None:
        self.stepper, self.index, self.config, self.stream = stepper, index, config, stream
        self.micro = config.optimizer.batch_size

    @property
    def row(self) -> int:
        """Where its state lies now."""
        return self.stepper.members.index(self)

    @property
    def zero(self) -> Member:
        """Who owns weights and moments."""
        return self

    def held(self) -> list[Held]:
        """Writable views of weights and moments."""
        return self.stepper.rows.held(self.row)

    def start(self) -> None:
        """Initial weights, those of a run alone."""
        config = self.config
        self.stepper.rows.load(self.row, initial_weights(config.model, config.optimizer, config.seed))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and moments: plain numbers, as `Stepper.state`."""
        return {"updates": self.stepper.rows.updates[self.row].item(), "loss_scale": {}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over `state`, after weights and moments were written to `held()`."""
        self.stepper.rows.updates[self.row] = state["updates"]

    @torch.no_grad()
    def losses(self, windows: Tensor, beat: Callable[[], None]) -> Tensor:
        """Summed nats of each window of tokens (n, T + 1) -> (n,) float64 on the CPU; `beat` before every pass.

        By itself: a pass is as large as it is good for the device, and no larger for more members.
        """
        model = self.stepper.model(slice(self.row, self.row + 1))
        at_once = max(1, SCORED_TOKENS // (windows.shape[1] - 1))
        found = []
        for start in range(0, len(windows), at_once):
            beat()
            chunk = windows[None, start : start + at_once].to(self.stepper.device)
            found.append(model.each_loss(chunk[..., :-1], chunk[..., 1:])[0].double().sum(dim=1).cpu())
        return torch.cat(found)


@dataclass(frozen=True)
class _Stack:
    """Members that go through a step together."""

    rows: slice
    members: Sequence[Member]
    model: StackedGPT
    gradients: list[Tensor]  # where those of the model's weights are to be written


class StackedStepper:
    """Models, gradients and Adam's state of all members that still train, and the step that they take together."""

    def __init__(
        self, configs: Sequence[RunConfig], device: torch.device, shards: Shards, report: Callable[[str], None] = print
    ) -> None:
        """The members' weights are not set: each `start`s or loads its state.

        Args:
            configs: that `check_together` accepts.
            device: of all of them.
            shards: what they are trained on.
            report: gets a line that says which kernel computes attention on a GPU.
        """
        first = configs[0]
        self.device, self.dtype, self.length = device, compute_dtype(first.precision), first.data.sequence_length
        self.compiled = first.parallel.compile
        self.template = empty_model(first.model, first.optimizer, self.length)
        self.template.place_angles(device)
        if first.data.separate_documents:
            self.template.separate_documents(shards.tokenizer.end_of_document)
        choice = self.template.set_attention(first.parallel.attention, device, self.dtype)
        if device.type == "cuda":
            report(str(choice))
        self.members = [
            Member(self, index, config, TrainStream(shards, self.length, config.seed))
            for index, config in enumerate(configs)
        ]
        # A run alone cuts its buckets by the bytes of its compute type; here all is fp32, and cut at the same elements.
        bucket_mb = first.parallel.bucket_mb * torch.float32.itemsize / self.dtype.itemsize
        self.rows = Rows(self.template, [config.optimizer for config in configs], bucket_mb, device)
        self.threads = torch.get_num_threads() if device.type == "cpu" and not self.compiled else 1
        self.pool: ThreadPoolExecutor | None = None
        if self.threads > 1:
            self.pool = ThreadPoolExecutor(self.threads, "members", torch.set_num_threads, (1,))
        self.cache: Compiled | None = None
        if self.compiled:
            self.cache = Compiled(first, len(configs) * first.optimizer.batch_size, device, True, report)
            self.cache.load()
        self._stack()

    def _stack(self) -> None:
        """Who is worked on together."""
        at_once = len(self.members)
        if self.device.type == "cpu":
            first = self.members[0].config
            at_once = max(1, STREAM_AT_A_TIME // (first.batch_tokens * first.model.width))
        self.stacks = [
            _Stack(rows, self.members[rows], self.model(rows), self.rows.gradients(rows))
            for rows in shares(len(self.members), at_once, self.threads)
        ]

    def model(self, rows: slice) -> StackedGPT:
        """Some members' model, on their weights as they are and will be, until somebody leaves."""
        configs = [member.config for member in self.members[rows]]
        scales = torch.tensor([output_scale(c.model, c.optimizer) for c in configs], device=self.device)
        return StackedGPT(self.template, self.rows.parameters(rows), scales, self.dtype, self.compiled)

    def step(self, steps: Sequence[int]) -> list[StepResult]:
        """One optimizer step of every member, each at its own step (0-based)."""
        if self.pool is None:
            results = [result for stack in self.stacks for result in self._step(stack, steps[stack.rows])]
            if self.cache is not None:
                self.cache.keep()
            return results
        under_way = [self.pool.submit(self._step, stack, steps[stack.rows]) for stack in self.stacks]
        wait(under_way)  # all of them, even if one fails: nobody may write to what others then look at
        return [result for future in under_way for result in future.result()]

    def _step(self, stack: _Stack, steps: Sequence[int]) -> list[StepResult]:
        """The step of some members."""
        tokens = self._tokens(stack.members, steps)
        z_losses = [member.config.optimizer.z_loss for member in stack.members]
        losses = stack.model.losses(tokens[..., :-1], tokens[..., 1:], z_losses)
        found = torch.autograd.grad(losses.sum(), list(stack.model.weights.values()))
        torch._foreach_copy_(stack.gradients, found)
        factors = [learning_rate_factor(member.config, step) for member, step in zip(stack.members, steps, strict=True)]
        return self.rows.step(stack.rows, factors, losses.detach())

    def _tokens(self, members: Sequence[Member], steps: Sequence[int]) -> Tensor:
        """The batches of some members, (e, B, T + 1)."""
        batches = [member.stream.batch(step, member.micro) for member, step in zip(members, steps, strict=True)]
        tokens = torch.stack([torch.from_numpy(batch) for batch in batches])
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True)

    def drop(self, leaving: Sequence[Member]) -> None:
        """Takes members out; their state is gone."""
        rows = [row for row, member in enumerate(self.members) if member not in leaving]
        self.members = [self.members[row] for row in rows]
        self.rows.keep(rows)
        self._stack()

    def close(self) -> None:
        """Ends the threads; safe to call twice."""
        if self.pool is not None:
            self.pool.shutdown()


def shares(members: int, at_once: int, threads: int) -> list[slice]:
    """Members in parts of about one size, of at most `at_once`, that keep all threads busy alike. Pure."""
    rounds = -(-members // (at_once * threads))
    parts = min(members, rounds * threads)
    bounds = [members * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
