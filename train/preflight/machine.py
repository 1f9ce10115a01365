"""What stops jobs in practice, asked of the node: software that does not fit, GPUs, disks, shared memory, networks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RunConfig
from ..flops import count_parameters
from ..job.failure import DISK_FULL
from .finding import FAILED, NOTE, PASSED, Finding

if TYPE_CHECKING:
    import torch

QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "clocks_throttle_reasons.active")
# NVML's reasons that cost speed: power brake, and slowdowns by heat. Idle clocks and power caps are everyday.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
OCCUPIED = 0.05  # of a GPU's memory, by processes before ours
WRITTEN = 2**28  # bytes of a trial, at most
SHARED = 2**25  # bytes of /dev/shm that a rank of NCCL wants
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_software(device: torch.device) -> Iterator[Finding]:
    """Driver, PyTorch, Triton and the GPU's architecture."""
    import torch

    from ..hardware import CUDA, on_gpu  # PyTorch takes seconds, and what else is here does without

    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
    words = f"torch {torch.__version__}, Triton {triton or 'not installed'}"
    if not on_gpu(device):
        yield Finding("software", PASSED, f"{words}; no GPU is used")
        return
    yield judge_software(words, triton, CUDA.name(device), CUDA.capability(device), CUDA.built_for())


def judge_software(
    words: str, triton: str | None, name: str, capability: tuple[int, int], built_for: Sequence[str]
) -> Finding:
    """`built_for`: architectures such as sm_90 or compute_90, as torch lists them."""
    ours = 10 * capability[0] + capability[1]
    words += f" on {name} (sm_{ours})"
    # Machine code serves later GPUs of its generation, PTX all later ones.
    kinds = [(part.startswith("compute"), int(part.rpartition("_")[2].rstrip("af"))) for part in built_for]
    if not any(number <= ours and (ptx or number // 10 == capability[0]) for ptx, number in kinds):
        words += f": torch is built for {', '.join(built_for)}; install one that is built for it"
        return Finding("software", FAILED, words)
    if triton is None:
        return Finding("software", NOTE, f"{words}: attention and the loss run without our kernels")
    return Finding("software", PASSED, words)


def check_gpus(device: str) -> Iterator[Finding]:
    """Whether this node's GPUs are alike, free and at full speed; nothing where runs use none."""
    if device == "cpu" or (device == "auto" and shutil.which("nvidia-smi") is None):
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:  # as where a driver is installed and no GPU is there
        yield Finding("gpus", NOTE, f"nvidia-smi does not answer ({error}), so nobody knows whether the GPUs are free")
        return
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield from judge_gpus(listed, None if shown is None else shown.split(","))


def judge_gpus(listed: str, visible: Sequence[str] | None = None) -> Iterator[Finding]:
    """From nvidia-smi's lines of `QUERY`; of the GPUs that are `visible`, by index or the start of their UUID."""
    rows = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(QUERY)]
    if visible is not None:
        rows = [row for row in rows if any(row[0] == one or row[1].startswith(one) for one in visible if one)]
    kinds = {f"{row[2]} with {row[3]} MiB" for row in rows}
    if len(kinds) > 1:
        yield Finding("gpus", FAILED, f"the GPUs of this node differ: {', '.join(sorted(kinds))}; runs would mix them")
    for index, _, _, total, used, busy, reasons in rows:
        if used.isdigit() and total.isdigit() and int(used) > OCCUPIED * int(total):
            said = f"GPU {index} is occupied by others: {used} of {total} MiB are taken, at {busy} % of use"
            yield Finding("gpus", FAILED, f"{said}; keep the node out with cluster.exclude, or wait")
        if reasons.startswith("0x") and int(reasons, 16) & THROTTLED:
            yield Finding("gpus", FAILED, f"GPU {index} is throttled by heat or power ({reasons}); it trains slower")
    if rows:
        yield Finding("gpus", PASSED, f"{len(rows)} x {rows[0][2]}")


def check_disk(runs: Sequence[RunConfig], folder: Path, grace: float) -> Iterator[Finding]:
    """Room for the sweep's checkpoints, and whether the largest is written within the grace of a preemption, in
    seconds.
    """
    sizes = [12 * count_parameters(run.model).N_total for run in runs]  # fp32 weights and two moments
    largest, needed = max(sizes), sum(sizes) + max(sizes)
    free = shutil.disk_usage(folder).free
    said = f"{folder} has {free / 1e9:.2f} GB free, and checkpoints of these runs take about {needed / 1e9:.2f} GB"
    yield Finding("disk", PASSED if free > needed else FAILED, said)
    trial, written = folder / f".preflight-{os.getpid()}", max(2**20, min(largest, WRITTEN))
    start = time.perf_counter()
    try:
        with trial.open("wb") as file:
            file.write(os.urandom(2**20) * (written // 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = "the disk, or a quota, is full" if error.errno in DISK_FULL else str(error.strerror)
        yield Finding("disk", FAILED, f"{written / 1e6:.0f} MB cannot be written to {folder}: {why}")
        return
    finally:
        trial.unlink(missing_ok=True)
    seconds = (time.perf_counter() - start) * max(1.0, largest / written)
    yield judge_writing(largest, seconds, grace)


def judge_writing(size: float, seconds: float, grace: float) -> Finding:
    said = f"the largest checkpoint ({size / 1e6:,.1f} MB) is written in about {seconds:.1f} s"
    if seconds <= grace:
        return Finding("disk", PASSED, said, numbers={"seconds": seconds})
    said += f", and a preempted job has {grace:g} s; save more often (checkpoint.every_seconds), or elsewhere"
    return Finding("disk", FAILED, said, numbers={"seconds": seconds})


def check_shared_memory(ranks: int, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Through which ranks of a node speak."""
    if ranks > 1 and folder.is_dir():
        free = shutil.disk_usage(folder).free
        said = f"{folder} has {free / 2**20:,.0f} MiB for {ranks} ranks"
        fine = free >= SHARED * ranks
        said += "" if fine else f", which need {SHARED * ranks / 2**20:,.0f}; in a container give --shm-size"
        yield Finding("shared memory", PASSED if fine else FAILED, said)


def check_network(ranks: int, hosts: Sequence[str], environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The interfaces that the environment names, and `hosts`, as NAME:PORT, that runs will want."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES if ranks > 1 else ():
        wanted = environment.get(variable, "")
        if wanted and not any(_matches(wanted, name) for name in there):
            said = f"{variable} is {wanted!r}, and this node has {', '.join(there)}; name one of them"
            yield Finding("network", FAILED, said)
    for host in hosts:
        name, _, port = host.rpartition(":")
        try:
            socket.create_connection((name, int(port)), timeout=5.0).close()
            yield Finding("network", PASSED, f"{name} answers")
        except OSError as error:
            said = f"{name} does not answer ({error}), and what needs it waits"
            yield Finding("network", NOTE, f"{said}; tracker.mode=offline and HF_HUB_OFFLINE=1 do without")


def _matches(wanted: str, name: str) -> bool:
    """NCCL's manners: prefixes by commas, `=` before an exact name, `^` before what is left out."""
    if wanted.startswith("^"):
        return not any(name.startswith(part) for part in wanted[1:].lstrip("=").split(","))
    if wanted.startswith("="):
        return name in wanted[1:].split(",")
    return any(name.startswith(part) for part in wanted.split(","))
