"""Check every node on its first job of a sweep (preflight.json), and each kind of node once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ... import __version__
from ...train.config import RunConfig
from ...train.data.storage import cache_directory
from ...train.errors import UserError, counted
from ...train.files import read_document, write_json
from ...train.preflight.preflight import FAILED, INSTEAD, PASSED, Finding, check_device, check_node
from .directory import RunDirectory, SweepDirectory, this_node

FILE = "preflight.json"
WAIT_SECONDS = 600.0  # for a worker that checks another node at the same time


@dataclass
class NodeRecord:
    """Findings on a node's first job of the sweep."""

    kind: str
    findings: list[Finding]  # of this node
    of_kind: list[Finding]  # of the first node of its kind
    seconds: float


@dataclass
class Record:
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel` that all runs of the sweep take
    nodes: dict[str, NodeRecord] = field(default_factory=dict)  # by host


def read_record(sweep: SweepDirectory) -> Record:
    """Return a sweep's preflight record; an empty one if preflight.json is missing or damaged."""
    with suppress(UserError):
        return read_document(sweep.path / FILE, Record)
    return Record()


def decided(run: RunDirectory) -> RunConfig:
    """Return a run's config with the kernels that preflight chose for its sweep."""
    config, record = run.config(), read_record(SweepDirectory(run.path.parent.parent))
    fields = {name for decides in INSTEAD.values() for name in decides}
    decides: dict[str, Any] = {name: to for name, to in record.decides.items() if name in fields}
    return replace(config, parallel=replace(config.parallel, **decides))


def summary(host: str, node: NodeRecord) -> str:
    findings = [*node.findings, *node.of_kind]
    passed = sum(finding.outcome == PASSED for finding in findings)
    lines = [f"preflight: {counted(passed, 'check')} of {host} passed in {node.seconds:.0f} s"]
    return "\n".join([*lines, *(f"preflight: {one.outcome}: {one.said}" for one in findings if one.outcome != PASSED)])


def check_first_job(sweep: SweepDirectory, runs: Sequence[RunConfig], ranks: int) -> Iterator[str]:
    """Check this node if the sweep has no record of it, and yield lines for the user."""
    host, start, is_new = this_node(), time.monotonic(), False
    if host in read_record(sweep).nodes or any(run.trainer.kind == "command" for run in runs):
        return
    kind = node_kind(runs)
    try:
        of_node = list(check_node(runs, sweep.path, ranks))
        cached = cache_directory(runs[0].data) / "preflight" / f"{kind}.json"
        with FileLock(sweep.path / ".preflight.lock", timeout=WAIT_SECONDS):
            record = read_record(sweep)
            of_kind = [node.of_kind for node in record.nodes.values() if node.kind == kind]
            with suppress(UserError):  # no sweep has checked this kind
                of_kind.append(read_document(cached, list[Finding]))
            if is_new := not of_kind:
                of_kind.append(list(check_device(runs, ranks)))
                if all(finding.outcome != FAILED for finding in of_kind[0]):
                    cached.parent.mkdir(parents=True, exist_ok=True)
                    write_json(cached, [asdict(finding) for finding in of_kind[0]])
            node = record.nodes[host] = NodeRecord(kind, of_node, of_kind[0], round(time.monotonic() - start, 1))
            for finding in of_kind[0]:
                record.decides |= finding.decides
            write_json(sweep.path / FILE, asdict(record))
    except (OSError, Timeout) as error:
        yield f"preflight could not be finished, so runs start unchecked: {error}"
        return
    if is_new or any(finding.outcome != PASSED for finding in of_node):
        yield summary(host, node)


def node_kind(runs: Sequence[RunConfig]) -> str:
    """Return a hash of this node's processor, GPUs, driver, software, and the kernels that the runs need."""
    facts = {__version__, f"{runs[0].parallel.world_size} ranks"}
    with suppress(OSError, importlib.metadata.PackageNotFoundError):
        facts |= {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")}
        facts |= {f"{package} {importlib.metadata.version(package)}" for package in ("torch", "triton")}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        facts.add(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    fields = ("attention", "cross_entropy", "device")
    facts |= {f"{run.precision} {[getattr(run.parallel, name) for name in fields]}" for run in runs}
    facts |= {f"{run.model.key_dim} {run.model.window} {run.data.separate_documents}" for run in runs}
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()[:16]
