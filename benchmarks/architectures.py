"""Mixtures of experts and latent attention beside what they stand in for, in turn in one process on this machine.

    python benchmarks/architectures.py [--threads 2] [--repeats 5] [--json]

Rows are those of `isoflop bench`: a step of a mixture beside the dense model of equal active FLOPs, and beside
transformers' Mixtral of the same shape at the best of its implementations; a token of latent attention beside grouped
queries of as many heads at 4k of context, with the bytes of both caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from isoflop.evaluate.inference.cache import Cache
from isoflop.evaluate.inference.forward import Forward
from isoflop.evaluate.inference.generate import decode_tokens
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.flops import count_parameters
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import build_model

BATCH, LENGTH, CONTEXT, REQUESTS = 16, 256, 4096, 4
DENSE = ModelConfig(width=256, depth=4, heads=4, hidden=1024, vocab_size=256)
MIXED = ModelConfig(
    width=256, depth=4, heads=4, vocab_size=256, experts=16, expert_hidden=256, experts_per_token=4, gate="softmax",
    balance_rate=0.0,
)  # fmt: skip
GROUPED = ModelConfig(width=384, depth=6, heads=6, vocab_size=256)
LATENT = ModelConfig(width=384, depth=6, heads=6, vocab_size=256, attention="mla", kv_rank=128, rotary_size=32)

Work = Callable[[], None]


def trained(config: ModelConfig) -> Work:
    gpt = build_model(config, OptimizerConfig(), LENGTH, 0)
    optimizer = torch.optim.AdamW(gpt.parameters(), fused=True)
    tokens = torch.randint(256, (BATCH, LENGTH + 1))

    def step() -> None:
        optimizer.zero_grad()
        gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return step


def mixtral(implementation: str) -> Work:
    from transformers import MixtralConfig, MixtralForCausalLM

    chosen: dict[str, Any] = {"experts_implementation": implementation, "attn_implementation": "sdpa"}
    config = MixtralConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=16, num_experts_per_tok=4, tie_word_embeddings=True, **chosen,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (BATCH, LENGTH + 1))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def decoded(config: ModelConfig) -> tuple[Work, int]:
    """A token of each request at the context's end, and the bytes that the cache keeps per token."""
    gpt: GPT = build_model(config, OptimizerConfig(), CONTEXT, 0).eval()
    cache = Cache(config, REQUESTS, CONTEXT, torch.float32, torch.device("cpu"))
    stores = [cache.keys] if cache.latent else [cache.keys, cache.values]
    for store in stores:
        store.normal_()
    forward = Forward(gpt, absorbed=True)
    positions, first = np.full(REQUESTS, CONTEXT - 1), np.zeros(REQUESTS, np.int64)

    @torch.inference_mode()
    def step() -> None:
        decode_tokens(forward, cache, [7] * REQUESTS, positions, first)

    held = sum(store.untyped_storage().nbytes() for store in stores)
    assert held == REQUESTS * CONTEXT * config.depth * config.cached * 4  # the formula
    return step, held // (REQUESTS * CONTEXT)


def measured(ours: Work, peer: Work, repeats: int) -> list[tuple[float, float]]:
    """Seconds of both, in turn, after one of each that does not count."""
    found = []
    for _ in range(repeats + 1):
        pair = []
        for work in (ours, peer):
            start = time.perf_counter()
            work()
            pair.append(time.perf_counter() - start)
        found.append((pair[0], pair[1]))
    return found[1:]


def row(case: str, ours: Work, peer: Work, peer_name: str, tokens: int, repeats: int) -> dict[str, Any]:
    times = measured(ours, peer, repeats)
    ratios = [theirs / own for own, theirs in times]
    own, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    spread = statistics.stdev(ratios) if len(ratios) > 1 else None
    return {
        "case": case, "ours": tokens / own, "peer": tokens / theirs, "peer_name": peer_name, "unit": "tokens/s",
        "ratio": statistics.median(ratios), "spread": spread, "device": f"cpu, {torch.get_num_threads()} threads",
    }  # fmt: skip


def rows(repeats: int) -> Iterator[dict[str, Any]]:
    tokens, mixture = BATCH * LENGTH, trained(MIXED)
    yield row("16 experts of 256, 4 chosen", mixture, trained(DENSE), "dense, hidden 1024", tokens, repeats)
    for implementation in ("eager", "grouped_mm"):  # batched_mm copies the weights of every token: minutes per step
        name = f"transformers Mixtral, {implementation}"
        yield row("16 experts of 256, 4 chosen", mixture, mixtral(implementation), name, tokens, repeats)
    (latent, small), (grouped, large) = decoded(LATENT), decoded(GROUPED)
    size = f"{count_parameters(LATENT).N_total / 1e6:.1f}M and {count_parameters(GROUPED).N_total / 1e6:.1f}M"
    case = f"a token at {CONTEXT} of context, {small:,} and {large:,} bytes per token ({size})"
    yield row(case, latent, grouped, "grouped queries", REQUESTS, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = []
    for each in rows(arguments.repeats):
        found.append(each)
        if not arguments.json:
            print(f"{each['case']}: {each['ours']:,.0f} tokens/s, {each['peer_name']} {each['peer']:,.0f}, ratio "
                  f"{each['ratio']:.2f} ± {each['spread'] or 0:.2f}", flush=True)  # fmt: skip
    if arguments.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
