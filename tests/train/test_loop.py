"""Every field that a run writes equals a direct computation, and every failure states its reason."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.checkpoint.heldout import score_windows
from isoflop.train.config import DataConfig, RunConfig, run_id
from isoflop.train.data.loader import TrainStream, validation_windows
from isoflop.train.data.shards import prepare
from isoflop.train.errors import UserError
from isoflop.train.files import JsonLines, read_json_lines
from isoflop.train.flops import count_parameters, flops_6nd, flops_exact, training_flops_per_token
from isoflop.train.hardware import matmul_peak, pick_device
from isoflop.train.loop import Diverged, train
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.parallel.zero import StepResult
from isoflop.train.schedule import learning_rate_factor
from isoflop.train.stepper import Stepper
from small_runs import forty_steps


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    # Some letters have two bytes. A token is a byte, so bits per byte and per token differ only by document ends.
    config = replace(forty_steps(small_corpus(512, ["tensor", "Verlust", "größer", "of", "the"])), validations=3)
    config.parallel.threads = 1
    return config


@pytest.fixture
def config(base: RunConfig) -> RunConfig:
    return copy.deepcopy(base)


@pytest.fixture(scope="module")
def finished(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("run")
    return base, directory, train(base, directory, report=lambda line: None)


Finished = tuple[RunConfig, Path, dict[str, Any]]


def test_metrics_have_the_fields_of_the_contract_at_the_right_steps(finished: Finished) -> None:
    config, directory, _ = finished
    lines = read_json_lines(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 10, 14, 15, 20, 25, 27, 30, 35, 40]
    per_token = training_flops_per_token(config.model, 16)
    for line in lines:
        names = {"step", "tokens", "flops", "train_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "seconds"}
        names.add("smoothed_loss")
        scored = {"val_loss", "val_loss_se", "val_bpb"} if line["step"] in (14, 27, 40) else set()
        assert set(line) == names | scored
        assert line["tokens"] == 64 * line["step"]
        assert line["flops"] == per_token * line["tokens"]
        assert line["lr"] == config.optimizer.learning_rate * learning_rate_factor(config, line["step"] - 1)
        assert line["grad_norm"] > 0
        assert line["tokens_per_s"] > 0
        assert 0 < line["mfu"] < 2  # the peak is a short trial; more than twice it would be a wrong unit
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]


def test_the_summary_has_the_fields_of_the_contract(finished: Finished) -> None:
    config, directory, summary = finished
    assert json.loads((directory / "summary.json").read_text()) == summary
    last = read_json_lines(directory / "metrics.jsonl")[-1]
    for name in ("val_loss", "val_loss_se", "val_bpb", "seconds"):
        assert summary[name] == last[name]
    assert summary["D"] == 40 * 64
    assert summary["flops_6nd"] == flops_6nd(config)
    assert summary["flops_exact"] == flops_exact(config) == last["flops"]
    counted = count_parameters(config.model)
    assert (summary["N_total"], summary["N_non_embedding"]) == (counted.N_total, counted.N_non_embedding)
    assert summary["run_id"] == run_id(config)
    assert summary["checkpoint"] == "checkpoints/step_40"
    assert (directory / summary["checkpoint"]).is_dir()
    assert summary["device"].startswith("cpu")
    assert summary["warmup_share"] == 2 / 40


def test_the_smoothed_loss_is_that_of_every_step_whatever_is_logged(
    finished: Finished, config: RunConfig, tmp_path: Path
) -> None:
    _, _, summary = finished
    config.log_every, config.validations = 1, 1
    every_step = train(config, tmp_path, report=lambda line: None)
    smoothed = None
    for line in read_json_lines(tmp_path / "metrics.jsonl"):
        smoothed = line["train_loss"] if smoothed is None else 0.95 * smoothed + 0.05 * line["train_loss"]
    assert every_step["train_loss"] == pytest.approx(smoothed, rel=1e-12)
    assert summary["train_loss"] == every_step["train_loss"]


def test_validation_is_the_mean_its_error_and_bits_per_byte(finished: Finished) -> None:
    config, directory, summary = finished
    shards = prepare(config.data)
    windows = validation_windows(shards, 16, 512)
    assert len(windows) == 32
    loaded = load_for_evaluation(directory)
    losses, text = [], 0
    with torch.no_grad():
        for window in windows:
            logits = loaded.model(torch.from_numpy(window[None, :-1]))[0].double()
            losses.append(-logits.log_softmax(-1)[np.arange(16), window[1:]].sum().item())
            text += int((window[1:] != shards.tokenizer.end_of_document).sum())  # a byte token is a byte of text
    per_token = np.array(losses) / 16
    # fp32 logits of a batch of 32 windows against those of one window at a time.
    assert summary["val_loss"] == pytest.approx(per_token.mean(), rel=1e-6)
    assert summary["val_loss_se"] == pytest.approx(per_token.std(ddof=1) / math.sqrt(32), rel=1e-5)
    assert text < 512
    assert summary["val_bpb"] == pytest.approx(sum(losses) / math.log(2) / text, rel=1e-6)
    assert score_windows(loaded)[2]["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)


def test_a_single_window_has_no_standard_error_in_valid_json(config: RunConfig, tmp_path: Path) -> None:
    config.data.validation_tokens = 16
    assert train(config, tmp_path, report=lambda line: None)["val_loss_se"] is None

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for path in [*tmp_path.glob("*.json*"), *tmp_path.rglob("trainer.json")]:
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(line, parse_constant=refuse)


def test_a_run_in_micro_batches_is_the_run_in_whole_batches(
    finished: Finished, config: RunConfig, tmp_path: Path
) -> None:
    config.parallel.micro_batch_size = 1
    train(config, tmp_path, report=lambda line: None)
    whole, parts = (read_json_lines(path / "metrics.jsonl") for path in (finished[1], tmp_path))
    for ours, theirs in zip(parts, whole, strict=True):
        # fp32 sums in another order; forty steps of Adam let the rounding grow.
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)


def test_the_first_step_follows_the_stream_and_the_gradient(config: RunConfig) -> None:
    shards = prepare(config.data)
    rows = torch.from_numpy(TrainStream(shards, 16, config.seed).batch(0, 4))
    fresh = build_model(config.model, config.optimizer, 16, config.seed).double()
    expected = torch.nn.functional.cross_entropy(fresh(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    expected.backward()
    total = math.sqrt(sum(float(p.grad.square().sum()) for p in fresh.parameters() if p.grad is not None))
    stepper = Stepper(config, Mesh(), torch.device("cpu"), TrainStream(shards, 16, config.seed))
    stepper.start()
    result = stepper.step(0)
    # fp32 against float64: a few roundings of 6e-8 in a row.
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert result.norm.item() == pytest.approx(total, rel=1e-5)
    assert not torch.equal(stepper.gpt.embedding.weight, fresh.embedding.weight.float())


def with_losses(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Replace the losses of some of the real steps (0-based)."""
    real = Stepper.step

    def step(self: Stepper, index: int) -> StepResult:
        result = real(self, index)
        return replace(result, loss=torch.tensor(losses[index])) if index in losses else result

    monkeypatch.setattr(Stepper, "step", step)


def test_a_loss_that_is_no_number_ends_the_run_before_a_checkpoint_and_names_the_step(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.checkpoint.every_steps = 6
    with_losses(monkeypatch, {16: math.inf})  # between two logged lines
    with pytest.raises(Diverged, match="inf at step 17"):
        train(config, tmp_path, report=lambda line: None)
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [5, 10, 14, 15]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_12", "step_6"]  # not step_18
    assert not (tmp_path / "summary.json").exists()


def test_a_loss_that_leaves_its_band_ends_the_run(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From about 6.5, one loss of 100 lifts the mean by 5 % of 93, which is above the band of 3 nats.
    with_losses(monkeypatch, {7: 100.0})
    with pytest.raises(Diverged, match=r"at step 8, more than max_loss_rise 3"):
        train(config, tmp_path, report=lambda line: None)
    config.max_loss_rise = 10.0
    train(config, tmp_path / "wide", report=lambda line: None)


def test_epochs_are_said_and_recorded(config: RunConfig, tmp_path: Path) -> None:
    unique = TrainStream(prepare(config.data), 16, 0).unique_tokens
    config.optimizer.batch_size = 64
    config.tokens, config.log_every, config.validations = int(1.5 * unique), 10_000, 1
    messages: list[str] = []
    summary = train(config, tmp_path, report=messages.append)
    assert f"{config.D / unique:.2f} epochs" in messages[0]
    assert summary["epochs"] == config.D / unique > 1.49
    assert summary["unique_tokens"] == unique


def test_a_torn_last_line_is_cut_before_the_next_is_written(finished: Finished, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = (finished[1] / "metrics.jsonl").read_text()
    path.write_text(whole + '{"step": 41, "train_l')
    assert len(read_json_lines(path)) == 10  # a concurrent reader sees whole lines only
    lines = JsonLines(path)
    lines.write({"step": 41})
    lines.close()
    assert path.read_text() == whole + '{"step": 41}\n'
    for torn in ("", '{"st'):
        path.write_text(torn)
        lines = JsonLines(path)
        lines.write({"step": 1})
        lines.close()
        assert path.read_text() == '{"step": 1}\n'


def test_what_does_not_fit_together_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config.model.vocab_size = 300
    with pytest.raises(UserError, match=r"model\.vocab_size is 300; the tokenizer 'bytes' has 256 tokens"):
        train(config, tmp_path / "run", report=lambda line: None)
    config.model.vocab_size = 256
    config.data.sequence_length = config.data.validation_tokens = 10**6
    with pytest.raises(UserError, match=r"data\.sequence_length is 1000000"):
        train(config, tmp_path / "run", report=lambda line: None)
    config.data.sequence_length, config.data.path = 16, str(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        train(config, tmp_path / "run", report=lambda line: None)
    assert not (tmp_path / "run").exists()  # nothing half-written
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"parallel\.device is 'cuda'"):
            pick_device("cuda")


def test_measuring_the_peak_moves_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert matmul_peak(torch.device("cpu"), torch.float32, seconds=0.01) > 1e8
    assert torch.equal(torch.get_rng_state(), before)


def test_a_caller_is_told_that_work_without_steps_goes_on(config: RunConfig, tmp_path: Path) -> None:
    config.data.cache_dir, config.tokens = str(tmp_path / "cache"), 4 * 64
    lines = tmp_path / "metrics.jsonl"
    moments: set[bool] = set()
    train(config, tmp_path, report=lambda line: None, alive=lambda: moments.add(lines.exists()))
    assert moments == {False, True}  # while text is prepared, and while the held-out set is scored
