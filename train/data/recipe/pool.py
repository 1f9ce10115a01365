"""A pool of processes that work on parts of a corpus. Functions must be importable and arguments picklable.

A worker is `python -m ….pool`. A fork would copy the thread locks of torch and tokenizers, and multiprocessing would
run the user's script again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, BinaryIO

from ...errors import UserError

Job = tuple[Any, ...]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """A pool of worker processes. If it has one, this process runs the jobs."""

    def __init__(self, processes: int | None = None) -> None:
        self._count = processes or usable_cores()
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[bytes]] = []
        self._starting = threading.Lock()
        self._over = False
        self._threads = ThreadPoolExecutor(self._count)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._starting:
            self._over = True  # or else a thread could still start a worker, which would never be ended
        for process in self._started:
            if kind is not None:
                process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.wait()

    def map(self, function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[Any]:
        """Yield function(*job) for each job, in order of completion. Reads `jobs` only a few ahead."""
        if self._count == 1:
            for job in jobs:
                yield function(*job)
            return
        running: set[Future[Any]] = set()
        remaining = iter(jobs)
        while True:
            for job in itertools.islice(remaining, self._count + 2 - len(running)):
                running.add(self._threads.submit(self._call, function, job))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    def _call(self, function: Callable[..., Any], job: Job) -> Any:
        try:
            process = self._free.get_nowait()
        except queue.Empty:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, job), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            succeeded, result = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = process.wait()
            hint = " (killed, often because memory ran out)" if code == -9 else ""
            raise UserError(
                f"a process that prepares data ended with exit code {code}{hint}; run the same command again, and it "
                "continues with the remaining parts"
            ) from None
        self._free.put(process)
        if not succeeded:
            raise result
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = "1"
        with self._starting:
            if self._over:
                raise RuntimeError("the pool has ended")
            # -P: files in the user's folder must not shadow modules.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # so that Ctrl-C reaches only the parent
            )
            self._started.append(process)
        return process


def _serve(jobs: BinaryIO, results: BinaryIO) -> None:
    while True:
        try:
            function, job = pickle.load(jobs)
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, function(*job))
        except Exception as error:
            answer = (False, error)
        pickle.dump(answer, results, pickle.HIGHEST_PROTOCOL)
        results.flush()


def _end_with(parent: int) -> None:
    """End this process when the process `parent` is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Output of libraries goes to standard error, so that it does not mix with the results.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, channel)
