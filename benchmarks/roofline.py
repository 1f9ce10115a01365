"""Prefill and decode beside the roofline of this machine: the numbers of docs/inference.md.

    python benchmarks/roofline.py [--device cpu] [--threads 2] [--precision fp32] [--rounds 20] [--json]

Measured are the peak of matrix products, the bandwidth of reading memory (the sum of an array much larger than the
caches), and passes of the model of `isoflop bench evaluate` at several batches and contexts. Each is put beside
`fit.serving`'s time at those peaks, without an allowance for what the software does not reach. All are the best of the
rounds, peaks and passes alike: what else the machine does takes from both.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from isoflop.bench.generate import MODEL
from isoflop.evaluate.inference.generate import Generation
from isoflop.fit.allocation import serving
from isoflop.train.hardware import device_name, matmul_peak, pick_device, synchronize
from isoflop.train.model.gpt import GPT

DECODES = ((1, 64), (4, 64), (16, 64), (64, 64), (1, 512), (4, 512), (16, 512))
PREFILLS = ((1, 16), (1, 64), (1, 256), (16, 256))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes/s of reading, the best of some rounds."""
    numbers = torch.ones((1 << 28) if device.type == "cpu" else (1 << 31), dtype=torch.uint8, device=device)
    numbers = numbers.view(torch.float32)
    best = float("inf")
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        numbers.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return numbers.numel() * 4 / best


def served(gpt: GPT) -> serving.Served:
    """The model as `fit.serving` counts it: a table that is looked up is no matrix."""
    config, size = gpt.config, gpt.embedding.weight.element_size()
    matrices = sum(p.numel() for p in gpt.blocks.parameters() if p.ndim == 2) + gpt.head.weight.numel()
    kept, width = config.num_kv_heads * config.head_dim, config.heads * config.head_dim
    return serving.Served(matrices, 2 * config.depth * kept, config.depth * width, size, size)


def rounds_of(gpt: GPT, batch: int, context: int, count: int) -> list[float]:
    """Seconds of prefill, and of each of `count` - 1 decode passes after it, for random prompts of one length."""
    device = gpt.cos.device
    tokens = torch.randint(1, gpt.config.vocab_size or 0, (batch, context), generator=torch.Generator().manual_seed(0))
    generation = Generation(gpt, tokens.tolist(), count, gpt.max_length, device=device, batch_tokens=1 << 20)
    seconds = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        generation.step(lambda new: False)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(device: torch.device, precision: str, rounds: int) -> dict[str, Any]:
    """Peaks, and a row a pass."""
    dtype = DTYPES[precision]
    gpt = GPT(MODEL, 1024).to(device=device, dtype=dtype).eval()
    peak, speed = max(matmul_peak(device, dtype) for _ in range(10)), bandwidth(device, rounds)
    model, machine = served(gpt), serving.Device(peak, speed)
    rounds_of(gpt, 4, 64, 4)  # the first passes of a process are slower than any
    rows = []
    for batch, context in DECODES:
        seconds = min(rounds_of(gpt, batch, context, rounds + 1)[1:])
        expected = serving.decode(model, machine, batch, context + rounds / 2)
        rows.append(row("decode", batch, context, seconds, expected))
    for batch, prompt in PREFILLS:
        seconds = min(rounds_of(gpt, batch, prompt, 1)[0] for _ in range(max(3, rounds // 4)))
        rows.append(row("prefill", batch, prompt, seconds, serving.prefill(model, machine, batch, prompt)))
    return {
        "device": device_name(device), "precision": precision, "N": np.asarray(model.N).item(),
        "matmul_flops_per_s": peak, "bytes_per_s": speed, "balance": machine.balance, "passes": rows,
    }  # fmt: skip


def row(kind: str, batch: int, context: int, seconds: float, expected: serving.Pass) -> dict[str, Any]:
    return {
        "pass": kind, "batch": batch, "context": context, "ms": 1e3 * seconds,
        "tokens_per_s": float(expected.tokens) / seconds,
        "mflops_per_token": float(expected.flops / expected.tokens) / 1e6,
        "mb_per_token": float(expected.bytes / expected.tokens) / 1e6,
        "intensity": float(expected.flops / expected.bytes),
        "bound": "arithmetic" if expected.bound else "memory", "share_of_roofline": float(expected.seconds) / seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(pick_device(options.device, "--device"), options.precision, options.rounds)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(
        f"{result['device']}, {options.precision}, N = {result['N']:,.0f}: {result['matmul_flops_per_s'] / 1e9:,.0f} "
        f"GFLOP/s, {result['bytes_per_s'] / 1e9:,.1f} GB/s, balance {result['balance']:.1f} FLOPs a byte"
    )
    print("pass     batch context       ms  tokens/s  MFLOP/token  MB/token  FLOP/byte  bound       of roofline")
    for r in result["passes"]:
        print(
            f"{r['pass']:8} {r['batch']:5} {r['context']:7} {r['ms']:8.2f} {r['tokens_per_s']:9,.0f} "
            f"{r['mflops_per_token']:12.1f} {r['mb_per_token']:9.2f} {r['intensity']:10.1f}  {r['bound']:10} "
            f"{r['share_of_roofline']:12.0%}"
        )


if __name__ == "__main__":
    main()
