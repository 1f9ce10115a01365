"""A run's identity is its science, and a config that cannot be trained is refused in one sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from isoflop.train.config import RunConfig, from_dict, identity, run_id, to_dict
from isoflop.train.errors import UserError
from isoflop.train.planner.validation import validate

# Every field of a run's identity, spelled out, so that a new default changes nothing here. A field that is added,
# removed, renamed or made cosmetic does: it gives every run in the world another id, so it must be meant.
SCIENCE: dict[str, Any] = {
    "model": {
        "width": 32, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 48, "vocab_size": 256, "vocab_multiple": 64,
        "qk_norm": False, "tied_embeddings": False, "window": None, "rope_theta": 10000.0, "norm_eps": 1e-5,
    },
    "data": {
        "corpus": "stdlib", "field": "text", "name": None, "subset": None, "split": "train", "revision": None,
        "max_bytes": None, "sequence_length": 128, "separate_documents": False, "validation_fraction": 0.02,
        "validation_tokens": 131072, "fingerprint": "f0", "tokenizer_fingerprint": "bytes",
    },
    "optimizer": {
        "learning_rate": 8e-3, "base_width": 64, "width_exponent": 1.0, "embedding_multiplier": 4.0, "beta1": 0.9,
        "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "gradient_clip": 1.0, "z_loss": 0.0,
        "batch_size": 16,
    },
    "schedule": {
        "kind": "wsd", "warmup_per_parameter": 1.0, "warmup_tokens": None, "warmup_max_share": 0.1, "decay_share": 0.2,
        "final_share": 0.0,
    },
    "tokens": 2**20, "precision": "fp32", "seed": 0, "max_loss_rise": 3.0, "skip_bad_steps": 0,
    "recipe": 3,
}  # fmt: skip
PINNED = "86ff2a0382"


def fields(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(path, cosmetic) of every leaf of a config."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, (*path, item.name))
        else:
            yield (*path, item.name), bool(item.metadata.get("cosmetic"))


def changed(run: RunConfig, path: tuple[str, ...]) -> RunConfig:
    run = copy.deepcopy(run)
    owner: Any = run
    for name in path[:-1]:
        owner = getattr(owner, name)
    value = getattr(owner, path[-1])
    if isinstance(value, bool):
        other: Any = not value
    elif isinstance(value, int | float):
        other = value + 1
    else:
        other = f"{value}x"
    setattr(owner, path[-1], other)
    return run


LEAVES = list(fields(RunConfig()))


def test_the_pinned_identity() -> None:
    run = from_dict(RunConfig, copy.deepcopy(SCIENCE))
    assert identity(run) == SCIENCE
    assert run_id(run) == PINNED


@pytest.mark.parametrize("path", [path for path, cosmetic in LEAVES if not cosmetic], ids=".".join)
def test_every_field_of_the_science_changes_the_id(path: tuple[str, ...]) -> None:
    assert run_id(changed(RunConfig(), path)) != run_id(RunConfig())


@pytest.mark.parametrize("path", [path for path, cosmetic in LEAVES if cosmetic], ids=".".join)
def test_no_cosmetic_field_changes_the_id(path: tuple[str, ...]) -> None:
    assert run_id(changed(RunConfig(), path)) == run_id(RunConfig())


def test_the_id_is_the_same_in_every_process_and_after_a_file() -> None:
    run = from_dict(RunConfig, copy.deepcopy(SCIENCE))
    assert run_id(from_dict(RunConfig, json.loads(json.dumps(to_dict(run))))) == PINNED
    # Not the order of keys, not the seed of string hashes, and whole numbers count as the floats that they are.
    shuffled = {key: SCIENCE[key] for key in reversed(SCIENCE)}
    shuffled["optimizer"] = {**SCIENCE["optimizer"], "width_exponent": 1, "gradient_clip": 1}
    code = (
        "import json, sys; from isoflop.train.config import *;"
        "print(run_id(from_dict(RunConfig, json.load(sys.stdin))), 'torch' in sys.modules)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(shuffled), capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
        # Planning imports this module, and must not wait for torch.
        assert done.stdout.split() == [PINNED, "False"]


def test_unknown_keys_and_wrong_shapes_are_named() -> None:
    with pytest.raises(
        UserError, match=r"^optimizer\.learning_rte is not a field of OptimizerConfig; it has learning_rate,"
    ):
        from_dict(RunConfig, {"optimizer": {"learning_rte": 1.0}})
    with pytest.raises(UserError, match=r"^widht is not a field of RunConfig; it has model,"):
        from_dict(RunConfig, {"widht": 3})
    with pytest.raises(UserError, match=r"^model is 3; it must be a mapping with the fields of ModelConfig"):
        from_dict(RunConfig, {"model": 3})


REFUSED = [
    ("model.width", 0, "model.width is 0; it must be 1 or more"),
    ("model.depth", 0, "model.depth is 0; it must be 1 or more"),
    ("model.heads", 0, "model.heads is 0; it must be 1 or more"),
    ("model.heads", 5, "model.heads is 5; it must divide model.width 64: 1, 2, 4, 8, 16, 32, 64"),
    ("model.heads", 64, "model.heads is 64; width 64 / heads must be even for rotary positions, it is 1"),
    ("model.kv_heads", 3, "model.kv_heads is 3; it must divide model.heads 4"),
    ("model.kv_heads", 0, "model.kv_heads is 0; it must be 1 or more"),
    ("model.hidden", 0, "model.hidden is 0; it must be 1 or more"),
    ("model.vocab_size", 0, "model.vocab_size is 0; it must be 1 or more"),
    ("model.vocab_multiple", 0, "model.vocab_multiple is 0; it must be 1 or more"),
    ("model.rope_theta", 0.0, "model.rope_theta is 0.0; it must be greater than 0"),
    ("model.norm_eps", -1.0, "model.norm_eps is -1.0; it must be greater than 0"),
    ("model.head_size", 0, "model.head_size is 0; it must be 1 or more"),
    ("model.head_size", 7, "model.head_size is 7; it must be even for rotary positions"),
    ("model.rope_scaling", "linear", "model.rope_scaling is 'linear'; it must be one of llama3, yarn"),
    ("model.rope_scaling", "yarn", "model.rope_factor is null; with model.rope_scaling yarn it must be 1 or more"),
    ("model.rope_factor", 0.5, "model.rope_factor is 0.5; it must be 1 or more"),
    (
        "model.rope_length",
        64,
        "model.rope_length is 64; without model.rope_scaling, which may be llama3 or yarn, it must be null",
    ),
    (
        "model.window",
        129,
        "model.window is 129; it must be 1 to data.sequence_length 128, or null for no window",
    ),
    ("data.corpus", "web", "data.corpus is 'web'; it must be one of stdlib, text, hf"),
    ("schedule.kind", "linear", "schedule.kind is 'linear'; it must be one of wsd, cosine, constant, points"),
    ("precision", "fp8", "precision is 'fp8'; it must be one of fp32, bf16, fp16"),
    ("tracker.kind", "mlflow", "tracker.kind is 'mlflow'; it must be one of wandb, none"),
    ("tracker.mode", "off", "tracker.mode is 'off'; it must be one of auto, online, offline"),
    (
        "parallel.attention",
        "xla",
        "parallel.attention is 'xla'; it must be one of auto, ours, sdpa, flash2, flash3, flash4",
    ),
    ("parallel.device", "tpu", "parallel.device is 'tpu'; it must be one of auto, cpu, cuda"),
    ("tokens", 0, "tokens is 0; it must be 1 or more"),
    ("log_every", 0, "log_every is 0; it must be 1 or more"),
    ("validations", 0, "validations is 0; it must be 1 or more"),
    ("max_loss_rise", 0.0, "max_loss_rise is 0.0; it must be greater than 0"),
    ("data.sequence_length", 0, "data.sequence_length is 0; it must be 1 or more"),
    ("data.validation_tokens", 0, "data.validation_tokens is 0; it must be 1 or more"),
    ("data.vocab_size", -1, "data.vocab_size is -1; it must be 1 or more"),
    ("data.max_bytes", 0, "data.max_bytes is 0; it must be 1 or more"),
    ("data.validation_fraction", 1.0, "data.validation_fraction is 1.0; it must be at least 0 and below 1"),
    (
        "data.validation_fraction",
        0.0,
        "data.validation_fraction is 0; a run is scored on held-out documents, so it must be above 0",
    ),
    ("optimizer.batch_size", 0, "optimizer.batch_size is 0; it must be 1 or more"),
    ("optimizer.learning_rate", 0.0, "optimizer.learning_rate is 0.0; it must be greater than 0"),
    ("optimizer.learning_rate", math.inf, "optimizer.learning_rate is inf; it must be a finite number"),
    ("optimizer.weight_decay", math.nan, "optimizer.weight_decay is nan; it must be a finite number"),
    ("optimizer.base_width", 0, "optimizer.base_width is 0; it must be 1 or more"),
    ("optimizer.embedding_multiplier", 0.0, "optimizer.embedding_multiplier is 0.0; it must be greater than 0"),
    ("optimizer.eps", 0.0, "optimizer.eps is 0.0; it must be greater than 0"),
    ("optimizer.beta1", 1.0, "optimizer.beta1 is 1.0; it must be at least 0 and below 1"),
    ("optimizer.beta2", -0.1, "optimizer.beta2 is -0.1; it must be at least 0 and below 1"),
    ("optimizer.weight_decay", -0.1, "optimizer.weight_decay is -0.1; it must be 0 or more"),
    ("optimizer.gradient_clip", -1.0, "optimizer.gradient_clip is -1.0; it must be 0 or more"),
    ("optimizer.z_loss", -1.0, "optimizer.z_loss is -1.0; it must be 0 or more"),
    ("schedule.warmup_per_parameter", -1.0, "schedule.warmup_per_parameter is -1.0; it must be 0 or more"),
    ("schedule.warmup_tokens", -1, "schedule.warmup_tokens is -1; it must be 0 or more"),
    ("schedule.warmup_max_share", 1.0, "schedule.warmup_max_share is 1.0; it must be at least 0 and below 1"),
    ("schedule.decay_share", -0.2, "schedule.decay_share is -0.2; it must be at least 0 and below 1"),
    ("schedule.final_share", 1.0, "schedule.final_share is 1.0; it must be at least 0 and below 1"),
    ("checkpoint.every_seconds", 0.0, "checkpoint.every_seconds is 0.0; it must be greater than 0"),
    ("checkpoint.every_steps", 0, "checkpoint.every_steps is 0; it must be 1 or more"),
    ("checkpoint.keep", 0, "checkpoint.keep is 0; it must be 1 or more"),
    (
        "checkpoint.at_steps",
        [3, 0],
        "checkpoint.at_steps contains 0; it must hold steps from 1 to 511, before the run's last one",
    ),
    (
        "checkpoint.at_steps",
        [512],
        "checkpoint.at_steps contains 512; it must hold steps from 1 to 511, before the run's last one",
    ),
    ("parallel.threads", 0, "parallel.threads is 0; it must be 1 or more"),
    (
        "parallel.micro_batch_size",
        5,
        "parallel.micro_batch_size is 5; it must divide optimizer.batch_size 16: 1, 2, 4, 8, 16",
    ),
    ("seed", -1, "seed is -1; it must be at least 0 and below 2^63"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), REFUSED, ids=[f"{item[0]}={item[1]}" for item in REFUSED])
def test_what_cannot_be_trained_is_refused_in_one_sentence(path: str, value: Any, sentence: str) -> None:
    run = RunConfig()
    run.model.width, run.model.heads, run.optimizer.batch_size = 64, 4, 16
    validate(run)
    *groups, name = path.split(".")
    owner: Any = run
    for group in groups:
        owner = getattr(owner, group)
    setattr(owner, name, value)
    with pytest.raises(UserError) as raised:
        validate(run)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("yarn", {"rope_length": None}, "model.rope_length is null; with model.rope_scaling yarn it must be 1 or more"),
        ("yarn", {"rope_slow": 32.0}, "model.rope_slow is 32; it must be below model.rope_fast 32"),
        ("llama3", {"rope_slow": 4.0}, "model.rope_slow is 4; it must be below model.rope_fast 4"),
        (
            "llama3",
            {"rope_attention": 1.5},
            "model.rope_attention is 1.5; with model.rope_scaling llama3 it must be null",
        ),
        ("yarn", {"rope_theta": 1.0}, "model.rope_theta is 1; with model.rope_scaling yarn it must be above 1"),
    ],
)
def test_a_scaling_of_positions_that_cannot_be_is_refused(kind: str, change: dict[str, Any], sentence: str) -> None:
    run = RunConfig()
    run.model.rope_scaling, run.model.rope_factor, run.model.rope_length = kind, 4.0, 64
    validate(run)
    for name, value in change.items():
        setattr(run.model, name, value)
    with pytest.raises(UserError) as raised:
        validate(run)
    assert str(raised.value) == sentence


def test_padding_and_the_inner_width_follow_their_rules() -> None:
    run = RunConfig()
    for vocab_size, padded in ((1, 128), (128, 128), (129, 256), (256, 256), (50257, 50304)):
        run.model.vocab_size = vocab_size
        assert run.model.padded_vocab_size == padded
    for width, hidden in ((8, 24), (24, 64), (64, 176), (96, 256), (128, 344)):
        run.model.width = width
        assert run.model.mlp_hidden == hidden
    run.model.vocab_size = None
    with pytest.raises(UserError, match=r"model\.vocab_size is None"):
        _ = run.model.padded_vocab_size
