"""Generation with a cache and continuous batching, against recomputing the window for every token in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.evaluate.inference import forward, generate
from isoflop.evaluate.inference.forward import Cache, Forward
from isoflop.evaluate.inference.generate import (
    Generation,
    Sampling,
    choose_tokens,
    decode_speed,
    decode_tokens,
    generate_texts,
    prefill_prompts,
    stream,
)
from isoflop.train.config import ModelConfig
from isoflop.train.errors import UserError
from isoflop.train.model.gpt import GPT
from simple_models import draw
from torch import nn

CPU, END, STOP = torch.device("cpu"), 3, 2
Finished = Callable[[list[int]], bool]


def random_gpt(chance: random.Random, max_length: int, dtype: torch.dtype = torch.float64, **fixed: Any) -> GPT:
    """Return a GPT of any architecture, with weights large enough for texts that do not repeat themselves."""
    heads = chance.choice([2, 4])
    options: dict[str, Any] = {
        "vocab_size": chance.choice([17, 40]), "depth": chance.choice([1, 2]), "width": 8 * heads, "heads": heads,
        "kv_heads": chance.choice([count for count in (1, 2, 4) if heads % count == 0]),
        "qk_norm": chance.random() < 0.5, "window": chance.choice([None, 5, 9]),
        "tied_embeddings": chance.random() < 0.5,
    }  # fmt: skip
    gpt = GPT(ModelConfig(**options | fixed), max_length, output_scale=chance.choice([1.0, 2.5]))
    generator = torch.Generator().manual_seed(chance.randrange(10**6))
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    if chance.random() < 0.6:
        gpt.end_of_document = END
    return gpt.to(dtype).eval()


@torch.inference_mode()
def naive(
    gpt: GPT, prompt: list[int], count: int, max_length: int, finished: Finished, sampling: Sampling,
    seed: int,
) -> list[int]:  # fmt: skip
    """Continue one prompt by the model's forward pass over the last `max_length` tokens for each new one."""
    random_numbers, text, new = torch.Generator().manual_seed(seed), list(prompt), []
    while len(new) < count and not (new and finished(new)):
        logits = gpt(torch.tensor([text[-max_length:]]))[0, -1]
        new.append(draw(logits, sampling, random_numbers))
        text.append(new[-1])
    return new


def ends_with(stop: int, new: list[int]) -> bool:
    return new[-1] == stop


def finish(generation: Generation, finished: Finished = lambda new: False) -> dict[int, list[int] | None]:
    """Run all rounds, check the invariants of each, and return all results."""
    results: dict[int, list[int] | None] = {}
    for _ in range(5000):
        if generation.over:
            break
        for request in generation.step(finished):
            assert request.index not in results
            results[request.index] = None if request.failed else request.new
        assert len(generation.running) <= generation.cache.rows
    assert generation.over
    return results


def test_every_token_is_that_of_recomputation() -> None:
    waited = slid = 0
    for seed in range(6):
        chance = random.Random(seed)
        max_length = chance.choice([12, 30, 50])
        gpt = random_gpt(chance, max_length)
        size = gpt.config.vocab_size or 0
        sampling = chance.choice(
            [Sampling(), Sampling(1.0), Sampling(0.7, 5), Sampling(1.3, 0, 0.8), Sampling(1.0, 7, 0.6)]
        )
        prompts = [
            [chance.randrange(size) for _ in range(chance.randrange(1, max_length + 5))]
            for _ in range(chance.randrange(1, 9))
        ]
        count, stop = chance.randrange(1, 25), chance.choice([STOP, -1])
        finished = partial(ends_with, stop)
        row_bytes = 2 * gpt.config.depth * gpt.config.num_kv_heads * 8 * max_length * 8
        generation = Generation(
            gpt, prompts, count, max_length, sampling, None, CPU, chance.choice([1, 7, 40, 1000]),
            row_bytes * chance.choice([0, 2, 4, 1000]),
        )  # fmt: skip
        results = finish(generation, finished)
        for index, prompt in enumerate(prompts):
            expected = naive(gpt, prompt, count, max_length, finished, sampling, index)
            assert results[index] == expected, (seed, index, gpt.config)
            slid += len(prompt) + len(expected) > max_length
        waited += generation.cache.rows < len(prompts)
    assert waited
    assert slid


def test_results_do_not_depend_on_neighbours_and_are_reported_as_they_come() -> None:
    chance = random.Random(2)
    gpt = random_gpt(chance, 60)
    prompts = [[chance.randrange(17) for _ in range(chance.randrange(1, 30))] for _ in range(12)]
    reported: dict[int, list[int] | None] = {}
    options: dict[str, Any] = {"max_length": 60, "finished": lambda new: new[-1] == STOP, "sampling": Sampling(1.2)}
    seeds = [chance.randrange(1 << 30) for _ in prompts]
    batched = generate_texts(gpt, prompts, 25, seeds=seeds, done=reported.__setitem__, **options)
    alone = [generate_texts(gpt, [p], 25, seeds=[s], **options)[0] for p, s in zip(prompts, seeds, strict=True)]
    assert batched == alone == [reported[index] for index in range(12)]
    assert generate_texts(gpt, prompts, 0, **options) == [[]] * 12
    assert generate_texts(gpt, [], 5, **options) == []


def test_a_stream_is_the_greedy_text_token_by_token() -> None:
    chance = random.Random(4)
    gpt = random_gpt(chance, 16)
    expected = naive(gpt, [5, 6], 30, 16, lambda new: False, Sampling(), 0)
    tokens = stream(gpt, [5, 6], 30, max_length=16)
    assert [next(tokens) for _ in range(3)] == expected[:3]
    assert list(tokens) == expected[3:]


def test_nan_fails_its_prompt_and_reaches_no_neighbour() -> None:
    chance = random.Random(7)
    gpt = random_gpt(chance, 40, window=None, vocab_size=17, tied_embeddings=False)
    healthy = [[chance.randrange(16) for _ in range(5)] for _ in range(8)]
    options: dict[str, Any] = {"max_length": 40, "finished": lambda new: False}
    with torch.no_grad():
        gpt.head.weight[16] = 0.0
        gpt.embedding.weight[16] = float("nan")
    poisoned = [prompt if index % 3 else [16, *prompt] for index, prompt in enumerate(healthy)]
    expected = [generate_texts(gpt, [prompt], 12, **options)[0] for prompt in poisoned]
    assert [result is None for result in expected] == [index % 3 == 0 for index in range(8)]
    assert generate_texts(gpt, poisoned, 12, **options, cache_bytes=0) == expected
    assert generate_texts(gpt, poisoned, 12, **options) == expected
    with pytest.raises(UserError, match="the model returned NaN"):
        list(stream(gpt, poisoned[0], 5, max_length=40))


@pytest.mark.parametrize(("context", "first"), [(80, 48), (6, 3), (2, 1)])
def test_timed_tokens_see_the_whole_text_and_end_at_the_context(
    monkeypatch: pytest.MonkeyPatch, context: int, first: int
) -> None:
    """The model ends a document with every token, which must not end the measurement."""
    seen: list[tuple[int, int]] = []

    def decode(forward: Any, cache: Any, tokens: Any, positions: Any, starts: Any, row: int) -> torch.Tensor:
        seen.extend(zip(positions.tolist(), starts.tolist(), strict=True))
        return decode_tokens(forward, cache, tokens, positions, starts).index_fill(1, torch.tensor([END]), 1e9)

    monkeypatch.setattr(generate, "decode_tokens", decode)
    monkeypatch.setattr(generate, "TIMED", 2 * (context - first))
    monkeypatch.setattr(generate, "TIMED_SECONDS", 60.0)  # so that the number of tokens ends it on any machine
    gpt = random_gpt(random.Random(0), context, torch.float32, window=None, depth=1)
    gpt.end_of_document = END
    timed = decode_speed(gpt)
    assert timed is not None
    assert 0 < timed["seconds"] <= timed["median"]
    one_pass = [(place, 0) for place in range(first, context)]
    assert seen == [*one_pass, *one_pass, one_pass[0]]  # the first of them warms up
    torch.nn.init.constant_(gpt.head.weight, float("nan"))
    assert decode_speed(gpt) is None


@pytest.mark.parametrize(("length", "longest", "room"), [(14, 13, 16), (40, 4, 5)])
def test_where_memory_runs_out_fewer_go_on_and_one_alone_is_refused(
    length: int, longest: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for a number of tokens, over prompts and windows that slide, or over the tokens that continue short ones."""
    chance, limit = random.Random(9), 10**9
    gpt = random_gpt(chance, length)
    prompts = [[chance.randrange(17) for _ in range(chance.randrange(2, longest + 1))] for _ in range(9)]
    original, sizes = Forward.hidden, list[int]()

    def limited(forward: Forward, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(ids))
        if len(ids) > limit:
            raise torch.OutOfMemoryError("not enough memory")
        return original(forward, ids, *rest)

    monkeypatch.setattr(Forward, "hidden", limited)
    options: dict[str, Any] = {"max_length": length, "finished": lambda new: False}
    expected, needed = generate_texts(gpt, prompts, 12, **options), max(sizes)
    limit = room
    assert generate_texts(gpt, prompts, 12, **options) == expected
    assert needed > limit
    limit = 0
    with pytest.raises(UserError, match="memory ran out on cpu for a single text"):
        generate_texts(gpt, prompts, 12, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_logits_of_prefill_and_decode_are_the_models(dtype: torch.dtype, tolerance: float) -> None:
    """The tolerance is relative to the largest logit: some roundings of the type."""
    for seed in range(4):
        chance = random.Random(seed)
        gpt = random_gpt(chance, 64, dtype)
        size = gpt.config.vocab_size or 0
        texts = [[chance.randrange(size) for _ in range(chance.randrange(2, 40))] for _ in range(5)]
        cache = Cache(gpt.config, len(texts), 40, dtype, CPU)
        cache.clear(range(len(texts)))
        with torch.inference_mode():
            first = prefill_prompts(Forward(gpt), cache, [text[:-1] for text in texts])
            starts = [
                0 if gpt.end_of_document is None or END not in text[:-1] else len(text) - 1 - text[-2::-1].index(END)
                for text in texts
            ]
            lengths, window = np.array(list(map(len, texts))), gpt.config.window or 64
            seen = np.maximum(lengths - window, starts)
            second = decode_tokens(Forward(gpt), cache, [text[-1] for text in texts], lengths - 1, seen)
            for row, text in enumerate(texts):
                whole = gpt(torch.tensor([text]))[0, :, :size].double()
                for logits, expected in ((first[row], whole[-2]), (second[row], whole[-1])):
                    assert (logits.double() - expected).abs().max() < tolerance * whole.abs().max()


@pytest.mark.parametrize("fault", ["missing", "refuses", "wrong", "too large"])
def test_without_packed_products_the_plain_ones_give_the_same_tokens(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch lacks these operations, the processor does not support them, or they compute wrong results."""
    gpt = random_gpt(random.Random(3), 64, torch.float32)
    expected = generate_texts(gpt, [[5, 6, 7], [8]], 20, max_length=64, finished=lambda new: False)

    class Faulty(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            if fault == "missing":
                raise AttributeError("no such operation")
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fault == "refuses":
                raise RuntimeError("could not create a primitive descriptor")
            return x @ self.weight.T + 1

    if fault == "too large":
        monkeypatch.setattr(forward, "PACKED_BYTES", 0)
    monkeypatch.setattr(forward, "_Packed", Faulty)
    forward._packs.cache_clear()
    try:
        assert generate_texts(gpt, [[5, 6, 7], [8]], 20, max_length=64, finished=lambda new: False) == expected
    finally:
        forward._packs.cache_clear()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_packed_products_are_the_plain_ones_whatever_the_rows(dtype: torch.dtype, tolerance: float) -> None:
    """The tolerance is a few roundings of the type. Another width or type is refused and never computed."""
    if not forward._packs(dtype):
        pytest.skip(f"needs packed products of {dtype}: this PyTorch or processor has none")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    product = forward._Packed(weight)
    wide = torch.randn(40, 64, generator=generator).to(dtype)
    for rows in (wide[:, :32], wide[:1, 32:], wide[::2, :32], wide[:0, :32], wide[:32, :40].t()):
        expected = rows.double() @ weight.double().t()
        assert product(rows).dtype == dtype
        assert torch.allclose(product(rows).double(), expected, rtol=tolerance, atol=tolerance * 10)
    for rows in (wide[:, :16], wide, wide[:, :32].double()):
        with pytest.raises(RuntimeError):
            product(rows)


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Compute the probabilities by their definitions, in loops."""
    p = torch.softmax(logits.double() / sampling.temperature, 0)
    order = sorted(range(len(p)), key=lambda token: -float(p[token]))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, nucleus, before = sum(float(p[token]) for token in order), [], 0.0
    for token in order:
        if nucleus and before >= sampling.top_p:
            break
        nucleus.append(token)
        before += float(p[token]) / total
    result = torch.zeros_like(p)
    result[nucleus] = p[nucleus] / p[nucleus].sum()
    return result


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, 4), Sampling(1.5, 0, 0.7), Sampling(1.0, 90, 0.5), Sampling(1.0, 0, 0.0)]
)
def test_drawn_tokens_follow_the_definitions(sampling: Sampling) -> None:
    """Over an even grid of uniform numbers each token comes up as often as its probability says, within one."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.5, 3.0):
        logits, n = scale * torch.randn(300, generator=generator), 4000
        uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        tokens, _ = choose_tokens(logits.expand(n, -1), sampling, uniforms)
        counts = torch.bincount(tokens, minlength=300)
        assert (counts - n * probabilities(logits, sampling)).abs().max() <= 1.0 + 1e-6


def test_the_ends_of_the_uniform_range_never_draw_what_has_no_probability() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]] * 2)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    for sampling in (Sampling(1.0), Sampling(1.0, 4), Sampling(1.0, 0, 0.99)):
        assert {*choose_tokens(logits, sampling, uniforms)[0].tolist()} == {1, 2}


@pytest.mark.gpu
def test_a_gpu_writes_what_the_host_does() -> None:
    chance = random.Random(0)
    for seed in range(6):
        gpt = random_gpt(random.Random(seed), 60)
        prompts = [[chance.randrange(17) for _ in range(chance.randrange(1, 30))] for _ in range(9)]
        options: dict[str, Any] = {"max_length": 60, "finished": lambda new: False, "sampling": Sampling(1.0, 9, 0.9)}
        expected = generate_texts(gpt, prompts, 40, **options, cache_bytes=1 << 14)
        assert generate_texts(gpt.cuda(), prompts, 40, **options, device="cuda", cache_bytes=1 << 14) == expected
