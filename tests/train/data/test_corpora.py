"""Every kind of file gives the same text, a fingerprint depends on the text alone, and bad input gives one sentence."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from isoflop.train.config import DataConfig
from isoflop.train.data import corpora, readers
from isoflop.train.data.corpora import TextFiles, open_corpus
from isoflop.train.errors import UserError

DOCUMENTS = ["First, a document.\nTwo lines.\n", "Zweites: äöü ß", "第三 😀\r\n", "last\n\n\nwith blank lines"]


def text(path: Path, **fields: Any) -> DataConfig:
    return DataConfig(corpus="text", path=str(path), **fields)


def json_lines(documents: list[str], field: str = "text") -> bytes:
    rows = [json.dumps({"id": i, field: document}, ensure_ascii=i % 2 == 0) for i, document in enumerate(documents)]
    return ("\n".join(rows) + "\n").encode()


def write(folder: Path, kind: str, documents: list[str], field: str = "text") -> Path:
    """Write documents to a folder, in one of the accepted kinds of file."""
    folder.mkdir()
    ending, _, compression = kind.partition(".")
    if ending in ("txt", "md", "rst", "py"):
        pack = {"": bytes, "gz": gzip.compress, "zst": zstandard.compress}[compression]
        for i, document in enumerate(documents):
            (folder / f"{i:04d}.{kind}").write_bytes(pack(document.encode()))
    elif kind == "parquet":
        table = pa.table({"id": list(range(len(documents))), field: documents})
        pq.write_table(table, folder / "rows.parquet", row_group_size=3)
    else:
        plain = json_lines(documents, field)
        half = len(plain) // 2
        compress: dict[str, Callable[[bytes], bytes]] = {
            "jsonl": bytes,
            "jsonl.gz": gzip.compress,
            "json.gz": gzip.compress,
            # Two frames, cut within a line: what `cat a.zst b.zst` and parallel compressors write.
            "jsonl.zst": lambda b: zstandard.compress(b[:half]) + zstandard.compress(b[half:]),
        }
        (folder / f"rows.{kind}").write_bytes(compress[kind](plain))
    return folder


KINDS = ["txt", "md", "rst", "py.zst", "txt.gz", "jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_reads_as_the_same_text(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / kind, kind, DOCUMENTS)
    assert list(open_corpus(text(folder)).documents()) == DOCUMENTS


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
def test_the_field_names_the_text(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / kind, kind, DOCUMENTS, field="content")
    assert list(open_corpus(text(folder, field="content")).documents()) == DOCUMENTS
    with pytest.raises(UserError, match=r"data.field is 'text'; .* 'id', 'content'$"):
        list(open_corpus(text(folder)).documents())


def test_a_file_a_folder_and_a_glob_name_the_same_corpus(tmp_path: Path) -> None:
    folder = write(tmp_path / "deep", "jsonl", DOCUMENTS)
    (tmp_path / "deep" / ".hidden.txt").write_text("not this")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89PNG")
    named = [folder / "rows.jsonl", folder, tmp_path, tmp_path / "**" / "*.jsonl", tmp_path / "d*"]
    opened = [open_corpus(text(path)) for path in named]
    assert {tuple(corpus.documents()) for corpus in opened} == {tuple(DOCUMENTS)}
    assert len({corpus.fingerprint() for corpus in opened}) == 1


def test_blank_documents_are_left_out_and_broken_unicode_is_replaced(tmp_path: Path) -> None:
    rows = ['{"text": "a\\ud800b"}', "", '{"text": null}', '{"text": " \\n"}', '{"text": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert list(open_corpus(text(tmp_path)).documents()) == ["a\ufffdb", "😀"]


def test_long_plain_files_are_cut_without_losing_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "SINGLE_FILE_PIECE_BYTES", 1000)
    whole = "".join(f"Paragraph {i}: " + "wörter " * (i % 40) + "\n\n" for i in range(200)) + "😀" * 2000
    (tmp_path / "book.txt").write_text(whole, newline="")
    pieces = list(open_corpus(text(tmp_path / "book.txt")).documents())
    for ending, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        (tmp_path / f"book.txt{ending}").write_bytes(pack(b"\xef\xbb\xbf" + whole.encode()))
        assert list(open_corpus(text(tmp_path / f"book.txt{ending}")).documents()) == pieces
    assert "".join(pieces) == whole
    assert max(len(piece.encode()) for piece in pieces) <= 1000
    # Where there are blank lines, pieces end at one.
    assert all(piece.endswith("\n\n") for piece in pieces if "Paragraph" in piece and "😀" not in piece)


def test_a_file_among_others_is_one_document(tmp_path: Path) -> None:
    long = "one line\n\n" * 5000
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text("short")
    assert list(open_corpus(text(tmp_path)).documents()) == [long, "short"]


@pytest.mark.parametrize("limit", [1, 7, 31, 47, 10_000])
def test_max_bytes_cuts_the_stream_at_a_whole_character(tmp_path: Path, limit: int) -> None:
    folder = write(tmp_path / "c", "jsonl", DOCUMENTS)
    everything = "".join(DOCUMENTS).encode()
    cut = "".join(open_corpus(text(folder, max_bytes=limit)).documents()).encode()
    assert everything.startswith(cut)
    assert min(limit, len(everything)) - 3 <= len(cut) <= limit  # a character of UTF-8 has at most four bytes


def test_a_long_line_is_whole_and_one_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BLOCK", 1 << 8)
    monkeypatch.setattr(readers, "LONGEST_LINE", 1 << 20)
    long = "ü" * (1 << 18)
    (tmp_path / "a.jsonl").write_bytes(json_lines(["short", long, "last"]))
    assert list(open_corpus(text(tmp_path)).documents()) == ["short", long, "last"]
    assert "".join(open_corpus(text(tmp_path, max_bytes=105)).documents()) == "short" + "ü" * 50
    for name, content in (("b.jsonl", b" " * (1 << 21)), ("b.jsonl.zst", zstandard.compress(b" " * (1 << 26)))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} has a line of more than 1,048,576 bytes"):
            list(open_corpus(text(tmp_path / name)).documents())


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path, kind: str) -> None:
    here = write(tmp_path / "here", kind, DOCUMENTS)
    shutil.copytree(here, tmp_path / "elsewhere" / "deeper")
    fingerprint = open_corpus(text(here)).fingerprint()
    assert len(fingerprint) == 16
    int(fingerprint, 16)
    assert open_corpus(text(tmp_path / "elsewhere")).fingerprint() == fingerprint
    changed = write(tmp_path / "changed", kind, [*DOCUMENTS[:-1], DOCUMENTS[-1].replace("blank", "blind")])
    others = [open_corpus(text(changed)), open_corpus(text(here, max_bytes=50)), open_corpus(text(here, max_bytes=51))]
    if kind != "txt":
        others.append(open_corpus(text(here, field="id")))
    assert len({fingerprint, *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_renaming_files_changes_the_fingerprint_only_under_a_limit(tmp_path: Path) -> None:
    write(tmp_path / "a", "txt", DOCUMENTS)
    write(tmp_path / "b", "txt", DOCUMENTS[::-1])
    whole = [open_corpus(text(tmp_path / name)).fingerprint() for name in "ab"]
    cut = [open_corpus(text(tmp_path / name, max_bytes=20)).fingerprint() for name in "ab"]
    assert whole[0] == whole[1]
    assert cut[0] != cut[1]


def test_a_large_corpus_is_fingerprinted_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "FULL_HASH_BYTES", 1 << 20)
    content = bytearray(b"0123456789abcde\n" * (1 << 17))  # 2 MiB
    path = tmp_path / "large.txt"
    path.write_bytes(content)
    before = open_corpus(text(path)).fingerprint()
    for position in (0, len(content) - 1, 0):  # the head, the tail, and the head changed back
        content[position] ^= 1
        path.write_bytes(content)
        assert open_corpus(text(path)).fingerprint() != before
    path.write_bytes(content + b"x")
    assert open_corpus(text(path)).fingerprint() != before


def test_a_sample_takes_from_every_file(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.jsonl").write_bytes(json_lines([f"file {i} document {j} " for j in range(2 if i else 1000)]))
    sample = list(open_corpus(text(tmp_path)).sample(2000))
    assert all(f"file {i} document 0" in "".join(sample) for i in range(5))
    assert 1500 < sum(len(document) for document in sample) <= 2000
    assert sample == list(open_corpus(text(tmp_path)).sample(2000))


def test_the_standard_library_is_a_corpus() -> None:
    corpus = open_corpus(DataConfig())
    documents = list(corpus.documents())
    sizes = [len(document.encode()) for document in documents]
    assert corpus.size_bytes() == sum(sizes)
    assert sum(sizes) > 5e6
    assert corpus.fingerprint() == open_corpus(DataConfig()).fingerprint()
    assert corpus.fingerprint() != open_corpus(DataConfig(max_bytes=10**6)).fingerprint()


def test_the_standard_library_leaves_out_what_is_not_its_own(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "site-packages/no.py", "b/__pycache__/no.py", "dist-packages/no.py", "no.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin1.py").write_bytes(b"# \xe4\n")
    corpus = corpora.StandardLibrary(tmp_path)
    assert list(corpus.documents()) == ["# a.py\n", "# b/c.py\n"]
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    assert corpora.StandardLibrary(tmp_path.with_name("copy")).fingerprint() == corpus.fingerprint()


BAD_FILES = {
    "no.jsonl": (b'{"text": "fine"}\n\n{"text": "broken\n', r"line 3 of .*no\.jsonl is not JSON"),
    "list.jsonl": (b'{"text": "fine"}\n[1, 2]\n', r"line 2 of .*list\.jsonl holds list"),
    "utf.jsonl": (b'{"text": "\xff"}\n', r"line 1 of .*utf\.jsonl is not UTF-8 \(byte 0xff\)"),
    "field.jsonl": (
        b'{"body": "b", "id": 1}\n',
        r"data.field is 'text'; .* line 1 of .*field\.jsonl are 'body', 'id'$",
    ),
    "type.jsonl": (b'{"text": 7}\n', r"data.field is 'text'; .* line 1 of .*type\.jsonl is int"),
    "deep.jsonl": (b"[" * 100_000, r"line 1 of .*deep\.jsonl is not JSON"),
    "latin.txt": (b"fine, then: " + b"\xe4\xf6", r"latin\.txt is not UTF-8 .* offset 12"),
    "not.parquet": (b"PAR1 but nothing else", r"not\.parquet is not a readable parquet file"),
    "not.jsonl.gz": (b'{"text": "plain"}\n', r"not\.jsonl\.gz is damaged after line 0"),
    "cut.jsonl.gz": (gzip.compress(json_lines(DOCUMENTS * 50))[:-20], r"cut\.jsonl\.gz is damaged after line \d+"),
    "cut.jsonl.zst": (zstandard.compress(json_lines(DOCUMENTS * 50))[:-9], r"cut\.jsonl\.zst is damaged after line"),
    "cut.txt.gz": (gzip.compress("".join(DOCUMENTS * 50).encode())[:-20], r"cut\.txt\.gz is damaged after byte \d+"),
    "page.html": (b"<p>", r"data.path is '.*page\.html'; .* convert other files to \.txt"),
    "blank.jsonl": (b'{"text": " "}\n\n', r"data.path is '.*blank\.jsonl'; it contains no text"),
    "notes.docx": (b"PK", r"data.path is '.*notes\.docx'; .* \.txt, \.md"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, name: str) -> None:
    content, sentence = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        list(open_corpus(text(tmp_path / name)).documents())
    assert "\n" not in str(caught.value)


def test_a_parquet_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p", "parquet", DOCUMENTS * 100) / "rows.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is not a readable parquet file"):
        list(open_corpus(text(path)).documents())
    path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    with pytest.raises(UserError, match="is not a readable parquet file"):
        list(open_corpus(text(path)).documents())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"corpus": "text"}, "data.path is None"),
        ({"corpus": "text", "path": "/no/such/file.txt"}, "data.path is '/no/such/file.txt'"),
        ({"corpus": "text", "path": "/no/such/*.txt"}, r"data.path is '/no/such/\*.txt'"),
        ({"corpus": "books"}, "data.corpus is 'books'"),
        ({"max_bytes": 0}, "data.max_bytes is 0"),
        ({"corpus": "hf"}, "data.name is None"),
        ({"corpus": "hf", "name": "a/b"}, "data.max_bytes is null"),
    ],
)
def test_a_corpus_that_cannot_be_opened_is_refused_at_once(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        open_corpus(DataConfig(**fields))


def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt.gz", "a.parquet"):
        os.mkfifo(path := tmp_path / name)
        for read in (lambda corpus: list(corpus.documents()), lambda corpus: corpus.fingerprint()):
            with pytest.raises(UserError, match="it is a device or a pipe"):
                read(TextFiles(str(tmp_path), (path,)))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no file of an accepted kind"):
        open_corpus(text(tmp_path))
