"""A run's id depends on its scientific fields only; an untrainable config is refused in one sentence."""

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

# Every field of a run's identity, spelled out, so that a new default changes nothing here. Adding, removing or
# renaming a field, or making it cosmetic, changes the id of every run, so it must be intended.
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
    """Yield (path, is cosmetic) of every leaf of a config."""
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


@pytest.mark.parametrize(("path", "cosmetic"), LEAVES, ids=[".".join(path) for path, _ in LEAVES])
def test_every_field_changes_the_id_unless_it_is_cosmetic(path: tuple[str, ...], cosmetic: bool) -> None:
    assert (run_id(changed(RunConfig(), path)) == run_id(RunConfig())) == cosmetic


def test_the_id_is_the_same_in_every_process_and_after_a_file() -> None:
    run = from_dict(RunConfig, copy.deepcopy(SCIENCE))
    assert run_id(from_dict(RunConfig, json.loads(json.dumps(to_dict(run))))) == PINNED
    # Neither the order of keys nor the seed of string hashes matters, and 1 counts as 1.0.
    shuffled = {key: SCIENCE[key] for key in reversed(SCIENCE)}
    shuffled["optimizer"] = {**SCIENCE["optimizer"], "width_exponent": 1, "gradient_clip": 1}
    code = (
        "import json, sys; from isoflop.train.config import *;"
        "print(run_id(from_dict(RunConfig, json.load(sys.stdin))), 'torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(shuffled), capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "1"},
    )  # fmt: skip
    # Planning imports this module, and must not wait for torch.
    assert process.stdout.split() == [PINNED, "False"]


def test_unknown_keys_and_wrong_shapes_are_named() -> None:
    with pytest.raises(UserError, match=r"^optimizer\.learning_rte .* learning_rate,"):
        from_dict(RunConfig, {"optimizer": {"learning_rte": 1.0}})
    with pytest.raises(UserError, match=r"^widht .* model,"):
        from_dict(RunConfig, {"widht": 3})
    with pytest.raises(UserError, match=r"^model is 3; .* mapping"):
        from_dict(RunConfig, {"model": 3})


REFUSED: dict[str, list[Any]] = {
    # 5 does not divide the width of 64, and 64 leaves heads of one number
    "model.width": [0], "model.heads": [5, 64], "model.kv_heads": [3], "model.vocab_multiple": [0],
    "model.norm_eps": [-1.0], "model.head_size": [7], "model.rope_scaling": ["linear"], "model.rope_factor": [0.5],
    "model.rope_length": [64], "model.window": [129], "data.corpus": ["web"], "data.sequence_length": [0],
    "data.validation_fraction": [1.0], "schedule.kind": ["linear"], "schedule.warmup_tokens": [-1],
    "schedule.warmup_max_share": [1.0], "schedule.final_share": [1.0], "precision": ["fp8"], "tokens": [0],
    "validations": [0], "max_loss_rise": [0.0], "seed": [-1], "optimizer.batch_size": [0],
    "optimizer.learning_rate": [0.0, math.inf], "optimizer.weight_decay": [math.nan, -0.1], "optimizer.eps": [0.0],
    "optimizer.beta1": [1.0], "optimizer.beta2": [-0.1], "optimizer.gradient_clip": [-1.0],
    "checkpoint.every_seconds": [0.0], "checkpoint.keep": [0], "parallel.attention": ["xla"], "parallel.threads": [0],
    "parallel.micro_batch_size": [5],
}  # fmt: skip


def assert_refused(run: RunConfig, path: str, value: Any, problem: str) -> None:
    """Assert that the error begins with the field and its value."""
    validate(run)
    *groups, name = path.split(".")
    owner: Any = run
    for group in groups:
        owner = getattr(owner, group)
    setattr(owner, name, value)
    with pytest.raises(UserError) as raised:
        validate(run)
    assert str(raised.value).startswith(f"{path} {problem}; ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in REFUSED.items() for value in values])
def test_what_cannot_be_trained_is_refused_in_one_sentence(path: str, value: Any) -> None:
    run = RunConfig()
    run.model.width, run.model.heads, run.optimizer.batch_size = 64, 4, 16
    assert_refused(run, path, value, f"is {value!r}")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("checkpoint.at_steps", [10**9], "contains 1000000000"),
        ("data.validation_fraction", 0.0, "is 0"),
        ("model.rope_length", None, "is null"),
        ("model.rope_theta", 1.0, "is 1"),
    ],
)
def test_a_value_that_others_rule_out_is_refused(path: str, value: Any, problem: str) -> None:
    run = RunConfig()
    run.model.rope_scaling, run.model.rope_factor, run.model.rope_length = "yarn", 4.0, 64
    assert_refused(run, path, value, problem)


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


def test_fields_of_earlier_versions_are_read_and_refused_where_the_run_was_another() -> None:
    run = RunConfig()
    values = to_dict(run)
    values["model"] |= {"rope_slow": None}
    values["parallel"] |= {"trace": True}
    assert from_dict(RunConfig, values) == run
    values["optimizer"] |= {"iterations": 4}
    with pytest.raises(
        UserError, match=r"^optimizer.iterations is 4, and is no longer a field: Muon always makes five"
    ):
        from_dict(RunConfig, values)
