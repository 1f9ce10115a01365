"""Forked processes that tests may kill."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from isoflop.train.job.fork import start_forks


@dataclass(frozen=True)
class Ended:
    """The exit code and messages of a forked process."""

    code: int | None  # exit code, or minus the signal that ended it; None if the process was still running
    said: list[str]


def fork_processes(
    count: int, function: Callable[[int, Callable[[str], None]], None], wait_for: Collection[int], timeout: float = 60.0
) -> list[Ended]:
    """Call `function(number, send)` in `count` forked processes, which may die, and return how each ended.

    Args:
        count: Number of processes.
        function: Takes the number of its process and a function that sends a message to this process. If it raises,
            the traceback is sent and the exit code is 1.
        wait_for: Numbers of the processes to wait for; the others are killed after that.
        timeout: Seconds after which all processes are killed.

    Returns:
        The exit code and all messages of each process. Messages are kept even if the process dies.
    """
    processes, receivers = start_forks(count, _process, function)
    deadline = time.monotonic() + timeout
    for number in wait_for:
        processes[number].join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [Ended(code, _messages(receiver)) for code, receiver in zip(codes, receivers, strict=True)]


def _messages(receiver: Connection) -> list[str]:
    messages = []
    try:
        while receiver.poll():
            messages.append(receiver.recv())
    except EOFError:
        pass
    return messages


def _process(number: int, sender: Connection, function: Callable[[int, Callable[[str], None]], None]) -> None:
    torch.set_num_threads(1)
    try:
        function(number, sender.send)
        code = 0
    except BaseException:
        sender.send(traceback.format_exc())
        code = 1
    os._exit(code)
