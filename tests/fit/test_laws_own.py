"""Properties of single laws: closed forms, conversions, limits and refusals."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.allocation.allocation import compute_optimal
from isoflop.fit.laws.broken import BrokenPowerLaw
from isoflop.fit.laws.custom import FunctionLaw, latin_hypercube
from isoflop.fit.laws.kaplan import KaplanLaw
from isoflop.fit.laws.law import Law
from isoflop.fit.laws.overtraining import OvertrainingLaw
from isoflop.fit.laws.repetition import RepetitionLaw, saturated

from tests.fit.test_laws_more import BOUNDS, precision

# Kaplan et al. 2020, section 1.2; Muennighoff et al. 2023, the repository's README.
KAPLAN = {"N_c": 6.4e13, "D_c": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103}
GAMMA = {"E": 1.7, "A": 300.0, "B": 900.0, "alpha": 0.5, "beta": 0.52, "gamma": 0.6}
A, B, E = np.exp([6.255414, 7.3049974, 0.6254804])
MUENNIGHOFF = {"E": E, "A": A, "B": B, "alpha": 0.3526596, "beta": 0.3526596, "R_D": 15.387756, "R_N": 5.309743}
C4 = {name: MUENNIGHOFF[name] for name in ("E", "A", "B", "alpha", "beta")}


def sizes(seed, n=50):
    rng = np.random.default_rng(seed)
    return 10 ** rng.uniform(7, 9.5, n), 10 ** rng.uniform(9, 11.5, n), rng.standard_normal(n)


def repeated(seed, n=60, noise=0.0):
    rng = np.random.default_rng(seed)
    N, U = 10 ** rng.uniform(7, 9.5, n), 10 ** rng.uniform(8, 10.5, n)
    D = U * 10 ** np.maximum(rng.uniform(-0.5, 2, n), 0.0)
    return N, D, U, RepetitionLaw.evaluate(MUENNIGHOFF, N, D, U) * np.exp(noise * rng.standard_normal(n))


# Kaplan.


def test_kaplans_law_has_its_two_lines_as_limits():
    N, D = 3e8, 7e9
    assert KaplanLaw.evaluate(KAPLAN, N, 1e40) == pytest.approx((6.4e13 / N) ** 0.076, rel=1e-9)
    assert KaplanLaw.evaluate(KAPLAN, 1e60, D) == pytest.approx((1.8e13 / D) ** 0.103, rel=1e-9)
    expected = ((6.4e13 / N) ** (0.076 / 0.103) + 1.8e13 / D) ** 0.103
    assert KaplanLaw.evaluate(KAPLAN, N, D) == pytest.approx(expected, rel=1e-13)


def test_data_with_one_line_alone_leave_the_other_at_zero_and_say_so():
    N, D, _ = sizes(2)
    law = KaplanLaw().fit(N, D, (3e14 / D) ** 0.1)
    assert (law.N_c_, law.degenerate_[0]) == (0.0, "N_c")
    np.testing.assert_allclose([law.alpha_D_, law.D_c_], [0.1, 3e14], rtol=1e-3)  # the remainder of the other line
    law = KaplanLaw().fit(N, D, (3e13 / N) ** 0.1)
    assert (law.D_c_, law.degenerate_) == (0.0, ["D_c"])
    np.testing.assert_allclose([law.alpha_N_, law.N_c_], [0.1, 3e13], rtol=1e-3)
    assert KaplanLaw.from_json(law.to_json()).predict(N, D) == pytest.approx((3e13 / N) ** 0.1, rel=1e-5)


@pytest.mark.parametrize(("make", "truth"), [(KaplanLaw, KAPLAN), (fit.GammaLaw, GAMMA)])
def test_the_closed_form_optimum_is_where_a_search_ends(make, truth):
    N, D, noise = sizes(0)
    law = make().fit(N, D, make.evaluate(truth, N, D) * np.exp(0.003 * noise)).bootstrap(20)
    C = [1e19, 1e23, 1e27]
    ours, searched = law.optimal(C), compute_optimal(law, C)
    np.testing.assert_allclose(ours.N, searched.N, rtol=1e-5)  # a search ends within the root of rounding
    np.testing.assert_allclose(ours.loss, searched.loss, rtol=1e-12)
    np.testing.assert_allclose(6 * ours.N * ours.D, C, rtol=1e-12)
    np.testing.assert_allclose(ours.draws["N"], searched.draws["N"], rtol=1e-4)


# Chinchilla's law with a power of both terms.


def test_a_gamma_of_one_is_chinchillas_law_and_without_E_it_holds_kaplans():
    N, D, _ = sizes(1)
    chinchilla = {name: value for name, value in GAMMA.items() if name != "gamma"}
    ours = fit.GammaLaw.evaluate(GAMMA | {"gamma": 1.0}, N, D)
    np.testing.assert_allclose(ours, fit.ChinchillaLaw.evaluate(chinchilla, N, D), rtol=1e-12)
    law = fit.GammaLaw(E=0.0).fit(N, D, KaplanLaw.evaluate(KAPLAN, N, D))
    assert law.objective_ < 1e-18
    np.testing.assert_allclose([law.gamma_ * law.alpha_, law.gamma_ * law.beta_], [0.076, 0.103], rtol=1e-4)


# Over-training.


def test_the_over_training_law_is_the_tied_chinchilla_law():
    N, D, noise = sizes(3)
    loss = (1.8 + 400 / N**0.34 + 1200 / D**0.34) * np.exp(0.003 * noise)
    law, tied = OvertrainingLaw().fit(N, D, loss), fit.ChinchillaLaw(tied=True).fit(N, D, loss)
    assert law.objective_ == pytest.approx(tied.objective_, rel=1e-12)
    assert law.eta_ == pytest.approx(tied.alpha_ / 2, rel=1e-7)
    C, M = 6 * N * D, D / N
    expected = law.E_ + (law.a_ * M**law.eta_ + law.b_ * M**-law.eta_) * C**-law.eta_
    np.testing.assert_allclose(law.predict(N, D), expected, rtol=1e-12)
    np.testing.assert_allclose(law.at(C, M), expected, rtol=1e-12)


# Repetition.


def test_the_law_of_repetition_gives_the_authors_own_numbers():
    assert RepetitionLaw.evaluate(MUENNIGHOFF, 6.34e9, 242e9, 25e9) == pytest.approx(2.2256440889984477, rel=1e-13)
    assert RepetitionLaw.evaluate(MUENNIGHOFF, 8.67e9, 178e9, 25e9) == pytest.approx(2.2269634075087867, rel=1e-13)


def test_without_repetition_and_excess_it_is_chinchillas_law():
    N, D, _ = sizes(6)
    D = np.maximum(D, 30 * N)  # above 20 tokens per parameter no parameter is in excess
    plain = fit.ChinchillaLaw.evaluate(C4, N, D)
    np.testing.assert_allclose(RepetitionLaw.evaluate(MUENNIGHOFF, N, D, D), plain, rtol=1e-13)
    np.testing.assert_allclose(RepetitionLaw.evaluate(MUENNIGHOFF, N, D, 5 * D), plain, rtol=1e-13)


def test_repeats_are_worth_between_nothing_and_new_tokens():
    s = np.linspace(0, 6, 50)
    np.testing.assert_allclose(saturated(s, np.log(1e12)), s, atol=1e-8)
    np.testing.assert_allclose(saturated(s, np.log(1e-9)), 0.0, atol=1e-8)
    at_most = np.log1p(15.0)
    assert (np.diff(saturated(s, np.log(15.0))) >= 0).all()
    assert saturated(np.array(300.0), np.log(15.0)) == pytest.approx(at_most, rel=1e-14)


def test_the_best_allocation_under_a_token_limit_is_the_published_one():
    """The repository's README: 9.26e21 FLOPs on 25B tokens need 227B tokens, 9.1 epochs and 6.8B parameters."""
    law = RepetitionLaw(base=C4).fit(*repeated(7))
    np.testing.assert_allclose([law.R_D_, law.R_N_], [15.387756, 5.309743], rtol=1e-8)
    best = law.optimal(6 * 8.67e9 * 178e9, 25e9)
    assert best.D[0] == pytest.approx(227e9, rel=0.005)  # their grid is that coarse
    assert best.N[0] == pytest.approx(6.8e9, rel=0.005)
    assert best.more["epochs"][0] == pytest.approx(9.1, rel=0.005)


def test_the_base_is_held_and_has_no_interval():
    law = RepetitionLaw(base=C4).fit(*repeated(8, noise=0.003)).bootstrap(30)
    assert {name: law.constants_[name] for name in C4} == C4
    assert all(np.ptp(law.draws_[name]) == 0 for name in C4)
    assert law.interval("R_D")[0] < law.R_D_ < law.interval("R_D")[1]


def test_excess_parameters_that_no_run_has_are_not_fitted():
    N, D, U, _ = repeated(9)
    N = U / 100  # far below the optimal size
    law = RepetitionLaw(base=C4).fit(N, D, U, RepetitionLaw.evaluate(MUENNIGHOFF, N, D, U))
    np.testing.assert_allclose(law.R_D_, 15.387756, rtol=1e-6)
    assert law.degenerate_ == ["R_N"]


# Refusals.

N, D, _ = sizes(5)
LOSS = 1.8 + 400 / N**0.34 + 1200 / D**0.4
REFUSED = [
    (lambda: OvertrainingLaw(E=9).fit(N, D, LOSS), "E is 9; it must be below the lowest loss"),
    (lambda: RepetitionLaw().fit(N, D, 2 * D, LOSS), "no run repeats its data"),
    (lambda: RepetitionLaw(base={"E": 1, "A": 1, "B": 1, "alpha": 1}), "base has no value for beta"),
    (lambda: RepetitionLaw(base=C4 | {"alpha": 0}), "base has alpha = 0; it must be"),
    (lambda: RepetitionLaw(base=C4 | {"E": None}), "base has E = None; it must be"),
    (lambda: RepetitionLaw(base=C4, tied=True), "tied and base were both given"),
    (lambda: BrokenPowerLaw().fit(N[:6], LOSS[:6]), "with breaks = 1 has 6 constants, and x has 6 different values"),
    (lambda: BrokenPowerLaw(breaks=4), "breaks is 4; it must be"),
    (lambda: BrokenPowerLaw(breaks=0).fit(N, LOSS).simpler(), "breaks is 0"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_a_law_cannot_do_is_refused(make, message):
    with pytest.raises(fit.InputError, match=message):
        make()


# Broken power laws.


def test_without_breaks_it_is_a_power_law_with_an_offset():
    x = np.geomspace(1e3, 1e8, 20)
    y = (0.4 + 7 * x**-0.2) * np.exp(0.003 * np.random.default_rng(0).standard_normal(20))
    ours, plain = BrokenPowerLaw(breaks=0).fit(x, y), fit.PowerLaw(offset=True).fit(x, y)
    assert ours.objective_ == pytest.approx(plain.objective_, rel=1e-10)
    np.testing.assert_allclose([ours.a_, ours.b_, -ours.c0_], [plain.E_, plain.k_, plain.p_], rtol=1e-6)
    straight = BrokenPowerLaw(breaks=0, offset=False).fit(x, 7 * x**-0.2)
    np.testing.assert_allclose([straight.a_, straight.b_, straight.c0_], [0, 7, 0.2], rtol=1e-9)


def test_several_breaks_come_back_in_the_order_of_their_places():
    x = np.geomspace(1e2, 1e10, 50)
    truth = {"a": 0.05, "b": 40.0, "c0": 0.3, "c1": 0.3, "d1": 2e4, "f1": 0.4, "c2": -0.4, "d2": 3e6, "f2": 0.3}
    law = BrokenPowerLaw(2).fit(x, BrokenPowerLaw.evaluate(truth, x))
    assert law.converged_
    for name, value in truth.items():
        assert law.constants_[name] == pytest.approx(value, rel=1e-5), name
    assert law.degenerate_ == []
    assert law.support() > 10


@pytest.mark.slow
def test_a_break_that_the_data_do_not_show_is_called_degenerate():
    """A break is rejected in most draws of a plain power law with noise, and never strongly preferred."""
    x = np.geomspace(1e3, 1e8, 30)
    supported = []
    for seed in range(8):
        y = (0.4 + 7 * x**-0.2) * np.exp(0.005 * np.random.default_rng(seed).standard_normal(30))
        law = BrokenPowerLaw().fit(x, y)
        assert ("d1" in law.degenerate_) >= (law.support() <= 0)
        supported.append(law.support())
    assert np.mean(np.array(supported) <= 0) > 0.7
    assert max(supported) < 10


def test_a_break_outside_of_the_data_is_called_degenerate():
    """Caballero et al.'s simulated four-digit addition: the break lies at 613 samples, the runs end at 405."""
    truth = {"a": 0.41388453, "b": 2.27727229, "c0": 0.05507735, "c1": 5.6629038, "d1": 612.58362, "f1": 0.05919304}
    x = np.unique(np.geomspace(1, 4095, 120).astype(int)).astype(float)
    seen = x <= 405
    whole = BrokenPowerLaw().fit(x, BrokenPowerLaw.evaluate(truth, x))
    for name, value in truth.items():
        assert whole.constants_[name] == pytest.approx(value, rel=1e-6), name
    assert whole.degenerate_ == []
    part = BrokenPowerLaw().fit(x[seen], BrokenPowerLaw.evaluate(truth, x[seen]))
    assert "d1" in part.degenerate_


def test_a_criterion_needs_points_to_spare():
    x = np.geomspace(1e3, 1e8, 8)
    y = 0.4 + 7 * x**-0.2 + 0.01 * np.cos(np.arange(8))
    law = BrokenPowerLaw().fit(x, y)  # 6 constants and a scatter on 8 points
    assert law.aicc() == np.inf
    assert "d1" in law.degenerate_


# A law from the user's function.


TRUTH = {"E": 1.8, "A": 400.0, "B": 2000.0, "alpha": 0.34, "beta": 0.37, "gamma": 2.7}


def bits(seed, noise=0.003, n=50):
    rng = np.random.default_rng(seed)
    N, D, P = 10 ** rng.uniform(7, 9, n), 10 ** rng.uniform(9, 11, n), rng.choice([3.0, 4, 6, 8, 16], n)
    return N, D, P, precision(TRUTH, N, D, P) * np.exp(noise * rng.standard_normal(n))


def user_law(function=precision, parameters=BOUNDS, inputs=("N", "D", "P"), **options):
    return FunctionLaw(function, parameters, inputs, **{"tries": 16} | options)


def test_a_function_fits_as_the_built_in_law_of_the_same_form():
    N, D, noise = sizes(11)
    loss = (1.8 + 400 / N**0.34 + 1200 / D**0.4) * np.exp(0.003 * noise)
    bounds = {name: BOUNDS[name] for name in C4}
    ours = user_law(lambda c, N, D: c["E"] + c["A"] / N ** c["alpha"] + c["B"] / D ** c["beta"], bounds, ("N", "D"))
    ours, built_in = ours.fit(N, D, loss), fit.ChinchillaLaw().fit(N, D, loss)
    assert ours.objective_ == pytest.approx(built_in.objective_, rel=1e-9)
    assert ours.constants_ == pytest.approx(built_in.constants_, rel=1e-5)
    weights = np.random.default_rng(0).integers(0, 3, (5, 50))
    for name, values in ours.refit(weights).items():
        np.testing.assert_allclose(values, built_in.refit(weights)[name], rtol=1e-4)


def test_constants_may_be_negative_or_held():
    x = np.linspace(1, 5, 30)
    law = FunctionLaw(
        lambda c, x: np.exp(c["slope"] * x + c["level"]), {"slope": (-3, 3), "level": (2.0, 2.0)}, ("x",), "y"
    ).fit(x, np.exp(2.0 - 0.7 * x))
    assert law.constants_ == pytest.approx({"slope": -0.7, "level": 2.0}, rel=1e-9)
    assert law.problem_.free == 1


def test_starts_that_are_given_are_tried_and_the_rest_fill_the_box():
    columns = bits(12, noise=0)
    assert user_law(tries=1, starts=[TRUTH]).fit(*columns).objective_ < 1e-20
    assert user_law(tries=5, starts=[TRUTH]).fit(*columns).starts_["tried"] == 6
    points = latin_hypercube(40, 3, seed=0)
    assert (np.sort((points * 40).astype(int), axis=0) == np.arange(40)[:, None]).all()  # one in every slice
    assert (points == latin_hypercube(40, 3, seed=0)).all()


def test_a_file_without_its_function_says_so():
    columns = bits(14)
    text = user_law(name="precision").fit(*columns).to_json()
    with pytest.raises(fit.InputError, match="function is missing"):
        FunctionLaw.from_json(text)
    with pytest.raises(fit.InputError, match="give the function that the law was fitted with"):
        FunctionLaw.from_json(text, lambda c, N, D, P: 1.001 * precision(c, N, D, P))
    with pytest.raises(fit.InputError, match=r"function cannot be differentiated .TypeError"):
        FunctionLaw.from_json(text, lambda c, N: N)
    blind = Law.from_json(text)
    assert "gamma = " in repr(blind)
    with pytest.raises(fit.InputError, match="the law precision has no function"):
        blind.predict(1e9, 1e10, 8)


def test_a_constant_that_nothing_depends_on_is_called_degenerate():
    law = user_law(parameters=BOUNDS | {"idle": (0.1, 10)}).fit(*bits(15))
    assert law.degenerate_ == ["idle"]


BAD = [
    (dict(function=lambda c, N, D, P: np.sinc(c["gamma"] + 0 * N)), "the law uses sinc, which has no derivative here"),
    (dict(function=lambda c, N, D, P: np.floor(precision(c, N, D, P))), "the law uses floor, which has no derivative"),
    (dict(function=lambda c, N, D, P: c["A"].astype(int) + N), "cannot be differentiated .AttributeError"),
    (dict(function=lambda c, N, D, P: -precision(c, N, D, P)), "a finite value above zero for every run"),
    (
        dict(function=lambda c, N: N),
        "function fails on arrays .TypeError: .* it must accept constants of shape .P, 1. by name",
    ),
    (dict(function=lambda c, N, D, P: c["F"]), "function fails on arrays .KeyError: 'F'"),
    (dict(function=lambda c, N, D, P: N[:3]), "function fails on arrays .ValueError"),
    (dict(function=None), "has no function; give it to"),
    (dict(parameters={}), "parameters is empty"),
    (dict(parameters={"E": (2, 1)}), r"parameters has E = \(2, 1\); both must be finite"),
    (dict(parameters={"E": (0, np.inf)}), r"parameters has E = \(0, inf\); both must be finite"),
    (dict(parameters={"E": 1.0}), "parameters has E = 1.0; it must be a pair of numbers"),
    (dict(parameters={"data": (0, 1)}), "parameters has 'data'; use a Python name"),
    (dict(parameters={"R*": (0, 1)}), r"parameters has 'R\*'; use a Python name"),
    (dict(inputs=("N", "N", "P")), "inputs is .* and output is 'loss'; all names must differ"),
    (dict(starts=[{"E": 1.0}]), "starts holds E; each start needs E, A, B, alpha, beta, gamma"),
    (dict(starts=[TRUTH | {"E": 9.0}]), "starts holds E = 9.0; it must lie within its bounds, 0.3 and 5"),
    (dict(tries=0), "tries is 0; it must be at least 1"),
    (dict(objective="mean"), "objective is 'mean'; choose one of"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_what_cannot_be_fitted_is_refused_in_one_sentence(change, message):
    with pytest.raises(fit.InputError, match=message) as caught:
        user_law(**change).fit(*bits(16))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
