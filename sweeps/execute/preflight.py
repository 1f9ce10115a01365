"""A sweep's first look at every kind of node that trains it.

A node of a kind that has passed before, with the same software, is not looked at again, in any sweep.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from ... import __version__
from ...train.config import RunConfig
from ...train.data.storage import cache_directory
from ...train.errors import UserError
from ...train.files import read_document, write_json
from ...train.preflight.finding import FAILED, PASSED, Finding, judge_speed
from ...train.preflight.preflight import OF_KIND, OF_NODE, Request, findings
from .. import prepare
from ..config import ClusterConfig, SweepConfig
from ..plan.rates import core_flops_per_second, fill_budgets, processor_name
from ..runs.directory import SweepDirectory, inside_job, this_node
from ..runs.preflight import FILE, NodeRecord, read_record, summary

WANDB, HUB = "api.wandb.ai:443", "huggingface.co:443"
WAIT_SECONDS = 600.0  # for whoever checks another node of this kind at the same time


def look_over(sweep: SweepDirectory, runs: Sequence[RunConfig], cluster: ClusterConfig, ranks: int) -> Iterator[str]:
    """Checks this node on its first job of the sweep, and yields what a person should read of it.

    What holds for all nodes of its kind is checked where no sweep knows it; its disk, network, ... always are. Where
    nothing can be written down, runs go on unchecked: they meet the same disk, and say so.
    """
    try:
        yield from _look_over(sweep, runs, cluster, ranks)
    except (OSError, Timeout) as error:
        yield f"preflight could not be finished: {error}"


def _look_over(sweep: SweepDirectory, runs: Sequence[RunConfig], cluster: ClusterConfig, ranks: int) -> Iterator[str]:
    host = this_node()
    if host in read_record(sweep).nodes:
        return
    kind, start = node_kind(runs), time.monotonic()
    request = request_of(sweep.path, runs, cluster, ranks)
    own = list(findings(request, (*OF_NODE, "speed") if inside_job() else OF_NODE))
    cached = cache_directory(runs[0].data) / "preflight" / f"{kind}.json"
    with FileLock(sweep.path / ".preflight.lock", timeout=WAIT_SECONDS):
        record = read_record(sweep)
        alike = {name: node for name, node in record.nodes.items() if node.kind == kind}
        known = next((node.of_kind for node in alike.values()), None)
        if known is None:
            with suppress(UserError):  # there is none
                known = read_document(cached, list[Finding])
        if is_new := known is None:
            known = list(findings(request, OF_KIND))
            if all(finding.outcome != FAILED for finding in known):
                cached.parent.mkdir(parents=True, exist_ok=True)
                write_json(cached, [asdict(finding) for finding in known])
        assert known is not None
        rates = {name: rate for name, node in alike.items() if (rate := node.rate) is not None}
        node = NodeRecord(kind, own, known, round(time.monotonic() - start, 1))
        if node.rate is not None and (slow := judge_speed(host, node.rate, rates)) is not None:
            own.append(slow)
        record.nodes[host] = node
        for finding in known:
            record.decides |= finding.decides
        write_json(sweep.path / FILE, asdict(record))
    if is_new or any(finding.outcome != PASSED for finding in own):
        yield summary(host, node)


def request_of(folder: Path, runs: Sequence[RunConfig], cluster: ClusterConfig, ranks: int) -> Request:
    gpus = cluster.kind == "slurm" and cluster.gpus_per_job > 0
    device, tracker = runs[0].parallel.device, runs[0].tracker
    hosts = [WANDB] if tracker.kind == "wandb" and tracker.mode == "online" else []
    if runs[0].data.corpus == "hf" and not os.environ.get("HF_HUB_OFFLINE"):
        hosts.append(HUB)
    bandwidth = cluster.node_gb_per_s * 1e9 if gpus else None
    return Request(list(runs), folder, device, ranks, bandwidth=bandwidth, hosts=hosts)


def check_machine(config: SweepConfig) -> Iterator[Finding]:
    """All checks of this machine, for the runs of a grid that is not started."""
    rate = config.cluster.flops_per_second or core_flops_per_second()
    fill_budgets(config.grid, config.cluster, rate)
    runs, _ = prepare.resolve_runs(config)
    folder = Path(config.output_root).resolve()
    while not folder.is_dir():
        folder = folder.parent
    return findings(request_of(folder, runs, config.cluster, config.parallel.world_size))


def node_kind(runs: Sequence[RunConfig]) -> str:
    """Of processor, GPUs, driver, software, and the kernels that runs need: a hash."""
    versions = [__version__]
    for package in ("torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(package))
    gpus = ""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    kernels = {
        (run.precision, run.parallel.attention, run.parallel.cross_entropy, run.parallel.device)
        + ((run.model.key_dim, run.model.window, run.data.separate_documents) if gpus else ())
        for run in runs
    }
    said = json.dumps([versions, gpus, processor_name(), runs[0].parallel.world_size, sorted(map(str, kernels))])
    return hashlib.sha256(said.encode()).hexdigest()[:16]
