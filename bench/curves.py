"""Laws of whole loss curves beside the multi-power law in PyTorch, much as its authors fit it: `isoflop bench curves`.

The peer is L(t) = L0 + A S(t)^-alpha - B sum_k (lr_{k-1} - lr_k) (1 - (1 + C lr_k^-gamma S_k(t))^-beta) (Luo et al.
2025, arXiv:2503.12811), its sum taken directly and its gradient by PyTorch: Adam on Huber's function of log loss, delta
1e-3, with their rates, 5e-2 for coefficients and 5e-3 for exponents, here of logarithms, from one start.

Simulated runs follow the peer's own law, with noise of 0.1 %. Of ISOFLOP_DATA's MLPs pairs of schedules predict the
last losses of the other three.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..fit import CurveLaw
from ..fit.curves.curves import Curve, curves_of
from ..sweeps.plan.rates import processor_name
from .contenders import Row, plain_row

ABOUT = "with --json also the mean and the worst error of last losses of the runs left aside, in %, of both"
DELTA = 1e-3
RATES = (5e-2, 5e-3)  # of Adam: coefficients, exponents
STAGES = 400  # of a schedule; a longer one is summed over as many stretches, which favours the peer
TRUE = {"E": 2.5, "A": 0.6, "alpha": 0.4, "B": 0.4, "C": 0.06, "beta": 0.5, "gamma": 0.5}  # rates in units of the peak
START = {"B": 0.1, "C": 0.03, "beta": 0.5, "gamma": 0.5}
STEPS = 1000
Case = tuple[str, list[pd.DataFrame], list[pd.DataFrame]]  # its words, known runs, runs left aside


class Terms:
    """What the law needs of one run: rates in units of `peak`, sums (points,), and since a drop (points, k)."""

    def __init__(self, curve: Curve, peak: float) -> None:
        edges = np.unique(np.linspace(0, len(curve.lr), min(len(curve.lr), STAGES) + 1).astype(int))
        total = np.concatenate([[0.0], np.cumsum(curve.lr / peak)])
        mean = np.diff(total[edges]) / np.diff(edges)
        drop = -np.diff(mean, prepend=mean[0])
        drop[: int(np.argmax(mean)) + 1] = 0.0
        since = np.clip(total[curve.steps][:, None] - total[edges[:-1]], 0.0, None)
        said = (total[curve.steps], np.maximum(mean, 1e-6), drop, since, np.log(curve.loss))
        self.total, self.rate, self.drop, self.since, self.target = (torch.tensor(one) for one in said)

    def losses(self, log: dict[str, Tensor]) -> Tensor:
        k = {name: value.exp() for name, value in log.items()}
        kernel = 1 - (1 + k["C"] * self.rate ** -k["gamma"] * self.since) ** -k["beta"]
        loss = k["E"] + k["A"] * self.total ** -k["alpha"] - k["B"] * (kernel * self.drop).sum(dim=1)
        return loss.clamp_min(1e-3)


class Peer:
    """The multi-power law of runs of one size."""

    def __init__(self, curves: Sequence[Curve], steps: int = STEPS) -> None:
        self.peak = max(float(curve.lr.max()) for curve in curves)
        runs = [Terms(curve.past_warmup(), self.peak) for curve in curves]
        total, target = (torch.cat([getattr(run, name) for run in runs]) for name in ("total", "target"))
        floor = 0.95 * float(target.min().exp())
        slope, level = np.polyfit(np.log(total.numpy()), np.log(target.exp().numpy() - floor), 1)
        start = START | {"E": floor, "A": float(np.exp(level)), "alpha": max(float(-slope), 0.05)}
        log = {
            name: torch.tensor(float(np.log(value)), dtype=torch.float64).requires_grad_()
            for name, value in start.items()
        }
        groups = [[log[name] for name in names] for names in (("E", "A", "B", "C"), ("alpha", "beta", "gamma"))]
        adam = torch.optim.Adam([{"params": group, "lr": rate} for group, rate in zip(groups, RATES, strict=True)])
        lowest = float("inf")
        for _ in range(steps):
            adam.zero_grad()
            parts = [run.losses(log).log() - run.target for run in runs]
            value = sum((torch.nn.functional.huber_loss(r, 0 * r, "sum", DELTA) for r in parts), torch.zeros(()))
            value.backward()
            if value.item() < lowest:
                lowest, self.log = value.item(), {name: one.detach().clone() for name, one in log.items()}
            adam.step()

    def predict(self, curve: Curve) -> Any:
        return Terms(curve, self.peak).losses(self.log).numpy()


def simulated(steps: int = 1000, points: int = 50) -> Case:
    """Cosine, constant and stepwise runs, and a linear and a WSD run without noise."""
    t, random = np.arange(1, steps + 1) / steps, np.random.default_rng(0)
    shapes = {
        "constant": np.ones(steps),
        "cosine": 0.1 + 0.9 * np.cos(np.pi / 2 * t) ** 2,
        "steps": np.where(t < 0.5, 1, np.where(t < 0.8, 0.4, 0.1)),
        "linear": 1 - 0.95 * t,
        "wsd": np.minimum(1, (1 - t) / 0.2 * 0.95 + 0.05),
    }
    truth = {name: torch.tensor(float(np.log(value)), dtype=torch.float64) for name, value in TRUE.items()}
    tables = list[pd.DataFrame]()
    for kind, shape in shapes.items():
        lr = 1e-3 * shape * np.minimum(1, np.arange(1, steps + 1) / (steps // 50))
        at = np.arange(1, steps + 1)
        seen = np.isin(at, np.unique(np.linspace(0.05 * steps, steps, points).astype(int)))
        loss = Terms(Curve(kind, lr, at, np.ones(steps)), 1e-3).losses(truth).numpy()
        loss = loss * np.exp(random.normal(0, 1e-3, steps)) if len(tables) < 3 else loss
        table = pd.DataFrame(
            {"run": kind, "step": at, "lr": lr, "loss": loss, "val_loss": np.where(seen, loss, np.nan)}
        )
        tables.append(table)
    return "3 simulated runs", tables[:3], tables[3:]


def mlps(folder: str) -> Iterator[Case]:
    """Four pairs of the schedules of each size and length that was trained under five; the others are aside."""
    table = pd.read_csv(Path(folder) / "curves" / "mlp_schedules.csv.gz").rename(columns={"test_loss": "loss"})
    table = table[table.step >= 1].assign(run=table.run.astype(str))
    last = table.groupby("run").step.transform("max")
    for _, rows in table.drop(columns="num_params").groupby([table.num_params, last]):
        runs = {str(kind): one for kind, one in rows.groupby("schedule")}
        for pair in list(itertools.combinations(runs, 2))[::3] if len(runs) == 5 else ():
            yield "2 MLPs", [runs[one] for one in pair], [one for kind, one in runs.items() if kind not in pair]


def bench_curves(steps: int = STEPS, cases: Sequence[Case] | None = None) -> Iterator[Row]:
    """Seconds for a law and errors on what it has not seen, ours as in the paper and by default, beside the peer."""
    if cases is None:
        folder = os.environ.get("ISOFLOP_DATA")
        cases = [simulated(), *(mlps(folder) if folder else ())]
    CurveLaw().fit(pd.concat(cases[0][1]))  # SciPy is loaded
    for words, group in itertools.groupby(cases, key=lambda case: case[0]):
        yield from _rows(words, list(group), steps)


def _rows(words: str, cases: Sequence[Case], steps: int) -> Iterator[Row]:
    names = ("as in the paper", "default", "peer")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, list[float]] = {name: [] for name in names}
    for _, known, aside in cases:
        table, asked = pd.concat(known), curves_of(pd.concat(aside))
        for name in names:
            began = time.perf_counter()
            law = Peer(curves_of(table), steps) if name == "peer" else CurveLaw(fading=name == "default").fit(table)
            seconds[name].append(time.perf_counter() - began)
            for curve in asked:
                end = Curve(curve.run, curve.lr, curve.steps[-1:], curve.loss[-1:])
                said = law.predict(end) if isinstance(law, Peer) else law.final(curve.lr)[:1]
                errors[name].append(100 * abs(float(said[0]) / float(end.loss[0]) - 1))
    for name in names[:2]:
        ratios = [b / a for a, b in zip(seconds[name], seconds["peer"], strict=True)]
        mine, theirs = (1 / statistics.median(seconds[one]) for one in (name, "peer"))
        row = plain_row(
            f"a law of {words}, {name}", mine, theirs, f"multi-power law in PyTorch, Adam, {steps} steps", "laws/s",
            processor_name(), statistics.median(ratios),
        )  # fmt: skip
        quarters = np.quantile(ratios, [0.25, 0.75])
        accuracy = {
            f"{who}{kind}_error": float(kinds(errors[one]))
            for who, one in (("", name), ("peer_", "peer"))
            for kind, kinds in (("mean", np.mean), ("worst", np.max))
        }
        yield row | {"spread": float(quarters[1] - quarters[0]) / 2, "laws": len(cases)} | accuracy
