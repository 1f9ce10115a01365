"""Seconds of a generated token, measured: requests that all have a full context behind them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...train.hardware import device_name, read
from ...train.model.gpt import GPT
from .forward import Forward
from .generate import decode_tokens
from .paged import PAGE, PagedBatch, PagedCache, Pages

REQUESTS = 16  # that are served together
LEAST, MOST_SECONDS = 15, 1.0  # tokens that are timed, and when enough of them are


def full_batch(gpt: GPT, requests: int, context: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """What adds the last token to each of `requests` contexts, and the bytes that their cache keeps per token."""
    dtype = gpt.embedding.weight.dtype
    cache = PagedCache.of(gpt.config, requests * -(-context // PAGE), dtype, device, PAGE)
    pages = [Pages() for _ in range(requests)]
    if not all(cache.extend(each, context) for each in pages):
        raise ValueError(f"the cache has too few pages for {requests} requests of {context}")
    for store in cache.stores:
        store.normal_()
    forward, batch = Forward(gpt, absorbed=True), PagedBatch(cache, pages, gpt.config.heads)
    positions, first = np.full(requests, context - 1), np.zeros(requests, np.int64)

    @torch.inference_mode()
    def step() -> None:
        read(decode_tokens(forward, batch, [0] * requests, positions, first)[0, 0])

    held = sum(store.untyped_storage().nbytes() for store in cache.stores)
    return step, held // (requests * -(-context // PAGE) * PAGE)


def decode_speed(gpt: GPT, context: int, device: torch.device) -> dict[str, Any]:
    """`seconds` per token, the median over tokens, and half of what lies between their quartiles."""
    step, _ = full_batch(gpt, REQUESTS, context, device)
    step()  # the first one finds places in memory and chooses kernels
    taken, begun = list[float](), time.perf_counter()
    while len(taken) < LEAST or time.perf_counter() - begun < MOST_SECONDS:
        start = time.perf_counter()
        step()
        taken.append((time.perf_counter() - start) / REQUESTS)
    low, middle, high = np.percentile(taken, (25, 50, 75))
    about = {"requests": REQUESTS, "context": context, "device": device_name(device)}
    return {"seconds": float(middle), "spread": float(high - low) / 2, **about}
