"""One compilation serves every depth, and the next process reuses it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from isoflop.train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, to_dict
from isoflop.train.model.gpt import GPT


@pytest.mark.slow
def test_a_deeper_model_of_a_width_seen_before_compiles_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo without the code generator: a second compilation would already show in its counters.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    new_graphs = []
    for depth, vocabulary in ((1, 256), (2, 400)):
        before = counters["unique_graphs"]
        model = GPT(ModelConfig(width=16, depth=depth, heads=2, vocab_size=vocabulary), 16)
        model.compile_blocks()
        for _ in range(2):
            model.loss(tokens, tokens).backward()
        new_graphs.append(counters["unique_graphs"] - before)
    assert new_graphs == [1, 0]


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
print(json.dumps({"losses": losses, "inductor": counters["inductor"]}))
"""


@pytest.mark.exhaustive
def test_a_new_process_compiles_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{i * 37} words of text"}}\n' for i in range(500)))
    config = RunConfig(
        model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256),
        data=DataConfig("text", str(tmp_path / "text.jsonl"), sequence_length=16, cache_dir=str(tmp_path / "cache")),
        parallel=ParallelConfig(device="cpu", compile=True),
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    results = []
    for config.model.depth in (1, 3):
        command = [sys.executable, "-c", SCRIPT, json.dumps(to_dict(config))]
        process = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        results.append(json.loads(process.stdout.splitlines()[-1]))
    assert results[0]["inductor"]["fxgraph_cache_miss"] == 2  # forward and backward
    assert results[1]["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert results[1]["inductor"]["fxgraph_cache_hit"] == 2
    assert list((tmp_path / "cache" / "compiled").rglob("*.so"))
