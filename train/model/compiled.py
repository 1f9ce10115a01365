"""Where the compiler keeps what it made of a block: in the project's cache, for the next run of the same shape."""

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
    """Before the first compilation: name the folder of its files, unless the user has, and allow many shapes."""
    made_for = hashlib.sha256(canonical_json(environment(device)).encode()).hexdigest()[:24]
    os.environ.setdefault(FOLDER, str(cache_directory(config.data) / "compiled" / made_for))
    # One process may train many shapes. Each gets its own code, as it would in a process of its own: by default the
    # second would be compiled for shapes that vary, and the ninth not at all, without a word.
    limits = torch.compiler.config
    limits.automatic_dynamic_shapes = False
    limits.recompile_limit = max(limits.recompile_limit, 256)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4096)


def environment(device: torch.device) -> dict[str, Any]:
    """What compiled code runs on: code made elsewhere may not run here."""
    found: dict[str, Any] = {
        "torch": [torch.__version__, str(Path(torch.__file__).parent)],  # which the kernels are linked against
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if on_gpu(device):
        return found | {"device": CUDA.name(device), "capability": [*CUDA.capability(device)]}
    return found | {"device": torch.backends.cpu.get_cpu_capability(), "flags": _cpu_flags()}


def _cpu_flags() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()
