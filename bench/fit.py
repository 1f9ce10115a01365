"""Time our fits and SciPy's L-BFGS-B on the same runs and resamples, one core each: `isoflop bench fit`.

The runs are Hoffmann et al.'s as Besiroglu et al. (2024) read them off the figure, from ISOFLOP_DATA; else random runs
of a known law. For one fit the peer starts from each point of the published grid of 4500 (Hoffmann et al. 2022,
appendix D.3); random points are timed, and their time is scaled. For the bootstrap it starts once per resample, from
the optimum of all runs, with an analytic gradient or, as is usual, differences.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from .. import fit
from ..fit.uncertainty import identifiable_counts, numbered
from ..sweeps.plan.rates import processor_name
from .timing import Row, timed_row

ABOUT = "worse: number of compared resamples in which our objective ends above the peer's; --json has more"
DELTA = 1e-3
AMPLITUDES, ENTROPIES, EXPONENTS = np.arange(0, 30, 5.0), np.arange(-1, 1.5, 0.5), np.arange(0, 2.5, 0.5)
GRID = list(product(AMPLITUDES, AMPLITUDES, ENTROPIES, EXPONENTS, EXPONENTS))  # log A, log B, log E, alpha, beta
UNIT = 1e3  # L-BFGS-B's tolerances are absolute below one, and the sum of Huber's function is about 1e-3
TIGHT = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 10_000, "maxfun": 100_000}
SAME, WORSE = 1e-6, 1e-9  # relative: the same optimum, a worse one
ONE_CORE = mock.patch.dict(os.environ, OMP_NUM_THREADS="1")  # our solver reads it at each call


@dataclass
class Peer:
    """The peer: SciPy's L-BFGS-B on log A, log B, log E, alpha and beta, for n runs with weights (n,)."""

    N: Any
    D: Any
    loss: Any

    def __post_init__(self) -> None:
        self.log_n, self.log_d, self.target = (np.log(column) for column in (self.N, self.D, self.loss))

    def objective(self, theta: Any, weight: Any) -> tuple[float, Any]:
        """Return the sum of weighted Huber terms, and its gradient."""
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

    def minimise(self, start: Any, weight: Any, analytic: bool = True) -> float:
        """Return the objective that L-BFGS-B reaches from a start; without `analytic`, gradients are differences."""
        from scipy.optimize import minimize

        def scaled(theta: Any) -> Any:
            value, gradient = self.objective(theta, weight)
            return (UNIT * value, UNIT * gradient) if analytic else UNIT * value

        with np.errstate(all="ignore"):
            result = minimize(scaled, start, jac=analytic, method="L-BFGS-B", options=TIGHT)
        return float(result.fun) / UNIT if np.isfinite(result.fun) else np.inf


def bench_fit(rounds: int = 7, resamples: int = 4000, peer_resamples: int = 20, peer_starts: int = 30) -> list[Row]:
    """Return a row of one fit, and two of the bootstrap: with a gradient for the peer and without."""
    title, N, D, loss = _runs()
    peer, law = Peer(N, D, loss), fit.ChinchillaLaw().fit(N, D, loss)
    ways = ((True, "gradient given"), (False, "gradient by differences"))
    bootstraps = [_bootstrap(title, law, peer, rounds, resamples, peer_resamples, *way) for way in ways]
    return [_one_fit(title, law, peer, rounds, peer_starts), *bootstraps]


def _one_fit(title: str, law: fit.ChinchillaLaw, peer: Peer, rounds: int, starts: int) -> Row:
    weight, order = np.ones_like(peer.loss), np.random.default_rng(0).permutation(len(GRID))
    ours, theirs, reached = list[float](), list[float](), list[float]()
    for turn in range(rounds):
        points = [GRID[i] for i in order[turn * starts : (turn + 1) * starts]]
        with ONE_CORE:
            ours.append(statistics.median(_seconds(law.fit, peer.N, peer.D, peer.loss) for _ in range(5)))
            seconds = _seconds(reached.extend, (peer.minimise(start, weight) for start in points))
        theirs.append(seconds * len(GRID) / starts)
    name = f"gradient given, from a grid of {len(GRID)}"
    return _row(f"one fit of {title}", ours, theirs, name) | {
        "seconds": statistics.median(ours),
        "peer_seconds": statistics.median(theirs),
        "starts": law.starts_["tried"],
        "starts_agreeing": law.starts_["agreeing"],
        "peer_starts_agreeing": float(np.mean(np.array(reached) <= law.objective_ * (1 + SAME))),
        "worse": int(law.objective_ > min(reached) * (1 + WORSE)),
    }


def _bootstrap(
    title: str, law: fit.ChinchillaLaw, peer: Peer, rounds: int, resamples: int, peer_resamples: int, analytic: bool,
    way: str,
) -> Row:  # fmt: skip
    problem, points = law.problem_, np.stack([peer.N, peer.D])
    # The resamples that the law's own bootstrap draws.
    counts, _ = identifiable_counts(
        numbered(np.arange(len(peer.N)), *law.data_.values()),
        resamples,
        0,
        points,
        law.weight_,
        problem.axes,
        problem.free,
    )
    start = np.array([np.log(law.A_), np.log(law.B_), np.log(law.E_), law.alpha_, law.beta_])
    ours, theirs, reached = list[float](), list[float](), list[float]()
    for turn in range(rounds):
        some = counts[turn * peer_resamples : (turn + 1) * peer_resamples]
        with ONE_CORE:
            ours.append(_seconds(law.bootstrap, resamples) / resamples)
            seconds = _seconds(reached.extend, (peer.minimise(start, weight, analytic) for weight in some))
        theirs.append(seconds / len(some))
    ratio = np.array(reached) / _objectives(law, peer, counts[: rounds * peer_resamples])
    return _row(f"bootstrap of {title}, {resamples} resamples", ours, theirs, f"{way}, one start") | {
        "seconds": statistics.median(ours) * resamples,
        "peer_seconds": statistics.median(theirs) * resamples,
        "compared": len(ratio),
        "worse": int((ratio < 1 - WORSE).sum()),
        "peer_worse": int((ratio > 1 + SAME).sum()),
    }


def _row(case: str, ours: list[float], theirs: list[float], way: str) -> Row:
    return timed_row(case, 1.0, "fits/s", ours, theirs, f"SciPy L-BFGS-B, {way}", f"{processor_name()}, one core")


def _objectives(law: fit.ChinchillaLaw, peer: Peer, counts: Any) -> Any:
    """Return the peer's objective at the constants of the law's first bootstrap draws, each on its resample."""
    draws = law.draws_
    if draws is None or law.bootstrap_["unconverged"]:
        raise RuntimeError("a resample did not converge, so draws and resamples do not correspond")
    theta = [np.log(draws["A"]), np.log(draws["B"]), np.log(draws["E"]), draws["alpha"], draws["beta"]]
    return np.array([peer.objective(t, c)[0] for t, c in zip(np.stack(theta, 1), counts, strict=False)])


def _runs() -> tuple[str, Any, Any, Any]:
    """Return the title, N, D and loss of the runs."""
    folder = os.environ.get("ISOFLOP_DATA")
    if folder:
        path = Path(folder) / "epoch" / "svg_extracted_data.csv"
        t = fit.read_table(path, columns={"N": "Model Size", "flops": "Training FLOP"}, derive_d="6nd", drop_worst=5)
        return f"the epoch data ({len(t)} runs)", t.N, t.D, t.loss
    rng = np.random.default_rng(0)
    N, D = 10 ** rng.uniform(7.8, 10.1, 240), 10 ** rng.uniform(8.5, 11.5, 240)
    noise = 0.005 * rng.standard_t(3, 240)
    return "240 random runs of a known law", N, D, (1.817 + 482.0 / N**0.348 + 2085.0 / D**0.366) * np.exp(noise)


def _seconds(work: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started
