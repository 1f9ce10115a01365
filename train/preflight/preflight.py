"""Checks of a node before a sweep uses it: memory, disk and network here; PyTorch in a separate process."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import RunConfig
from ..flops import count_parameters
from ..memory import memory

PASSED, REPLACED, FAILED, NOTE = "passed", "replaced", "failed", "note"
EXCLUDE = "exclude the node with cluster.exclude"
TRIAL_BYTES = 2**28  # largest trial file, which is written to detect a full quota; chosen by hand
# Fields of `parallel` that replace our kernel if its check fails.
INSTEAD = {"attention": {"attention": "sdpa"}, "loss": {"cross_entropy": "torch"}}


@dataclass(frozen=True)
class Finding:
    check: str
    outcome: str  # passed | replaced (see `decides`) | failed | note
    said: str  # one sentence
    decides: dict[str, str] = field(default_factory=dict)  # fields of `parallel` for runs on such a device


def check_node(runs: Sequence[RunConfig], folder: Path, ranks: int) -> Iterator[Finding]:
    """Check memory, disk and network of this node for `runs`, with `ranks` ranks on it and checkpoints in `folder`."""
    yield _memory(runs, ranks)
    yield _disk(runs, folder)
    for name in hosts_of(runs[0]):
        try:
            socket.create_connection((name, 443), timeout=5.0).close()
            yield Finding("network", PASSED, f"{name} answers")
        except OSError as error:
            text = f"{name} does not answer ({error}); set tracker.mode=offline and HF_HUB_OFFLINE=1 to run without it"
            yield Finding("network", NOTE, text)


def hosts_of(run: RunConfig) -> list[str]:
    tracks = run.tracker.kind == "wandb" and run.tracker.mode == "online"
    corpora = [run.data.corpus, *(domain.corpus for domain in (run.data.domains or {}).values())]
    reads = "hf" in corpora and not os.environ.get("HF_HUB_OFFLINE")
    return ["api.wandb.ai"] * tracks + ["huggingface.co"] * reads


def _memory(runs: Sequence[RunConfig], ranks: int) -> Finding:
    gpus = [] if runs[0].parallel.device == "cpu" else free_of_gpus()
    small = [replace(run, parallel=replace(run.parallel, micro_batch_size=1)) for run in runs]
    needed = max(memory(run, "cuda" if gpus else "cpu").peak for run in small)
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = min(gpus, default=1024 * int(lines["MemAvailable"].split()[0]) // ranks)
    text = f"a rank has {free / 1e6:,.0f} MB of memory free, and the largest run needs at least {needed / 1e6:,.1f} MB"
    text += "" if needed <= free else "; end other processes, set parallel.recompute=full, or use more ranks"
    return Finding("memory", PASSED if needed <= free else FAILED, text)


def free_of_gpus() -> list[int]:
    """Return the free bytes of each GPU that this process may use; [] without a driver or a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    command += [] if visible is None else ["-i", visible]  # an empty value is refused, because no GPU is visible
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [int(free) * 2**20 for free in listed.split()]
    return []


def _disk(runs: Sequence[RunConfig], folder: Path) -> Finding:
    sizes = [12 * count_parameters(run.model).N_total for run in runs]  # fp32 weights and two moments
    needed, free = sum(sizes) + max(sizes), shutil.disk_usage(folder).free
    text = f"{folder} has {free / 1e6:,.0f} MB free, and checkpoints take about {needed / 1e6:,.1f} MB"
    trial, size = folder / f".preflight-{os.getpid()}", min(max(sizes), TRIAL_BYTES)
    try:
        trial.write_bytes(os.urandom(size))
    except OSError as error:  # a quota may be full, or the file system read-only
        text, needed = f"{size / 1e6:,.1f} MB cannot be written to {folder} ({error.strerror})", free
    finally:
        trial.unlink(missing_ok=True)
    text += "" if needed < free else "; free some space, or set output_root to another disk"
    return Finding("disk", PASSED if needed < free else FAILED, text)


def check_device(runs: Sequence[RunConfig], ranks: int, timeout: float = 300.0) -> Iterator[Finding]:
    """Check kernels, a training step and communication of `ranks` ranks in a separate process.

    A crash, or more than `timeout` seconds, ends the checks with a failed finding.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command, request = [sys.executable, "-P", "-m", f"{__package__}.kernels"], pickle.dumps((runs, ranks, timeout))
    try:
        ended = subprocess.run(command, input=request, capture_output=True, env=environment, timeout=timeout)
        lines, last = ended.stdout.splitlines(), (ended.stderr.decode().splitlines() or [""])[-1]
        problem = f"its process ended with code {ended.returncode} ({last})" if ended.returncode else ""
    except subprocess.TimeoutExpired as expired:
        lines, problem = (expired.stdout or b"").splitlines(), f"no answer within {timeout:g} s"
    check = "device"
    for message in map(json.loads, lines):
        if isinstance(message, str):
            check = message
        else:
            yield Finding(**message)
    if problem:
        remedy = "".join(f"set parallel.{name}={value}, or " for name, value in INSTEAD.get(check, {}).items())
        yield Finding(check, FAILED, f"{check}: {problem}; {remedy}{EXCLUDE}")
