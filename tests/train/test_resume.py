"""A run that was stopped, or killed with SIGKILL, and resumed gives the same bits as one that was left alone."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from isoflop.train import loop
from isoflop.train.config import CheckpointConfig, DataConfig, RunConfig, from_dict, to_dict
from isoflop.train.files import read_json_lines
from isoflop.train.loop import Stopped, train
from small_runs import assert_same_run, forty_steps, stop_after

STEPS = 24


@pytest.fixture(scope="module")
def run(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = replace(forty_steps(small_corpus(256)), tokens=STEPS * 64, log_every=1)
    config.model.depth, config.parallel.threads, config.parallel.micro_batch_size = 2, 1, 2
    config.checkpoint = CheckpointConfig(every_seconds=1e9, every_steps=4, keep=2)
    return config


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = copy.deepcopy(run)
    config.precision = getattr(request, "param", "bf16")
    directory = tmp_path_factory.mktemp(config.precision)
    train(config, directory, report=lambda line: None)
    (directory / "config.json").write_text(json.dumps(to_dict(config)))
    return directory


def config_of(undisturbed: Path) -> RunConfig:
    return from_dict(RunConfig, json.loads((undisturbed / "config.json").read_text()))


@pytest.mark.parametrize("undisturbed", ["fp16"], indirect=True)
def test_a_run_stopped_at_random_steps_is_the_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    generator = random.Random(0)
    config = config_of(undisturbed)
    # How often a run saves does not change its numbers.
    config.checkpoint.every_steps = generator.choice([None, 3, 7])
    messages: list[str] = []
    at = 0
    while at < STEPS:
        steps = generator.randrange(1, 12)
        at += steps
        if at >= STEPS:
            train(config, tmp_path, report=messages.append)
            break
        with pytest.raises(Stopped, match=f"stopped at step {at} of {STEPS}"):
            train(config, tmp_path, should_stop=stop_after(steps), report=messages.append)
        assert (tmp_path / "checkpoints" / f"step_{at}").is_dir()
    assert any("resumed from step_" in line for line in messages)
    assert_same_run(tmp_path, undisturbed)


def test_a_run_killed_at_random_moments_is_the_undisturbed_one(undisturbed: Path, tmp_path: Path) -> None:
    # SIGKILL from outside, at a random instant: within a step, a line of metrics, or a checkpoint being written.
    # The child sleeps a little after every step, so that the kill falls inside the run.
    def victim() -> None:
        train(config_of(undisturbed), tmp_path, report=lambda line: None, should_stop=lambda: bool(time.sleep(0.02)))

    generator = random.Random(0)
    for _ in range(2):
        child = multiprocessing.get_context("fork").Process(target=victim)
        child.start()
        deadline = time.monotonic() + 60
        logged = len(read_json_lines(tmp_path / "metrics.jsonl"))
        while len(read_json_lines(tmp_path / "metrics.jsonl")) == logged and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL  # it was still running
    train(config_of(undisturbed), tmp_path, report=lambda line: None)
    assert_same_run(tmp_path, undisturbed)


def test_a_run_whose_newest_checkpoint_is_damaged_goes_back_one(undisturbed: Path, tmp_path: Path) -> None:
    config = config_of(undisturbed)
    config.checkpoint.keep = 1
    with pytest.raises(Stopped):
        train(config, tmp_path, should_stop=stop_after(12), report=lambda line: None)
    # Damage that claims to be newer than anything the run will save for a while.
    good = tmp_path / "checkpoints" / "step_12"
    bad = good.with_name("step_21")
    bad.mkdir()
    (bad / "manifest.json").write_bytes((good / "manifest.json").read_bytes()[:100])
    messages: list[str] = []
    with pytest.raises(Stopped):
        train(config, tmp_path, should_stop=stop_after(5), report=messages.append)
    assert messages[0].startswith("checkpoint step_21 is damaged")
    assert messages[1].startswith("resumed from step_12")
    assert [path.name for path in good.parent.iterdir()] == ["step_17"]
    train(config, tmp_path, report=messages.append)
    assert_same_run(tmp_path, undisturbed)


def test_a_run_killed_before_its_summary_only_writes_the_summary(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(undisturbed)

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, report=lambda line: None)
    monkeypatch.undo()
    monkeypatch.setattr(loop.Trainer, "record_step", killed)  # not one more step
    train(config, tmp_path, report=lambda line: None)
    assert_same_run(tmp_path, undisturbed)
