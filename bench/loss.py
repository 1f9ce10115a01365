"""Our head and loss in one beside the logits and `F.cross_entropy`, forward and backward: `isoflop bench loss`.

The peer is what everybody writes, `F.cross_entropy(F.linear(x, W).float(), targets)`; on a GPU the same compiled too,
and Liger's kernel where it is installed, of which the fastest counts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..train.model.loss import linear_cross_entropy
from .contenders import Peak, Row, measuring_on, race

ABOUT = (
    "forward and backward; MFU: 6 FLOPs a token and weight of the head over the matmul peak of the same run; "
    "peak memory is what a call asks for beyond its inputs, gradients included"
)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (n, width), weight (vocabulary, width), targets (n,) -> scalar


@dataclass(frozen=True)
class Shape:
    """What is scored: a round vocabulary, so that nobody has padding."""

    tokens: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"V={self.vocabulary}, {self.tokens} tokens, width {self.width}"


CPU_SHAPES = tuple(Shape(2048, 128, vocabulary) for vocabulary in (256, 4096, 32768))
GPU_SHAPES = tuple(Shape(16384, 1024, vocabulary) for vocabulary in (256, 4096, 32768, 50304, 131072))


def bench_loss(
    device: str = "auto", rounds: int = 15, steps: int | None = None, shapes: Sequence[Shape] = ()
) -> Iterator[Row]:
    """Tokens/s and peak memory from the head's input, both ways through; `steps` None: about 30 ms per turn."""
    with measuring_on(device) as place:
        gpu = place.type == "cuda"
        for dtype in (torch.bfloat16,) if gpu else (torch.float32, torch.bfloat16):
            peak = Peak(place, dtype)
            for shape in shapes or (GPU_SHAPES if gpu else CPU_SHAPES):
                yield _bench(shape, peak, rounds, steps)


def _bench(shape: Shape, peak: Peak, rounds: int, steps: int | None) -> Row:
    leaves = _inputs(shape, peak.dtype, peak.device)
    ours = partial(_both_ways, partial(linear_cross_entropy, vocab_size=shape.vocabulary), *leaves)
    peers = {name: partial(_both_ways, loss, *leaves) for name, loss in loss_peers(peak.device).items()}
    case = f"loss {str(peak.dtype).removeprefix('torch.')}, {shape}"
    flops = 6.0 * shape.width * shape.vocabulary * shape.tokens
    return race(case, "tokens/s", shape.tokens, flops, ours, peers, peak, rounds, steps)


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A normalised stream, a head whose logits have variance 1, and random targets."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.tokens, shape.width, generator=generator, device=device)
    weight = torch.randn(shape.vocabulary, shape.width, generator=generator, device=device) * shape.width**-0.5
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _both_ways(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    value = loss(x, weight, targets)
    return (value, *torch.autograd.grad(value, (x, weight)))


def _logits_and_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def loss_peers(device: torch.device) -> dict[str, Loss]:
    found: dict[str, Loss] = {"F.cross_entropy of F.linear": _logits_and_loss}
    if device.type == "cuda":
        found["the same, compiled"] = torch.compile(_logits_and_loss, dynamic=False)
        try:
            liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        except ImportError:
            return found
        found["Liger's fused linear cross-entropy"] = lambda x, weight, targets: liger(weight, x, targets)
    return found
