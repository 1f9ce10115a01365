"""What runs are worth: against dense linear algebra, finite differences, and every batch there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from isoflop.fit import ChinchillaLaw, InputError
from isoflop.fit.allocation.allocation import optimum
from isoflop.fit.allocation.design import (
    PRIOR,
    Beliefs,
    Buyer,
    Candidates,
    Design,
    Linear,
    Question,
    Widths,
    trunk_correlation,
)

TRUTH = {"E": 1.8, "A": 480.0, "B": 2100.0, "alpha": 0.35, "beta": 0.366}
TARGET = 1e23
SIZES = np.geomspace(1e8, 3e9, 5)


def runs(generator: np.random.Generator, noise: float = 0.004) -> tuple[Any, Any, Any]:
    N, D = (grid.ravel() for grid in np.meshgrid(SIZES, np.geomspace(2e9, 6e10, 4), indexing="ij"))
    return N, D, ChinchillaLaw.evaluate(TRUTH, N, D) * np.exp(noise * generator.normal(size=len(N)))


@pytest.fixture(scope="module")
def law() -> ChinchillaLaw:
    return ChinchillaLaw().fit(*runs(np.random.default_rng(0))).bootstrap(60)


def question(law: ChinchillaLaw, **changes: Any) -> Question:
    trunk = np.array([f"{N:.4g}" for N in law.data_["N"]])
    return Question.of(law, TARGET, **({"trunk": trunk, "correlation": 0.4} | changes))


def pool(generator: np.random.Generator, count: int) -> Candidates:
    """Runs of random sizes and D; each third one begins a size that the law has seen."""
    N = np.where(np.arange(count) % 3 == 0, generator.choice(SIZES, count), generator.choice([2e8, 6e8, 2e9], count))
    D = np.exp(generator.uniform(np.log(2e9), np.log(2e11), count))
    C = 6 * N * D
    return Candidates(N, D, C, 0.2 * C, C, np.array([f"{n:.4g}" for n in N]))


def test_beliefs_are_the_posterior_of_dense_linear_algebra_with_errors_that_trunks_share() -> None:
    generator = np.random.default_rng(1)
    M, k, n, shared, own = 3, 5, 9, 0.3, 0.7
    goals, slopes = generator.normal(size=(M, 2, k)), generator.normal(size=(M, n, k))
    trunk, prior = np.array([0, 1, -1, 0, 1, 1, -1, 0, 2]), generator.uniform(0.5, 2.0, k)
    beliefs = Beliefs(goals, prior, 3, shared, own)
    for i in range(n):
        beliefs.observe(slopes[:, i], int(trunk[i]))
    noise = np.diag(np.full(n, shared + own))
    noise += shared * ((trunk[:, None] == trunk) & (trunk[:, None] >= 0) & ~np.eye(n, dtype=bool))
    for m in range(M):
        posterior = np.linalg.inv(slopes[m].T @ np.linalg.inv(noise) @ slopes[m] + np.diag(prior**-2))
        wanted = [goal @ posterior @ goal for goal in goals[m]]
        np.testing.assert_allclose(beliefs.variances()[m], wanted, rtol=1e-10)


def test_a_gain_is_what_buying_brings_and_taking_back_undoes_it() -> None:
    generator = np.random.default_rng(2)
    goals, slopes = generator.normal(size=(4, 2, 5)), generator.normal(size=(4, 6, 5))
    trunk = np.array([0, 1, 0, 1, 1, 0])
    beliefs = Beliefs(goals, np.ones(5), 2, 0.2, 0.5)
    for i in range(3):
        beliefs.observe(slopes[:, i], int(trunk[i]))
    before, gains, kept = beliefs.criterion(), beliefs.gains(slopes, trunk), beliefs.covariance.copy()
    for i in range(6):
        trial = beliefs.copy()
        trial.observe(slopes[:, i], int(trunk[i]))
        assert before - trial.criterion() == pytest.approx(gains[i], rel=1e-9)
        trial.observe(slopes[:, i], int(trunk[i]), -1.0)
        np.testing.assert_allclose(trial.covariance, kept, atol=1e-12)
    assert (gains > 0).all()


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"E": 1.8}, {"tied": True, "E": 1.8}])
def test_slopes_and_goals_are_the_derivatives_by_every_free_constant(options: dict[str, Any]) -> None:
    law = ChinchillaLaw(**options).fit(*runs(np.random.default_rng(3))).bootstrap(8)
    linear = Linear(question(law), 4, 0)
    N, D, step = np.array([2e8, 5e9]), np.array([3e10, 1e11]), 1e-6
    names = [name for name in ("E", "A", "alpha", "B", "beta") if not (name == "E" and law.E is not None)]
    names = [name for name in names if not (name == "beta" and law.tied)]
    assert linear.slopes(N, D).shape == (4, 2, len(names)) == (4, 2, law.problem_.free)
    assert len(linear.prior) == len(names)
    assert set(linear.prior) <= set(PRIOR)

    def moved(name: str, by: float) -> dict[str, Any]:
        c = {key: value.copy() for key, value in linear.constants.items()}
        if name in "EAB":
            c[name] *= np.exp(by)
        for exponent, amplitude, middle in (("alpha", "A", linear.n0), ("beta", "B", linear.d0)):
            if exponent == name or (law.tied and name == "alpha"):  # the term at the middle of the runs stays
                c[exponent] += by
                c[amplitude] *= np.exp(by * middle)
        return c

    for place, name in enumerate(names):
        high, low = (moved(name, sign * step) for sign in (1.0, -1.0))
        up, down = (np.log(ChinchillaLaw.evaluate({k: v[:, None] for k, v in c.items()}, N, D)) for c in (high, low))
        np.testing.assert_allclose(linear.slopes(N, D)[:, :, place], (up - down) / (2 * step), atol=1e-8)
        (N1, _, L1), (N0, _, L0) = (optimum(TARGET, c) for c in (high, low))
        wanted = np.stack([np.log(L1 / L0), np.log(N1 / N0)], 1) / (2 * step)
        np.testing.assert_allclose(linear.goals(TARGET)[:, :, place], wanted, rtol=1e-6, atol=1e-7)


def test_a_small_batch_is_nearly_the_best_of_all_batches(law: ChinchillaLaw) -> None:
    for seed in range(4):
        offer = pool(np.random.default_rng(seed), 12)
        buyer = Buyer(question(law), offer, draws=8)
        budget = 0.4 * offer.flops.sum()
        bought = buyer.buy(budget, max_runs=4, check_share=0.0)
        every = [
            list(batch)
            for size in range(1, 5)
            for batch in itertools.combinations(range(12), size)
            if offer.cost(list(batch)) <= budget
        ]
        scores = [buyer.with_beliefs(batch).criterion() for batch in every]
        mine = buyer.with_beliefs(bought.chosen).criterion()
        # Exchanges of one run for one are no search of everything; a batch gains much more than 3 % of the widths.
        assert mine <= min(scores) + 0.03
        assert mine < np.median(scores) - 0.03


def test_what_is_told_of_a_batch_adds_up(law: ChinchillaLaw) -> None:
    offer = pool(np.random.default_rng(5), 60)
    buyer = Buyer(question(law), offer)
    budget = 0.15 * offer.flops.sum()
    bought = buyer.buy(budget)
    assert sum(bought.flops) == pytest.approx(offer.cost(bought.chosen), rel=1e-9)
    assert offer.cost(bought.chosen) <= budget * (1 + 1e-9)
    assert len(set(bought.chosen)) == len(bought.chosen)
    gained = buyer.beliefs.criterion() - buyer.with_beliefs(bought.chosen).criterion()
    assert sum(bought.gains) == pytest.approx(gained, rel=1e-9)
    assert gained == pytest.approx(
        0.5 * np.log(bought.before.loss * bought.before.N / bought.after.loss / bought.after.N), rel=1e-9
    )


def test_a_share_goes_to_the_largest_runs_near_the_optimum(law: ChinchillaLaw) -> None:
    offer = pool(np.random.default_rng(6), 200)
    budget = 2.5 * offer.flops.max()
    bought = Buyer(question(law), offer).buy(budget, max_runs=8)
    checks = [i for i, check in zip(bought.chosen, bought.check, strict=True) if check]
    assert checks
    data = law.data_
    reach = max(offer.size[offer.flops <= 0.5 * budget].max(), 6 * (data["N"] * data["D"]).max())
    off = np.abs(np.log(offer.N / optimum(offer.size, TRUTH)[0]))
    nearest = off[(offer.size >= 0.5 * reach) & (offer.flops <= 0.5 * budget)].min()
    for i in checks:
        assert offer.size[i] >= 0.5 * reach
        assert off[i] <= nearest + np.log(2 * 1.5)  # the draws of the law place the optimum within 1.5
    none = Buyer(question(law), offer).buy(budget, max_runs=8, check_share=0.0)
    assert not any(none.check)
    assert none.after.loss * none.after.N <= bought.after.loss * bought.after.N * 1.02  # safety is not free


def test_the_longest_run_of_a_trunk_pays_for_it_and_what_branches_off_another_serves_nobody() -> None:
    N, D = np.ones(4), np.array([1.0, 2.0, 4.0, 3.0])
    offer = Candidates(
        N, D, np.array([10.0, 20.0, 40.0, 6.0]), np.array([2.0, 4.0, 8.0, 6.0]), D, np.array(list("aaaa"))
    )
    assert offer.cost([1]) == 20
    assert offer.cost([0, 1]) == 22
    assert offer.cost([2, 0, 1]) == 46
    assert offer.cost([3]) == 6  # it branches off a trunk that is there
    assert offer.cost([3, 0]) == 16
    for order in itertools.permutations(range(4)):
        spent = [offer.extra(list(order[:i]))[order[i]] for i in range(4)]
        assert sum(spent) == pytest.approx(offer.cost(list(order)))


def test_a_run_of_another_seed_is_worth_more_than_a_second_one_of_its_trunk(law: ChinchillaLaw) -> None:
    N, D = np.full(2, SIZES[2]), np.full(2, 5e10)
    C = 6 * N * D
    offer = Candidates(N, D, C, C, C, np.array([f"{SIZES[2]:.4g}", "another"]))
    buyer = Buyer(question(law, correlation=0.8), offer)
    old, fresh = buyer.beliefs.gains(buyer.slopes, buyer.place)
    assert fresh > 1.1 * old


def test_the_correlation_within_trunks_is_found_where_there_are_many_and_assumed_where_there_are_none() -> None:
    generator = np.random.default_rng(7)
    trunk = np.repeat(np.arange(2000), 3)
    error = 0.6 * generator.normal(size=2000)[trunk] + 0.8 * generator.normal(size=6000)
    assert trunk_correlation(error, trunk) == pytest.approx(0.36, abs=0.04)  # 0.02 is one standard error
    assert trunk_correlation(error[:20], np.arange(20)) == 0.5


def test_the_expected_interval_begins_from_the_one_that_is_there() -> None:
    design = Design([], [], [], [], Widths(0.02, 0.5), Widths(0.01, 0.25))
    assert design.narrowed("loss", 2.0, (1.0, 4.0)) == pytest.approx((2**0.5, 8**0.5))
    assert design.narrowed("N", 2.0, (2.0, 32.0)) == pytest.approx((2.0, 8.0))


def test_bad_questions_are_refused(law: ChinchillaLaw) -> None:
    offer = pool(np.random.default_rng(8), 3)
    with pytest.raises(InputError, match=r"budget is 1e\+10 FLOPs; the cheapest run costs .*, so give at least that"):
        Buyer(question(law), offer).buy(1e10)
    with pytest.raises(InputError, match=r"correlation is 1\.0; at least 0 and below 1"):
        question(law, correlation=1.0)
    with pytest.raises(InputError, match="trunk has 2 labels and the law 20 rows"):
        question(law, trunk=["a", "b"])
    with pytest.raises(InputError, match="target_flops is -1"):
        Question.of(law, -1.0)
    with pytest.raises(InputError, match="call bootstrap"):
        Question.of(ChinchillaLaw().fit(*runs(np.random.default_rng(0))), TARGET)
