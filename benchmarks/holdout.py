"""Do 95 % intervals hold on real runs? Every family of tables is scored with what all other families teach.

    ISOFLOP_DATA=FOLDER python benchmarks/holdout.py [--cache FILE] [--only loss|isoflop]

Hides the dearest runs of a table (a factor of 2 in compute), forecasts them from what is cheaper by at least 3, 10, 30,
100 and 300 times, then hides the next dearest, up to six levels. Prints per family the share inside by point and with
hold-outs weighed alike, Winkler's score of log loss in %, the median error, and then the constants that all families
teach: those of fit/constants/forecast.yaml. The same for N* at hidden isoFLOP budgets.

Then isoFLOP budgets are hidden from each level up, and every method foretells N* at each hidden one from the cheaper
runs; it is compared with the vertex of the hidden budget alone, by a parabola and by a cubic.

Special here:
- Constants are chosen from a small grid: the lowest mean score of families weighed alike, among those whose mean
  coverage lies within a point of 95 %, if any.
- A family is what one group of people made: six corpora of Kempner are one, Llama 3 with and without outliers is one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pickle
import warnings
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from isoflop import fit
from isoflop.fit.approaches.approaches import Approach, isoflop, parametric
from isoflop.fit.approaches.isoflop import budget_levels
from isoflop.fit.mixture.mixture import FormMixture, Prior

Constants = tuple[float, float, float]  # rate, drift, disagreement
FACTORS, LEVELS = (3, 10, 30, 100, 300), 6
RATES = {"loss": (0.005, 0.01, 0.02), "size": (0.02, 0.05, 0.1)}
DRIFTS = {"loss": (0.2, 0.3, 0.4, 0.5, 0.7), "size": (1.0, 1.5, 2.0, 3.0, 4.0)}
DISAGREEMENTS = {"loss": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7), "size": (0.0, 0.3, 1.0, 1.5)}
LEVEL, HALF = 0.95, 1.959964
OWN, LEAST_SPAN = ("parabola", "cubic"), 3.0  # vertices to compare with, of budgets whose sizes span this factor
SCATTERS, SIZE_DRIFTS = (0.05, 0.1, 0.15), (0.05, 0.1, 0.2)
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


def fit_profiles(method: Any, runs: pd.DataFrame, budget: np.ndarray) -> fit.IsoflopProfiles:
    return fit.IsoflopProfiles(method).fit(runs.N, runs.D, runs.loss, runs.flops, budget)


def spread(profile: Any) -> float:
    """Standard deviation of a log vertex, by its draws."""
    low, high = np.nanpercentile(np.log(profile.N_draws), [15.87, 84.13])
    return float(0.5 * (high - low))


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


def vertices(family: str, table: int, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Per hidden isoFLOP budget, method and constants of the valley: log N* and the half-width of its interval."""
    labels, budgets = budget_levels(runs.flops.to_numpy(), runs.N.to_numpy())
    if not len(budgets):
        return
    budget = np.where(labels >= 0, budgets[labels], np.nan)
    on = labels >= 0
    own = {method: fit_profiles(method, runs[on], budget[on]).bootstrap(100) for method in OWN}
    wide = [p.N.max() >= LEAST_SPAN * p.N.min() for p in own["cubic"].profiles_]
    # Levels of compute that runs of few sizes pass by chance are no isoFLOP budgets.
    for level in range(2, len(budgets)) if np.mean(wide or [False]) > 0.5 else ():
        asked = [i for i in range(level, len(budgets)) if wide[i] and all(own[m].profiles_[i].accepted for m in OWN)]
        shown = (runs.flops < runs.flops[labels == level].min()).to_numpy() & ~np.isin(
            labels, range(level, len(budgets))
        )
        C, cheap = budgets[asked], runs[shown]
        for name, answer in size_answers(cheap, budget[shown], C) if asked else ():
            for k, i in enumerate(asked):
                true = {
                    m: (float(np.log(own[m].profiles_[i].N_best or np.nan)), spread(own[m].profiles_[i])) for m in OWN
                }
                said = {"log_N": answer[0][k], "half": answer[1][k], "true": true, "next": i == level}
                yield {"family": family, "table": table, "level": level, "method": name} | said


def size_answers(cheap: pd.DataFrame, budget: np.ndarray, C: np.ndarray) -> Iterator[tuple[Any, list[np.ndarray]]]:
    """Of each method that has an answer: its name, log N* at budgets (m,) and half-widths (m,)."""
    on = np.isfinite(budget)
    found: dict[Any, Approach] = {}
    for method in ("parabola", "cubic", "akima"):
        found[method] = isoflop(fit_profiles(method, cheap[on], budget[on]).bootstrap(200))
    valleys = fit_profiles("valley", cheap[on], budget[on])
    for scatter, drift in itertools.product(SCATTERS, SIZE_DRIFTS):
        prior = {"exponent": 0.5, "spread": 0.15, "scatter": scatter, "drift": drift}
        with patch("isoflop.fit.approaches.isoflop.read_constants", lambda _, prior=prior: {"isoflop": prior}):
            found["valley", scatter, drift] = isoflop(copy(valleys).bootstrap(200))
    columns = cheap.N.to_numpy(), cheap.D.to_numpy(), cheap.loss.to_numpy(), cheap.flops.to_numpy()
    with contextlib.suppress(fit.InputError):
        law = fit.ChinchillaLaw().fit(*columns[:3])
        law.bootstrap(200)
        found["approach 3"] = parametric(law, "")
    for name, approach in found.items():
        if approach.available:
            values, bands = approach.answers(C)
            low, high = np.log(bands["N"]).T if bands["N"] is not None else np.full((2, len(C)), np.nan)
            yield name, [np.log(values["N"]), 0.5 * (high - low)]
    with contextlib.suppress(fit.InputError):
        mixture = FormMixture().fit(*columns, groups=cheap.group)
        size, parts = mixture.size(C)
        yield "mixture", [size, HALF * np.sqrt(sum(parts.values()))]


def report_vertices(found: list[dict[str, Any]]) -> None:
    print("\nN* at hidden isoFLOP budgets, in %; the valley with the constants of the other families")
    families = list(dict.fromkeys(answer["family"] for answer in found))
    grid = list(itertools.product(SCATTERS, SIZE_DRIFTS))
    by: dict[Any, list[dict[str, Any]]] = {}
    for answer in found:
        by.setdefault((answer["family"], answer["method"]), []).append(answer)

    def errors(answers: list[dict[str, Any]], truth: str) -> tuple[np.ndarray, np.ndarray]:
        error = np.array([(abs(a["log_N"] - a["true"][truth][0]), a["half"]) for a in answers]).reshape(-1, 2)
        return error[:, 0], error[:, 1]

    def best(of: list[str]) -> tuple[float, float]:
        def cost(constants: tuple[float, float]) -> float:
            pairs = [errors(by[f, ("valley", *constants)], OWN[0]) for f in of]
            inside = np.mean([np.mean(e <= half) for e, half in pairs])
            winkler = [np.mean(2 * half + 2 / (1 - LEVEL) * np.maximum(e - half, 0)) for e, half in pairs]
            return float(np.mean(winkler) + 30 * max(LEVEL - 0.02 - inside, 0.0))

        return min(grid, key=cost)

    print("learnt from all: scatter, drift", best(families))
    for family in families:
        constants = best([f for f in families if f != family] or families)
        for answer in by[family, ("valley", *constants)]:
            by.setdefault((family, "valley"), []).append(answer)
    for truth in OWN:
        rows = []
        for method in ("parabola", "cubic", "akima", "approach 3", "mixture", "valley"):
            row: dict[str, Any] = {"method": method}
            for kind in ("all", "next"):
                each = {
                    f: errors([a for a in by.get((f, method), ()) if a["next"] or kind == "all"], truth)
                    for f in families
                }
                e, half = (np.concatenate([pair[i] for pair in each.values()]) for i in (0, 1))
                alike = np.median([100 * np.median(np.expm1(pair[0])) for pair in each.values() if len(pair[0])])
                row |= {
                    f"{kind}, budgets": len(e),
                    f"{kind}, error": 100 * np.median(np.expm1(e)),
                    f"{kind}, families alike": alike,
                }
                row[f"{kind}, inside"] = 100 * np.mean(e <= half)
                if kind == "all":
                    row |= {
                        f"{f}": f"{100 * np.median(np.expm1(p[0])):.0f} / {100 * np.mean(p[0] <= p[1]):.0f}"
                        for f, p in each.items()
                        if len(p[0])
                    }
            rows.append(row)
        print(f"\nagainst the vertex by a {truth}, whose own error is", end=" ")
        print(f"{100 * np.median([a['true'][truth][1] for a in found]):.0f} %")
        print(pd.DataFrame(rows).set_index("method").round(1).to_string())


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
    parser.add_argument("--only", choices=("loss", "isoflop"), help="one of the two parts")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for part, measure in (("loss", answers), ("isoflop", vertices)):
        if asked.only not in (part, None):
            continue
        cache = asked.cache and asked.cache.with_suffix(f".{part}{asked.cache.suffix}")
        found = pickle.loads(cache.read_bytes()) if cache and cache.exists() else []
        if not found:
            for table, (family, runs) in enumerate(tables(Path(os.environ["ISOFLOP_DATA"]))):
                found.extend(measure(family, table, runs))
                print(f"{family}: {len(runs)} runs", flush=True)
        if cache:
            cache.write_bytes(pickle.dumps(found))
        for quantity in RATES if part == "loss" else ():
            report(quantity, found)
        if part == "isoflop":
            report_vertices(found)


if __name__ == "__main__":
    main()
