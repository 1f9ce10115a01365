"""IsoFLOP profiles and the envelope: closed forms, refusals with their reasons, and intervals that cover."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.isoflop import budget_levels


def grid(budgets=(1e18, 1e19, 1e20, 1e21), sizes=6, noise=0.0, seed=0, spread=4.0, centre=1.0):
    """An exact isoFLOP grid whose optimum is N = 0.05 C^0.5 and whose loss is a parabola in log N around it."""
    rng = np.random.default_rng(seed)
    rows = []
    for C in budgets:
        best = 0.05 * C**0.5
        for N in best * centre * np.geomspace(1 / spread, spread, sizes):
            loss = (1.7 + 800 * C**-0.155) * (1 + 0.04 * np.log(N / best) ** 2) + noise * rng.standard_normal()
            rows.append((N, C / (6 * N), loss, C))
    return np.array(rows).T


def test_vertices_and_laws_of_exact_parabolas_are_exact():
    N, D, loss, C = grid()
    found = fit.IsoflopProfiles().fit(N, D, loss, C)
    assert len(found.accepted_) == 4
    for p in found.profiles_:
        np.testing.assert_allclose(p.N_best, 0.05 * p.flops**0.5, rtol=1e-9)
        np.testing.assert_allclose(6 * p.N_best * p.D_best, p.flops, rtol=1e-9)
        np.testing.assert_allclose(p.loss_best, 1.7 + 800 * p.flops**-0.155, rtol=1e-9)
        np.testing.assert_allclose(p.curve(p.N), p.loss, rtol=1e-9)
    np.testing.assert_allclose([found.N_law_.p_, found.N_law_.k_], [0.5, 0.05], rtol=1e-8)
    np.testing.assert_allclose([found.D_law_.p_, found.D_law_.k_], [0.5, 1 / 0.3], rtol=1e-8)
    np.testing.assert_allclose([found.loss_law_.E_, found.loss_law_.p_], [1.7, -0.155], rtol=1e-6)


def test_vertex_and_exponent_intervals_cover_at_their_rate():
    trials, vertex, exponent = 150, 0, 0  # three budgets: without a fourth there is no loss law to spend time on
    for seed in range(trials):
        N, D, loss, C = grid(budgets=(1e18, 1e19, 1e20), noise=0.01, seed=seed)
        found = fit.IsoflopProfiles().fit(N, D, loss, C).bootstrap(300, seed=seed)
        low, high = found.profiles_[1].interval()
        vertex += low <= 0.05 * 1e19**0.5 <= high
        low, high = found.N_law_.interval("p")
        exponent += low <= 0.5 <= high
    # 95 % nominal; 133 of 150 is 3.5 sigma low.
    assert vertex >= 133
    assert exponent >= 133


REFUSED = [
    ({"sizes": 2}, "only 2 sizes at this budget, and a parabola needs 3"),
    ({"centre": 30.0}, "outside of the sizes tried; add smaller ones"),
    ({"centre": 1 / 30.0}, "outside of the sizes tried; add larger ones"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_vertex_that_the_sizes_do_not_enclose_is_refused_with_the_reason(change, reason):
    N, D, loss, C = grid(**change)
    found = fit.IsoflopProfiles().fit(N, D, loss, C, budget=C).bootstrap(50)
    assert found.accepted_ == []
    assert found.N_law_ is None
    assert all(reason in p.reason for p in found.profiles_)


def test_a_concave_profile_and_a_minimum_at_an_edge_are_refused():
    N, D, loss, C = grid(budgets=(1e19,))
    concave = fit.IsoflopProfiles().fit(N, D, 5.0 - loss, C).profiles_[0]
    assert "concave" in concave.reason
    assert concave.N_best is None
    loss[0] = loss.min() - 0.001  # the parabola's vertex stays inside, the lowest run is the smallest
    edge = fit.IsoflopProfiles().fit(N, D, loss, C).profiles_[0]
    assert "lowest measured loss is at the smallest size" in edge.reason


def test_three_sizes_have_a_vertex_but_no_interval_by_themselves():
    N, D, loss, C = grid(budgets=(1e19,), sizes=3)
    found = fit.IsoflopProfiles().fit(N, D, loss, C).bootstrap(100)
    assert found.profiles_[0].accepted
    assert found.profiles_[0].interval() is None


def test_noise_beyond_the_curvature_makes_the_interval_unbounded():
    N, D, loss, C = grid(noise=0.3, seed=3)
    found = fit.IsoflopProfiles().fit(N, D, loss, C).bootstrap(400)
    ends = [p.interval() for p in found.profiles_ if p.coefficients and p.coefficients[2] > 0]
    assert any(low == 0.0 or np.isinf(high) for low, high in ends)


def test_budgets_are_the_named_ones_or_read_off_the_flops():
    N, _, _, C = grid()
    labels, levels = budget_levels(C * np.random.default_rng(0).uniform(0.99, 1.01, len(C)), N)
    np.testing.assert_array_equal(labels, np.repeat(np.arange(4), 6))
    np.testing.assert_allclose(levels, [1e18, 1e19, 1e20, 1e21], rtol=0.02)
    named, levels = budget_levels(C, N, budget=np.where(C < 1e20, C, np.nan))
    assert levels.tolist() == [1e18, 1e19]
    assert (named[C >= 1e20] == -1).all()
    scattered = np.geomspace(1e18, 1e21, 24)  # an eighth of a decade apart: no two runs share a budget
    assert budget_levels(scattered, N)[1].size == 0


def test_the_envelope_is_the_best_run_of_each_budget_and_never_a_worse_one():
    N, D, loss, C = grid()
    found = fit.Envelope().fit(N, D, loss, C)
    assert found.source_ == "final points"
    np.testing.assert_allclose(found.flops_, [1e18, 1e19, 1e20, 1e21])
    np.testing.assert_allclose(found.loss_, [loss[c == C].min() for c in (1e18, 1e19, 1e20, 1e21)])
    np.testing.assert_allclose(found.N_law_.p_, 0.5, rtol=1e-9)
    loss[C == 1e20] += 2.0  # a budget that improves on nothing cheaper is not on the envelope
    assert 1e20 not in fit.Envelope().fit(N, D, loss, C).flops_


def test_the_envelopes_interval_knows_the_spacing_of_the_sizes():
    widths = {}
    for sizes in (5, 41):
        N, D, loss, C = grid(sizes=sizes)
        law = fit.Envelope().fit(N, D, loss, C).bootstrap(200).N_law_
        low, high = law.interval("p")
        assert low < 0.5 < high
        widths[sizes] = high - low
    assert widths[41] < widths[5]


def test_an_envelope_of_constant_rate_curves_finds_the_crossing_points():
    """L = E + A/N^0.3 + B/D^0.3: among curves of all sizes the envelope follows the law's own optimum."""
    curves, sizes = [], {}
    for i, N in enumerate(np.geomspace(1e6, 1e9, 40)):
        D = np.geomspace(N * 0.3, N * 3000, 80)
        loss = 1.5 + 60 / N**0.3 + 60 / D**0.3
        curves.append(pd.DataFrame({"run_id": f"r{i}", "tokens": D, "flops": 6 * N * D, "loss": loss}))
        sizes[f"r{i}"] = N
    found = fit.Envelope().fit_curves(pd.concat(curves), sizes)
    assert found.source_ == "loss curves"
    middle = (found.N_ > 3e6) & (found.N_ < 3e8)
    np.testing.assert_allclose(found.N_[middle], (found.flops_[middle] / 6) ** 0.5, rtol=0.12)  # sizes are 19 % apart
    with pytest.raises(fit.InputError, match="no bootstrap"):
        found.bootstrap(10)
    with pytest.raises(fit.InputError, match="no column 'tokens'"):
        fit.Envelope().fit_curves(pd.concat(curves).drop(columns="tokens"), sizes)
    with pytest.raises(fit.InputError, match="no run of the table"):
        fit.Envelope().fit_curves(pd.concat(curves), {})
