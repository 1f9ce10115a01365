"""Tasks of one's own: a file of questions here, a folder of lm-eval YAML in `custom_yaml.py`.

Special here:
- A .jsonl file is a task. With `choices` it is multiple choice, without it the answer is a gold answer. Texts are taken
  as they are written: no template stands around the question.
- Few-shot examples of a file are drawn by a hash of (seed, task, item): an item has the same ones whatever the limit.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import re
import string
import zlib
from pathlib import Path
from typing import Any

from ...train.data.readers import well_formed
from ...train.errors import UserError
from .custom_yaml import load_yaml_tasks, written_name
from .suite import SuiteTask, choose_items, freeze, quiet

_JSONL = (".jsonl", ".jsonl.gz")
ENDINGS = (*_JSONL, ".yaml")
_FIELDS = ("question", "choices", "answer", "context", "id")
_BETWEEN_EXAMPLES = "\n\n"


def load_custom(path: Path | str, shots: int = 0, limit: int | None = None, seed: int = 0) -> dict[str, SuiteTask]:
    """The task of a .jsonl file, or every task of a file or a folder (with all below it) of lm-eval YAML.

    Args:
        path: a file that ends in one of `ENDINGS`, or a folder.
        shots: examples before each question, and then `@shots` ends the names. 0 leaves a YAML's own `num_fewshot`.
        limit: items a task; None means all.
        seed: of the choice of items and examples.

    Raises:
        UserError: naming file, line, field and value, and what would be accepted.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return load_yaml_tasks(path, sorted(path.rglob("*.yaml")), shots, limit, seed)
    if not path.name.lower().endswith(ENDINGS):
        raise UserError(f"task {str(path)!r} is neither a folder nor a file that ends in {', '.join(ENDINGS)}")
    if not path.is_file():
        raise UserError(
            f"task {str(path)!r} is no file; it must be a folder or a file that ends in {', '.join(ENDINGS)}"
        )
    if path.suffix.lower() == ".yaml":
        return load_yaml_tasks(path.parent, [path], shots, limit, seed)
    return _load_jsonl(path, shots, limit, seed)


def _load_jsonl(path: Path, shots: int, limit: int | None, seed: int) -> dict[str, SuiteTask]:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    rows = read_items(path)
    name = task_name(path.name[: -len(next(end for end in _JSONL if path.name.lower().endswith(end)))])
    multiple_choice = "choices" in rows[0]
    # One blank joins prompt and answer, unless all prompts end in white space of their own.
    delimiter = "" if all(row["prompt"][-1].isspace() for row in rows) else " "
    if delimiter:
        rows = [row | {"prompt": row["prompt"].rstrip()} for row in rows]
    indices = choose_items(name, len(rows), limit, seed)
    chosen = [dict(rows[index]) for index in indices]
    for index, row in zip(indices, chosen, strict=True):
        row["examples"] = _examples(path, name, rows, index, shots, seed, delimiter)
        if not multiple_choice:
            row["answer"] = delimiter + row["answer"]
    metrics = ("acc", "acc_norm") if multiple_choice else ("acc",)
    written = written_name(name, shots)
    config: dict[str, Any] = {
        "task": written,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(chosen)},
        "test_split": "test",
        "output_type": "multiple_choice" if multiple_choice else "loglikelihood",
        "description": "examples",  # lm-eval puts it in front of the prompt; the question stays a text of its own
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "target_delimiter": delimiter,
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
        "metadata": {"version": 1},
    }
    if multiple_choice:
        config["doc_to_choice"] = "choices"
    with quiet():
        task = ConfigurableTask(config=config)
    remarks = {"examples": "other lines of the file"} if shots else {}
    frozen = freeze(written, task, indices, len(rows), seed, "test", path.name, already_chosen=True, shots=0, **remarks)
    frozen.shots = shots  # lm-eval is to add none to those that stand in the description
    return {written: frozen}


def task_name(text: str) -> str:
    """A name that can stand in a list of tasks and in a column of a table."""
    return re.sub(r"[^\w.-]+", "_", text).strip("_") or "task"


def _examples(
    path: Path, name: str, rows: list[dict[str, Any]], index: int, shots: int, seed: int, delimiter: str
) -> str:
    """Text of the examples of one item: other items of the file with their answers, never one that equals the item."""
    if not shots:
        return ""
    found: dict[int, None] = {}
    for draw in range(100 * (shots + 1)):
        digest = hashlib.sha256(f"{seed}/{name}/{index}/example/{draw}".encode()).digest()
        other = int.from_bytes(digest[:8], "big") % len(rows)
        if rows[other]["prompt"] != rows[index]["prompt"]:
            found[other] = None
        if len(found) == shots:
            break
    else:
        raise UserError(
            f"task {str(path)!r} is asked with {shots} examples an item; they come from its {len(rows)} lines "
            "without the item itself, so it must have more lines, or fewer examples be asked for"
        )
    texts = []
    for other in found:
        row = rows[other]
        answer = row["choices"][row["answer"]] if "choices" in row else row["answer"]
        texts.append(row["prompt"] + delimiter + answer + _BETWEEN_EXAMPLES)
    return "".join(texts)


def read_items(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file: {"prompt", "choices", "answer" (a place)} or {"prompt", "answer" (a text)}.

    Raises:
        UserError: at the first line that is not an item, or that is of another kind than the first.
    """
    items: list[dict[str, Any]] = []
    first = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        item = _item(_json_object(line, where), where)
        if items and ("choices" in item) != ("choices" in items[0]):
            kinds = ("has choices", "has none") if "choices" in item else ("has no choices", "has some")
            raise UserError(f"{where} {kinds[0]}, line {first} {kinds[1]}; all lines of a file must be of one kind")
        first = first or number
        items.append(item)
    if not items:
        raise UserError(f"{path} holds no items; it must have a line of JSON for each question")
    return items


def _lines(path: Path) -> list[bytes]:
    try:
        content = path.read_bytes()
        if path.name.lower().endswith(".gz"):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged ({error}); fetch or compress it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); it must be a readable .jsonl file") from None
    return content.removeprefix(b"\xef\xbb\xbf").split(b"\n")


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 (byte 0x{line[error.start]:02x}); convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); every line must hold one JSON object") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} holds {type(row).__name__}, not an object; every line must hold one JSON object")
    return row


def _item(row: dict[str, Any], where: str) -> dict[str, Any]:
    for field in row.keys() - set(_FIELDS):  # a misspelt field would turn the item into one of another kind
        for near in difflib.get_close_matches(field, _FIELDS, n=1, cutoff=0.75):
            if near not in row:
                raise UserError(f"{where} has a field {field!r} and no {near!r}; the fields are {', '.join(_FIELDS)}")
    prompt = _text(row, "question", where)
    if "context" in row and row["context"] != "":
        prompt = _text(row, "context", where) + "\n" + prompt
    if row.get("choices") is None:
        return {"prompt": prompt, "answer": _text(row, "answer", where)}
    choices = row["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f"{where}: choices is {_shown(choices)}; it must be a list of two texts or more")
    for place, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise UserError(f"{where}: choices[{place}] is {_shown(choice)}; it must be a text that is not blank")
        if choice in choices[:place]:
            raise UserError(f"{where}: choices[{place}] is {_shown(choice)} once more; choices must differ")
    return {
        "prompt": prompt,
        "choices": [well_formed(choice) for choice in choices],
        "answer": _place(row.get("answer"), choices, where),
    }


def _text(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise UserError(f"{where} has no {field!r}; it has {', '.join(row) or 'no fields'}")
    if not isinstance(row[field], str) or not row[field].strip():
        raise UserError(f"{where}: {field} is {_shown(row[field])}; it must be a text that is not blank")
    return well_formed(row[field])


def _place(answer: Any, choices: list[str], where: str) -> int:
    """The place of the right choice, given by place, by text, or by letter. A text that is a choice is no letter."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        letters = string.ascii_uppercase[: len(choices)]
        if len(answer) == 1 and answer.upper() in letters:
            return letters.index(answer.upper())
    last = string.ascii_uppercase[min(len(choices), 26) - 1]
    raise UserError(
        f"{where}: answer is {_shown(answer)}; it must be the place of a choice (0 to {len(choices) - 1}), "
        f"its letter (A to {last}), or its text"
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
