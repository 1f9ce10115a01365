"""The user's own tasks: a .jsonl file of questions, lm-eval's YAML, or a folder of text.

Examples of a file are drawn by a hash of (seed, task, item), so an item has the same examples at every limit. Mistakes
in YAML that lm-eval ignores, such as two tasks with one name, are errors. Its Python (`!function`, a metric's script)
runs only with `allow_code`.

A folder of text is a perplexity suite, scored in bits per byte by domain (Paloma: Magnusson et al. 2023). A domain is a
folder one level down, or a file of many documents; plain text files in the folder itself are one domain. Only the first
`DOCUMENT_BYTES` bytes of a document count; a single plain text is cut into pieces of that size.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import string
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ...train.data.corpora import find_files
from ...train.data.readers import cut, format_of, json_objects, one_line, read_documents, well_formed
from ...train.errors import UserError
from ...train.files import read_document
from .staging import lm_eval_tasks
from .suite import (
    SEED,
    SuiteTask,
    choose_items,
    explained,
    freeze,
    freeze_whole,
    nearest,
    only_text,
    quiet,
    task_of_rows,
    written_name,
)

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_JSONL = (".jsonl", ".jsonl.gz")
ENDINGS = (*_JSONL, ".yaml")
_FIELDS = ("question", "choices", "answer", "context", "id")
_BETWEEN_EXAMPLES = "\n\n"
DOCUMENT_BYTES = 4096
FIELD = "text"  # of JSON lines and parquet
_LOOSE = "files"  # the domain of plain texts in the folder itself


def load_custom(
    path: Path | str, shots: int = 0, limit: int | None = None, allow_code: bool = False
) -> dict[str, SuiteTask]:
    """Load the task of a .jsonl file, or all tasks of lm-eval YAML (a file, or a folder with subfolders).

    `shots`: examples before each question, added to task names as `@shots`; 0 keeps a YAML's `num_fewshot`. `limit`:
    items per task. `allow_code`: whether YAML may run Python. Raises UserError if a file is invalid.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _load_yaml(path, sorted(path.rglob("*.yaml")), shots, limit, allow_code)
    endings = ", ".join(ENDINGS)
    if not path.name.lower().endswith(ENDINGS):
        raise UserError(f"task {str(path)!r} is neither a folder nor a file that ends in {endings}")
    if not path.is_file():
        raise UserError(f"task {str(path)!r} is not a file; it must be a folder or a file that ends in {endings}")
    if path.suffix.lower() == ".yaml":
        return _load_yaml(path.parent, [path], shots, limit, allow_code)
    return _load_jsonl(path, shots, limit)


def check_custom(path: Path, allow_code: bool = False) -> None:
    """Check a .jsonl file, or YAML (file or folder) without its data. Raises UserError if one is invalid."""
    if path.name.lower().endswith(_JSONL):
        read_questions(path)
    for file in sorted(path.rglob("*.yaml")) if path.is_dir() else [path] if path.suffix == ".yaml" else []:
        _read_yaml(file, allow_code)


def _load_jsonl(path: Path, shots: int, limit: int | None) -> dict[str, SuiteTask]:
    rows = read_questions(path)
    name = task_name(path.name[: -len(next(end for end in _JSONL if path.name.lower().endswith(end)))])
    multiple_choice = "choices" in rows[0]
    # One blank joins prompt and answer, unless all prompts end in white space.
    delimiter = "" if all(row["prompt"][-1].isspace() for row in rows) else " "
    if delimiter:
        rows = [row | {"prompt": row["prompt"].rstrip()} for row in rows]
    indices = choose_items(name, len(rows), limit)
    chosen = [dict(rows[index]) for index in indices]
    for index, row in zip(indices, chosen, strict=True):
        row["examples"] = _examples(path, name, rows, index, shots, delimiter)
        if not multiple_choice:
            row["answer"] = delimiter + row["answer"]
    metrics = ("acc", "acc_norm") if multiple_choice else ("acc",)
    written = written_name(name, shots or None)
    config: dict[str, Any] = {
        "task": written,
        "output_type": "multiple_choice" if multiple_choice else "loglikelihood",
        "description": "examples",  # lm-eval puts it in front of the prompt; the question stays separate
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "target_delimiter": delimiter,
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
    }
    if multiple_choice:
        config["doc_to_choice"] = "choices"
    task = task_of_rows(config, chosen)
    remarks = {"examples": "other lines of the file"} if shots else {}
    frozen = freeze(written, task, indices, len(rows), "test", path.name, shots=0, **remarks)
    frozen.shots = shots  # lm-eval adds no examples: they are in the description
    return {written: frozen}


def task_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("_") or "task"


def _examples(path: Path, name: str, rows: list[dict[str, Any]], index: int, shots: int, delimiter: str) -> str:
    if not shots:
        return ""
    others: dict[int, None] = {}
    for draw in range(100 * (shots + 1)):
        digest = hashlib.sha256(f"{SEED}/{name}/{index}/example/{draw}".encode()).digest()
        other = int.from_bytes(digest[:8], "big") % len(rows)
        if rows[other]["prompt"] != rows[index]["prompt"]:
            others[other] = None
        if len(others) == shots:
            break
    else:
        raise UserError(
            f"task {str(path)!r} has {len(rows)} lines, too few for {shots} examples per item, which are drawn from "
            "the other lines; add lines, or ask for fewer examples"
        )
    texts = []
    for other in others:
        row = rows[other]
        answer = row["choices"][row["answer"]] if "choices" in row else row["answer"]
        texts.append(row["prompt"] + delimiter + answer + _BETWEEN_EXAMPLES)
    return "".join(texts)


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file of questions; return one dict per line.

    Each has the keys prompt, choices and answer (an index), or prompt and answer (a text). Raises UserError at the
    first invalid line, or if only some lines have choices.
    """
    try:
        rows = dict(json_objects(path))
    except UserError as error:
        raise UserError(str(error).removeprefix("data.path: ")) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); it must be a readable .jsonl file") from None
    if not rows:
        raise UserError(f"{path} has no items; it must have one line of JSON per question")
    items: list[dict[str, Any]] = []
    for number, row in rows.items():
        where = f"line {number} of {path}"
        items.append(item := _item(row, where))
        if ("choices" in item) != ("choices" in items[0]):
            which = ("choices", "none") if "choices" in item else ("no choices", "some")
            raise UserError(
                f"{where} has {which[0]} and line {min(rows)} has {which[1]}; all lines must have choices, or no line"
            )
    return items


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
        raise UserError(f"{where}: choices is {_shown(choices)}; it must be a list of at least two texts")
    for place, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise UserError(f"{where}: choices[{place}] is {_shown(choice)}; it must be a text that is not blank")
        if choice in choices[:place]:
            raise UserError(f"{where}: choices[{place}] repeats {_shown(choice)}; choices must differ")
    return {
        "prompt": prompt,
        "choices": [well_formed(choice) for choice in choices],
        "answer": _place(row.get("answer"), choices, where),
    }


def _text(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise UserError(f"{where} has no {field!r}; it has {', '.join(row) or 'no fields'}, and {field} must be a text")
    if not isinstance(row[field], str) or not row[field].strip():
        raise UserError(f"{where}: {field} is {_shown(row[field])}; it must be a text that is not blank")
    return well_formed(row[field])


def _place(answer: Any, choices: list[str], where: str) -> int:
    """Return the index of the right choice; `answer` is an index, a choice's text or a letter, tried in this order."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        if len(answer) == 1 and answer.upper() in letters:
            return letters.index(answer.upper())
    raise UserError(
        f"{where}: answer is {_shown(answer)}; it must be the place of a choice (0 to {len(choices) - 1}), "
        f"its letter (A to {letters[-1]}), or its text"
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# --- YAML -----------------------------------------------------------------------------------------------------------


def _load_yaml(
    folder: Path, files: list[Path], shots: int, limit: int | None, allow_code: bool
) -> dict[str, SuiteTask]:
    from lm_eval.tasks import TaskManager

    with quiet():
        manager = TaskManager(include_defaults=False)
        names = _index(folder, files, manager, allow_code)
        _check_members(folder, manager)
    result: dict[str, SuiteTask] = {}
    for name in names:
        for leaf, task in _build(folder, name, manager).items():
            written = written_name(leaf, shots or None)
            if written not in result:  # groups come first, because they may change the settings of their tasks
                result[written] = _frozen(folder, leaf, task, shots, limit)
    return result


def _index(folder: Path, files: list[Path], manager: TaskManager, allow_code: bool) -> list[str]:
    from lm_eval.tasks._index import Kind, TaskIndex

    index = manager.task_index
    defined: dict[str, Path] = {}
    for path in files:
        config = _read_yaml(path, allow_code)
        if not {"task", "group", "class"} & config.keys() or not (config.get("task") or config.get("group")):
            continue  # a template, for others to include
        name = config["group"] if "group" in config else config["task"]
        if not isinstance(name, str):
            raise UserError(f"{path}: task or group is {name!r}; it must be a text")
        if name in defined:
            raise UserError(f"task {name!r} is defined in {defined[name]} and in {path}; names must differ")
        defined[name] = path
        TaskIndex.process_cfg(config, path, index)
        index[name].yaml_path = None  # lm-eval would read the file again, without what was resolved here
    if not defined:
        where = files[0] if len(files) == 1 else folder
        raise UserError(f"{where} defines no task; tasks are lm-eval YAML files (*.yaml) with a `task`")
    return sorted(defined, key=lambda name: (index[name].kind is not Kind.GROUP, name))


def _read_yaml(path: Path, allow_code: bool, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = path.resolve()
    if path in including:
        raise UserError(f"{path} includes itself through {including[-1]}; remove one of the includes")
    try:
        config = _definition(path, allow_code)
        _resolve_data(config, path.parent)
    except RecursionError:  # an anchor may stand inside itself
        raise UserError(f"{path} is nested too deeply; use fewer levels") from None
    merged: dict[str, Any] = {}
    includes = config.pop("include", [])
    for include in includes if isinstance(includes, list) else [includes]:
        target = next((base / include for base in (path.parent, lm_eval_tasks()) if (base / include).is_file()), None)
        if target is None:
            raise UserError(
                f"{path} includes {include!r}; it must be a file next to it, or one of lm-eval's own such as "
                "hellaswag/hellaswag.yaml"
            )
        included = _read_yaml(target, allow_code, (*including, path))
        included.pop("task_list", None)  # as lm-eval: it belongs to the included file alone
        merged |= included
    return merged | config


class _Definition(TypedDict, total=False):
    include: str | list[str]
    tag: str | list[str] | None


def _definition(path: Path, allow_code: bool) -> dict[str, Any]:
    """Read one YAML file. Raises UserError if it would run Python that is not lm-eval's, unless `allow_code`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if not path.is_relative_to(lm_eval_tasks().resolve()):
        try:
            config = read_document(path, dict[str, Any])
            read_document(path, _Definition)  # checks what is read before lm-eval reads the rest
        except UserError as error:
            code = "!function" if "'!function'" in str(error) else None
            if code is None:
                raise
        else:
            code = None if allow_code else _script(config)
        if code and not allow_code:
            raise UserError(
                f"{path} runs its own Python ({code}); if you trust it, allow that with --allow-code, or with "
                "evaluate.allow_code=true in a sweep"
            )
        if code is None:
            return config
    try:
        return load_yaml(path, recursive=False)
    except Exception as error:  # the module of a !function may raise any error
        raise UserError(f"{path} cannot be loaded ({one_line(error)}); it must be a task in lm-eval's YAML") from error


def _script(value: Any) -> str | None:
    """Return the setting that would run code (a metric not from lm-eval, data as a script or pickle), or None."""
    from lm_eval.api import metrics  # noqa: F401  (registers them)
    from lm_eval.api.registry import metric_registry

    if isinstance(value, dict):
        if value.get("trust_remote_code") or value.get("dataset_path") == "pandas":  # which reads pickles
            return "trust_remote_code" if value.get("trust_remote_code") else "dataset_path 'pandas'"
        metrics_listed = value.get("metric_list")
        for item in metrics_listed if isinstance(metrics_listed, list) else []:
            if isinstance(item, dict) and (item.get("hf_evaluate") or str(item.get("metric")) not in metric_registry):
                return f"metric {item.get('metric')!r}"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((script for item in inner if (script := _script(item))), None)


def _resolve_data(config: dict[str, Any], folder: Path) -> None:
    """Make data paths in `config` that exist in `folder` absolute, in place; leave Hub names and URLs."""
    for member in config["task"] if isinstance(config.get("task"), list) else []:
        if isinstance(member, dict):  # a group may define its tasks in place
            _resolve_data(member, folder)

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolved(one) for key, one in value.items()}
        if isinstance(value, list):
            return [resolved(one) for one in value]
        return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value

    if isinstance(options := config.get("dataset_kwargs"), dict):
        config["dataset_kwargs"] = options | {
            key: resolved(options[key]) for key in ("data_files", "data_dir") if key in options
        }
    name = config.get("dataset_path")
    if isinstance(name, str) and "/" in name and (folder / name).is_dir():
        config["dataset_path"] = str(folder / name)


def _check_members(folder: Path, manager: TaskManager) -> None:
    """Raise UserError if a group lists a task that no file defines, for which lm-eval would make up a task."""
    for name, entry in list(manager.task_index.items()):
        members = entry.cfg.get("task") if entry.cfg and "group" in entry.cfg else None
        for member in members if isinstance(members, list) else []:
            if isinstance(member, str) and member not in manager.task_index:
                hint = nearest(member, manager.task_index, "it must be defined in the same folder")
                raise UserError(f"group {name!r} of {folder} has the task {member!r}, which is not defined; {hint}")


def _build(folder: Path, name: str, manager: TaskManager) -> dict[str, Any]:
    with explained(f"task {name!r} of {folder} cannot be loaded", "look at its YAML and its data"), quiet():
        return only_text(manager.load([name])["tasks"])


def _frozen(folder: Path, name: str, task: Any, shots: int, limit: int | None) -> SuiteTask:
    advice = f"look at its YAML and its data{', which must hold enough examples' if shots else ''}"
    with explained(f"task {name!r} of {folder} cannot build its prompts", advice):
        split = "test" if task.has_test_docs() else "validation"
        return freeze_whole(name, task, limit, split, folder.name, shots or None)


# --- texts ----------------------------------------------------------------------------------------------------------


def load_texts(folder: Path | str, limit: int | None = None) -> dict[str, SuiteTask]:
    """Load each domain of a folder of text as a task, scored in bits per byte, named `text_<folder>_<domain>`.

    `limit`: documents per domain; None means all. Raises UserError if a domain is empty or cannot be read.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"task 'text:{folder}': there is no such folder; it must be a folder of text files")
    result = {}
    for domain, files in domains(folder).items():
        name = task_name(f"text_{folder.resolve().name}_{domain}")
        if name in result:
            raise UserError(f"task 'text:{folder}' has two domains with the name {name!r}; rename one of them")
        result[name] = _load_domain(folder, name, domain, files, limit)
    return result


def domains(folder: Path) -> dict[str, list[Path]]:
    """Return domain -> files of a folder of text, sorted by domain. Raises UserError if there are no files."""
    result: dict[str, list[Path]] = {}
    try:
        files = find_files(str(folder))
    except UserError as error:
        raise UserError(_about(folder, error)) from None
    for path in files:
        parts = path.relative_to(folder).parts
        own_domain = _LOOSE if format_of(path) == "plain" else path.name.split(".")[0]
        domain = parts[0] if len(parts) > 1 else own_domain
        result.setdefault(domain, []).append(path)
    return dict(sorted(result.items()))


def _load_domain(folder: Path, name: str, domain: str, files: list[Path], limit: int | None) -> SuiteTask:
    try:
        # Read twice, so that of a large file no more than the chosen documents is ever held.
        count = sum(1 for _ in _documents(files))
        indices = choose_items(name, count, limit)
        chosen = set(indices)
        rows = [{FIELD: text} for index, text in enumerate(_documents(files)) if index in chosen]
    except UserError as error:
        raise UserError(_about(folder, error)) from None
    if not rows:
        raise UserError(f"task 'text:{folder}': domain {domain!r} has no text; add some, or remove its files")
    config: dict[str, Any] = {
        "task": name,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": FIELD,
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    }
    return freeze(name, task_of_rows(config, rows), indices, count, "test", f"{folder.name}/{domain}")


def _documents(files: list[Path]) -> Iterator[str]:
    in_pieces = len(files) == 1 and format_of(files[0]) == "plain"
    for path in files:
        texts = read_documents(path, FIELD, DOCUMENT_BYTES)
        if in_pieces:
            yield from texts
        elif format_of(path) == "plain":
            yield from islice(texts, 1)
        else:
            for text in texts:
                yield from cut([text], DOCUMENT_BYTES)


def _about(folder: Path, error: UserError) -> str:
    """Reword a corpus reader's error, which names settings of training, for a `text:` task."""
    text = str(error).removeprefix("data.path: ")
    text = text.replace(f"data.field is {FIELD!r}; ", f"the text must be in a field {FIELD!r}; ")
    return f"task 'text:{folder}': " + text.replace("data.path is ", "the folder is ")
