"""Time our fused head and loss and `F.cross_entropy` of the logits, forward and backward: `isoflop bench loss`.

The peer is the usual code, `F.cross_entropy(F.linear(x, W).float(), targets)`. On a GPU the peers are also the same
compiled, and Liger's kernel if it is installed; the fastest counts.
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
from .timing import Peak, Row, measuring_on, race

ABOUT = (
    "forward and backward; MFU: 6 FLOPs per token and weight of the head over the matmul peak of the same run; "
    "peak memory: what a call needs in addition to its inputs, gradients included"
)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (n, width), weight (vocabulary, width), targets (n,) -> scalar


@dataclass(frozen=True)
class Shape:
    """Tokens, width and vocabulary; the vocabularies are round, so that neither side pads."""

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
    """Yield tokens/s and peak memory for each shape and type; a turn has `steps` calls."""
    with measuring_on(device) as place:
        gpu = place.type == "cuda"
        for dtype in (torch.bfloat16,) if gpu else (torch.float32, torch.bfloat16):
            peak = Peak(place, dtype)
            for shape in shapes or (GPU_SHAPES if gpu else CPU_SHAPES):
                yield _bench(shape, peak, rounds, steps)


def _bench(shape: Shape, peak: Peak, rounds: int, steps: int | None) -> Row:
    leaves = _inputs(shape, peak.dtype, peak.device)
    ours = partial(_with_gradients, partial(linear_cross_entropy, vocab_size=shape.vocabulary), *leaves)
    peers = {name: partial(_with_gradients, loss, *leaves) for name, loss in loss_peers(peak.device).items()}
    case = f"loss {str(peak.dtype).removeprefix('torch.')}, {shape}"
    flops = 6.0 * shape.width * shape.vocabulary * shape.tokens
    return race(case, "tokens/s", shape.tokens, flops, ours, peers, peak, rounds, steps)


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a normalised stream, a head whose logits have variance 1, and random targets."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.tokens, shape.width, generator=generator, device=device)
    weight = torch.randn(shape.vocabulary, shape.width, generator=generator, device=device) * shape.width**-0.5
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _with_gradients(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    value = loss(x, weight, targets)
    return (value, *torch.autograd.grad(value, (x, weight)))


def _logits_and_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def loss_peers(device: torch.device) -> dict[str, Loss]:
    peers: dict[str, Loss] = {"F.cross_entropy of F.linear": _logits_and_loss}
    if device.type == "cuda":
        peers["the same, compiled"] = torch.compile(_logits_and_loss, dynamic=False)
        try:
            liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        except ImportError:
            return peers
        peers["Liger's fused linear cross-entropy"] = lambda x, weight, targets: liger(weight, x, targets)
    return peers
