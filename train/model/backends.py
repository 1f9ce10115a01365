"""Which kernel computes attention: ours, PyTorch's, or a flash-attention package's; chosen, loaded, called alike.

Special here:
- every backend is called with (batch, time, heads, head_dim), strided as it comes from the matrix product;
- what each query sees is said once for all blocks (`Backend.seen`): PyTorch's kernels read a mask, ours the first
  position that a query sees, the packages a window alone;
- the packages keep documents apart only as sequences of their own (cu_seqlens), whose number differs from batch to
  batch, so a step would wait for the device: they are not asked for it.

Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691; Shah et al. 2024, arXiv 2407.08608.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..hardware import CUDA, on_gpu
from .attention import causal_attention, first_visible, visible_mask

LOW = (torch.bfloat16, torch.float16)

# In the order in which they are tried; the first that can, does. Without a mask PyTorch's own choice among its kernels
# (cuDNN's on Hopper and later) comes right after the packages made for one device. With one it would read (batch, time,
# time) numbers and skip nothing. `isoflop bench attention` says whether this is right for the device at hand.
PREFERRED = {
    "plain": ("flash3", "flash4", "sdpa"),
    "window": ("flash3", "flash4", "ours", "flash2", "sdpa"),
    "documents": ("ours", "sdpa"),
    "ring": ("ours", "sdpa"),
}

PACKAGES = {
    "ours": "Triton",
    "sdpa": "PyTorch",
    "flash2": "flash-attn 2",
    "flash3": "flash-attn 3 (flash_attn_interface)",
    "flash4": "flash-attn 4 (flash_attn.cute)",
}

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]


@dataclass(frozen=True)
class Kernel:
    """What a kernel for GPUs can do."""

    capability: tuple[int, int]  # compute capability of a GPU, at least
    below: tuple[int, int]  # the first that it is not made for
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    documents: bool = False


KERNELS = {
    "ours": Kernel((8, 0), (99, 0), (*LOW, torch.float32), (16, 32, 64, 96, 128, 256), documents=True),
    "flash2": Kernel((8, 0), (99, 0), LOW, tuple(range(8, 257, 8))),
    "flash3": Kernel((9, 0), (10, 0), LOW, tuple(range(8, 257, 8))),
    "flash4": Kernel((9, 0), (12, 0), LOW, (64, 96, 128)),
}


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
    """Which backend computes a model's attention, and why.

    Raises:
        UserError: the one that is asked for is not installed, or cannot do this; says which are and can.
    """
    able = [name for name in PACKAGES if name in installed and obstacle(name, work) is None]
    if wanted == "auto":
        kind = "documents" if work.has_documents else "window" if work.has_window else "plain"
        if able:
            preferred = PREFERRED["ring" if work.has_ring else kind]
            return Choice(next(name for name in preferred if name in able), f"auto: {work}")
        wanted = "ours"
    if wanted in able:
        return Choice(wanted, "parallel.attention")
    reason = f"which {obstacle(wanted, work)}" if wanted in installed else f"and {PACKAGES[wanted]} is not installed"
    instead = f"it must be auto or one of {', '.join(able)}" if able else "parallel.cp must be 1"
    raise UserError(f"parallel.attention is {wanted!r}, {reason}; {instead}")


def obstacle(name: str, work: Work) -> str | None:
    """Why a backend cannot do this, to be read after "which"; None where it can."""
    if work.has_ring and (name not in PREFERRED["ring"] or (name == "sdpa" and work.device_type == "cuda")):
        return "cannot attend over sequences that ranks share out (parallel.cp)" + " on a GPU" * (name == "sdpa")
    if name == "sdpa":
        return None
    kernel = KERNELS[name]
    if work.device_type != "cuda" or work.capability is None:
        return "needs a GPU"
    if not kernel.capability <= work.capability < kernel.below:
        return f"is not made for a GPU of {_gpu(work.capability)}"
    if work.dtype not in kernel.dtypes:
        return f"takes {' and '.join(map(_name, kernel.dtypes))}, not {_name(work.dtype)}"
    if work.head_dim not in kernel.head_dims:
        sizes = kernel.head_dims
        words = ", ".join(map(str, sizes)) if len(sizes) < 9 else f"multiples of {sizes[0]} up to {sizes[-1]}"
        return f"takes heads of size {words}, and model.head_size, or width / heads, is {work.head_dim}"
    if work.has_documents and not kernel.documents:
        return "cannot keep documents apart (data.separate_documents)"
    if work.has_window and name == "flash4" and work.capability < (10, 0):
        return f"has no sliding window on a GPU of {_gpu(work.capability)}"
    return None


def _gpu(capability: tuple[int, int] | None) -> str:
    return "compute capability " + ".".join(map(str, capability or ()))


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))


def installed() -> frozenset[str]:
    """Backends whose packages are there; none of them is imported, for that can take seconds."""
    modules = {"ours": "triton", "flash2": "flash_attn_2_cuda", "flash3": "flash_attn_interface"}
    found = {name for name, module in modules.items() if importlib.util.find_spec(module) is not None}
    parent = importlib.util.find_spec("flash_attn")  # also of `flash_attn.cute`, which need not come with flash-attn 2
    if parent is not None and importlib.machinery.PathFinder.find_spec("cute", parent.submodule_search_locations):
        found.add("flash4")
    return frozenset(found | {"sdpa"})


@dataclass(frozen=True)
class Backend:
    """A kernel, ready to be called."""

    name: str
    kernel: Attend  # of query, key, value, what `seen` gave, and the window, for kernels that work it out themselves
    reads: str  # what `seen` gives: mask | first | nothing

    def seen(self, tokens: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What the kernel reads of what each query sees; None: the window, if any, says it all. See `first_visible`."""
        if self.reads == "nothing":
            if first is not None:
                raise ValueError(f"{self.name} cannot keep documents apart; say that they are before it is chosen")
            return None
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
    """A backend by name; ImportError where its package is missing, or does not fit this PyTorch."""
    if name == "sdpa":
        return SDPA
    if name == "ours":
        from ..kernels.flash import flash_attention

        # The window has raised what is seen first.
        return Backend(name, lambda q, k, v, first, _: flash_attention(q, k, v, first=first), reads="first")
    module = {"flash2": "flash_attn", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}[name]
    function = importlib.import_module(module).flash_attn_func
    # Of the three, flash-attn 2 alone is known to tracing in all its releases; the others run between two graphs.
    function = function if name == "flash2" else torch.compiler.disable(function)
    unbounded = None if name == "flash4" else -1

    def attend(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, window: int | None) -> Tensor:
        # Tokens before and after the query's own. Some releases return the normalisers beside the output.
        bounds = (unbounded, unbounded) if window is None else (window - 1, 0)
        out = function(query, key, value, causal=True, window_size=bounds)
        return out[0] if isinstance(out, tuple) else out

    return Backend(name, attend, reads="nothing")


def select_backend(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *masks: bool,  # of `Work`
) -> tuple[Choice, Backend]:
    """Chooses and loads. A package that `auto` cannot import is passed over; one that was asked for is a UserError."""
    capability = CUDA.capability(device) if on_gpu(device) else None
    work = Work("cuda" if on_gpu(device) else "cpu", capability, dtype, head_dim, *masks)
    there, broken = installed(), ""
    while True:
        choice = choose_backend(wanted, work, there)
        try:
            return Choice(choice.name, choice.reason + broken), load_backend(choice.name)
        except ImportError as error:
            if wanted != "auto":
                raise UserError(
                    f"parallel.attention is {wanted!r}, and {PACKAGES[wanted]} cannot be imported ({error}); "
                    "it must be built for this PyTorch, or parallel.attention auto"
                ) from error
            broken += f"; {PACKAGES[choice.name]} cannot be imported"
            there -= {choice.name}
