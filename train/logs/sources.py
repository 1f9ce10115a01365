"""Runs of other trainers: find their logs by content, and read them as tables of metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .readers import READERS, kind_of
from .series import Series, known

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("step", "tokens", "flops", "train_loss", "val_loss", "lr", "grad_norm")  # columns that every run has
GROUPED = ("tensorboard", "trainer_state", "csv")  # kinds of which all files of a folder belong together


@dataclass(frozen=True)
class Source:
    """The files of one or several foreign runs that are read together."""

    path: Path  # the file, or the folder of the files
    kind: str  # which reader: tensorboard, wandb, csv, trainer_state, jsonl, or a program of text logs
    files: tuple[Path, ...]
    patterns: Mapping[str, Any] = field(default_factory=dict)  # of a text log


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


def find_sources(path: Path, patterns: Mapping[str, Any] | None = None) -> list[Source]:
    """Return the logs in a file or folder, recognised by content. Raises UserError if there are none.

    Args:
        patterns: Regular expressions by name, as of a program in known.yaml, for text logs of any other program.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give the log of a run, or a folder with logs")
    programs = known()["programs"] | ({"patterns": patterns} if patterns else {})
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    groups: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        if (kind := kind_of(file, programs)) is not None:
            folder = file.parent.parent if re.fullmatch(r"checkpoint-\d+", file.parent.name) else file.parent
            place = folder if kind in GROUPED and path.is_dir() else file
            groups.setdefault((place, kind), []).append(file)
    if not groups:
        empty = "is empty" if path.is_file() and not path.stat().st_size else "has no log that is known"
        raise UserError(
            f"{path} {empty}; known are TensorBoard events, wandb's offline files and CSV exports, trainer_state.json, "
            f"JSON lines, and text logs of {', '.join(known()['programs'])}; describe another one with --patterns"
        )
    return [Source(place, kind, tuple(found), programs.get(kind, {})) for (place, kind), found in groups.items()]


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
    series = READERS.get(source.kind, READERS["text"])(source.files, lambda: Series(columns), source.patterns)
    return [_assembled(source, name, numbers, tokens_per_step) for name, numbers in series.items()]


def _assembled(source: Source, name: str, series: Series, tokens_per_step: float | None) -> ForeignRun:
    frame, keys, remarks = series.frame(source.path, tuple(source.patterns.get("repeats", ())))
    facts = series.facts
    if "tokens" not in frame:
        length, batch = (facts.get(key) for key in ("sequence_length", "global_batch_size"))
        tokens_per_step = tokens_per_step or facts.get("tokens_per_step")  # type: ignore[assignment]
        if tokens_per_step is None and "samples" in frame and length:
            frame["tokens"], keys["tokens"] = frame["samples"] * length, f"{keys['samples']} * {length:g}"
        elif tokens_per_step := tokens_per_step or (length and batch and float(length) * float(batch)):  # type: ignore[assignment]
            frame["tokens"], keys["tokens"] = frame["step"] * tokens_per_step, f"step * {tokens_per_step:g}"
    if "flops" not in frame and "tokens" in frame and "N_total" in facts:
        frame["flops"], keys["flops"] = 6.0 * float(facts["N_total"]) * frame["tokens"], "6ND"
    frame = frame.reindex(columns=[*METRICS, *(key for key in frame if key not in METRICS)]).astype(float)
    return ForeignRun(name, source.path, source.kind, frame, facts, keys, remarks)
