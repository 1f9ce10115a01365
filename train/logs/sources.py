"""Runs of other trainers: find their logs by content, and read them as tables of metrics."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import UserError, counted
from ..files import read_document
from ..model.shape import Shape
from .names import LOSSES, Roles, known, number
from .readers import READERS, RUN, Patterns, kind_of

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("step", "tokens", "flops", "train_loss", "val_loss", "lr", "grad_norm")  # columns that every run has
GROUPED = ("tensorboard", "trainer_state", "csv")  # kinds of which all files of a folder belong together
CONFIGS = ("config.json", "config.yaml", "hparams.yaml", "model_config.yaml", "args.json", "params.json")
COUNTED = ("llama", "mistral", "qwen2", "qwen3")  # Hugging Face's dense models that `Shape` describes
SHOWN = 12  # keys of a log that an error names


@dataclass(frozen=True)
class Source:
    """The files of one or several foreign runs that are read together."""

    path: Path  # the file, or the folder of the files
    kind: str  # a reader, or a program of text logs
    files: tuple[Path, ...]
    alone: bool = True  # no other log is in the same folder, so a config there is its own
    patterns: Patterns = field(default_factory=dict)  # of a text log


@dataclass(frozen=True)
class ForeignRun:
    """A run that another program trained."""

    name: str  # unique within a source
    source: Path
    kind: str
    metrics: pd.DataFrame  # a row per logged step, sorted: METRICS and others, float64, NaN where absent
    facts: dict[str, float | str]  # N_total, N_non_embedding, D, total_steps, ...: from the log or a config next to it
    columns: dict[str, str]  # the log's key of each metric, or how it was derived
    remarks: list[str]  # sentences for the user


def find_sources(path: Path, patterns: Patterns | None = None) -> list[Source]:
    """Return the logs in a file or folder, recognised by content. Raises UserError if there are none.

    Args:
        patterns: Regular expressions by isoflop's name, as of a program in known.yaml, for other text logs.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give the log of a run, or a folder with logs")
    programs = ({"patterns": patterns} if patterns else {}) | known()["programs"]
    groups: dict[tuple[Path, str], list[Path]] = {}
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        if (kind := kind_of(file, programs)) is not None:
            folder = file.parent.parent if re.fullmatch(r"checkpoint-\d+", file.parent.name) else file.parent
            # A wandb run that was requeued has a folder for each part.
            place = file.parent.parent / file.name if kind == "wandb" else folder if kind in GROUPED else file
            groups.setdefault((place, kind), []).append(file)
    if not groups:
        problem = "is empty" if path.is_file() and not path.stat().st_size else "has no log that is known"
        raise UserError(
            f"{path} {problem}; known are TensorBoard events, wandb's offline files and CSV exports, "
            f"trainer_state.json, JSON lines, and text logs of {', '.join(known()['programs'])}; describe another text "
            "log with --patterns"
        )
    logs = Counter(files[0].parent for files in groups.values())
    sources = []
    for (place, kind), files in groups.items():
        if kind == "trainer_state":  # the newest has the whole log
            files = [max(files, key=lambda file: number(file.parent.name.removeprefix("checkpoint-")) or math.inf)]
        path = files[0] if kind == "wandb" else place
        sources.append(Source(path, kind, tuple(files), logs[files[0].parent] == 1, programs.get(kind, {})))
    return sources


def read_runs(
    source: Source, columns: Mapping[str, str] = MappingProxyType({}), tokens_per_step: float | None = None
) -> list[ForeignRun]:
    """Read the runs of a source.

    Args:
        columns: Keys of the log, or numbers, by isoflop's name, as in {"val_loss": "eval/loss", "N": "1.3e8"}; other
            names are found by known.yaml.
        tokens_per_step: Tokens of a step, if the log has none.

    Raises:
        UserError: the source cannot be read, or has no steps or no loss.
    """
    columns = {"N_total" if name == "N" else name: key for name, key in columns.items()}
    accepted = ["N", *known()["metrics"], *known()["facts"]]
    if unknown := [name for name in columns if name not in accepted]:
        raise UserError(f"--map names {unknown[0]!r}; the names are {', '.join(accepted)}")
    runs: dict[str, Series] = {}
    name = source.path.stem if source.path.is_file() else source.path.name
    for file in source.files:
        for record in READERS.get(source.kind, READERS["text"])(file, source.patterns):
            run = record.pop(RUN, name)
            (runs.get(run) or runs.setdefault(run, Series(columns))).add(record)
    if not runs:
        raise UserError(f"{source.path} has no records; give a log with at least one step")
    return [series.to_run(name, source, tokens_per_step) for name, series in runs.items()]


class Series:
    """The numbers of one run by key, in the order of the log."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.constants = {name: value for name, key in columns.items() if (value := number(key)) is not None}
        self.mapped = {name: key for name, key in columns.items() if name not in self.constants}
        self.roles = Roles(self.mapped)
        self.values: dict[str, tuple[array[float], array[float]]] = {}
        self.facts: dict[str, float] = {}
        self.damaged = self.backwards = 0
        self.last_step = -math.inf

    def add(self, record: Mapping[str, Any], facts_only: bool = False) -> None:
        """Add a record of the log, or with `facts_only` a config."""
        self.damaged += not record
        steps, numbers = [], []
        for key, value in _flat(record):
            if (role := self.roles[key]) is not None and (value := number(value)) is not None:
                if role[1] in known()["facts"]:
                    self.facts[role[1]] = value
                elif role[1] != "step":
                    numbers.append((key, value))
                elif math.isfinite(value):
                    steps.append((role[0], value))
        if steps and numbers and not facts_only:
            step = min(steps)[1]
            self.backwards += step < self.last_step
            self.last_step = step
            for key, value in numbers:
                column = self.values.setdefault(key, (array("d"), array("d")))
                column[0].append(step)
                column[1].append(value)

    def to_run(self, name: str, source: Source, tokens_per_step: float | None) -> ForeignRun:
        """Assemble the run. Of several values of a step the last one counts; losses that are not finite are left out.

        The fact `diverged` is the step from which on no loss is finite.
        """
        import numpy as np
        import pandas as pd

        logged, remarks, keys = self.facts.copy(), list[str](), dict[str, str]()
        folders = {source.files[0].parent, source.path} if source.alone and source.kind != "csv" else set()
        configs = [source.path.with_suffix(ending) for ending in (".json", ".yaml")] if source.path.is_file() else []
        for config in [*configs, *(folder / name for folder in folders for name in CONFIGS)]:
            with suppress(UserError):  # another program's, or none
                content = read_document(config, dict[str, Any])
                self.add(_parameters(content) | content, facts_only=True)
        facts = self.facts | logged | self.constants
        columns: dict[str, pd.Series[float]] = {}
        for key in sorted(self.values, key=lambda key: self.roles[key] or (0, "")):
            steps, values = map(np.frombuffer, self.values[key])
            column, metric = pd.Series(values, steps), (self.roles[key] or (0, key))[1]
            if metric not in columns:
                keys[metric], columns[metric] = key, column[~column.index.duplicated(keep="last")].sort_index()
        absent = next((key for metric, key in self.mapped.items() if metric not in {*facts, *keys, "step"}), None)
        if absent or not {*LOSSES} & {*columns}:
            problem = f"no key {absent!r}" if absent else "no loss with a step under a known name"
            exist = [key for key in self.roles if key not in self.mapped.values()]
            exist = [f"{', '.join(exist[:SHOWN])}{', …' * (len(exist) > SHOWN)}"] if exist else ["no keys"]
            raise UserError(f"{source.path} has {problem}; give --map step=KEY,train_loss=KEY,...; it has {exist[0]}")
        for metric in source.patterns.get("repeats", ()):
            if metric in columns:
                columns[metric] = columns[metric][columns[metric].diff() != 0]
        for metric in {*LOSSES} & {*columns}:
            finite = np.isfinite(columns[metric])
            if not finite.all():
                remarks.append(f"{source.path} has {int((~finite).sum())} values of {metric} that are not finite")
                if not finite.iloc[-1]:
                    facts["diverged"] = float(columns[metric].index[~finite & (finite[::-1].cumsum()[::-1] == 0)][0])
                columns[metric] = columns[metric][finite]
        if self.damaged:
            remarks.append(f"{source.path} has {counted(self.damaged, 'damaged record')}, left out")
        if self.backwards:
            remarks.append(
                f"{source.path} goes back to an earlier step {counted(self.backwards, 'time')}, as after a restart; "
                "of two values of a step the later one counts"
            )
        frame = pd.DataFrame(columns).rename_axis("step").reset_index()
        length, batch = facts.get("sequence_length"), facts.get("global_batch_size")
        if tokens_per_step is None and "samples" in frame and length and "tokens" not in frame:
            frame["tokens"], keys["tokens"] = frame["samples"] * length, f"{keys['samples']} * {length:g}"
        per_step = tokens_per_step or facts.get("tokens_per_step") or (length or 0) * (batch or 0)
        if tokens_per_step or ("tokens" not in frame and per_step):
            frame["tokens"], keys["tokens"] = frame["step"] * per_step, f"step * {per_step:g}"
        if "flops" not in frame and "tokens" in frame and "N_total" in facts:
            frame["flops"], keys["flops"] = 6.0 * facts["N_total"] * frame["tokens"], "6ND"
        frame = frame.reindex(columns=[*METRICS, *(metric for metric in frame if metric not in METRICS)]).astype(float)
        return ForeignRun(name, source.path, source.kind, frame, dict(facts), keys, remarks)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Count the parameters of a model that a Hugging Face config describes; an empty dict for other configs."""
    with suppress(KeyError, TypeError, ZeroDivisionError):
        if (kind := config.get("model_type")) in COUNTED:
            shape = Shape(
                width=config["hidden_size"],
                depth=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                hidden=config["intermediate_size"],
                vocabulary=config["vocab_size"],
                head_norms=kind == "qwen3",
                qkv_bias=kind == "qwen2",
                tied=bool(config.get("tie_word_embeddings")),
                latent=None,
                experts=None,
            )
            total = sum(parameter.size for parameter in shape.parameters)
            return {"N_total": total, "N_non_embedding": total - (1 if shape.tied else 2) * shape.table}
    return {}
