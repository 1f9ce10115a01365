"""Seconds to the end of the first compiled step: nothing compiled yet, the same again, and another depth of that width.

    python benchmarks/compiled.py [--threads 2] [--rounds 3]

Each is a process of its own with a compiler folder of its own, which is empty: what is there comes from the file that
the first one has kept. Printed are the seconds from the building of the stepper, and those of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import json, sys, time
from pathlib import Path
import torch
from isoflop.bench.train import bench_config, build_stepper
from isoflop.train.data.shards import prepare
from isoflop.train.parallel.mesh import Mesh
folder, depth, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
config = bench_config("fp32", folder, compiled=True)
config.model.depth = depth
prepare(config.data)
start = time.perf_counter()
stepper = build_stepper(config, Mesh())
stepper.step(0).loss.item()
print(json.dumps(time.perf_counter() - start))
"""


def first_step(folder: Path, depth: int, threads: int) -> tuple[float, float]:
    """Seconds to the end of the first step of a fresh process, and of the whole process."""
    with tempfile.TemporaryDirectory() as compiler:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": compiler, "ISOFLOP_CACHE": str(folder / "cache")}
        started = time.perf_counter()
        command = [sys.executable, "-c", CHILD, str(folder), str(depth), str(threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1])), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = {"nothing compiled yet": (5, 1), "the same again": (5, options.rounds), "depth 9": (9, options.rounds)}
        for case, (depth, rounds) in cases.items():
            measured = [first_step(folder, depth, options.threads) for _ in range(rounds)]
            step, whole = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{case:22} first step after {step:5.1f} s, whole process {whole:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
