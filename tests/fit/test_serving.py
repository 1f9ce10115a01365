"""The roofline of serving: its limits, kinks and prices, against counts made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from isoflop import fit
from isoflop.fit.allocation.serving import Device, Prices, Served, break_even, decode, prefill
from isoflop.train.config import ModelConfig
from isoflop.train.flops import count_parameters, training_flops_per_token


def random_case(seed: int) -> tuple[Served, Device, float]:
    """Return a typical model, a device with either bound larger, and a context short enough for arithmetic to win."""
    rng = np.random.default_rng(seed)
    model = Served.typical(10 ** rng.uniform(7, 12), rng.choice([1.0, 8.0]), *rng.choice([1.0, 2.0, 4.0], 2))
    device = Device(
        10 ** rng.uniform(12, 15), 10 ** rng.uniform(11, 13), rng.uniform(1, 5), *rng.uniform(0.3, 1.0, 2),
        rng.choice([0.0, 1e-3]),
    )  # fmt: skip
    # Half of the context at which the cache is read as slowly as a token is computed.
    return model, device, 0.5 * 2.0 * model.N / (device.balance * model.cache_bytes * model.kv_numbers)


def dense(size: ModelConfig, tokens: int) -> float:
    """Count the FLOPs of matrix products of a sequence by loops over layers and tokens."""
    flops = 0.0
    for position in range(1, tokens + 1):
        for _ in range(size.depth):
            flops += 2 * size.width * (size.heads + 2 * size.num_kv_heads) * size.head_dim
            flops += 2 * size.width * size.width + 6 * size.width * size.mlp_hidden
            flops += 4 * size.heads * size.head_dim * position
        flops += 2 * size.width * size.padded_vocab_size
    return flops


def test_flops_are_those_of_a_loop_over_layers_and_tokens() -> None:
    size = ModelConfig(vocab_size=512, width=64, depth=3, heads=4, kv_heads=2)
    per_block = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * size.mlp_hidden
    model = Served(3 * per_block + 64 * 512, 2 * 3 * 2 * 16, 3 * 4 * 16)
    device = Device(1e12, 1e11)
    assert float(prefill(model, device, 2, 37).flops) == pytest.approx(2 * dense(size, 37), rel=1e-12)
    one_more = dense(size, 38) - dense(size, 37)
    # Decode counts the context behind the token; the token itself is one position more.
    assert float(decode(model, device, 2, 38).flops) == pytest.approx(2 * one_more, rel=1e-12)
    # A third of training's, which counts attention over the whole square: twice the causal half.
    trained = training_flops_per_token(size, 37) * 37 / 3
    square = 3 * 4 * 16 * 4 * 37**2
    assert trained - square == pytest.approx(2 * model.N * 37, rel=1e-12)
    assert count_parameters(size).N_total >= model.N


def critical_batch(model, device, context):
    """Solve b (2 N + 4 a L) / balance = w N + b c k (L + 1) for b, the batch above which arithmetic bounds decode."""
    gained = (2.0 * model.N + 4.0 * model.attention_width * context) / device.balance
    gained -= model.cache_bytes * model.kv_numbers * (context + 1.0)
    return model.weight_bytes * model.N / gained if gained > 0 else np.inf


@pytest.mark.parametrize("seed", range(5))
def test_decode_is_bound_by_memory_at_batch_one_and_by_arithmetic_at_last(seed: int) -> None:
    model, device, context = random_case(seed)
    batch = 10.0 ** np.arange(-3, 15)
    passes = decode(model, device, batch, context)
    assert not passes.bound[0]
    assert passes.bound[-1]
    per_token = passes.seconds_per_token
    assert np.all(np.diff(per_token) <= 1e-12 * per_token[1:])
    flops = 2 * model.N + 4 * model.attention_width * context
    assert per_token[-1] == pytest.approx(flops / device.peak / device.compute_efficiency, rel=1e-6)
    weights = model.weight_bytes * model.N / device.bandwidth / device.bandwidth_efficiency
    assert passes.seconds[0] - device.overhead == pytest.approx(weights, rel=1e-2)
    # The two bounds meet at the critical batch without a jump.
    batch = float(critical_batch(model, device, context))
    below, at, above = (decode(model, device, batch * f, context) for f in (1 - 1e-9, 1.0, 1 + 1e-9))
    assert not below.bound
    assert above.bound
    assert float(at.flops / at.bytes) == pytest.approx(device.balance, rel=1e-9)
    assert float(above.seconds) == pytest.approx(float(below.seconds), rel=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_of_a_prompt_never_costs_more_than_a_written_one(seed: int) -> None:
    model, device, _ = random_case(seed)
    prompt = np.array([1.0, 16.0, 256.0, 4096.0])
    read, written = prefill(model, device, 4.0, prompt), decode(model, device, 4.0, prompt)
    assert np.all(read.seconds_per_token <= written.seconds_per_token * (1 + 1e-12))
    np.testing.assert_allclose(read.seconds_per_token, read.seconds / (4 * prompt), rtol=1e-12)


def test_prices_give_back_the_dollars_of_a_request() -> None:
    model, device = Served.typical(7e9), Device(1e15, 3e12, 2.5, 0.6, 0.7)
    prices = Prices.from_roofline(Device(2e15, 3e12, 4.0), device, model, 8, 900, 100, train_mfu=0.4)
    seconds = 900 * prefill(model, device, 8, 900).seconds_per_token
    seconds += 100 * decode(model, device, 8, 950).seconds_per_token
    request = seconds * device.hour / 3600
    assert prices.serve * 2 * 7e9 * 1000 == pytest.approx(float(request), rel=1e-12)
    assert prices.train == pytest.approx(4.0 / 3600 / 2e15 / 0.4)
    assert prices.output_mfu < prices.input_mfu <= device.compute_efficiency


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(0.0, 1e12), "peak is 0.0; it must be a finite number above zero"),
        (lambda: Device(1e15, 1e12, compute_efficiency=1.2), "compute_efficiency is 1.2; it must be a share"),
        (lambda: Device(1e15, 1e12, overhead=-1.0), "overhead is -1.0; it must be a finite number, zero or more"),
        (lambda: Served(1e9, float("nan"), 1.0), "kv_numbers is nan; it must be"),
        (lambda: decode(Served.typical(1e9), Device(1e15, 1e12), 0, 5), "batch is 0.0; it must be a finite number"),
        (
            lambda: Prices.from_roofline(*[Device(1e15, 1e12)] * 2, Served.typical([1e9, 1e10]), 1, 1, 1),
            "the served model is an array of models",
        ),
    ],
)
def test_bad_input_gets_a_sentence(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(fit.InputError, match=message.split(";")[0]) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("multiplier", "base", "variant", "tokens"),
    [
        (0.5, 0.003, 0.002, 1e5),  # 100 s more of training, 1 ms less a token
        (2.0, 0.002, 0.003, 5e4),  # 50 s less, 1 ms more
        (2.0, 0.003, 0.002, 0.0),  # better in both: the variant at any number
        (0.5, 0.002, 0.003, 0.0),  # worse in both: the base
        (2.0, 0.002, 0.002, 0.0),  # equal decode: the variant
        (0.5, 0.002, 0.002, math.inf),  # the base
        (0.0, 0.003, 0.002, math.inf),  # a loss that the variant never has
        (0.0, 0.002, 0.003, 0.0),
    ],
)
def test_the_break_even_is_where_both_have_cost_the_same(
    multiplier: float, base: float, variant: float, tokens: float
) -> None:
    level = break_even(100.0, multiplier, (base,) * 3, (variant,) * 3)
    assert level.tokens == pytest.approx(tokens, rel=1e-12)
    assert level.saved == pytest.approx(base - variant, abs=1e-15)
    assert level.ci is None
    if 0 < tokens < math.inf:
        assert 100 + tokens * base == pytest.approx(100 / multiplier + tokens * variant, rel=1e-12)


def test_the_break_even_has_the_range_of_the_multiplier_and_of_both_times() -> None:
    slow, quick = (0.0030, 0.0031, 0.0034), (0.0020, 0.0021, 0.0024)
    level = break_even(100.0, 0.5, slow, quick, (0.4, 0.8))
    assert level.tokens == pytest.approx(100 / 0.001)
    assert level.ci == pytest.approx((25 / 0.0014, 150 / 0.0006))
    assert break_even(100.0, 0.5, slow, quick, (0.4, 1.2)).ci == pytest.approx((0.0, 150 / 0.0006))
    assert break_even(100.0, 0.5, slow, quick, (0.0, 0.8)).ci == pytest.approx((25 / 0.0014, math.inf))
    assert break_even(100.0, 2.0, quick, slow, (1.25, 4.0)).ci == pytest.approx((20 / 0.0014, 75 / 0.0006))
    overlap = break_even(100.0, 0.5, slow, (0.0020, 0.0025, 0.0030), (0.4, 1.2))
    assert (overlap.tokens, overlap.ci, overlap.saved) == (math.inf, (0.0, math.inf), 0.0)
