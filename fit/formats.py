"""The number formats of a table's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import Array, positive
from .table import RunTable, numeric

if TYPE_CHECKING:
    import pandas as pd

PASSES = ("forward", "backward")  # inputs of the laws: the number of the pass's format, from 1 for none
NONE = "none"
PLAIN_NAMES = {NONE, "", "nan", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"}  # not quantized
PLAIN_BITS = 16.0  # numbers of this many bits or more count as not quantized
PARTS = {"weights": "forward", "activations": "forward", "kv": "forward", "gradients": "backward"}  # part -> pass
PARTS |= {name: name for name in PASSES}
LEAST_RUNS = 3  # of a format in a pass: two efficiencies and a residual


def format_columns(frame: pd.DataFrame) -> dict[str, str]:
    """Return a table's columns of formats, or if missing of bits: part -> column."""
    names = {part: [c for c in (f"{part}_format", part, f"{part}_bits") if c in frame] for part in PARTS}
    return {part: columns[0] for part, columns in names.items() if columns}


def read_formats(runs: RunTable) -> tuple[np.ndarray, list[np.ndarray], dict[str, Array]]:
    """Return the formats of n runs by name (n,), those of each pass (n,), and the bits of forward parts (n,) that vary.

    A name is "none", the format of all parts, or such as "int4/int8/none" or "int4 weights". Where the passes vary only
    together, the forward pass stands for both.
    """
    frame, parts, bits = runs.frame.iloc[runs.rows], dict[str, list[str]](), dict[str, Array]()
    for part, column in format_columns(frame).items():
        texts = [str(value).strip() for value in frame[column]]
        if f"{part}_bits" in frame:
            P = np.minimum(positive(f"{part}_bits", numeric(frame, f"{part}_bits")), PLAIN_BITS)
            if PARTS[part] == "forward" and np.ptp(P) > 0 and not any((other == P).all() for other in bits.values()):
                bits[part] = P
            if column.endswith("_bits"):
                texts = [NONE if v == PLAIN_BITS else f"{v:g}-bit" for v in P]
        parts[part] = [NONE if v.lower() in PLAIN_NAMES else v for v in texts]
    name = _names(parts, len(frame))
    passes = [_names({p: v for p, v in parts.items() if PARTS[p] == which}, len(frame)) for which in PASSES]
    masks = [labels == v for labels in passes for v in {*labels} - {NONE}]
    if masks and np.linalg.matrix_rank(1.0 * np.array(masks)) < len(masks):
        passes = [name, np.full(len(name), NONE, dtype=object)]
    return name, passes, bits


def frequent(passes: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return a mask of the runs in `rows` whose formats occur in LEAST_RUNS or more of them in both passes."""
    before = None
    while before is None or (rows != before).any():
        before = rows
        for labels in passes:
            names, runs = np.unique(labels[rows].astype(str), return_counts=True)
            rows = rows & np.isin(labels.astype(str), names[runs >= LEAST_RUNS])
    return rows


def _names(parts: Mapping[str, list[str]], n: int) -> np.ndarray:
    """Name the formats of n runs by those of their parts, int4/int8/none for those of a run of isoflop."""
    if [*parts] == ["weights", "activations", "gradients"]:
        return np.array([v[0] if len({*v}) == 1 else "/".join(v) for v in zip(*parts.values(), strict=True)], object)
    names = []
    for formats in zip(*parts.values(), strict=True) if parts else [(NONE,)] * n:
        of = {v: "+".join(p for p, w in zip(parts, formats, strict=True) if v == w) for v in formats if parts}
        names.append(formats[0] if len(of) < 2 else " and ".join(f"{v} {p}" for v, p in of.items() if v != NONE))
    return np.array(names, dtype=object)
