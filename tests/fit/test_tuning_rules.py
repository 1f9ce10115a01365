"""The rules of a tune and the check of corners: known rules come back from simulated tunes, within their intervals."""

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.checks.doctor import untuned
from isoflop.fit.hyperparameters.tuning import SETTINGS, excess_with_error, tuning_rules
from scipy.stats import qmc

TRUE = {"learning_rate": (0.02, 0.0, -0.12), "batch": (0.6, 0.0, 0.55), "timescale": (4.5, 0.45, -0.45)}
SHAPE = {"200": 0.012, "020": 0.010, "002": 0.006, "110": -0.008, "101": 0.003, "011": -0.002, "300": 0.003}
SLOPE = 0.008 / 0.024  # of the best rate along the batch
MIDDLE, SPAN, SIZES, RATIOS = (6e-3, 1024.0, 0.5), (8.0, 8.0, 10.0), (6400.0, 16000.0, 40000.0), (10, 40, 160)


def best(target, N, D):
    k, p_N, p_D = TRUE[target]
    return k * N**p_N * D**p_D


def cost(N, D, *settings):
    """Return log of loss over best loss."""
    u = [np.log(value / best(target, N, D)) for target, value in zip(SETTINGS, settings, strict=True)]
    return sum(c * np.prod([x ** int(p) for x, p in zip(u, name, strict=True)], axis=0) for name, c in SHAPE.items())


def simulated(seed, noise=0.003, first=32, ratios=RATIOS):
    """Return a tune as in sweeps/grid/tune.py: rungs of half the runs, in half the volume, around the best quarter."""
    rng, rows = np.random.default_rng(seed), []
    for N in SIZES:
        middle, half = np.log(MIDDLE), np.log(SPAN)
        for rung, D in enumerate(N * np.array(ratios, dtype=float)):
            points = qmc.Sobol(3, seed=int(1000 * seed + N + rung)).random(first >> rung)
            settings = np.exp(middle + (2 * points - 1) * half)
            settings[:, 1] = 128 * np.maximum(1, np.round(settings[:, 1] / 128))
            loss = (1.2 + 40 / N**0.5 + 300 / D**0.45) * np.exp(cost(N, D, *settings.T))
            loss *= np.exp(noise * rng.standard_normal(len(loss)))
            rows += [(N, D, *setting, y) for setting, y in zip(settings, loss, strict=True)]
            middle = np.log(settings[np.argsort(loss)[: len(loss) // 4]]).mean(axis=0)
            half = half * 0.5 ** (1 / 3)
    return dict(zip(("N", "D", *SETTINGS, "loss"), np.array(rows).T, strict=True))


def expected_rules():
    rate, batch, timescale = ({"k": k, "N": p_N, "D": p_D} for k, p_N, p_D in TRUE.values())
    rate = {"k": rate["k"] * batch["k"] ** -SLOPE, "N": 0.0, "D": rate["D"] - SLOPE * batch["D"], "batch": SLOPE}
    return {"batch_tokens": batch, "learning_rate": rate, "timescale": timescale}


def value(rule, N, D, batch=1.0):
    return rule["k"] * N ** rule["N"] * D ** rule["D"] * batch ** rule.get("batch", 0.0)


def excesses(rules):
    """Yield the log loss of the rules' settings over the best, for all sizes and D and 10 times beyond the largest."""
    for N, D in [(N, N * ratio) for N in SIZES for ratio in RATIOS] + [(4e4, 6.4e7)]:
        batch = value(rules["batch_tokens"], N, D)
        rate, timescale = value(rules["learning_rate"], N, D, batch), value(rules["timescale"], N, D)
        yield float(cost(N, D, rate, batch, timescale))


def test_known_rules_come_back_and_their_settings_cost_nearly_nothing():
    result = tuning_rules(simulated(1), draws=100)
    for rule, law in expected_rules().items():
        for name, true in law.items():
            low, high = result["intervals"][rule][name]
            assert low - (high - low) < true < high + (high - low), (rule, name)
    assert max(excesses(result["tuning"])) < 0.005
    assert result["prior"] == {}
    assert 0.0 < result["noise"] < 0.004
    assert result["range"] == {"N": [6400.0, 40000.0], "D": [64000.0, 6.4e6]}


# Optima, shape, slope of the best rate along the batch, noise; the last was not looked at while the fit was made.
WORLDS = [
    (TRUE, SHAPE, SLOPE, 0.003),
    (
        {"learning_rate": (0.006, 0.05, -0.02), "batch": (0.2, -0.1, 0.6), "timescale": (0.05, 0.3, -0.1)},
        {"200": 0.018, "020": 0.006, "002": 0.004, "110": -0.006, "300": 0.004, "030": 0.002},
        0.006 / 0.036,
        0.005,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_of_the_rules_cover_at_their_rate(world, monkeypatch):
    for name, value_ in zip(("TRUE", "SHAPE", "SLOPE"), world[:3], strict=True):
        monkeypatch.setitem(globals(), name, value_)
    inside, cost_of = [], []
    for seed in range(40):
        result = tuning_rules(simulated(seed, noise=world[3]), draws=200, seed=seed)
        intervals, truth = result["intervals"], expected_rules()
        ends = [(*intervals[rule][name], true) for rule, law in truth.items() for name, true in law.items()]
        inside.append([low <= true <= high for low, high, true in ends])
        cost_of.append(max(excesses(result["tuning"])))
    assert 0.9 <= np.mean(inside) <= 0.99  # measured: 92 to 97 %, because the form's error is not noise
    assert np.mean(inside, axis=0).min() >= 0.7
    assert np.quantile(cost_of, 0.5) < 0.003
    assert np.quantile(cost_of, 0.95) < 0.01


def test_what_the_runs_do_not_tell_stays_at_published_values_and_is_said():
    runs = simulated(2, ratios=(40,))  # N and D rise together
    result = tuning_rules(runs, draws=50)
    assert "batch_N" in result["prior"]
    assert result["prior"]["batch_N"].startswith("0 ± 0.15 (Power Lines")
    assert abs(result["tuning"]["batch_tokens"]["N"]) < 0.15
    noisy = tuning_rules(simulated(3, noise=0.03, first=24), draws=50)
    assert "noisy_runs" in {warning["code"] for warning in noisy["warnings"]}
    with pytest.raises(fit.InputError, match=r"6 runs lie within 8%.* the rules need more than 16"):
        tuning_rules({name: column[:8] for name, column in simulated(0).items()})


def test_an_optimum_below_one_sequence_is_found_from_one_side_and_said():
    columns = simulated(5)
    large_batches = columns["batch"] >= 2000  # no run of a small D has its best batch
    result = tuning_rules({name: column[large_batches] for name, column in columns.items()}, draws=50)
    assert "optimum_at_edge" in {warning["code"] for warning in result["warnings"]}
    assert value(result["tuning"]["batch_tokens"], 6400.0, 64000.0) < 1000


# The check of corners.


def corner_losses(u, v, noise, rng, curve=0.012):
    """Return losses at corners whose settings are u and v (log) off the best: two seeds, and steps of a factor of 2."""
    step = np.log(2)

    def loss(du, dv):
        return 2.0 * np.exp(curve * ((u + du) ** 2 + (v + dv) ** 2) + noise * rng.standard_normal(len(u)))

    sides = [[loss(-step, 0), loss(step, 0)], [loss(0, -step), loss(0, step)]]
    return np.stack([loss(0, 0), loss(0, 0)], 1), np.array(sides).transpose(2, 0, 1)


def test_the_excess_of_a_corner_is_that_over_the_parabolas_minimum():
    rng, u, v = np.random.default_rng(0), np.array([0.0, 0.5, -0.6]), np.array([0.0, 0.0, 0.4])
    excess, error = excess_with_error(*corner_losses(u, v, 0.0, rng))
    np.testing.assert_allclose(excess, np.expm1(0.012 * (u**2 + v**2)), atol=1e-12)
    assert (error < 1e-12).all()
    centre, sides = corner_losses(np.array([3.0, 3.0]), np.zeros(2), 0.0, rng)
    sides[:, 1, 0] = np.nan  # a batch of one sequence has no half
    beyond = excess_with_error(centre, sides)[0]
    np.testing.assert_allclose(beyond, centre[:, 0] / sides[:, 0, 0] - 1)  # a lower bound


def tilted(u, noise, seed):
    excess, error = excess_with_error(*corner_losses(np.array(u), np.zeros(4), noise, np.random.default_rng(seed)))
    corners = {"N": [1e4, 1e4, 1e5, 1e5], "D": [1e5, 1e6, 1e6, 1e7], "loss": [3.0, 2.5, 2.2, 2.0]}
    frame = pd.DataFrame(corners | {"excess": excess, "excess_se": error})
    return list(untuned(fit.read_table(frame)))


def test_an_uneven_excess_is_warned_of_and_an_even_one_seldom():
    (warning,) = tilted([1.5, 0.3, 0.0, 0.0], 0.002, 0)
    assert warning.code == "untuned_tilt"
    assert "Losses lie above those of the best learning rate and batch by 0.0% ± 0." in warning.message
    assert sum(bool(tilted([1.5, 0.3, 0.0, 0.0], 0.002, seed)) for seed in range(40)) >= 36
    assert sum(bool(tilted([0.4] * 4, 0.002, seed)) for seed in range(40)) <= 5
    plain = pd.DataFrame({"N": [1e4, 1e5], "D": [1e5, 1e6], "loss": [3.0, 2.5]})
    assert not list(untuned(fit.read_table(plain)))
