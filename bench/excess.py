"""Compare the rules of `tuning` with a search of learning rate and batch, at corners that `isoflop tune` has not seen.

    python -m isoflop.bench.excess FOLDER [--tuning transfer] [--corners two-decades|ten-times] [OVERRIDE...]

Every corner is searched with one seed over 4 learning rates and 4 batches, a factor of 2 apart, and further where the
best lies at an edge. Then the best three settings, the rules' and those of `tuning=fixed` are trained with four new
seeds. The excess is that of the rules' mean log loss over the lowest mean of the best three.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..sweeps import prepare
from ..sweeps.config import SweepConfig, TuningConfig
from ..sweeps.entry import compose
from ..sweeps.execute.check import variants
from ..sweeps.execute.conduct import conduct
from ..sweeps.grid.product import CheckGrid
from ..sweeps.runs.directory import SweepDirectory
from ..train.config import RunConfig, run_id
from ..train.flops import count_parameters, flops_exact

CORNERS = {  # width, depth, D: two decades of FLOPs, and ten times the largest run of the tune
    "two-decades": [(12, 2, 74e3), (20, 2, 98e3), (20, 2, 393e3), (28, 3, 197e3), (28, 3, 1.72e6), (48, 3, 762e3)],
    "ten-times": [(32, 4, 8e6)],
}
UNIT = 128 * 192  # tokens: a whole number of steps of every batch
RATES, BATCHES = [3e-3 * 2**i for i in range(4)], [2 * 2**i for i in range(4)]


def setting(run: RunConfig) -> tuple[float, int]:
    return run.optimizer.learning_rate, run.optimizer.batch_size


def with_setting(run: RunConfig, rate: float, batch: int, seed: int = 0) -> RunConfig:
    return replace(run, optimizer=replace(run.optimizer, learning_rate=rate, batch_size=batch), seed=seed)


def train(config: SweepConfig, runs: list[RunConfig]) -> dict[str, float]:
    """Train runs and return run id -> log loss, infinite for runs that failed."""
    points = [variants(run)[0] for run in runs]
    config = replace(config, grid=CheckGrid(points=points), data=runs[0].data, tuning=TuningConfig(), tokens=None)
    conduct(config, ["bench.excess"])
    sweep = SweepDirectory(Path(config.output_root) / str(config.sweep))
    summaries = {run_id(run): sweep.run(run_id(run)).summary() for run in runs}
    return {name: math.inf if one is None else math.log(one["val_loss"]) for name, one in summaries.items()}


def search(
    config: SweepConfig, corners: list[RunConfig], rates: list[float], batches: list[int]
) -> list[list[tuple[float, int]]]:
    """Return each corner's settings (rate, batch), best first. The grid is widened while the best is at an edge."""
    axes = [(list(rates), list(batches)) for _ in corners]
    while True:
        settings = [list(product(*pair)) for pair in axes]
        pairs = zip(corners, settings, strict=True)
        losses = train(config, [with_setting(run, *one) for run, some in pairs for one in some])
        wider = False
        for run, some, (rates, batches) in zip(corners, settings, axes, strict=True):
            by_setting = {one: losses[run_id(with_setting(run, *one))] for one in some}
            some.sort(key=by_setting.__getitem__)
            edges: list[tuple[list[Any], Any]] = [(rates, some[0][0]), (batches, some[0][1])]
            for values, best in edges:
                if best in (min(values), max(values)) and best != 1:
                    values.append(type(best)(best / 2 if best == min(values) else best * 2))
                    wider = True
        if not wider:
            return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tuning", default="transfer")
    parser.add_argument("--corners", default="two-decades", choices=CORNERS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--best", type=int, default=3, help="settings of the search that are trained again")
    parser.add_argument("--seeds", type=int, default=4, help="new seeds of each")
    options, overrides = parser.parse_known_args()
    points = ",".join(
        f"{{model.width:{w},model.depth:{d},model.heads:{max(1, w // 16)},tokens:{max(1, round(D / UNIT)) * UNIT}}}"
        for w, d, D in CORNERS[options.corners]
    )
    common = ["+grid=points", f"grid.points=[{points}]", "validations=1", "trunks=false", "cluster=local"]
    common += [f"output_root={options.folder}", "tracker=none", "evaluate=none", *overrides]
    ruled, plain = (compose([*common, f"tuning={name}"]) for name in (options.tuning, "fixed"))
    (corners, _), (untuned, _) = prepare.resolve_runs(ruled), prepare.resolve_runs(plain)
    config = replace(plain, sweep="corners", sweep_merge=True)
    seeds = range(101, 101 + options.seeds)
    best = [settings[: options.best] for settings in search(config, corners, options.rates, options.batches)]
    seeded = [
        [[with_setting(run, *one, seed) for seed in seeds] for one in [setting(run), *some]]
        + [[replace(fixed, seed=seed) for seed in seeds]]
        for run, fixed, some in zip(corners, untuned, best, strict=True)
    ]
    losses = train(config, [run for corner in seeded for group in corner for run in group])
    table = np.array([[[losses[run_id(run)] for run in group] for group in corner] for corner in seeded])
    excesses = []
    for run, some, rows in zip(corners, best, table, strict=True):
        means, error = rows.mean(axis=1), math.sqrt(rows.var(axis=1, ddof=1).mean() * 2 / len(seeds))
        excess, fixed = np.expm1(means[[0, -1]] - means[1:-1].min())
        excesses.append(excess)
        settings = ", ".join(f"{rate:.3g} x {batch}" for rate, batch in [setting(run), *some])
        title = f"N {count_parameters(run.model).N_total:,} D {run.D:,} C {flops_exact(run):.2e}"
        print(f"{title}: {excess:.2%}, fixed {fixed:.2%}, ± {error:.2%}; {options.tuning} and the search: {settings}")
    print(f"mean {np.mean(excesses):.2%}, worst {np.max(excesses):.2%}")


if __name__ == "__main__":
    main()
