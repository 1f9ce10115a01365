"""Losses of averaged weights become points of the law of N and D once cooldowns measure their gap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.curves.averaged import with_averages
from isoflop.fit.errors import InputError

SIZES = np.geomspace(1e5, 1e6, 6)
CHUNKS = 32  # validations of a long run
BATCH = 1000


def law(N: float, D: float) -> float:
    return float(1.7 + 40 * N**-0.35 + 60 * D**-0.32)


def simulated(noise: float, seed: int = 0, cooldowns: int = 4) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return table.csv and curves.csv of long runs, with cooldowns at 1/8 and 1/2 of the smallest and largest."""
    draw = np.random.default_rng(seed)
    rows, curves = [], []
    for i, N in enumerate(SIZES):
        long, D = f"{i}", 100 * N
        steps = np.linspace(0, D / BATCH, CHUNKS + 1)[1:].astype(int)
        at = steps * BATCH
        averaged = np.array([law(N, d) for d in at]) * np.exp(0.002 + 0.003 * np.log(at / 1e6))
        averaged *= np.exp(noise * draw.standard_normal(CHUNKS))
        lr = np.where(steps <= 0.8 * steps[-1], 1e-3, 1e-4)
        curve = {"run_id": long, "step": steps, "tokens": at, "lr": lr, "val_loss_ema_0.1": averaged}
        curve["val_loss_ema_0.4"] = averaged * np.exp(0.05 * draw.standard_normal(CHUNKS))
        curves.append(pd.DataFrame(curve))
        ends = [(long, D, None)]
        if i in (0, len(SIZES) - 1):
            ends += [(f"{i}b{share}", share * D, long) for share in (0.125, 0.5)][: cooldowns // 2]
        for run, tokens, trunk in ends:
            rows.append({
                "run_id": run, "step": int(tokens / BATCH), "final": True, "state": "done", "N": N, "D": tokens,
                "flops": 6 * N * tokens, "loss": law(N, tokens) * np.exp(noise * draw.standard_normal()),
                "loss_se": 1e-4, "trunk": trunk,
            })  # fmt: skip
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True)


def test_points_of_averages_lie_on_the_law_that_made_them() -> None:
    table, note = with_averages(*simulated(0.0))
    points = table[table["averaged"].notna()]
    expected = [law(N, D) for N, D in zip(points["N"], points["D"], strict=True)]
    # Cooldowns of two sizes determine the line of the gap; a prior bends it a little.
    np.testing.assert_allclose(points["loss"], expected, rtol=1e-3)
    assert set(points["averaged"]) == {"val_loss_ema_0.1"}  # the other span scatters by 5 %
    assert len(points) >= 5 * len(SIZES)
    assert (points["D"] <= 0.8 * 100 * points["N"]).all()  # none from a cooldown
    assert "minus the gap that 4 cooldowns measured" in note
    ratios = points.groupby("trunk")["D"].apply(lambda D: (np.sort(D)[1:] / np.sort(D)[:-1]).min())
    assert (ratios >= 2**0.5 - 1e-9).all()


def test_a_sweep_folder_is_read_with_averages(tmp_path: Path) -> None:
    table, curves = simulated(0.002)
    table.to_csv(tmp_path / "table.csv", index=False)
    runs = fit.read_table(tmp_path)
    assert len(runs.N) == len(table)
    curves.to_csv(tmp_path / "curves.csv", index=False)
    extended = fit.read_table(tmp_path)
    assert len(extended.N) > 5 * len(SIZES)
    assert set(extended.group) == {str(i) for i in range(len(SIZES))}
    assert any("losses of averaged weights" in note for note in extended.notes)
    predictions = {
        name: fit.ChinchillaLaw().fit(t.N, t.D, t.loss).predict(3e6, 3e8) for name, t in (("", runs), ("+", extended))
    }
    assert abs(np.log(predictions["+"] / law(3e6, 3e8))) < 0.01
    (tmp_path / "curves.csv").write_text("run_id,lr,trunk\nx,fast,\n")
    assert len(fit.read_table(tmp_path).N) == len(table)  # without averages curves.csv is not used
    (tmp_path / "curves.csv").write_text("run_id,lr,val_loss_ema_0.1\nx,fast,2\n")
    with pytest.raises(InputError, match=r"curves.csv cannot be read as curves"):
        fit.read_table(tmp_path)


def test_intervals_of_such_points_hold() -> None:
    """A point's standard error covers the noise of averages and of cooldowns, and the uncertain gap."""
    away = []
    for seed in range(12):
        table, _ = with_averages(*simulated(0.003, seed))
        points = table[table["averaged"].notna()]
        expected = np.array([law(N, D) for N, D in zip(points["N"], points["D"], strict=True)])
        away += [*np.abs((points["loss"] - expected) / points["loss_se"])]
    assert 0.85 <= np.mean(np.array(away) < 1.96) <= 1.0


def test_without_cooldowns_no_average_is_believed() -> None:
    table, curves = simulated(0.0, cooldowns=0)
    result, note = with_averages(table, curves)
    assert result is table
    assert note.startswith("Losses of averaged weights are not used: they need at least 2 cooldowns, and there are 0")
