"""How well laws of whole loss curves predict real and simulated runs.

    ISOFLOP_DATA=FOLDER python benchmarks/curves.py [--part mlp|chess|simulated] [--seeds 40]
    python benchmarks/curves.py --schedules SWEEP   # of benchmarks/schedules
    python benchmarks/curves.py --begun SWEEP       # any finished sweep without trunks

- mlp: of each pair of schedules, all sizes and lengths, the last losses under the other schedules, by each form; beside
  an offset power law in steps through the run's size and the mean last loss of the known schedules. Developed on the
  10.5M networks of 244139 steps; "aside" leaves these out of what is scored and fitted.
- chess: last losses from the first 30 % of each run and all runs of smaller sizes, beside an offset power law in steps
  and the last loss seen. Developed on seeds 0 and 1; 2 to 4 are aside.
- schedules: laws fitted to three schedules at all sizes, by seed; last held-out losses under the other six.
- begun: last training losses (smoothed) of a sweep's runs from their first 30 % and all runs of other sizes.
- simulated: coverage of a new run's last loss under another schedule; runs differ by 0.2 %, points by 0.1 %, AR(0.8).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from isoflop import fit
from scipy.optimize import curve_fit

DEV_SIZE, DEV_STEPS, DEV_SEEDS = 10494976, 244139, (0, 1)


def load(name: str) -> pd.DataFrame | None:
    path = Path(os.environ.get("ISOFLOP_DATA", "")) / "curves" / f"{name}.csv.gz"
    if not path.is_file():
        print(f"{name}: no {path}; skipped")
        return None
    table = pd.read_csv(path).rename(columns={"test_loss": "loss", "num_params": "N"})
    return table[table.step >= 1].assign(run=table.run.astype(str))


def rates(rows: pd.DataFrame) -> Any:
    return np.interp(np.arange(1, rows.step.max() + 1), rows.step, rows.lr)


def power_law(rows: pd.DataFrame, last: float) -> float:
    """L = E + A step^-a through the rows after the first 2 % of their steps, at `last`."""
    rows = rows[rows.step > 0.02 * rows.step.max()]
    t, y = rows.step / rows.step.max(), rows.loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, _ = curve_fit(
                lambda t, e, a, p: e + a * t**-p, t, y, (0.9 * y.min(), 0.1 * y.min(), 0.5), maxfev=5000,
                bounds=(0, [y.max(), 10 * y.max(), 5]),
            )  # fmt: skip
        except RuntimeError:
            return float("nan")
    return float(found[0] + found[1] * (last / rows.step.max()) ** -found[2])


def line(label: str, errors: list[float], held: list[bool], half: list[float], seconds: float = np.nan) -> None:
    e = 100 * np.abs(np.array(errors))
    said = f"{sum(held)}/{len(held)}, half-width {100 * np.median(half):.2f} %" if held else "-"
    print(
        f"{label:44s} n {len(e):3d}  mean {np.nanmean(e):6.2f} %  median {np.nanmedian(e):6.2f} %"
        f"  worst {np.nanmax(e):6.2f} %  held {said}  {seconds:.2f} s",
        flush=True,
    )


def mlp(aside: bool) -> None:
    if (table := load("mlp_schedules")) is None:
        return
    dev = (table.N == DEV_SIZE) & (table.groupby("run").step.transform("max") == DEV_STEPS)
    table = table[~dev] if aside else table[dev]
    runs = {run: rows for run, rows in table.groupby("run")}
    kind = {run: rows.schedule.iloc[0] for run, rows in runs.items()}
    planned = {run: rates(rows) for run, rows in runs.items()}
    many = table.N.nunique() > 1
    print(f"MLPs, {'aside' if aside else 'developed on'}: {len(runs)} runs")
    pairs = list(itertools.combinations(sorted(set(kind.values())), 2))
    for form in ("multi-power", "annealing", "functional"):
        for fading in (True, False):
            errors, held, half, seconds = [], [], [], []
            for pair in pairs:
                known = table[table.schedule.isin(pair)]
                start = time.process_time()
                law = fit.CurveLaw(form, fading=fading).fit(known if many else known.drop(columns="N"))
                seconds.append(time.process_time() - start)
                for run, rows in runs.items():
                    if kind[run] in pair:
                        continue
                    loss, low, high = law.final(planned[run], N=rows.N.iloc[0] if many else None)
                    true = rows.loss.iloc[-1]
                    errors.append(loss / true - 1)
                    held.append(low <= true <= high)
                    half.append((high - low) / 2 / loss)
            line(f"{form}{'' if fading else ', as in its paper'}", errors, held, half, float(np.median(seconds)))
    by_power, by_last = [], []
    for pair, (run, rows) in itertools.product(pairs, runs.items()):
        known = table[table.schedule.isin(pair) & (rows.N.iloc[0] == table.N)]
        if kind[run] in pair or known.empty:
            continue
        true = rows.loss.iloc[-1]
        by_power.append(power_law(known.sort_values("step"), rows.step.max()) / true - 1)
        ends = known.sort_values("step").groupby("run").tail(1)
        by_last.append(ends.loss[(ends.step == rows.step.max())].mean() / true - 1)
    line("offset power law in steps", by_power, [], [])
    line("mean last loss of known schedules", by_last, [], [])


def chess(aside: bool) -> None:
    if (table := load("chess")) is None:
        return
    table = table[table.seed.isin(DEV_SEEDS) != aside]
    last = table.groupby("run").step.transform("max")
    planned = {run: rates(rows) for run, rows in table.groupby("run")}
    true = table.groupby("run").loss.last()
    print(f"Chess, {'aside' if aside else 'developed on'}: {len(planned)} runs")
    found: dict[str, list[Any]] = {name: [] for name in ("law", "held", "half", "power", "last", "all", "seconds")}
    for N in sorted(table.N.unique()):
        known = table[(table.N < N) | ((table.N == N) & (table.step <= 0.3 * last))]
        start = time.process_time()
        forecast = fit.forecast_final(known, {run: planned[run] for run in known.run.unique()})
        found["seconds"].append(time.process_time() - start)
        for run in map(str, forecast.index):
            row: Any = forecast.loc[run]
            rows = known[known.run == run]
            found["all"].append(row.loss / true[run] - 1)
            found["power"].append(power_law(rows, len(planned[run])) / true[run] - 1)
            found["last"].append(rows.loss.iloc[-1] / true[run] - 1)
            if not row.reason:
                found["law"].append(row.loss / true[run] - 1)
                found["held"].append(row.low <= true[run] <= row.high)
                found["half"].append((row.high - row.low) / 2 / row.loss)
    line("forecast_final, with an interval", found["law"], found["held"], found["half"], max(found["seconds"]))
    line("forecast_final, all", found["all"], [], [])
    line("offset power law in steps", found["power"], [], [])
    line("last loss", found["last"], [], [])


def simulated(seeds: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fit"))
    from test_curves import rates as shaped  # type: ignore[import-not-found]
    from test_curves import table, truth

    kinds, lr = ("constant", "cosine", "linear", "steps") * 2, shaped("wsd", 240)
    for form, fading in itertools.product(("multi-power", "functional"), (True, False)):
        errors, held, law_held, half = [], [], [], []
        for seed in range(100, 100 + seeds):
            generator = np.random.default_rng(seed)
            curves, _ = table(form, kinds, 240, 30, (generator, 0.002, 0.001, 0.8))
            curves["run"] = np.arange(len(curves)) // 30
            given = {str(i): shaped(kind, 240) for i, kind in enumerate(kinds)}
            loss, low, high = fit.CurveLaw(form, fading=fading).fit(curves, given).final(lr)
            true = truth(form, lr, [240])[0]
            seen = true * np.exp(generator.normal(0, 0.002) + generator.normal(0, 0.001))
            errors.append(loss / true - 1)
            law_held.append(bool(low <= true <= high))
            held.append(bool(low <= seen <= high))
            half.append((high - low) / 2 / loss)
        line(f"simulated {form}{'' if fading else ', d = 0'}", errors, held, half)
        print(f"{'':44s} the law's own loss held {sum(law_held)}/{seeds}")


def schedules(sweep: Path) -> None:
    curves, table = fit.read_curves(sweep), pd.read_csv(sweep / "table.csv", dtype={"run_id": str}).set_index("run_id")
    curves = curves[~curves.silent].drop(columns="silent")
    known = ("cosine", "constant", "steps")
    lr = {run: _exact(sweep, run) for run in table.index}
    by_seed = table.groupby(["N", "variant"])["loss"].std() / table.groupby(["N", "variant"])["loss"].mean()
    print(f"{len(table)} runs; standard deviation between seeds {100 * by_seed.mean():.2f} %")
    for form in ("multi-power", "annealing", "functional"):
        errors, held, half, seconds = [], [], [], []
        for _, own in table.groupby("seed"):
            start = time.process_time()
            law = fit.CurveLaw(form).fit(curves[curves.run.isin(own.index[own.variant.isin(known)])], lr)
            seconds.append(time.process_time() - start)
            for run, row in own[~own.variant.isin(known)].iterrows():
                loss, low, high = law.final(lr[run], N=row.N)
                errors.append(loss / row.loss - 1)
                held.append(low <= row.loss <= high)
                half.append((high - low) / 2 / loss)
        line(form, errors, held, half, float(np.median(seconds)))


def begun(sweep: Path) -> None:
    curves = pd.read_csv(sweep / "curves.csv", dtype={"run_id": str}).dropna(subset=["loss"]).drop(columns="val_loss")
    planned = {str(run): _exact(sweep, str(run)) for run in curves.run_id.unique()}
    errors, held, half, by_power, by_last = [], [], [], [], []
    for run, rows in curves.groupby("run_id"):
        true, seen = rows.loss.iloc[-1], rows[rows.step <= 0.3 * rows.step.max()]
        others = curves[rows.N.iloc[0] != curves.N]
        row: Any = fit.forecast_final(pd.concat([others, seen]), planned).loc[str(run)]
        errors.append(row.loss / true - 1)
        held.append(row.low <= true <= row.high)
        half.append((row.high - row.low) / 2 / row.loss)
        by_power.append(power_law(seen, rows.step.max()) / true - 1)
        by_last.append(seen.loss.iloc[-1] / true - 1)
    line("forecast_final", errors, held, half)
    line("offset power law in steps", by_power, [], [])
    line("last loss", by_last, [], [])


def _exact(sweep: Path, run: str) -> Any:
    """The rates of all steps of a run."""
    from isoflop.sweeps.runs.directory import SweepDirectory
    from isoflop.train.schedule import learning_rate_factor

    config = SweepDirectory(sweep).run(run).config()
    rate = config.optimizer.learning_rate
    return np.array([rate * learning_rate_factor(config, step) for step in range(config.steps)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Forecasts of laws of curves on real and simulated runs.")
    parser.add_argument("--part", choices=("mlp", "chess", "simulated"))
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--schedules", type=Path, metavar="SWEEP")
    parser.add_argument("--begun", type=Path, metavar="SWEEP")
    options = parser.parse_args()
    if options.schedules or options.begun:
        schedules(options.schedules) if options.schedules else begun(options.begun)
        sys.exit()
    for name, part in (("mlp", mlp), ("chess", chess)):
        if options.part in (None, name):
            part(False)
            part(True)
    if options.part in (None, "simulated"):
        simulated(options.seeds)
