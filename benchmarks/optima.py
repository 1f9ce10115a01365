"""Does a fit find its optimum? Every hold-out of the published tables, beside SciPy's polished multi-start.

    ISOFLOP_DATA=FOLDER python benchmarks/optima.py [--starts 8] [--every 1] [--law "gamma, tied"]

Prints per law the share of fits that end without an agreed optimum, how many hold a constant at a bound, and by how
much the worst objective lies above SciPy's (negative: below) under the same bounds: L-BFGS-B with the analytic gradient
from `--starts` of the law's own starts, every second one moved at random; the three best ends, and the fit itself, are
polished by a simplex and L-BFGS-B in turn, until that helps no more. Laws are those of a forecast, and Chinchilla's and
gamma with E given, free and tied. `--starts 0` leaves SciPy out, which takes seconds a table; `--every 5` asks it for
each fifth table only.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from isoflop import fit
from isoflop.benchmarks.holdout import hold_outs, tables
from isoflop.fit.laws.law import Law, LossLaw
from isoflop.fit.mixture.mixture import family
from scipy.optimize import minimize

UNIT = 1e3  # SciPy's tolerances are absolute below one
QUASI_NEWTON = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-16, "gtol": 1e-13, "maxcor": 20}
SIMPLEX = {"maxfev": 3000, "xatol": 1e-13, "fatol": 1e-15, "adaptive": True}
POLISHED, TURNS = 3, 4
SETTLED = 1e-11  # a turn that lowers the objective by less is the last
MOVED = 0.3  # standard deviation of a moved start, in 1 + the size of a coordinate
GIVEN = 0.7  # of the lowest loss: E where it is given


LAWS = (*family(), *(f"{form}, E given" for form in ("chinchilla", "chinchilla, tied", "gamma", "gamma, tied")))


def unfitted(name: str, least: float) -> LossLaw:
    """A law by its name, for a table with this lowest loss."""
    kind = fit.GammaLaw if name.startswith("gamma") else fit.ChinchillaLaw
    return family()[name] if name in family() else kind(tied="tied" in name, E=GIVEN * least)


def every_table(folder: Path) -> Iterator[pd.DataFrame]:
    """Those of holdout.py, Step Law's best runs, and ScaleBench's of repeated data, whose law this is not."""
    yield from (runs for _, runs in tables(folder))
    step = pd.read_csv(folder / "steplaw/dense_lr_bs_loss.csv").sort_values("smooth loss").drop_duplicates(["N", "D"])
    more = pd.concat([pd.read_csv(folder / f"scalebench/data_constrained_{part}.csv") for part in ("train", "test")])
    for N, D, loss in ((step.N, step.D, step["smooth loss"]), (more.params, more.tokens, more.loss)):
        runs = pd.DataFrame({"N": N.to_numpy(float), "D": D.to_numpy(float), "loss": loss.to_numpy(float)})
        yield runs.assign(flops=6 * runs.N * runs.D, group=np.arange(len(runs)))


def peer(law: Law, starts: int) -> float:
    """The lowest objective that SciPy finds for a fitted law."""
    p, delta, weight = law.problem_, law.delta, law.weight_

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, cache = p.form.value(theta[None, :])
        residual = value[0] - p.target
        slope = np.clip(residual, -delta, delta)
        gradient = p.form.gradient(cache, (weight * slope)[None, :])[0]
        return UNIT * float(weight @ (slope * (residual - 0.5 * slope))), UNIT * gradient

    def alone(theta: np.ndarray) -> float:
        return objective(theta)[0]

    def end(
        method: str, function: Callable[..., Any], theta: np.ndarray, **options: Any
    ) -> tuple[float, tuple[float, ...]]:
        bounds = list(zip(p.lower, p.upper, strict=True))
        found = minimize(function, theta, jac=function is objective, method=method, bounds=bounds, options=options)
        there = np.clip(found.x, p.lower, p.upper)
        return min((alone(at), tuple(at)) for at in (theta, there) if np.isfinite(alone(at)))

    own = p.starts(weight[None, :], None)[0]
    rng = np.random.default_rng(0)
    chosen = own[rng.permutation(len(own))[:starts]]
    chosen[::2] += MOVED * (1.0 + np.abs(chosen[::2])) * rng.standard_normal(chosen[::2].shape)
    ends = sorted(end("L-BFGS-B", objective, np.clip(at, p.lower, p.upper), **QUASI_NEWTON) for at in chosen)[:POLISHED]
    ends.append((np.inf, tuple(law.theta_)))
    for _ in range(TURNS):
        before = min(ends)[0]
        ends = [end("Nelder-Mead", alone, np.array(theta), **SIMPLEX) for _, theta in ends]
        ends = [end("L-BFGS-B", objective, np.array(theta), **QUASI_NEWTON) for _, theta in ends]
        if min(ends)[0] >= before * (1.0 - SETTLED):
            break
    return min(ends)[0] / UNIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=8, help="of SciPy per table")
    parser.add_argument("--every", type=int, default=1, help="ask SciPy for each so many-th table")
    parser.add_argument("--law", choices=LAWS, action="append", help="this one alone; may be repeated")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = {}
    for runs in every_table(Path(os.environ["ISOFLOP_DATA"])):
        for shown in (np.ones(len(runs), dtype=bool), *(shown for shown, _ in hold_outs(runs))):
            cases[runs[shown].to_csv()] = runs[shown]
    for name in asked.law or LAWS:
        fits, excess = [], [-np.inf]
        for number, runs in enumerate(cases.values()):
            try:
                fits.append(unfitted(name, runs.loss.min()).fit(runs.N, runs.D, runs.loss))
            except fit.InputError:
                continue
            if asked.starts and number % asked.every == 0:
                with np.errstate(all="ignore"):
                    excess.append(fits[-1].objective_ / peer(fits[-1], asked.starts) - 1.0)
        lost = sum(law.starts_["agreeing"] == 0 for law in fits)
        stuck = sum(bool(law.degenerate_) for law in fits)
        print(
            f"{name}: {len(fits)} fits, {lost} ({100 * lost / len(fits):.1f} %) without an agreed optimum, {stuck} "
            f"at a bound; beside SciPy on {len(excess) - 1}: worst {max(excess):+.1e}, worse by over 1e-9 "
            f"{sum(e > 1e-9 for e in excess)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
