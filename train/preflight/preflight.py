"""Check a node before a sweep trusts it: memory, disk and network here; in a separate process what needs PyTorch."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import RunConfig
from ..flops import count_parameters
from ..memory import memory

PASSED, REPLACED, FAILED, NOTE = "passed", "replaced", "failed", "note"
EXCLUDE = "keep the node out with cluster.exclude"
TRIAL_BYTES = 2**28  # at most, of the file that is written to find a quota
# What replaces a kernel of ours that fails its check: fields of `parallel`.
INSTEAD = {"attention": {"attention": "sdpa"}, "loss": {"cross_entropy": "torch"}}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    outcome: str  # passed | replaced (by what `decides` says) | failed | note
    said: str  # one sentence
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel` that runs on such a device must take


@dataclass(frozen=True)
class Request:
    """What to check for."""

    runs: list[RunConfig]
    folder: Path  # of checkpoints
    device: str = "auto"
    ranks: int = 1  # of a run, on this node
    hosts: list[str] = field(default_factory=list)  # NAME:PORT that runs need
    timeout: float = 300.0  # seconds that the checks of `check_device` may take


def check_node(request: Request) -> Iterator[Finding]:
    """Check what differs between nodes of one kind."""
    yield _memory(request)
    yield _disk(request)
    for host in request.hosts:
        name, _, port = host.rpartition(":")
        try:
            socket.create_connection((name, int(port)), timeout=5.0).close()
            yield Finding("network", PASSED, f"{name} answers")
        except OSError as error:
            text = f"{name} does not answer ({error}); set tracker.mode=offline and HF_HUB_OFFLINE=1 to do without it"
            yield Finding("network", NOTE, text)


def _memory(request: Request) -> Finding:
    """Compare free memory with the least that the largest run needs, which is with micro-batches of one sequence."""
    gpus = [] if request.device == "cpu" else free_of_gpus()
    small = [replace(run, parallel=replace(run.parallel, micro_batch_size=1)) for run in request.runs]
    needed = max(memory(run, "cuda" if gpus else "cpu").peak for run in small)
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = min(gpus, default=1024 * int(lines["MemAvailable"].split()[0]) // request.ranks)
    text = f"a rank has {free / 1e6:,.0f} MB of memory free, and the largest run needs at least {needed / 1e6:,.1f} MB"
    text += "" if needed <= free else "; end other processes, or set parallel.recompute=full or more ranks"
    return Finding("memory", PASSED if needed <= free else FAILED, text)


def free_of_gpus() -> list[int]:
    """Return the free bytes of every GPU that this process may use; none without a driver or a GPU."""
    command, visible = (
        ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
        "CUDA_VISIBLE_DEVICES",
    )
    command += ["-i", os.environ[visible]] if os.environ.get(visible) else []
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [int(free) * 2**20 for free in listed.split()]
    return []


def _disk(request: Request) -> Finding:
    """Check that all checkpoints have room, and that a file of a checkpoint's size can be written."""
    sizes = [12 * count_parameters(run.model).N_total for run in request.runs]  # fp32 weights and two moments
    needed, free = sum(sizes) + max(sizes), shutil.disk_usage(request.folder).free
    text = f"{request.folder} has {free / 1e6:,.0f} MB free, and checkpoints take about {needed / 1e6:,.1f} MB"
    trial, size = request.folder / f".preflight-{os.getpid()}", min(max(sizes), TRIAL_BYTES)
    try:
        trial.write_bytes(os.urandom(size))
    except OSError as error:  # a quota may be full, or the file system read-only
        text, needed = f"{size / 1e6:,.1f} MB cannot be written to {request.folder} ({error.strerror})", free
    finally:
        trial.unlink(missing_ok=True)
    text += "" if needed < free else "; free some space, or set output_root to another disk"
    return Finding("disk", PASSED if needed < free else FAILED, text)


def check_device(request: Request) -> Iterator[Finding]:
    """Check what holds for all nodes of a kind. A check that crashes or hangs is a finding, and the last one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command, given = [sys.executable, "-P", "-m", f"{__package__}.kernels"], pickle.dumps(request)
    try:
        ended = subprocess.run(command, input=given, capture_output=True, env=environment, timeout=request.timeout)
        lines, last = ended.stdout.splitlines(), (ended.stderr.decode().splitlines() or [""])[-1]
        problem = f"its process ended with code {ended.returncode} ({last})" if ended.returncode else ""
    except subprocess.TimeoutExpired as expired:
        lines, problem = (expired.stdout or b"").splitlines(), f"no answer within {request.timeout:g} s"
    check = "device"
    for message in map(json.loads, lines):
        if isinstance(message, str):
            check = message
        else:
            yield Finding(**message)
    if problem:
        remedy = "".join(f"set parallel.{name}={value}, or " for name, value in INSTEAD.get(check, {}).items())
        yield Finding(check, FAILED, f"{check}: {problem}; {remedy}{EXCLUDE}")
