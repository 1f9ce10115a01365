"""The solver finds the optimum that independent optimizers find, never a worse one, and claims only what it reached."""

import os

import numpy as np
import pytest
from isoflop.fit import ChinchillaLaw, InputError, KaplanLaw, PowerLaw
from isoflop.fit.solver import solver
from isoflop.fit.solver.forms import LogSumTerms
from isoflop.fit.solver.solver import solve, variable_projection
from scipy.optimize import least_squares, minimize
from scipy.special import logsumexp

from tests.fit.test_law import points


def problem(seed, **options):
    """Return a Chinchilla law's problem over known runs, and its 64 starts."""
    law = ChinchillaLaw().fit(*points(seed, **options))
    return law.problem_, law.problem_.starts(np.ones((1, len(law.weight_))), None)


def minimise(form, target, weight, starts, lower, upper, delta):
    """Minimise from each start (P, k) separately, as P problems with the same weight (n,)."""
    return solve(form, target, np.tile(weight, (len(starts), 1)), starts[:, None], lower, upper, delta)


def huber(residual, delta):
    """Return Huber's rho, its slope psi, and whether each residual is in the quadratic part."""
    slope = np.clip(residual, -delta, delta)
    return slope * (residual - 0.5 * slope), slope, np.abs(residual) <= delta


def resamples(seed, problems, n=60):
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=problems).astype(float)


@pytest.mark.parametrize("delta", [1e-3, np.inf])
def test_no_start_of_an_independent_optimizer_finds_a_lower_objective(delta):
    for seed in range(2):
        N, D, loss = points(seed)
        law = ChinchillaLaw(delta=delta).fit(N, D, loss)
        assert law.converged_

        x, y, ones, target = np.log(N), np.log(D), np.ones(len(N)), np.log(loss)

        def objective(t, x=x, y=y, ones=ones, target=target):
            u = np.stack([t[0] - t[1] * x, t[2] - t[3] * y, t[4] * ones])
            f = logsumexp(u, axis=0)
            p = np.exp(u - f)
            rho, slope, _ = huber(f - target, delta)
            gradient = [p[0] @ slope, -(p[0] * x) @ slope, p[1] @ slope, -(p[1] * y) @ slope, p[2] @ slope]
            return 1e3 * rho.sum(), 1e3 * np.array(gradient)

        rng = np.random.default_rng(seed)
        objectives = []
        for _ in range(10):
            start = rng.uniform([0, 0.1, 0, 0.1, -0.5], [15, 0.8, 15, 0.8, 1.0])
            options = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-10}
            objectives.append(minimize(objective, start, jac=True, method="L-BFGS-B", options=options).fun / 1e3)
        assert law.objective_ <= min(objectives) * (1 + 1e-9)


def test_converged_means_a_minimum_inside_the_box():
    """Check that the gradient vanishes, and that the objective falls in none of 20 random directions."""
    p, starts = problem(5)
    weights = resamples(0, 8)
    solution = solve(p.form, p.target, weights, starts, p.lower, p.upper, 1e-3)
    assert solution.converged.all()
    f, cache = p.form.value(solution.theta)
    first = np.stack([p.form.along(cache, np.tile(unit, (8, 1))) for unit in np.eye(5)], axis=2)
    terms = (weights * huber(f - p.target, 1e-3)[1])[:, :, None] * first
    assert (np.abs(terms.sum(axis=1)) <= 2e-9 * np.abs(terms).sum(axis=1)).all()
    for direction in np.random.default_rng(0).normal(size=(20, 5)):
        near = huber(p.form.value(solution.theta + 1e-4 * direction)[0] - p.target, 1e-3)[0]
        assert ((weights * near).sum(axis=1) >= solution.objective).all()


def test_a_saddle_is_not_an_optimum(monkeypatch):
    """The form x^2 - y^2 has, fitted to -1, a zero gradient at the origin and negative curvature there."""
    form, box = (
        LogSumTerms(lambda v: [v["x"] ** 2 - v["y"] ** 2], {"x": 0, "y": 1}, 1),
        (np.full(2, -10.0), np.full(2, 10.0)),
    )
    moved = minimise(form, np.array([-1.0]), np.ones(1), np.array([[0.5, 0.3]]), *box, np.inf)
    assert moved.converged[0]
    assert moved.objective[0] < 1e-20
    monkeypatch.setattr(solver, "ITERATIONS", 5)
    stuck = minimise(form, np.array([-1.0]), np.ones(1), np.zeros((1, 2)), *box, np.inf)
    assert not stuck.converged[0]


def parabola():
    """Return the form (x, x^2) of two log predictions; for a target above the vertex two points may be nearest."""
    here, square = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    return LogSumTerms(lambda v: [v["x"] * here + v["x"] ** 2 * square], {"x": 0}, 2)


ABOVE, LEFT = np.array([0.0, 2.0]), np.array([-0.1, 2.0])  # targets above the vertex, and a little to the left of that
WIDE = (np.array([-5.0]), np.array([5.0]), np.inf)


def nearest(target, side):
    """Return the outer zero, on `side`, of the three of the distance's derivative x - a + 2 x (x^2 - b)."""
    return sorted(np.roots([2.0, 0.0, 1.0 - 2.0 * target[1], -target[0]]).real)[0 if side < 0 else -1]


def test_only_starts_that_end_in_the_best_valley_agree():
    form = parabola()
    starts = np.array([-1.9, -1.2, -1.0, 0.8, 0.9, 1.1, 1.3, 1.5])[None, :, None]
    solution = solve(form, LEFT, np.ones((2, 2)), starts, *WIDE)
    np.testing.assert_allclose(solution.theta, nearest(LEFT, -1), rtol=1e-9)
    assert solution.converged.all()
    assert solution.agreeing.tolist() == [3, 3]
    assert solution.tried.tolist() == [8, 8]
    other = solve(form, LEFT, np.ones((1, 2)), starts[:, 3:], *WIDE)
    np.testing.assert_allclose(other.theta[0, 0], nearest(LEFT, 1), rtol=1e-9)
    assert other.agreeing.tolist() == other.tried.tolist() == [5]
    equal = solve(form, ABOVE, np.ones((1, 2)), np.array([[[-1.4], [-0.8], [0.9], [1.2]]]), *WIDE)
    assert equal.agreeing.tolist() == [4]  # two valleys of one depth


def test_a_warm_start_in_another_valley_does_not_hide_the_better_one():
    form, weights = parabola(), np.ones((1, 2))
    for start, warm in ((-1.4, 1.2), (1.4, -1.2)):
        solution = solve(form, LEFT, weights, np.array([[[start]]]), *WIDE, warm=np.array([warm]))
        np.testing.assert_allclose(solution.theta[0, 0], nearest(LEFT, -1), rtol=1e-9)
        assert (solution.tried[0], solution.agreeing[0]) == (2, 1)


def test_a_problem_without_an_optimum_is_said_not_to_have_converged():
    """exp(-theta) approaches a target below it and never reaches it; and a prediction may be NaN."""
    everywhere, starts = (np.array([-np.inf]), np.array([np.inf])), np.array([[[0.0], [1.0], [2.0]]])
    for factor in (1.0, np.nan):
        form = LogSumTerms(lambda v, factor=factor: [factor * np.exp(-v["x"])], {"x": 0}, 1)
        solution = solve(form, np.array([-1.0]), np.ones((1, 1)), starts, *everywhere, np.inf)
        assert not solution.converged[0]
        assert solution.agreeing[0] == 0
        assert solution.tried[0] == 3


def test_a_start_without_a_prediction_is_left_and_the_others_go_on():
    lost = []

    def half(v):
        lost.append((v["a"].value > 5).sum())
        return [np.log(v["a"] + v["b"] * np.linspace(1, 2, 6)) + np.where(v["a"].value > 5, np.nan, 0.0)]

    form = LogSumTerms(half, {"a": 0, "b": 1}, 6)

    target = np.log(1.5 + 0.7 * np.linspace(1, 2, 6))
    starts = np.array([[[9.0, 1.0], [1.0, 1.0], [2.0, 0.1], [7.0, 7.0]]])
    box = (np.array([0.1, 0.01]), np.array([10.0, 10.0]))
    solution = solve(form, target, np.ones((1, 6)), starts, *box, 1e-3)
    np.testing.assert_allclose(solution.theta[0], [1.5, 0.7], rtol=1e-8)  # exact data; conditioning 1e2
    assert solution.agreeing[0] == 2
    separate = minimise(form, target, np.ones(6), starts[0], *box, 1e-3)
    assert separate.converged.tolist() == [False, True, True, False]
    lost.clear()
    minimise(form, target, np.ones(6), starts[0, [0, 3]], *box, 1e-3)
    assert len(lost) <= 9  # one step each, and the calls of checks and derivatives


def test_equal_bounds_fix_a_parameter_and_bounds_are_reported():
    p, starts = problem(6)
    lower, upper = p.lower.copy(), p.upper.copy()
    at = {name: i for i, name in enumerate(p.coordinates)}
    lower[at["E"]] = upper[at["E"]] = np.log(1.7)
    upper[at["alpha"]] = 0.2  # its optimum is larger
    solution = solve(p.form, p.target, np.ones((1, 60)), starts, lower, upper, 1e-3)
    assert solution.converged[0]
    assert solution.theta[0, at["E"]] == np.log(1.7)
    assert solution.theta[0, at["alpha"]] == 0.2
    assert [p.coordinates[i] for i in np.flatnonzero(solution.at_bound[0])] == ["alpha"]


@pytest.mark.parametrize("delta", [1e-6, np.inf])
def test_merged_starts_find_what_each_start_finds(delta):
    p, starts = problem(7)
    weights = resamples(2, 6)
    solution = solve(p.form, p.target, weights, starts, p.lower, p.upper, delta)
    assert solution.converged.all()
    for i, weight in enumerate(weights):
        separate = minimise(p.form, p.target, weight, starts[0], p.lower, p.upper, delta)
        best = separate.objective[separate.converged].min()
        np.testing.assert_allclose(solution.objective[i], best, rtol=1e-10)
        assert solution.agreeing[i] == (separate.converged & (separate.objective <= best * (1 + 1e-7))).sum()


def test_two_starts_and_a_warm_one_find_what_every_start_finds():
    """Compare the starts of a bootstrap with the exhaustive search."""
    p, starts = problem(8)
    weights = resamples(3, 60)
    whole = solve(p.form, p.target, np.ones((1, 60)), starts, p.lower, p.upper, 1e-3)
    arguments = (p.lower, p.upper, 1e-3)
    quick = solve(p.form, p.target, weights, p.starts(weights, 2), *arguments, warm=whole.theta[0])
    slow = solve(p.form, p.target, weights, starts, *arguments)
    assert quick.converged.all()
    assert quick.tried.tolist() == [3] * 60
    assert (quick.objective <= slow.objective * (1 + 1e-9)).all()


def test_the_number_of_threads_does_not_change_a_bit(monkeypatch):
    monkeypatch.setattr(solver, "CHUNK", 3000)  # several chunks of few problems
    p, _ = problem(9)
    weights = resamples(4, 60)
    starts = p.starts(weights, 2)
    results = [solve(p.form, p.target, weights, starts, p.lower, p.upper, 1e-3, threads=t) for t in (1, 2, 5)]
    for other in results[1:]:
        for name in ("theta", "objective", "converged", "at_bound", "tried", "agreeing"):
            np.testing.assert_array_equal(getattr(results[0], name), getattr(other, name))


def test_threads_are_the_cores_of_this_process_unless_omp_asks_for_fewer(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    available = solver.cores()
    assert 1 <= available <= os.cpu_count()
    for setting, expected in (("1", 1), ("1,2", 1), (str(available + 3), available), ("0", 1), ("many", available)):
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
        assert solver.cores() == expected


def test_variable_projection_is_weighted_least_squares_at_every_setting():
    rng = np.random.default_rng(0)
    basis, target, weights = rng.normal(size=(4, 15, 3)), rng.normal(size=15), rng.uniform(0.1, 2, size=(2, 15))
    amplitudes, error = variable_projection(basis, target, weights)
    for p in range(2):
        for g in range(4):
            root = np.sqrt(weights[p])
            c, rest, *_ = np.linalg.lstsq(basis[g] * root[:, None], target * root, rcond=None)
            np.testing.assert_allclose(amplitudes[p, g], c, rtol=1e-6)  # normal equations, ridge 1e-10
            np.testing.assert_allclose(error[p, g], rest[0], rtol=1e-6)


def test_a_power_law_matches_polyfit_and_with_an_offset_matches_scipy():
    rng = np.random.default_rng(3)
    C = np.geomspace(1e17, 1e21, 9)
    y = 0.1 * C**0.5 * np.exp(0.05 * rng.standard_normal(9))
    law = PowerLaw().fit(C, y)
    p, k = np.polyfit(np.log(C), np.log(y), 1)
    np.testing.assert_allclose([law.p_, np.log(law.k_)], [p, k], rtol=1e-10)

    loss = (1.7 + 1e3 * C**-0.16) * np.exp(1e-3 * rng.standard_normal(9))
    law = PowerLaw(offset=True).fit(C, loss)
    u = np.log(C / 1e19)
    peer = least_squares(
        lambda t: np.log(t[0] + np.exp(t[1] - t[2] * u)) - np.log(loss),
        [1.6, -0.5, 0.2],
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    ).x
    np.testing.assert_allclose([law.E_, -law.p_], peer[[0, 2]], rtol=1e-5)
    assert law.converged_
    assert law.starts_["agreeing"] == law.starts_["tried"]


def test_power_laws_refuse_what_they_cannot_fit():
    with pytest.raises(InputError, match="at least 2 different values of x"):
        PowerLaw().fit([1e18, 1e18], [1.0, 2.0])
    with pytest.raises(InputError, match="at least 4 different values of x"):
        PowerLaw(offset=True).fit([1e17, 1e18, 1e19], [3.0, 2.5, 2.2])
    with pytest.raises(InputError, match="y is nan in row 1"):
        PowerLaw().fit([1e17, 1e18], [3.0, np.nan])
    with pytest.raises(InputError, match="no residuals"):
        PowerLaw().fit([1e17, 1e18], [3.0, 2.0]).bootstrap(10)


# 14 runs whose optimum lies at the end of a bent and narrow valley, or has no E: loss, where SciPy's polished
# multi-start ends (L-BFGS-B from 12 starts of the grid, then simplex, under the same bounds), and constants at a bound.
BENT = [5.832, 5.455, 4.915, 5.046, 4.72, 4.366, 4.27, 4.063, 4.034, 3.901, 3.584, 3.394, 3.556, 3.424]
WITHOUT_E = [5.945, 5.552, 5.328, 4.981, 4.764, 4.61, 4.418, 4.219, 4.18, 3.905, 3.684, 3.531, 3.748, 3.464]
VALLEYS = [(BENT, 0.00017076030463400533, []), (WITHOUT_E, 7.300259343858899e-05, ["E"])]


@pytest.mark.parametrize(("loss", "best", "degenerate"), VALLEYS)
def test_the_end_of_a_bent_valley_is_found(loss, best, degenerate):
    N = [1e7] * 8 + [8e7] * 4 + [1.6e8] * 2
    D = [5e7 * 2**i for i in range(8)] + [4e8 * 2**i for i in range(4)] + [8e8, 16e8]
    law = ChinchillaLaw().fit(N, D, loss)
    assert law.converged_
    assert law.starts_["agreeing"] == 64
    assert law.degenerate_ == degenerate
    assert law.objective_ <= best * (1 + 1e-9)


def test_a_deeper_valley_than_that_of_a_large_delta_is_found():
    """All 32 starts that come from a large delta agree on 1.770656e-4."""
    N = [102, 14471, 399, 4100, 1582, 8980, 15193, 16932, 1952, 24454, 18094, 4774, 7672, 277, 14169, 29915]
    D = [33941, 211, 1194, 37190, 180, 736, 7334, 5537, 625, 10067, 105, 23805, 4162, 113, 6599, 1270]
    loss = [6.483, 5.619, 5.426, 3.511, 5.938, 4.526, 3.164, 3.32]
    loss += [5.007, 2.879, 6.436, 3.503, 3.599, 6.982, 3.241, 4.201]
    law = KaplanLaw().fit(1e5 * np.array(N), 1e6 * np.array(D), loss)
    assert law.objective_ <= 0.00017705141754882886 * (1 + 1e-9)
    assert 0 < law.starts_["agreeing"] < law.starts_["tried"] == 64
