"""Folders of text as perplexity suites, and the worst windows of the held-out text."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from isoflop.evaluate.checkpoint import worst_windows
from isoflop.evaluate.tasks.custom import DOCUMENT_BYTES, domains, load_texts
from isoflop.evaluate.tasks.suite import SuiteTask
from isoflop.train.config import DataConfig, RunConfig
from isoflop.train.data.loader import validation_windows
from isoflop.train.data.shards import prepare
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.model.gpt import GPT
from simple_models import gpt


def texts_of(entry: SuiteTask) -> list[str]:
    return [instance.args[0] for instance in entry.task.instances or []]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "held"
    (made / "web" / "2024").mkdir(parents=True)
    (made / "code").mkdir()
    (made / "web" / "a.txt").write_text("web one")
    (made / "web" / "2024" / "b.md").write_text("web two")
    (made / "web" / ".hidden.txt").write_text("hidden")
    (made / "web" / "picture.png").write_bytes(b"\x89PNG")
    (made / "code" / "c.jsonl.gz").write_bytes(gzip.compress(lines(["code one", "  ", "code two"])))
    (made / "code" / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(["code three"])))
    (made / "wiki.jsonl").write_bytes(lines([f"wiki {i}" for i in range(30)]))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["books"]}), made / "books.v1.parquet")
    (made / "x.txt").write_text("loose one")
    (made / "y.md").write_text("loose two")
    return made


def test_subfolders_files_of_many_documents_and_loose_texts_are_domains(folder: Path) -> None:
    loaded = load_texts(folder)
    assert {name: texts_of(entry) for name, entry in loaded.items() if name != "text_held_wiki"} == {
        "text_held_books": ["books"],
        "text_held_code": ["code one", "code two", "code three"],
        "text_held_files": ["loose one", "loose two"],
        "text_held_web": ["web two", "web one"],
    }
    entry = loaded["text_held_wiki"]
    assert entry.task.OUTPUT_TYPE == "loglikelihood_rolling"
    assert len(texts_of(entry)) == entry.subset["of"] == 30
    assert entry.subset["source"] == "held/wiki"
    some = load_texts(folder, 10)["text_held_wiki"]
    assert (texts_of(some), some.subset["of"]) == ([f"wiki {i}" for i in some.indices], 30)


def test_a_long_document_is_cut_and_a_single_text_comes_in_pieces(tmp_path: Path) -> None:
    book = "".join(f"Line {i} of a bök.\n\n" for i in range(2000))
    for domain in ("alone", "among"):
        (tmp_path / "held" / domain).mkdir(parents=True)
        (tmp_path / "held" / domain / "book.txt").write_text(book)
    (tmp_path / "held" / "among" / "note.txt").write_text("a note")
    (tmp_path / "held" / "rows.jsonl").write_bytes(lines(["é" * DOCUMENT_BYTES, "a note"]))
    loaded = load_texts(tmp_path / "held")
    pieces = texts_of(loaded["text_held_alone"])
    assert "".join(pieces) == book
    assert max(len(piece.encode()) for piece in pieces) <= DOCUMENT_BYTES
    assert texts_of(loaded["text_held_among"]) == [pieces[0], "a note"]
    assert texts_of(loaded["text_held_rows"]) == ["é" * (DOCUMENT_BYTES // 2), "a note"]


def small_model() -> GPT:
    return gpt(0, 16, torch.float32, width=16, depth=1)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b" \n", "domain 'bad' has no text"),
        ("a.txt", b"caf\xe9 au lait", r"a.txt is not UTF-8 text \(byte 0xe9"),
        ("a.jsonl", b'{"content": "x"}\n', "must be in a field 'text'; the fields of line 1 .*a.jsonl are 'content'"),
        ("a.jsonl.gz", gzip.compress(lines(["x"]), mtime=0)[:-5], "a.jsonl.gz is damaged"),
        ("a.png", b"x", "holds no file of an accepted kind: .txt"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / "held" / "bad").mkdir(parents=True)
    (tmp_path / "held" / "bad" / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint) as raised:
        load_texts(tmp_path / "held")
    assert str(raised.value).startswith(f"task 'text:{tmp_path / 'held'}'")
    assert "data." not in str(raised.value)


def test_no_folder_and_domains_that_would_share_a_name_are_refused(tmp_path: Path) -> None:
    for name in ("a b", "a,b"):
        (tmp_path / "held" / name).mkdir(parents=True)
        (tmp_path / "held" / name / "x.txt").write_text("text")
    assert list(domains(tmp_path / "held")) == ["a b", "a,b"]
    with pytest.raises(UserError, match="there is no such folder"):
        load_texts(tmp_path / "none")
    with pytest.raises(UserError, match="two domains with the name 'text_held_a_b'"):
        load_texts(tmp_path / "held")


# The worst windows


def loaded_of(data: DataConfig, model: GPT) -> Any:
    return SimpleNamespace(model=model, tokenizer=ByteTokenizer(), config=RunConfig(data=data))


def test_the_worst_windows_are_those_of_the_held_out_loss(small_corpus: Callable[..., DataConfig]) -> None:
    data = small_corpus(validation_tokens=2048)
    loaded = loaded_of(data, small_model())
    result = worst_windows(loaded)
    worst = result["worst"][:7]
    windows = torch.from_numpy(validation_windows(prepare(data), 16, 2048))
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(loaded.model(window[None, :-1])[0].double(), window[1:]).item()
            for window in windows
        ]
    assert result["val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert result["val_loss_se"] == pytest.approx(np.std(losses, ddof=1) / math.sqrt(len(losses)), rel=1e-5)
    text = int((windows[:, 1:] != ByteTokenizer().end_of_document).sum())  # a byte token is a byte of text
    assert result["val_bpb"] == pytest.approx(16 * sum(losses) / math.log(2) / text, rel=1e-6)
    order = np.argsort([-loss for loss in losses], kind="stable")[:7]
    assert [entry["index"] for entry in worst] == order.tolist()
    for entry in worst:
        assert math.isclose(entry["loss"], losses[entry["index"]], rel_tol=1e-5)  # float32 logits, in batches
        expected = ByteTokenizer().decode(windows[entry["index"]][1:].numpy())
        assert entry["text"] == expected
        assert len(expected) <= 16


def test_a_loss_that_is_no_number_stays_no_number(small_corpus: Callable[..., DataConfig]) -> None:
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    result = worst_windows(loaded_of(small_corpus(validation_tokens=64), model))
    assert math.isnan(result["val_loss"])
    assert math.isnan(result["worst"][0]["loss"])
