"""A rank that dies, hangs or raises ends all others soon, and each of them names that rank."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import Ended, fork_processes
from isoflop.train.config import ParallelConfig
from isoflop.train.errors import Stopped
from isoflop.train.job import watchdog as module
from isoflop.train.job.control import run_on_ranks
from isoflop.train.job.environment import Ranks
from isoflop.train.job.failure import Failure, RankError
from isoflop.train.job.rendezvous import meet
from isoflop.train.job.watchdog import EXIT_CODE, GRACE_SECONDS, Beat, Seen, Watchdog, at_fault
from isoflop.train.parallel.mesh import Mesh

TIMEOUT = 2.0
FAILING = 30.0  # seconds in which a test gives up; far beyond what the watchdog promises

Act = Callable[[Mesh, int, Watchdog], None]  # what a rank does in a step


def job(
    folder: Path, count: int, act: Act, survivors: Iterable[int], steps: int = 1000, far_apart: bool = False
) -> list[Ended]:
    """Run a job step by step, wait for the survivors, and return how each rank ended and its messages."""

    def process(rank: int, report: Callable[[str], None]) -> None:
        if far_apart:  # no rank sees the process of another
            module.pid_space = lambda: f"node {rank}"
        ranks = Ranks(rank, count, rank, count, f"node{rank}", "local", "1")
        try:
            with ExitStack() as stack:
                joined = meet(ranks, folder, ParallelConfig(dp=count, timeout_seconds=TIMEOUT), torch.device("cpu"))
                mesh, store = stack.enter_context(joined)
                watchdog = stack.enter_context(Watchdog(mesh, store, TIMEOUT, lambda failure: report(failure.reason)))
                for step in range(steps):
                    watchdog.beat(step)
                    act(mesh, step, watchdog)
                    time.sleep(0.01)
        except Exception as error:
            report(f"{type(error).__name__}: {error}" if not isinstance(error, RankError) else str(error))

    return fork_processes(count, process, list(survivors), FAILING)


def at_step_3(victims: Iterable[int], function: Callable[[], None]) -> Act:
    """Return an act that sums over ranks at every step; before step 3 the victims call a function."""

    def act(mesh: Mesh, step: int, watchdog: Watchdog) -> None:
        if step == 3 and mesh.rank in victims:
            function()
        dist.all_reduce(torch.ones(2), group=mesh.world)

    return act


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("the disk ate it\nand more")


def hang() -> None:
    time.sleep(1000)


@pytest.mark.parametrize(("victim", "far_apart"), [(0, False), (2, True)], ids=["same node", "other nodes"])
def test_every_survivor_names_the_rank_that_died(victim: int, far_apart: bool, tmp_path: Path) -> None:
    survivors = {0, 1, 2} - {victim}
    ended = job(tmp_path, 3, at_step_3([victim], die), survivors, far_apart=far_apart)
    assert ended[victim].code == -signal.SIGKILL
    for rank in survivors:
        assert ended[rank].said == [f"rank {victim} on node{victim} died at step 3"]


def test_of_several_ranks_that_die_at_once_the_dead_are_named(tmp_path: Path) -> None:
    ended = job(tmp_path, 3, at_step_3([1, 2], die), [0])
    names = ("rank 1 on node1", "rank 2 on node2", "rank 1 on node1 and rank 2 on node2")
    assert ended[0].said in [[f"{name} died at step 3"] for name in names]


def test_a_death_ends_ranks_that_compute_and_notice_nothing(tmp_path: Path) -> None:
    def act(mesh: Mesh, step: int, watchdog: Watchdog) -> None:
        if step == 3:
            die() if mesh.rank == 1 else hang()

    ended = job(tmp_path, 3, act, [0, 2])
    for rank in (0, 2):
        assert ended[rank] == Ended(EXIT_CODE, ["rank 1 on node1 died at step 3"])


@pytest.mark.slow
def test_a_frozen_rank_ends_the_job_after_the_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    frozen, *others = job(tmp_path, 3, at_step_3([0], freeze), [1, 2])
    assert time.monotonic() - started >= TIMEOUT
    assert frozen.code is None  # still there, and not ended by the others
    for end in others:
        assert end.code == EXIT_CODE
        assert "rank 0 on node0 has made no progress since step 3 for 2 s" in end.said[0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    ended = job(tmp_path, 3, at_step_3([1], hang), [0, 1, 2])
    reasons = {message for rank in ended for message in rank.said}
    assert len(reasons) == 1
    assert re.search(r"rank 1 on node1 .* step 3 \(in the step, at test_watchdog.* in hang\) for 2 s$", reasons.pop())


def test_a_rank_that_raises_tells_the_others_why(tmp_path: Path) -> None:
    victim = 0
    ended = job(tmp_path, 3, at_step_3([victim], fail), [0, 1, 2])
    own_message, message_to_others = (
        "ValueError: the disk ate it\nand more",
        f"rank {victim} on node{victim}: ValueError: the disk ate it",
    )
    for rank in range(3):
        assert ended[rank].said == [own_message if rank == victim else message_to_others]


def test_a_shared_error_ends_no_rank_before_it_has_cleaned_up(tmp_path: Path) -> None:
    def act(mesh: Mesh, step: int, watchdog: Watchdog) -> None:
        if step == 3:
            try:
                run_on_ranks(mesh, lambda: fail() if mesh.rank == 2 else None)
            finally:
                time.sleep(GRACE_SECONDS + 0.5 if mesh.rank == 1 else 0)

    ended = job(tmp_path, 3, act, [0, 1, 2])
    for rank in range(3):
        assert ended[rank] == Ended(0, ["rank 2 on node2: ValueError: the disk ate it\nand more"])


@pytest.mark.slow
def test_long_work_that_beats_and_ranks_that_end_in_order_are_no_failures(tmp_path: Path) -> None:
    def act(mesh: Mesh, step: int, watchdog: Watchdog) -> None:
        if mesh.rank == 0:  # cannot beat while it waits for the others
            dist.recv(torch.ones(1), src=1)
        if mesh.rank == 1:
            for _ in range(5):
                time.sleep(0.8)
                watchdog.beat(step, "validating")
            dist.send(torch.ones(1), dst=0)
        if mesh.rank == 2:
            raise Stopped("as agreed")

    ended = job(tmp_path, 3, act, [0, 1, 2], steps=1)
    assert ended == [Ended(0, []), Ended(0, []), Ended(0, ["Stopped: as agreed"])]


@pytest.mark.slow
def test_a_job_that_is_suspended_does_not_age(tmp_path: Path) -> None:
    def suspend() -> None:
        """Stop all ranks from outside for longer than the timeout, and continue them, as SLURM does."""
        pids = " ".join((tmp_path / str(rank)).read_text() for rank in range(3))
        subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; sleep {1.5 * TIMEOUT}; kill -CONT {pids}"])

    def act(mesh: Mesh, step: int, watchdog: Watchdog) -> None:
        if step == 0:
            (tmp_path / str(mesh.rank)).write_text(str(os.getpid()))
        time.sleep(0.3)  # longer than a poll: none has made progress when the watchdogs first look again
        at_step_3([1], suspend)(mesh, step, watchdog)

    started = time.monotonic()
    assert job(tmp_path, 3, act, [0, 1, 2], steps=10) == [Ended(0, [])] * 3
    assert time.monotonic() - started > TIMEOUT


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mesh = Mesh(rank=0, dp=2, hosts=("a", "b"))
    watchdog = Watchdog(mesh, store, 0.3, lambda reason: None)
    with pytest.raises(RankError, match=r"^rank 1 on b did not start within 0\.3 s$"), watchdog:
        pass


def test_a_rank_leaves_only_once_the_store_has_its_last_word() -> None:
    """Otherwise a busy store reads it after the others saw the process end, and they report a death."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def keep() -> None:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        theirs.send(store.port)
        theirs.recv()

    keeper = context.Process(target=keep, daemon=True)
    keeper.start()
    store = dist.TCPStore("localhost", ours.recv(), is_master=False, wait_for_workers=False)
    answers = threading.Event()

    def thaw() -> None:
        answers.set()
        os.kill(keeper.pid or 0, signal.SIGCONT)

    timer = threading.Timer(1.5, thaw)  # longer than threads are waited for
    try:
        with Watchdog(Mesh(hosts=("a",)), store, 2 * TIMEOUT, lambda reason: None):
            os.kill(keeper.pid or 0, signal.SIGSTOP)
            os.waitpid(keeper.pid or 0, os.WUNTRACED)  # a signal is on its way until the process has stopped
            timer.start()
        assert answers.is_set()
    finally:
        timer.cancel()
        keeper.kill()  # which ends a stopped process too
        keeper.join()


def test_one_process_without_a_launcher_is_not_watched() -> None:
    losses: list[Failure] = []
    with Watchdog(Mesh(), None, 0.01, losses.append) as watchdog:
        watchdog.beat(1)
        time.sleep(0.05)
    error = ValueError("own")
    with pytest.raises(ValueError, match="own") as raised, Watchdog(Mesh(), None, 0.01, losses.append):
        raise error
    assert raised.value is error
    assert losses == []


# The rank at fault, as a pure function of (step, seconds since its progress, seconds since its pulse, place).


def seen(*ranks: tuple[int | None, float, float, str]) -> dict[int, Seen]:
    return {
        rank: Seen(Beat(step=step, at=at), moved=100 - still, alive=100 - silent)
        for rank, (step, still, silent, at) in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ([(5, 9.9, 0, "a"), (5, 9.9, 0, "b")], []),  # not yet
        ([(5, 50, 0, "wait"), (5, 1, 0, "validate")], []),  # rank 0 waits for what rank 1 does
        ([(5, 50, 0, "wait"), (5, 12, 10, "read"), (5, 1, 0, "validate")], [1]),  # silent, while others work
        ([(5, 10, 0, "wait"), (5, 10, 5, "wait"), (5, 10, 0, "wait")], [1]),  # all wait for the silent one
        ([(5, 12, 10, "wait"), (5, 12, 9.9, "wait"), (5, 12, 0, "wait")], [0, 1]),  # a node is lost with its ranks
        ([(6, 10, 0, "wait"), (5, 10, 0, "wait"), (6, 10, 0, "wait")], [1]),  # behind
        ([(6, 10, 0, "wait"), (None, 10, 0, "wait")], [1]),  # never began
        ([(5, 10, 0, "wait"), (5, 10, 0, "read"), (5, 11, 0, "wait")], [1]),  # elsewhere
        ([(5, 10, 0, "wait"), (5, 10, 0, "wait")], [0, 1]),  # undecided
    ],
)
def test_the_rank_at_fault_is_silent_or_behind_or_elsewhere(
    ranks: list[tuple[int | None, float, float, str]], culprits: list[int]
) -> None:
    assert at_fault(seen(*ranks), now=100.0, timeout=10.0) == culprits


def test_a_rank_that_left_is_never_at_fault() -> None:
    entries = seen((5, 50, 50, "a"), (5, 1, 0, "b"))
    entries[0] = Seen(Beat(step=5, ended=True), entries[0].moved, entries[0].alive)
    assert at_fault(entries, now=100.0, timeout=10.0) == []
