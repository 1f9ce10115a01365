"""Do 95 % intervals hold on real runs? Every family of tables is scored with what all other families teach.

    ISOFLOP_DATA=FOLDER python benchmarks/holdout.py [--cache FILE]

Hides the dearest runs of a table (a factor of 2 in compute), forecasts them from what is cheaper by at least 3, 10, 30,
100 and 300 times, then hides the next dearest, up to six levels. Prints per family the share inside by point and with
hold-outs weighed alike, Winkler's score of log loss in %, the median error, and then the constants that all families
teach: those of fit/constants/forecast.yaml. The same for N* at hidden isoFLOP budgets.

Special here:
- Constants are chosen from a small grid: the lowest mean score of families weighed alike, among those whose mean
  coverage lies within a point of 95 %, if any.
- A family is what one group of people made: six corpora of Kempner are one, Llama 3 with and without outliers is one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from isoflop import fit
from isoflop.fit.mixture.mixture import FormMixture, Prior

Constants = tuple[float, float, float]  # rate, drift, disagreement
FACTORS, LEVELS = (3, 10, 30, 100, 300), 6
RATES = {"loss": (0.005, 0.01, 0.02), "size": (0.02, 0.05, 0.1)}
DRIFTS = {"loss": (0.2, 0.3, 0.4, 0.5, 0.7), "size": (1.0, 1.5, 2.0, 3.0, 4.0)}
DISAGREEMENTS = {"loss": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7), "size": (0.0, 0.3, 1.0, 1.5)}
LEVEL, HALF = 0.95, 1.959964
TEACH_ONLY = ("porian", "datablations")  # scored too, but not part of the published comparison


def tables(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """(family, table) with N, D, loss, flops and group."""

    def frame(N: Any, D: Any, loss: Any, flops: Any = None, group: Any = None) -> pd.DataFrame:
        found = pd.DataFrame({"N": np.asarray(N, float), "D": np.asarray(D, float), "loss": np.asarray(loss, float)})
        found["flops"] = 6 * found.N * found.D if flops is None else np.asarray(flops, float)
        found["group"] = np.arange(len(found)).astype(str) if group is None else np.asarray(group).astype(str)
        return found.replace([np.inf, -np.inf], np.nan).dropna().query("loss > 0").reset_index(drop=True)

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
    once = pd.read_csv(folder / "datablations/parametric_fit_runs.csv").query("D <= 1.001 * U")
    yield "datablations", frame(once.N, once.D, once.loss)


def hold_outs(runs: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Masks (n,) of what is shown and what is hidden."""
    top = runs.flops.max() * 1.0001
    for _ in range(LEVELS):
        if not top > 20 * runs.flops.min():  # also where nothing is cheaper
            return
        hidden = (runs.flops <= top) & (runs.flops > top / 2)
        for factor in FACTORS:
            cheap = runs.flops <= runs.flops[hidden].min() / factor * 1.0001
            shown = cheap & ~runs.group.isin(runs.group[hidden])
            points = runs.loc[shown, ["N", "D"]]
            if len(points.drop_duplicates()) >= 8 and points.nunique().min() >= 3:
                yield shown.to_numpy(), hidden.to_numpy()
        top = runs.flops[runs.flops <= top / 2].max() * 1.0001


def vertex(hidden: pd.DataFrame) -> tuple[float, float] | None:
    """The compute and the log N of the lowest loss of a hidden isoFLOP budget, where its runs show one."""
    if hidden.flops.max() > 1.05 * hidden.flops.min() or len(hidden) < 5:
        return None
    budget = np.full(len(hidden), hidden.flops.mean())
    found = fit.IsoflopProfiles().fit(hidden.N, hidden.D, hidden.loss, hidden.flops, budget).profiles_[0]
    if not (found.accepted and found.N_best and found.D_best):
        return None
    return 6.0 * found.N_best * found.D_best, float(np.log(found.N_best))


def answers(family: str, table: int, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Per hold-out, quantity and prior rate: errors, and variances before drift and disagreement have their shares."""
    mixture: FormMixture | None
    fitted: dict[bytes, FormMixture | None] = {}  # many levels and factors show the same runs
    for number, (shown, hidden) in enumerate(hold_outs(runs)):
        cheap, dear = runs[shown], runs[hidden]
        if shown.tobytes() not in fitted:
            try:
                mixture = FormMixture().fit(cheap.N, cheap.D, cheap.loss, flops=cheap.flops, groups=cheap.group)
            except fit.InputError:
                mixture = None
            fitted[shown.tobytes()] = mixture
        if (mixture := fitted[shown.tobytes()]) is None:
            continue
        best = vertex(dear)
        for i in range(len(RATES["loss"])):
            priors = {name: Prior(rates[i], 1.0, 1.0) for name, rates in RATES.items()}
            mixture.weigh(priors)
            error = np.log(mixture.predict(dear.N, dear.D) / dear.loss.to_numpy())
            found = [("loss", error, mixture.variances(dear.N, dear.D))]
            if best is not None:
                size, variances = mixture.size(np.array([best[0]]))
                found.append(("size", size - best[1], variances))
            for quantity, missed, parts in found:
                rate = RATES[quantity][i]
                name = f"{family}-{table}-{number}"
                yield {"quantity": quantity, "family": family, "name": name, "rate": rate, "error": missed} | parts


def scores(answer: dict[str, Any], drift: float, disagreement: float) -> tuple[np.ndarray, np.ndarray]:
    """What is inside (points,) and Winkler's score (points,)."""
    wide = answer["resampling"] + disagreement * answer["disagreement"] + drift**2 * answer["drift"]
    half, size = HALF * np.sqrt(wide + answer.get("noise", 0.0)), np.abs(answer["error"])
    return size <= half, 100 * (2 * half + 2 / (1 - LEVEL) * np.maximum(size - half, 0.0))


def choose(of: dict[Constants, dict[str, list[Any]]], families: list[str]) -> Constants:
    """The constants with the lowest mean score of these families, their mean coverage within a point of the level."""

    def cost(constants: Constants) -> float:
        inside, score = (
            np.array([np.mean([hold[which].mean() for hold in of[constants][f]]) for f in families]) for which in (0, 1)
        )
        return float(score.mean() + 3000 * max(abs(inside.mean() - LEVEL) - 0.01, 0.0))

    return min(of, key=cost)


def report(quantity: str, found: list[dict[str, Any]]) -> None:
    own = [answer for answer in found if answer["quantity"] == quantity]
    families = list(dict.fromkeys(answer["family"] for answer in own))
    of: dict[Constants, dict[str, list[Any]]] = {}
    for constants in itertools.product(RATES[quantity], DRIFTS[quantity], DISAGREEMENTS[quantity]):
        of[constants] = {family: [] for family in families}
        for answer in own:
            if answer["rate"] == constants[0]:
                held = (*scores(answer, *constants[1:]), answer["error"])
                of[constants][answer["family"]].append(held)
    rows, kept = [], []
    for family in families:
        constants = choose(of, [f for f in families if f != family])
        rows.append({"family": family, **shown(of[constants][family]), "rate, drift, disagreement": constants})
        kept += of[constants][family] if family not in TEACH_ONLY else []
    rows.append({"family": "all but " + " and ".join(TEACH_ONLY), **shown(kept)})
    print(f"\n{quantity}, each family with the constants of the others")
    print(pd.DataFrame(rows).set_index("family").to_string())
    print("learnt from all:", choose(of, families))


def shown(held: list[Any]) -> dict[str, Any]:
    inside, score, error = ([hold[i] for hold in held] for i in range(3))
    size = [100 * np.abs(np.expm1(e)) for e in error]
    return {
        "points": sum(map(len, inside)),
        "hold-outs": len(held),
        "inside %": round(100 * np.concatenate(inside).mean(), 1),
        "alike %": round(100 * np.mean([i.mean() for i in inside]), 1),
        "score": round(np.mean([s.mean() for s in score]), 2),
        "error %": round(np.median(np.concatenate(size)), 2),
        "error alike %": round(np.median([np.median(s) for s in size]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="keep the answers of all hold-outs in this file")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.cache and asked.cache.exists():
        found = pickle.loads(asked.cache.read_bytes())
    else:
        found = []
        for table, (family, runs) in enumerate(tables(Path(os.environ["ISOFLOP_DATA"]))):
            found += answers(family, table, runs)
            print(f"{family}: {len(runs)} runs", flush=True)
        if asked.cache:
            asked.cache.write_bytes(pickle.dumps(found))
    for quantity in RATES:
        report(quantity, found)


if __name__ == "__main__":
    main()
