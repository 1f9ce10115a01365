"""Runs trained together are the runs trained alone, bit for bit: losses, files, resumes and ends, each its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, run_id
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.ensemble.ensemble import train_together
from isoflop.train.ensemble.stacked import Rows, StackedGPT
from isoflop.train.files import read_json
from isoflop.train.loop import Stopped, train
from isoflop.train.model.parametrization import build_model, empty_model, output_scale
from small_runs import assert_same_run, forty_steps, stop_after

STEPS = 24


def silent(*args: Any) -> None:
    """Reports nothing."""


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = replace(forty_steps(small_corpus(256)), tokens=STEPS * 64, log_every=1)
    config.model.depth, config.parallel.threads = 2, 1
    config.optimizer = OptimizerConfig(batch_size=4, learning_rate=1e-3, base_depth=3)
    return config


def member(base: RunConfig, number: int) -> RunConfig:
    """A run that differs from its neighbours in everything that members may differ in."""
    config = copy.deepcopy(base)
    config.seed, config.tokens = number, (STEPS - 5 * number) * 64
    config.optimizer = replace(
        config.optimizer, learning_rate=1e-3 * (1 + number), weight_decay=0.1 * number, beta1=0.9 - 0.05 * number,
        eps=1e-8 * 10**number, gradient_clip=(1.0, 0.0, 0.3)[number], z_loss=(0.0, 1e-3, 0.0)[number],
        base_width=(16, 64, 64)[number], embedding_multiplier=4.0 - number,
    )  # fmt: skip
    config.schedule.kind = ("wsd", "cosine", "constant")[number]
    return config


@pytest.fixture(scope="module")
def configs(base: RunConfig) -> list[RunConfig]:
    return [member(base, number) for number in range(3)]


@pytest.fixture(scope="module")
def shards(base: RunConfig) -> Shards:
    return prepare(base.data)


@pytest.fixture(scope="module")
def alone(configs: list[RunConfig], shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every member trained by itself."""
    folders = [tmp_path_factory.mktemp("alone") for _ in configs]
    for config, folder in zip(configs, folders, strict=True):
        train(config, folder, report=silent, shards=shards)
    return folders


def test_a_run_goes_on_in_an_ensemble_and_a_member_goes_on_alone(
    configs: list[RunConfig], shards: Shards, alone: list[Path], tmp_path: Path
) -> None:
    folders = [tmp_path / run_id(config) for config in configs]
    ended = train_together(configs, folders, should_stop=stop_after(4), report=silent, shards=shards)
    assert [how.kind for how in ended] == ["stopped"] * 3
    for config, folder, count in zip(configs, folders, [1, 3, 9], strict=True):  # members of different steps
        with pytest.raises(Stopped):
            train(config, folder, should_stop=stop_after(count), report=silent, shards=shards)
    order = list[int]()
    ended = train_together(configs, folders, report=silent, on_end=lambda i, how: order.append(i), shards=shards)
    assert order == [2, 1, 0]  # the smaller D leaves first, and the others go on
    for folder, reference, how in zip(folders, alone, ended, strict=True):
        assert_same_run(folder, reference)
        assert how.summary == read_json(folder / "summary.json")


@pytest.mark.parametrize(
    ("changes", "documents"),
    [
        ({"kv_heads": 1, "qk_norm": True, "tied_embeddings": False, "window": 5}, True),
        ({"vocab_size": 50, "vocab_multiple": 64, "qkv_bias": True, "head_size": 12}, False),
    ],
)
def test_losses_and_gradients_are_those_of_each_model_in_float64(changes: dict[str, Any], documents: bool) -> None:
    model = ModelConfig(**({"width": 16, "depth": 2, "heads": 2, "vocab_size": 64} | changes))
    optimizers = [OptimizerConfig(base_width=width) for width in (16, 64, 32)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, int(model.vocab_size or 0), (3, 2, 13), generator=generator)
    z_losses = [0.0, 1e-2, 1e-2]
    template = empty_model(model, optimizers[0], 12)
    template.place_angles(torch.device("cpu"))
    rows = Rows(template, optimizers, 25.0, torch.device("cpu"), torch.float64)
    gpts = [build_model(model, optimizer, 12, seed=0).double() for optimizer in optimizers]
    for row, gpt in enumerate(gpts):
        with torch.no_grad():
            for parameter in gpt.parameters():  # a head of zeros would leave everything else without a gradient
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        rows.load(row, gpt.named_parameters())
    for each in (template, *gpts):
        if documents:
            each.end_of_document = 7
    scales = torch.tensor([output_scale(model, optimizer) for optimizer in optimizers], dtype=torch.float64)
    stacked = StackedGPT(template, rows.parameters(slice(0, 3)), scales, torch.float64)
    losses = stacked.losses(tokens[..., :-1], tokens[..., 1:], z_losses)
    # Each member's loss has a slope of its own, so that a mix-up could not cancel.
    slopes = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    gradients = torch.autograd.grad(losses @ slopes, list(stacked.weights.values()))
    with torch.no_grad():
        each_loss = stacked.losses(tokens[..., :-1], tokens[..., 1:], [0.0] * 3, "none").view(3, 2, 12)
    for row, gpt in enumerate(gpts):
        expected = gpt.loss(tokens[row, :, :-1], tokens[row, :, 1:], z_loss=z_losses[row])
        (expected * slopes[row]).backward()
        assert losses[row].item() == pytest.approx(expected.item(), rel=1e-12)
        with torch.no_grad():
            scored = gpt.loss(tokens[row, :, :-1], tokens[row, :, 1:], reduction="none")
        torch.testing.assert_close(each_loss[row], scored, rtol=1e-12, atol=1e-12)
        for (name, parameter), found in zip(gpt.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(found[row], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_one_diverges_and_the_others_go_on(
    configs: list[RunConfig], shards: Shards, alone: list[Path], tmp_path: Path
) -> None:
    wild = copy.deepcopy(configs[1])
    wild.optimizer.learning_rate, wild.optimizer.gradient_clip = 1e6, 0.0
    runs = [configs[0], wild, configs[2]]
    folders = [tmp_path / str(number) for number in range(3)]
    ended = train_together(runs, folders, report=silent, shards=shards)
    assert [how.kind for how in ended] == ["done", "diverged", "done"]
    assert "at step" in str(ended[1].reason)
    assert not (folders[1] / "summary.json").exists()
    for number in (0, 2):
        assert_same_run(folders[number], alone[number])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_a_member_is_the_run_alone(
    precision: str, configs: list[RunConfig], shards: Shards, tmp_path: Path
) -> None:
    runs = copy.deepcopy(configs)
    for config in runs:
        config.parallel.device, config.parallel.tf32, config.precision = "cuda", False, precision
    ended = train_together(runs, [tmp_path / str(i) for i in range(3)], report=silent, shards=shards)
    for number, (config, how) in enumerate(zip(runs, ended, strict=True)):
        assert how.summary is not None, how.reason
        reference = train(config, tmp_path / f"alone{number}", report=silent, shards=shards)
        assert how.summary["val_loss"] == pytest.approx(
            reference["val_loss"], rel=1e-5 if precision == "fp32" else 2e-3
        )
