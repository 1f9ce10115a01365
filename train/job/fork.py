"""Ranks as forked processes of this one, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*arguments)` in `ranks` forks with a gloo process group; return every rank's result.

    Raises:
        RuntimeError: A rank raised, died, or took over `timeout` seconds. Holds the ranks' messages, the first failure
            first.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, receivers = start_forks(ranks, _rank, ranks, folder, timeout, function, arguments)
        try:
            answers = _collect(processes, receivers, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"rank {rank}: {answer}" for rank, (fine, answer) in answers.items() if not fine]
    failures += [f"rank {rank}: no answer within {timeout:g} s" for rank in range(ranks) if rank not in answers]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [answers[rank][1] for rank in range(ranks)]


def start_forks(count: int, target: Callable[..., None], *arguments: Any) -> tuple[list[ForkProcess], list[Connection]]:
    """Run `target(number, sender, *arguments)` in `count` forks; return processes and pipes to read from."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=target, args=(n, pipes[n][1], *arguments)) for n in range(count)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    return processes, [receiver for receiver, _ in pipes]


def _collect(processes: list[ForkProcess], receivers: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
    """Return rank -> (succeeded, result or error), earliest first, of ranks that answer or end in `timeout` seconds."""
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while waiting := {r: p for r, p in enumerate(processes) if r not in answers}:
        if not wait(
            [*(receivers[r] for r in waiting), *(p.sentinel for p in waiting.values())], deadline - time.monotonic()
        ):
            break
        for rank, process in waiting.items():
            alive = process.is_alive()  # checked first, because a rank may answer and then end
            with suppress(EOFError):
                if receivers[rank].poll():
                    answers[rank] = receivers[rank].recv()
                    continue
            if not alive:
                answers[rank] = (False, f"ended without a result (exit code {process.exitcode})")
    return answers


def _rank(
    rank: int,
    answer: Connection,
    ranks: int,
    folder: str,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    try:
        store = dist.FileStore(os.path.join(folder, "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
        result = (True, function(*arguments))
    except BaseException:
        result = (False, traceback.format_exc())
    try:
        answer.send(result)
    except Exception:
        answer.send((False, traceback.format_exc()))
    # An early exit would cut connections that a slower rank is still making, so the parent ends all ranks at once.
    while result[0] and os.getppid() == parent:
        time.sleep(0.02)
    os._exit(0)  # skips teardown of objects that the parent still owns
