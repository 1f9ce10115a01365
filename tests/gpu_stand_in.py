"""A stand-in for CUDA on the device `meta`, which has shapes but no numbers, for tests without a GPU.

Code that waits for a number raises on `meta`. The stand-in records every read and write of memory, and which of them
each stream and the host know to be finished. An access that could run at the same time as a conflicting one fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from isoflop.train.hardware import CUDA, Cuda
from isoflop.train.kernels import cross_entropy, flash
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
Book = dict[Any, list[tuple[int, bool]]]


class Stream:
    """A stream, or the host."""

    def __init__(self) -> None:
        self.seen: set[int] = set()  # numbers of the accesses that have finished before its next one begins


class Event:
    """A CUDA event: the accesses that had finished when it was recorded."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.seen = gpu, frozenset[int]()

    def record(self, stream: Stream | None = None) -> None:
        self.seen = frozenset((stream or self.gpu.current).seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).seen |= self.seen

    def synchronize(self) -> None:
        self.gpu.host.seen |= self.seen


class Gpu(Cuda):
    """A `Cuda` that works on `meta` and records its calls."""

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        self.generation = capability
        self.host, self.compute = Stream(), Stream()
        self.current: Stream = self.compute
        self.accesses: Book = {}  # storage -> (number of the access, whether it wrote)
        self.count = 0
        self.reads: list[torch.Size] = []  # shapes of the values that the host has waited for
        self.answer: Callable[[Tensor], Tensor] = lambda x: torch.zeros(x.shape, dtype=x.dtype)
        self.launched: list[tuple[str, int, dict[str, Any]]] = []
        self.said: list[str] = []
        self.pinned_storages: set[int] = set()
        self.alive: list[Any] = []  # recorded storages, kept so that their addresses are not reused

    def access(self, x: Tensor, write: bool, by: Stream) -> None:
        """Record that `by` reads or writes x; fail if a conflicting access may still be running."""
        if by is not self.host:
            by.seen |= self.host.seen  # the host has waited for these before it started this access
        self.alive.append(x.untyped_storage())
        earlier = self.accesses.setdefault(x.untyped_storage()._cdata, [])
        racing = [number for number, wrote in earlier if (write or wrote) and number not in by.seen]
        assert not racing, f"{'writes' if write else 'reads'} {tuple(x.shape)} while it is still in use"
        earlier.append((self.count, write))
        by.seen.add(self.count)
        self.count += 1

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.generation

    def name(self, device: torch.device) -> str:
        return "stand-in"

    def free_bytes(self, device: torch.device) -> int:
        return 1 << 20

    def start_peak(self, device: torch.device) -> int:
        self.said.append("start_peak")
        return 5

    def peak(self, device: torch.device) -> int:
        return 12

    def take(self, local_rank: int) -> torch.device:
        self.said.append(f"take {local_rank}")
        return META

    def current_device(self) -> torch.device:
        return META

    def synchronize(self, device: torch.device) -> None:
        self.said.append("synchronize")

    def empty_cache(self) -> None:
        self.said.append("empty_cache")

    def event(self) -> Any:
        return Event(self)

    def stream(self, device: torch.device) -> Any:
        return Stream()

    def current_stream(self, device: torch.device) -> Any:
        return self.current

    @contextmanager
    def work_on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def keep_for(self, x: Tensor, stream: Any) -> None:
        self.said.append("keep_for")

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.pin(torch.zeros(shape, dtype=dtype))

    def pin(self, x: Tensor) -> Tensor:
        assert x.device.type == "cpu"
        self.alive.append(x.untyped_storage())
        self.pinned_storages.add(x.untyped_storage()._cdata)
        return x

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype
        assert target.shape == source.shape
        if not (target.is_meta or source.is_meta):
            return super().copy(target, source)
        for x in (target, source):
            assert x.is_meta or x.untyped_storage()._cdata in self.pinned_storages, "not pinned, so the host waits"
        self.access(source, False, self.current)
        self.access(target, True, self.current)
        super().copy(target, torch.zeros_like(target) if source.is_meta else source)

    def read(self, x: Tensor) -> Tensor:
        self.reads.append(x.shape)
        return self.answer(x)

    def launch(self, kernel: Any, programs: int, like: Tensor, *arguments: Any, **options: Any) -> None:
        """Check the arguments as Triton does: each parameter once, tensors on the device, and at least one program."""
        assert programs > 0
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        assert tensors
        assert all(x.is_meta for x in (like, *tensors))
        assert all(isinstance(x, Tensor | int | float | None) for x in tree_leaves(arguments))
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(
            *arguments, **{name: value for name, value in options.items() if name in signature.parameters}
        )
        assert {*options} - {*bound.arguments} <= {"num_warps", "num_stages"}
        self.launched.append((kernel.fn.__name__, programs, options))


def stand_in(patch: pytest.MonkeyPatch, capability: tuple[int, int] = (8, 0)) -> Gpu:
    """Replace CUDA by a new stand-in while the test runs, and return it."""
    gpu = Gpu(capability)
    for name in (name for name in vars(Cuda) if not name.startswith("_")):
        assert name in vars(Gpu), f"the stand-in lacks {name}"
        patch.setattr(CUDA, name, getattr(gpu, name))
    return gpu


@contextmanager
def on_device(host_may_wait: bool = False) -> Iterator[None]:
    """Make operations fail that work on `meta` but fail, or make the host wait, on a GPU."""
    with _Operations(host_may_wait), _Functions(host_may_wait):
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, host_may_wait: bool) -> None:
        super().__init__()
        self.host_may_wait = host_may_wait

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and not self.host_may_wait:
            assert not out.is_meta, "numbers of the host are copied while it waits"
        return out


class _Operations(TorchDispatchMode):
    def __init__(self, host_may_wait: bool) -> None:
        super().__init__()
        self.host_may_wait = host_may_wait

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        out = function(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        devices = {x.device.type for x in (*tensors, *outputs)}
        if name in ("aten::to", "aten::_to_copy", "aten::copy_") and devices == {"cpu", "meta"}:
            asynchronous = (kwargs or {}).get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,))
            assert asynchronous or self.host_may_wait, f"{name}: the host waits for a copy"
        else:
            assert len(devices) <= 1, f"{name}: some of it is on the host"
        if "c10d" in name:
            sent = [x for x in tensors if x.numel()]
            assert all(x.is_contiguous() for x in sent), f"{name}: NCCL takes contiguous tensors"
            assert len({x.dtype for x in sent}) <= 1, f"{name}: of several types"
        return out


@contextmanager
def kernels_on_meta() -> Iterator[None]:
    """Run our custom ops on `meta` as on a GPU, up to the launch, and make PyTorch's fused AdamW check its types."""

    def fused_adamw(*state: Any, lr: Tensor | float, grad_scale: Any = None, found_inf: Any = None, **_: Any) -> None:
        weights, gradients, first, second, _, steps = state
        for tensor in (*weights, *gradients, *first, *second):
            assert tensor.is_meta
            assert tensor.dtype == torch.float32
        assert len(weights) == len(gradients) == len(first) == len(second) == len(steps)
        for number in (*steps, lr, grad_scale, found_inf):  # the kernel reads them as pointers to fp32
            if isinstance(number, Tensor):
                assert number.is_meta
                assert number.dtype == torch.float32
                assert number.numel() == 1

    scoped = torch.library._scoped_library
    with scoped("aten", "IMPL") as aten, scoped("isoflop", "IMPL") as ours:
        for name in ("_fused_adamw_", "_fused_adamw_.tensor_lr"):
            aten.impl(name, fused_adamw, "Meta", allow_override=True)
        for op in (flash.flash_forward, flash.flash_backward, cross_entropy.cross_entropy_):
            ours.impl(op._name, op._init_fn, "Meta", allow_override=True)
        yield
