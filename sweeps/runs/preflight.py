"""What was found on the nodes that train a sweep, and decided for all its runs: preflight.json."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...train.config import RunConfig
from ...train.errors import UserError, counted
from ...train.files import read_document
from ...train.preflight.finding import PASSED, Finding
from .directory import RunDirectory, SweepDirectory

FILE = "preflight.json"


@dataclass
class NodeRecord:
    """What was found on the first node of its kind."""

    host: str
    seconds: float
    findings: list[Finding]


@dataclass
class Record:
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel` that all runs of the sweep take
    nodes: dict[str, NodeRecord] = field(default_factory=dict)  # by kind


def read_record(sweep: SweepDirectory) -> Record:
    """What was found so far; nothing where the file is missing or torn, for it can be found again."""
    with suppress(UserError):
        return read_document(sweep.path / FILE, Record)
    return Record()


def decided(run: RunDirectory) -> RunConfig:
    """A run's frozen config with what its sweep has decided of how to execute it."""
    config, sweep = run.config(), SweepDirectory(run.path.parent.parent)
    decides: dict[str, Any] = read_record(sweep).decides
    known = {name: decides[name] for name in ("attention", "cross_entropy") if name in decides}
    return replace(config, parallel=replace(config.parallel, **known))


def summary(found: NodeRecord) -> str:
    """A line for all that is well, and one for each thing that is not."""
    passed = sum(finding.outcome == PASSED for finding in found.findings)
    lines = [f"preflight: {counted(passed, 'check')} of {found.host} passed in {found.seconds:.0f} s"]
    return "\n".join(
        [*lines, *(f"preflight: {one.outcome}: {one.said}" for one in found.findings if one.outcome != PASSED)]
    )
