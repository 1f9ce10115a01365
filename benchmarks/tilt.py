"""Does a law of tuned runs foretell dearer ones better? The same grid by two `tuning`s, and targets trained likewise.

    python benchmarks/tilt.py FOLDER [--tunings fixed transfer] [OVERRIDE...]

Three budgets are fitted, and 3, 5, 7 and 10 times the largest is foretold, at two sizes each. Prints the error of log
loss of each target, its mean, how many intervals hold, and the exponent a of N* with its interval.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from isoflop import fit
from isoflop.sweeps import prepare
from isoflop.sweeps.config import IsoflopGrid
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute.conduct import conduct
from isoflop.sweeps.grid.expand import isoflop_sizes
from isoflop.train.flops import tokens_for_budget

BUDGETS, FACTORS = (2e10, 6e10, 2e11), (3, 5, 7, 10)
COMMON = ["cluster=local", "tracker=none", "evaluate=none", "validations=1", "fit.bootstrap=200"]


def trained(folder: Path, name: str, tuning: str, grid: list[str]) -> Path:
    config = compose([*grid, f"tuning={tuning}", f"output_root={folder}", *COMMON])
    conduct(replace(config, sweep=name), ["benchmarks/tilt.py"])
    return folder / name


def targets(tuning: str, overrides: list[str]) -> str:
    """As points: two sizes about the expected best of every budget."""
    config = compose(["+grid=chinchilla", f"grid.budgets=[{BUDGETS[0]}]", f"tuning={tuning}", *COMMON, *overrides])
    assert isinstance(config.grid, IsoflopGrid)
    base, points = prepare.resolve_runs(config)[0][0], []
    for budget in (BUDGETS[-1] * factor for factor in FACTORS):
        for model in isoflop_sizes(replace(config.grid, span=3.0, sizes=2), base.model, budget):
            tokens = int(tokens_for_budget(model, base.data.sequence_length, budget)) // 8192 * 8192
            shape = f"model.width:{model.width},model.depth:{model.depth},model.heads:{model.heads}"
            points.append(f"{{{shape},tokens:{tokens}}}")
    return f"grid.points=[{','.join(points)}]"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--tunings", nargs="+", default=["fixed", "transfer"])
    asked, overrides = options.parse_known_args()
    budgets = f"grid.budgets=[{','.join(map(str, BUDGETS))}]"
    for tuning in asked.tunings:
        grid = trained(asked.folder, f"grid-{tuning}", tuning, ["+grid=chinchilla", budgets, *overrides])
        points = ["+grid=points", targets(tuning, overrides), *overrides]
        dear = fit.read_table(trained(asked.folder, f"targets-{tuning}", tuning, points))
        runs = fit.read_table(grid)
        found = fit.forecast(runs, N=dear.N, D=dear.D, level=0.95)
        error = np.log(found["loss"].to_numpy() / dear.loss)
        inside = (found["low"] <= dear.loss) & (dear.loss <= found["high"])
        for N, D, loss, off in zip(dear.N, dear.D, dear.loss, error, strict=True):
            print(f"{tuning}: N {N:,.0f} D {D:,.0f} loss {loss:.4f} foretold {off:+.2%}")
        print(
            f"{tuning}: mean error {np.abs(error).mean():.2%}, bias {error.mean():+.2%}, inside {inside.sum()} of "
            f"{len(inside)}; intervals half as wide as {np.log(found['high'] / found['low']).mean() / 2:.2%}"
        )
        for one in fit.analyze(runs, (BUDGETS[-1] * 10,), bootstrap=200).ranked:
            print(f"  a of {one.title}: {one.exponent} {one.exponent_interval}")


if __name__ == "__main__":
    main()
