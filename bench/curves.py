"""Time our laws of whole loss curves and the multi-power law in PyTorch, with their errors: `isoflop bench curves`.

The peer is L(t) = L0 + A S(t)^-alpha - B sum_k (lr_{k-1} - lr_k) (1 - (1 + C lr_k^-gamma S_k(t))^-beta) (Luo et al.
2025, arXiv:2503.12811), fitted by Adam to Huber's function of log loss, delta 1e-3, with their rates, here of
logarithms, from one start. The peer's own law simulates the runs, with noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..fit import CurveLaw
from ..fit.curves.curves import Curve, curves_of
from ..sweeps.plan.rates import processor_name
from .timing import Contender, Row, take_turns, timed_row

ABOUT = "errors are those of the last losses of runs that were not fitted; --json also has the worst one"
DELTA, RATES = 1e-3, (5e-2, 5e-3)  # rates of Adam: coefficients, exponents
STAGES = 400  # of a schedule; a longer one is summed over this many stretches, which favours the peer
TRUE = {"E": 2.5, "A": 0.6, "alpha": 0.4, "B": 0.4, "C": 0.06, "beta": 0.5, "gamma": 0.5}  # rates in units of the peak
START = {"B": 0.1, "C": 0.03, "beta": 0.5, "gamma": 0.5}
STEPS = 1000
Case = tuple[list[pd.DataFrame], list[pd.DataFrame]]  # known runs, hidden runs


class Terms:
    """One run's tensors for the law: rates over `peak`, their sums (points,), and sums since drops (points, k)."""

    def __init__(self, curve: Curve, peak: float) -> None:
        edges = np.unique(np.linspace(0, len(curve.lr), min(len(curve.lr), STAGES) + 1).astype(int))
        total = np.concatenate([[0.0], np.cumsum(curve.lr / peak)])
        mean = np.diff(total[edges]) / np.diff(edges)
        drop = -np.diff(mean, prepend=mean[0])
        drop[: int(np.argmax(mean)) + 1] = 0.0
        since = np.clip(total[curve.steps][:, None] - total[edges[:-1]], 0.0, None)
        arrays = (total[curve.steps], np.maximum(mean, 1e-6), drop, since, np.log(curve.loss))
        self.total, self.rate, self.drop, self.since, self.target = (torch.tensor(array) for array in arrays)

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
        log = {name: value.requires_grad_() for name, value in _logs(start).items()}
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


def _logs(constants: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(float(np.log(value)), dtype=torch.float64) for name, value in constants.items()}


def simulated(steps: int = 1000, points: int = 50) -> Case:
    """Simulate constant, cosine and stepwise runs with noise to fit, and a linear and a WSD run without to predict."""
    t, random = np.arange(1, steps + 1) / steps, np.random.default_rng(0)
    shapes = {"constant": np.ones(steps), "cosine": 0.1 + 0.9 * np.cos(np.pi / 2 * t) ** 2}
    shapes |= {"steps": np.where(t < 0.5, 1, np.where(t < 0.8, 0.4, 0.1)), "linear": 1 - 0.95 * t}
    shapes |= {"wsd": np.minimum(1, (1 - t) / 0.2 * 0.95 + 0.05)}
    at, tables = np.arange(1, steps + 1), list[pd.DataFrame]()
    seen = np.isin(at, np.unique(np.linspace(0.05 * steps, steps, points).astype(int)))
    for kind, shape in shapes.items():
        lr = 1e-3 * shape * np.minimum(1, at / (steps // 50))
        loss = Terms(Curve(kind, lr, at, np.ones(steps)), 1e-3).losses(_logs(TRUE)).numpy()
        loss = loss * np.exp(random.normal(0, 1e-3, steps)) if len(tables) < 3 else loss
        columns = {"run": kind, "step": at, "lr": lr, "loss": loss, "val_loss": np.where(seen, loss, np.nan)}
        tables.append(pd.DataFrame(columns))
    return tables[:3], tables[3:]


def bench_curves(steps: int = STEPS, case: Case | None = None, rounds: int = 3) -> Iterator[Row]:
    """Yield a row for our law as in the paper and one for its default: fits per second and errors on hidden runs."""
    fitted, hidden = case or simulated()
    table, curves = pd.concat(fitted), curves_of(pd.concat(hidden))
    CurveLaw().fit(table)  # loads SciPy
    laws = [Contender("as in the paper", lambda: CurveLaw(fading=False).fit(table))]
    laws.append(Contender("default", lambda: CurveLaw().fit(table)))
    peer = Contender("peer", lambda: Peer(curves_of(table), steps))
    take_turns([*laws, peer], rounds, 1, torch.device("cpu"))
    peer_errors = _errors(peer.step(), curves)
    for ours in laws:
        name, both = f"multi-power law in PyTorch, Adam, {steps} steps", (ours.seconds, peer.seconds)
        errors = _errors(ours.step(), curves)
        yield timed_row(f"a law of {len(fitted)} runs, {ours.name}", 1.0, "laws/s", *both, name, processor_name()) | {
            "mean_error": float(np.mean(errors)), "peer_mean_error": float(np.mean(peer_errors)),
            "worst_error": max(errors), "peer_worst_error": max(peer_errors),
        }  # fmt: skip


def _errors(law: Peer | CurveLaw, curves: Sequence[Curve]) -> list[float]:
    """Return the error of the predicted final loss of each curve, in %."""
    errors = []
    for curve in curves:
        end = Curve(curve.run, curve.lr, curve.steps[-1:], curve.loss[-1:])
        loss = law.predict(end)[0] if isinstance(law, Peer) else law.final(curve.lr)[0]
        errors.append(100 * abs(float(loss) / float(end.loss[0]) - 1))
    return errors
