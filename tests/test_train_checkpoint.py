"""Checkpoints survive kills, full disks and rotten bits: what counts as one is whole, and the newest whole one wins."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isoflop.train import checkpoint
from isoflop.train.config import ModelConfig, RunConfig, run_id
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.model import GPT, next_token_loss
from isoflop.train.optimizer import build_optimizer
from isoflop.train.parametrization import build_model

FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "manifest.json")


def tiny(**model: Any) -> RunConfig:
    run = RunConfig(model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256, **model))
    run.data.sequence_length = 8
    return run


def trained(config: RunConfig, steps: int = 2, seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    gpt = build_model(config.model, config.optimizer, 8, seed)
    adam = build_optimizer(gpt, config.optimizer)
    for step in range(steps):
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
        next_token_loss(gpt(tokens[:, :-1]), tokens[:, 1:]).backward()
        adam.step()
        adam.zero_grad()
    return gpt, adam


def save(root: Path, step: int, config: RunConfig | None = None, steps: int = 2) -> Path:
    config = config or tiny()
    gpt, adam = trained(config, steps)
    return checkpoint.save(root, step, gpt, adam, {"seconds": 1.5}, config, ByteTokenizer())


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (2, 10, 9):
        save(root, step)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """Three whole checkpoints, whose order as text is not their order in time."""
    return Path(shutil.copytree(template, tmp_path / "checkpoints"))


def newest(root: Path) -> tuple[str | None, list[str]]:
    said: list[str] = []
    found = checkpoint.newest_valid(root, said.append)
    return (found.name if found else None), said


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_and_moments_come_back_bit_for_bit(tied: bool, qk_norm: bool, tmp_path: Path) -> None:
    config = tiny(tied_embeddings=tied, qk_norm=qk_norm)
    gpt, adam = trained(config)
    path = checkpoint.save(tmp_path, 2, gpt, adam, {"seconds": 1.5, "rng": [1, 2]}, config, ByteTokenizer())
    other, other_adam = trained(config, steps=1, seed=9)
    state = checkpoint.restore(path, other, other_adam, config)
    assert state == {"step": 2, "seconds": 1.5, "rng": [1, 2]}
    for (name, ours), theirs in zip(gpt.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert adam.state[ours].keys() == other_adam.state[theirs].keys()
        assert all(torch.equal(adam.state[ours][key], other_adam.state[theirs][key]) for key in adam.state[ours])
    assert (other.head.weight is other.embedding.weight) == tied
    # The next step is the same too, so nothing that matters was left out.
    for model, optimizer in ((gpt, adam), (other, other_adam)):
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(77))
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), other.parameters(), strict=True))

    loaded = checkpoint.load_for_evaluation(path)
    assert not loaded.model.training
    assert (loaded.step, run_id(loaded.config), loaded.tokenizer.vocab_size) == (2, run_id(config), 256)


def test_another_run_is_not_restored_and_the_differing_field_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    other = tiny(hidden=8)
    with pytest.raises(UserError, match=r"belongs to another run: model\.hidden is None there and 8 here"):
        checkpoint.restore(path, *trained(other, 0), other)
    other = tiny()
    other.optimizer.beta1 = 0.5
    with pytest.raises(UserError, match=r"optimizer\.beta1 is 0\.9 there and 0\.5 here"):
        checkpoint.restore(path, *trained(other, 0), other)
    other = tiny()
    other.checkpoint.keep, other.name = 7, "cosmetic"
    checkpoint.restore(path, *trained(other, 0), other)


def test_the_newest_by_number_wins(root: Path) -> None:
    assert newest(root) == ("step_10", [])
    assert newest(root / "nowhere") == (None, [])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, empty, flip, Path.unlink], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_reported_and_skipped(name: str, harm: Callable[[Path], None], root: Path) -> None:
    harm(root / "step_10" / name)
    found, said = newest(root)
    assert found == "step_9"
    assert len(said) == 1
    assert said[0].startswith("checkpoint step_10 is damaged (")
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.load_for_evaluation(root / "step_10")
    assert checkpoint.load_for_evaluation(root).path.name == "step_9"


def test_no_flipped_bit_of_the_manifest_does_more_than_damage(root: Path) -> None:
    # It is the one file without a checksum of its own: whatever it says, the answer is a checkpoint or a sentence.
    manifest = root / "step_10" / "manifest.json"
    good = manifest.read_bytes()
    generator = random.Random(0)
    for _ in range(150):
        content = bytearray(good)
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        manifest.write_bytes(content)
        found, said = newest(root)
        assert (found, len(said)) in (("step_10", 0), ("step_9", 1))
        if found == "step_10":  # the bit was white space, or the name of a file that is not required
            checkpoint.restore(root / "step_10", *trained(tiny(), 0), tiny())
    for text in ("{}", "[]", "null", '{"model.safetensors": 3}'):
        manifest.write_text(text)
        assert newest(root)[0] == "step_9"


def test_all_damaged_is_none_and_every_one_is_reported(root: Path) -> None:
    for path in root.iterdir():
        truncate(path / "model.safetensors")
    found, said = newest(root)
    assert found is None
    assert [line.split()[1] for line in said] == ["step_10", "step_9", "step_2"]
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.find(root)
    with pytest.raises(UserError, match="does not exist"):
        checkpoint.find(root / "step_99")


def test_a_whole_checkpoint_stays_and_a_damaged_one_is_replaced(root: Path) -> None:
    before = (root / "step_10" / "manifest.json").stat().st_ino
    save(root, 10)
    assert (root / "step_10" / "manifest.json").stat().st_ino == before
    truncate(root / "step_10" / "model.safetensors")
    save(root, 10)
    assert newest(root) == ("step_10", [])


def test_pruning_keeps_the_newest_and_never_counts_what_a_resumed_run_skipped(root: Path) -> None:
    (root / ".step_11.abc").mkdir()
    truncate(root / "step_10" / "model.safetensors")
    # The run fell back to step 9 or before and has just saved 9: step 10 must not push it out.
    checkpoint.prune(root, keep=1, newest=9)
    assert [path.name for path in root.iterdir()] == ["step_9"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """A limit on the size of files: writing fails in the middle, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_old_one_and_nothing_half_written(root: Path, small_files: None) -> None:
    with pytest.raises(OSError, match="File too large") as raised:
        save(root, 11)
    assert raised.value.errno == 27  # EFBIG: the caller tells a full disk from a bug by the number
    assert sorted(path.name for path in root.iterdir()) == ["step_10", "step_2", "step_9"]
    assert newest(root) == ("step_10", [])


@pytest.mark.parametrize("moment", ["model.safetensors", "optimizer.safetensors", "manifest", "fsync", "rename"])
def test_a_kill_in_the_middle_of_saving_leaves_nothing_that_counts(moment: str, root: Path) -> None:
    # A real SIGKILL of a real process, at each stage of the save.
    code = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from isoflop.train import checkpoint
import test_train_checkpoint as test

def killing(function, when=lambda *args: True):
    def wrapped(*args, **kwargs):
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped

moment = {moment!r}
if moment.endswith(".safetensors"):
    checkpoint.save_file = killing(checkpoint.save_file, lambda tensors, path: path.name == moment)
elif moment == "manifest":
    checkpoint._describe = killing(checkpoint._describe)
elif moment == "fsync":
    checkpoint.fsync_path = killing(checkpoint.fsync_path, lambda path: path.name == "manifest.json")
else:
    os.replace = killing(os.replace)
test.save(Path({str(root)!r}), 11)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert newest(root) == ("step_10", [])
    assert [step for step, _ in checkpoint.list_steps(root)] == [2, 9, 10]
    # The next save cleans up what the dead one left.
    assert len(list(root.glob(".step_11.*"))) == 1
    checkpoint.prune(root, keep=5)
    assert not list(root.glob(".*"))


def test_every_file_is_in_the_manifest(root: Path) -> None:
    path = root / "step_2"
    manifest = json.loads((path / "manifest.json").read_text())
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files == set(manifest) | {"manifest.json"}
    assert set(FILES) <= files
