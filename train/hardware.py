"""The device a run trains on, all that is asked of CUDA, and the rate of matrix products by which MFU is stated."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import UserError
from .job.session import kept


def on_gpu(x: Tensor | torch.device) -> bool:
    """Whether a GPU computes here. `meta` counts as one: tests take a GPU's way on it, where every wait raises."""
    return (x if isinstance(x, torch.device) else x.device).type != "cpu"


class Cuda:
    """What only a GPU's driver can do. All of it is asked here, so that a stand-in can take its place in tests."""

    def capability(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def name(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_name(device))

    def free_bytes(self, device: torch.device) -> int:
        return torch.cuda.mem_get_info(device)[0]

    def start_peak(self, device: torch.device) -> int:
        """Bytes that are allocated now, from which on `peak` is the most."""
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def peak(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def take(self, local_rank: int) -> torch.device:
        """Makes a rank's GPU the current one. The launcher shows it all GPUs of its node, or only its own."""
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def work_on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def keep_for(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """The stream may still write to x when nobody else knows it any more."""
        x.record_stream(stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, x: Tensor) -> Tensor:
        return x.pin_memory()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Starts a copy between host and device; an event recorded after it says when it is made."""
        target.copy_(source, non_blocking=True)

    def read(self, x: Tensor) -> Tensor:
        return x.cpu()

    def launch(self, kernel: Any, programs: int, like: Tensor, *arguments: Any, **options: Any) -> None:
        """Runs a Triton kernel where `like` is, for Triton launches on the current device."""
        with torch.cuda.device(like.device) if on_gpu(like) else contextlib.nullcontext():
            kernel[(programs,)](*arguments, **options)


CUDA = Cuda()


def read(x: Tensor) -> Tensor:
    """On the host: here the host waits for the device. No training step calls it."""
    return CUDA.read(x) if on_gpu(x) else x


def release_memory(device: torch.device) -> None:
    """Gives memory that nobody uses back, after an error for want of it whose frames are gone."""
    if on_gpu(device):
        CUDA.empty_cache()


def pick_device(wanted: str, option: str = "parallel.device") -> torch.device:
    """`auto` takes the GPU where there is one; `option` is what an error names."""
    available = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"{option} is {wanted!r}; it must be auto, cpu or cuda")
    if wanted == "cuda" and not available:
        raise UserError(f"{option} is 'cuda' and no CUDA device is visible; use auto or cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: CUDA's own type, or the words of a CPU's allocator."""
    words = ("not enough memory", "can't allocate memory", "cannot allocate memory", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def device_name(device: torch.device) -> str:
    """What a person would call it: the GPU's name, or the processor and its threads."""
    if on_gpu(device):
        return CUDA.name(device)
    return f"cpu {platform.machine()} x{torch.get_num_threads()}"


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """FLOP/s of plain square matrix products, the best of a short trial; the denominator of every MFU here."""
    size = 8192 if on_gpu(device) else 512
    # A generator of its own: measuring must not move the random numbers of the run.
    a = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    torch.mm(a, a)
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def kept_peak(device: torch.device, dtype: torch.dtype) -> float:
    """`matmul_peak`, measured once in a session of this process for as many threads."""
    return kept(("matmul_peak", device, dtype, torch.get_num_threads()), lambda: matmul_peak(device, dtype))


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue."""
    if on_gpu(device):
        CUDA.synchronize(device)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Memory that one step asks of torch's allocator beyond what was held before it, at its highest."""
    if on_gpu(device):
        synchronize(device)
        held = CUDA.start_peak(device)
        step()
        synchronize(device)
        return CUDA.peak(device) - held
    gc.collect()  # what went before, freed in between, would count against the step
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    held = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
