"""Our update by Muon beside torch.optim.Muon, in turn in one process: clipping, Muon, and AdamW for the rest.

    python benchmarks/optimizer.py [--device cpu] [--threads 1] [--rounds 15] [--json]

The peer orthogonalises the same matrices, each of a fused one by itself, has torch's fused AdamW for the other
parameters, and `clip_grad_norm_`. It always iterates in bf16; ours does so too, and once more in fp32 to say what that
costs. Gradients are there before the clock starts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from isoflop.bench.contenders import Contender, Row, contract_row, measuring_on, print_benchmark, take_turns
from isoflop.train.config import ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.flops import count_parameters, flops_optimizer
from isoflop.train.model.parametrization import empty_model, initial_weights, parameter_groups
from isoflop.train.model.shape import model_shape
from isoflop.train.parallel.layout import whole_placement
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.zero import Zero

MODELS = {
    "cpu": [
        ModelConfig(width=w, depth=d, heads=h, vocab_size=256) for w, d, h in ((32, 3, 2), (64, 4, 4), (256, 4, 4))
    ],
    "cuda": [ModelConfig(width=w, depth=12, heads=w // 64, vocab_size=32768) for w in (256, 768, 1536)],
}


def ours(model: ModelConfig, precision: str, device: torch.device) -> Callable[[], None]:
    options = OptimizerConfig(kind="muon", iteration_precision=precision)
    gpt = empty_model(model, options, 8)
    placements = {name: whole_placement(p.shape) for name, p in gpt.named_parameters()}
    zero = Zero(
        gpt, parameter_groups(gpt, options), placements, Mesh(), stage=0, dtype=torch.float32, optimizer=options,
        bucket_mb=25.0, device=device,
    )  # fmt: skip
    zero.load(initial_weights(model, options, 0))
    with zero.gradients.micro_batch(last=True):
        torch.stack([p.square().sum() for p in gpt.parameters()]).sum().backward()
    zero.set_rates(1e-3)
    loss = torch.zeros((), device=device)

    def step() -> None:
        zero.step(loss)

    return step


def theirs(model: ModelConfig, device: torch.device) -> Callable[[], None]:
    options = OptimizerConfig(kind="muon")
    matrices, others = list[torch.Tensor](), list[torch.Tensor]()
    table = {parameter.name: parameter for parameter in model_shape(model).parameters}
    for name, weights in initial_weights(model, options, 0):
        whole = table[name].role in ("first", "last")
        parts = weights.split([part.rows for part in table[name].parts]) if whole else [weights]
        leaves = [part.clone().to(device).requires_grad_() for part in parts]
        (matrices if whole else others).extend(leaves)
    for leaf in [*matrices, *others]:
        leaf.grad = 2 * leaf.detach()
    muon = torch.optim.Muon(matrices, lr=1e-3)
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_([*matrices, *others], options.gradient_clip)
        muon.step()
        adamw.step()

    return step


def measure(device: str, threads: int, rounds: int) -> list[Row]:
    rows = []
    with measuring_on(device, threads) as place:
        for model in MODELS[place.type]:
            N = count_parameters(model).N_total
            for precision in ("bf16", "fp32"):
                mine, peer = Contender("ours", ours(model, precision, place)), Contender("", theirs(model, place))
                take_turns([mine, peer], rounds, 10, place)
                case = f"update by Muon, {precision}, width {model.width}, depth {model.depth}, N={N:.2e}"
                row = contract_row(case, 1, "updates/s", mine.seconds, peer.seconds, "torch.optim.Muon", place)
                run = RunConfig(model=model, optimizer=OptimizerConfig(kind="muon"), tokens=1)
                rows.append(row | {"flops": flops_optimizer(run)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked.device, asked.threads, asked.rounds)
    if asked.json:
        print(json.dumps(rows, indent=1))
    else:
        print_benchmark(rows, "clipping, Muon for the matrices of the blocks, AdamW for the rest; gradients are given")


if __name__ == "__main__":
    main()
