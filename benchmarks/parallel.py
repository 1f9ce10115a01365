"""Our data, ZeRO and tensor parallelism beside PyTorch's own: `python benchmarks/parallel.py [--json]`."""

from __future__ import annotations

import json
import sys

from isoflop.sweeps.bench_parallel import bench_parallel
from isoflop.sweeps.benchmarks import print_benchmark

if __name__ == "__main__":
    rows = bench_parallel()
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows, indent=1))
    else:
        print_benchmark(rows)
