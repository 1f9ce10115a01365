"""Checkpoints survive kills, full disks and flipped bits: only complete ones count, and the newest of them wins."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train.checkpoint import checkpoint, saver, storage
from isoflop.train.checkpoint.saver import Saver
from isoflop.train.config import ModelConfig, RunConfig, run_id
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.model.gpt import GPT
from isoflop.train.model.parametrization import build_model
from isoflop.train.parallel.layout import Held, whole_placement
from isoflop.train.parallel.mesh import Mesh
from small_disk import disk_of

FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "manifest.json")


def tiny(**model: Any) -> RunConfig:
    run = RunConfig(model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256, **model))
    run.data.sequence_length = 8
    return run


def trained(config: RunConfig, steps: int = 2, seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    gpt = build_model(config.model, config.optimizer, 8, seed)
    adam = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for step in range(steps):
        update(gpt, adam, step)
    return gpt, adam


def update(gpt: GPT, adam: torch.optim.AdamW, seed: int) -> None:
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(seed))
    gpt.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    adam.step()
    adam.zero_grad()


def state_of(gpt: GPT, adam: torch.optim.AdamW) -> list[Held]:
    """Return views of the weights and moments of a training run."""
    states = checkpoint.whole_weights(gpt)
    for name, parameter in gpt.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            if parameter in adam.state:
                moment = adam.state[parameter][kind].view(-1)
                states.append(Held(name, kind, whole_placement(parameter.shape), 0, len(moment), moment))
    return states


def save(root: Path, step: int, config: RunConfig | None = None, steps: int = 2) -> Path:
    config = config or tiny()
    config.checkpoint.keep = 5
    saver = Saver(root, Mesh(), config, ByteTokenizer())
    path = saver.save(step, state_of(*trained(config, steps)), {"seconds": 1.5})
    saver.wait()
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (2, 9, 10):
        save(root, step)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """Return a directory of three complete checkpoints whose alphabetical order is not their order in time."""
    return Path(shutil.copytree(template, tmp_path / "checkpoints"))


def newest(root: Path) -> tuple[str | None, list[str]]:
    messages: list[str] = []
    path = checkpoint.newest_valid(root, messages.append)
    return (path.name if path else None), messages


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_moments_come_back_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    config = tiny(tied_embeddings=tied, qk_norm=True)
    gpt, adam = trained(config)
    writer = Saver(tmp_path, Mesh(), config, ByteTokenizer())
    path = writer.save(2, state_of(gpt, adam), {"seconds": 1.5, "rng": [1, 2]})
    writer.close()
    other, other_adam = trained(config, steps=2, seed=9)
    state = checkpoint.resume_state(tmp_path, state_of(other, other_adam), config, Mesh())
    assert state == {"step": 2, "seconds": 1.5, "rng": [1, 2]}
    for (name, ours), theirs in zip(gpt.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert all(torch.equal(adam.state[ours][key], other_adam.state[theirs][key]) for key in adam.state[ours])
    assert (other.head.weight is other.embedding.weight) == tied
    # The next step is the same too, so nothing that matters was left out.
    update(gpt, adam, 77)
    update(other, other_adam, 77)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), other.parameters(), strict=True))

    checkpoint.restore_state(path, state_of(gpt, adam), config)  # back to what was saved
    loaded = checkpoint.load_for_evaluation(path)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), loaded.model.parameters(), strict=True))
    assert not loaded.model.training
    assert (loaded.step, run_id(loaded.config), loaded.tokenizer.vocab_size) == (2, run_id(config), 256)
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert set(FILES) <= files == {"manifest.json", *json.loads((path / "manifest.json").read_text())}


def test_a_model_trained_on_separate_documents_is_evaluated_so(tmp_path: Path) -> None:
    """A document has the same logits alone and after another one, because positions are relative."""
    config = tiny()
    tokens = torch.tensor([[7, 8, 9, 0xFF, 1, 2, 3]])
    for separate in (True, False):
        config.data.separate_documents = separate
        model = checkpoint.load_for_evaluation(save(tmp_path / str(separate), 2, config)).model
        same = torch.allclose(model(tokens)[0, 4:], model(tokens[:, 4:])[0], atol=1e-5)  # fp32, other rotations
        assert same == separate


def test_another_run_is_not_restored_and_the_differing_field_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    other = tiny(hidden=8)
    with pytest.raises(UserError, match=r"another run: model\.hidden is None in the checkpoint and 8"):
        checkpoint.restore_state(path, state_of(*trained(other, 0)), other)
    other = tiny()
    other.optimizer.beta1 = 0.5
    with pytest.raises(UserError, match=r"optimizer\.beta1 is 0\.9 in the checkpoint and 0\.5 in"):
        checkpoint.restore_state(path, state_of(*trained(other, 0)), other)
    other = tiny()
    other.checkpoint.keep, other.name = 7, "cosmetic"
    checkpoint.restore_state(path, state_of(*trained(other, 0)), other)


def test_a_run_that_differs_in_d_alone_is_restored_up_to_its_decay(tmp_path: Path) -> None:
    config = tiny()
    config.schedule.warmup_tokens = 0
    step = config.batch_tokens
    long, short = replace(config, tokens=100 * step), replace(config, tokens=50 * step)
    gpt, adam = trained(config)
    for source, branch, last in ((long, short, 40), (short, long, 40)):  # whichever of the two decays first
        root = tmp_path / run_id(source)
        assert checkpoint.restore_state(save(root, last, source), state_of(gpt, adam), branch)["step"] == last
        with pytest.raises(UserError, match=r"belongs to another run: tokens is \d+ in the checkpoint and \d+ in"):
            checkpoint.restore_state(save(root, last + 1, source), state_of(gpt, adam), branch)
    for other in (
        replace(short, seed=1),
        replace(short, schedule=replace(short.schedule, kind="cosine")),
        replace(short, schedule=replace(short.schedule, warmup_tokens=4 * step)),
    ):
        with pytest.raises(UserError, match="belongs to another run"):
            checkpoint.restore_state(tmp_path / run_id(long) / "step_40", state_of(gpt, adam), other)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_reported_and_skipped(name: str, harm: Callable[[Path], None], root: Path) -> None:
    harm(root / "step_10" / name)
    newest_name, messages = newest(root)
    assert newest_name == "step_9"
    assert len(messages) == 1
    assert messages[0].startswith("checkpoint step_10 is damaged (")
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load_for_evaluation(root / "step_10")
    assert checkpoint.load_for_evaluation(root).path.name == "step_9"
    assert newest(root / "nowhere") == (None, [])


def test_no_flipped_bit_of_the_manifest_does_more_than_damage(root: Path) -> None:
    # The manifest is the only file without a checksum: any content must give a checkpoint or one sentence.
    manifest = root / "step_10" / "manifest.json"
    good = manifest.read_bytes()
    generator = random.Random(0)
    for _ in range(150):
        content = bytearray(good)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        manifest.write_bytes(content)
        newest_name, messages = newest(root)
        assert (newest_name, len(messages)) in (("step_10", 0), ("step_9", 1))
        if newest_name == "step_10":  # the bit was white space, or the name of a file that is not required
            checkpoint.restore_state(root / "step_10", state_of(*trained(tiny(), 0)), tiny())


def test_all_damaged_is_none_and_each_is_reported(root: Path) -> None:
    for path in root.iterdir():
        truncate(path / "model.safetensors")
    newest_name, messages = newest(root)
    assert newest_name is None
    assert [line.split()[1] for line in messages] == ["step_10", "step_9", "step_2"]
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.find(root)


def test_a_whole_checkpoint_stays_and_a_damaged_one_is_replaced(root: Path) -> None:
    before = (root / "step_10" / "manifest.json").stat().st_ino
    save(root, 10)
    assert (root / "step_10" / "manifest.json").stat().st_ino == before
    truncate(root / "step_10" / "model.safetensors")
    save(root, 10)
    assert newest(root) == ("step_10", [])


def test_pruning_keeps_the_newest_and_named_ones_and_drops_what_a_resume_skipped(root: Path) -> None:
    checkpoint.prune(root, keep=1, newest=10, named=[2, 7])
    assert sorted(path.name for path in root.iterdir()) == ["step_10", "step_2"]
    save(root, 12)
    checkpoint.prune(root, keep=1, newest=12, named=[2, 12])
    assert sorted(path.name for path in root.iterdir()) == ["step_10", "step_12", "step_2"]
    checkpoint.prune(root, keep=1, newest=10, named=[12])  # step 12 is damaged, or the run would have resumed from it
    assert sorted(path.name for path in root.iterdir()) == ["step_10"]
    save(root, 9)  # by a run that fell back: step 10, which it skipped, must not displace this one
    assert [path.name for path in root.iterdir()] == ["step_9"]


def test_a_full_disk_leaves_the_old_one_and_nothing_half_written(root: Path) -> None:
    with disk_of(20_000), pytest.raises(OSError, match="File too large") as raised:
        save(root, 11)
    assert raised.value.errno == 27  # EFBIG: the caller recognises a full disk by this number
    assert sorted(path.name for path in root.iterdir()) == ["step_10", "step_2", "step_9"]
    assert newest(root) == ("step_10", [])


@pytest.mark.parametrize("moment", ["model.safetensors", "optimizer.safetensors", "manifest", "fsync", "rename"])
def test_a_kill_in_the_middle_of_saving_leaves_nothing_that_counts(moment: str, root: Path) -> None:
    # A real SIGKILL of a real process, at each stage of the save.
    def killing(function: Callable[..., Any], when: Callable[..., bool] = lambda *args: True) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if when(*args):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return wrapped

    def save_and_die() -> None:
        if moment.endswith(".safetensors"):
            storage.save_file = killing(storage.save_file, lambda tensors, path: path.name == moment)
        elif moment == "manifest":
            checkpoint.describe = killing(checkpoint.describe)
        elif moment == "fsync":
            checkpoint.fsync_path = killing(checkpoint.fsync_path, lambda path: path.name == "manifest.json")
        else:
            os.replace = killing(os.replace)
        save(root, 11)

    child = multiprocessing.get_context("fork").Process(target=save_and_die)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert newest(root) == ("step_10", [])
    assert [step for step, _ in checkpoint.list_steps(root)] == [2, 9, 10]
    # The next save cleans up what the dead one left.
    assert len(list(root.glob(".step_11.*"))) == 1
    save(root, 12)
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    assert newest(root) == ("step_12", [])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event; writing tensors in the background waits until it is set."""
    event, real = threading.Event(), saver.write_whole

    def write_later(directory: Path, parts: Any) -> None:
        assert event.wait(30)
        real(directory, parts)

    monkeypatch.setattr(saver, "write_whole", write_later)
    return event


def test_a_save_is_of_its_moment_although_training_goes_on(gate: threading.Event, tmp_path: Path) -> None:
    gpt, adam = trained(tiny())
    state = state_of(gpt, adam)
    expected = {(part.name, part.kind): part.values.clone() for part in state}
    trainer = {"losses": [1.0]}
    writer = Saver(tmp_path, Mesh(), tiny(), ByteTokenizer())
    writer.save(2, state, trainer)
    update(gpt, adam, 5)  # training continues while nothing is on disk
    trainer["losses"].append(2.0)
    assert not checkpoint.list_steps(tmp_path)
    gate.set()
    writer.close()
    assert checkpoint.resume_state(tmp_path, state, tiny(), Mesh()) == {"step": 2, "losses": [1.0]}
    assert all(torch.equal(part.values, expected[part.name, part.kind]) for part in state)


def test_a_save_waits_for_the_one_before_and_both_are_whole(gate: threading.Event, tmp_path: Path) -> None:
    config = tiny()
    gpt, adam = trained(config)
    writer = Saver(tmp_path, Mesh(), config, ByteTokenizer())
    weights = []
    timer = threading.Timer(0.2, gate.set)
    for step in (2, 3, 4):
        writer.save(step, state_of(gpt, adam), {})
        weights.append(gpt.head.weight.detach().clone())
        if step == 2:
            timer.start()  # from here on the second save has to wait
        else:
            assert checkpoint.list_steps(tmp_path)[-1][0] == step - 1
        update(gpt, adam, step)
    writer.wait()
    assert [step for step, _ in checkpoint.list_steps(tmp_path)] == [3, 4]  # keep is 2
    for (_, path), expected in zip(checkpoint.list_steps(tmp_path), weights[1:], strict=True):
        assert torch.equal(checkpoint.load_for_evaluation(path).model.head.weight, expected)


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Path, parts: Any) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    messages: list[str] = []
    state = state_of(*trained(tiny()))
    writer = Saver(tmp_path, Mesh(), tiny(), ByteTokenizer(), messages.append)
    writer.save(2, state, {})
    writer.wait()
    monkeypatch.setattr(saver, "write_whole", full)
    writer.save(3, state, {})
    with pytest.raises(OSError, match="No space left on device") as raised:
        writer.wait()
    assert raised.value.errno == 28
    writer.save(4, state, {})
    writer.close()  # does not raise: the run ends for another reason
    assert len(messages) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert newest(tmp_path) == ("step_2", [])
