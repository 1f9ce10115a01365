"""Fits per second beside SciPy's L-BFGS-B, on the same runs and resamples, one core against one: `isoflop bench fit`.

The runs are Hoffmann et al.'s as Besiroglu et al. (2024) read them off the figure, from ISOFLOP_DATA; else as many
random runs of a known law.

- One fit: the peer starts from each point of the published grid of 4500 (Hoffmann et al. 2022, appendix D.3); its time
  is that of random points of the grid, times 4500.
- The bootstrap: the peer starts once per resample, from the optimum of all runs.

The peer minimises Huber's function through log-sum-exp, in units that make its tolerances tight, with an analytic
gradient, which is the best that can be done with it, and with differences, which is how it is used.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from .. import fit
from ..fit.solver.solver import cores
from ..fit.uncertainty import identifiable_counts
from ..sweeps.plan.rates import processor_name
from .contenders import Row, plain_row

DELTA = 1e-3
AMPLITUDES, ENTROPIES, EXPONENTS = np.arange(0, 30, 5.0), np.arange(-1, 1.5, 0.5), np.arange(0, 2.5, 0.5)
GRID = list(product(AMPLITUDES, AMPLITUDES, ENTROPIES, EXPONENTS, EXPONENTS))  # log A, log B, log E, alpha, beta
UNIT = 1e3  # L-BFGS-B's tolerances are absolute below one, and the sum of Huber's function is about 1e-3
TIGHT = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 10_000, "maxfun": 100_000}
SAME, WORSE = 1e-6, 1e-9  # relative: the same optimum; a worse one


@dataclass
class Peer:
    """SciPy's L-BFGS-B on log A, log B, log E, alpha, beta of one table of n runs; weights (n,)."""

    N: Any
    D: Any
    loss: Any

    def __post_init__(self) -> None:
        self.log_n, self.log_d, self.target = (np.log(column) for column in (self.N, self.D, self.loss))

    def objective(self, theta: Any, weight: Any) -> tuple[float, Any]:
        """Sum of weighted Huber terms, and its gradient."""
        a, b, e, alpha, beta = theta
        terms = np.stack([a - alpha * self.log_n, b - beta * self.log_d, np.full_like(self.log_n, e)])
        top = terms.max(axis=0)
        share = np.exp(terms - top)
        total = share.sum(axis=0)
        residual = top + np.log(total) - self.target
        slope = np.clip(residual, -DELTA, DELTA)
        pull = weight * slope * share / total
        value = float(weight @ (slope * (residual - 0.5 * slope)))
        return value, np.array([*pull.sum(axis=1), -(pull[0] @ self.log_n), -(pull[1] @ self.log_d)])

    def minimise(self, start: Any, weight: Any, tight: bool = True, analytic: bool = True) -> float:
        """The objective where it ends."""
        from scipy.optimize import minimize

        unit = UNIT if tight else 1.0

        def scaled(theta: Any) -> Any:
            value, gradient = self.objective(theta, weight)
            return (unit * value, unit * gradient) if analytic else unit * value

        with np.errstate(all="ignore"):
            found = minimize(scaled, start, jac=analytic, method="L-BFGS-B", options=TIGHT if tight else {})
        return float(found.fun) / unit if np.isfinite(found.fun) else np.inf


def bench_fit(rounds: int = 7, resamples: int = 4000, peer_resamples: int = 20, peer_starts: int = 30) -> list[Row]:
    """One fit, and the bootstrap beside the peer with and without a gradient, with what each side reached."""
    said, N, D, loss = _runs()
    peer = Peer(N, D, loss)
    law = fit.ChinchillaLaw().fit(N, D, loss)
    return [
        _one_fit(said, law, peer, rounds, peer_starts),
        *_bootstrap(said, law, peer, rounds, resamples, peer_resamples),
    ]


def _one_fit(said: str, law: fit.ChinchillaLaw, peer: Peer, rounds: int, starts: int) -> Row:
    weight = np.ones_like(peer.loss)
    order = np.random.default_rng(0).permutation(len(GRID))
    ours: list[float] = []
    theirs: list[float] = []
    reached: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        points = [GRID[i] for i in order[turn * starts : (turn + 1) * starts]]
        with _one_core():
            ours.append(statistics.median(_seconds(lambda: law.fit(peer.N, peer.D, peer.loss)) for _ in range(5)))
            seconds, found = _each(points, partial(peer.minimise, weight=weight))
        theirs.append(seconds * len(GRID))
        reached[True] += found
        reached[False] += [peer.minimise(start, weight, tight=False) for start in points]
    ceiling = law.objective_ * (1 + SAME)
    row = _row(f"one fit of {said}", ours, theirs, f"SciPy L-BFGS-B, gradient given, from a grid of {len(GRID)}")
    return row | {
        "seconds": statistics.median(ours),
        "peer_seconds": statistics.median(theirs),
        "starts": law.starts_["tried"],
        "starts_agreeing": law.starts_["agreeing"],
        "peer_starts_agreeing": float(np.mean(np.array(reached[True]) <= ceiling)),
        "peer_starts_agreeing_at_default_tolerances": float(np.mean(np.array(reached[False]) <= ceiling)),
        "worse": int(law.objective_ > min(reached[True]) * (1 + WORSE)),
    }


def _bootstrap(
    said: str, law: fit.ChinchillaLaw, peer: Peer, rounds: int, resamples: int, peer_resamples: int
) -> list[Row]:
    p = law.problem_
    groups = np.arange(len(peer.N))
    # The resamples that the law's own bootstrap draws.
    counts, _ = identifiable_counts(groups, resamples, 0, np.stack([peer.N, peer.D]), law.weight_, p.axes, p.free)
    start = np.array([np.log(law.A_), np.log(law.B_), np.log(law.E_), law.alpha_, law.beta_])
    ours: list[float] = []
    everywhere: list[float] = []
    theirs: dict[bool, list[float]] = {True: [], False: []}
    reached: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        some = counts[turn * peer_resamples : (turn + 1) * peer_resamples]
        with _one_core():
            ours.append(_seconds(lambda: law.bootstrap(resamples)) / resamples)
            for analytic in (True, False):
                seconds, found = _each(some, partial(peer.minimise, start, analytic=analytic))
                theirs[analytic].append(seconds)
                reached[analytic] += found
        everywhere.append(_seconds(lambda: law.bootstrap(resamples)))
    best = _objectives(law, peer, counts[: rounds * peer_resamples])
    rows = []
    for analytic, how in ((True, "gradient given"), (False, "gradient by differences")):
        name = f"SciPy L-BFGS-B, {how}, one start"
        ratio = np.array(reached[analytic]) / best
        rows.append(
            _row(f"bootstrap of {said}, {resamples} resamples", ours, theirs[analytic], name)
            | {
                "seconds": statistics.median(ours) * resamples,
                "seconds_all_cores": statistics.median(everywhere),
                "cores": cores(),
                "compared": len(ratio),
                "worse": int((ratio < 1 - WORSE).sum()),
                "peer_worse": int((ratio > 1 + SAME).sum()),
            }
        )
    return rows


def _objectives(law: fit.ChinchillaLaw, peer: Peer, counts: Any) -> Any:
    """What the law's draws give on these resamples, the first that it drew, by the peer's own function."""
    draws = law.draws_
    if draws is None or law.bootstrap_["unconverged"]:
        raise RuntimeError("a resample did not converge, so draws and resamples no longer belong together")
    theta = [np.log(draws["A"]), np.log(draws["B"]), np.log(draws["E"]), draws["alpha"], draws["beta"]]
    return np.array([peer.objective(t, c)[0] for t, c in zip(np.stack(theta, 1), counts, strict=False)])


def _row(case: str, ours: list[float], theirs: list[float], peer: str) -> Row:
    """`ours` and `theirs` are seconds per fit, one per round."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    mine, other = (1.0 / statistics.median(seconds) for seconds in (ours, theirs))
    place = f"{processor_name()}, one core"
    row = plain_row(case, mine, other, peer, "fits/s", place, statistics.median(ratios))
    return row | {"spread": (quarters[2] - quarters[0]) / 2}


def _runs() -> tuple[str, Any, Any, Any]:
    """What the runs are, and their N, D and loss."""
    folder = os.environ.get("ISOFLOP_DATA")
    if folder:
        path = Path(folder) / "epoch" / "svg_extracted_data.csv"
        t = fit.read_table(path, columns={"N": "Model Size", "flops": "Training FLOP"}, derive_d="6nd", drop_worst=5)
        return f"the epoch data ({len(t)} runs)", t.N, t.D, t.loss
    rng = np.random.default_rng(0)
    N, D = 10 ** rng.uniform(7.8, 10.1, 240), 10 ** rng.uniform(8.5, 11.5, 240)
    noise = 0.005 * rng.standard_t(3, 240)
    return "240 random runs of a known law", N, D, (1.817 + 482.0 / N**0.348 + 2085.0 / D**0.366) * np.exp(noise)


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _each(inputs: Any, work: Callable[[Any], float]) -> tuple[float, list[float]]:
    """Seconds per input, and what `work` gave for each."""
    found: list[float] = []
    return _seconds(lambda: found.extend(work(each) for each in inputs)) / len(inputs), found


@contextmanager
def _one_core() -> Iterator[None]:
    """Our solver reads OMP_NUM_THREADS at each call; SciPy's optimizer has one thread anyway."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def print_fit_benchmark(rows: list[Row]) -> None:
    one, *boots = rows
    print(f"On {one['device']}, in turn with the peer.\n")
    print(f"{one['case']}: {1e3 * one['seconds']:.1f} ms, {one['starts_agreeing']} of {one['starts']} starts agree")
    print(f"  {one['peer_name']}: {one['peer_seconds']:.1f} s; {one['peer_starts_agreeing']:.1%} of its starts")
    print(f"  reach that optimum, {one['peer_starts_agreeing_at_default_tolerances']:.1%} at its default tolerances")
    print(f"  ratio {one['ratio']:,.0f} ± {one['spread']:,.0f}; ours is {'WORSE' if one['worse'] else 'not worse'}\n")
    boot = boots[0]
    print(f"{boot['case']}: {boot['seconds']:.2f} s on one core, {boot['seconds_all_cores']:.2f} s on {boot['cores']}")
    print(f"  {1e3 / boot['ours']:.3f} ms per fit")
    for boot in boots:
        ratio = f"{boot['ratio']:.0f} ± {boot['spread']:.0f}"
        print(f"  {boot['peer_name']}: {1e3 / boot['peer']:.1f} ms per fit, ratio {ratio}")
        print(f"    of {boot['compared']} resamples ours is worse in {boot['worse']}, the peer in {boot['peer_worse']}")
