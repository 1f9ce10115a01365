"""What the doctor says and what it reads: the warning, and the columns of a table beyond those that are fitted.

Special here: a column is found by any of its usual names, whatever their case; one that is absent, or empty, makes the
checks that need it silent. `doctor.py` lists the names in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import Array
from ..table import RunTable


@dataclass(frozen=True)
class Warning:
    """`code` is stable, for programs; `message` is for people, names the numbers, and says what to do."""

    code: str
    message: str


COLUMNS = {
    "N_total": ("N_total", "total_params", "N"),
    "N_non_embedding": ("N_non_embedding", "N_no_embed", "non_embedding_params", "N_kaplan"),
    "vocabulary": ("vocab_size", "vocabulary"),
    "width": ("width", "d_model", "hidden_size", "n_embd"),
    "tokenizer": ("tokenizer",),
    "loss_kind": ("loss_kind", "loss_split"),
    "train_loss": ("train_loss",),
    "val_loss": ("val_loss", "validation_loss", "eval_loss"),
    "loss_unit": ("loss_unit",),
    "bits_per_byte": ("val_bpb", "bpb", "bits_per_byte"),
    "schedule": ("schedule", "lr_schedule", "scheduler", "decay"),
    "decay_share": ("decay_share", "decay_fraction", "cooldown_share", "cooldown_fraction"),
    "schedule_tokens": ("schedule_tokens", "horizon_tokens"),
    "schedule_steps": ("schedule_steps", "horizon_steps", "max_steps"),
    "steps": ("steps", "step"),
    "warmup_share": ("warmup_share", "warmup_fraction", "warmup_ratio"),
    "warmup_tokens": ("warmup_tokens",),
    "warmup_steps": ("warmup_steps",),
    "epochs": ("epochs",),
    "unique_tokens": ("unique_tokens", "U"),
    "learning_rate": ("learning_rate", "lr", "peak_lr", "max_lr"),
    "batch": ("batch_tokens", "batch_size", "global_batch_size", "bs"),
    "trials": ("trials", "sweep_size"),
    "parent": ("parent",),
    "recipe": ("recipe",),
}


MAY_BE_ZERO = ("decay_share", "warmup_share", "warmup_tokens", "warmup_steps")


def numbers(table: RunTable, role: str) -> Array:
    """A numeric column of the runs (n,), NaN where it is absent or not a number that the quantity can have."""
    name = _column(table, role)
    values = np.full(len(table), np.nan) if name is None else table.column(name)
    possible = np.isfinite(values) & ((values > 0) | ((values == 0) & (role in MAY_BE_ZERO)))
    return np.where(possible, values, np.nan)


def texts(table: RunTable, role: str) -> list[str]:
    """A column of words of the runs, lower case, empty where there is none."""
    name = _column(table, role)
    if name is None:
        return [""] * len(table)
    values = table.frame[name].iloc[table.rows]
    return ["" if lost else str(v).strip().lower() for v, lost in zip(values, values.isna(), strict=True)]


def _column(table: RunTable, role: str) -> str | None:
    exist = {_plain(name): name for name in reversed(list(table.frame.columns))}
    return next((exist[_plain(name)] for name in COLUMNS[role] if _plain(name) in exist), None)


def _plain(name: object) -> str:
    return str(name).strip().lower().replace(" ", "_").replace("-", "_")


def named(table: RunTable, rows: np.ndarray | Sequence[int], most: int = 5) -> str:
    """The run ids of some rows, the first few of them."""
    ids = [str(table.run_id[i]) for i in rows[:most]]
    return ", ".join(ids) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def sizes_and_tokens(table: RunTable) -> np.ndarray:
    """Which (N, D) each run belongs to, (n,): equal numbers for runs that share both."""
    return np.unique(np.stack([table.N, table.D]), axis=1, return_inverse=True)[1].ravel()
