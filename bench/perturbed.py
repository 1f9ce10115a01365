"""Run the tests of `fit` under changes that must not matter, and list the tests that fail only then.

    python bench/perturbed.py [ulp rows threads]    # by default all; about a minute each on an idle core

The changes: the last bit of every number of a table or a law's data is cleared or set (`ulp`), rows are shuffled
(`rows`), and BLAS works with 2 and 3 threads (`threads`). A test that fails under `ulp` or `rows` may just compare its
input to the last bit, or row by row.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAST_ROWS = 6  # shorter columns are targets, which answers repeat to the last bit
CHANGES = {
    "ulp": [{"PERTURB": "clear"}, {"PERTURB": "set"}],
    "rows": [{"PERTURB": "rows"}],
    "threads": [{"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}, {"OPENBLAS_NUM_THREADS": "3"}],
}


def pytest_configure() -> None:
    """Patch the package `fit` with the change that $PERTURB names, when pytest loads this module as a plugin."""
    if (change := os.environ.get("PERTURB")) is None:
        return
    import numpy as np
    import pytest

    from ..fit import errors, table

    checked, where, patch = errors.check_numbers, table.RunTable.where, pytest.MonkeyPatch()

    def moved(name: str, values: Any, *rest: Any) -> Any:
        numbers = checked(name, values, *rest)
        if name == "weight" or len(numbers) < LEAST_ROWS:
            return numbers
        bits = numbers.view(np.int64)  # moving twice is the same as once, for a law that is read from a file
        return (bits | 1 if change == "set" else bits & ~1).view(np.float64)

    def shuffled(runs: Any, keep: Any) -> Any:
        return where(runs, np.random.default_rng(0).permutation(np.arange(len(runs))[keep]))

    if change == "rows":
        patch.setattr(table.RunTable, "where", shuffled)
    else:
        patch.setattr(errors, "check_numbers", moved)


def failures(environment: dict[str, str]) -> set[str]:
    """Return the tests of `fit` that fail in this environment."""
    plugin = ["-p", "isoflop.bench.perturbed"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *plugin, "tests/fit", "--tb=no", "-rfE"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if "passed" not in done.stdout:
        raise SystemExit(done.stdout + done.stderr)
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M))


def main(names: list[str]) -> None:
    """Print the tests that fail under each change and not without it."""
    if unknown := [name for name in names if name not in CHANGES]:
        raise SystemExit(f"{unknown[0]!r} is not a change; choose among {', '.join(CHANGES)}.")
    usual = failures({})
    for name in names or CHANGES:
        for environment in CHANGES[name]:
            new = sorted(failures(environment) - usual)
            print(f"{name} {environment}: {len(new)} more failures", *new, sep="\n  ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
