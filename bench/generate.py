"""Our generation beside transformers' `generate` on the same weights: a part of `isoflop bench evaluate`.

A model of 10M parameters, 16 prompts of 64 to 256 tokens, 128 new ones each and no stop; transformers gets its cache
and left padding. Each round times the whole and the first token alone; what lies between is decode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..evaluate.export.hf_weights import hf_config, to_hf
from ..evaluate.inference.generate import Sampling, generate_texts
from ..train.config import ModelConfig
from ..train.model.gpt import GPT
from .contenders import Contender, Row, contract_row, measuring_on, take_turns

MODEL = ModelConfig(vocab_size=8192, width=256, depth=8, heads=8)
SHORTEST, LONGEST, NEW, BATCH = 64, 256, 128, 16
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95)
PEER = "transformers generate"
Prompts = list[list[int]]


def bench_generate(device: str, rounds: int) -> Iterator[Row]:
    """Prefill, decode and both, greedy, then both, sampled; in fp32."""
    with measuring_on(device) as place:
        gpt, llama = paired_models(MODEL, LONGEST + NEW, place)
        prompts = random_prompts(BATCH, gpt.head.vocab_size)
        shape = f"{BATCH} prompts of {SHORTEST} to {LONGEST}, {NEW} new, fp32"
        first, whole, peer_first, peer_whole = contenders = [
            Contender(name, partial(run, prompts, count, Sampling()))
            for name, run in (("ours", partial(our_tokens, gpt)), (PEER, partial(peer_tokens, llama)))
            for count in (1, NEW)
        ]
        take_turns(contenders, rounds, 1, place)
        pairs = zip(chain(*whole.step()), chain(*peer_whole.step()), strict=True)
        same = [mine == other for mine, other in pairs]
        decode, peer_decode = (
            [all_of_it - one for all_of_it, one in zip(long.seconds, short.seconds, strict=True)]
            for long, short in ((whole, first), (peer_whole, peer_first))
        )
        sampled = Contender("ours", partial(our_tokens, gpt, prompts, NEW, SAMPLED))
        peer_sampled = Contender(PEER, partial(peer_tokens, llama, prompts, NEW, SAMPLED))
        take_turns([sampled, peer_sampled], rounds, 1, place)
        how = f"temperature {SAMPLED.temperature}, top-k {SAMPLED.top_k}, top-p {SAMPLED.top_p}"
        written, read = BATCH * NEW, sum(map(len, prompts))
        for what, tokens, ours, theirs in (
            ("generate, greedy", written, whole.seconds, peer_whole.seconds),
            ("prefill", read, first.seconds, peer_first.seconds),
            ("decode", written - BATCH, decode, peer_decode),
            (f"generate, {how}", written, sampled.seconds, peer_sampled.seconds),
        ):
            row = contract_row(f"{what}, {shape}", tokens, "tokens/s", ours, theirs, PEER, place)
            yield row | ({"same_tokens": sum(same) / len(same)} if ours is whole.seconds else {})


def paired_models(config: ModelConfig, length: int, device: torch.device) -> tuple[GPT, Any]:
    """A GPT of random weights, and a transformers model of the same ones."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    assert config.vocab_size is not None
    gpt = GPT(config, length).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in gpt.parameters():
        if parameter.ndim == 2:  # ours start at zero in places, and a model of zeros predicts nothing
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    shape = {k: v for k, v in hf_config(config, length, 0, "float32").items() if k != "architectures"}
    llama: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape), attn_implementation="sdpa")
    llama.load_state_dict(to_hf(gpt), strict=not config.tied_embeddings)
    llama.generation_config = GenerationConfig(pad_token_id=0)  # and no token ends a text
    return gpt.to(device), llama.eval().to(device)


def random_prompts(count: int, vocabulary: int) -> Prompts:
    """Lengths spread evenly over what is measured."""
    chance = random.Random(0)
    lengths = [SHORTEST + round((LONGEST - SHORTEST) * row / max(1, count - 1)) for row in range(count)]
    chance.shuffle(lengths)
    return [[chance.randrange(1, vocabulary) for _ in range(length)] for length in lengths]


def our_tokens(gpt: GPT, prompts: Prompts, new: int, sampling: Sampling) -> list[list[int]]:
    results = generate_texts(
        gpt,
        prompts,
        new,
        max_length=gpt.max_length,
        finished=lambda tokens: False,
        sampling=sampling,
        device=gpt.cos.device,
    )
    return [tokens or [] for tokens in results]


@torch.inference_mode()
def peer_tokens(llama: Any, prompts: Prompts, new: int, sampling: Sampling) -> list[list[int]]:
    """By transformers: padded on the left, with its default cache."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=llama.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=llama.device)
    how: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    output = llama.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=new, use_cache=True, **how)
    written: list[list[int]] = output[:, longest:].tolist()
    return written
