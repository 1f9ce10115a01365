"""The peer of laws of curves: its sum is the paper's, Adam finds the law, and the rows follow the contract."""

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
    found = Terms(Curve("a", lr, steps, np.ones(3)), 1e-3).losses(log).numpy()
    rate = lr / 1e-3
    for step, said in zip(steps, found, strict=True):
        fallen = 0.0
        for k in range(5, step):  # the first step after the maximum
            x = TRUE["C"] * rate[k] ** -TRUE["gamma"] * rate[k:step].sum()
            fallen += (rate[k - 1] - rate[k]) * (1 - (1 + x) ** -TRUE["beta"])
        power = TRUE["A"] * rate[:step].sum() ** -TRUE["alpha"]
        assert said == pytest.approx(TRUE["E"] + power - TRUE["B"] * fallen, rel=1e-9)


def test_adam_comes_closer_to_the_law_and_rows_state_both_errors() -> None:
    known, aside = simulated(steps=60, points=15)
    curves, (asked, *_) = curves_of(pd.concat(known)), curves_of(pd.concat(aside))
    errors = [np.abs(np.log(Peer(curves, steps).predict(asked) / asked.loss)).mean() for steps in (1, 100)]
    assert errors[1] < errors[0] / 2
    rows = checked_rows(bench_curves(steps=2, case=(known, aside), rounds=2))
    assert [row["case"] for row in rows] == [f"a law of 3 runs, {how}" for how in ("as in the paper", "default")]
    for row in rows:
        assert 0 <= row["mean_error"] <= row["worst_error"] < 1
        assert row["peer_mean_error"] > row["mean_error"]
