"""Check whether a law of tuned runs predicts larger budgets better: the same grid with two `tuning`s, and its targets.

    python -m isoflop.bench.tilt FOLDER [OVERRIDE...] [--tunings fixed transfer]

Three budgets are fitted, and 3, 5, 7 and 10 times the largest are predicted, at two sizes each, trained by the same
rules. Prints the error of log loss of each target, its mean, how many intervals hold, and the exponent a of N*.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from .. import fit
from ..sweeps import prepare
from ..sweeps.entry import compose
from ..sweeps.execute.conduct import conduct
from ..sweeps.grid.isoflop import IsoflopGrid
from ..train.flops import tokens_for_budget

BUDGETS, FACTORS = (2e10, 6e10, 2e11), (3, 5, 7, 10)
COMMON = ["cluster=local", "tracker=none", "evaluate=none", "validations=1", "fit.bootstrap=200"]


def targets(overrides: list[str]) -> str:
    """Return the override `grid.points` with two sizes about the expected best of every target budget."""
    config = compose(["+grid=chinchilla", f"grid.budgets=[{BUDGETS[0]}]", *overrides])
    assert isinstance(config.grid, IsoflopGrid)
    base, points = prepare.resolve_runs(config)[0][0], []
    for budget in (BUDGETS[-1] * factor for factor in FACTORS):
        for model in replace(config.grid, span=3.0, sizes=2).models(base.model, budget):
            tokens = int(tokens_for_budget(model, base.data.sequence_length, budget)) // 8192 * 8192
            shape = f"model.width:{model.width},model.depth:{model.depth},model.heads:{model.heads}"
            points.append(f"{{{shape},tokens:{tokens}}}")
    return f"grid.points=[{','.join(points)}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tunings", nargs="+", default=["fixed", "transfer"])
    options, more = parser.parse_known_args()
    for tuning in options.tunings:
        overrides, tables = [f"tuning={tuning}", f"output_root={options.folder}", *COMMON, *more], []
        budgets = ["+grid=chinchilla", f"grid.budgets=[{','.join(map(str, BUDGETS))}]"]
        for name, grid in (("grid", budgets), ("targets", ["+grid=points", targets(overrides)])):
            conduct(replace(compose([*grid, *overrides]), sweep=f"{name}-{tuning}"), ["bench.tilt"])
            tables.append(fit.read_table(options.folder / f"{name}-{tuning}"))
        runs, large = tables
        forecast = fit.forecast(runs, N=large.N, D=large.D, level=0.95)
        error = np.log(forecast["loss"].to_numpy() / large.loss)
        inside = (forecast["low"] <= large.loss) & (large.loss <= forecast["high"])
        for N, D, loss, off in zip(large.N, large.D, large.loss, error, strict=True):
            print(f"{tuning}: N {N:,.0f} D {D:,.0f} loss {loss:.4f} predicted {off:+.2%}")
        print(f"{tuning}: mean error {np.abs(error).mean():.2%}, bias {error.mean():+.2%}, inside {inside.sum()}")
        for one in fit.analyze(runs, (BUDGETS[-1] * 10,), bootstrap=200).ranked:
            print(f"  a of {one.title}: {one.exponent} {one.exponent_interval}")


if __name__ == "__main__":
    main()
