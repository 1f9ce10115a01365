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
from random_models import random_model


@pytest.mark.slow
def test_one_compilation_serves_every_depth_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dynamo and aot_autograd without the code generator, which would add minutes of C++; counters show compilations.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    counters, new_graphs = torch._dynamo.utils.counters["stats"], []
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    for depth, vocabulary in ((1, 256), (2, 400)):
        config = ModelConfig(
            width=16, depth=depth, heads=4, kv_heads=2, vocab_size=vocabulary, qk_norm=True, qkv_bias=True, window=5
        )
        before, results = counters["unique_graphs"], []
        for compiled in (False, True, True):
            model = random_model(config, 16)
            model.end_of_document = int(tokens[0, 3])
            if compiled:
                model.compile_blocks()
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        new_graphs.append(counters["unique_graphs"] - before)
        for eager, *traced in zip(*results, strict=True):
            for ours in traced:  # the same operations, possibly decomposed: fp32 rounding only
                torch.testing.assert_close(ours, eager, atol=1e-6, rtol=1e-4)
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
