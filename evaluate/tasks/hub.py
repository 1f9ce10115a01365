"""Tasks that lm-eval knows by name: a cached index, and copies of their data for nodes without a network.

lm-eval reads 14,000 YAML files to know its names, 10 s in every process. Data that tasks load while they are staged are
kept as Parquet, by the arguments of `datasets.load_dataset`, and read back later.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...train.errors import UserError
from ...train.files import file_sha256, read_json, write_json
from .staging import STAGED, Report, cache_root, replacement, writable
from .suite import SuiteTask, errors_only, explained, freeze_whole, nearest, only_text, quiet, suite_names

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# Arguments of load_dataset that change how the data are fetched, but not which data.
_MANNERS = {
    "cache_dir", "download_mode", "download_config", "keep_in_memory", "num_proc", "save_infos", "storage_options",
    "token", "trust_remote_code", "verification_mode",
}  # fmt: skip
ADVICE = (
    "its data come from the Hugging Face Hub: run `isoflop data benchmarks --tasks {name}` once on a machine with "
    "network and ISOFLOP_CACHE on a shared disk, or choose tasks of the suites small, core and domains, which do not "
    "need the Hub"
)
_UNTEXTUAL = {"unsafe_code", "doc_to_image", "doc_to_audio"}  # keys of definitions


# --- names -----------------------------------------------------------------------------------------------------------


def task_manager(progress: Report) -> TaskManager:
    """Return lm-eval's index of task names, from the cache if there is one."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry, Kind

    root = Path(lm_eval.__file__).parent / "tasks"
    header = {"lm_eval": lm_eval.__version__, "root": str(root), "changed": root.stat().st_mtime_ns}
    path = cache_root() / "lm_eval_tasks.json"
    cached = read_json(path)
    with quiet():
        if cached is not None and cached.get("header") == header:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                manager = TaskManager(include_defaults=False)
                index = {
                    name: Entry(name, Kind[kind], root / file if file else None, None, set(tags))
                    for name, (kind, file, tags) in cached["names"].items()
                }
                manager._index, manager._all_tasks = index, sorted(index)
                return manager
        progress("reading lm-eval's task definitions (once, about 10 s)")
        manager = TaskManager()
    names = {
        name: [entry.kind.name, str(entry.yaml_path.relative_to(root)) if entry.yaml_path else None, sorted(entry.tags)]
        for name, entry in manager.task_index.items()
    }
    with contextlib.suppress(OSError):
        write_json(path, {"header": header, "names": names})
    return manager


def check_name(name: str, manager: TaskManager) -> None:
    """Raise UserError, with the nearest names, if lm-eval has no such task, group or tag."""
    if name in manager.all_tasks:
        return
    names = sorted({*manager.all_tasks, *suite_names(), *STAGED})
    hint = nearest(name, names, "`lm-eval ls tasks` lists the names")
    raise UserError(f"task {name!r} is neither a task of lm-eval nor a folder; {hint}")


# --- tasks -----------------------------------------------------------------------------------------------------------


def load_named(
    name: str, shots: int | None, limit: int | None, manager: TaskManager, progress: Report
) -> dict[str, SuiteTask]:
    """Load a task, or every task of a group or tag. Data come from staged copies, or else from their source.

    `shots`: None keeps the task's number; `limit`: items per task. Raises UserError if a task is unknown, not text, or
    has no data.
    """
    check_name(name, manager)
    result = {}
    with staged_copies(progress), explained(f"task {name!r} cannot be loaded", ADVICE.format(name=name)):
        for leaf, task in _text_tasks(name, manager).items():
            config = task.config
            split = str(config.test_split if task.has_test_docs() else config.validation_split)
            source = "/".join(str(part) for part in (config.dataset_path, config.dataset_name) if part)
            frozen = freeze_whole(leaf, task, limit, split, source, shots)
            result[frozen.name] = frozen
    return result


def _text_tasks(name: str, manager: TaskManager) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index[name]
    with quiet():
        # Looked at before it is loaded, where that is possible: such tasks fetch programs while they load.
        if entry.yaml_path and _UNTEXTUAL & load_yaml(entry.yaml_path, resolve_func=False).keys():
            return only_text({}, [name])
        return only_text(manager.load([name])["tasks"])


def stage_named(names: list[str], progress: Report) -> list[Path]:
    manager = task_manager(progress)
    for name in names:
        check_name(name, manager)
    folders: list[Path] = []
    for name in names:
        progress(f"fetching the data of {name}")
        advice = ADVICE.format(name=name)
        with explained(f"task {name!r} cannot be loaded", advice), staged_copies(progress, keep=folders):
            _text_tasks(name, manager)
    return list(dict.fromkeys(folders))


# --- copies ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def staged_copies(progress: Report, keep: list[Path] | None = None) -> Iterator[None]:
    """Make `datasets.load_dataset` return undamaged staged copies, where there are any, inside the block.

    With a list `keep`, other data are copied, and the folder of every copy used is appended to the list.
    """
    import datasets

    original = datasets.load_dataset
    signature = inspect.signature(original)

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        bound = dict(signature.bind(*arguments, **options).arguments)
        parameters = bound | bound.pop("config_kwargs", {})
        folder = copy_folder({name: value for name, value in parameters.items() if value is not None})
        data = read_copy(folder)
        if data is None:
            if keep is None and "/" in str(parameters.get("path")):
                progress(f"{parameters['path']} is not staged; loading it from the Hugging Face Hub")
            with errors_only("huggingface_hub"):
                data = original(*arguments, **options)
            if keep is not None:
                write_copy(folder, data, parameters)
        if keep is not None and folder.exists():
            keep.append(folder)
        return data

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = original


def copy_folder(arguments: dict[str, Any]) -> Path:
    which = {name: value for name, value in arguments.items() if name not in _MANNERS}
    digest = hashlib.sha256(json.dumps(which, sort_keys=True, default=str).encode()).hexdigest()[:16]
    plain = re.sub(r"[\W_]", "-", str(arguments.get("path", "data")).rpartition("/")[2])
    return cache_root() / "hub" / f"{plain}-{digest}"


def read_copy(folder: Path) -> Any | None:
    """Load a copied dataset after checking every file; None if the copy is missing or damaged."""
    import datasets
    import pyarrow.parquet

    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        return None
    try:
        splits = {}
        for split, entry in manifest["files"].items():
            if file_sha256(folder / entry["file"]) != entry["sha256"]:
                return None
            splits[split] = datasets.Dataset(pyarrow.parquet.read_table(folder / entry["file"]))
    except (OSError, KeyError, TypeError, AttributeError, pyarrow.ArrowException):
        return None
    return datasets.DatasetDict(splits) if manifest["kind"] == "splits" else splits["data"]


def write_copy(folder: Path, data: Any, arguments: dict[str, Any]) -> None:
    """Write a dataset's copy, with the `arguments` that load it, in one rename. Streamed data are ignored."""
    import datasets

    if not isinstance(data, datasets.Dataset | datasets.DatasetDict):
        return
    splits = dict(data) if isinstance(data, datasets.DatasetDict) else {"data": data}
    advice = "free some space, or set ISOFLOP_CACHE to another folder, and run `isoflop data benchmarks` again"
    with writable(folder, "data", advice), replacement(folder) as ready:
        files = {}
        for number, (split, rows) in enumerate(splits.items()):
            path = ready / f"{number}.parquet"
            with quiet():
                rows.to_parquet(path)
            files[str(split)] = {"file": path.name, "sha256": file_sha256(path), "items": len(rows)}
        kind = "splits" if isinstance(data, datasets.DatasetDict) else "one"
        asked = json.loads(json.dumps(arguments, default=str))
        write_json(ready / "manifest.json", {"arguments": asked, "kind": kind, "files": files})
