"""The device of a run, all calls to CUDA, and the peak rate of matrix products for MFU."""

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
    """Return whether x is on a GPU, or on `meta`, where tests run the GPU's code."""
    return (x if isinstance(x, torch.device) else x.device).type != "cpu"


class Cuda:
    def capability(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def name(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_name(device))

    def free_bytes(self, device: torch.device) -> int:
        return torch.cuda.mem_get_info(device)[0]

    def start_peak(self, device: torch.device) -> int:
        """Reset the device's peak-memory statistics. Return the bytes that PyTorch has allocated there now."""
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def peak(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def take(self, local_rank: int) -> torch.device:
        """Make this rank's GPU current and return it: number `local_rank` modulo the number of visible GPUs."""
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
        """Keep the memory of x until the stream has finished with it, even if x is freed."""
        x.record_stream(stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, x: Tensor) -> Tensor:
        return x.pin_memory()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying `source` to `target`, between host and device."""
        target.copy_(source, non_blocking=True)

    def read(self, x: Tensor) -> Tensor:
        return x.cpu()

    def launch(self, kernel: Any, programs: int, like: Tensor, *arguments: Any, **options: Any) -> None:
        """Run `programs` instances of a Triton kernel on the device of `like`."""
        with torch.cuda.device(like.device) if on_gpu(like) else contextlib.nullcontext():
            kernel[(programs,)](*arguments, **options)


CUDA = Cuda()


def read(x: Tensor) -> Tensor:
    """Copy x to the host, waiting for the device."""
    return CUDA.read(x) if on_gpu(x) else x


def release_memory(device: torch.device) -> None:
    """Give unused memory that PyTorch caches back to the device."""
    if on_gpu(device):
        CUDA.empty_cache()


def pick_device(name: str, option: str = "parallel.device") -> torch.device:
    """Return the device `name`: cpu, cuda, or auto (the GPU if there is one). `option` names the setting in errors."""
    available = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"{option} is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not available:
        raise UserError(f"{option} is 'cuda' and no CUDA device is visible; use auto or cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, by its type on GPUs and its message on CPUs."""
    messages = ("not enough memory", "can't allocate memory", "cannot allocate memory", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in messages)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's architecture and number of threads."""
    if on_gpu(device):
        return CUDA.name(device)
    return f"cpu {platform.machine()} x{torch.get_num_threads()}"


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """Measure the FLOP/s of a square matrix product: the best of repetitions within `seconds`."""
    size = 8192 if on_gpu(device) else 512  # large enough for the peak, small enough for 0.05 s
    # A separate generator, because measuring must not change the run's random numbers.
    a = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    torch.mm(a, a)  # warm-up: libraries choose their kernel in the first call
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def kept_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return `matmul_peak`, measured once per `session` (`job/session.py`), device, dtype and number of threads."""
    return kept(("matmul_peak", device, dtype, torch.get_num_threads()), lambda: matmul_peak(device, dtype))


def synchronize(device: torch.device) -> None:
    if on_gpu(device):
        CUDA.synchronize(device)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Call `step`; return the peak of the bytes that torch allocates, minus those allocated before."""
    if on_gpu(device):
        synchronize(device)
        held = CUDA.start_peak(device)
        step()
        synchronize(device)
        return CUDA.peak(device) - held
    gc.collect()  # garbage that is freed during the step would distort the measurement
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    held = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
