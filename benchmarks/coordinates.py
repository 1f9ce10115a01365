"""Coordinate check: how far activations move in a few steps of training, over widths and depths.

    python benchmarks/coordinates.py [--kind muon] [--rate 3e-3] [--base-depth 4] [--untied] ...

For widths 16 to 256 at depth 4, and depths 2 to 16 at the base width: the root mean square of an activation on a batch
that is never trained on, and of its change since the start. Where rates transfer, both are the same at every size
(Yang et al. 2022, appendix D.1; Dey et al. 2025, section 3): the slope of their logarithm over the size's is 0.
`--base-depth 0` is width transfer alone.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import empty_model, initial_weights, parameter_groups
from isoflop.train.parallel.layout import whole_placement
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.zero import Zero
from torch import Tensor

WIDTHS, DEPTHS = (16, 32, 64, 128, 256), (2, 4, 8, 16)
WIDTH, LENGTH, BATCH = 64, 64, 8
HEAD = 16  # of every width, so that attention is the same product at all of them

Sizes = dict[tuple[str, str], float]  # root mean squares by activation, of it (size) and of its change


def watch(gpt: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """The residual stream, what the branches in its middle and the head read of it, and the logits."""
    seen: dict[str, Tensor] = {}
    modules: dict[str, Any] = {
        "embedding": gpt.embedding,
        "middle of the stream": gpt.blocks[len(gpt.blocks) // 2 - 1],
        "end of the stream": gpt.blocks[-1],
        "norm in the middle": gpt.blocks[len(gpt.blocks) // 2].attention_norm,
        "last norm": gpt.norm,
    }
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out.detach().clone()))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        seen["logits"] = gpt(tokens)[..., : gpt.config.vocab_size]
    for hook in hooks:
        hook.remove()
    return seen


def changes(model: ModelConfig, optimizer: OptimizerConfig, steps: int, seed: int) -> Sizes:
    gpt = empty_model(model, optimizer, LENGTH)
    placements = {name: whole_placement(p.shape) for name, p in gpt.named_parameters()}
    zero = Zero(
        gpt, parameter_groups(gpt, optimizer), placements, Mesh(), stage=0, dtype=torch.float32, bucket_mb=1.0,
        optimizer=replace(optimizer, gradient_clip=0.0), device=torch.device("cpu"),
    )  # fmt: skip
    zero.load(initial_weights(model, optimizer, seed))
    gpt.place_angles(torch.device("cpu"))
    source = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - LENGTH - 1, (steps + 1, BATCH), generator=generator)
    batches = torch.stack([torch.stack([source[i : i + LENGTH + 1] for i in row]) for row in starts.tolist()])
    before = watch(gpt, batches[-1, :, :-1])
    for batch in batches[:-1]:
        with zero.gradients.micro_batch(last=True):
            gpt.loss(batch[:, :-1], batch[:, 1:]).backward()
        zero.set_rates(1.0)
        zero.step(torch.zeros(()))
    found = {}
    for name, after in watch(gpt, batches[-1, :, :-1]).items():
        found[name, "size"] = float(after.square().mean().sqrt())
        found[name, "change"] = float((after - before[name]).square().mean().sqrt())
    return found


def slopes(of_size: Mapping[int, Sizes]) -> Sizes:
    """Of log root mean square over log size, through all sizes."""
    sizes = np.log(list(of_size))
    keys = next(iter(of_size.values()))
    return {key: float(np.polyfit(sizes, np.log([each[key] for each in of_size.values()]), 1)[0]) for key in keys}


def measure(
    axis: str, optimizer: OptimizerConfig, tied: bool, steps: int, seeds: int
) -> dict[int, dict[tuple[str, str], float]]:
    """Geometric means over seeds, by width or depth."""
    of_size: dict[int, Sizes] = {}
    for size in WIDTHS if axis == "width" else DEPTHS:
        width, depth = (size, 4) if axis == "width" else (WIDTH, size)
        model = ModelConfig(width=width, depth=depth, heads=width // HEAD, vocab_size=256, tied_embeddings=tied)
        logs = defaultdict[tuple[str, str], list[float]](list)
        for seed in range(seeds):
            for key, value in changes(model, optimizer, steps, seed).items():
                logs[key].append(np.log(value))
        of_size[size] = {key: float(np.exp(np.mean(values))) for key, values in logs.items()}
    return of_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="adamw")
    parser.add_argument("--multiplier", type=float, default=3.0, help="rate of muon's matrices over --rate")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--base-depth", type=int, default=4)
    parser.add_argument("--untied", action="store_true")
    asked = parser.parse_args()
    optimizer = OptimizerConfig(asked.rate, base_width=WIDTH, base_depth=asked.base_depth or None, kind=asked.kind)
    optimizer.matrix_multiplier = asked.multiplier
    for axis in ("width", "depth"):
        of_size = measure(axis, optimizer, not asked.untied, asked.steps, asked.seeds)
        print(f"\n{axis:22} {'':6} {'slope':>7}   root mean square at {', '.join(map(str, of_size))}")
        for key, slope in slopes(of_size).items():
            print(
                f"{key[0]:22} {key[1]:6} {slope:+7.3f}   " + " ".join(f"{each[key]:8.4f}" for each in of_size.values())
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
