"""A variant compared with its base: the compute multiplier, and an interval that contains it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from isoflop import fit
from isoflop.fit.approaches.compare import _Rows, both_laws, log_multiplier
from isoflop.fit.report.report import write_report
from simulated_ladders import DESIGNS, FORMS, Case, covered, simulate

DESIGN = (4, 3, 2, 0.004)
# E, A, alpha, B, beta, gamma, m, trend, w, gap.
COORDINATES = np.array([0.1, -1.2, -0.9, -1.0, -0.8, 0.2, 0.15, 0.04, -0.1, 0.03])


def pair(seed: int = 0, design: tuple[int, int, int, float] = DESIGN, k: float = 1.2, trend: float = 0.0, **more: bool):
    case = Case("chinchilla", design, (k, trend, "both"), **more)
    return simulate(case, np.random.default_rng(seed))


def changed(runs: fit.RunTable, **columns: object) -> fit.RunTable:
    return fit.read_table(runs.frame.assign(**columns))


@pytest.mark.parametrize("gap", [0.0, 0.03])
def test_the_multiplier_is_that_of_a_numeric_search(gap: float) -> None:
    """Search each side's best loss over all F and D of a budget, and the variant's budget that reaches the base's."""
    q, c = COORDINATES.copy(), 0.7
    q[-1] = gap

    def best(budget: float, side: float) -> float:
        x = np.linspace(-4, 4, 4001)  # the minimum is flat, so a step of 2e-3 is enough
        rows = _Rows.__new__(_Rows)
        rows.x, rows.y, rows.of_base = x, budget - x, np.full(len(x), side)
        return float(both_laws(q, rows)[0].min())

    base_loss, low, high = best(c, 1.0), c - 5.0, c + 5.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if best(middle, 0.0) > base_loss else (low, middle)
    assert log_multiplier(q, c) == pytest.approx(c - low, abs=1e-6)
    if gap == 0.0:
        assert log_multiplier(q, c) == pytest.approx(q[6] + q[7] * c, abs=1e-12)


def test_a_floor_that_the_variant_never_reaches_gives_zero() -> None:
    q = COORDINATES.copy()
    q[-1] = -2.0
    assert log_multiplier(q, 5.0) == -math.inf


def test_without_noise_the_multiplier_and_its_trend_come_back() -> None:
    trend = 0.05
    base, variant = pair(design=(4, 3, 2, 1e-7), trend=trend)
    comparison = fit.compare(base, variant, [1e16])
    middle = comparison.multipliers[1]
    for multiplier in comparison.multipliers:
        assert multiplier.value == pytest.approx(1.2 * (multiplier.flops / middle.flops) ** trend, rel=1e-3)
    assert comparison.trend == pytest.approx(trend, abs=1e-3)
    assert [multiplier.extrapolated for multiplier in comparison.multipliers] == [False, False, False, True]
    back = fit.compare(variant, base).multipliers[1].value
    assert back == pytest.approx(1 / middle.value, rel=0.02)


def test_pairs_of_a_seed_narrow_the_interval() -> None:
    def width(shared: bool) -> float:
        intervals = [fit.compare(*pair(seed, seeds_shared=shared)).multipliers[1].ci for seed in range(8)]
        return float(np.mean([math.log(high / low) for low, high in intervals]))

    assert width(True) < 0.9 * width(False)


def test_seconds_have_a_multiplier_of_their_own() -> None:
    base, variant = pair(k=1.0)
    luck = np.random.default_rng(1)
    took = [t.flops / 1e9 * np.exp(0.01 * luck.standard_normal(len(t))) for t in (base, variant)]
    base, variant = changed(base, seconds=took[0], device="cpu"), changed(variant, seconds=1.25 * took[1], device="cpu")
    middle = fit.compare(base, variant).multipliers[1]
    assert middle.seconds is not None
    assert middle.seconds == pytest.approx(middle.value / 1.25, rel=0.02)
    assert middle.seconds_ci is not None
    assert middle.seconds_ci[0] < 0.8 < middle.seconds_ci[1]
    other = fit.compare(base, changed(variant, device="gpu"))
    assert other.multipliers[1].seconds is None
    assert "Seconds are not compared" in other.sentences[-1]


def test_another_tokenizer_is_compared_in_bits_per_byte() -> None:
    """The same models with tokens of 2 bytes on one side: loss per token doubles, D halves, FLOPs stay."""
    base, variant = pair(k=1.1)
    bits = [t.loss / math.log(2) for t in (base, variant)]
    base, same = changed(base, val_bpb=bits[0]), changed(variant, val_bpb=bits[1], flops=variant.flops)
    other = changed(variant, val_bpb=bits[1], loss=2 * variant.loss, D=variant.D / 2, flops=variant.flops)
    one, two = fit.compare(base, same), fit.compare(base, other)
    assert (one.unit, two.unit) == ("nats per token", "bits per byte")
    assert "bits per byte" in two.sentences[-1]
    assert two.multipliers[1].value == pytest.approx(one.multipliers[1].value, rel=1e-3)


def test_what_cannot_be_known_is_refused() -> None:
    base, variant = pair()
    with pytest.raises(fit.InputError, match="run 0-0 belongs to both a and b"):
        fit.compare(base, base, names=("a", "b"))
    with pytest.raises(fit.InputError, match="variant has runs of one N or one D"):
        fit.compare(base, variant.where(variant.N[0] == variant.N))
    scored = [fit.read_table(runs.frame.assign(held_out=text)) for runs, text in ((base, "a1"), (variant, "b2"))]
    with pytest.raises(fit.InputError, match="were scored on different held-out text"):
        fit.compare(*scored)
    for runs in (fit.read_table(variant.frame.drop(columns="seed")), variant.where(variant.column("seed") == 0)):
        comparison = fit.compare(base, runs)
        assert comparison.multipliers[1].ci is comparison.trend_ci is comparison.more_seeds is None
        assert "two seeds" in comparison.reason
        assert "No interval" in comparison.sentences[0]


def test_another_floor_is_found_and_said() -> None:
    base, variant = pair(design=(5, 4, 3, 0.001), k=1.0)
    lower = replace(variant, loss=variant.loss - 0.1)
    comparison = fit.compare(base, lower)
    assert comparison.E == "free"
    assert comparison.gap > 1.02
    assert fit.compare(base, variant).E == "shared"


def test_more_seeds_see_a_difference() -> None:
    """A difference of 2 % shows in most cases with the stated number of seeds."""
    design = (3, 3, 2, 0.002)
    seeds = fit.compare(*pair(design=design)).more_seeds
    assert seeds is not None
    assert 1 < seeds < 60
    larger_design = (*design[:2], 2 + seeds, design[3])
    intervals = [fit.compare(*pair(seed, design=larger_design, k=1.02)).multipliers[1].ci for seed in range(10)]
    assert sum(ci is not None and ci[0] > 1 for ci in intervals) >= 6


def timed(runs: fit.RunTable, name: str, speed: float, times: tuple[float, ...], device: str = "cpu") -> pd.DataFrame:
    """Add training seconds, and `times` in turn as seconds per token of the largest size; half for smaller sizes."""
    tokens = np.where(runs.N.max() == runs.N, np.resize(times, len(runs)), times[0] / 2)
    columns = {"device": "cpu", "decode_device": device, "seconds": runs.flops / speed, "decode_seconds": tokens}
    ids = [f"{name}{i}" for i in range(len(runs))]
    return runs.frame.assign(variant=name, run_id=ids, kv_bytes=64 * len(name), **columns)


def test_serving_is_weighed_against_training(tmp_path, quick_pictures: None) -> None:
    """A variant that takes T / 4 more seconds of training and saves 1 ms a token breaks even after T / 4 / 1 ms."""
    base, variant = pair(design=(4, 3, 2, 1e-7), k=0.8)
    frames = [timed(base, "base", 1e9, (3e-3, 2.9e-3, 3.1e-3)), timed(variant, "mqa", 1e9, (2e-3, 1.9e-3, 2.1e-3))]
    analysis = fit.analyze(fit.read_table(pd.concat(frames)), bootstrap=0, intervals="noise")
    recipe = analysis.recipes[1]
    assert recipe.comparison is not None
    assert recipe.comparison.lifetime is not None
    training = base.flops.max() / 1e9
    assert recipe.decode == (1.9e-3, 2e-3, 2.1e-3)
    assert recipe.comparison.lifetime.tokens == pytest.approx(training / 4 / 1e-3, rel=0.01)  # priors shift it a little
    assert recipe.comparison.lifetime.ci == pytest.approx((training / 4 / 1.2e-3, training / 4 / 0.8e-3), rel=0.01)
    assert "mqa decodes 1.00 ms a token faster than base" in recipe.comparison.sentences[-1]
    assert recipe.comparison.sentences[-1].endswith("served tokens, mqa beyond.")
    assert len(analysis.table) == len(base)
    assert "recipes_apart" in {warning.code for warning in analysis.warnings}
    page = write_report(analysis, tmp_path).read_text()
    assert "Variants compared with base" in page
    assert "figure-multiplier" in page
    assert "served tokens, mqa beyond." in page
    assert "2.00<small>1.90 to 2.10</small>" in page
    assert "filled up to the context length (cpu);" in page


def test_times_of_several_devices_are_not_weighed_against_each_other() -> None:
    base, variant = pair()
    tables = [timed(base, "base", 1e9, (3e-3,)), timed(variant, "mqa", 1e9, (2e-3,), "gpu")]
    comparison = fit.compare(*map(fit.read_table, tables))
    assert comparison.lifetime is None
    assert comparison.sentences[-1].startswith("Serving and training are not compared")
    untimed = fit.compare(base, variant)
    assert untimed.lifetime is None
    assert not any("Serving" in sentence for sentence in untimed.sentences)


@pytest.mark.parametrize(
    ("form", "trials"),
    [
        pytest.param("chinchilla", 20, marks=pytest.mark.slow),
        *(pytest.param(form, 150, marks=pytest.mark.exhaustive) for form in FORMS),
    ],
)
def test_intervals_hold_that_nothing_differs(form: str, trials: int) -> None:
    """Check that 93 to 97 % of null comparisons have 1 in their 95 % interval, within three standard errors."""
    rates = [covered(Case(form, design, (1.0, 0.0, "both"), bool(i % 3)), trials) for i, design in enumerate(DESIGNS)]
    for name in ("middle", "largest", "far", "trend"):
        share, error = np.mean([rate[name] for rate in rates]), 3 * math.sqrt(0.95 * 0.05 / (trials * len(DESIGNS)))
        assert 0.93 - error < share < 0.97 + error, name
