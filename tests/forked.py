"""Bare forked processes, which tests may kill."""

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
    """How a forked process ended."""

    code: int | None  # its exit code, minus the signal that ended it; None: it was still there
    said: list[str]


def fork_processes(
    count: int, function: Callable[[int, Callable[[str], None]], None], wait_for: Collection[int], timeout: float = 60.0
) -> list[Ended]:
    """Calls `function(number, say)` in `count` bare forked processes, which may die, and returns how each ended.

    Once the processes in `wait_for` have ended, or the timeout has passed, those that are left are killed. What a
    process says is kept whatever becomes of it. A function that raises says its traceback and ends with code 1.
    """
    processes, receivers = start_forks(count, _process, function)
    deadline = time.monotonic() + timeout
    for number in wait_for:
        processes[number].join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [Ended(code, _said(receiver)) for code, receiver in zip(codes, receivers, strict=True)]


def _said(receiver: Connection) -> list[str]:
    said = []
    try:
        while receiver.poll():
            said.append(receiver.recv())
    except EOFError:
        pass
    return said


def _process(number: int, sender: Connection, function: Callable[[int, Callable[[str], None]], None]) -> None:
    torch.set_num_threads(1)
    try:
        function(number, sender.send)
        code = 0
    except BaseException:
        sender.send(traceback.format_exc())
        code = 1
    os._exit(code)
