"""The device a run trains on, and the matrix-product rate measured on it, against which MFU is stated."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import torch

from .errors import UserError
from .job.session import kept


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
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu {platform.machine()} x{torch.get_num_threads()}"


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """FLOP/s of plain square matrix products, the best of a short trial; the denominator of every MFU here."""
    size = 8192 if device.type == "cuda" else 512
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Memory that one step asks of torch's allocator beyond what was held before it, at its highest."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
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
