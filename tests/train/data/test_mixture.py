"""Mixtures of domains: planned shares at every step, the same windows whatever the weights, held-out text by domain."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.grid.content import Texts
from isoflop.train.checkpoint.heldout import score_domains
from isoflop.train.config import DataConfig, RunConfig, run_id, with_shares
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.mixture import HeldOutText, floor_sum, open_stream
from isoflop.train.data.shards import Shards
from isoflop.train.data.text import PLAIN, Text, prepare_text
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import Stopped, UserError
from isoflop.train.loop import train
from isoflop.train.planner.validation import validate
from small_runs import assert_same_run, forty_steps

LENGTH = 16
PER_DOMAIN = 16_016  # tokens; token i of the text is i, so that a window shows where it came from


def shards_of(first: int) -> Shards:
    tokens = np.arange(first, first + PER_DOMAIN + 1, dtype=np.uint16)
    return cast(Shards, SimpleNamespace(train=tokens, validation=tokens % 200, tokenizer=ByteTokenizer()))


TEXT: Text = {name: shards_of(k * PER_DOMAIN) for k, name in enumerate(("a", "b", "c"))}


def run_of(weights: dict[str, float], tokens: int = 8 * LENGTH * 1000, seed: int = 3, **data: Any) -> RunConfig:
    domains = {name: {"path": name, "weight": weight, **data.pop(name, {})} for name, weight in weights.items()}
    config = DataConfig(corpus="mixture", domains=domains, sequence_length=LENGTH, validation_tokens=480, **data)
    run = RunConfig(data=config, tokens=tokens, seed=seed)
    run.optimizer.batch_size = 8
    return run


def windows_of(run: RunConfig, steps: int) -> dict[str, list[int]]:
    """Return the first tokens of the windows that a run reads of each domain, in order."""
    stream = open_stream(run, TEXT)
    first = np.concatenate([stream.batch(step, 8)[:, 0] for step in range(steps)])
    return {name: [int(token) for token in first if token // PER_DOMAIN == k] for k, name in enumerate(TEXT)}


def test_floor_sum_is_the_sum() -> None:
    draw = random.Random(0).randrange
    for _ in range(200):
        n, m, a, b = draw(40), draw(1, 50), draw(90), draw(90)
        assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_every_prefix_has_the_planned_shares(seed: int) -> None:
    read = windows_of(run_of({"a": 0.7, "b": 0.3, "c": 0}, seed=seed), 1000)
    assert not read["c"]
    stream = open_stream(run_of({"a": 0.7, "b": 0.3, "c": 0}, seed=seed), TEXT)
    in_a = np.concatenate([stream.batch(step, 8)[:, 0] for step in range(1000)]) < PER_DOMAIN
    for rows, tolerance in ((80, 0.02), (800, 0.005), (8000, 0.001)):  # 1 %, 10 % and all of the tokens
        assert abs(in_a[:rows].mean() - 0.7) < tolerance
    # Over any span, from any row, the count is off by about a row.
    counts = np.concatenate([[0], np.cumsum(in_a - 0.7)])
    assert counts.max() - counts.min() < 4


def test_ranks_restarts_and_single_domains_read_the_same_windows() -> None:
    run = run_of({"a": 0.5, "b": 0.2, "c": 0.3})
    whole = open_stream(run, TEXT)
    batches = [whole.batch(step, 8) for step in range(60)]
    for step in (59, 0, 33, 34):  # a fresh stream at any step, in two parts
        fresh = open_stream(run, TEXT)
        assert np.array_equal(np.concatenate([fresh.batch(step, 8, 0, 5), fresh.batch(step, 8, 5)]), batches[step])
    alone, plain = open_stream(run_of({"a": 1.0}), TEXT), TrainStream(TEXT["a"], LENGTH, 3)
    assert np.array_equal(alone.batch(200, 8), plain.batch(200, 8))


def test_runs_of_other_weights_and_caps_share_windows() -> None:
    less, more = windows_of(run_of({"a": 0.2, "b": 0.8}), 40), windows_of(run_of({"a": 0.6, "b": 0.4}), 40)
    assert more["a"][: len(less["a"])] == less["a"]
    assert less["b"][: len(more["b"])] == more["b"]
    caps = {
        cap: set(windows_of(run_of({"a": 1.0, "b": 1.0}, a={"unique_tokens": cap}), 300)["a"]) for cap in (320, 1600)
    }
    assert len(caps[320]) == 20
    assert caps[320] < caps[1600]
    # A small run repeats as a run of ten times its tokens would: a tenth of each domain.
    simulated = open_stream(run_of({"a": 1.0, "b": 1.0}, epochs_of=8 * LENGTH * 10_000), TEXT)
    assert simulated.described(8 * LENGTH * 1000)["unique_a"] == 100 * LENGTH
    assert simulated.epochs(8 * LENGTH * 1000) == pytest.approx(40)


def test_held_out_text_and_loss_depend_on_no_weight() -> None:
    runs = [
        run_of({"a": 0.9, "b": 0.1}, a={"unique_tokens": 320}),
        run_of({"a": 0.1, "b": 0.9}, target={"b": 3, "a": 1}),
    ]
    text = {name: TEXT[name] for name in ("a", "b")}
    uniform, weighted = (HeldOutText.of(run.data, text) for run in runs)
    assert np.array_equal(uniform.windows, weighted.windows)
    nats = np.arange(1.0, len(uniform.windows) + 1)
    for held_out, share in ((uniform, 0.5), (weighted, 0.25)):
        scores = score_domains(held_out, torch.from_numpy(nats))
        a, b = scores["val_loss_a"], scores["val_loss_b"]
        assert a == pytest.approx(nats[: len(nats) // 2].mean() / LENGTH)
        assert scores["val_loss"] == pytest.approx(share * cast(float, a) + (1 - share) * cast(float, b))
    assert set(held_out.parts) == {"a", "b"}
    assert PLAIN not in held_out.parts


def test_equal_mixtures_have_one_id_and_other_runs_keep_theirs() -> None:
    ids = {
        run_id(replace(run, data=with_shares(run.data)))
        for run in (run_of({"a": 1, "b": 3}), run_of({"a": 0.25, "b": 0.75}))
    }
    assert len(ids) == 1
    assert run_id(run_of({"a": 0.3, "b": 0.7})) not in ids
    assert run_id(RunConfig()) == run_id(RunConfig(data=DataConfig(domains=None, target=None, epochs_of=None)))


def test_training_on_a_mixture_resumes_with_the_same_bits(tmp_path: Path) -> None:
    for name, words in (("code", "def f(x):\n    return x\n"), ("prose", "It was a dark and stormy night. ")):
        (tmp_path / name).mkdir()
        for number in range(60):
            (tmp_path / name / f"{number}.txt").write_text(words * (20 + number))
    domains = {name: {"path": str(tmp_path / name), "weight": weight} for name, weight in (("code", 3), ("prose", 1))}
    data = DataConfig(
        corpus="mixture", domains=domains, sequence_length=16, validation_fraction=0.2, validation_tokens=640,
        tokenizer="bytes", cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    config = forty_steps(data)
    summary = train(config, tmp_path / "whole", report=lambda line: None)
    assert summary["val_loss"] == pytest.approx((summary["val_loss_code"] + summary["val_loss_prose"]) / 2)
    assert (summary["weight_code"], summary["weight_prose"]) == (0.75, 0.25)
    steps = iter(range(100))
    with pytest.raises(Stopped, match="step 17"):
        train(config, tmp_path / "stopped", should_stop=lambda: next(steps) == 16, report=lambda line: None)
    train(config, tmp_path / "stopped", report=lambda line: None)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the working directory one with two folders of text, A and B."""
    monkeypatch.chdir(tmp_path)
    for name in "AB":
        Path(name).mkdir()
        for number in range(40):
            Path(name, f"{number}.txt").write_text(f"{name} {number} " * 20)


def plan_and_open(data: dict[str, Any]) -> None:
    run = RunConfig(data=DataConfig(**data), tokens=4096)
    Texts().fill(run)
    validate(run)
    text = prepare_text(run.data)
    open_stream(run, text)
    HeldOutText.of(run.data, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domains": None}, "data.domains is None"),
        ({"domains": {"a": {"path": "A", "weight": 0}, "b": {"path": "B", "weight": 0}}}, "one of them above 0"),
        ({"domains": {"a": {"path": "A", "weight": -1}, "b": {"path": "B"}}}, "data.domains.a.weight is -1"),
        ({"domains": {"a": {"path": "A"}, "se": {"path": "B"}}}, "not be se"),
        ({"domains": {"a": {"path": "missing"}, "b": {"path": "B"}}}, "data.domains.a.path is"),
        ({"domains": {"a": {"path": "A", "wait": 1}}}, "data.domains.a.wait is not a field"),
        ({"target": {"c": 1}}, "data.target names 'c'; it must be one of the domains a, b"),
        (
            {"domains": {"a": {"path": "A", "unique_tokens": 10**7}, "b": {"path": "B"}}},
            "a.unique_tokens is 10,000,000",
        ),
        ({"domains": {"a": {"path": "A", "max_epochs": 0.1}, "b": {"path": "B"}}}, "data.domains.a.max_epochs is 0.1"),
        ({"validation_tokens": 16}, "one sequence of each domain"),
        ({"sequence_length": 2000, "validation_tokens": 4000}, "data.domains.a: data.sequence_length is 2000"),
        ({"corpus": "stdlib", "domains": None, "epochs_of": 3}, "unless data.corpus is mixture"),
    ],
)
@pytest.mark.usefixtures("folders")
def test_bad_mixtures_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    domains = {"a": {"path": "A"}, "b": {"path": "B"}}
    data = {"corpus": "mixture", "domains": domains, "sequence_length": 16, "validation_fraction": 0.2}
    with pytest.raises(UserError) as error:
        plan_and_open(data | {"cache_dir": "cache"} | changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("folders")
def test_domains_of_any_name_are_given_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["+grid=product", "grid.axes={data.domains.a.weight:[1,3],data.domains.b.unique_tokens:[320,640]}"]
    text = ["data=mixture", "data.domains={a:{path:A},b:{path:B}}", "data.domains.b.weight=2", "tokens=4096"]
    rest = ["sweep=s", "cluster=local", "cluster.flops_per_second=1e11", "data.validation_fraction=0.2", "dry_run=true"]
    assert sweep_main([*grid, *rest, *text]) == 0
    assert "4 runs" in capsys.readouterr().out
