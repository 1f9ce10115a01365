"""Counted parameters equal the model's, and counted FLOPs equal those of PyTorch's counter."""

from __future__ import annotations

import random

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from isoflop.train.flops import (
    count_parameters,
    flops_6nd,
    flops_exact,
    flops_optimizer,
    tokens_for_budget,
    training_flops_per_token,
)
from isoflop.train.model.parametrization import build_model
from random_models import random_architecture
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from zero_buffers import engine, random_gradients, take_step


@pytest.mark.parametrize("seed", range(12))
def test_parameters_are_those_of_the_model_less_the_padding(seed: int) -> None:
    config = random_architecture(random.Random(seed))
    model = build_model(config, OptimizerConfig(), 8, 0)
    padding = (config.padded_vocab_size - config.vocab_size) * config.width
    tables = 1 if config.tied_embeddings else 2
    total = sum(p.numel() for p in model.parameters())  # a tied table is one parameter
    counted = count_parameters(config)
    assert counted.N_total == total - tables * padding
    assert counted.N_non_embedding == counted.N_total - tables * config.vocab_size * config.width
    assert counted.N_kaplan == sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)


@pytest.mark.parametrize("seed", range(8))
def test_exact_flops_are_what_the_counter_sees_in_a_real_step(seed: int) -> None:
    config = random_architecture(random.Random(seed))
    generator = random.Random(seed)
    batch, time = generator.randrange(1, 5), generator.randrange(2, 30)
    model = build_model(config, OptimizerConfig(), time, 0)
    tokens = torch.randint(config.vocab_size or 0, (batch, time + 1), generator=torch.Generator().manual_seed(seed))
    # The counter has no formula for the CPU's fused attention and would count it as nothing. The math backend spells
    # the same products out as matrix products: the full T x T square, forward once and backward twice.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            model(tokens[:, :-1])
        with FlopCounterMode(display=False) as step:
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    tokens_seen = batch * time
    assert 3 * forward.get_total_flops() == training_flops_per_token(config, time) * tokens_seen
    assert step.get_total_flops() == training_flops_per_token(config, time) * tokens_seen


def test_a_budget_and_its_tokens_are_inverse_under_both_conventions() -> None:
    run = RunConfig(
        model=ModelConfig(width=32, heads=2, depth=3, vocab_size=300),
        data=DataConfig(sequence_length=64),
        optimizer=OptimizerConfig(batch_size=8),
        tokens=512 * 1000,
    )
    assert run.D == 512_000
    assert tokens_for_budget(run.model, 64, flops_exact(run)) == pytest.approx(run.D, rel=1e-12)
    assert tokens_for_budget(run.model, 64, flops_6nd(run), "6nd") == pytest.approx(run.D, rel=1e-12)
    assert flops_6nd(run) == 6 * count_parameters(run.model).N_total * 512_000


def test_d_is_rounded_up_to_whole_steps() -> None:
    run = RunConfig(data=DataConfig(sequence_length=10), optimizer=OptimizerConfig(batch_size=3))
    for tokens, steps in ((1, 1), (30, 1), (31, 2), (300, 10)):
        run.tokens = tokens
        assert (run.steps, run.D) == (steps, 30 * steps)


@pytest.mark.parametrize("seed", range(4))
def test_flops_of_the_optimizer_are_what_the_counter_sees_in_an_update(seed: int) -> None:
    model = random_architecture(random.Random(seed))
    optimizer = OptimizerConfig(kind="muon", batch_size=2)
    gpt, zero = engine(model, optimizer, torch.float32)
    gradients = random_gradients(gpt, 0)
    with FlopCounterMode(display=False) as counter:
        take_step(gpt, zero, gradients)
    run = RunConfig(model=model, data=DataConfig(sequence_length=4), optimizer=optimizer, tokens=8 * 3)
    assert flops_optimizer(run) == 3 * counter.get_total_flops()
    run.optimizer.kind = "adamw"
    assert flops_optimizer(run) == 0
