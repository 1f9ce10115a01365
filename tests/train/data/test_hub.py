"""The Hub through `datasets`: a local folder, and a stand-in for the Hub with every kind of answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors
from isoflop.train.config import DataConfig
from isoflop.train.data.corpora import open_corpus
from isoflop.train.data.shards import at_hand, prepare
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError

datasets = pytest.importorskip("datasets")
DOCUMENTS = [f"Document {i} says " + "hello " * (i % 7 + 1) for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a dataset for `datasets`: real streaming, no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    root = tmp_path / "dataset"
    root.mkdir()
    rows = [json.dumps({"body": document, "n": i}) for i, document in enumerate(DOCUMENTS)]
    (root / "train.jsonl").write_text("\n".join(rows))
    return root


def hub(name: object, **fields: Any) -> DataConfig:
    return DataConfig(corpus="hf", name=str(name), **{"field": "body", "max_bytes": 10**6, **fields})


def test_a_dataset_streams_up_to_max_bytes(folder: Path) -> None:
    assert list(open_corpus(hub(folder)).documents()) == DOCUMENTS
    short = "".join(open_corpus(hub(folder, max_bytes=100)).documents())
    assert short == "".join(DOCUMENTS)[:100]
    assert open_corpus(hub(folder, max_bytes=100)).size_bytes() == 100


def test_a_checkpoint_finds_its_text_in_the_cache_and_fetches_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hub(folder, cache_dir=str(tmp_path / "cache"), validation_fraction=0.2, tokenizer="bytes")
    config.fingerprint = open_corpus(config).fingerprint()
    with monkeypatch.context() as context:
        context.setattr(datasets, "load_dataset", Mock(side_effect=AssertionError("the Hub was asked")))
        with pytest.raises(UserError, match=r"the text of .* is not in .*; run `isoflop data prepare`"):
            at_hand(config, ByteTokenizer())
    built = prepare(config)
    assert built.manifest["train"]["documents"] + built.manifest["validation"]["documents"] == len(DOCUMENTS)
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=AssertionError("the Hub was asked")))
    assert at_hand(config, ByteTokenizer()).directory == built.directory


def test_what_a_dataset_lacks_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data.field is 'text'; .* are 'body', 'n'$"):
        list(open_corpus(hub(folder, field="text")).documents())
    with pytest.raises(UserError, match=r"data.split is 'test'; .* does not have them"):
        list(open_corpus(hub(folder, split="test")).documents())
    with pytest.raises(UserError, match=r"data.field is 'n'; its value in row 1 of .* is int"):
        list(open_corpus(hub(folder, field="n")).documents())


def test_the_fingerprint_is_of_what_was_asked_for_and_needs_no_hub() -> None:
    base: dict[str, Any] = {"subset": "en", "revision": "abc"}
    variants: list[dict[str, Any]] = [{}, {"subset": "de"}, {"revision": "abd"}, {"split": "validation"}]
    variants += [{"field": "x"}, {"max_bytes": 9}]
    configs = [hub("a/b", **{**base, **variant}) for variant in variants] + [hub("a/c", **base)]
    assert len({open_corpus(config).fingerprint() for config in configs}) == len(configs)
    assert open_corpus(hub("a/b", **base)).fingerprint() == open_corpus(configs[0]).fingerprint()


RESPONSE = Mock(headers={})


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (ConnectionError("no route to host"), "no route to host"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "'a/b'"),
        (errors.RevisionNotFoundError("404", response=RESPONSE), "data.revision is 'v2'"),
        (errors.GatedRepoError("403", response=RESPONSE), "gated"),
    ],
)
def test_a_hub_that_does_not_serve_it_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, sentence: str
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    with pytest.raises(UserError, match=sentence) as caught:
        list(open_corpus(hub("a/b", revision="v2")).documents())
    assert "\n" not in str(caught.value)


def test_a_stream_that_breaks_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object, **__: object) -> Any:
        yield {"body": "one"}
        yield {"body": "two"}
        raise TimeoutError("timed out")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", rows)
    with pytest.raises(UserError, match="after 2 rows"):
        list(open_corpus(hub("a/b")).documents())
