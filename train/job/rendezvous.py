"""Rendezvous: the ranks of a job find each other through a file in the run directory, or torchrun's address."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store

from ..config import ParallelConfig
from ..errors import UserError
from ..files import read_document, write_atomic
from ..hardware import CUDA, on_gpu
from ..parallel.mesh import Mesh, build_mesh
from ..planner.validation import check_hosts
from .environment import Ranks

# Collectives time out this much later than the watchdog, because only the watchdog knows which rank is at fault.
MARGIN_SECONDS = 30.0
POLL_SECONDS = 0.05
FAREWELL_SECONDS = 5.0  # rank 0 keeps the store up so that other ranks can read why the job ends


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    token: str


@contextmanager
def meet(
    ranks: Ranks, folder: Path, parallel: ParallelConfig, device: torch.device
) -> Iterator[tuple[Mesh, Store | None]]:
    """Make this process a rank of its job while the block runs.

    Yields the mesh, and the store for messages between ranks (None for one rank without torchrun). Rank 0 writes
    its address to `folder`. Raises UserError if rank 0 was not found in time, or a tensor-parallel group spans nodes.
    """
    if on_gpu(device):
        device = CUDA.take(ranks.local_rank)
    if ranks.size == 1 and ranks.source != "torchrun":
        yield Mesh(), None
        return
    limit = timedelta(seconds=parallel.timeout_seconds + MARGIN_SECONDS)
    store, file = _open_store(ranks, folder, parallel.timeout_seconds)
    clean = False
    try:
        dist.init_process_group(
            "nccl" if on_gpu(device) else "gloo",
            store=dist.PrefixStore("torch", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=limit,
            device_id=device if on_gpu(device) else None,
        )
        mesh = build_mesh(device=device, **parallel.axes)
        for group in vars(mesh).values():
            # Torch gives the groups of a mesh 10 minutes on NCCL, regardless of their parent's timeout.
            if isinstance(group, dist.ProcessGroup):
                dist.distributed_c10d._set_pg_timeout(limit, group)
        hosts = mesh.gather(ranks.host)
        if file is not None:
            file.unlink(missing_ok=True)  # all ranks have connected
        check_hosts(parallel, hosts)
        yield dataclasses.replace(mesh, hosts=tuple(hosts)), store
        clean = True
    finally:
        # After an error NCCL would wait for collectives that never end. The process ends soon anyway.
        if dist.is_initialized() and (clean or not on_gpu(device)):
            dist.destroy_process_group()
        leave(store, ranks.rank, ranks.size, parallel.timeout_seconds if clean else FAREWELL_SECONDS)
        if file is not None:
            file.unlink(missing_ok=True)


def _open_store(ranks: Ranks, folder: Path, timeout: float) -> tuple[Store, Path | None]:
    if ranks.source == "torchrun":
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        joined = store.add(f"joined/{ranks.rank}", 1)  # torchrun's store outlives a run, and a process may do several
        return dist.PrefixStore(f"isoflop/{joined}", store), None
    path = folder / f".rendezvous-{ranks.attempt}.json"
    if ranks.rank != 0:
        return _find(path, ranks, timeout), None
    for old in folder.glob(".rendezvous-*.json"):
        old.unlink(missing_ok=True)
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )  # port 0: the system picks a free one
    token = os.urandom(8).hex()  # tells our store from an earlier attempt's, or a foreign one at its address
    store.set("token", token)
    address = "127.0.0.1" if ranks.local_size == ranks.size else socket.gethostname()
    write_atomic(path, json.dumps({"host": address, "port": store.port, "token": token}))
    return store, path


def _find(path: Path, ranks: Ranks, timeout: float) -> Store:
    deadline = time.monotonic() + timeout
    state = f"{path} was not written"
    while time.monotonic() < deadline:
        # A network file system caches that a file was missing; listing its directory refreshes that.
        with suppress(OSError):
            os.listdir(path.parent)
        if path.exists():
            try:
                address = read_document(path, _Address)
            except UserError as error:
                state = str(error).rstrip(".")
            else:
                state = f"rank 0 of this job does not answer at {address.host}:{address.port}"
                if (store := _connect(address, timeout)) is not None:
                    return store
        time.sleep(POLL_SECONDS)
    raise UserError(
        f"rank {ranks.rank} on {ranks.host} did not find rank 0 within parallel.timeout_seconds {timeout:g} s: "
        f"{state}; look into the log of rank 0, or raise the timeout"
    )


def _connect(address: _Address, timeout: float) -> Store | None:
    """Return a client of the store at an address, or None if this job's store is not there."""
    try:
        socket.create_connection((address.host, address.port), timeout=5.0).close()  # torch's client prints long errors
        patience = timedelta(seconds=5)
        store = dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=patience)
        if not store.check(["token"]) or store.get("token").decode() != address.token:
            return None
    except (OSError, OverflowError, ValueError, dist.DistError):  # no port is above 65535, no name has a zero byte
        return None
    store.set_timeout(timedelta(seconds=timeout))
    return store


def leave(store: Store, rank: int, size: int, patience: float) -> None:
    """Report that this rank no longer needs the store. Rank 0, its server, waits for all, up to `patience` seconds."""
    with suppress(dist.DistError):  # rank 0 may be dead
        store.set(farewell(rank), "")
        if rank == 0:  # the store is in this process, and other ranks may still read it
            store.wait([farewell(other) for other in range(size)], timedelta(seconds=patience))


def farewell(rank: int) -> str:
    """Return the store key under which a rank reports that it has left."""
    return f"left/{rank}"
