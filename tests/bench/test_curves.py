"""The peer of laws of curves: its sum is the paper's, Adam finds the law, and the rows have the common format."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from bench_rows import checked_rows
from isoflop.bench.curves import TRUE, Peer, Terms, bench_curves, simulated
from isoflop.fit.curves.curves import Curve, curves_of


def test_the_peer_sums_as_the_paper_does() -> None:
    lr = 1e-3 * np.concatenate([np.linspace(0.2, 1, 5), np.linspace(1, 0.1, 35)])
    steps = np.array([10, 25, 40])
    log = {name: torch.tensor(float(np.log(value)), dtype=torch.float64) for name, value in TRUE.items()}
    losses = Terms(Curve("a", lr, steps, np.ones(3)), 1e-3).losses(log).numpy()
    rate = lr / 1e-3
    for step, loss in zip(steps, losses, strict=True):
        drop = 0.0
        for k in range(5, step):  # the first step after the maximum
            x = TRUE["C"] * rate[k] ** -TRUE["gamma"] * rate[k:step].sum()
            drop += (rate[k - 1] - rate[k]) * (1 - (1 + x) ** -TRUE["beta"])
        power = TRUE["A"] * rate[:step].sum() ** -TRUE["alpha"]
        assert loss == pytest.approx(TRUE["E"] + power - TRUE["B"] * drop, rel=1e-9)


def test_adam_comes_closer_to_the_law_and_rows_state_both_errors() -> None:
    fitted, held_out = simulated(steps=60, points=15)
    curves, (unseen, *_) = curves_of(pd.concat(fitted)), curves_of(pd.concat(held_out))
    errors = [np.abs(np.log(Peer(curves, steps).predict(unseen) / unseen.loss)).mean() for steps in (1, 60)]
    assert errors[1] < errors[0] / 2
    rows = checked_rows(bench_curves(steps=2, case=(fitted, held_out), rounds=2))
    assert [row["case"] for row in rows] == [f"a law of 3 runs, {how}" for how in ("as in the paper", "default")]
    for row in rows:
        assert 0 <= row["mean_error"] <= row["worst_error"] < 1
        assert row["peer_mean_error"] > row["mean_error"]
