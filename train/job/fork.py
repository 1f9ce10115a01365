"""Ranks as forked processes of this one, over gloo. Forking 8 ranks takes half a second."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `function(*arguments)`, which may be a closure, in forked processes with torch's process group; returns all
    results.

    Raises:
        RuntimeError: a rank raised, died, or had not ended in time; holds every rank's own words.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, receivers = start_forks(ranks, _rank, ranks, folder, timeout, function, arguments)
        try:
            answers = _collect(receivers, timeout)
        finally:
            for process in processes:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [answer[1] for answer in answers]


def start_forks(count: int, target: Callable[..., None], *arguments: Any) -> tuple[list[ForkProcess], list[Connection]]:
    """Forks `target(number, sender, *arguments)` `count` times; returns the processes and the other ends of their
    pipes.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=target, args=(n, pipes[n][1], *arguments)) for n in range(count)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    return processes, [receiver for receiver, _ in pipes]


def _collect(receivers: list[Connection], timeout: float) -> list[tuple[bool, Any]]:
    answers: list[tuple[bool, Any]] = [(False, f"no answer within {timeout:g} s")] * len(receivers)
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(waiting), left):
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                answers[rank] = receiver.recv()
            except EOFError:
                answers[rank] = (False, "died without a word")
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
    answer.close()
    os._exit(0)  # no teardown of what the parent still owns
