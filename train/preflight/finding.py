"""What a check of preflight found, as a sentence and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

PASSED, REPLACED, FAILED, NOTE = "passed", "replaced", "failed", "note"


@dataclass(frozen=True)
class Finding:
    check: str
    outcome: str  # passed | replaced: by what `decides` says | failed | note
    said: str  # one sentence
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel` that runs on such a device must take
    numbers: dict[str, float] = field(default_factory=dict)
