"""The GPT computes what its equations say, in every variant, and its hand-written derivatives are the right ones."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.errors import UserError
from isoflop.train.model import attention
from isoflop.train.model import block as block_module
from isoflop.train.model import gpt as model_module
from isoflop.train.model.gpt import GPT, sequence_losses
from isoflop.train.model.parametrization import build_model
from random_models import random_architecture, random_model, relative_error
from torch import Tensor, nn

ROPE: dict[str, dict[str, Any]] = {  # original contexts where some pairs of dimensions rotate often and some rarely
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_length": 64},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_length": 400},
}


def any_architecture(generator: random.Random) -> ModelConfig:
    """Draw an architecture with a window and rotations of any kind."""
    return random_architecture(
        generator, window=generator.choice([None, None, 1, 4, 30]), rope_theta=generator.choice([100.0, 10000.0]),
        norm_eps=generator.choice([1e-5, 1e-3]), **generator.choice([{}, *ROPE.values()]),
    )  # fmt: skip


def reference_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Return the radians per position of each pair and the amplitude, pair by pair as in the papers."""
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    if config.rope_scaling is None:
        return np.array(plain), 1.0
    factor, length = config.rope_factor or 0, config.rope_length or 0
    slow, fast, frequencies = 1.0, 4.0 if config.rope_scaling == "llama3" else 32.0, []
    if config.rope_scaling == "llama3":
        for frequency in plain:
            wavelength = 2 * math.pi / frequency
            if wavelength < length / fast:
                frequencies.append(frequency)
            elif wavelength > length / slow:
                frequencies.append(frequency / factor)
            else:
                smooth = (length / wavelength - slow) / (fast - slow)
                frequencies.append((1 - smooth) * frequency / factor + smooth * frequency)
        return np.array(frequencies), 1.0
    bounds = [config.head_dim * math.log(length / (2 * math.pi * n)) / (2 * math.log(config.rope_theta))
             for n in (fast, slow)]  # fmt: skip
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), config.head_dim - 1)
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(ramp * frequency / factor + (1 - ramp) * frequency)
    return np.array(frequencies), 0.1 * math.log(factor) + 1


def reference_logits(model: GPT, tokens: np.ndarray) -> np.ndarray:
    """Compute logits in NumPy float64, with einsum attention, an explicit mask and complex rotations.

    If the model separates documents, they are numbered by counting end-of-document tokens.
    """
    config = model.config
    weights = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight

    def rotate(x: np.ndarray) -> np.ndarray:  # (batch, time, heads, head_dim)
        half = config.head_dim // 2
        frequencies, amplitude = reference_frequencies(config)
        turn = amplitude * np.exp(1j * np.outer(np.arange(x.shape[1]), frequencies))[None, :, None, :]
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    batch, time = tokens.shape
    x = weights["embedding.weight"][tokens]
    i, j = np.arange(time)[:, None], np.arange(time)
    visible = np.broadcast_to((j <= i) & (j > i - (config.window or time)), (batch, 1, time, time))
    if model.end_of_document is not None:
        document = np.cumsum(np.pad(tokens == model.end_of_document, ((0, 0), (1, 0)))[:, :-1], axis=1)
        visible = visible & (document[:, None, :, None] == document[:, None, None, :])
    for i in range(config.depth):
        w = {name.removeprefix(f"blocks.{i}."): value for name, value in weights.items()}
        h = norm(x, w["attention_norm.weight"]) @ w["attention.qkv.weight"].T
        h = (h + w.get("attention.qkv_bias", 0)).reshape(batch, time, -1, config.head_dim)
        q, k, v = np.split(h, [config.heads, config.heads + config.num_kv_heads], axis=2)
        if config.qk_norm:
            q, k = norm(q, w["attention.query_norm.weight"]), norm(k, w["attention.key_norm.weight"])
        q, k = rotate(q), rotate(k)
        kv_index = np.arange(config.heads) // (config.heads // config.num_kv_heads)
        scores = np.einsum("bthd,bshd->bhts", q, k[:, :, kv_index]) / math.sqrt(config.head_dim)
        scores = np.where(visible, scores, -np.inf)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        mixed = np.einsum("bhts,bshd->bthd", attention, v[:, :, kv_index]).reshape(batch, time, -1)
        x = x + mixed @ w["attention.out.weight"].T
        gate, up = np.split(norm(x, w["mlp_norm.weight"]) @ w["mlp.gate_up.weight"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down.weight"].T
    logits = norm(x, weights["norm.weight"]) @ weights["head.weight"].T * model.output_scale
    logits[..., config.vocab_size :] = -np.inf
    return logits


@pytest.mark.parametrize("seed", range(12))
def test_logits_equal_an_independent_float64_implementation(seed: int) -> None:
    generator = random.Random(seed)
    config = any_architecture(generator)
    batch, time = generator.randrange(1, 4), generator.randrange(1, 20)
    model = random_model(
        config, time + generator.randrange(3), seed, optimizer=OptimizerConfig(base_width=generator.choice([4, 16]))
    ).double()
    tokens = torch.randint(config.vocab_size or 0, (batch, time), generator=torch.Generator().manual_seed(seed))
    if seed % 2:
        model.end_of_document = int(tokens[0, time // 2])
    expected = reference_logits(model, tokens.numpy())
    # The angles are kept in fp32, so float64 logits agree to its rounding: 2^-24 times a position below 20 and a sum.
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            np.testing.assert_allclose(model(tokens).detach().numpy(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_equal_finite_differences_of_the_reference(seed: int) -> None:
    # Along a random direction of all parameters at once; central differences of an independent implementation.
    generator = random.Random(100 + seed)
    config = any_architecture(generator)
    model = random_model(config, 9, seed).double()
    tokens = torch.randint(config.vocab_size or 0, (2, 9), generator=torch.Generator().manual_seed(seed))
    if seed % 2:
        model.end_of_document = int(tokens[0, 4])
    parameters = list(model.parameters())
    directions = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).double() for i, p in enumerate(parameters)
    ]
    next_token_loss_double(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True) if p.grad is not None)

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += step * d
            logits = reference_logits(model, tokens[:, :-1].numpy())
            for p, d in zip(parameters, directions, strict=True):
                p -= step * d
        return next_token_loss_double(torch.from_numpy(logits), tokens[:, 1:]).item()

    # Truncation is of order h^2 = 1e-10 and the fp32 angles of order 1e-6, both relative to the curvature.
    assert slope == pytest.approx((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, rel=2e-5, abs=2e-6)


def next_token_loss_double(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_derivatives_written_by_hand_pass_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    cos, sin = block_module.rotary_turn(*block_module.rotary_angles(5, 6, 10000.0), torch.float64)
    # gradcheck compares with central differences in float64, at its default tolerances (1e-5 + 1e-3 relative).
    assert torch.autograd.gradcheck(lambda x: block_module.apply_rotary(x, cos, sin), draw(2, 5, 3, 6))
    assert torch.autograd.gradcheck(block_module.SwiGLU.apply, draw(2, 3, 14))
    assert torch.autograd.gradcheck(lambda x, w: block_module._RMSNorm.apply(x, w, 1e-3), (draw(2, 3, 6), draw(6)))
    tokens = torch.randint(4, (2, 5), generator=generator)
    assert torch.autograd.gradcheck(lambda table: block_module._Lookup.apply(tokens, table), draw(4, 3))
    first = torch.tensor([[0, 0, 0, 2, 2, 4, 4], [0, 1, 1, 1, 1, 5, 5]], dtype=torch.int32)
    for block, window, masked in ((2, None, False), (3, None, True), (2, 3, True), (9, 3, True)):
        visible = attention.first_visible(first, first, window)
        mask = attention.visible_mask(visible, torch.float64) if masked else None

        def blocks(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            return attention._BlockAttention.apply(q, k, v, *rest)

        inputs = draw(4, 7, 4), draw(4, 7, 4), draw(4, 7, 4)  # two sequences of two heads each
        rest = block, 2, mask, window
        assert torch.autograd.gradcheck(blocks, (*inputs, *rest))
        q, k, v = (x.view(2, 2, 7, 4) for x in inputs)
        expected = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, scale=1.0)
        torch.testing.assert_close(blocks(*inputs, *rest).view(2, 2, 7, 4), expected, atol=1e-12, rtol=1e-12)


LOW = [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)]  # dtype, and half a unit in the last place, relative


@pytest.mark.parametrize(("dtype", "rounding"), LOW, ids=str)
def test_a_norm_in_low_precision_is_the_exact_one_rounded_once(dtype: torch.dtype, rounding: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # Large enough for the squares of fp16 to overflow, and long enough for their sum in bf16 to stop growing.
    x = (300 * torch.randn(64, 4096, generator=generator)).to(dtype).requires_grad_()
    norm = model_module.RMSNorm(4096, 1e-5).to(dtype)
    slope = torch.randn(64, 4096, generator=generator).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    expected = nn.functional.rms_norm(exact[0], (4096,), exact[1], 1e-5)
    references = [expected, *torch.autograd.grad(expected, exact, slope.double())]
    out = norm(x)
    for ours, theirs in zip([out, *torch.autograd.grad(out, [x, norm.weight], slope)], references, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, theirs) < rounding


@pytest.mark.parametrize(("dtype", "rounding"), LOW, ids=str)
def test_a_tables_gradient_in_low_precision_is_the_sum_rounded_once(dtype: torch.dtype, rounding: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, (8, 512), generator=generator)
    table = model_module.Embedding(4, 16).to(dtype)
    slope = (torch.randn(8, 512, 16, generator=generator) + 0.5).to(dtype)  # with a mean, so that sums grow
    exact = torch.zeros(4, 16, dtype=torch.float64).index_add_(0, tokens.flatten(), slope.flatten(0, 1).double())
    (ours,) = torch.autograd.grad(table(tokens), table.weight, slope)
    assert ours.dtype == dtype
    assert relative_error(ours, exact) < rounding
    left_out = block_module.table_gradient(slope, tokens, 4, left_out=1)
    assert torch.equal(left_out[[0, 2, 3]], ours[[0, 2, 3]])
    assert (left_out[1] == 0).all()


@pytest.mark.parametrize(("dtype", "rounding"), LOW, ids=str)
def test_logits_and_gradients_in_low_precision_are_near_the_exact_ones(dtype: torch.dtype, rounding: float) -> None:
    config = ModelConfig(width=64, depth=2, heads=4, kv_heads=2, vocab_size=50, vocab_multiple=1, qk_norm=True)
    low = random_model(config, 32, 0).to(dtype)
    exact = random_model(config, 32, 0)
    exact.load_state_dict(low.state_dict())
    exact.double()
    tokens = torch.randint(50, (4, 33), generator=torch.Generator().manual_seed(0))
    assert low(tokens[:, :-1]).dtype == dtype
    # About a dozen roundings follow one another in two blocks.
    assert relative_error(low(tokens[:, :-1]), exact(tokens[:, :-1])) < 10 * rounding
    for model in (low, exact):
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for ours, theirs in zip(low.parameters(), exact.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 20 * rounding


def test_casting_a_model_leaves_its_angles_exact() -> None:
    model = random_model(ModelConfig(width=16, depth=1, heads=2, vocab_size=20), 64, 0)
    expected = block_module.rotary_angles(64, 8, 10000.0)
    for cast in (model.bfloat16(), model.half(), model.to(dtype=torch.float32)):
        assert cast is model
        assert all(torch.equal(a, b) for a, b in zip((model.cos, model.sin), expected, strict=True))
    assert model.to("meta").cos.is_meta
    assert torch.equal(model.to_empty(device="cpu").cos, expected[0])


@pytest.mark.parametrize("tied", [False, True])
def test_padding_is_never_predicted_and_never_learns(tied: bool) -> None:
    config = ModelConfig(width=8, depth=1, heads=2, vocab_size=37, vocab_multiple=32, tied_embeddings=tied)
    assert config.padded_vocab_size == 64
    model = random_model(config, 12, 0)
    tokens = torch.randint(37, (4, 13), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1])
    assert logits.shape == (4, 12, 64)
    assert (logits.softmax(-1)[..., 37:] == 0).all()
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for table in (model.embedding.weight, model.head.weight):
        assert (table.grad[37:] == 0).all()
        assert table.grad[:37].abs().sum() > 0


@torch.no_grad()
def test_sequence_losses_are_sums_over_each_window() -> None:
    model = random_model(ModelConfig(width=16, depth=1, heads=2, vocab_size=20), 10, 0)
    windows = torch.randint(20, (7, 11), generator=torch.Generator().manual_seed(0))
    logits = reference_logits(model.double(), windows[:, :-1].numpy())
    logits -= logits.max(-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probabilities, windows[:, 1:, None].numpy(), -1)[..., 0]
    # Losses are computed in fp32 for every model dtype. Two windows at a time: the last chunk is not a full one.
    result = sequence_losses(model, windows, batch_tokens=20)
    np.testing.assert_allclose(result.numpy(), -picked.sum(-1), rtol=2e-6)


def test_the_same_seed_is_the_same_model_and_another_seed_another() -> None:
    config = ModelConfig(width=16, depth=1, heads=2, vocab_size=20)
    first, again, other = (build_model(config, OptimizerConfig(), 8, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_a_longer_sequence_than_the_model_was_built_for_is_refused() -> None:
    model = build_model(ModelConfig(width=8, depth=1, heads=2, vocab_size=5), OptimizerConfig(), 4, 0)
    with pytest.raises(ValueError, match="5 tokens is longer than the model's 4"):
        model(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(UserError, match=r"model\.vocab_size is None"):
        GPT(ModelConfig(), 4)
