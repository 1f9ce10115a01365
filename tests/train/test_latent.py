"""Latent attention equals the equations of its paper, in training, in its costs and in absorbed decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from isoflop.evaluate.inference.forward import Cache, Forward
from isoflop.evaluate.inference.generate import decode_tokens, prefill_prompts
from isoflop.train.config import ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters, training_flops_per_token
from isoflop.train.model.block import rotary_turn
from isoflop.train.model.gpt import GPT
from isoflop.train.model.latent import LatentAttention
from isoflop.train.model.parametrization import build_model
from isoflop.train.planner.validation import validate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

LATENT = ModelConfig(width=36, depth=2, heads=3, vocab_size=61, attention="mla", kv_rank=20, rotary_size=6)
CASES = [{}, {"query_rank": 14}, {"window": 5}, {"kv_rank": None, "rotary_size": None, "head_size": 16}]


def latent_model(seed: int, **changes: Any) -> GPT:
    """Build a float64 model in which every weight matters."""
    torch.manual_seed(seed)
    gpt = build_model(replace(LATENT, **changes), OptimizerConfig(), 24, seed).double()
    for name, parameter in gpt.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return gpt


def written_out(attention: LatentAttention, x: Tensor, cos: Tensor, sin: Tensor, window: int | None) -> Tensor:
    """Compute equations 37 to 47 of the paper for x (batch, time, width), head by head."""
    d, r, c = attention.head_dim, attention.rotary, attention.rank
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)

    def rotated(v: Tensor) -> Tensor:
        a, b = v[..., : r // 2], v[..., r // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def normed(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    source = x
    if attention.query_down is not None and attention.query_norm is not None:
        source = normed(x @ attention.query_down.weight.T, attention.query_norm.weight)
    latent = normed(x @ attention.latent.weight[:c].T, attention.latent_norm.weight)
    shared = rotated(x @ attention.latent.weight[c:].T)
    time = x.shape[1]
    distance = torch.arange(time)[:, None] - torch.arange(time)
    hidden = (distance < 0) | (distance >= (window or time))
    heads = []
    for head in range(attention.heads):
        query = source @ attention.query.weight[head * (d + r) : (head + 1) * (d + r)].T
        key, value = (latent @ attention.key_value.weight[2 * d * head : 2 * d * (head + 1)].T).split(d, -1)
        scores = query[..., :d] @ key.mT + rotated(query[..., d:]) @ shared.mT
        weights = (scores / (d + r) ** 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        heads.append(weights @ value)
    return torch.cat(heads, -1) @ attention.out.weight.T


@pytest.mark.parametrize("changes", CASES)
def test_output_and_gradients_are_those_of_the_equations(changes: dict[str, Any]) -> None:
    gpt = latent_model(1, **changes)
    attention, window = gpt.blocks[0].attention, gpt.config.window
    assert isinstance(attention, LatentAttention)
    x = torch.randn(2, 11, 36, dtype=torch.float64, requires_grad=True)
    seen = gpt.seen(torch.zeros(2, 11, dtype=torch.long), torch.float64)
    inputs = [x, *attention.parameters()]
    y = attention(x, *rotary_turn(gpt.cos[:11], gpt.sin[:11], x.dtype), *seen)
    expected = written_out(attention, x, gpt.cos[:11], gpt.sin[:11], window)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-10)
    probe = torch.randn_like(y)
    gradients, expected_gradients = (torch.autograd.grad((out * probe).sum(), inputs) for out in (y, expected))
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("changes", CASES)
def test_decoding_from_latents_gives_the_logits_of_the_whole_text(changes: dict[str, Any]) -> None:
    gpt = latent_model(3, **changes)
    texts = [torch.randint(61, (length,)).tolist() for length in (9, 4, 17)]
    cache = Cache(gpt.config, len(texts), 20, torch.float64, torch.device("cpu"))
    cache.clear(range(len(texts)))
    with torch.inference_mode():
        forward = Forward(gpt, absorbed=True)
        first = prefill_prompts(forward, cache, [text[:-2] for text in texts])
        for row, text in zip(first, texts, strict=True):
            whole = gpt(torch.tensor([text[:-2]]))[0, -1, :61]
            torch.testing.assert_close(row, whole, atol=1e-10, rtol=1e-9)
        for back in (2, 1):
            ends = torch.tensor([len(text) - back for text in texts]).numpy()
            seen = (ends + 1 - (gpt.config.window or 99)).clip(0)
            rows = decode_tokens(forward, cache, [text[-back] for text in texts], ends, seen)
            for row, text, end in zip(rows, texts, ends, strict=True):
                whole = gpt(torch.tensor([text[: end + 1]]))[0, -1, :61]
                torch.testing.assert_close(row, whole, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"query_rank": 14}])
def test_counted_parameters_and_flops_are_those_of_the_equations(changes: dict[str, Any]) -> None:
    config = replace(LATENT, vocab_size=128, **changes)
    gpt = build_model(config, OptimizerConfig(), 16, 0)
    assert count_parameters(config).N_total == sum(p.numel() for p in gpt.parameters())
    for block in gpt.blocks:
        attention = block.attention
        block.attention.forward = lambda x, *_, attention=attention: written_out(attention, x, gpt.cos, gpt.sin, None)
    tokens = torch.randint(61, (2, 16))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        gpt(tokens).logsumexp(-1).sum().backward()
    assert counter.get_total_flops() == training_flops_per_token(config, 16) * 32


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kv_heads": 3}, "model.kv_heads is 3"),
        ({"qk_norm": True}, "model.qk_norm is True"),
        ({"rotary_size": 5}, "model.rotary_size is 5"),
        ({"attention": "linear"}, "model.attention is 'linear'"),
        ({"kv_rank": 0}, "model.kv_rank is 0"),
    ],
)
def test_latents_that_cannot_be_trained_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(RunConfig(model=replace(LATENT, **changes)))
    assert problem in str(caught.value)
