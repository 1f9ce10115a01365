"""The number formats of a table's runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import Array, InputError, positive
from ..table import RunTable, numeric
from .forms import PASSES

NONE = "none"
UNQUANTIZED = {NONE, "", "nan", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"}
PLAIN_BITS = 16.0  # numbers of this many bits or more count as not quantized
PARTS = dict(zip(PASSES, (("forward", "weights", "activations", "kv"), ("backward", "gradients")), strict=True))
LEAST_RUNS = 3  # of a format in a pass: two efficiencies and a residual


def read_formats(runs: RunTable) -> tuple[np.ndarray, list[np.ndarray], dict[str, Array]]:
    """Return the runs' formats by name (n,), those of each pass (n,), and the bits of each forward part (n,), if known.

    A name is "none", the format of all parts, or such as "int4 weights". Where the passes vary only together, the
    forward pass stands for both. Raises InputError without formats or without unquantized runs.
    """
    frame, parts, bits = runs.frame.iloc[runs.rows], dict[str, list[str]](), dict[str, Array]()
    for part in (part for members in PARTS.values() for part in members):
        if f"{part}_bits" in frame:
            P = np.minimum(positive(f"{part}_bits", numeric(frame, f"{part}_bits")), PLAIN_BITS)
            parts[part] = [NONE if v == PLAIN_BITS else f"{v:g}-bit" for v in P]
            if part in PARTS["forward"] and np.ptp(P) > 0 and not any((other == P).all() for other in bits.values()):
                bits[part] = P
        if column := next((c for c in (f"{part}_format", part) if c in frame), None):
            texts = [str(value).strip() for value in frame[column]]
            parts[part] = [NONE if v.lower() in UNQUANTIZED else v for v in texts]
    if not parts:
        raise InputError("the table has no formats; it needs weights_format, weights_bits or forward, or the like.")
    name = _names(parts, len(frame))
    passes = [_names({p: parts[p] for p in members if p in parts}, len(frame)) for members in PARTS.values()]
    if (name == NONE).all() or not (name == NONE).any():
        state = "every run is" if (name == NONE).all() else "no run is"
        raise InputError(f"{state} without quantization; a law of precision compares formats with such runs.")
    masks = [labels == v for labels in passes for v in {*labels} - {NONE}]
    if np.linalg.matrix_rank(1.0 * np.array(masks)) < len(masks):
        passes = [name, np.full(len(name), NONE, dtype=object)]
    return name, passes, bits


def frequent(passes: list[np.ndarray], counted: np.ndarray) -> np.ndarray:
    """Return a mask of the runs, of those `counted`, whose formats have LEAST_RUNS of them in both passes."""
    keep, before = counted, None
    while before is None or (keep != before).any():
        before = keep
        for labels in passes:
            names, runs = np.unique(labels[keep].astype(str), return_counts=True)
            keep = keep & np.isin(labels.astype(str), names[runs >= LEAST_RUNS])
    return keep


def _names(parts: Mapping[str, list[str]], n: int) -> np.ndarray:
    """Name the formats of runs by those of their parts."""
    names = []
    for formats in zip(*parts.values(), strict=True) if parts else [(NONE,)] * n:
        by_format = {v: "+".join(p for p, w in zip(parts, formats, strict=True) if v == w) for v in formats if parts}
        of = [f"{v} {where}" for v, where in by_format.items() if v != NONE]
        names.append(formats[0] if len(by_format) < 2 else " and ".join(of))
    return np.array(names, dtype=object)
