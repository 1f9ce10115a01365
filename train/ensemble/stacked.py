"""The members of an ensemble: E models of one shape with a leading axis, their training state, and the step they take.

With E members, n = B T tokens of each, width w, rows V of the padded vocabulary:

    weights     (E, out, in), (E, w), (E, V, w)     by the names of `GPT.named_parameters`
    streams     (E, n, w)                           a product is one batched product over members
    attention   (E B, T, heads, d)                  has no weights: it sees E times as many sequences
    state       (E, bucket)                         one row per member, laid out as `parallel/zero.py` does for one run

No operation mixes members, so what one does (a NaN too) reaches no other. On CPUs a member's numbers are those of a run
alone bit for bit, so a run can leave an ensemble or join one. There each thread takes some members through their whole
step, as many at a time as the cache holds streams of: cutting every operation in two would have threads wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import ModelConfig, OptimizerConfig, RunConfig
from ..data.loader import TrainStream
from ..data.shards import Shards
from ..hardware import CUDA, on_gpu, read
from ..model.backends import Backend
from ..model.block import apply_rotary, lookup, query_key_value, rms_norm, swiglu
from ..model.compiled import Compiled
from ..model.gpt import GPT, sequence_losses
from ..model.loss import linear_cross_entropy
from ..model.parametrization import empty_model, initial_weights, output_scale, parameter_groups
from ..model.shape import model_shape
from ..optimizer.registry import OPTIMIZERS
from ..parallel.layout import Held, whole_placement
from ..parallel.mesh import Mesh
from ..parallel.whole import Matrices
from ..parallel.zero import StepResult, first_whole, layouts_of, square
from ..precision import compute_dtype
from ..schedule import learning_rate_factor

# Elements of the residual streams of members that a CPU's thread works on together: 1 MiB in fp32, what a core's
# second cache holds.
STREAM_AT_A_TIME = 2**18

Weights = Mapping[str, Tensor]


class StackedGPT:
    """E models that share a shape. It owns no weights, and follows whoever changes them.

    Args:
        template: a GPT of that shape, for its angles and attention.
        weights: of all members, at least fp32.
        output_scale: (E,).
        dtype: of products and streams.
    """

    def __init__(
        self, template: GPT, weights: Weights, output_scale: Tensor, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        self.template, self.weights, self.output_scale, self.dtype = template, weights, output_scale, dtype
        self.config = template.config
        whole = partial(_block, self.config, template.backend)
        self._block = torch.compile(whole) if compiled else whole
        names = [name.removeprefix("blocks.0.") for name in weights if name.startswith("blocks.0.")]
        self._of_block = [{n: weights[f"blocks.{i}.{n}"] for n in names} for i in range(self.config.depth)]

    def losses(self, tokens: Tensor, targets: Tensor, z_losses: Sequence[float], reduction: str = "mean") -> Tensor:
        """Every member's mean loss with its z-loss, in nats, fp32: ids (E, B, T) -> (E,), or with `none` (E, BT)."""
        vocabulary = self.config.vocab_size
        assert vocabulary is not None
        # A tied table is cast once, so that its two gradients are added in the type in which a run alone adds them.
        table = self.weights["embedding.weight"].to(self.dtype)
        head = table if self.config.tied_embeddings else self.weights["head.weight"].to(self.dtype)
        # Not by an index: the derivative of unbind is one stack, that of an index a whole tensor of zeros.
        members = zip(
            self._last_hidden(tokens, table).unbind(), head.unbind(), targets.flatten(1), z_losses, strict=True
        )
        fused = self.template.head.fused
        losses = [linear_cross_entropy(x, w, ids, vocabulary, reduction, z, fused) for x, w, ids, z in members]
        return torch.stack(losses)

    def _last_hidden(self, tokens: Tensor, table: Tensor) -> Tensor:
        """What the head reads, (E, n, w), for rows of the tables (E, V, w)."""
        config, weights = self.config, self.weights
        members, batch, time = tokens.shape
        cos, sin = self.template.cos[:time], self.template.sin[:time]
        x = lookup(tokens.flatten(1), table)
        seen = self.template.seen(tokens.view(members * batch, time), x.dtype)
        for of_block in self._of_block:
            x = self._block(x, of_block, cos, sin, seen[0] if seen else None)
        # A scalar of `GPT` is not rounded to bf16 before the product: nor is this.
        return (_norm(x, weights["norm.weight"], config.norm_eps) * self.output_scale[:, None, None]).to(self.dtype)


def _block(
    config: ModelConfig, backend: Backend, x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, seen: Tensor | None
) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return _norm(x, weights[f"{name}_norm.weight"], config.norm_eps)

    def head_norm(name: str, x: Tensor) -> Tensor:
        return norm(f"attention.{name}", x.unflatten(0, (len(weights["attention_norm.weight"]), -1))).flatten(0, 1)

    def times(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"].to(x.dtype)
        return torch.bmm(x, weight.transpose(1, 2)) if torch.compiler.is_compiling() else _Product.apply(x, weight)

    heads, kv_heads = config.heads, config.num_kv_heads
    # (E, n, …) -> (E B, T, heads, d): in attention members are sequences among sequences.
    products = times(norm("attention", x), "attention.qkv")
    if config.qkv_bias:
        products = products + weights["attention.qkv_bias"].to(x.dtype)[:, None]
    fused = products.view(-1, len(cos), heads + 2 * kv_heads, config.head_dim)
    norms = tuple(partial(head_norm, name) for name in ("query", "key")) if model_shape(config).head_norms else ()
    query, key, value = query_key_value(fused, heads, kv_heads, norms, lambda x: apply_rotary(x, cos, sin))
    mixed = backend.attend(query, key, value, seen, config.window).reshape(*x.shape[:-1], -1)
    x = x + times(mixed, "attention.out")
    return x + times(swiglu(times(norm("mlp", x), "mlp.gate_up")), "mlp.down")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each member's own norm: (E, …, w), weight (E, w) -> (E, …, w)."""
    return rms_norm(x, weight.to(x.dtype).view(len(weight), *(1,) * (x.dim() - 2), -1), eps)


class _Product(torch.autograd.Function):
    """y (E, n, m) = x (E, n, k) W^T; dx = dy W, dW = dy^T x. Autograd's own dW would come out transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.bmm(grad, weight), torch.bmm(grad.transpose(1, 2), x)


class Rows:
    """The training state of E models of one shape: every member's update is the one that `Zero` makes, bit for bit on
    CPUs.

    A parameter of all members is a strided view of a matrix, which batched products take as it is; a member's state is
    rows, which the fused AdamW takes whole.

    Args:
        template: on any device; names and shapes are all that is read.
        bucket_mb: MiB of gradients that a run alone would keep together.
        dtype: of everything; fp64 for tests.
    """

    def __init__(
        self,
        template: GPT,
        optimizers: Sequence[OptimizerConfig],
        bucket_mb: float,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.optimizers = list(optimizers)
        self._groups = [parameter_groups(template, optimizer) for optimizer in self.optimizers]
        self._shapes = {name: tuple(p.shape) for name, p in template.named_parameters()}
        self._layouts = layouts_of(template, self._groups[0], bucket_mb, dtype, 1, gathered=False)
        self._segments = [
            (number, group, place) for number, layout in enumerate(self._layouts) for group, place in layout.segments
        ]
        self._whole, sizes = first_whole(self._groups[0]), [layout.size for layout in self._layouts]
        placements = {name: whole_placement(shape) for name, shape in self._shapes.items()}
        owned = [(0, size) for size in sizes]
        self._matrices = Matrices(
            template.config, self._layouts, self._whole, owned, placements, Mesh(), replicated=True
        )
        self._state = [
            [torch.zeros((len(self.optimizers), size), dtype=dtype, device=device) for size in each]
            for each in (sizes, sizes, sizes, self._matrices.starts)
        ]
        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = self._state
        self.updates = torch.zeros(len(self.optimizers), dtype=torch.float32, device=device)  # of each, as in `Zero`
        # The largest norm of each, infinity where nothing is clipped.
        limits = [optimizer.gradient_clip or math.inf for optimizer in self.optimizers]
        self._limits = torch.tensor(limits, dtype=dtype, device=device)

    def parameters(self, rows: slice) -> dict[str, Tensor]:
        """The weights of some members, (e, …) by name: leaves, views of `weight`."""
        return {name: view.detach().requires_grad_() for name, view in self._views(self.weight, rows).items()}

    def gradients(self, rows: slice) -> list[Tensor]:
        """Where the gradients of `parameters` are to be written, in their order."""
        return list(self._views(self.grad, rows).values())

    def _views(self, matrices: Sequence[Tensor], rows: slice) -> dict[str, Tensor]:
        found = {
            slot.name: matrix[rows, slot.start : slot.stop].unflatten(1, self._shapes[slot.name])
            for matrix, layout in zip(matrices, self._layouts, strict=True)
            for slot in layout.slots
            if slot.stop <= matrix.shape[1]  # a second moment need not be all parameters'
        }
        return {name: found[name] for name in self._shapes if name in found}

    def load(self, row: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the weights of a member: tensors on the CPU by name, all of them."""
        own = self._views(self.weight, slice(row, row + 1))
        for name, value in weights:
            own[name][0].copy_(value)

    def held(self, row: int) -> list[Held]:
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
            factors: on the peak learning rates of each of them.
            losses: (e,) the batches' mean losses.
        """
        slopes = zip(*(grad[rows].unbind() for grad in self.grad), strict=True)
        norms = torch.stack([torch.stack([square(part, part.dtype) for part in own]).sum() for own in slopes]).sqrt()
        skipped = 1 - (torch.isfinite(norms) & torch.isfinite(losses)).float()
        # Spelled as PyTorch computes the number over a tensor of `Zero`, whose bits a division would not give.
        divisors = ((norms + 1e-6).reciprocal() * self._limits[rows]).clamp(max=1.0).reciprocal().float()
        counts = self.updates[rows] + 1
        # One at a time: the fused kernel has one learning rate a call.
        numbers = (factors, self._groups[rows], self.optimizers[rows], counts, divisors, skipped)
        members = zip(*numbers, strict=True)
        directions = self._directions(rows, divisors, skipped)
        for row, (factor, groups, options, count, divisor, skip) in enumerate(members, rows.start):
            for number, group, (start, stop) in self._segments:
                weight, slope, *moments = (matrices[number][row, start:stop] for matrices in self._state)
                if group >= self._whole:
                    first = self._matrices.starts[number]
                    slope = directions[number][row - rows.start, start - first : stop - first]
                its = groups[group]
                rule = {"rate": its.learning_rate * factor, "decay": its.weight_decay, "eps": its.eps}
                state = {"moments": moments, "count": count, "divisor": divisor, "skipped": skip}
                OPTIMIZERS[its.optimizer].update(weight, slope, options=options, **rule, **state)
        self.updates[rows] += 1 - skipped
        return [StepResult(*member) for member in zip(losses, norms, skipped, strict=True)]

    def _directions(self, rows: slice, divisors: Tensor, skipped: Tensor) -> list[Tensor]:
        """As those of `Zero`, (e, elements) for each bucket; the matrices of all members are one batch."""
        rule, directions = OPTIMIZERS[self.optimizers[0].kind].whole, list[Tensor]()
        if rule is not None:
            for start, *state in zip(self._matrices.starts, self.grad, self.exp_avg, strict=True):
                members = zip(
                    *(each[rows, start:] for each in state), self.optimizers[rows], divisors, skipped, strict=True
                )
                directions.append(torch.stack([rule.direction(*member) for member in members]))
            self._matrices.transform(directions, rule.transform, self.optimizers[0])
        return directions

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all other members; earlier `parameters` and `held` are of no use any more."""
        self.optimizers = [self.optimizers[row] for row in rows]
        self._groups = [self._groups[row] for row in rows]
        index = torch.tensor(rows, device=self.updates.device)
        self._state = [[matrix[index] for matrix in matrices] for matrices in self._state]
        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = self._state
        self.updates, self._limits = self.updates[index], self._limits[index]


class Member:
    """One run's part of an ensemble, to its trainer what a `Stepper` is, but for the step, which all take at once."""

    def __init__(self, stepper: StackedStepper, index: int, config: RunConfig, stream: TrainStream) -> None:
        self.stepper, self.index, self.config, self.stream = stepper, index, config, stream
        self.micro = config.optimizer.batch_size

    @property
    def row(self) -> int:
        return self.stepper.members.index(self)

    def held(self) -> list[Held]:
        return self.stepper.rows.held(self.row)

    def start(self) -> None:
        config = self.config
        self.stepper.rows.load(self.row, initial_weights(config.model, config.optimizer, config.seed))

    def state(self) -> dict[str, Any]:
        return {"updates": read(self.stepper.rows.updates[self.row]).item(), "loss_scale": {}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.stepper.rows.updates[self.row] = state["updates"]

    def loads(self) -> None:
        """There are no experts in an ensemble."""

    def losses(self, windows: Tensor, beat: Callable[[], None], average: int | None = None) -> Tensor:
        """As `Stepper.losses`, one member, which has no averages: a pass is as large as suits the device alone."""
        model = self.stepper.model(slice(self.row, self.row + 1))

        def each_loss(tokens: Tensor, targets: Tensor) -> Tensor:
            return model.losses(tokens[None], targets[None], [0.0], "none").view(targets.shape)

        return sequence_losses(self.stepper.template, windows, beat=beat, each_loss=each_loss)


class StackedStepper:
    """All members that still train, and the step that they take together."""

    def __init__(
        self, configs: Sequence[RunConfig], device: torch.device, shards: Shards, report: Callable[[str], None] = print
    ) -> None:
        """The members' weights are not set: each `start`s or loads its state. `check_together` accepts the configs."""
        first = configs[0]
        self.device, self.dtype = device, compute_dtype(first.precision)
        self.compiled, length = first.parallel.compile, first.data.sequence_length
        self.template = empty_model(first.model, first.optimizer, length)
        self.template.place_angles(device)
        if first.data.separate_documents:
            self.template.end_of_document = shards.tokenizer.end_of_document
        choice = self.template.set_attention(first.parallel.attention, device, self.dtype)
        self.template.head.fused = first.parallel.cross_entropy == "auto"
        if on_gpu(device):
            report(str(choice))
        self.members = [
            Member(self, index, config, TrainStream(shards, length, config.seed))
            for index, config in enumerate(configs)
        ]
        # A run alone cuts its buckets by the bytes of its compute type; here all is fp32, and cut at the same elements.
        bucket_mb = first.parallel.bucket_mb * torch.float32.itemsize / self.dtype.itemsize
        self.rows = Rows(self.template, [config.optimizer for config in configs], bucket_mb, device)
        self.threads = 1 if on_gpu(device) or self.compiled else torch.get_num_threads()
        several = self.threads > 1
        self.pool = ThreadPoolExecutor(self.threads, "members", torch.set_num_threads, (1,)) if several else None
        self.cache: Compiled | None = None
        if self.compiled:
            self.cache = Compiled(first, len(configs) * first.optimizer.batch_size, device, True, report)
            self.cache.load()
        self._stack()

    def _stack(self) -> None:
        at_once = len(self.members)
        if not on_gpu(self.device):
            first = self.members[0].config
            at_once = max(1, STREAM_AT_A_TIME // (first.batch_tokens * first.model.width))
        # Members that are worked on together, their model, and where the gradients of its weights are to be written.
        self.stacks = [
            (rows, self.model(rows), self.rows.gradients(rows))
            for rows in shares(len(self.members), at_once, self.threads)
        ]

    def model(self, rows: slice) -> StackedGPT:
        """Some members' model, until somebody leaves."""
        configs = [member.config for member in self.members[rows]]
        scales = torch.tensor([output_scale(c.model, c.optimizer) for c in configs], device=self.device)
        return StackedGPT(self.template, self.rows.parameters(rows), scales, self.dtype, self.compiled)

    def step(self, steps: Sequence[int]) -> list[StepResult]:
        """One optimizer step of every member, each at its own step."""
        if self.pool is None:
            results = [result for stack in self.stacks for result in self._step(steps, *stack)]
            if self.cache is not None:
                self.cache.keep()
            return results
        under_way = [self.pool.submit(self._step, steps, *stack) for stack in self.stacks]
        wait(under_way)  # all of them, even if one fails: nobody may write to what others then look at
        return [result for future in under_way for result in future.result()]

    def _step(self, steps: Sequence[int], rows: slice, model: StackedGPT, gradients: list[Tensor]) -> list[StepResult]:
        members = list(zip(self.members[rows], steps[rows], strict=True))
        batches = [member.stream.batch(step, member.micro) for member, step in members]
        tokens = torch.stack([torch.from_numpy(batch) for batch in batches])  # (e, B, T + 1)
        if on_gpu(self.device):
            tokens = CUDA.pin(tokens)
        tokens = tokens.to(self.device, non_blocking=True)
        z_losses = [member.config.optimizer.z_loss for member, _ in members]
        losses = model.losses(tokens[..., :-1], tokens[..., 1:], z_losses)
        torch._foreach_copy_(gradients, torch.autograd.grad(losses.sum(), list(model.weights.values())))
        factors = [learning_rate_factor(member.config, step) for member, step in members]
        return self.rows.step(rows, factors, losses.detach())

    def drop(self, leaving: Sequence[Member]) -> None:
        rows = [row for row, member in enumerate(self.members) if member not in leaving]
        self.members = [self.members[row] for row in rows]
        self.rows.keep(rows)
        self._stack()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


def shares(members: int, at_once: int, threads: int) -> list[slice]:
    """Members in parts of about one size, of at most `at_once`, that keep all threads equally busy."""
    rounds = -(-members // (at_once * threads))
    parts = min(members, rounds * threads)
    bounds = [members * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
