"""The kernel that computes attention: ours in Triton, or PyTorch's.

What each query sees is prepared once for all blocks (`Backend.seen`): a mask for PyTorch's kernels, the first visible
position for ours.

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
# Limits of our kernel; sizes and types as in kernels/flash.py.
LEAST_CAPABILITY = (8, 0)  # compute capability of a GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 96, 128, 256)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]


@dataclass(frozen=True)
class Work:
    device_type: str  # cpu | cuda
    capability: tuple[int, int] | None  # compute capability of a GPU
    dtype: torch.dtype  # of queries, keys and values
    head_dim: int
    has_window: bool  # a sliding window shorter than the training length
    has_documents: bool  # a token sees only its own document
    has_ring: bool = False  # sequences are split over context-parallel ranks

    def __str__(self) -> str:
        if self.device_type != "cuda":
            return "no GPU"
        masks = [
            word for word, has in (("a window", self.has_window), ("separate documents", self.has_documents)) if has
        ]
        return ", ".join([_gpu(self.capability), _name(self.dtype), f"heads of size {self.head_dim}", *masks])


@dataclass(frozen=True)
class Choice:
    name: str
    reason: str

    def __str__(self) -> str:
        return f"attention: {self.name} ({self.reason})"


def choose_backend(requested: str, work: Work, installed: Set[str]) -> Choice:
    """Return the backend that computes a model's attention, and the reason.

    `auto` prefers our kernel if there is a mask, which PyTorch would read as (batch, time, time) numbers; else PyTorch.

    Raises:
        UserError: the requested backend is not installed, or cannot do `work`; the message lists usable ones.
    """
    able = [name for name in PACKAGES if name in installed and obstacle(name, work) is None]
    if requested == "auto":
        masked = work.has_documents or work.has_window or work.has_ring
        if able:
            return Choice(able[0] if masked else able[-1], f"auto: {work}")
        requested = "ours"
    if requested in able:
        return Choice(requested, "parallel.attention")
    reason = (
        f"which {obstacle(requested, work)}"
        if requested in installed
        else f"and {PACKAGES[requested]} is not installed"
    )
    instead = f"it must be auto or one of {', '.join(able)}" if able else "parallel.cp must be 1"
    raise UserError(f"parallel.attention is {requested!r}, {reason}; {instead}")


def obstacle(name: str, work: Work) -> str | None:
    """Return why a backend cannot compute this attention, such as "needs a GPU", or None if it can."""
    if name == "sdpa":
        if work.has_ring and work.device_type == "cuda":
            return "cannot attend over sequences that are split over ranks (parallel.cp) on a GPU"
        return None
    if work.device_type != "cuda" or work.capability is None:
        return "needs a GPU"
    if work.capability < LEAST_CAPABILITY:
        return f"does not support a GPU of {_gpu(work.capability)}"
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
    """Return the names of backends whose packages are installed, without importing them."""
    return frozenset({"sdpa", *(["ours"] if importlib.util.find_spec("triton") is not None else [])})


@dataclass(frozen=True)
class Backend:
    name: str
    kernel: Attend  # (query, key, value, result of `seen`, window) -> output
    reads: str  # the form that `seen` returns: mask | first

    def seen(self, tokens: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask or, for our kernel, each query's first visible position. None: all see from position 0 on."""
        first = first_visible(tokens, first, window)
        return first if first is None or self.reads == "first" else visible_mask(first, dtype)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        """Return causal attention, (batch, time, heads, head_dim).

        Args:
            key, value: (batch, time, kv_heads, head_dim); each serves heads / kv_heads query heads.
            seen: what the method `seen` returned for this window.
            window: maximum number of tokens that a query sees, itself included; None: no limit.
        """
        # A window that hides nothing must give the same bits as no window.
        narrows = window is not None and window < query.shape[1]
        return self.kernel(query, key, value, seen, window if narrows else None)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    mixed = causal_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, window)
    return mixed.transpose(1, 2)


SDPA = Backend("sdpa", _sdpa, reads="mask")


def load_backend(name: str) -> Backend:
    """Return the backend of this name. Raises ImportError if its package cannot be imported."""
    if name == "sdpa":
        return SDPA
    from ..kernels.flash import flash_attention

    # `first` already takes the window into account, see `first_visible`.
    return Backend(name, lambda q, k, v, first, _: flash_attention(q, k, v, first=first), reads="first")


def select_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *masks: bool,  # has_window, has_documents, has_ring of `Work`
) -> tuple[Choice, Backend]:
    """Choose and load a backend, or raise UserError. With `auto`, take PyTorch's if the choice cannot be imported."""
    capability = CUDA.capability(device) if on_gpu(device) else None
    work = Work("cuda" if on_gpu(device) else "cpu", capability, dtype, head_dim, *masks)
    choice = choose_backend(requested, work, installed())
    try:
        return choice, load_backend(choice.name)
    except ImportError as error:
        if requested != "auto":
            raise UserError(
                f"parallel.attention is {requested!r}, and {PACKAGES[requested]} cannot be imported ({error}); "
                "install a version for this PyTorch, or use parallel.attention auto"
            ) from error
        reason = f"{choice.reason}; {PACKAGES[choice.name]} cannot be imported"
        return Choice(choose_backend("auto", work, {"sdpa"}).name, reason), SDPA
