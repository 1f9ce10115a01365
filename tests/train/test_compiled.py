"""One compilation serves every depth, and what was compiled comes back: whole, checked, on an empty machine."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from isoflop.train.model.compiled import Compiled
from isoflop.train.model.gpt import GPT

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "node"))
    return RunConfig(
        model=ModelConfig(width=16, depth=2, heads=2, vocab_size=256),
        data=DataConfig(sequence_length=16, cache_dir=str(tmp_path / "cache")),
        parallel=ParallelConfig(device="cpu", compile=True),
    )


@pytest.mark.slow
def test_a_deeper_model_of_a_width_seen_before_compiles_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler's own front, where a second compilation would show, without the code generator.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    made = []
    for depth, vocabulary in ((1, 256), (2, 400)):
        before = counters["unique_graphs"]
        model = GPT(ModelConfig(width=16, depth=depth, heads=2, vocab_size=vocabulary), 16)
        model.compile_blocks()
        for _ in range(2):
            model.loss(tokens, tokens).backward()
        made.append(counters["unique_graphs"] - before)
    assert made == [1, 0]


def compile_something(part: Compiled, files: dict[str, bytes]) -> None:
    """What a compilation leaves behind."""
    for name, content in files.items():
        (part.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (part.folder / name).write_bytes(content)


def on_a_node(config: RunConfig, node: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Compiled:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(node))
    part = Compiled(config, 4, CPU, True, said.append)
    part.load()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(part.folder)
    return part


def test_what_one_node_compiled_another_finds(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = on_a_node(config, tmp_path / "a", monkeypatch, said)
    assert not first.archive.exists()
    files = {"ab/kernel.so": bytes(range(256)) * 40, "fxgraph/x/key": b"graph"}
    compile_something(first, {**files, "locks/x.lock": b"", "ab/kernel.lock": b"", "half.tmp": b"x"})
    first.keep()
    second = on_a_node(config, tmp_path / "b", monkeypatch, said)
    found = {str(path.relative_to(second.folder)): path.read_bytes() for path in second.folder.rglob("*.*")}
    assert found == {"ab/kernel.so": files["ab/kernel.so"]}
    assert (second.folder / "fxgraph/x/key").read_bytes() == b"graph"
    # Nothing new: the file stays as it is. Something new: the old is kept beside it.
    written = second.archive.stat().st_mtime_ns
    compile_something(second, {})
    second.keep()
    assert second.archive.stat().st_mtime_ns == written
    compile_something(second, {"cd/other.so": b"other"})
    second.keep()
    with tarfile.open(second.archive) as tar:
        assert set(tar.getnames()) == {*files, "cd/other.so"}
    assert [path.name for path in second.archive.parent.iterdir()] == [second.archive.name]
    assert not said


@pytest.mark.parametrize("damage", ["flipped", "empty"])
def test_a_damaged_file_is_passed_over_with_a_word_and_replaced(
    damage: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = on_a_node(config, tmp_path / "a", monkeypatch, said)
    content = os.urandom(100_000)
    compile_something(first, {"ab/kernel.so": content})
    first.keep()
    whole = bytearray(first.archive.read_bytes())
    if damage == "flipped":
        whole[len(whole) // 2] ^= 1
    first.archive.write_bytes(whole if damage == "flipped" else b"")
    second = on_a_node(config, tmp_path / "b", monkeypatch, said)
    assert not list(second.folder.iterdir())
    assert len(said) == 1
    compile_something(second, {"ab/kernel.so": content})
    second.keep()
    third = on_a_node(config, tmp_path / "c", monkeypatch, said)
    assert (third.folder / "ab/kernel.so").read_bytes() == content


def test_a_cache_that_cannot_be_written_does_not_end_the_run(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    part = on_a_node(config, tmp_path / "a", monkeypatch, said)
    part.archive.parent.write_text("a file where the folder should be")
    compile_something(part, {"ab/kernel.so": b"x"})
    part.keep()
    assert len(said) == 1
    assert "cannot be kept" in said[0]


SCRIPT = """
import json, sys, time
import torch
from isoflop.train.config import RunConfig, from_dict
from isoflop.train.data.loader import TrainStream
from isoflop.train.data.shards import prepare
from isoflop.train.parallel.mesh import Mesh
from isoflop.train.stepper import Stepper
torch.set_num_threads(1)
config = from_dict(RunConfig, json.loads(sys.argv[1]))
stream = TrainStream(prepare(config.data), config.data.sequence_length, 0)
stepper = Stepper(config, Mesh(), torch.device("cpu"), stream)
stepper.start()
losses = [stepper.step(step).loss.item() for step in range(2)]
counters = torch._dynamo.utils.counters
print(json.dumps({"losses": losses, "inductor": counters["inductor"], "new": len(stepper.compiled.known)}))
"""


@pytest.mark.exhaustive
def test_a_new_process_on_an_empty_node_compiles_nothing_again(config: RunConfig, tmp_path: Path) -> None:
    from isoflop.train.config import to_dict

    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{i * 37} words of text"}}\n' for i in range(500)))
    config.data.corpus, config.data.path = "text", str(tmp_path / "text.jsonl")
    ended = []
    for node, depth in (("a", 1), ("b", 3)):
        deeper = copy.deepcopy(config)
        deeper.model.depth = depth
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(to_dict(deeper))], check=True, capture_output=True, text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / node)},
        )  # fmt: skip
        ended.append(json.loads(done.stdout.splitlines()[-1]))
    assert ended[0]["inductor"]["fxgraph_cache_miss"] == 2  # forward and backward
    assert ended[1]["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert ended[1]["inductor"]["fxgraph_cache_hit"] == 2
    assert ended[1]["new"] == ended[0]["new"] > 5  # of the C++ kernels none was built again either
