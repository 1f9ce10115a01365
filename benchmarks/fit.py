"""Fits a second beside SciPy's L-BFGS-B, on the same runs and resamples: `python benchmarks/fit.py [--json]`."""

from __future__ import annotations

import json
import sys

from isoflop.fit.errors import InputError
from isoflop.sweeps.bench_fit import bench_fit, print_fit_benchmark

if __name__ == "__main__":
    try:
        rows = bench_fit()
    except InputError as error:
        sys.exit(str(error))
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows, indent=1))
    else:
        print_fit_benchmark(rows)
