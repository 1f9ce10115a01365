"""The backtest: each step fits only the cheaper runs, and leaving a rung out is a fit without it."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.backtest import backtest, leave_one_out

TARGET = 1e18


def runs(noise=0.001, budgets=(2e15, 6e15, 2e16, 6e16), sizes=6, seed=0):
    """Return runs of L = 1.5 + 40/N^0.3 + 85/D^0.3 with the same sizes at every budget, as in a ladder."""
    rng = np.random.default_rng(seed)
    rows = []
    for C in budgets:
        for N in 0.11 * 1e8 * np.geomspace(0.2, 5, sizes):
            D = C / (6 * N)
            loss = (1.5 + 40 / N**0.3 + 85 / D**0.3) * np.exp(noise * rng.standard_normal())
            rows.append({"budget": C, "N": N, "D": D, "flops": C, "loss": loss})
    return pd.DataFrame(rows)


def fitted(frame, bootstrap=0, **options):
    """Return the table, its profiles and its law."""
    t = fit.read_table(frame)
    profiles = fit.IsoflopProfiles(**options).fit(t.N, t.D, t.loss, t.flops, t.budget)
    law = fit.ChinchillaLaw().fit(t.N, t.D, t.loss)
    return t, profiles, law.bootstrap(bootstrap) if bootstrap else law


def influence(frame, bootstrap=0):
    t, profiles, law = fitted(frame, bootstrap)
    return t, law, leave_one_out(t, law, profiles.labels_, profiles.budgets_, TARGET)


def test_each_step_is_a_fit_to_the_cheaper_runs_alone():
    t, profiles, law = fitted(runs())
    test = backtest(t, profiles, law, TARGET)
    steps = test["steps"]
    assert [s["held_out_flops"] for s in steps] == [2e16, 6e16]  # one budget alone is collinear
    assert [test[name] for name in ("held_out_flops", "runs_fitted", "runs_predicted")] == [6e16, 18, 6]
    for s in steps:
        cheap, held = t.flops < s["held_out_flops"], t.flops == s["held_out_flops"]
        beyond = t.flops >= s["held_out_flops"]
        alone = fit.ChinchillaLaw().fit(t.N[cheap], t.D[cheap], t.loss[cheap])
        error = alone.predict(t.N, t.D) / t.loss - 1
        np.testing.assert_allclose(s["loss_error"], np.abs(error[held]).mean(), rtol=1e-6)
        np.testing.assert_allclose(s["loss_bias"], error[held].mean(), rtol=1e-6)
        np.testing.assert_allclose(s["loss_error_beyond"], np.abs(error[beyond]).mean(), rtol=1e-6)
        np.testing.assert_allclose(s["tokens_per_parameter_at_target"], alone.optimal(TARGET).ratio, rtol=1e-6)
        assert s["runs_beyond"] == beyond.sum()
    np.testing.assert_allclose(test["predicted"], alone.predict(t.N, t.D)[held], rtol=1e-6)


@pytest.mark.parametrize("method", ["parabola", "akima"])
def test_approach_2_is_asked_for_the_same_budget_by_the_same_method(method):
    budgets = (1e14, 1e15, 1e16, 1e17)
    rows = [
        (C, N, C / (6 * N), 1.5 + 300 * C**-0.15 + 0.03 * np.log(N / (0.1 * C**0.5)) ** 2)
        for C in budgets
        for N in 0.1 * C**0.5 * np.geomspace(0.2, 5, 7)
    ]
    frame = pd.DataFrame(rows, columns=["budget", "N", "D", "loss"]).assign(flops=lambda t: t.budget)
    last = backtest(*fitted(frame, method=method), 1e18)["steps"][-1]
    np.testing.assert_allclose(last["N_predicted_isoflop"], 0.1 * 1e17**0.5, rtol=1e-6)
    np.testing.assert_allclose(last["N_measured"], 0.1 * 1e17**0.5, rtol=1e-6)
    np.testing.assert_allclose(last["tokens_per_parameter_predicted_isoflop"], 1 / 0.06, rtol=1e-6)
    np.testing.assert_allclose(last["tokens_per_parameter_at_target_isoflop"], 1 / 0.06, rtol=1e-6)


def test_leaving_a_rung_or_a_budget_out_is_a_fit_without_it():
    t, law, influences = influence(runs(noise=0.003), bootstrap=100)
    assert [(e["kind"], e["runs"]) for e in influences["left_out"]] == [("size", 4)] * 6 + [("budget", 6)] * 4
    full_optimum = law.optimal(TARGET)
    for e in influences["left_out"]:
        remaining = np.abs((t.N if e["kind"] == "size" else t.flops) / e["value"] - 1) > 1e-9
        refit = fit.ChinchillaLaw().fit(t.N[remaining], t.D[remaining], t.loss[remaining])
        optimum = refit.optimal(TARGET)
        values = [e[name] for name in ("alpha", "beta", "N", "tokens_per_parameter", "loss")]
        np.testing.assert_allclose(
            values, [refit.alpha_, refit.beta_, optimum.N[0], optimum.ratio[0], optimum.loss[0]], rtol=1e-6
        )
        low, high = law.interval("alpha")
        np.testing.assert_allclose(e["moves"]["alpha"], (refit.alpha_ - law.alpha_) / (high - low), rtol=1e-5)
        low, high = full_optimum.interval("N")[0]
        np.testing.assert_allclose(
            e["moves"]["N"], np.log(optimum.N[0] / full_optimum.N[0]) / np.log(high / low), rtol=1e-5
        )


def test_the_most_influential_rung_is_the_one_with_the_largest_move():
    """Shift the smallest size by 1 %; a size in the middle of the design would hardly move the law."""
    frame = runs(noise=0.0005, sizes=8)
    size = frame.N.min()
    off = frame.assign(loss=frame.loss.where(size < frame.N, frame.loss * 1.01))
    strongest = {}
    for name, table in (("clean", frame), ("off", off)):
        _, _, influences = influence(table, bootstrap=100)
        strongest[name] = influences["most"]
        largest = max(abs(move) for e in influences["left_out"] for move in e["moves"].values())
        assert abs(strongest[name]["moves"][strongest[name]["moved"]]) == largest
        assert strongest[name]["moved"] in ("alpha", "beta", "N", "tokens_per_parameter")
    assert strongest["off"]["kind"] == "size"
    np.testing.assert_allclose(strongest["off"]["value"], size, rtol=1e-12)


def test_without_intervals_the_largest_move_is_that_of_the_size():
    _, law, influences = influence(runs(noise=0.003))
    assert all(move is None for e in influences["left_out"] for move in e["moves"].values())
    N = law.optimal(TARGET).N[0]
    assert influences["most"]["moved"] == "N"
    assert abs(np.log(influences["most"]["N"] / N)) == max(abs(np.log(e["N"] / N)) for e in influences["left_out"])


def test_what_cannot_be_fitted_without_a_rung_is_said_to_have_no_answer():
    two_budgets = runs(noise=0.0, budgets=(2e15, 6e16), sizes=4)
    _, _, influences = influence(two_budgets)
    by_kind = {kind: [e["N"] for e in influences["left_out"] if e["kind"] == kind] for kind in ("size", "budget")}
    assert None not in by_kind["size"]  # six runs are left, one more than the law has constants
    assert by_kind["budget"] == [None, None]
    uneven = pd.concat([runs(budgets=(6e16,), sizes=6), runs(budgets=(2e15,), sizes=3)])
    t, profiles, _ = fitted(uneven)
    assert backtest(t, profiles, None, TARGET)["influence"] is None


@pytest.fixture(scope="module")
def epoch():
    table = fit.published_runs("epoch", drop_worst=5)
    return table, fit.ChinchillaLaw().fit(table.N, table.D, table.loss).bootstrap(400)


def test_runs_of_no_design_are_held_out_by_half_a_decade():
    """Hundreds of scattered runs have a hundred chance budgets, and a step for each would take minutes."""
    rng = np.random.default_rng(0)
    N, D = 10 ** rng.uniform(7, 9, 300), 10 ** rng.uniform(9, 11, 300)
    runs = pd.DataFrame({"N": N, "D": D, "loss": 1.5 + 40 / N**0.3 + 85 / D**0.3})
    assert len(fit.IsoflopProfiles().fit(N, D, runs.loss, 6 * N * D).budgets_) > 20
    assert 4 <= len(backtest(*fitted(runs), TARGET)["steps"]) <= 8


@pytest.mark.published
def test_epoch_data_below_1e21_flops_predict_the_rest(epoch):
    table, law = epoch
    cheap, held = table.where(table.flops < 1e21), table.where(table.flops >= 1e21)
    assert (len(cheap), len(held)) == (217, 23)
    alone = fit.ChinchillaLaw().fit(cheap.N, cheap.D, cheap.loss)
    np.testing.assert_allclose(np.abs(alone.predict(held.N, held.D) / held.loss - 1).mean(), 0.0105, atol=5e-5)
    np.testing.assert_allclose(alone.optimal(5.76e23).ratio, 8.59, atol=0.005)
    np.testing.assert_allclose(law.optimal(5.76e23).ratio, 17.92, atol=0.005)


@pytest.mark.published
def test_one_budget_of_the_epoch_data_decides_tokens_per_parameter(epoch):
    table, law = epoch
    profiles = fit.IsoflopProfiles().fit(table.N, table.D, table.loss, table.flops)
    strongest = leave_one_out(table, law, profiles.labels_, profiles.budgets_, 5.76e23)["most"]
    assert (strongest["kind"], strongest["runs"]) == ("budget", 19)
    np.testing.assert_allclose(strongest["value"], 9.3e18, rtol=0.01)
    np.testing.assert_allclose(strongest["tokens_per_parameter"], 39.6, atol=0.1)
