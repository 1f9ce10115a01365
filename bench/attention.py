"""Time our attention and PyTorch's or flash-attn's, forward and backward: `isoflop bench attention`.

Every contender takes the layout of a model's projections, (batch, time, heads, head_dim). On a GPU ours is the Triton
kernel, and the peer is the fastest of SDPA's backends and the installed flash-attn packages. On a CPU ours is what the
model calls, and the peer is SDPA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..train.model import backends
from .timing import Peak, Row, measuring_on, race

ABOUT = (
    "FLOPs of causal attention: 4 T^2 d heads / 2 per sequence forward, 2.5 times as many backward; "
    "MFU: over the matmul peak of the same run; peak memory: what a call needs in addition to its inputs"
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
    def tokens(self) -> int:
        return self.batch * self.time

    @property
    def forward_flops(self) -> float:
        """FLOPs by the causal convention: half of the two products of the T x T square."""
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
    """Yield a row for each shape, type and pass, of ours and the fastest peer.

    A GPU is measured in bf16 and TFLOP/s, forward alone and with backward; a CPU in fp32 and bf16 and tokens/s, with
    backward. A turn has `steps` calls.
    """
    with measuring_on(device) as place:
        gpu = place.type == "cuda"
        for dtype in (torch.bfloat16,) if gpu else (torch.float32, torch.bfloat16):
            peak = Peak(place, dtype)
            for shape in shapes or (GPU_SHAPES if gpu else CPU_SHAPES):
                for backward in (False, True) if gpu else (True,):
                    yield _bench(shape, peak, backward, rounds, steps)


def _bench(shape: Shape, peak: Peak, backward: bool, rounds: int, steps: int | None) -> Row:
    device, dtype = peak.device, peak.dtype
    inputs = Inputs.random(shape, dtype, device)
    functions = working_peers(attention_peers(device, shape), inputs, backward)
    peers = {name: partial(inputs.run, function, backward) for name, function in functions.items()}
    ours = partial(inputs.run, our_attention(inputs), backward)
    case = f"attention {str(dtype).removeprefix('torch.')}, forward{' + backward' * backward}, {shape}"
    flops = shape.forward_flops * (3.5 if backward else 1.0)
    unit, work = ("TFLOP/s", flops / 1e12) if device.type == "cuda" else ("tokens/s", float(shape.tokens))
    return race(case, unit, work, flops, ours, peers, peak, rounds, steps)


@dataclass(frozen=True)
class Inputs:
    """Query, key and value, and the gradient of the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            size = (shape.batch, shape.time, heads, shape.head_dim)
            return torch.randn(size, generator=generator, device=device).to(dtype)

        query, key, value = (normal(n).requires_grad_() for n in (shape.heads, shape.kv_heads, shape.kv_heads))
        return cls(query, key, value, normal(shape.heads))

    def run(self, attention: Attention, backward: bool) -> tuple[Tensor, ...]:
        """Return the output, and with `backward` the gradients of query, key and value."""
        leaves = (self.query, self.key, self.value)
        with torch.set_grad_enabled(backward):
            output = attention(*leaves)
        return (output, *torch.autograd.grad(output, leaves, self.gradient)) if backward else (output,)


def our_attention(inputs: Inputs) -> Attention:
    query = inputs.query
    if query.device.type == "cuda":
        return backends.load_backend("ours").attend
    _, backend = backends.select_backend("auto", query.device, query.dtype, query.shape[-1], False, False)
    return backend.attend


def attention_peers(device: torch.device, shape: Shape) -> dict[str, Attention]:
    """Return the installed peers; some do not take every head size, device or type."""
    grouped = shape.heads != shape.kv_heads
    if device.type == "cpu":
        if not grouped:
            return {"F.scaled_dot_product_attention": _sdpa}
        return {"SDPA, enable_gqa": partial(_sdpa, grouped=True), "SDPA, heads repeated": _repeated_sdpa}
    from torch.nn.attention import SDPBackend

    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    kinds["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    peers: dict[str, Attention] = {
        f"SDPA {name}": partial(_one_backend, backend=kind, grouped=grouped) for name, kind in kinds.items()
    }
    for name in sorted(backends.installed() - {"ours", "sdpa"}):
        with contextlib.suppress(ImportError):
            peers[backends.PACKAGES[name]] = backends.load_backend(name).attend
    return peers


def working_peers(functions: Mapping[str, Attention], inputs: Inputs, backward: bool) -> dict[str, Attention]:
    """Return the functions that accept these inputs."""
    working = {}
    for name, function in functions.items():
        with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError):
            inputs.run(function, backward)
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
