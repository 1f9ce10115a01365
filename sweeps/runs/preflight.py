"""What was found on the nodes that train a sweep, and decided for all its runs: preflight.json."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...train.config import RunConfig
from ...train.errors import UserError, counted
from ...train.files import read_document
from ...train.preflight.finding import INSTEAD, PASSED, Finding
from .directory import RunDirectory, SweepDirectory

FILE = "preflight.json"


@dataclass
class NodeRecord:
    """What was found on a node's first job of the sweep."""

    kind: str
    findings: list[Finding]  # of this node
    of_kind: list[Finding]  # of the first of its kind
    seconds: float

    @property
    def rate(self) -> float | None:
        """FLOP/s of its matrix products."""
        return next((one.numbers["flops_per_second"] for one in self.findings if one.check == "speed"), None)


@dataclass
class Record:
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel`, which all runs of the sweep take
    nodes: dict[str, NodeRecord] = field(default_factory=dict)  # by host


def read_record(sweep: SweepDirectory) -> Record:
    """What was found so far; nothing where the file is missing or torn, for it can be found again."""
    with suppress(UserError):
        return read_document(sweep.path / FILE, Record)
    return Record()


def decided(run: RunDirectory) -> RunConfig:
    """A run's frozen config with what its sweep has decided of how to execute it."""
    config, sweep = run.config(), SweepDirectory(run.path.parent.parent)
    known = {name for decides in INSTEAD.values() for name in decides}
    decides: dict[str, Any] = {name: to for name, to in read_record(sweep).decides.items() if name in known}
    return replace(config, parallel=replace(config.parallel, **decides))


def summary(host: str, node: NodeRecord) -> str:
    """A line for all that is well, and one for each thing that is not."""
    found = [*node.findings, *node.of_kind]
    passed = sum(finding.outcome == PASSED for finding in found)
    lines = [f"preflight: {counted(passed, 'check')} of {host} passed in {node.seconds:.0f} s"]
    return "\n".join([*lines, *(f"preflight: {one.outcome}: {one.said}" for one in found if one.outcome != PASSED)])
