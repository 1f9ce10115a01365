"""What this machine can do, without importing torch: cores, matrix-product rate, and whether SLURM answers."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys

# Budgets of a probed isoFLOP grid, as multiples of the smallest: one decade in four steps.
LADDER = (1.0, 2.0, 5.0, 10.0)
SIZES = 6


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The best of many short trials on one thread: other processes slow most of them down, but rarely all.
_TRIAL = """
import time
import numpy as np
a = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
best, stop = float("inf"), time.perf_counter() + {seconds}
while time.perf_counter() < stop:
    start = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - start)
print(2 * 512**3 / best)
"""


def core_flops_per_second(seconds: float = 0.4) -> float:
    """fp32 matrix-product rate of one core, through NumPy's BLAS, in a process of its own held to one thread."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, "1")}
    trial = [sys.executable, "-c", _TRIAL.format(seconds=seconds)]
    return float(subprocess.run(trial, capture_output=True, text=True, env=environment, check=True).stdout)


def probed_budgets(flops_per_second: float, jobs: int, minutes: float, half_speed_width: float) -> list[float]:
    """FLOP budgets whose grid of six sizes each fills about `minutes` on `jobs` cores.

    Rounded down to a power of two times 1e11, so that two probes of one machine, or two machines of one kind, nearly
    always plan the same runs.
    """
    typical_width = 20
    rate = flops_per_second * jobs * typical_width / (typical_width + half_speed_width)
    smallest = rate * minutes * 60 / (SIZES * sum(LADDER))
    smallest = 1e11 * 2.0 ** math.floor(math.log2(smallest / 1e11))
    return [smallest * step for step in LADDER]


def slurm_answers(timeout: float = 5.0) -> bool:
    """Whether `sbatch` exists and a controller replies; an installed client without a cluster does not count."""
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo", "-h"], capture_output=True, timeout=timeout, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
