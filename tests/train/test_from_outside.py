"""Malformed files, environments and numbers give one sentence each: no hang and no traceback."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from isoflop.train import loop
from isoflop.train.checkpoint import checkpoint
from isoflop.train.config import DataConfig, ModelConfig, RunConfig, from_dict, to_dict
from isoflop.train.data.storage import read_checked
from isoflop.train.data.tokenizers import planned_vocab_size
from isoflop.train.errors import UserError
from isoflop.train.files import read_document, read_json_lines
from isoflop.train.job.environment import Ranks, detect
from isoflop.train.job.failure import read_failure
from isoflop.train.job.rendezvous import _find
from isoflop.train.planner.validation import check_world, divisors_of, validate
from isoflop.train.tracker import metrics
from small_runs import forty_steps

DEEP = "[" * 100_000
DEEPER = '{"a":' * 100_000


@pytest.fixture(scope="module")
def config(small_corpus: Callable[..., DataConfig]) -> RunConfig:
    config = replace(forty_steps(small_corpus(512)), tokens=4 * 64)
    config.checkpoint.every_steps = 2
    return config


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and its entry in the manifest."""
    (folder / name).write_bytes(content)
    if name != "manifest.json":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def trained(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    loop.train(config, folder, report=lambda line: None)
    return folder


@pytest.fixture
def newest(trained: Path, tmp_path: Path) -> Path:
    """Return the newest checkpoint of a run of four steps, for a test to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run")) / "checkpoints" / "step_4"


@pytest.mark.parametrize("content", [DEEPER, "7", "{}", '{"config.json": 7}', '{"a": {"bytes": [], "sha256": 1}}'])
def test_a_manifest_of_any_form_is_damage(content: str, newest: Path) -> None:
    replace_file(newest, "manifest.json", content.encode())
    assert "manifest.json" in str(checkpoint.damage(newest))
    assert checkpoint.find(newest.parent.parent).name == "step_2"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"model": {"width": "wide"}}, "model.width is 'wide'"),
        ("config.json", {"seed": [[[]]]}, r"seed is \[\[\[\]\]\]"),
        ("config.json", DEEPER, "config.json is nested too deeply"),
        ("config.json", "[1]", "config.json .* array"),
        ("trainer.json", {"step": "two"}, "trainer.json .* str"),
    ],
)
def test_a_checkpoint_with_files_of_another_form_is_one_sentence(
    name: str, changes: Any, message: str, newest: Path
) -> None:
    content = json.loads((newest / name).read_text())
    replace_file(newest, name, (changes if isinstance(changes, str) else json.dumps(content | changes)).encode())
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.load_for_evaluation(newest)
    assert str(newest / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", (2**62).to_bytes(8, "little") + b"{}", (100_000).to_bytes(8, "little") + b"[" * 100_000]
)
def test_weights_that_are_no_safetensors_are_one_sentence(content: bytes, newest: Path) -> None:
    replace_file(newest, "model.safetensors", content)
    with pytest.raises(UserError, match=r"model.safetensors cannot be read"):
        checkpoint.load_for_evaluation(newest)


@pytest.mark.parametrize("changes", [{"seconds": "long"}, {"loss_scale": 5, "updates": None}, {"bad_steps": []}])
def test_a_run_does_not_resume_from_numbers_of_another_form(
    changes: dict[str, Any], config: RunConfig, newest: Path
) -> None:
    content = json.loads((newest / "trainer.json").read_text())
    replace_file(newest, "trainer.json", json.dumps(content | changes).encode())
    with pytest.raises(UserError, match=r"cannot be resumed, because its trainer.json"):
        loop.train(config, newest.parent.parent, report=lambda line: None)


def test_every_config_comes_back_and_a_wrong_type_is_named_with_its_value() -> None:
    whole = RunConfig()
    assert from_dict(RunConfig, yaml.safe_load(yaml.dump(to_dict(whole)))) == whole
    for group, values, message in (
        ("optimizer", {"learning_rate": "high"}, "^optimizer.learning_rate is 'high'"),
        ("checkpoint", {"at_steps": [1, "x"]}, r"^checkpoint.at_steps is \[1, 'x'\]"),
        ("parallel", {"compile": "maybe"}, "^parallel.compile is 'maybe'"),
    ):
        with pytest.raises(UserError, match=message):
            from_dict(RunConfig, {group: values})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model": {"vocab": {"a": 4294967290}}}', "the id 4294967290"),
        ('{"model": {"vocab": {"a": -1}}}', "it has the id -1"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 4294967290, "content": "b"}]}', "the id 4294967290"),
        ('{"model": {"vocab": {"a": "b"}}}', "int"),
        (DEEP, "array"),
        ('{"model": {"vocab": [' + DEEP, "recursion"),
    ],
)
def test_ids_of_a_tokenizer_are_checked_before_the_library_sees_them(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=rf"cannot be loaded \(.*{message}.*\)") as caught:
        planned_vocab_size(DataConfig(tokenizer=str(tmp_path)))
    assert len(str(caught.value)) < 400


def test_a_sparse_tokenizer_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(UserError, match="at most 1073741824"):
        planned_vocab_size(DataConfig(tokenizer=str(tmp_path)))


@pytest.mark.parametrize("content", [DEEPER, "[]", '{"checksum": 5}'])
def test_a_checked_file_of_any_form_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest.json"):
        read_checked(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    "content",
    [
        '{"cause": "hung", "rank": "first"}',
        '{"hosts": 5}',
        '{"reason": []}',
        '{"step": {}}',
        '{"cause": ["hung"]}',
        '{"cause": "flood"}',
    ],
)
def test_a_failure_of_another_form_is_still_a_failure(content: str, tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text(content)
    failure = read_failure(tmp_path)
    assert failure.cause == "unknown"
    assert failure.reason == "no reason" or failure.reason.startswith("its failure.json has invalid content (Expected")
    (tmp_path / "failure.json").write_text("{")
    assert read_failure(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"host": ' + DEEP, "array"),
        ('{"host": "localhost", "port": 99999999, "token": ""}', "localhost:99999999"),
        ('{"host": "a\\u0000b", "port": 9, "token": ""}', "rank 0 of this job does not answer"),
    ],
)
def test_an_address_of_another_form_is_no_rank_0(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / ".rendezvous-0.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"did not find rank 0 .*{message}"):
        _find(path, Ranks(1, 2), 0.1)


def test_lines_of_metrics_of_another_form_are_passed_over(tmp_path: Path) -> None:
    lines = ['{"step": 1, "train_loss": 2.0}', DEEP, '{"step": []}', '{"step": "2"}', "[1]", "9" * 5000, '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [line["step"] for line in metrics(tmp_path)] == [1, 3]
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.parametrize("content", ['{"micro_batch_size": "x"}', '{"micro_batch_size": 0}', DEEP])
def test_a_record_of_a_halved_batch_of_another_form_is_none(content: str, config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "micro_batch.json").write_text(content)
    assert loop.train(config, tmp_path, report=lambda line: None)["micro_batch_size"] == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.width", 1_000_000_007), ("model.depth", 10**9), ("parallel.dp", 1_000_000_007),
        ("parallel.timeout_seconds", 1e300), ("validations", 10**9), ("data.sequence_length", 10**15),
        ("tokens", 10**300), ("optimizer.batch_size", 10**15), ("schedule.warmup_per_parameter", 1e300),
    ],
)  # fmt: skip
def test_an_absurd_number_is_refused_at_once(field: str, value: Any) -> None:
    config = RunConfig(model=ModelConfig(vocab_size=256))
    group, _, name = field.rpartition(".")
    setattr(getattr(config, group) if group else config, name, value)
    with pytest.raises(UserError, match=rf"^{field} is .* at most 1"):
        validate(config)


def test_a_billion_ranks_are_answered_at_once() -> None:
    config = RunConfig(model=ModelConfig(vocab_size=256))
    with pytest.raises(UserError, match="1,000,000,007 ranks"):
        check_world(config, 1_000_000_007, 1_000_000_007)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    slurm = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "1(x99999999999)",
    }  # fmt: skip
    for environment in (torchrun | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1000000007"), slurm):
        with pytest.raises(UserError, match="variables give no valid rank"):
            detect(environment)
    for name, value in (("MASTER_PORT", "http"), ("MASTER_PORT", "99999"), ("RANK", "x"), ("RANK", "-1")):
        with pytest.raises(UserError, match=f"{name}={value}"):
            detect(torchrun | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", name: value})
    assert divisors_of(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors_of(10**9)[-2:] == [5 * 10**8, 10**9]


def test_few_lines_of_aliases_do_not_fill_the_memory(tmp_path: Path) -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(8)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(UserError, match="it holds more than 1000000 values"):
        read_document(tmp_path / "a.yaml", dict[str, Any])
    (tmp_path / "a.yaml").write_text("a: &a [*a]")
    with pytest.raises(UserError, match="nested too deeply"):
        read_document(tmp_path / "a.yaml", dict[str, Any])
