"""Check on real runs that 95 % intervals hold, and learn the constants `loss` of fit/constants/forecast.yaml.

    ISOFLOP_DATA=FOLDER python -m isoflop.bench.holdout

Hides the largest runs of a table (a factor of 2 in compute), forecasts them from runs that are smaller by at least 3,
10, 30, 100 and 300 times, then hides the next largest, up to six levels. Every family (the tables of one group) is
scored with the constants that all other families teach: of a small grid the lowest mean score of families weighed
alike, with a mean coverage within a point of 95 %. The score is Winkler's, of log loss in %.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .. import fit
from ..fit.forecasting.forecaster import Prior
from ..fit.forecasting.mixture import FormMixture

Constants = tuple[float, float, float, float]  # rate, power, drift, disagreement
FACTORS, LEVELS = (3, 10, 30, 100, 300), 6
RATES, POWERS = (0.005, 0.01, 0.02), (0.5, 0.75, 1.0)
DRIFTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
DISAGREEMENTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
LEVEL, HALF = 0.95, 1.959964


def tables(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (family, table) for each public table below `folder`, with columns N, D, loss, flops and group."""

    def frame(N: Any, D: Any, loss: Any, flops: Any = None, group: Any = None) -> pd.DataFrame:
        table = pd.DataFrame({"N": np.asarray(N, float), "D": np.asarray(D, float), "loss": np.asarray(loss, float)})
        table["flops"] = 6 * table.N * table.D if flops is None else np.asarray(flops, float)
        table["group"] = np.arange(len(table)).astype(str) if group is None else np.asarray(group).astype(str)
        return table.replace([np.inf, -np.inf], np.nan).dropna().query("loss > 0").reset_index(drop=True)

    epoch = pd.read_csv(folder / "epoch/svg_extracted_data.csv").sort_values("loss").iloc[:-5]
    size, flops = epoch["Model Size"], epoch["Training FLOP"]
    yield "epoch", frame(size, flops / 6 / size, epoch.loss, flops)
    llama = pd.read_csv(folder / "llama3/isoflops.csv")
    for part in (llama, llama[~llama.outlier.astype(bool)]):
        yield "llama3", frame(part.params, part.tokens, part.loss, part.budget)
    for _, runs in pd.read_csv(folder / "kempner/runs.csv").groupby("data"):
        yield "kempner", frame(runs.params, runs.tokens, runs.val_loss, runs.iso_flop)
    best = pd.read_csv(folder / "oellm/best.csv")
    best = best[~((best.N > 1.7e9) & best.D.isin([1.2e11, 2e11]))]  # two optima of a broken surface
    yield "oellm", frame(best.N, best.D, best.loss, best.C)
    gem = pd.read_csv(folder / "gemstones/hot_100bplus.csv")
    yield "gemstones", frame(gem.params_active_precise, gem.tokens, gem.final_loss, group=gem.run_name)
    for _, runs in pd.read_csv(folder / "gadre/gadre_runs.csv").groupby("train_dataset"):
        yield "gadre", frame(runs.N, runs.D, runs.loss_c4_val)
    porian = pd.read_csv(folder / "porian/isoflop_points.csv").query("param_count == 'standard' and val == 'val'")
    for _, runs in porian.groupby(["dataset", "hparams", "warmup", "decay"]):
        yield "porian", frame(runs.n, runs.flops / 6 / runs.n, runs.loss, runs.flops)
    single_epoch = pd.read_csv(folder / "datablations/parametric_fit_runs.csv").query("D <= 1.001 * U")
    yield "datablations", frame(single_epoch.N, single_epoch.D, single_epoch.loss)


def hold_outs(runs: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield masks (n,) of the runs shown and hidden in each hold-out."""
    top = runs.flops.max() * 1.0001
    for _ in range(LEVELS):
        if not top > 20 * runs.flops.min():  # also if no run is left below
            return
        hidden = (runs.flops <= top) & (runs.flops > top / 2)
        for factor in FACTORS:
            small = runs.flops <= runs.flops[hidden].min() / factor * 1.0001
            shown = small & ~runs.group.isin(runs.group[hidden])
            points = runs.loc[shown, ["N", "D"]]
            if len(points.drop_duplicates()) >= 8 and points.nunique().min() >= 3:
                yield shown.to_numpy(), hidden.to_numpy()
        top = runs.flops[runs.flops <= top / 2].max() * 1.0001


def answers(family: str, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield a dict per hold-out, rate and power: errors of predicted log losses, and their variances before scaling."""
    fitted: dict[bytes, FormMixture | None] = {}  # many levels and factors show the same runs
    for shown, hidden in hold_outs(runs):
        small, large = runs[shown], runs[hidden]
        if shown.tobytes() not in fitted:
            fitted[shown.tobytes()] = None
            with suppress(fit.InputError):
                columns = (small.N, small.D, small.loss)
                fitted[shown.tobytes()] = FormMixture().fit(*columns, flops=small.flops, groups=small.group)
        if (mixture := fitted[shown.tobytes()]) is None:
            continue
        for rate, power in itertools.product(RATES, POWERS):
            mixture.weigh({name: Prior(rate, 1.0, 1.0, power) for name in ("loss", "size")})
            error = np.log(mixture.predict(large.N, large.D) / large.loss.to_numpy())
            yield {"family": family, "by": (rate, power), "error": error} | mixture.variances(large.N, large.D)


def scores(answer: dict[str, Any], drift: float, disagreement: float) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each point lies in its interval, (points,), and its Winkler score, (points,)."""
    variance = answer["resampling"] + disagreement * answer["disagreement"] + drift**2 * answer["drift"]
    half, size = HALF * np.sqrt(variance + answer.get("noise", 0.0)), np.abs(answer["error"])
    return size <= half, 100 * (2 * half + 2 / (1 - LEVEL) * np.maximum(size - half, 0.0))


def choose(of: dict[Constants, dict[str, list[Any]]], families: list[str]) -> Constants:
    """Return the constants with the lowest mean score over `families` and a mean coverage within a point of 95 %."""

    def cost(constants: Constants) -> float:
        inside, score = (
            np.array([np.mean([hold[which].mean() for hold in of[constants][f]]) for f in families]) for which in (0, 1)
        )
        return float(score.mean() + 3000 * max(abs(inside.mean() - LEVEL) - 0.01, 0.0))

    return min(of, key=cost)


def report(results: list[dict[str, Any]]) -> None:
    families = list(dict.fromkeys(answer["family"] for answer in results))
    of: dict[Constants, dict[str, list[Any]]] = {}
    for constants in itertools.product(RATES, POWERS, DRIFTS, DISAGREEMENTS):
        of[constants] = {family: [] for family in families}
        for answer in results:
            if answer["by"] == constants[:2]:
                of[constants][answer["family"]].append((*scores(answer, *constants[2:]), answer["error"]))
    rows = {}
    for family in families:
        constants = choose(of, [f for f in families if f != family])
        inside, score, error = zip(*of[constants][family], strict=True)
        rows[family] = {
            "points": sum(map(len, inside)),
            "hold-outs": len(inside),
            "inside %": 100 * np.concatenate(inside).mean(),
            "score": np.mean([s.mean() for s in score]),
            "error %": 100 * np.median(np.abs(np.expm1(np.concatenate(error)))),
            "rate, power, drift, disagreement": constants,
        }
    print(pd.DataFrame(rows).T.round(2).to_string())
    print("learnt from all:", choose(of, families))


def main() -> None:
    warnings.simplefilter("ignore")
    results = list[dict[str, Any]]()
    for family, runs in tables(Path(os.environ["ISOFLOP_DATA"])):
        results.extend(answers(family, runs))
        print(f"{family}: {len(runs)} runs", flush=True)
    report(results)


if __name__ == "__main__":
    main()
