"""What the rules of `tuning` cost at corners of a grid that `isoflop tune` has not seen, beside a search of each.

    python benchmarks/excess.py FOLDER [--tuning transfer] [--corners two-decades|ten-times] [OVERRIDE...]

At every corner 4 learning rates by 4 batches, a factor of 2 apart, with one seed; where the best lies at an edge, the
search goes on there. Then the best three settings, the rules' and those of `tuning=fixed`, with four new seeds each;
--rates, --batches, --best and --seeds make all of this smaller. The excess is that of the rules' mean log loss over the
lowest mean of the best, which luck has part in and which so errs on the side of the search.
FOLDER/corners holds the runs; an interrupted measurement goes on.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from isoflop.sweeps import prepare
from isoflop.sweeps.config import CheckGrid, SweepConfig, TuningConfig
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute.check import variants
from isoflop.sweeps.execute.conduct import conduct
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.train.config import RunConfig, run_id
from isoflop.train.flops import count_parameters, flops_exact

CORNERS = {  # width, depth, D: two decades of FLOPs, and ten times the dearest run of the tune
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
    """Log losses by run id, infinite where a run came to none."""
    points = [variants(run)[0] for run in runs]
    wanted = replace(config, grid=CheckGrid(points=points), data=runs[0].data, tuning=TuningConfig(), tokens=None)
    conduct(wanted, ["benchmarks/excess.py"])
    sweep = SweepDirectory(Path(config.output_root) / str(config.sweep))
    found = {run_id(run): sweep.run(run_id(run)).summary() for run in runs}
    return {name: math.inf if one is None else math.log(one["val_loss"]) for name, one in found.items()}


def search(
    config: SweepConfig, corners: list[RunConfig], first: tuple[list[float], list[int]]
) -> list[dict[tuple[float, int], float]]:
    """Log losses by setting at each corner, the best of which is at no edge, or at a batch of one sequence."""
    axes = [(list(first[0]), list(first[1])) for _ in corners]
    while True:
        asked = [
            [with_setting(run, lr, b) for lr in rates for b in batches]
            for run, (rates, batches) in zip(corners, axes, strict=True)
        ]
        losses = train(config, [run for each in asked for run in each])
        found = [{setting(run): losses[run_id(run)] for run in each} for each in asked]
        wider = False
        for (rates, batches), tried in zip(axes, found, strict=True):
            rate, batch = min(tried, key=lambda one: tried[one])
            if rate in (min(rates), max(rates)):
                rates.append(rate / 2 if rate == min(rates) else rate * 2)
                wider = True
            if batch in (min(batches), max(batches)) and batch > 1:
                batches.append(batch // 2 if batch == min(batches) else batch * 2)
                wider = True
        if not wider:
            return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--tuning", default="transfer")
    options.add_argument("--corners", default="two-decades", choices=CORNERS)
    options.add_argument("--rates", type=float, nargs="+", default=RATES)
    options.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options.add_argument("--best", type=int, default=3, help="settings of the search that are trained again")
    options.add_argument("--seeds", type=int, default=4, help="with so many new seeds")
    asked, overrides = options.parse_known_args()
    points = ",".join(
        f"{{model.width:{w},model.depth:{d},model.heads:{max(1, w // 16)},tokens:{max(1, round(D / UNIT)) * UNIT}}}"
        for w, d, D in CORNERS[asked.corners]
    )
    common = ["+grid=points", f"grid.points=[{points}]", "validations=1", "trunks=false", f"output_root={asked.folder}"]
    common += ["cluster=local", "tracker=none", "evaluate=none", *overrides]
    ruled, plain = (compose([*common, f"tuning={name}"]) for name in (asked.tuning, "fixed"))
    (corners, _), (untuned, _) = prepare.resolve_runs(ruled), prepare.resolve_runs(plain)
    config = replace(plain, sweep="corners", sweep_merge=True)
    tried, seeds = search(config, corners, (asked.rates, asked.batches)), range(101, 101 + asked.seeds)
    best = [sorted(one, key=lambda each: one[each])[: asked.best] for one in tried]
    seeded = [
        [[with_setting(run, *one, seed) for seed in seeds] for one in [setting(run), *several]]
        + [[replace(fixed, seed=seed) for seed in seeds]]
        for run, fixed, several in zip(corners, untuned, best, strict=True)
    ]
    losses = train(config, [run for corner in seeded for each in corner for run in each])
    table = np.array([[[losses[run_id(run)] for run in each] for each in corner] for corner in seeded])
    excesses = []
    for run, several, rows in zip(corners, best, table, strict=True):
        means, error = rows.mean(axis=1), math.sqrt(rows.var(axis=1, ddof=1).mean() * 2 / len(seeds))
        excess, fixed = np.expm1(means[[0, -1]] - means[1:-1].min())
        excesses.append(excess)
        settings = ", ".join(f"{lr:.3g} x {b}" for lr, b in [setting(run), *several])
        where = f"N {count_parameters(run.model).N_total:,} D {run.D:,} C {flops_exact(run):.2e}"
        print(f"{where}: {excess:.2%}, fixed {fixed:.2%}, ± {error:.2%}; {asked.tuning} and the search: {settings}")
    print(f"mean {np.mean(excesses):.2%}, worst {np.max(excesses):.2%}")


if __name__ == "__main__":
    main()
