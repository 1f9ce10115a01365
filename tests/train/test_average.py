"""Weight averages equal plain sums over the saved weights, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from isoflop import fit
from isoflop.evaluate.checkpoint import Evaluator
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.checkpoint.heldout import score_windows
from isoflop.train.config import AverageConfig, CheckpointConfig, DataConfig, RunConfig, ScheduleConfig
from isoflop.train.errors import Stopped, UserError
from isoflop.train.files import read_json_lines
from isoflop.train.loop import train
from isoflop.train.optimizer.average import copies, newest_shares, whole_copies
from isoflop.train.planner.validation import validate
from isoflop.train.schedule import learning_rate_factor
from small_runs import forty_steps, stop_after

STEPS = 12


def points(shares: list[float], factors: list[float]) -> ScheduleConfig:
    return ScheduleConfig("points", shares=shares, factors=factors)


@pytest.fixture(scope="module")
def run(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = replace(forty_steps(small_corpus(256)), tokens=STEPS * 64, log_every=1, validations=4)
    config.model.depth, config.parallel.threads, config.schedule = 2, 1, ScheduleConfig(kind="constant")
    config.checkpoint = CheckpointConfig(every_seconds=1e9, every_steps=1, keep=STEPS)
    return config


def test_an_ema_has_the_mean_age_of_a_window_of_its_span() -> None:
    average, last = AverageConfig("ema", [0.05, 0.2, 0.9]), 4000
    for copy, span in enumerate(average.kept):
        weights = np.zeros(last)
        for step in range(1, last + 1):
            share = newest_shares(average, step)[copy]
            weights[: step - 1] *= 1 - share
            weights[step - 1] = share
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert weights @ (1 - np.arange(1, last + 1) / last) == pytest.approx(span / 2, rel=0.01)  # 1/last of rounding


@pytest.mark.parametrize("span", [0.05, 0.3, 0.9])
def test_a_window_is_a_plain_mean_of_one_to_two_spans(span: float) -> None:
    average, step_weights = AverageConfig("window", [0.5, span]), np.zeros((4, 500))
    for step in range(1, 501):
        for copy, share in enumerate(newest_shares(average, step)):
            step_weights[copy] *= 1 - share
            step_weights[copy, step - 1] += share
        weights = step_weights[whole_copies(average, step)[span]]
        inside = np.flatnonzero(weights)
        assert inside[-1] == step - 1
        assert len(inside) == inside[-1] - inside[0] + 1
        np.testing.assert_allclose(weights[inside], 1 / len(inside), rtol=1e-12)
        if step > 5 / span:  # earlier, a block is only a step or two
            assert span / (1 + span) - 1 / step <= len(inside) / step <= 1 - (1 + span) ** -2 + 2 / step


@pytest.fixture(scope="module")
def last_plain_weights(run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("plain")
    train(run, folder, report=lambda line: None)
    return _weights(load_for_evaluation(_step(folder, STEPS)).model)


@pytest.mark.parametrize("kind", ["ema", "window"])
def test_averages_are_those_of_the_saved_weights_and_change_no_other(
    run: RunConfig, kind: str, last_plain_weights: torch.Tensor, tmp_path: Path
) -> None:
    """Compare with float64 sums over the checkpoints of all steps, and with a checkpoint's own held-out loss."""
    averaged, kept, parts = replace(run, average=AverageConfig(kind, [0.2, 0.6])), tmp_path / "kept", tmp_path / "parts"
    summary = train(averaged, kept, report=lambda line: None)
    weights = [_weights(load_for_evaluation(_step(kept, step)).model) for step in range(1, STEPS + 1)]
    assert torch.equal(weights[-1], last_plain_weights)
    lines = {line["step"]: line for line in read_json_lines(kept / "metrics.jsonl")}
    sums = torch.zeros(copies(averaged.average), len(weights[0]), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        for copy, share in enumerate(newest_shares(averaged.average, step)):
            sums[copy] = (1 - share) * sums[copy] + share * weights[step - 1].double()
        for span, copy in whole_copies(averaged.average, step).items():
            loaded = load_for_evaluation(_step(kept, step), average=span)
            # Weights are of order 0.1 to 1, and some 12 sums round in fp32.
            torch.testing.assert_close(_weights(loaded.model).double(), sums[copy], rtol=0, atol=1e-6)
            if (name := f"val_loss_{kind}_{span:g}") in lines[step]:
                assert lines[step][name] == pytest.approx(score_windows(loaded)[2]["val_loss"], rel=1e-6)
                assert step < STEPS or summary[name] == lines[step][name]
    assert sum(f"val_loss_{kind}_0.2" in line for line in lines.values()) == averaged.validations
    # A resumed run keeps them to the bit.
    with pytest.raises(Stopped):
        train(averaged, parts, stop_after(7), lambda line: None)
    train(averaged, parts, report=lambda line: None)
    files = [_step(folder, STEPS) / "optimizer.safetensors" for folder in (kept, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    # A checkpoint is scored by its average.
    scores = [Evaluator({}, average=average).evaluate(kept, tmp_path / "scores.json") for average in (None, 0.2)]
    losses = [score["held_out"]["val_loss"] for score in scores]
    assert losses == pytest.approx([summary["val_loss"], summary[f"val_loss_{kind}_0.2"]], rel=1e-6)
    assert scores[0]["checkpoint_sha256"] != scores[1]["checkpoint_sha256"]
    with pytest.raises(UserError, match=r"average is 0.3; .* has averages of spans: 0.2, 0.6"):
        load_for_evaluation(kept, average=0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"average": AverageConfig("ema", [])}, r"average.spans is \[\]"),
        ({"average": AverageConfig("window", [1.0])}, "average.spans contains 1.0"),
        ({"schedule": ScheduleConfig("points")}, "schedule.shares is None"),
        ({"schedule": points([0, 0.9, 0.5, 1], [1, 1, 1, 0])}, "schedule.shares"),
        ({"schedule": points([0, 1], [2, 0])}, "schedule.factors"),
        ({"schedule": points([0, 1], [0, 0])}, "schedule.factors"),
    ],
)
def test_what_cannot_be_kept_or_followed_is_refused(run: RunConfig, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(replace(run, **change))  # type: ignore[arg-type]


def test_points_are_joined_by_straight_lines(run: RunConfig) -> None:
    schedule = replace(points([0, 0.25, 0.25, 1], [1, 0.5, 0.8, 0.1]), warmup_tokens=128)
    config = replace(run, schedule=schedule, tokens=102 * 64)
    factors = [learning_rate_factor(config, step) for step in range(102)]
    assert factors[:2] == [1 / 3, 2 / 3]
    places = np.linspace(0, 1, 100)
    line = np.where(places < 0.25, np.interp(places, [0, 0.25], [1, 0.5]), np.interp(places, [0.25, 1], [0.8, 0.1]))
    np.testing.assert_allclose(factors[2:], line, rtol=1e-12)


def _step(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step_{step}"


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for _, parameter in sorted(model.named_parameters())])


def test_the_best_schedule_of_a_law_is_followed_by_a_run(run: RunConfig) -> None:
    generator = np.random.default_rng(0)
    lr = 3e-3 * np.concatenate([np.arange(1, 11) / 11, np.ones(200), np.cumprod(1 - 0.03 * generator.random(190))])
    lr[300:] *= 0.5  # a sudden drop
    shares, factors = fit.schedule_points(lr)
    assert len(shares) < 80
    schedule = replace(points(shares, factors), warmup_tokens=10 * 64)
    config = replace(run, schedule=schedule, tokens=400 * 64)
    followed = 3e-3 * np.array([learning_rate_factor(config, step) for step in range(400)])
    np.testing.assert_allclose(followed, lr, atol=2e-3 * 3e-3)
