"""Allocation: closed forms and every question against independent numeric searches, and published examples."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.allocation import allocation
from isoflop.fit.allocation.serving import Prices
from isoflop.fit.flops import FlopsPerToken
from isoflop.fit.laws.law import LossLaw
from isoflop.fit.laws.repetition import RepetitionLaw
from scipy.optimize import minimize_scalar

HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
# Exponents of Hoffmann et al. with a third digit, as Sardana et al. 2023 and de Vries 2023 use them.
HOFFMANN_3_DIGITS = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.336, "beta": 0.283}


def chinchilla(constants, N, D):
    return constants["E"] + constants["A"] / N ** constants["alpha"] + constants["B"] / D ** constants["beta"]


@dataclass
class FixedLaw:
    """A law with fixed constants that has the interface of a fitted one."""

    constants_: dict
    draws_: dict | None = None
    form: str = "chinchilla"
    irreducible: str = "E"
    inputs: tuple = ("N", "D")
    evaluate: object = field(default=staticmethod(chinchilla))

    def optimum(self, flops, constants, flops_per_token=6.0):
        if self.form == "chinchilla":
            return allocation.optimum(flops, constants, flops_per_token)
        return LossLaw.optimum(self, flops, constants, flops_per_token)

    def equal_loss(self, constants, loss):
        return allocation.EqualLoss(constants, loss)


def random_constants(seed, n):
    """Return constants of n laws whose terms are both 0.05 to 1.5 at 1e9 parameters and 3e10 tokens."""
    rng = np.random.default_rng(seed)
    alpha, beta = rng.uniform(0.2, 0.6, (2, n))
    size, data = rng.uniform(0.05, 1.5, (2, n))
    E = rng.uniform(0.5, 2.5, n)
    return {"E": E, "A": size * 1e9**alpha, "B": data * 3e10**beta, "alpha": alpha, "beta": beta}


def split_draws(draws):
    return [{name: float(v[i]) for name, v in draws.items()} for i in range(len(draws["E"]))]


def random_law(seed=0, n=30, **options):
    draws = random_constants(seed, n)
    return FixedLaw(split_draws(draws)[0], draws, **options)


def scipy_minimum(loss, low, high):
    """Minimize by SciPy in log x from the best point of a grid: x is good to 1e-6, the loss to rounding."""
    x = np.linspace(np.log(low), np.log(high), 400)
    i = int(np.clip(np.argmin([loss(np.exp(v)) for v in x]), 1, len(x) - 2))
    result = minimize_scalar(
        lambda v: loss(np.exp(v)), bounds=(x[i - 1], x[i + 1]), method="bounded", options={"xatol": 1e-10}
    )
    return np.exp(result.x), result.fun


def test_the_closed_form_is_the_search_and_the_search_is_scipys():
    law = random_law()
    budgets = np.array([1e18, 1e22, 1e26])
    closed = allocation.compute_optimal(law, budgets)
    searched = allocation.compute_optimal(law, budgets, lambda N: 6 * N)
    np.testing.assert_allclose(
        allocation.compute_optimal(law, 4 / 3 * budgets, 8.0).draws["N"], closed.draws["N"], rtol=1e-12
    )
    # The loss is flat at its minimum, so a search finds N only to the square root of rounding.
    np.testing.assert_allclose(closed.draws["N"], searched.draws["N"], rtol=1e-6)
    np.testing.assert_allclose(closed.draws["loss"], searched.draws["loss"], rtol=1e-13)
    np.testing.assert_allclose(6 * closed.draws["N"] * closed.draws["D"], budgets[:, None] * np.ones(30), rtol=1e-12)
    for j, constants in enumerate(split_draws(law.draws_)):
        N, loss = scipy_minimum(lambda n, c=constants: chinchilla(c, n, 1e22 / 6 / n), 1e3, 1e18)
        np.testing.assert_allclose(closed.draws["N"][1, j], N, rtol=1e-5)
        np.testing.assert_allclose(closed.draws["loss"][1, j], loss, rtol=1e-12)


def test_a_term_that_vanished_sends_the_optimum_to_an_end():
    for convention in (6.0, lambda N: 6 * N):
        no_size = allocation.compute_optimal(FixedLaw(HOFFMANN | {"A": 0.0}), 1e22, convention)
        no_data = allocation.compute_optimal(FixedLaw(HOFFMANN | {"B": 0.0}), 1e22, convention)
        flat = allocation.compute_optimal(FixedLaw(HOFFMANN | {"alpha": 0.0}), 1e22, 6.0)
        assert (no_size.N[0], no_size.D[0]) == (0.0, np.inf)
        assert (no_data.N[0], no_data.D[0]) == (np.inf, 0.0)
        assert (flat.N[0], flat.D[0]) == (0.0, np.inf)
        np.testing.assert_allclose([no_size.loss[0], no_data.loss[0]], 1.69, atol=1e-6)
        np.testing.assert_allclose(flat.loss, 1.69 + 406.4)


def test_few_tokens_cap_a_plain_law_at_one_epoch():
    law = random_law(5)
    free = allocation.compute_optimal(law, 1e23)
    for convention, price in ((6.0, lambda n: 6 * n), (FlopsPerToken(6.0, 2e4),) * 2):
        capped = allocation.token_limited(law, 1e23, 1e11, convention)
        D, N = capped.draws["D"][0], capped.draws["N"][0]
        assert (D <= 1e11).all()
        np.testing.assert_allclose(price(N) * D, 1e23, rtol=1e-9)
        for j, constants in enumerate(split_draws(law.draws_)):
            _, loss = scipy_minimum(lambda n, c=constants, p=price: chinchilla(c, n, min(1e23 / p(n), 1e11)), 1e3, 1e18)
            np.testing.assert_allclose(capped.draws["loss"][0, j], loss, rtol=1e-7)  # SciPy stops next to the kink
    plenty = allocation.token_limited(law, 1e23, 1e18)
    np.testing.assert_allclose([plenty.N, plenty.loss], [free.N, free.loss], rtol=1e-12)


def test_the_optimum_of_the_repetition_law_is_scipys():
    """Repeated tokens and excess parameters are worth less, so no loss is below that of fresh data."""
    law = random_law(6, 8, form="repetition", inputs=RepetitionLaw.inputs, evaluate=RepetitionLaw.evaluate)
    law.draws_ |= {"R_D": np.linspace(2.0, 30.0, 8), "R_N": np.linspace(2.0, 30.0, 8)}
    law.constants_ = split_draws(law.draws_)[0]
    plain, C = FixedLaw(law.constants_, law.draws_), 1e22
    for U in (1e11, 1e13):
        optimum = allocation.token_limited(law, C, U)
        for j, constants in enumerate(split_draws(law.draws_)):
            N, best = scipy_minimum(lambda n, c=constants, U=U: RepetitionLaw.evaluate(c, n, C / 6 / n, U), 1e4, 1e18)
            np.testing.assert_allclose(optimum.draws["N"][0, j], N, rtol=1e-4)
            np.testing.assert_allclose(optimum.draws["loss"][0, j], best, rtol=1e-10)
        np.testing.assert_allclose(optimum.draws["epochs"], np.maximum(optimum.draws["D"] / U, 1.0))
        fresh = allocation.compute_optimal(plain, C)
        assert (optimum.draws["loss"] >= fresh.draws["loss"] * (1 - 1e-12)).all()
    np.testing.assert_allclose(optimum.N, fresh.N, rtol=1e-4)


def test_serving_moves_the_optimum_to_where_scipy_finds_it():
    law, served = random_law(7), 3e12
    goals = allocation.compute_optimal(law, 1e22).draws["loss"][0]
    for j, constants in enumerate(split_draws(law.draws_)):
        optimum = allocation.inference_aware(FixedLaw(constants), served, loss=goals[j])

        def cost(n, c=constants, goal=goals[j]):
            data_term = goal - c["E"] - c["A"] / n ** c["alpha"]
            return np.inf if data_term <= 0 else n * (6 * (c["B"] / data_term) ** (1 / c["beta"]) + 2 * served)

        N, total = scipy_minimum(cost, optimum.N[0] / 30, optimum.N[0] * 30)
        np.testing.assert_allclose(optimum.more["total_flops"], total, rtol=1e-12)
        np.testing.assert_allclose(optimum.N, N, rtol=1e-6)
        np.testing.assert_allclose(chinchilla(constants, optimum.N, optimum.D), goals[j], rtol=1e-12)
        assert optimum.more["saving"][0] > 0


def test_the_published_example_of_serving():
    """Sardana et al. 2023, figure 1: a model of a 13B's quality that serves 2T tokens should be a 7B, which saves 17 %
    (1.7e22 FLOPs).
    """
    law = FixedLaw(HOFFMANN_3_DIGITS)
    share = HOFFMANN_3_DIGITS["beta"] / (HOFFMANN_3_DIGITS["alpha"] + HOFFMANN_3_DIGITS["beta"])
    goal = HOFFMANN_3_DIGITS["E"] + HOFFMANN_3_DIGITS["A"] / 13e9 ** HOFFMANN_3_DIGITS["alpha"] / share
    optimum = allocation.inference_aware(law, 2e12, loss=goal)
    assert round(optimum.N[0] / 1e9) == 7
    assert round(optimum.more["saving"][0], 2) == 0.17
    saved = optimum.more["total_flops"] / (1 - optimum.more["saving"]) * optimum.more["saving"]
    np.testing.assert_allclose(saved, 1.7e22, rtol=0.02)


def test_prices_weigh_serving_against_training():
    law, served = FixedLaw(HOFFMANN), 1e12
    equal_prices = Prices(2.0, 1e15, 2.0, 1e15, train_mfu=0.4, input_mfu=0.4, output_share=0.0)
    unpriced = allocation.inference_aware(law, served, loss=2.1)
    priced = allocation.inference_aware(law, served, loss=2.1, prices=equal_prices)
    np.testing.assert_allclose([priced.N, priced.D], [unpriced.N, unpriced.D], rtol=1e-12)
    np.testing.assert_allclose(
        priced.more["dollars"], unpriced.more["total_flops"] * 2.0 / 3600 / 1e15 / 0.4, rtol=1e-12
    )
    # Writing at a fortieth of the utilisation is serving forty times the tokens.
    slow_output = Prices(2.0, 1e15, 2.0, 1e15, train_mfu=0.4, output_mfu=0.01, output_share=1.0)
    forty_fold = allocation.inference_aware(law, 40 * served, loss=2.1)
    priced = allocation.inference_aware(law, served, loss=2.1, prices=slow_output)
    np.testing.assert_allclose([priced.N, priced.D], [forty_fold.N, forty_fold.D], rtol=1e-9)


def test_a_loss_out_of_reach_costs_infinity_and_counts_in_the_interval():
    draws = {name: np.full(100, value) for name, value in HOFFMANN.items()}
    draws["E"] = np.where(np.arange(100) < 10, 2.2, 1.69)  # a tenth of the draws have E at the goal
    served = allocation.inference_aware(FixedLaw(HOFFMANN, draws), 1e12, loss=2.2)
    assert np.isfinite(served.N[0])
    assert served.interval("N")[0][1] == np.inf
    assert np.isfinite(served.interval("N", level=0.7)[0]).all()
    assert "∞" in repr(served)


def test_the_law_with_a_power_of_both_terms_is_served_too():
    gamma = 0.6
    rng = np.random.default_rng(2)
    N, D = 10 ** rng.uniform(7.5, 10.5, 30), 10 ** rng.uniform(9, 12, 30)
    truth = {"E": 1.7, "A": 300.0, "B": 900.0, "alpha": 0.5, "beta": 0.52, "gamma": gamma}
    law = fit.GammaLaw().fit(N, D, fit.GammaLaw.evaluate(truth, N, D))
    optimum = allocation.inference_aware(law, 1e12, loss=2.3)
    assert law.predict(N=optimum.N[0], D=optimum.D[0]) == pytest.approx(2.3, rel=1e-9)

    def cost(n):  # the D that reaches the loss, from the sum in brackets
        data_term = (2.3 - 1.7) ** (1 / gamma) - 300.0 / n**0.5
        return np.inf if data_term <= 0 else n * (6 * (900.0 / data_term) ** (1 / 0.52) + 2e12)

    size, total = scipy_minimum(cost, optimum.N[0] / 30, optimum.N[0] * 30)
    np.testing.assert_allclose([optimum.N[0], optimum.more["total_flops"][0]], [size, total], rtol=1e-5)


def test_intervals_are_percentiles_over_draws_and_cover():
    rng = np.random.default_rng(0)
    N, D = 10 ** rng.uniform(7.5, 10.5, 60), 10 ** rng.uniform(9, 12, 60)
    loss = chinchilla(HOFFMANN, N, D) * np.exp(0.003 * rng.standard_normal(60))
    law = fit.ChinchillaLaw().fit(N, D, loss).bootstrap(200)
    for ask in (
        lambda law: allocation.compute_optimal(law, 1e22),
        lambda law: allocation.token_limited(law, 1e22, 5e10),
        lambda law: allocation.inference_aware(law, 1e12, loss=2.3),
    ):
        draw = {name: v[7] for name, v in law.draws_.items()}
        answer, true_answer, one_draw = (ask(one) for one in (law, FixedLaw(HOFFMANN), FixedLaw(draw)))
        assert set(answer.intervals) == set(answer.values)
        assert true_answer.intervals == {}
        for name, interval in answer.intervals.items():
            low, high = interval[0]
            if high <= low * (1 + 1e-9):  # a value fixed by the question
                continue
            np.testing.assert_allclose(answer.draws[name][0, 7], one_draw.values[name][0], rtol=1e-9)
            assert low < true_answer.values[name][0] < high, name
            wider = answer.interval(name, 0.999)[0]
            assert wider[0] <= low < answer.values[name][0] < high <= wider[1]


WRONG = [
    (lambda law: allocation.compute_optimal(law, -1e21), "flops is -1e\\+21"),
    (lambda law: allocation.compute_optimal(law, 1e21, 0.0), "flops_per_token is 0"),
    (lambda law: allocation.compute_optimal(law, 1e21, level=95), "level is 95"),
    (lambda law: allocation.compute_optimal(law, 1e21).interval("n"), "quantity is 'n'; choose one of flops"),
    (lambda law: allocation.compute_optimal(fit.ChinchillaLaw(), 1e21), "not fitted"),
    (lambda law: allocation.token_limited(law, [1e21, 1e22], [1e9, 1e10, 1e11]), "flops has 2, unique_tokens has 3"),
    (lambda law: allocation.inference_aware(law, 0.0, loss=2.0), "lifetime_tokens is 0"),
    (lambda law: Prices(2.0, 1e15, 2.0, 1e15, output_mfu=1.5), "output_mfu is 1.5; it must be a share"),
    (lambda law: Prices(0.0, 1e15, 2.0, 1e15), "train_hour is 0.0; it must be a finite number above zero"),
    (lambda law: FlopsPerToken.measured([1e9, 1e9], [1e9, 1e10], [1e19]), "columns differ in length"),
    (lambda law: allocation.compute_optimal(FixedLaw({}, form="x", inputs=("C",)), 1e21), "the law takes C"),
    (lambda law: allocation.inference_aware(fit.KaplanLaw(), 1e12, loss=2.0), "law is of type KaplanLaw"),
]


@pytest.mark.parametrize(("ask", "message"), WRONG)
def test_bad_questions_are_refused_in_one_sentence(ask, message):
    with pytest.raises(fit.InputError, match=message):
        ask(FixedLaw(HOFFMANN))
