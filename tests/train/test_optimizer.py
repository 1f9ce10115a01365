"""Schedules against their closed forms, and the optimizer step against a plain float64 reference."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
from isoflop.train.errors import UserError
from isoflop.train.flops import count_parameters
from isoflop.train.planner.validation import validate
from isoflop.train.schedule import decay_steps, learning_rate_factor, same_until, trunk_steps, warmup_steps
from zero_buffers import engine, random_gradients, take_step

# One token a step, so that tokens and steps are the same.
ONE = {"data": DataConfig(sequence_length=1), "optimizer": OptimizerConfig(batch_size=1)}


def random_run(generator: random.Random, kind: str) -> RunConfig:
    share = generator.choice([0.0, 0.01, 0.05, 0.3])
    run = RunConfig(
        model=ModelConfig(width=generator.choice([8, 64]), heads=1, vocab_size=256),
        data=DataConfig(sequence_length=generator.choice([1, 16, 128])),
        optimizer=OptimizerConfig(batch_size=generator.choice([1, 8, 64])),
        schedule=ScheduleConfig(
            kind, generator.choice([0.0, 0.3, 1.0, 20.0]), generator.choice([None, 0, 1, 1000, 100_000, 10**9]), share,
            generator.choice([0.0, 0.1, 0.2, 0.7]), generator.choice([0.0, 0.1]),
        ),
        tokens=int(10 ** generator.uniform(0, 7)),
    )  # fmt: skip
    validate(run)
    return run


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
def test_every_schedule_keeps_its_promises_for_any_length(kind: str) -> None:
    generator = random.Random(0)
    for _ in range(300):
        run = random_run(generator, kind)
        schedule, warmup = run.schedule, warmup_steps(run)
        assert warmup <= schedule.warmup_max_share * run.steps
        per_parameter = schedule.warmup_per_parameter * count_parameters(run.model).N_total
        tokens = per_parameter if schedule.warmup_tokens is None else schedule.warmup_tokens
        assert warmup * run.batch_tokens <= tokens
        # The warm-up is as long as it may be: one step more would break one of the two bounds.
        longer = warmup + 1
        assert longer > schedule.warmup_max_share * run.steps or longer * run.batch_tokens > tokens
        steps = {0, 1, warmup - 1, warmup, run.steps // 2, run.steps - 1}
        factors = [learning_rate_factor(run, step) for step in sorted(steps) if 0 <= step < run.steps]
        assert all(0 < factor <= 1 for factor in factors), (run, factors)
        if kind == "constant":
            assert learning_rate_factor(run, run.steps - 1) == 1 or warmup == run.steps
        elif kind == "cosine" or decay_steps(run) > 0:
            # The rate arrives one step after the last: no step is spent at it.
            assert learning_rate_factor(run, run.steps) == pytest.approx(schedule.final_share, abs=1e-15)
            assert learning_rate_factor(run, run.steps - 1) >= schedule.final_share


def test_wsd_against_its_closed_form() -> None:
    run = RunConfig(**ONE, schedule=ScheduleConfig("wsd", warmup_tokens=30, final_share=0.1), tokens=1000)
    for step in range(1000):
        if step < 30:
            expected = (step + 1) / 31
        elif step < 800:
            expected = 1.0
        else:
            # Haegele et al. 2024: 1 - sqrt((n - (N - D)) / D), shifted so that no step is spent at 0.
            expected = 0.1 + 0.9 * (1 - math.sqrt((step - 799) / 201))
        assert learning_rate_factor(run, step) == pytest.approx(expected, rel=1e-14)


def test_cosine_against_its_closed_form() -> None:
    run = RunConfig(**ONE, schedule=ScheduleConfig("cosine", warmup_tokens=10**9, final_share=0.1), tokens=500)
    assert warmup_steps(run) == 50
    for step in range(50, 500):
        expected = 0.1 + 0.9 * math.cos(math.pi / 2 * (step - 50) / 450) ** 2  # half-angle form
        assert learning_rate_factor(run, step) == pytest.approx(expected, rel=1e-12)
    assert learning_rate_factor(run, 50) == 1


def test_two_runs_are_the_same_as_long_as_neither_has_begun_its_decay() -> None:
    model = ModelConfig(width=64, depth=4, vocab_size=256)

    def run(tokens: int, **schedule: Any) -> RunConfig:
        return RunConfig(
            **ONE, model=model, schedule=ScheduleConfig(**{"warmup_tokens": 30, **schedule}), tokens=tokens
        )

    long, short = run(1000), run(600)
    shared = same_until(long, short)
    assert shared == same_until(short, long) == trunk_steps(short) == 480
    rates = [[learning_rate_factor(config, step) for step in range(shared + 1)] for config in (long, short)]
    assert rates[0][:shared] == rates[1][:shared]
    assert rates[0][shared] != rates[1][shared]
    assert same_until(long, run(1000)) == 1000
    assert same_until(long, run(200)) == 0  # its warm-up, limited to a tenth, is shorter
    assert same_until(long, run(600, decay_share=0.1)) == 0
    assert same_until(run(1000, kind="cosine"), run(600, kind="cosine")) == 0
    # Without decay, runs are the same throughout; the last step stays the run's own, so that it can end with it.
    assert same_until(run(1000, kind="constant"), run(600, kind="constant")) == 599
    assert same_until(run(1000, decay_share=0.0), run(600, decay_share=0.0)) == 599
    seeded = run(600)
    seeded.seed = 1
    assert same_until(long, seeded) == 0
    cosmetic = run(600)
    cosmetic.parallel.threads, cosmetic.name = 7, "elsewhere"
    assert same_until(long, cosmetic) == 480


def test_a_warmup_and_a_cooldown_that_overlap_are_refused() -> None:
    run = RunConfig(schedule=ScheduleConfig(warmup_max_share=0.6, decay_share=0.5))
    with pytest.raises(UserError, match=r"schedule\.decay_share is 0\.5; .* at most 0\.4"):
        validate(run)
    run.schedule.kind = "cosine"
    validate(run)


@pytest.mark.parametrize("tied", [False, True])
def test_steps_equal_a_plain_float64_adamw_with_clipping(tied: bool) -> None:
    model = ModelConfig(width=16, depth=2, heads=2, vocab_size=20, qk_norm=True, tied_embeddings=tied)
    optimizer = OptimizerConfig(
        learning_rate=0.02, base_width=8, embedding_multiplier=2.0, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3,
        gradient_clip=0.05,
    )  # fmt: skip
    gpt, zero = engine(model, optimizer, torch.float64)
    weights = {name: p.detach().numpy().copy() for name, p in gpt.named_parameters()}
    first = {name: np.zeros_like(w) for name, w in weights.items()}
    second = {name: np.zeros_like(w) for name, w in weights.items()}
    for step, factor in enumerate([0.5, 1.0, 1.0, 0.3], start=1):
        size = 1e-4 if step == 3 else 1.0
        gradients = {name: size * gradient for name, gradient in random_gradients(gpt, step).items()}
        norm = take_step(gpt, zero, gradients, factor).norm
        expected_norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        assert norm.item() == pytest.approx(expected_norm, rel=1e-12)  # float64 sums in another order
        scale = min(1.0, optimizer.gradient_clip / (expected_norm + 1e-6))
        assert (scale < 1) == (step != 3)
        for name, w in weights.items():
            matrix = "norm" not in name and not name.startswith("embedding")
            rate = 0.02 * factor * (8 / 16 if matrix else 2.0)
            g = gradients[name].numpy() * scale
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.9 * second[name] + 0.1 * g**2
            update = (first[name] / (1 - 0.8**step)) / (np.sqrt(second[name] / (1 - 0.9**step)) + 1e-6)
            # Decoupled: the decay is of the weight before the step, and never enters the moments.
            weights[name] = w * (1 - rate * (0.3 if matrix else 0.0)) - rate * update
            actual = dict(gpt.named_parameters())[name].detach().numpy()
            # The fused update takes the divisor of clipped gradients in fp32: one part in 2e7 of an update.
            np.testing.assert_allclose(actual, weights[name], rtol=1e-8, atol=2e-8, err_msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_depth_transfer_is_a_factor_on_every_branch_in_the_forward_pass(tied: bool) -> None:
    """Compare CompleteP of Dey et al. 2025 (arXiv:2505.01618, Table 1) with ours, which is folded into weights."""
    model = ModelConfig(width=32, depth=6, heads=2, vocab_size=20, qk_norm=True, tied_embeddings=tied)
    optimizer = OptimizerConfig(
        learning_rate=0.01, base_width=16, base_depth=2, eps=1e-3, weight_decay=0.3, gradient_clip=0.0
    )
    m, w = 2 / 6, 32 / 16
    gpt, zero = engine(model, optimizer, torch.float64)
    factors = {
        n: m if n.endswith(("attention.out.weight", "mlp.down.weight")) else 1.0 for n, _ in gpt.named_parameters()
    }
    theirs = {name: (p.detach() / factors[name]).clone().requires_grad_() for name, p in gpt.named_parameters()}
    groups = []
    for name, p in theirs.items():
        matrix, inside = p.dim() == 2 and name != "embedding.weight", name.startswith("blocks.")
        groups.append({
            "params": [p],
            "lr": 0.01 / w if matrix else 0.01 * optimizer.embedding_multiplier,
            "weight_decay": 0.3 * w if matrix else 0.0,
            # Their head divides logits by w; ours has the factor folded in, as the branches have theirs.
            "eps": 1e-3 * (m if inside else 1.0) / (1.0 if name == "head.weight" else w),
        })  # fmt: skip
    adam = torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2), foreach=False)
    for step in range(4):
        tokens = torch.randint(20, (3, 9), generator=torch.Generator().manual_seed(step))
        with zero.gradients.micro_batch(last=True):
            gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        zero.set_rates(1.0)
        zero.step(torch.zeros(()))
        weights = {name: p * factors[name] for name, p in theirs.items()}
        logits = torch.func.functional_call(gpt, weights, (tokens[:, :-1],))[..., :20]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        adam.step()
        adam.zero_grad()
    for name, p in gpt.named_parameters():
        torch.testing.assert_close(p.detach(), theirs[name].detach() * factors[name], rtol=1e-10, atol=1e-10, msg=name)
