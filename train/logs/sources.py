"""Runs of other trainers: find their logs by content, and read them as tables of metrics."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..errors import UserError, counted
from ..files import read_document
from ..flops import count_parameters
from .readers import LOSSES, RUN, Patterns, Roles, kind_of, known, number, read_records

METRICS = ("step", "tokens", "flops", "train_loss", "val_loss", "lr", "grad_norm")  # columns that every run has
GROUPED = ("tensorboard", "trainer_state", "csv")  # kinds of which all files of a folder belong together
SHOWN = 12  # keys of a log that an error names


@dataclass(frozen=True)
class Source:
    """The files of one or several foreign runs that are read together."""

    path: Path  # the file, or the folder of the files
    kind: str  # a reader, or a program of text logs
    files: tuple[Path, ...]
    patterns: Patterns = field(default_factory=dict)  # of a text log


@dataclass(frozen=True)
class ForeignRun:
    """A run that another program trained."""

    name: str  # unique within a source
    source: Path
    kind: str
    metrics: Any  # a DataFrame with a row per logged step, sorted: METRICS and others, float64, NaN where absent
    facts: dict[str, float]  # N_total, N_non_embedding, D, total_steps, ...: from the log or a config next to it
    columns: dict[str, str]  # the log's key of each metric, or how it was derived
    remarks: list[str]  # sentences for the user


def find_sources(path: Path, patterns: Patterns | None = None) -> list[Source]:
    """Return the logs in a file or folder, recognised by content, or in text logs by `patterns` as in known.yaml.

    Raises UserError if there are none.
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
        kinds = "TensorBoard events, wandb's offline files and CSV exports, trainer_state.json, JSON lines"
        problem = "is empty" if path.is_file() and not path.stat().st_size else "has no log that is known"
        raise UserError(f"{path} {problem}; known are {kinds}, and text logs of {', '.join(programs)} or by --patterns")
    sources, states = [], [place for place, kind in groups if kind == "trainer_state"]
    for (place, kind), files in groups.items():
        if kind == "tensorboard" and any(place.is_relative_to(state) for state in states):
            continue  # Hugging Face's Trainer writes the same numbers as events
        if kind == "trainer_state":  # the newest has the whole log
            files = [max(files, key=lambda file: number(file.parent.name.removeprefix("checkpoint-")) or math.inf)]
        path = files[0] if kind == "wandb" else place
        sources.append(Source(path, kind, tuple(files), programs.get(kind, {})))
    return sources


def read_runs(
    source: Source, columns: Mapping[str, str] = MappingProxyType({}), tokens_per_step: float | None = None
) -> list[ForeignRun]:
    """Read the runs of a source. Raises UserError if it cannot be read, or has no steps or no loss.

    Args:
        columns: Keys of the log, or numbers, by isoflop's name: {"val_loss": "eval/loss", "N": "1.3e8"}.
        tokens_per_step: Tokens of a step, instead of what the log says.
    """
    columns = {"N_total" if name == "N" else name: key for name, key in columns.items()}
    accepted = ["N", *known()["metrics"], *known()["facts"]]
    if unknown := [name for name in columns if name not in accepted]:
        raise UserError(f"--map names {unknown[0]!r}; the names are {', '.join(accepted)}")
    runs: dict[str, Series] = {}
    for file in source.files:
        for record in read_records(file, source.kind, source.patterns):
            name = record.pop(RUN, source.path.stem if source.path.is_file() else source.path.name)
            (runs.get(name) or runs.setdefault(name, Series(columns))).add(record)
    if not runs:
        raise UserError(f"{source.path} has no numbers yet; give a log with at least one step")
    stated = _config_facts(source)
    return [series.to_run(name, source, stated, tokens_per_step) for name, series in runs.items()]


class Series:
    """The numbers of one run by key, in the order of the log."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.constants = {name: value for name, key in columns.items() if (value := number(key)) is not None}
        self.mapped = {name: key for name, key in columns.items() if name not in self.constants}
        self.roles, self.fact_names = Roles(self.mapped), known()["facts"].keys()
        self.values: dict[str, tuple[array[float], array[float]]] = {}
        self.facts: dict[str, float] = {}
        self.damaged = self.backwards = 0
        self.last_step = -math.inf

    def add(self, record: Mapping[str, Any]) -> None:
        self.damaged += not record
        steps, numbers = [], []
        for key, value in record.items():
            if isinstance(value, dict):
                return self.add(dict(_flat(record)))
            if (role := self.roles[key]) is not None and (value := number(value)) is not None:
                if role[1] != "step" and role[1] not in self.fact_names:
                    numbers.append((key, value))
                elif math.isfinite(value) and role[1] == "step":
                    steps.append((role[0], value))
                elif math.isfinite(value):
                    self.facts[role[1]] = value
        if steps and numbers:
            step = min(steps)[1]
            self.backwards += step < self.last_step
            self.last_step = step
            for key, value in numbers:
                column = self.values.setdefault(key, (array("d"), array("d")))
                column[0].append(step)
                column[1].append(value)

    def to_run(
        self, name: str, source: Source, stated: Mapping[str, float], tokens_per_step: float | None
    ) -> ForeignRun:
        """Assemble the run. Of several values of a step the last one counts; losses that are not finite are left out.

        `stated` are the facts of a config, which those of the log replace. The fact `diverged` is the step from which
        on no loss is finite.
        """
        import numpy as np
        import pandas as pd

        facts = {**stated, **self.facts, **self.constants}
        columns, keys, remarks = dict[str, Any](), dict[str, str](), list[str]()
        for key in sorted(self.values, key=lambda key: self.roles[key] or (0, "")):
            steps, values = map(np.frombuffer, self.values[key])
            column, metric = pd.Series(values, steps), (self.roles[key] or (0, key))[1]
            if metric not in columns:
                keys[metric], columns[metric] = key, column[~column.index.duplicated(keep="last")].sort_index()
        absent = next((key for metric, key in self.mapped.items() if metric not in {*facts, *keys, "step"}), None)
        if absent or not {*LOSSES} & {*columns}:
            problem = f"no key {absent!r}" if absent else "no loss with a step under a known name"
            exist = ", ".join([key for key in self.roles if key not in self.mapped.values()][:SHOWN]) or "none"
            raise UserError(f"{source.path} has {problem}; give --map step=KEY,train_loss=KEY; its keys are {exist}")
        for metric in source.patterns.get("repeats", ()):
            if metric in columns:
                columns[metric] = columns[metric][columns[metric].diff() != 0]
        for metric in {*LOSSES} & {*columns}:
            column, finite = columns[metric], np.isfinite(columns[metric])
            if not finite.any():
                raise UserError(f"{source.path} has no finite {metric}; a run needs a loss")
            columns[metric] = column[finite]
            if not finite.all():
                remarks.append(f"{source.path} has {counted(int((~finite).sum()), metric, f'values of {metric}')} "
                               "not finite, left out")  # fmt: skip
                if not finite.iloc[-1]:
                    facts["diverged"] = float(column.index[column.index > column[finite].index.max()].min())
        if self.damaged:
            remarks.append(f"{source.path} has {counted(self.damaged, 'damaged record')}, left out")
        if self.backwards:
            times = counted(self.backwards, "time")
            remarks.append(f"{source.path} goes back to an earlier step {times}; the later value of a step counts")
        frame = pd.DataFrame(columns).rename_axis("step").reset_index()
        for metric in {"tokens", "samples", "flops"} & {*columns}:  # logged at other steps than a loss, perhaps
            frame[metric] = np.interp(frame["step"], columns[metric].index, columns[metric])
        length, batch = facts.get("sequence_length"), facts.get("global_batch_size")
        if tokens_per_step or "tokens" not in frame:
            per_step = tokens_per_step or facts.get("tokens_per_step") or (length or 0) * (batch or 0)
            if "samples" in frame and length and not tokens_per_step:
                frame["tokens"], keys["tokens"] = frame["samples"] * length, f"{keys['samples']} * {length:g}"
            elif per_step:
                frame["tokens"], keys["tokens"] = frame["step"] * per_step, f"step * {per_step:g}"
        if "flops" not in frame and "tokens" in frame and "N_total" in facts:
            frame["flops"], keys["flops"] = 6.0 * facts["N_total"] * frame["tokens"], "6ND"
        frame = frame.reindex(columns=[*METRICS, *(metric for metric in frame if metric not in METRICS)]).astype(float)
        frame = frame.replace([np.inf, -np.inf], np.nan)
        return ForeignRun(name, source.path, source.kind, frame, facts, keys, remarks)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _config_facts(source: Source) -> dict[str, float]:
    """Return the facts in a config next to a log, with our own count of a Hugging Face model's parameters."""
    series = Series({})
    folders = {source.files[0].parent, source.path} if source.kind != "csv" else set()
    for file in [folder / name for folder in folders for name in known()["configs"]]:
        with suppress(UserError, KeyError, TypeError, ZeroDivisionError):  # there is none, or it is another program's
            config = read_document(file, dict[str, Any])
            series.add(config)
            if (kind := config.get("model_type")) in known()["models"]:
                names = known()["model_fields"].items()
                fields = {name: config[key] for name, key in names if key in config}
                count = count_parameters(ModelConfig(**known()["models"][kind] | fields))
                series.facts |= {"N_total": count.N_total, "N_non_embedding": count.N_non_embedding}
    return series.facts
