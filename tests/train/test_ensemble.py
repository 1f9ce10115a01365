"""Runs trained together are the runs trained alone, bit for bit: losses, files, resumes and ends, each its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, run_id
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.ensemble.ensemble import train_together
from isoflop.train.files import read_json
from isoflop.train.loop import Stopped, train
from small_runs import assert_same_run, forty_steps, stop_after

STEPS = 24


def silent(*args: Any) -> None:
    """Reports nothing."""


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = replace(forty_steps(small_corpus(256)), tokens=STEPS * 64, log_every=1)
    config.model = ModelConfig(
        width=16, depth=2, heads=2, kv_heads=1, vocab_size=256, qk_norm=True, qkv_bias=True, window=5,
        tied_embeddings=False,
    )  # fmt: skip
    config.data.separate_documents, config.parallel.threads = True, 1
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
