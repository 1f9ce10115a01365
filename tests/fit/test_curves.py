"""Laws of whole loss curves against the papers' sums over single steps: recovery, prediction and refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from isoflop import fit

TRUE = {
    "multi-power": dict(E=2.5, A=0.6, alpha=0.4, B=400.0, C=2.0, beta=0.5, gamma=0.5),
    "annealing": {"E": 2.5, "A": 0.6, "alpha": 0.4, "B": 30.0, "lambda": 0.9},
    "functional": dict(E=2.2, A=0.6, alpha=0.4, B=400.0, C=60.0, beta=0.6),
}


def rates(kind, T, peak=1e-3, warmup=10):
    t = np.arange(1, T + 1) / T
    shape = {
        "constant": np.ones(T),
        "cosine": 0.1 + 0.9 * np.cos(np.pi / 2 * t) ** 2,
        "linear": 1 - 0.95 * t,
        "wsd": np.minimum(1, (1 - t) / 0.2 * 0.95 + 0.05),
        "steps": np.where(t < 0.5, 1, np.where(t < 0.8, 0.4, 0.1)),
    }
    return peak * shape[kind] * np.minimum(1, np.arange(1, T + 1) / warmup)


def truth(form, lr, steps, N=None):
    """Compute losses by the papers' formulas, one step after another."""
    k = TRUE[form]
    total = np.concatenate([[0.0], np.cumsum(lr)])
    drops = -np.diff(lr, prepend=0.0 if form == "functional" else lr[0])
    if form != "functional":
        drops[: np.argmax(lr) + 1] = 0
    floor, size = (0.0, 1.0) if N is None else (0.3 * (N / 1e7) ** -0.4, (N / 1e7) ** -0.1)
    losses = []
    for s in steps:
        if form == "annealing":
            kernel = (1 - k["lambda"] ** (s - np.arange(s))) / (1 - k["lambda"])
        else:
            x = k["C"] * lr[:s] ** -k.get("gamma", 0.0) * (total[s] - total[:s])
            kernel = 1 - (x + 1) ** -k["beta"]
        losses.append(k["E"] + floor + size * k["A"] * total[s] ** -k["alpha"] - k["B"] * np.sum(drops[:s] * kernel))
    return np.array(losses)


def table(form, kinds, T, points=60, noise=None, sizes=(None,), peak=1e-3, first=0.1):
    """Return curves, and the rate of every step by run; `noise` is (generator, of a run, of a point, correlation)."""
    rows, schedules = [], {}
    for N in sizes:
        for kind in kinds:
            lr, run = rates(kind, T, peak), f"{kind}-{N}"
            steps = np.unique(np.linspace(first * T, T, points).astype(int))
            loss = truth(form, lr / peak * 1e-3, steps, N)
            if noise:
                generator, between, within, rho = noise
                shock = generator.normal(0, within * np.sqrt(1 - rho**2), len(steps))
                shock[0] = generator.normal(0, within)
                for i in range(1, len(steps)):
                    shock[i] += rho * shock[i - 1]
                loss = loss * np.exp(generator.normal(0, between) + shock)
            rows.append(pd.DataFrame({"run": run, "step": steps, "lr": lr[steps - 1], "loss": loss}))
            rows[-1] = rows[-1] if N is None else rows[-1].assign(N=N)
            schedules[run] = lr
    return pd.concat(rows, ignore_index=True), schedules


@pytest.mark.parametrize("form", TRUE)
def test_constants_come_back_and_the_sum_over_segments_is_that_over_steps(form):
    curves, schedules = table(form, ("constant", "cosine", "steps"), 240)
    law = fit.CurveLaw(form, fading=False).fit(curves, schedules)
    for name, value in TRUE[form].items():
        # Each of 240 steps is its own segment, so only the tolerance of the solver remains.
        assert law.constants_[name] == pytest.approx(value, rel=1e-4), name
    for kind in ("linear", "wsd", "cosine", "steps"):
        lr, steps = rates(kind, 4000, warmup=100), np.arange(200, 4001, 50)
        # 1e-4 of the loss: a tenth of the error of the best laws on real curves.
        assert law.predict(lr)[steps - 1] == pytest.approx(truth(form, lr, steps), rel=1e-4), kind
        assert law.final(lr)[0] == pytest.approx(law.predict(lr)[-1], rel=1e-4)


def test_an_unseen_schedule_is_predicted_from_sparse_rows_of_three():
    # Rates between rows are interpolated and warm-up is not seen, which is worth 5 of the first 400 steps.
    curves, _ = table("multi-power", ("constant", "cosine", "linear"), 3000, first=1 / 300)
    law = fit.CurveLaw().fit(curves)
    lr, steps = rates("wsd", 3000), np.arange(400, 3001, 100)
    assert law.predict(lr)[steps - 1] == pytest.approx(truth("multi-power", lr, steps), rel=2e-3)


def test_sizes_between_and_beyond_are_predicted():
    curves, schedules = table("multi-power", ("constant", "cosine"), 240, 40, sizes=(1e6, 4e6, 1.6e7, 6.4e7))
    law = fit.CurveLaw().fit(curves, schedules)
    lr = rates("linear", 240)
    for N in (8e6, 2.5e8):
        assert law.final(lr, N=N)[0] == pytest.approx(truth("multi-power", lr, [240], N)[0], rel=2e-3)
    with pytest.raises(fit.InputError, match="N is missing"):
        law.predict(lr)


def test_neither_the_unit_of_the_rate_nor_the_order_of_rows_matters():
    curves, schedules = table("multi-power", ("constant", "cosine", "steps"), 240)
    lr = rates("linear", 240)
    base = fit.CurveLaw().fit(curves, schedules).predict(lr)
    tenfold = fit.CurveLaw().fit(curves.assign(lr=10 * curves.lr), {run: 10 * lr for run, lr in schedules.items()})
    assert tenfold.predict(10 * lr) == pytest.approx(base, rel=1e-6)  # rounding of the rates only
    shuffled = fit.CurveLaw().fit(curves.sample(frac=1.0, random_state=0), schedules)
    assert shuffled.predict(lr) == pytest.approx(base, rel=1e-12)
    named = curves.rename(columns={"run": "run_id", "loss": "val_loss"}).assign(loss=9.0, batch=8, tokens=1)
    assert fit.CurveLaw().fit(named, schedules).predict(lr) == pytest.approx(base, rel=1e-12)


@pytest.mark.slow
def test_intervals_cover_the_last_loss_of_a_new_run_under_another_schedule():
    lr, covered, measured = rates("wsd", 240), 0, []
    expected = truth("multi-power", lr, [240])[0]
    kinds = ("constant", "cosine", "linear", "steps") * 2
    for seed in range(16):
        generator = np.random.default_rng(seed)
        curves, _ = table("multi-power", kinds, 240, 30, (generator, 0.002, 0.001, 0.8))
        curves["run"] = np.arange(len(curves)) // 30
        law = fit.CurveLaw().fit(curves, {str(i): rates(kind, 240) for i, kind in enumerate(kinds)})
        _, low, high = law.final(lr)
        covered += low <= expected * np.exp(generator.normal(0, 0.0022)) <= high
        measured.append((law.effective_points_, np.log(high / low), abs(law.constants_["d"])))
    assert covered >= 13  # at 95 %, 15.2 of 16 are expected and fewer than 13 have a probability below 1 %
    # Of 240 losses, as a run is worth far fewer than its 30 points; four forms that fit alike; no fading in the truth.
    assert (np.median(measured, axis=0) < (60, 0.02, 0.02)).all()


def test_unfinished_runs_are_predicted_with_an_interval():
    noise = (np.random.default_rng(1), 0.002, 0.001, 0.8)
    curves, schedules = table("multi-power", ("cosine", "linear"), 240, 40, noise, (1e6, 2e6, 4e6, 8e6))
    late = curves.run.str.endswith("8000000.0")
    forecast = fit.forecast_final(curves[~late | (curves.step <= 80)], schedules)
    assert sorted(forecast.index) == ["cosine-8000000.0", "linear-8000000.0"]
    for run, row in forecast.iterrows():
        final_loss = curves.loss[curves.run == run].iloc[-1]
        assert row.low < final_loss < row.high
        assert row.reason == ""
        assert row.seen == pytest.approx(1 / 3, abs=0.03)
        assert row.loss == pytest.approx(final_loss, rel=0.01)  # four noise levels of a run
        assert row.high - row.low < 0.04 * row.loss


def test_a_forecast_gives_reasons_not_errors():
    curves, schedules = table("multi-power", ("cosine", "linear", "steps"), 240, 40)
    started = curves[(curves.run != "linear-None") | (curves.step < 80)]
    forecast = fit.forecast_final(started, schedules | {"new": rates("cosine", 240)})
    assert forecast.loss["linear-None"] > 0
    assert np.isnan(forecast.low["linear-None"])
    assert "no losses" in forecast.reason["new"]
    broken = started.assign(loss=started.loss.where(started.run != "linear-None"))
    for frame, reason in ((started, "there are 2"), (broken, "is nan"), (started.drop(columns="lr"), "no column")):
        assert reason in fit.forecast_final(frame, schedules).reason["linear-None"]
    assert fit.forecast_final(curves, schedules).empty


def test_the_best_schedule_beats_cosine_under_the_law():
    curves, schedules = table("multi-power", ("constant", "cosine", "steps"), 240)
    law = fit.CurveLaw(fading=False).fit(curves, schedules)
    best, cosine = law.best_schedule(240, 1e-3, warmup=10), rates("cosine", 240)
    assert len(best) == 240
    assert (np.diff(best[10:]) <= 1e-12).all()
    assert best.max() == pytest.approx(1e-3)
    assert truth("multi-power", np.maximum(best, 1e-12), [240])[0] < truth("multi-power", cosine, [240])[0]


def test_a_constant_rate_teaches_no_cooldown():
    curves, schedules = table("multi-power", ("constant",), 240)
    law = fit.CurveLaw().fit(curves, schedules)
    assert not law.cooldown_seen_
    flat = rates("constant", 480)
    assert law.predict(flat)[-1] == pytest.approx(truth("multi-power", flat, [480])[0], rel=1e-4)
    with pytest.raises(fit.InputError, match="falls in none of the fitted curves"):
        law.predict(rates("cosine", 240))


BAD = {
    "no column lr": lambda c: c.drop(columns="lr"),
    "batch of run": lambda c: c.assign(batch=np.arange(len(c)) % 2 + 8),
    "twice with different losses": lambda c: pd.concat([c, c.iloc[:1].assign(loss=9.0)]),
    "loss of run constant-None is nan": lambda c: c.assign(loss=c.loss.where(c.index != 3)),
    "is -1; it must be a finite number, zero or more": lambda c: c.assign(lr=-1.0),
    "is 0 in every step": lambda c: c.assign(lr=0.0),
    "it needs at least": lambda c: c[c.step > 238],
    "holds a value that is not a number": lambda c: c.assign(loss="low"),
    "N is missing in some runs": lambda c: c.assign(N=np.where(c.run == "constant-None", 1e6, np.nan)),
    "no row": lambda c: c[:0],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_curves_are_refused_in_a_sentence(message):
    curves, _ = table("multi-power", ("constant", "cosine"), 240, 40)
    with pytest.raises(fit.InputError, match=message):
        fit.CurveLaw().fit(BAD[message](curves))


def test_curves_are_read_from_a_sweep(tmp_path):
    curves, _ = table("multi-power", ("constant", "cosine"), 240, 40)
    renamed = curves.rename(columns={"run": "run_id"}).assign(val_loss=curves.loss.where(curves.step > 100))
    renamed.to_csv(tmp_path / "curves.csv", index=False)
    assert fit.CurveLaw().fit(fit.read_curves(tmp_path)).cooldown_seen_
    with pytest.raises(fit.InputError, match="does not exist"):
        fit.read_curves(tmp_path / "none.csv")
    # A wandb export: other names, a loss every few rows, and sizes in millions.
    other = {"run": "run_name", "step": "_step", "lr": "train/lr", "loss": "eval/loss"}
    export = curves.assign(loss=curves.loss.where(curves.index % 2 == 1)).rename(columns=other)
    read = fit.read_curves(export.assign(**{"params (M)": 12.5}))
    assert set(read.N) == {12.5e6}
    assert fit.CurveLaw().fit(read).cooldown_seen_
    renamed = fit.read_curves(export.rename(columns={"_step": "it"}), columns={"step": "it"})
    pd.testing.assert_series_equal(renamed.step, read.step)
    chosen = fit.read_curves(curves.assign(train=1.0, val_loss=9.0), columns={"loss": "train"})
    assert set(fit.read_curves(chosen).loss) == {1.0}  # as `CurveLaw.fit` reads it again
    with pytest.raises(fit.InputError, match="columns has N='size'"):
        fit.read_curves(curves, columns={"N": "size"})


def test_a_run_that_does_not_collapse_stands_out():
    curves, _ = table("multi-power", ("cosine",), 240, 40, sizes=(1e6, 2e6, 4e6, 8e6, 1.6e7))
    ill = curves.run == "cosine-4000000.0"
    curves.loc[ill, "loss"] += 0.5 * np.exp(-curves.step[ill] / 60)
    collapsed = fit.collapse(curves)
    assert list(collapsed.index[collapsed.noted]) == ["cosine-4000000.0"]
    with pytest.raises(fit.InputError, match="below every loss"):
        fit.collapse(curves, floor=9.0)
