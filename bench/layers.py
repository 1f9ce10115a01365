"""Time our attention and our loss, forward and backward: `isoflop bench attention` and `isoflop bench loss`.

Every attention takes the layout of a model's projections, (batch, time, heads, head_dim). On a GPU ours is the Triton
kernel, and the peer the fastest of SDPA's backends and flash-attn packages; on a CPU SDPA. The peer of the loss is
`F.cross_entropy(F.linear(x, W).float(), targets)`, on a GPU also compiled, and Liger's kernel if it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..train.model import backends
from ..train.model.loss import linear_cross_entropy
from .timing import Peak, Row, measuring_on, race

ABOUT = (
    "FLOPs of causal attention: 4 T^2 d heads / 2 per sequence forward, 2.5 times as many backward; "
    "MFU: over the matmul peak of the same run; peak memory: memory that a call needs in addition to its inputs"
)
Attention = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # query, key, value -> output, all (batch, time, heads, head_dim)


@dataclass(frozen=True)
class Shape:
    """The shape of query, key and value."""

    batch: int
    time: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def forward_flops(self) -> float:
        """Return forward FLOPs by the causal convention: half of those of the two products with a T x T matrix."""
        return 4.0 * self.time**2 * self.head_dim * self.heads / 2 * self.batch

    def __str__(self) -> str:
        groups = f", {self.kv_heads} key/value heads" if self.kv_heads != self.heads else ""
        return f"T={self.time}, B={self.batch}, {self.heads} heads of {self.head_dim}{groups}"


# A width of 2048 in heads of 64 and of 128, with the same number of tokens in every batch.
GPU_SHAPES = [
    Shape(16384 // time, time, 2048 // head_dim, 2048 // head_dim, head_dim)
    for head_dim in (64, 128)
    for time in (1024, 2048, 4096, 8192, 16384)
]
# The 4 heads of 32 of the README's figures, without and with grouped queries.
CPU_SHAPES = [Shape(4096 // time, time, 4, kv_heads, 32) for kv_heads in (4, 2) for time in (128, 256, 512, 1024)]


def bench_attention(
    device: str = "auto", rounds: int = 15, steps: int | None = None, shapes: Sequence[Shape] = ()
) -> Iterator[Row]:
    """Yield a row per shape and type: in TFLOP/s, forward with and without backward, on a GPU; in tokens/s on a CPU."""
    for shape, peak in _cases(device, shapes, CPU_SHAPES, GPU_SHAPES):
        for backward in (False, True) if peak.device.type == "cuda" else (True,):
            yield _bench(shape, peak, backward, rounds, steps)


def _cases(device: str, shapes: Sequence[Any], cpu: Sequence[Any], gpu: Sequence[Any]) -> Iterator[tuple[Any, Peak]]:
    with measuring_on(device) as place:
        on_gpu = place.type == "cuda"
        for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
            peak = Peak(place, dtype)
            yield from ((shape, peak) for shape in shapes or (gpu if on_gpu else cpu))


def _bench(shape: Shape, peak: Peak, backward: bool, rounds: int, steps: int | None) -> Row:
    device, dtype = peak.device, peak.dtype
    inputs = random_inputs(shape, dtype, device)
    functions = working_peers(attention_peers(device, shape), inputs, backward)
    peers = {name: partial(attend, function, inputs, backward) for name, function in functions.items()}
    ours = partial(attend, our_attention(inputs[0]), inputs, backward)
    case = f"attention {str(dtype).removeprefix('torch.')}, forward{' + backward' * backward}, {shape}"
    flops = shape.forward_flops * (3.5 if backward else 1.0)
    unit, work = ("TFLOP/s", flops / 1e12) if device.type == "cuda" else ("tokens/s", float(shape.batch * shape.time))
    return race(case, unit, work, flops, ours, peers, peak, rounds, steps)


def random_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return random query, key, value, and gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(shape.batch, shape.time, n, shape.head_dim) for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    tensors = [torch.randn(size, generator=generator, device=device).to(dtype) for size in [*sizes, sizes[0]]]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


def attend(attention: Attention, inputs: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """Return an attention's output and, with `backward`, the gradients of query, key and value."""
    with torch.set_grad_enabled(backward):
        output = attention(*inputs[:3])
    return (output, *torch.autograd.grad(output, inputs[:3], inputs[3])) if backward else (output,)


def our_attention(query: Tensor) -> Attention:
    if query.device.type == "cuda":
        return backends.load_backend("ours").attend
    _, backend = backends.select_backend("auto", query.device, query.dtype, query.shape[-1], False, False)
    return backend.attend


def attention_peers(device: torch.device, shape: Shape) -> dict[str, Attention]:
    """Return the installed peers, name -> function; some do not take every head size, device or type."""
    grouped = shape.heads != shape.kv_heads
    if device.type == "cpu":
        if not grouped:
            return {"F.scaled_dot_product_attention": _sdpa}
        return {"SDPA, enable_gqa": partial(_sdpa, grouped=True), "SDPA, heads repeated": _repeated_sdpa}
    from torch.nn.attention import SDPBackend

    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    peers: dict[str, Attention] = {
        f"SDPA {kind}": partial(_one_backend, backend=kind, grouped=grouped) for kind in kinds
    }
    for package in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):  # flash-attn 2, 3 and 4
        with contextlib.suppress(ImportError):
            peers[package] = partial(_flash_attn, importlib.import_module(package).flash_attn_func)
    return peers


def _flash_attn(function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = function(query, key, value, causal=True)
    return out[0] if isinstance(out, tuple) else out  # some releases return the normalisers as well


def working_peers(functions: Mapping[str, Attention], inputs: Sequence[Tensor], backward: bool) -> dict[str, Attention]:
    """Return the functions that accept these inputs."""
    working = {}
    for name, function in functions.items():
        with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError):
            attend(function, inputs, backward)
            working[name] = function
    return working


def _sdpa(query: Tensor, key: Tensor, value: Tensor, grouped: bool = False) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _repeated_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    return _sdpa(query, key, value)


def _one_backend(query: Tensor, key: Tensor, value: Tensor, backend: Any, grouped: bool) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        return _sdpa(query, key, value, grouped)


@dataclass(frozen=True)
class LossShape:
    """Tokens, width and vocabulary; the vocabularies are round, so that neither side pads."""

    tokens: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"V={self.vocabulary}, {self.tokens} tokens, width {self.width}"


CPU_LOSSES = tuple(LossShape(2048, 128, vocabulary) for vocabulary in (256, 4096, 32768))
GPU_LOSSES = tuple(LossShape(16384, 1024, vocabulary) for vocabulary in (256, 4096, 32768, 50304, 131072))
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (n, width), weight (vocabulary, width), targets (n,) -> scalar


def bench_loss(
    device: str = "auto", rounds: int = 15, steps: int | None = None, shapes: Sequence[LossShape] = ()
) -> Iterator[Row]:
    """Yield tokens/s and peak memory for each shape and type; MFU assumes 6 FLOPs per token and head weight."""
    for shape, peak in _cases(device, shapes, CPU_LOSSES, GPU_LOSSES):
        place, generator = peak.device, torch.Generator(peak.device).manual_seed(0)
        x = torch.randn(shape.tokens, shape.width, generator=generator, device=place)
        # A normalised stream, and a head whose logits have variance 1.
        weight = torch.randn(shape.vocabulary, shape.width, generator=generator, device=place) * shape.width**-0.5
        targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=place)
        leaves = x.to(peak.dtype).requires_grad_(), weight.to(peak.dtype).requires_grad_(), targets
        ours = partial(_with_gradients, partial(linear_cross_entropy, vocab_size=shape.vocabulary), *leaves)
        peers = {name: partial(_with_gradients, loss, *leaves) for name, loss in loss_peers(place).items()}
        case = f"loss {str(peak.dtype).removeprefix('torch.')}, {shape}"
        flops = 6.0 * shape.width * shape.vocabulary * shape.tokens
        yield race(case, "tokens/s", shape.tokens, flops, ours, peers, peak, rounds, steps)


def _with_gradients(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    value = loss(x, weight, targets)
    return (value, *torch.autograd.grad(value, (x, weight)))


def _logits_and_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def loss_peers(device: torch.device) -> dict[str, Loss]:
    peers: dict[str, Loss] = {"F.cross_entropy of F.linear": _logits_and_loss}
    if device.type == "cuda":
        peers["the same, compiled"] = torch.compile(_logits_and_loss, dynamic=False)
        with contextlib.suppress(ImportError):
            liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
            peers["Liger's fused linear cross-entropy"] = lambda x, weight, targets: liger(weight, x, targets)
    return peers
