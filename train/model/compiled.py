"""The folder of compiled code in the project's cache, where later runs of the same shape find it."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig, canonical_json
from ..data.storage import cache_directory
from ..hardware import CUDA, on_gpu

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def set_up_compiler(config: RunConfig, device: torch.device) -> None:
    """Set the folder of compiled code, and PyTorch's limits for many model shapes. Call before compiling."""
    made_for = hashlib.sha256(canonical_json(environment(device)).encode()).hexdigest()[:24]
    os.environ.setdefault(FOLDER, str(cache_directory(config.data) / "compiled" / made_for))
    # One process may train many shapes, and each gets its own code, as in a separate process. PyTorch's defaults would
    # compile the second for varying shapes, and silently not compile the ninth. Both limits are chosen by hand.
    limits = torch.compiler.config
    limits.automatic_dynamic_shapes = False
    limits.recompile_limit = max(limits.recompile_limit, 256)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4096)


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and hardware that compiled code depends on."""
    result: dict[str, Any] = {
        "torch": [torch.__version__, str(Path(torch.__file__).parent)],  # the kernels are linked against it
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if on_gpu(device):
        return result | {"device": CUDA.name(device), "capability": [*CUDA.capability(device)]}
    return result | {"device": torch.backends.cpu.get_cpu_capability(), "flags": _cpu_flags()}


def _cpu_flags() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()
