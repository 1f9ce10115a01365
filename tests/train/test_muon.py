"""Muon equals its published iteration in float64 and torch's own in bf16, and transfers over widths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from isoflop.train.config import ModelConfig, OptimizerConfig
from isoflop.train.model.shape import model_shape
from zero_buffers import engine, random_gradients, take_step

MODEL = ModelConfig(width=16, depth=2, heads=4, kv_heads=2, vocab_size=20, tied_embeddings=False, qk_norm=True)
MUON = OptimizerConfig(kind="muon", learning_rate=0.01, weight_decay=0.3, gradient_clip=0.0, matrix_multiplier=3.0)


def parts_of(model: ModelConfig) -> dict[str, list[slice]]:
    """Return the rows of each matrix that is fused in a parameter."""
    rows = {}
    for parameter in model_shape(model).parameters:
        if parameter.role in ("first", "last"):
            ends = np.cumsum([0, *(part.rows for part in parameter.parts)]).tolist()
            rows[parameter.name] = [slice(a, b) for a, b in pairwise(ends)]
    return rows


def published_iteration(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Run the iteration of https://kellerjordan.github.io/posts/muon in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_steps_equal_the_published_iteration_in_float64() -> None:
    gpt, zero = engine(MODEL, MUON, torch.float64)
    weights = {name: p.detach().numpy().copy() for name, p in gpt.named_parameters()}
    moments = {name: np.zeros_like(w) for name, w in weights.items()}
    for step, factor in enumerate([0.5, 1.0, 0.3], start=1):
        gradients = random_gradients(gpt, step)
        take_step(gpt, zero, gradients, factor)
        for name, parts in parts_of(MODEL).items():
            g, rate = gradients[name].numpy(), 0.01 * 3.0 * factor
            moments[name] = 0.95 * moments[name] + 0.05 * g
            update = 0.05 * g + 0.95 * moments[name]
            for rows in parts:
                w = weights[name][rows]
                scale = (w.shape[0] / w.shape[1]) ** 0.5
                orthogonal = scale * published_iteration(update[rows], 5)
                weights[name][rows] = w - rate * (orthogonal + 0.3 * w)
            actual = dict(gpt.named_parameters())[name].detach().numpy()
            np.testing.assert_allclose(actual, weights[name], rtol=0, atol=1e-12, err_msg=name)


def test_bf16_steps_are_those_of_torch() -> None:
    model = ModelConfig(width=32, depth=2, heads=4, vocab_size=20)
    optimizer = OptimizerConfig(**{**vars(MUON), "iteration_precision": "bf16"})
    gpt, zero = engine(model, optimizer, torch.float32)
    named = dict(gpt.named_parameters())
    rate, parts = 0.01 * 3.0, parts_of(model)
    theirs = {(name, rows.start): named[name].detach()[rows].clone() for name in parts for rows in parts[name]}
    groups = []
    for weight in theirs.values():
        rows, columns = weight.shape
        # Theirs is "original": sqrt(max(1, rows / columns)) where ours is sqrt(rows / columns); decay is of `lr`.
        lr = rate * (rows / columns) ** 0.5 / max(1, rows / columns) ** 0.5
        groups.append({"params": [weight], "lr": lr, "weight_decay": 0.3 * rate / lr})
    muon = torch.optim.Muon(groups, momentum=0.95, nesterov=True, ns_steps=5)
    starts = {key: weight.clone() for key, weight in theirs.items()}
    for step in range(6):
        gradients = random_gradients(gpt, step)
        for (name, start), weight in theirs.items():
            weight.grad = gradients[name][start : start + len(weight)]
        muon.step()
        take_step(gpt, zero, gradients)
    for (name, start), weight in theirs.items():
        actual = named[name].detach()[start : start + len(weight)]
        # Six updates, each of elements that bf16 rounds to 8 bits at several places of the iteration.
        change = (weight - starts[name, start]).norm()
        assert change > 0.02
        assert (actual - weight).norm() < 2**-7 * change, name


def test_a_skipped_step_changes_nothing_and_matrices_have_one_moment() -> None:
    gpt, zero = engine(MODEL, OptimizerConfig(**{**vars(MUON), "gradient_clip": 0.5}), torch.float32)
    take_step(gpt, zero, random_gradients(gpt, 0))
    before = [held.values.clone() for held in zero.held()]
    bad = random_gradients(gpt, 1)
    bad["blocks.0.attention.out.weight"][0, 0] = float("nan")
    take_step(gpt, zero, bad)
    assert all(torch.equal(held.values, values) for held, values in zip(zero.held(), before, strict=True))
    assert zero.updates == 1
    kinds = {(held.name, held.kind) for held in zero.held()}
    assert ("blocks.0.mlp.down.weight", "exp_avg") in kinds
    assert ("blocks.0.mlp.down.weight", "exp_avg_sq") not in kinds
    assert ("head.weight", "exp_avg_sq") in kinds


def activation_changes(width: int, steps: int = 3) -> tuple[float, float, float]:
    """Return root mean squares after some steps: of the stream, its change, and that change in the logits."""
    sizes = []
    for seed in range(3):
        model = ModelConfig(width=width, depth=2, heads=width // 8, vocab_size=32, tied_embeddings=False)
        optimizer = OptimizerConfig(  # only the matrices learn visibly, so that the change is theirs
            kind="muon", learning_rate=1e-3, matrix_multiplier=30.0, base_width=16, embedding_multiplier=1e-3,
            weight_decay=0.0, gradient_clip=0.0,
        )  # fmt: skip
        gpt, zero = engine(model, optimizer, torch.float32)
        tokens = torch.randint(32, (1, 9), generator=torch.Generator().manual_seed(seed))
        head = torch.randn(gpt.head.weight.shape, generator=torch.Generator().manual_seed(seed)) / width
        gpt.head.weight.data.copy_(head)
        streams = list[torch.Tensor]()
        hook = gpt.norm.register_forward_pre_hook(lambda module, inputs, seen=streams: seen.append(inputs[0].detach()))
        for _ in range(steps + 1):
            with zero.gradients.micro_batch(last=True):
                gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            zero.set_rates(1.0)
            zero.step(torch.zeros(()))
        hook.remove()
        change = streams[-1] - streams[0]
        sizes.append([x.square().mean().sqrt().item() for x in (streams[-1], change, change @ head.T)])
    return tuple(np.mean(sizes, axis=0))


def test_one_rate_of_muon_changes_activations_alike_at_every_width() -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1, over a factor of 8 in width."""
    widths = [16, 64, 128]
    sizes = [activation_changes(width) for width in widths]
    stream, change, _ = np.polyfit(np.log(widths), np.log(sizes), 1)[0]
    assert abs(stream) < 0.05
    assert abs(change) < 0.05
