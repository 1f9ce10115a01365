"""Which kernel computes attention: ours in Triton, or PyTorch's; chosen, loaded, called alike.

Special here:
- either is called with (batch, time, heads, head_dim), strided as it comes from the matrix product;
- what each query sees is said once for all blocks (`Backend.seen`): PyTorch's kernels read a mask, ours the first
  position that a query sees.

Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..hardware import CUDA, on_gpu
from .attention import causal_attention, first_visible, visible_mask

PACKAGES = {"ours": "Triton", "sdpa": "PyTorch"}
# What our kernel can do.
LEAST_CAPABILITY = (8, 0)  # compute capability of a GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 96, 128, 256)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]


@dataclass(frozen=True)
class Work:
    """What a backend would have to do."""

    device_type: str  # cpu | cuda
    capability: tuple[int, int] | None  # compute capability of a GPU
    dtype: torch.dtype  # of queries, keys and values
    head_dim: int
    has_window: bool  # a sliding window hides something at the length trained on
    has_documents: bool  # documents are kept apart
    has_ring: bool = False  # sequences are shared out over ranks

    def __str__(self) -> str:
        if self.device_type != "cuda":
            return "no GPU"
        masks = [word for word, has in (("a window", self.has_window), ("documents apart", self.has_documents)) if has]
        return ", ".join([_gpu(self.capability), _name(self.dtype), f"heads of size {self.head_dim}", *masks])


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is this one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"attention: {self.name} ({self.reason})"


def choose_backend(wanted: str, work: Work, installed: Set[str]) -> Choice:
    """Return which backend computes a model's attention, and why.

    With `auto` that is PyTorch's own choice among its kernels (cuDNN's on Hopper and later) if there is no mask. With
    one PyTorch would read (batch, time, time) numbers and skip nothing, so ours comes first. `isoflop bench attention`
    says whether this is right for the device at hand.

    Raises:
        UserError: the one that is asked for is not installed, or cannot do this; says which are and can.
    """
    able = [name for name in PACKAGES if name in installed and obstacle(name, work) is None]
    if wanted == "auto":
        masked = work.has_documents or work.has_window or work.has_ring
        if able:
            return Choice(able[0] if masked else able[-1], f"auto: {work}")
        wanted = "ours"
    if wanted in able:
        return Choice(wanted, "parallel.attention")
    reason = f"which {obstacle(wanted, work)}" if wanted in installed else f"and {PACKAGES[wanted]} is not installed"
    instead = f"it must be auto or one of {', '.join(able)}" if able else "parallel.cp must be 1"
    raise UserError(f"parallel.attention is {wanted!r}, {reason}; {instead}")


def obstacle(name: str, work: Work) -> str | None:
    """Return why a backend cannot do this, to be read after "which"; None if it can."""
    if name == "sdpa":
        if work.has_ring and work.device_type == "cuda":
            return "cannot attend over sequences that ranks share out (parallel.cp) on a GPU"
        return None
    if work.device_type != "cuda" or work.capability is None:
        return "needs a GPU"
    if work.capability < LEAST_CAPABILITY:
        return f"is not made for a GPU of {_gpu(work.capability)}"
    if work.dtype not in DTYPES:
        return f"takes {' and '.join(map(_name, DTYPES))}, not {_name(work.dtype)}"
    if work.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"takes heads of size {sizes}, and model.head_size, or width / heads, is {work.head_dim}"
    return None


def _gpu(capability: tuple[int, int] | None) -> str:
    return "compute capability " + ".".join(map(str, capability or ()))


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))


def installed() -> frozenset[str]:
    """Return the backends whose packages are there; none is imported, because that can take seconds."""
    return frozenset({"sdpa", *(["ours"] if importlib.util.find_spec("triton") is not None else [])})


@dataclass(frozen=True)
class Backend:
    """A kernel, ready to be called."""

    name: str
    kernel: Attend  # of query, key, value, what `seen` gave, and the window
    reads: str  # what `seen` gives: mask | first

    def seen(self, tokens: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What the kernel reads of what each query sees; None: all before it. See `first_visible`."""
        first = first_visible(tokens, first, window)
        return first if first is None or self.reads == "first" else visible_mask(first, dtype)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        """Causal attention, (batch, time, heads, head_dim).

        Args:
            key, value: (batch, time, kv_heads, head_dim); each serves heads / kv_heads query heads.
            seen: of `seen`, with the same window.
            window: tokens that a query sees at most, itself included; None: all before it.
        """
        # What sees all before it must be computed as without a window.
        narrows = window is not None and window < query.shape[1]
        return self.kernel(query, key, value, seen, window if narrows else None)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    mixed = causal_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, window)
    return mixed.transpose(1, 2)


SDPA = Backend("sdpa", _sdpa, reads="mask")


def load_backend(name: str) -> Backend:
    """A backend by name; ImportError if its package is missing, or does not fit this PyTorch."""
    if name == "sdpa":
        return SDPA
    from ..kernels.flash import flash_attention

    # The window has raised what is seen first.
    return Backend(name, lambda q, k, v, first, _: flash_attention(q, k, v, first=first), reads="first")


def select_backend(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *masks: bool,  # of `Work`
) -> tuple[Choice, Backend]:
    """Choose and load. A package that `auto` cannot import is passed over; one that was asked for is a UserError."""
    capability = CUDA.capability(device) if on_gpu(device) else None
    work = Work("cuda" if on_gpu(device) else "cpu", capability, dtype, head_dim, *masks)
    choice = choose_backend(wanted, work, installed())
    try:
        return choice, load_backend(choice.name)
    except ImportError as error:
        if wanted != "auto":
            raise UserError(
                f"parallel.attention is {wanted!r}, and {PACKAGES[wanted]} cannot be imported ({error}); "
                "it must be built for this PyTorch, or parallel.attention auto"
            ) from error
        reason = f"{choice.reason}; {PACKAGES[choice.name]} cannot be imported"
        return Choice(choose_backend("auto", work, {"sdpa"}).name, reason), SDPA
