"""Tokens a second of our trainer beside transformers' LlamaForCausalLM: `python benchmarks/train.py [--json]`."""

from __future__ import annotations

import json
import sys

from isoflop.sweeps.benchmarks import bench_train, print_benchmark
from isoflop.train.errors import UserError

if __name__ == "__main__":
    try:
        rows = bench_train()
    except UserError as error:
        sys.exit(str(error))
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows, indent=1))
    else:
        print_benchmark(rows)
