"""Weights, gradients and Adam's state of the members of an ensemble: flat matrices with a row for each member.

Special here:
- a row is laid out as `parallel/zero.py` lays out the buckets of a run alone, and every member's update is the one that
  is made there, with its own learning rate, decay, betas, clipping and skip: on a CPU bit for bit. So a member goes on
  alone, and a run alone goes on as a member;
- a parameter of all members is a strided view of a matrix, which batched products take as it is; a member's state is
  rows, which the fused AdamW takes whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..config import OptimizerConfig
from ..model.gpt import GPT
from ..model.parametrization import ParameterGroup, parameter_groups
from ..parallel.buckets import Bucket, fill, pack_bucket
from ..parallel.layout import Held, whole_placement
from ..parallel.zero import StepResult, square


class Rows:
    """The training state of E models of one shape.

    Args:
        template: one of them, on any device; names and shapes are all that is read.
        optimizers: of every member.
        bucket_mb: MiB of gradients that a run alone would keep together.
        device: where everything lies.
        dtype: of everything; fp64 for tests.
    """

    def __init__(
        self, template: GPT, optimizers: Sequence[OptimizerConfig], bucket_mb: float, device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.optimizers = list(optimizers)
        self._groups = [parameter_groups(template, optimizer) for optimizer in self.optimizers]
        self._shapes = {name: tuple(p.shape) for name, p in template.named_parameters()}
        self._layouts = _layouts(template, self._groups[0], int(bucket_mb * 2**20 / dtype.itemsize))

        def matrices() -> list[Tensor]:
            shapes = [(len(self.optimizers), layout.size) for layout in self._layouts]
            return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = matrices(), matrices(), matrices(), matrices()
        self.updates = torch.zeros(len(self.optimizers), dtype=torch.float32, device=device)  # of each, as in `Zero`
        # The largest norm of each, infinity where nothing is clipped.
        limits = [optimizer.gradient_clip or math.inf for optimizer in self.optimizers]
        self._limits = torch.tensor(limits, dtype=dtype, device=device)

    def parameters(self, rows: slice) -> dict[str, Tensor]:
        """The weights of some members, (e, …) by name: leaves, views of `weight`."""
        return {name: view.detach().requires_grad_() for name, view in self._views(self.weight, rows).items()}

    def gradients(self, rows: slice) -> list[Tensor]:
        """Where the gradients of `parameters` are to be written, in their order: views of `grad`."""
        return list(self._views(self.grad, rows).values())

    def _views(self, matrices: Sequence[Tensor], rows: slice) -> dict[str, Tensor]:
        found = {
            slot.name: matrix[rows, slot.start : slot.stop].unflatten(1, self._shapes[slot.name])
            for matrix, layout in zip(matrices, self._layouts, strict=True)
            for slot in layout.slots
        }
        return {name: found[name] for name in self._shapes}

    def load(self, row: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the weights of a member: tensors on the CPU by name, all of them."""
        own = self._views(self.weight, slice(row, row + 1))
        for name, value in weights:
            own[name][0].copy_(value)

    def held(self, row: int) -> list[Held]:
        """The training state of a member, as writable views."""
        kinds = {"weight": self.weight, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return [
            Held(name, kind, whole_placement(self._shapes[name]), 0, view.numel(), view.flatten())
            for kind, matrices in kinds.items()
            for name, view in self._views(matrices, slice(row, row + 1)).items()
        ]

    @torch.no_grad()
    def step(self, rows: slice, factors: Sequence[float], losses: Tensor) -> list[StepResult]:
        """Updates some members from their gradients; one whose loss or gradient is not finite is left alone.

        Args:
            rows: the e members.
            factors: on the peak learning rates of each of them.
            losses: (e,) the batches' mean losses.
        """
        slopes = zip(*(grad[rows].unbind() for grad in self.grad), strict=True)
        norms = torch.stack([torch.stack([square(part, part.dtype) for part in own]).sum() for own in slopes]).sqrt()
        skipped = 1 - (torch.isfinite(norms) & torch.isfinite(losses)).float()
        # Spelled as PyTorch computes the number over a tensor of `Zero`, whose bits a division would not give.
        divisors = ((norms + 1e-6).reciprocal() * self._limits[rows]).clamp(max=1.0).reciprocal().float()
        for number, layout in enumerate(self._layouts):
            for group, (start, stop) in layout.segments:
                kinds = (self.weight, self.grad, self.exp_avg, self.exp_avg_sq)
                state = [matrices[number][rows, start:stop] for matrices in kinds]
                self._update(group, rows, state, factors, divisors, skipped)
        self.updates[rows] += 1 - skipped
        parts = (losses.unbind(), norms.unbind(), skipped.unbind())
        return [StepResult(*member) for member in zip(*parts, strict=True)]

    def _update(
        self, group: int, rows: slice, state: Sequence[Tensor], factors: Sequence[float], divisors: Tensor,
        skipped: Tensor,
    ) -> None:  # fmt: skip
        """AdamW on parameters of one group, a member at a time: the fused kernel has one learning rate a call."""
        state = (*state, self.updates[rows].clone(), divisors, skipped)
        settings = zip(factors, self._groups[rows], self.optimizers[rows], strict=True)
        members = zip(settings, *(part.unbind() for part in state), strict=True)
        for (factor, groups, optimizer), weight, slope, first, second, updates, divisor, skip in members:
            adamw(
                [weight], [slope], [first], [second], [], [updates],
                fused=True, grad_scale=divisor, found_inf=skip, amsgrad=False, maximize=False,
                beta1=optimizer.beta1, beta2=optimizer.beta2, eps=optimizer.eps,
                lr=groups[group].learning_rate * factor, weight_decay=groups[group].weight_decay,
            )  # fmt: skip

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all other members; what `parameters` and `held` gave before is of no use any more."""
        self.optimizers = [self.optimizers[row] for row in rows]
        self._groups = [self._groups[row] for row in rows]
        index = torch.tensor(rows, device=self.updates.device)
        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = (
            [matrix[index] for matrix in matrices]
            for matrices in (self.weight, self.grad, self.exp_avg, self.exp_avg_sq)
        )
        self.updates, self._limits = self.updates[index], self._limits[index]


def _layouts(template: GPT, groups: Sequence[ParameterGroup], limit: int) -> list[Bucket]:
    """What `Zero` makes of one process."""
    group_of = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
    numbers = {name: group_of[id(p)] for name, p in template.named_parameters()}
    sizes = {name: p.numel() for name, p in template.named_parameters()}
    return [pack_bucket(run, sizes, numbers, 1) for run in fill(reversed(sizes), sizes, max(1, limit))]
