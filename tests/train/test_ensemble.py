"""Runs trained together are the runs trained alone, bit for bit: losses, files, resumes and ends, each its own."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train.checkpoint import storage
from isoflop.train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrackerConfig,
    run_id,
)
from isoflop.train.data.shards import Shards, prepare
from isoflop.train.ensemble import ensemble
from isoflop.train.ensemble.ensemble import Ended, SharedClock, train_together
from isoflop.train.ensemble.members import check_together
from isoflop.train.ensemble.stacked import Rows, StackedGPT, StackedStepper, shares
from isoflop.train.errors import UserError
from isoflop.train.files import file_sha256, read_json_lines
from isoflop.train.loop import Stopped, train
from isoflop.train.model.parametrization import build_model, empty_model, output_scale

STEPS = 60


def silent(*args: Any) -> None:
    """Reports nothing."""


@pytest.fixture(scope="module")
def base(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    return RunConfig(
        model=ModelConfig(width=16, depth=2, heads=2, vocab_size=256),
        data=small_corpus(256),
        optimizer=OptimizerConfig(batch_size=4, learning_rate=1e-3, base_depth=3),
        parallel=ParallelConfig(device="cpu", threads=1),
        checkpoint=CheckpointConfig(every_seconds=1e9),
        tracker=TrackerConfig(kind="none"),
        tokens=STEPS * 64,
        log_every=1,
    )  # fmt: skip


def member(base: RunConfig, number: int) -> RunConfig:
    """A run that differs from its neighbours in everything that members may differ in."""
    config = copy.deepcopy(base)
    config.seed, config.tokens = number, (STEPS - 7 * number) * 64
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


@pytest.fixture(scope="module")
def together(
    configs: list[RunConfig], shards: Shards, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], list[Ended], list[int]]:
    """All of them as one ensemble: directories, how they ended, and in which order."""
    root, order = tmp_path_factory.mktemp("together"), []
    folders = [root / run_id(config) for config in configs]
    ended = train_together(configs, folders, report=silent, on_end=lambda i, how: order.append(i), shards=shards)
    return folders, ended, order


Together = tuple[list[Path], list[Ended], list[int]]


CLOCK = ("seconds", "tokens_per_s", "mfu", "matmul_peak")


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in (*CLOCK, "ensemble")}


def assert_same_run(folder: Path, reference: Path) -> None:
    """Files of one run, trained in two ways: the same bits, but for clocks."""
    ours, theirs = (
        {line["step"]: without_clock(line) for line in read_json_lines(path / "metrics.jsonl")}
        for path in (folder, reference)
    )
    assert ours == theirs
    summaries = [without_clock(json.loads((path / "summary.json").read_text())) for path in (folder, reference)]
    assert summaries[0] == summaries[1]
    final = [path / summaries[0]["checkpoint"] for path in (folder, reference)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert file_sha256(final[0] / name) == file_sha256(final[1] / name)
    states = [without_clock(json.loads((path / "trainer.json").read_text())) for path in final]
    assert states[0] == states[1]


def test_every_member_of_an_ensemble_is_the_run_trained_alone(alone: list[Path], together: Together) -> None:
    folders, ended, order = together
    assert [how.kind for how in ended] == ["done"] * 3
    assert order == [2, 1, 0]  # the smaller D leaves first, and the others go on
    for folder, reference, how in zip(folders, alone, ended, strict=True):
        assert_same_run(folder, reference)
        assert how.summary == json.loads((folder / "summary.json").read_text())
        assert how.summary["ensemble"] == 3


def test_members_under_muon_are_the_runs_trained_alone(
    configs: list[RunConfig], shards: Shards, tmp_path: Path
) -> None:
    runs = copy.deepcopy(configs)
    for number, config in enumerate(runs):
        config.tokens //= 3
        config.optimizer = replace(config.optimizer, kind="muon", momentum=0.95 - 0.3 * number, nesterov=number != 1)
    folders = [(tmp_path / f"{number}", tmp_path / f"{number}-alone") for number in range(3)]
    ended = train_together(runs, [folder for folder, _ in folders], report=silent, shards=shards)
    assert [how.kind for how in ended] == ["done"] * 3
    for config, (folder, reference) in zip(runs, folders, strict=True):
        reference.mkdir()
        # Half of it in one go, and the rest from its checkpoint.
        with pytest.raises(Stopped):
            train(config, reference, should_stop=after(9), report=silent, shards=shards)
        train(config, reference, report=silent, shards=shards)
        assert_same_run(folder, reference)
    runs[1].optimizer.iterations = 6
    with pytest.raises(UserError, match=r"optimizer\.iterations is 5 in run .* and 6 in run"):
        check_together(runs)


@pytest.mark.parametrize("first", ["alone", "together"])
def test_a_run_goes_on_in_an_ensemble_and_a_member_goes_on_alone(
    first: str, configs: list[RunConfig], shards: Shards, alone: list[Path], tmp_path: Path
) -> None:
    folders = [tmp_path / run_id(config) for config in configs]

    def one_by_one(steps: list[int]) -> None:
        for config, folder, count in zip(configs, folders, steps, strict=True):
            try:
                train(config, folder, should_stop=after(count), report=silent, shards=shards)
            except Stopped:
                continue

    if first == "alone":
        one_by_one([5, 13, 20])  # members of different steps
        ended = train_together(configs, folders, report=silent, shards=shards)
        assert [how.kind for how in ended] == ["done"] * 3
    else:
        ended = train_together(configs, folders, should_stop=after(17), report=silent, shards=shards)
        assert [(how.kind, how.reason) for how in ended] == [
            ("stopped", f"stopped at step 17 of {config.steps}") for config in configs
        ]
        one_by_one([10**9] * 3)
    for folder, reference in zip(folders, alone, strict=True):
        assert_same_run(folder, reference)


def after(steps: int) -> Any:
    """A should_stop that says yes from its `steps`-th question on."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= steps

    return should_stop


def test_a_run_that_lacks_its_summary_alone_takes_no_step(
    configs: list[RunConfig], shards: Shards, together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    for config, folder in zip(configs, together[0], strict=True):
        shutil.copytree(folder, tmp_path / run_id(config))
    (tmp_path / run_id(configs[1]) / "summary.json").unlink()
    monkeypatch.setattr(StackedStepper, "step", lambda *args: pytest.fail("a step was taken"))
    ended = train_together(configs, [tmp_path / run_id(c) for c in configs], report=silent, shards=shards)
    assert [how.kind for how in ended] == ["done"] * 3
    ours = json.loads((tmp_path / run_id(configs[1]) / "summary.json").read_text())
    assert ours["val_loss"] == json.loads((together[0][1] / "summary.json").read_text())["val_loss"]


VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 1, "qk_norm": True, "tied_embeddings": False},
    "window": {"window": 5, "vocab_size": 50, "vocab_multiple": 64},
    "biases": {"qkv_bias": True, "head_size": 12, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_length": 8},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("documents", [False, True])
def test_losses_and_gradients_are_those_of_each_model_in_float64(variant: str, documents: bool) -> None:
    model = ModelConfig(**({"width": 16, "depth": 2, "heads": 2, "vocab_size": 64} | VARIANTS[variant]))
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


def step_twice(configs: list[RunConfig], shards: Shards, poisoned: int | None) -> tuple[StackedStepper, list[Any]]:
    """Two steps, the second with a weight of one member not a number."""
    stepper = StackedStepper(configs, torch.device("cpu"), shards, silent)
    for each in stepper.members:
        each.start()
    stepper.step([0] * len(configs))
    if poisoned is not None:
        stepper.rows.weight[0][poisoned, 5] = math.nan
    return stepper, stepper.step([1] * len(configs))


def test_a_member_that_is_no_number_changes_no_bit_of_the_others_and_is_left_alone(
    configs: list[RunConfig], shards: Shards
) -> None:
    clean, good = step_twice(configs, shards, None)
    dirty, bad = step_twice(configs, shards, 1)
    assert [result.skipped.item() for result in bad] == [0, 1, 0]
    assert math.isnan(bad[1].loss.item())
    for row in (0, 2):
        assert good[row].loss.item() == bad[row].loss.item()
        assert good[row].norm.item() == bad[row].norm.item()
        for ours, theirs in zip(dirty.rows.held(row), clean.rows.held(row), strict=True):
            assert torch.equal(ours.values, theirs.values)
    assert dirty.rows.updates.tolist() == [2, 1, 2]
    stepper, _ = step_twice(configs, shards, None)
    before = [held.values.clone() for held in stepper.rows.held(1)]
    for grad in stepper.rows.grad:
        grad[1] = math.inf
    stepper.rows.step(slice(0, 3), [1.0] * 3, torch.ones(3))
    assert all(torch.equal(held.values, was) for held, was in zip(stepper.rows.held(1), before, strict=True))


def test_one_diverges_and_the_others_go_on(
    configs: list[RunConfig], shards: Shards, alone: list[Path], tmp_path: Path
) -> None:
    wild = copy.deepcopy(configs[1])
    wild.optimizer.learning_rate, wild.optimizer.gradient_clip = 1e6, 0.0
    runs = [configs[0], wild, configs[2]]
    ends: list[tuple[int, str]] = []
    folders = [tmp_path / str(number) for number in range(3)]
    ended = train_together(
        runs, folders, report=silent, on_end=lambda index, how: ends.append((index, how.kind)), shards=shards
    )
    assert ends == [(1, "diverged"), (2, "done"), (0, "done")]
    assert "at step" in str(ended[1].reason)
    assert not (folders[1] / "summary.json").exists()
    for number in (0, 2):
        assert_same_run(folders[number], alone[number])


def test_a_full_disk_under_one_member_fails_that_member(
    configs: list[RunConfig], shards: Shards, alone: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = storage.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.is_relative_to(tmp_path / "1"):
            raise OSError(28, "No space left on device", str(path))
        real(tensors, path)

    monkeypatch.setattr(storage, "save_file", full)
    runs = copy.deepcopy(configs)
    for config in runs:
        config.checkpoint.every_steps = 10
    said: list[tuple[int, str]] = []
    ended = train_together(
        runs,
        [tmp_path / str(i) for i in range(3)],
        report=lambda index, line: said.append((index, line)),
        shards=shards,
    )
    assert [how.kind for how in ended] == ["done", "failed", "done"]
    assert isinstance(ended[1].error, OSError)
    assert ended[1].error.errno == 28
    assert any(index == 1 and "Traceback" in line for index, line in said)
    assert list((tmp_path / "1" / "checkpoints").iterdir()) == []
    for number in (0, 2):
        assert_same_run(tmp_path / str(number), alone[number])


def test_an_error_of_the_step_itself_ends_all_that_are_left(
    configs: list[RunConfig], shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StackedGPT, "losses", no_memory)
    folders = [tmp_path / str(number) for number in range(3)]
    ended = train_together(configs, folders, report=silent, shards=shards)
    assert [how.kind for how in ended] == ["failed"] * 3
    assert str(ended[0].reason).startswith("out of memory in an ensemble of 3; a smaller one needs less")


def test_a_checkpoint_of_another_run_fails_its_member_alone(
    configs: list[RunConfig], shards: Shards, together: Together, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(together[0][2], tmp_path / "1")
    ended = train_together(configs, [tmp_path / str(i) for i in range(3)], report=silent, shards=shards)
    assert [how.kind for how in ended] == ["done", "failed", "done"]
    assert "belongs to another run: " in str(ended[1].reason)


def test_named_steps_are_saved_of_each_member(configs: list[RunConfig], shards: Shards, tmp_path: Path) -> None:
    runs = copy.deepcopy(configs)
    runs[0].checkpoint.at_steps, runs[1].checkpoint.every_steps = [4, 9], 15
    folders = [tmp_path / str(number) for number in range(3)]
    train_together(runs, folders, report=silent, shards=shards)
    steps = [sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir()) for folder in folders]
    assert steps == [[4, 9, 60], [45, 53], [46]]


def test_seconds_are_shared_out_among_those_who_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(ensemble.time, "perf_counter", lambda: now)
    clock = SharedClock(4)
    now += 8
    assert clock() == 2
    clock.leave()
    now += 9
    assert clock() == 5
    # What the four have paid is what has passed.
    assert 2 + 3 * 5 == 17


def test_shares_cover_all_members_evenly_and_keep_every_thread_busy() -> None:
    for members in range(1, 20):
        for at_once in (1, 2, 3, 100):
            for threads in (1, 2, 5):
                parts = shares(members, at_once, threads)
                sizes = [part.stop - part.start for part in parts]
                assert [i for part in parts for i in range(part.start, part.stop)] == list(range(members))
                assert max(sizes) - min(sizes) <= 1
                assert max(sizes) <= at_once
                assert len(parts) % threads == 0 or len(parts) == members


def test_threads_that_take_members_each_change_nothing(configs: list[RunConfig], shards: Shards) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            stepper, results = step_twice(configs, shards, None)
            assert len(stepper.stacks) == threads
            found.append([result.loss.item() for result in results])
            stepper.close()
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(("variant", "precision"), [*((name, "bf16") for name in VARIANTS), ("biases", "fp32")])
def test_a_member_of_any_shape_is_the_run_alone(
    variant: str, precision: str, base: RunConfig, shards: Shards, tmp_path: Path
) -> None:
    runs = [member(base, number) for number in (0, 2)]
    for config in runs:
        config.precision, config.validations, config.tokens = precision, 1, 20 * 64
        config.parallel.bucket_mb = 0.01  # several, which say how the gradient norm is summed
        config.model = replace(config.model, **(VARIANTS[variant] | {"vocab_size": 256}))
    folders = [tmp_path / str(number) for number in range(2)]
    train_together(runs, folders, report=silent, shards=shards)
    for config, folder in zip(runs, folders, strict=True):
        train(config, tmp_path / f"alone{config.seed}", report=silent, shards=shards)
        assert_same_run(folder, tmp_path / f"alone{config.seed}")


def test_what_cannot_be_trained_together_is_refused_in_a_sentence(base: RunConfig) -> None:
    def refused(match: str, *changes: tuple[str, Any]) -> None:
        runs = [member(base, 0), member(base, 1)]
        for name, value in changes:
            *groups, field = name.split(".")
            node: Any = runs[1]
            for group in groups:
                node = getattr(node, group)
            setattr(node, field, value)
        with pytest.raises(UserError, match=match) as caught:
            check_together(runs)
        assert "\n" not in str(caught.value)

    refused(r"^model\.width is 16 in run \w+ and 32 in run \w+; members of one ensemble must", ("model.width", 32))
    refused(r"^data\.sequence_length is 16 in run \w+ and 8 in run", ("data.sequence_length", 8))
    refused(r"^data\.fingerprint is None in run \w+ and 'other' in run", ("data.fingerprint", "other"))
    refused(r"^data\.path is '.*' in run \w+ and 'elsewhere' in run", ("data.path", "elsewhere"))
    refused(r"^optimizer\.batch_size is 4 in run \w+ and 8 in run", ("optimizer.batch_size", 8))
    refused(r"^precision is 'fp32' in run \w+ and 'bf16' in run", ("precision", "bf16"))
    refused(r"^parallel\.compile is False in run \w+ and True in run", ("parallel.compile", True))
    refused(r"precision is 'fp16', whose loss scale", ("precision", "fp16"))
    refused(r"parallel\.tp 1 \* parallel\.dp 2 is 2 ranks; a member of an ensemble has 1", ("parallel.dp", 2))
    refused(r"parallel\.micro_batch_size is 2; .* null or the whole batch of 4", ("parallel.micro_batch_size", 2))
    refused(r"parallel\.recompute is 'full'; in an ensemble it must be none", ("parallel.recompute", "full"))
    with pytest.raises(UserError, match="an ensemble of no runs"):
        check_together([])
    with pytest.raises(UserError, match=r"^run \w+ is twice in one ensemble"):
        check_together([member(base, 0), member(base, 1), member(base, 0)])
    check_together([member(base, 0), member(base, 1), member(base, 2)])


@pytest.mark.slow
def test_compiled_blocks_are_the_plain_ones(base: RunConfig, shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    found = []
    for compiled in (False, True):
        runs = [member(base, number) for number in range(3)]
        for config in runs:
            config.parallel.compile = compiled
        found.append([result.loss.item() for result in step_twice(runs, shards, None)[1]])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


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
