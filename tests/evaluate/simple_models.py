"""Small GPTs whose scores can be checked independently, tasks of every kind, and helpers that score suites."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.evaluate.harness import CheckpointLM, answer_task
from isoflop.evaluate.inference.generate import Sampling, choose_tokens
from isoflop.evaluate.metrics import task_scores
from isoflop.evaluate.tasks import hub
from isoflop.evaluate.tasks.suite import Suite, SuiteTask
from isoflop.evaluate.tasks.tasks import load_suite
from isoflop.train.config import DataConfig, ModelConfig, RunConfig
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.model.gpt import GPT
from lm_eval.tasks import TaskManager
from torch import Tensor


def gpt(seed: int = 0, max_length: int = 32, dtype: torch.dtype = torch.float64, **shape: Any) -> GPT:
    """Return a GPT with weights large enough that everything a token sees changes its logits."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**{"width": 32, "depth": 2, "heads": 2, "vocab_size": 256} | shape), max_length, 0.7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


@torch.no_grad()
def by_forward(model: GPT, inputs: Sequence[int], targets: Sequence[int]) -> tuple[float, bool]:
    """Return nats of the last len(targets) predictions by the forward pass, and whether each is the likeliest."""
    logits = model(torch.tensor([list(inputs)]))[0, -len(targets) :].double()
    nats = torch.log_softmax(logits, dim=1)[range(len(targets)), list(targets)]
    return float(nats.sum()), bool((logits.argmax(dim=1) == torch.tensor(targets)).all())


@torch.no_grad()
def decode_greedily(model: GPT, prompt: Sequence[int], count: int) -> list[int]:
    """Decode greedily, recomputing the window for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text[-model.max_length :]]))[0, -1].argmax()))
    return text[len(prompt) :]


def random_table(seed: int = 0) -> Tensor:
    """Return a random log p(next | last), (256, 256)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(256, 256, generator=generator, dtype=torch.float64), dim=1)


def bigram(table: Tensor) -> GPT:
    """Return a GPT whose attention and MLP add nothing, and whose head looks up log p(next | last)."""
    block: dict[str, Any] = {"depth": 1, "heads": 1, "head_size": 2, "hidden": 8}
    model = GPT(ModelConfig(width=256, vocab_size=256, vocab_multiple=1, tied_embeddings=False, **block), 64)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(1e6 * torch.eye(256))  # large, so that the norm's epsilon is negligible
        model.norm.weight.fill_(1.0)
        model.head.weight.copy_(table.T / 16)  # the norm scales a one-hot vector of 256 to 16
    return model


def nats_of(table: Tensor, text: str, answer: str) -> float:
    ids, first = list((text + answer).encode()), len(text.encode())
    return sum(float(table[ids[place - 1], ids[place]]) for place in range(first, len(ids)))


def checkpoint_of(model: GPT) -> Any:
    config = RunConfig(model=ModelConfig(vocab_size=256), data=DataConfig(sequence_length=64))
    return SimpleNamespace(model=model, config=config, tokenizer=ByteTokenizer(), step=7, path=Path("step_7"))


def score_task(lm: CheckpointLM, entry: SuiteTask) -> dict[str, Any]:
    """Score the items of one task and summarise them."""
    items, others = answer_task(lm, entry)
    scores = task_scores(items)
    if scores["withheld"]:
        others = dict.fromkeys(others)
    return scores | others | {"subset": entry.subset, "version": entry.version}


def score(loaded: Any, suite: Suite) -> dict[str, dict[str, Any]]:
    """Return the scores of each task."""
    lm = CheckpointLM(loaded.model, loaded.tokenizer, loaded.config.data.sequence_length)
    return {name: score_task(lm, entry) for name, entry in suite.items()}


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits (vocabulary,) and a stream of random numbers."""
    uniforms = torch.rand(1, dtype=torch.float64, generator=generator)
    return int(choose_tokens(logits[None], sampling, uniforms)[0])


def load_indexed(manager: TaskManager, *names: Any, **options: Any) -> Suite:
    """Load tasks by name from an lm-eval index that has other tasks than the default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "task_manager", lambda *_: manager)
        return load_suite(*names, **options)


def custom_tasks(folder: Path) -> TaskManager:
    """Write tasks of every kind as lm-eval YAML over local files, and return an index of only these."""
    rng = np.random.default_rng(5)

    def words() -> str:
        return " ".join("".join(rng.choice(list("abcde"), size=4)) for _ in range(4))

    rows = [{"q": words(), "a": [words(), words()], "gold": i % 2, "golds": [1, 0][: 1 + i % 2]} for i in range(12)]
    kinds: dict[str, dict[str, Any]] = {
        "my_choice": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
                      "doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "my_labels": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
                      "doc_to_target": "{{golds}}", "metric_list": [{"metric": "acc"}]},
        "my_writing": {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a[0]}}",
                       "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
                       "metric_list": [{"metric": "exact_match"}]},
        "my_text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}} {{a[0]}}",
                    "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte"}]},
    }  # fmt: skip
    (folder / "all.yaml").write_text(json.dumps({"group": "my_group", "task": list(kinds)}))
    return write_tasks(folder, kinds, rows, version=2)


def write_tasks(folder: Path, kinds: dict[str, Any], rows: list[dict[str, Any]], version: int = 1) -> TaskManager:
    """Write tasks over the same rows, each in a separate file, and return an index of the folder."""
    for name, config in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics = [{"aggregation": "mean", "higher_is_better": True, **metric} for metric in config["metric_list"]]
        dataset = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "hub")}
        full = {
            **config, "task": name, "dataset_path": "json", "dataset_kwargs": dataset, "test_split": "test",
            "metric_list": metrics, "metadata": {"version": version},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(full))
    return TaskManager(include_defaults=False, include_path=str(folder))
