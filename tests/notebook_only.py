"""Check that fits need only fit/requirements.txt: `python tests/notebook_only.py`, run by .ci/run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from isoflop import fit

for heavy in ("torch", "hydra", "lm_eval", "datasets", "wandb", "sklearn"):
    assert importlib.util.find_spec(heavy) is None, f"{heavy} is installed: this environment proves nothing"

random = np.random.default_rng(0)
N, D = (axis.ravel() for axis in np.meshgrid(10.0 ** np.arange(6, 9, 0.5), 10.0 ** np.arange(8, 11, 0.5)))
loss = (1.7 + 400 / N**0.34 + 410 / D**0.28) * np.exp(random.normal(0, 1e-3, N.size))
with tempfile.TemporaryDirectory() as folder:
    table = Path(folder) / "runs.csv"
    pd.DataFrame({"N": N, "D": D, "loss": loss}).to_csv(table, index=False)
    runs = fit.read_table(table)
    law = fit.ChinchillaLaw().fit(runs.N, runs.D, runs.loss).bootstrap(200)
    low, high = law.interval("alpha")
    assert low < 0.34 < high, (low, high)
    sweep = ["sweep", "+grid=smoke", "dry_run=true"]
    for arguments, code, message in ((["fit", str(table)], 0, ""), (sweep, 1, "hydra, which is not installed")):
        done = subprocess.run([sys.executable, "-m", "isoflop", *arguments], capture_output=True, text=True)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    fit.write_report(fit.analyze(runs), Path(folder) / "fit")
    assert (Path(folder) / "fit" / "report.html").stat().st_size > 10_000
print(law)
