"""IsoFLOP profiles: closed forms and SciPy's curves, refusals with their reasons, noise, and intervals that cover."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.approaches.isoflop import budget_levels
from scipy.interpolate import Akima1DInterpolator
from scipy.optimize import minimize_scalar

CURVES = ("parabola", "akima")


def grid(budgets=(1e18, 1e19, 1e20, 1e21), sizes=6, noise=0.0, seed=0, spread=4.0, centre=1.0):
    """Return an isoFLOP grid whose optimum is N = 0.05 C^0.5 and whose loss is a parabola in log N around it."""
    rng = np.random.default_rng(seed)
    rows = []
    for C in budgets:
        best = 0.05 * C**0.5
        for N in best * centre * np.geomspace(1 / spread, spread, sizes):
            loss = (1.7 + 800 * C**-0.155) * (1 + 0.04 * np.log(N / best) ** 2) + noise * rng.standard_normal()
            rows.append((N, C / (6 * N), loss, C))
    return np.array(rows).T


def lopsided(budgets=(1e18, 1e19, 1e20, 1e21), sizes=6, noise=0.0, seed=0):
    """Return profiles of L = E + A/N^0.55 + B/D^0.28: half as steep towards large N, optimum N = G (C/6)^0.337."""
    rng = np.random.default_rng(seed)
    rows = []
    for C in budgets:
        best = (0.55 * 8000 / (0.28 * 400)) ** (1 / 0.83) * (C / 6) ** (0.28 / 0.83)
        for N in best * np.geomspace(1 / 6, 6, sizes):
            loss = 1.8 + 8000 / N**0.55 + 400 / (C / 6 / N) ** 0.28
            rows.append((N, C / (6 * N), loss * np.exp(noise * rng.standard_normal()), C, best))
    return np.array(rows).T


def test_vertices_and_laws_of_exact_parabolas_are_exact():
    N, D, loss, C = grid()
    profiles = fit.IsoflopProfiles().fit(N, D, loss, C)
    assert len(profiles.accepted_) == 4
    for p in profiles.profiles_:
        np.testing.assert_allclose(p.N_best, 0.05 * p.flops**0.5, rtol=1e-9)
        np.testing.assert_allclose(6 * p.N_best * p.D_best, p.flops, rtol=1e-9)
        np.testing.assert_allclose(p.loss_best, 1.7 + 800 * p.flops**-0.155, rtol=1e-9)
        np.testing.assert_allclose(p.curve(p.N), p.loss, rtol=1e-9)
    np.testing.assert_allclose([profiles.N_law_.p_, profiles.N_law_.k_], [0.5, 0.05], rtol=1e-8)
    np.testing.assert_allclose([profiles.D_law_.p_, profiles.D_law_.k_], [0.5, 1 / 0.3], rtol=1e-8)
    np.testing.assert_allclose([profiles.loss_law_.E_, profiles.loss_law_.p_], [1.7, -0.155], rtol=1e-6)


@pytest.mark.parametrize(("method", "trials"), [("parabola", 60), ("akima", 30)])
def test_vertex_and_exponent_intervals_cover_at_their_rate(method, trials):
    vertex, exponent = 0, 0  # of three budgets, too few for a loss law, which would take time
    for seed in range(trials):
        N, D, loss, C = grid(budgets=(1e18, 1e19, 1e20), noise=0.01, seed=seed)
        profiles = fit.IsoflopProfiles(method).fit(N, D, loss, C).bootstrap(120, seed=seed)
        low, high = profiles.profiles_[1].interval()
        vertex += low <= 0.05 * 1e19**0.5 <= high
        low, high = profiles.N_law_.interval("p")
        exponent += low <= 0.5 <= high
    # 95 % nominal, less 3.5 sigma; Akima's intervals are wider than necessary.
    lowest = 0.95 * trials - 3.5 * np.sqrt(0.0475 * trials)
    assert vertex >= lowest
    assert exponent >= lowest


def test_akimas_vertex_is_the_lowest_point_of_scipys_interpolant():
    N, D, loss, C = grid(sizes=9, noise=0.02, seed=5)
    for p in fit.IsoflopProfiles("akima").fit(N, D, loss, C).profiles_:
        curve = Akima1DInterpolator(np.log(p.N), np.log(p.loss))
        x = np.linspace(*np.log(p.N[[0, -1]]), 20001)
        i = int(np.argmin(curve(x)))
        best = minimize_scalar(curve, bounds=(x[i - 1], x[i + 1]), method="bounded", options={"xatol": 1e-10}).x
        np.testing.assert_allclose(np.log(p.N_best), best, atol=1e-7)  # half the digits: the minimum is flat
        np.testing.assert_allclose(np.log(p.loss_best), curve(best), atol=1e-12)
        np.testing.assert_allclose(p.curve(np.exp(x)), np.exp(curve(x)), rtol=1e-10)
        assert np.isnan(p.curve(p.N[-1] * 1.01))


@pytest.mark.parametrize("method", CURVES)
def test_runs_that_share_a_size_are_averaged_and_their_noise_with_them(method):
    N, D, loss, C = grid(noise=0.01, seed=1)
    seeds = np.concatenate([loss * 1.003, loss / 1.003])
    many = fit.IsoflopProfiles(method, noise=0.01).fit(np.tile(N, 2), np.tile(D, 2), seeds, np.tile(C, 2))
    mean = fit.IsoflopProfiles(method, noise=0.01 / np.sqrt(2)).fit(N, D, seeds.reshape(2, -1).mean(axis=0), C)
    for one, other in zip(many.profiles_, mean.profiles_, strict=True):
        np.testing.assert_allclose(one.N_best, other.N_best, rtol=1e-9)
    widths = [np.log(np.divide(*p.bootstrap(2000).profiles_[1].interval()[::-1])) for p in (many, mean)]
    np.testing.assert_allclose(*widths, rtol=0.09)  # 2000 draws determine the ends of an interval to about 4 %


@pytest.mark.parametrize("method", CURVES)
def test_the_noise_is_estimated_without_bias(method):
    ratios, freedom = [], 0.0
    for seed in range(40):
        N, D, loss, C = grid(budgets=(1e18, 1e19, 1e20), sizes=7, noise=0.01, seed=seed)
        profiles = fit.IsoflopProfiles(method).fit(N, D, loss, C)
        truth = np.mean([0.01 / p.loss.min() for p in profiles.profiles_])
        ratios.append((profiles.sigma_ / truth) ** 2)
        freedom += profiles.freedom_
    # A variance on f degrees of freedom has a spread of sqrt(2 / f).
    assert abs(np.mean(ratios) - 1.0) < 3.5 * np.sqrt(2.0 / freedom)


def test_known_noise_sets_the_width_of_the_interval():
    N, D, loss, C = grid(budgets=(1e18, 1e19, 1e20), noise=0.001, seed=4)

    def width(noise):
        profiles = fit.IsoflopProfiles(noise=noise).fit(N, D, loss, C).bootstrap(2000)
        return np.log(np.divide(*profiles.profiles_[2].interval()[::-1]))

    np.testing.assert_allclose(width(0.004), 2 * width(0.002), rtol=0.02)  # the same draws; a vertex is all but linear
    for noise in (0.0, -1.0, np.nan, "guess"):
        with pytest.raises(fit.InputError, match="noise is"):
            fit.IsoflopProfiles(noise=noise)
    with pytest.raises(fit.InputError, match="method is 'spline'; choose one of parabola, akima"):
        fit.IsoflopProfiles("spline")


def test_a_lopsided_profile_biases_only_the_parabola():
    N, D, loss, C, best = lopsided()
    bias = {}
    for method in (*CURVES, "valley"):
        profiles = fit.IsoflopProfiles(method).fit(N, D, loss, C)
        bias[method] = np.mean([np.log(p.N_best / best[p.flops == C][0]) for p in profiles.profiles_])
    assert 0.10 < bias["parabola"] < 0.13
    assert max(abs(bias[method]) for method in ("akima", "valley")) < 0.03


def test_scatter_of_vertices_widens_the_interval_of_the_exponent():
    N, D, loss, C = grid(budgets=np.geomspace(1e18, 1e21, 7), noise=0.001)
    rng = np.random.default_rng(8)
    shifted = np.exp(0.2 * rng.standard_normal(7))[np.repeat(np.arange(7), 6)]
    quiet = fit.IsoflopProfiles().fit(N, D, loss, C).bootstrap(400)
    restless = fit.IsoflopProfiles().fit(N * shifted, D / shifted, loss, C).bootstrap(400)
    assert quiet.scatter_ < 0.02
    assert 0.1 < restless.scatter_ < 0.4
    width = [np.subtract(*p.N_law_.interval("p")[::-1]) for p in (quiet, restless)]
    # A slope through 7 points of scatter 0.2 over ln(1000).
    np.testing.assert_allclose(width[1], 3.92 * restless.scatter_ / np.log(1e3) * np.sqrt(12 * 6 / 7 / 8), rtol=0.3)
    assert width[1] > 4 * width[0]


REFUSED = [
    ({"sizes": 2}, "only 2 sizes at this budget, and a parabola needs 3"),
    ({"centre": 30.0}, "outside the sizes tried; add smaller sizes"),
    ({"centre": 1 / 30.0}, "outside the sizes tried; add larger sizes"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_vertex_that_the_sizes_do_not_enclose_is_refused_with_the_reason(change, reason):
    N, D, loss, C = grid(**change)
    profiles = fit.IsoflopProfiles().fit(N, D, loss, C, budget=C).bootstrap(50)
    assert profiles.accepted_ == []
    assert profiles.N_law_ is None
    assert all(reason in p.reason for p in profiles.profiles_)


def test_a_concave_profile_and_a_minimum_at_an_edge_are_refused():
    N, D, loss, C = grid(budgets=(1e19,))
    concave = fit.IsoflopProfiles().fit(N, D, 5.0 - loss, C).profiles_[0]
    assert "concave" in concave.reason
    assert concave.N_best is None
    for method in CURVES:
        edge = fit.IsoflopProfiles(method).fit(N, D, np.r_[loss.min() - 0.001, loss[1:]], C).profiles_[0]
        assert "the smallest size" in edge.reason or "add smaller ones" in edge.reason
    two = fit.IsoflopProfiles("akima").fit(N[:2], D[:2], loss[:2], C[:2], budget=C[:2]).profiles_[0]
    assert two.reason == "only 2 sizes at this budget, and Akima's curve needs 3"
    with pytest.raises(fit.InputError, match="has no curve: only 2 sizes"):
        two.curve(N)


def test_noise_beyond_the_curvature_makes_the_interval_unbounded():
    N, D, loss, C = grid(noise=0.3, seed=3)
    profiles = fit.IsoflopProfiles().fit(N, D, loss, C).bootstrap(400)
    ends = [p.interval() for p in profiles.profiles_ if p.N_best]
    assert any(low == 0.0 or np.isinf(high) for low, high in ends)
    for method in CURVES:  # noise larger than the losses themselves
        profiles = fit.IsoflopProfiles(method, noise=5.0).fit(*grid()).bootstrap(100)
        assert all(p.interval()[0] < p.N.min() and p.interval()[1] > p.N.max() for p in profiles.profiles_)


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


def test_the_line_of_valleys_covers_a_hidden_budget():
    inside = []
    for seed in range(8):
        N, D, loss, C, best = lopsided(budgets=np.geomspace(1e18, 1e20, 5), noise=0.003, seed=seed)
        profiles = fit.IsoflopProfiles("valley").fit(N, D, loss, C).bootstrap(60)
        low, high = np.percentile(profiles.N_law_.predict_draws(np.array([1e21])), [2.5, 97.5])
        inside.append(low <= best[0] * 1e3 ** (0.28 / 0.83) <= high)
    assert np.mean(inside) >= 7 / 8


def test_a_budget_of_few_sizes_takes_its_shape_from_the_others():
    N, D, loss, C, best = lopsided(sizes=7, noise=0.001)
    chosen = (C < 1e21) | (np.abs(np.log(N / best)) < 1.5)  # three sizes of the largest budget
    for method, bound in (("parabola", np.inf), ("valley", 0.1)):
        profile = fit.IsoflopProfiles(method).fit(N[chosen], D[chosen], loss[chosen], C[chosen]).profiles_[-1]
        assert abs(np.log(profile.N_best / best[C == 1e21][0])) < bound
    assert fit.IsoflopProfiles("valley").fit([1e8], [1e9], [3.0], [6e17]).profiles_ == []
