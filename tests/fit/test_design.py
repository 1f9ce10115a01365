"""The worth of runs, against dense linear algebra, finite differences and every possible batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from isoflop.fit import ChinchillaLaw, FunctionLaw, InputError, RepetitionLaw
from isoflop.fit.allocation.design import (
    Beliefs,
    Buyer,
    Candidates,
    Design,
    Question,
    basins,
    log_losses,
    over,
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
    return ChinchillaLaw().fit(*runs(np.random.default_rng(0)))


def question(law: ChinchillaLaw, **changes: Any) -> Question:
    trunk = np.array([f"{N:.4g}" for N in law.data_["N"]])
    return Question.of(law, TARGET, **({"trunk": trunk, "correlation": 0.4} | changes))


def pool(generator: np.random.Generator, count: int) -> Candidates:
    """Return runs of random sizes and D; every third one has a size that the law has seen."""
    N = np.where(np.arange(count) % 3 == 0, generator.choice(SIZES, count), generator.choice([2e8, 6e8, 2e9], count))
    D = np.exp(generator.uniform(np.log(2e9), np.log(2e11), count))
    C = 6 * N * D
    return Candidates({"N": N, "D": D}, C, 0.2 * C, C, np.array([f"{n:.4g}" for n in N]))


def test_beliefs_are_the_posterior_of_dense_linear_algebra() -> None:
    generator = np.random.default_rng(1)
    M, k, n, shared, separate = 3, 5, 9, 0.3, 0.7
    goals, slopes = generator.normal(size=(M, 2, k)), generator.normal(size=(M, n, k))
    trunk, shares = np.array([0, 1, -1, 0, 1, 1, -1, 0, 2]), np.array([0.5, 0.3, 0.2])
    beliefs = Beliefs(goals, shares, 3, shared, separate)
    for i in range(n):
        total, fall, covariance = beliefs.variances().sum(), beliefs.falls(slopes, trunk)[i], beliefs.covariance.copy()
        beliefs.observe(slopes[:, i], int(trunk[i]))
        assert total - beliefs.variances().sum() == pytest.approx(fall, rel=1e-9)
        undone = beliefs.copy()
        undone.observe(slopes[:, i], int(trunk[i]), -1.0)
        np.testing.assert_allclose(undone.covariance, covariance, atol=1e-12)
    noise = np.diag(np.full(n, shared + separate))
    noise += shared * ((trunk[:, None] == trunk) & (trunk[:, None] >= 0) & ~np.eye(n, dtype=bool))
    posterior = [np.linalg.inv(J.T @ np.linalg.inv(noise) @ J + np.eye(k)) for J in slopes]
    expected = [[goal @ matrix @ goal for goal in goals[m]] for m, matrix in enumerate(posterior)]
    np.testing.assert_allclose(beliefs.variances(), shares @ np.array(expected), rtol=1e-10)


def test_tied_exponents_and_a_given_E_are_designed_for_by_the_closed_form() -> None:
    generator = np.random.default_rng(0)
    x, y = np.log(runs(generator)[:2])
    constants = TRUTH | {"beta": 0.35}
    loss = ChinchillaLaw.evaluate(constants, np.exp(x), np.exp(y)) * np.exp(0.004 * generator.normal(size=len(x)))
    law = ChinchillaLaw(tied=True, E=1.8).fit(np.exp(x), np.exp(y), loss)
    sizes = np.geomspace(2e7, 2e9, 25)
    equal, trunks = np.full(25, 6e20), np.array([f"new {i}" for i in range(25)])  # they differ only in their shape
    pool = Candidates({"N": sizes, "D": equal / 6 / sizes}, equal, equal, equal, trunks)
    query = Question.of(law, TARGET)
    assert len(query.basins) == 1
    A, B, alpha = law.A_, law.B_, law.alpha_

    def slopes(u: Any, v: Any) -> Any:
        """Return the slopes of log L at (log N, log D) by log A, alpha and log B at the mean log N and log D."""
        first, second = A * np.exp(-alpha * u), B * np.exp(-alpha * v)
        by_alpha = -first * (u - x.mean()) - second * (v - y.mean())
        return np.stack([first, by_alpha, second], -1) / (1.8 + first + second)[..., None]

    # Muennighoff et al. 2023: N* = (A / B)^(1 / (2 alpha)) sqrt(C / 6), and at the optimum N* does not move the loss.
    optimum = np.log(A / B) / (2 * alpha) + 0.5 * np.log(TARGET / 6)
    moved = (x.mean() - y.mean() - np.log(A / B) / alpha) / (2 * alpha)
    goals = np.stack([slopes(optimum, np.log(TARGET / 6) - optimum), [0.5 / alpha, moved, -0.5 / alpha]])
    low, high = law.problem_.lower, law.problem_.upper
    prior, rows = np.diag((4.0 / (high - low)) ** 2), slopes(x, y) / query.noise

    def variance(*runs_added: int) -> Any:
        J = np.vstack([rows, *(slopes(*np.log([sizes[i], 1e20 / sizes[i]])) / query.noise for i in runs_added)])
        return np.einsum("qi,ij,qj->q", goals, np.linalg.inv(J.T @ J + prior), goals)

    # Slopes by central differences are good to about 1e-6.
    np.testing.assert_allclose(query.beliefs(query.labels([])).variances(), variance(), rtol=1e-4)
    unknown = variance() + query.drift(query.reach)
    best_run = min(range(25), key=lambda i: float((variance(i) / unknown).sum()))
    bought = Buyer(query, pool).buy(6.0001e20).chosen
    untied = Buyer(Question.of(ChinchillaLaw().fit(np.exp(x), np.exp(y), loss), TARGET), pool).buy(6.0001e20).chosen
    assert bought == [best_run] != untied


VALLEYS = {"x": (1.0, 1.0), "m": (-2.0, 2.0)}


def valleys(c: Any, z: Any) -> Any:
    """At z = 1, m and -m give the same value."""
    return np.exp(c["x"] * (c["m"] * c["m"] - 1.0) ** 2 * z / (1.0 + z) + 0.1 * c["m"] * (z - 1.0) + 1.0)


def test_a_run_that_tells_basins_apart_is_worth_most() -> None:
    generator = np.random.default_rng(9)
    z = np.repeat([0.97, 1.0, 1.03], 3)
    y = valleys({"x": np.array(1.0), "m": np.array(0.6)}, z) * np.exp(0.05 * generator.normal(size=9))
    law = FunctionLaw(valleys, VALLEYS, inputs=("z",), output="y").fit(z, y)
    solutions = basins([law])
    assert len(solutions) >= 2
    assert sum(basin.share for basin in solutions) == pytest.approx(1.0)
    signs = {bool(basin.theta[1] > 0) for basin in solutions}
    assert signs == {True, False}
    question = Question.of(law, 8.0, points={"z": [8.0]}, flops=z)
    offered = np.array([0.9, 1.0, 5.0])
    _, slopes = over(question.basins, log_losses({"z": offered}))
    assert question.beliefs({}).falls(slopes, np.full(3, -1)).argmax() == 2
    value, low, high = (question.forecast()[name][0] for name in ("value", "low", "high"))
    ends = [float(valleys({"x": np.array(1.0), "m": np.array(m)}, 8.0)) for m in (-0.6, 0.6)]
    assert low < min(ends) < value < max(ends) < high


def test_a_small_batch_is_nearly_the_best_of_all_batches(law: ChinchillaLaw) -> None:
    for seed in range(4):
        offer = pool(np.random.default_rng(seed), 12)
        buyer = Buyer(replace(question(law), drift_rate=np.zeros(2)), offer)
        budget = 0.4 * offer.flops.sum()
        bought = buyer.buy(budget, max_runs=4)
        every = [
            list(batch)
            for size in range(1, 5)
            for batch in itertools.combinations(range(12), size)
            if offer.cost(list(batch)) <= budget
        ]
        scores = [0.5 * np.log(buyer.value(buyer.with_beliefs(batch), batch)) for batch in every]
        score = 0.5 * np.log(buyer.value(buyer.with_beliefs(bought.chosen), bought.chosen))
        # Exchanging single runs is no exhaustive search; a batch gains much more than 3 % of the widths.
        assert score <= min(scores) + 0.03
        assert score < np.median(scores) - 0.03


def test_what_is_told_of_a_batch_adds_up(law: ChinchillaLaw) -> None:
    offer = pool(np.random.default_rng(5), 60)
    buyer = Buyer(question(law), offer)
    budget = 0.15 * offer.flops.sum()
    bought = buyer.buy(budget)
    assert sum(bought.flops) == pytest.approx(offer.cost(bought.chosen), rel=1e-9)
    assert offer.cost(bought.chosen) <= budget * (1 + 1e-9)
    assert len(set(bought.chosen)) == len(bought.chosen)
    variance = buyer.value(buyer.with_beliefs(bought.chosen), bought.chosen)
    assert sum(bought.gains) == pytest.approx(-0.5 * np.log(variance), rel=1e-9)
    assert variance == pytest.approx(
        np.mean([(bought.after[k] / bought.before[k]) ** 2 for k in ("loss", "N")]), rel=1e-9
    )


def test_runs_larger_than_any_before_are_worth_more(law: ChinchillaLaw) -> None:
    offer = pool(np.random.default_rng(6), 200)
    query = question(law)
    bought = Buyer(query, offer).buy(2.5 * offer.flops.max(), max_runs=8)
    assert any(bought.check)
    assert [offer.size[i] > query.reach for i in bought.chosen] == bought.check
    certain = replace(query, drift_rate=np.zeros(2))
    trusting = Buyer(certain, offer).buy(2.5 * offer.flops.max(), max_runs=8)
    assert max(offer.size[trusting.chosen]) <= max(offer.size[bought.chosen])


def test_the_longest_run_of_a_trunk_pays_for_it() -> None:
    D, flops, decay = np.array([[1.0, 2.0, 4.0, 3.0], [10.0, 20.0, 40.0, 6.0], [2.0, 4.0, 8.0, 6.0]])
    offer = Candidates({"N": np.ones(4), "D": D}, flops, decay, D, np.array(list("aaaa")))
    # Run 3 branches off an existing trunk.
    for batch, cost in (([1], 20), ([0, 1], 22), ([2, 0, 1], 46), ([3], 6), ([3, 0], 16)):
        assert offer.cost(batch) == cost
    for order in itertools.permutations(range(4)):
        spent = [offer.extra(list(order[:i]))[order[i]] for i in range(4)]
        assert sum(spent) == pytest.approx(offer.cost(list(order)))


def test_another_seed_is_worth_more_than_another_branch(law: ChinchillaLaw) -> None:
    N, D = np.full(2, SIZES[2]), np.full(2, 5e10)
    C = 6 * N * D
    offer = Candidates({"N": N, "D": D}, C, C, C, np.array([f"{SIZES[2]:.4g}", "another"]))
    buyer = Buyer(question(law, correlation=0.8), offer)
    old, fresh = buyer.worth(buyer.beliefs, [])
    assert fresh > 1.1 * old


def test_correlation_within_trunks_is_fitted_or_assumed() -> None:
    generator = np.random.default_rng(7)
    trunk = np.repeat(np.arange(2000), 3)
    error = 0.6 * generator.normal(size=2000)[trunk] + 0.8 * generator.normal(size=6000)
    assert trunk_correlation(error, trunk) == pytest.approx(0.36, abs=0.04)  # 0.02 is one standard error
    assert trunk_correlation(error[:20], np.arange(20)) == 0.5


def test_the_expected_interval_begins_from_the_one_that_is_there() -> None:
    design = Design([], [], [], [], {"loss": 0.02, "N": 0.5}, {"loss": 0.01, "N": 0.25})
    assert design.narrowed("loss", 2.0, (1.0, 4.0)) == pytest.approx((2**0.5, 8**0.5))
    assert design.narrowed("N", 2.0, (2.0, 32.0)) == pytest.approx((2.0, 8.0))


def repeated() -> RepetitionLaw:
    N, D, loss = runs(np.random.default_rng(0))
    return RepetitionLaw().fit(N, D, np.minimum(D, 8e9), loss)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda law: Buyer(question(law), pool(np.random.default_rng(8), 3)).buy(1e10), "the cost of the cheapest run"),
        (lambda law: question(law, correlation=1.0), "correlation is 1.0"),
        (lambda law: question(law, trunk=["a", "b"]), "trunk has 2 labels and the law 20 rows"),
        (lambda law: Question.of(law, -1.0), "target_flops is -1"),
        (lambda law: Question.of(ChinchillaLaw(), TARGET), "is not fitted"),
        (lambda law: Question.of(repeated(), TARGET), "no optimum of N and D"),
    ],
)
def test_bad_questions_are_refused(law: ChinchillaLaw, ask: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask(law)


def repeated_loss(N: Any, D: Any, U: Any) -> Any:
    return RepetitionLaw.evaluate(TRUTH | {"R_D": 8.0, "R_N": 5.0}, N, D, U)


def test_a_design_beats_random_runs_for_another_law() -> None:
    axes = (SIZES, np.geomspace(1e9, 2e11, 6), np.array([2e9, 1e10]))
    N, D, U = (grid.ravel() for grid in np.meshgrid(*axes, indexing="ij"))
    target = {"N": np.full(2, 1e10), "D": np.full(2, 5e11), "U": np.array([2e9, 1e11])}
    generator = np.random.default_rng(4)
    loss = repeated_loss(N, D, U) * np.exp(0.004 * generator.normal(size=len(N)))
    C = 6 * N * D
    start = generator.choice(np.argsort(C)[:25], 14, replace=False)
    columns = {"N": N, "D": D, "U": U}

    def make_question(rows: Any) -> Question:
        fitted = RepetitionLaw().fit(*(column[rows] for column in columns.values()), loss[rows])
        return Question.of(fitted, 6e21, correlation=0.0, points=target)

    rest, budget = np.setdiff1d(np.arange(len(N)), start), 0.05 * C.sum()
    offer = Candidates({k: v[rest] for k, v in columns.items()}, C[rest], C[rest], C[rest], rest)
    buyer = Buyer(make_question(start), offer)
    bought = buyer.buy(budget)
    spread = buyer.value(buyer.with_beliefs(bought.chosen), bought.chosen)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rest))
        some = [int(i) for i in order[np.cumsum(offer.flops[order]) <= budget]]
        assert spread < buyer.value(buyer.with_beliefs(some), some)
    forecast = make_question(np.concatenate([start, rest[bought.chosen]])).forecast()
    expected = repeated_loss(**target)
    assert (forecast["low"] < expected).all()
    assert (expected < forecast["high"]).all()
