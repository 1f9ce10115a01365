"""What a check of preflight found, as a sentence and numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

SLOW = 0.4  # of the median rate of its siblings, or of what the cluster's group says
PASSED, REPLACED, FAILED, NOTE = "passed", "replaced", "failed", "note"

# What takes the place of a kernel of ours that fails its check: fields of `parallel`.
INSTEAD = {"attention": {"attention": "sdpa"}, "loss": {"cross_entropy": "torch"}}


@dataclass(frozen=True)
class Finding:
    check: str
    outcome: str  # passed | replaced: by what `decides` says | failed | note
    said: str  # one sentence
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel` that runs on such a device must take
    numbers: dict[str, float] = field(default_factory=dict)


def judge_speed(name: str, rate: float, siblings: Mapping[str, float]) -> Finding | None:
    """Whether a rank or node computes far slower than its siblings, by FLOP/s; None where it does not."""
    if not siblings or rate >= SLOW * (middle := statistics.median(siblings.values())):
        return None
    said = f"{name} computes {rate / 1e9:,.1f} GFLOP/s where its siblings do {middle / 1e9:,.1f}"
    return Finding("speed", FAILED, f"{said}; keep its node out with cluster.exclude", numbers={"rate": rate})
