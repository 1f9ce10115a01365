"""Intervals that hold their level: simulations of known laws, closed forms, and independent implementations."""

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.allocation.allocation import optimum

NOISE = 0.003
LAWS = 200


def designed(rng):
    """Return an isoFLOP grid: 4 budgets over 2 decades, 6 sizes each over a factor of 16."""
    C = np.repeat(6e18 * 10 ** np.linspace(0, 2, 4), 6)
    N = np.sqrt(C / 120) * np.tile(np.geomspace(1 / 4, 4, 6), 4)
    return N, C / 6 / N


def scattered(rng, runs=60):
    return 10 ** rng.uniform(7.5, 10.5, runs), 10 ** rng.uniform(9, 12, runs)


def random_truth(rng, N, D):
    """Return a law whose terms are 0.3 to 1.5 in the middle of the runs, as in real sweeps."""
    truth = {"E": rng.uniform(1, 2.5), "alpha": rng.uniform(0.25, 0.5), "beta": rng.uniform(0.25, 0.5)}
    truth["A"] = rng.uniform(0.3, 1.5) * np.exp(np.log(N).mean() * truth["alpha"])
    truth["B"] = rng.uniform(0.3, 1.5) * np.exp(np.log(D).mean() * truth["beta"])
    return truth


def holds(interval, value):
    return interval[0] <= value <= interval[1]


@pytest.fixture(scope="module")
def known_laws():
    """Fit 200 random laws, half on grids of 24 runs, half on 60 scattered runs; return what 95 % intervals cover."""
    rng = np.random.default_rng(0)
    results = {"interval": [], "run": [], "mean": [], "scale": []}
    for trial in range(LAWS):
        N, D = designed(rng) if trial % 2 else scattered(rng)
        truth = random_truth(rng, N, D)
        clean = fit.ChinchillaLaw.evaluate(truth, N, D)
        law = fit.ChinchillaLaw().fit(N, D, clean * np.exp(NOISE * rng.standard_normal(len(N))))
        law.bootstrap(250, seed=trial)
        edge = float((6 * N * D).max())
        best, at = law.optimal([edge, 100 * edge]), optimum(np.array([edge, 100 * edge]), truth)
        covered = {name: holds(law.interval(name), value) for name, value in truth.items()}
        covered["a"] = holds(law.interval("a"), truth["beta"] / (truth["alpha"] + truth["beta"]))
        for target, where in enumerate(("at the edge", "100x beyond")):
            exact = dict(zip(("N", "D", "loss"), (float(v[target]) for v in at), strict=True))
            exact["ratio"] = exact["D"] / exact["N"]
            covered |= {f"{name} {where}": holds(best.interval(name)[target], v) for name, v in exact.items()}
        results["interval"].append(covered)
        new_losses = clean * np.exp(NOISE * rng.standard_normal(len(N)))
        for kind, value in (("run", new_losses), ("mean", clean)):
            low, high = law.predict_interval(N, D, kind=kind).T
            results[kind].append(np.mean((low <= value) & (value <= high)))
        results["scale"].append(law.residual_scale_)
    return results


# Coverage.


@pytest.mark.slow
def test_constants_of_200_known_laws_are_covered_at_their_rate(known_laws):
    """Check also the exponent of N*, and N*, D*, D/N and the loss at the largest budget and at 100 times it."""
    rates = {name: np.mean([covered[name] for covered in known_laws["interval"]]) for name in known_laws["interval"][0]}
    assert 0.93 <= np.mean(list(rates.values())) <= 0.97, rates
    # One quantity over 200 laws: 95 % +- 1.5 % is one standard deviation of the simulation.
    assert min(rates.values()) >= 0.905, rates
    assert max(rates.values()) <= 0.99, rates


@pytest.mark.slow
def test_predictions_of_200_known_laws_are_covered_at_their_rate(known_laws):
    assert 0.93 <= np.mean(known_laws["run"]) <= 0.97
    # The points of one law move together: 1 % is one standard deviation of the simulation.
    assert 0.92 <= np.mean(known_laws["mean"]) <= 0.98
    # Squared, which the degrees of freedom make unbiased; an L1 fit leaves a little more than squares do.
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(known_laws["scale"]))), NOISE, rtol=0.06)


@pytest.mark.slow
def test_only_clustered_intervals_cover_checkpoints_of_runs():
    rng = np.random.default_rng(1)
    held, landed = {"clustered": [], "naive": []}, []
    run = np.repeat(np.arange(24), 5)
    for trial in range(80):
        N, D = scattered(rng, 24)
        N, D = N[run], D[run] * np.tile(np.geomspace(0.2, 1, 5), 24)
        truth = random_truth(rng, N, D)
        noise = NOISE * rng.standard_normal(24)[run] + NOISE / 6 * rng.standard_normal(120)
        law = fit.ChinchillaLaw("squares").fit(N, D, fit.ChinchillaLaw.evaluate(truth, N, D) * np.exp(noise))
        for key, groups in (("clustered", run), ("naive", None)):
            law.bootstrap(200, groups=groups, seed=trial)
            held[key].append([holds(law.interval(name), value) for name, value in truth.items()])
            if key == "clustered":
                again = NOISE * rng.standard_normal(24)[run] + NOISE / 6 * rng.standard_normal(120)
                low, high = law.predict_interval(N, D, kind="run").T
                again = fit.ChinchillaLaw.evaluate(truth, N, D) * np.exp(again)
                landed.append(np.mean((low <= again) & (again <= high)))
    assert 0.91 <= np.mean(held["clustered"]) <= 0.99  # five constants that move together: 2 % is about one deviation
    assert np.mean(held["naive"]) < 0.75
    assert 0.93 <= np.mean(landed) <= 0.97  # new runs


# Exact references.


def straight_line(seed=0, runs=14):
    rng = np.random.default_rng(seed)
    x = np.geomspace(1e18, 1e21, runs)
    return x, 3 * x**0.5 * np.exp(0.05 * rng.standard_normal(runs))


def hat(x):
    X = np.stack([np.ones_like(x), np.log(x) - np.log(x).mean()], axis=1)
    return X, X @ np.linalg.solve(X.T @ X, X.T)


def test_residuals_of_fits_that_leave_runs_out_are_the_closed_form():
    """A straight line has r_i / (1 - h_i), and (I - H_gg)^-1 r_g for a group g."""
    x, y = straight_line()
    law = fit.PowerLaw().fit(x, y)
    _, H = hat(x)
    of_runs = law.left_out_residuals(np.arange(14).astype(str))
    np.testing.assert_allclose(of_runs, law.residuals() / (1 - np.diag(H)), rtol=1e-8)
    groups = np.arange(14) // 2
    block = np.eye(14) - H * (groups[:, None] == groups[None, :])
    of_groups = law.left_out_residuals(groups.astype(str))
    np.testing.assert_allclose(of_groups, np.linalg.solve(block, law.residuals()), rtol=1e-8)


def test_the_wild_bootstrap_has_the_jackknifes_variance():
    """A straight line's exact variance is that of HC3 times (1 - 1/n), times that of Student's t."""
    x, y = straight_line(1)
    law = fit.PowerLaw().fit(x, y).bootstrap(40_000, method="wild")
    X, H = hat(x)
    bread = np.linalg.inv(X.T @ X)
    meat = X.T @ np.diag((law.residuals() / (1 - np.diag(H))) ** 2) @ X
    expected = (bread @ meat @ bread)[1, 1] * (1 - 1 / 14) * 12 / (12 - 2)
    np.testing.assert_allclose(law.draws_["p"].var(), expected, rtol=0.03)  # 40,000 draws: 1 % is one deviation
    np.testing.assert_allclose(law.draws_["p"].mean(), law.p_, atol=5 * np.sqrt(expected / 40_000))


# What is and is not determined.


def test_one_run_that_alone_determines_a_constant_is_named():
    rng = np.random.default_rng(0)
    N, D = 10 ** rng.uniform(7, 10, 12), np.r_[1e9, np.full(11, 1e10)]
    law = fit.ChinchillaLaw(E=1.8).fit(N, D, 1.8 + 400 / N**0.35 + 2000 / D**0.37 + 1e-3 * rng.standard_normal(12))
    with pytest.raises(fit.InputError, match="without run first the other 11 independent runs do not determine"):
        law.bootstrap(50, groups=["first", *map(str, range(11))])


def test_rows_that_do_not_count_change_nothing():
    rng = np.random.default_rng(5)
    N, D = designed(rng)
    loss = fit.ChinchillaLaw.evaluate(random_truth(rng, N, D), N, D) * np.exp(NOISE * rng.standard_normal(24))
    weight = np.ones(24)
    weight[20:] = 0.0
    some = fit.ChinchillaLaw("squares").fit(N, D, loss, weight=weight).bootstrap(20)
    alone = fit.ChinchillaLaw("squares").fit(N[:20], D[:20], loss[:20])
    np.testing.assert_allclose(some.residual_scale_, alone.residual_scale_, rtol=1e-8)
    np.testing.assert_allclose(list(some.constants_.values()), list(alone.constants_.values()), rtol=1e-5)


def test_few_runs_keep_every_run_and_many_are_drawn_with_replacement():
    rng = np.random.default_rng(6)
    for runs, method in ((99, "wild"), (100, "pairs")):
        N, D = scattered(rng, runs)
        loss = fit.ChinchillaLaw.evaluate(random_truth(rng, N, D), N, D) * np.exp(NOISE * rng.standard_normal(runs))
        law = fit.ChinchillaLaw().fit(N, D, loss).bootstrap(20)
        assert law.bootstrap_["method"] == method
        assert law.bootstrap(20, groups=np.arange(runs) // 2).bootstrap_["method"] == "wild"


def test_a_prediction_of_a_run_is_wider_than_that_of_the_law():
    rng = np.random.default_rng(7)
    N, D = designed(rng)
    loss = fit.ChinchillaLaw.evaluate(random_truth(rng, N, D), N, D) * np.exp(NOISE * rng.standard_normal(24))
    law = fit.ChinchillaLaw().fit(N, D, loss).bootstrap(500)
    mean, run = (law.predict_interval(N, D, kind=kind) for kind in ("mean", "run"))
    assert mean.shape == run.shape == (24, 2)
    assert (np.ptp(run, axis=1) > np.ptp(mean, axis=1)).all()
    assert (np.ptp(law.predict_interval(N, D, level=0.5, kind="run"), axis=1) < np.ptp(run, axis=1)).all()
    low, high = law.predict_interval(N=1e9, D=1e11)
    assert low < law.predict(N=1e9, D=1e11) < high
    assert (law.predict_interval(N, D, kind="run") == run).all()  # the same draws give the same interval
    with pytest.raises(fit.InputError, match="kind is 'seed'; choose mean"):
        law.predict_interval(N, D, kind="seed")
    with pytest.raises(fit.InputError, match="method is 'sideways'"):
        law.bootstrap(20, method="sideways")
