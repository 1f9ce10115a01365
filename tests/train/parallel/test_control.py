"""Ranks find each other, fail together, and agree on what to do next."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Ended, fork_processes
from isoflop.train.config import ParallelConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.job.control import Agreement, check_same_config, run_on_ranks
from isoflop.train.job.environment import Ranks, detect
from isoflop.train.job.failure import Cause, Failure, RankError
from isoflop.train.job.fork import run_ranks
from isoflop.train.job.rendezvous import MARGIN_SECONDS, meet
from isoflop.train.parallel.mesh import Mesh, build_mesh
from meshes import CPU


def caught(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the caller checks which one
        function()
    return raised.value


# Errors and flags.


def test_an_error_on_one_rank_is_raised_on_every_rank_and_keeps_its_kind() -> None:
    def rank() -> list[tuple[str, str, Any]]:
        mesh = build_mesh(3, 1, CPU)

        def fail(with_error: Exception, failing_ranks: tuple[int, ...] = (1,)) -> tuple[str, str, Any]:
            def function() -> None:
                if mesh.rank in failing_ranks:
                    raise with_error

            error = caught(lambda: run_on_ranks(mesh, function))
            return (
                type(error).__name__,
                str(error),
                error.failure.cause if isinstance(error, RankError) else getattr(error, "errno", None),
            )

        return [
            fail(UserError("model.heads is 3; it must be 4")),
            fail(OSError(errno.ENOSPC, "No space left on device", "/full/file")),
            fail(OSError("a disk without a number")),
            fail(torch.OutOfMemoryError("CUDA out of memory")),
            fail(ValueError("first"), failing_ranks=(1, 2)),
            fail(UserError("all say the same"), failing_ranks=(0, 1, 2)),
            fail(RankError(Failure(Cause.KILLED, "rank 9 on node3 died at step 5"))),
        ]

    expected = [
        ("UserError", "rank 1: model.heads is 3; it must be 4", None),
        ("OSError", "[Errno 28] rank 1: No space left on device: '/full/file'", errno.ENOSPC),
        ("OSError", "rank 1: a disk without a number", None),
        ("RankError", "rank 1: OutOfMemoryError: CUDA out of memory", "memory"),
        ("RankError", "rank 1: ValueError: first (and 1 more of 3 ranks)", "error"),
        ("UserError", "all say the same", None),
        ("RankError", "rank 1: rank 9 on node3 died at step 5", "killed"),
    ]
    assert run_ranks(3, rank) == [expected] * 3


def test_what_rank_0_finds_is_given_to_all_and_so_is_its_error() -> None:
    def rank() -> tuple[Any, list[int], str]:
        mesh, called = build_mesh(3, 1, CPU), list[int]()

        def find() -> dict[str, int]:
            called.append(mesh.rank)
            return {"step": 100 + mesh.rank}

        def fail() -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", f"shard-{mesh.rank}")

        assert run_on_ranks(mesh, lambda: mesh.rank * 10) == mesh.rank * 10
        result = run_on_ranks(mesh, find, only_first=True)
        error = caught(lambda: run_on_ranks(mesh, fail, only_first=True))
        assert isinstance(error, FileNotFoundError)
        return result, called, str(error)

    error_text = "[Errno 2] rank 0: No such file or directory: 'shard-0'"
    assert run_ranks(3, rank) == [({"step": 100}, [0] if r == 0 else [], error_text) for r in range(3)]


def test_in_one_process_an_exception_passes_unchanged() -> None:
    error = KeyError("x")

    def fail() -> None:
        raise error

    assert run_on_ranks(Mesh(), lambda: 5) == 5
    assert caught(lambda: run_on_ranks(Mesh(), fail)) is error
    check_same_config(Mesh(), RunConfig())


def test_flags_of_any_rank_reach_all_at_the_same_step() -> None:
    stop, save, neither, both = (True, False), (False, True), (False, False), (True, True)
    raised = {(1, 2): stop, (3, 0): save, (0, 2): save, (2, 5): stop}  # (rank, step)

    def rank() -> list[tuple[bool, bool]]:
        mesh = build_mesh(4, 1, CPU)
        agreement = Agreement(mesh)
        agreed = []
        for step in range(6):
            time.sleep(0.01 * ((mesh.rank + step) % 4))  # ranks arrive in varying order
            agreed.append(agreement(*raised.get((mesh.rank, step), neither)))
        return [*agreed, agreement.close()]

    assert run_ranks(4, rank) == [[neither, save, neither, both, neither, neither, stop]] * 4


def test_a_step_does_not_wait_for_a_rank_that_is_late_to_raise_its_flags() -> None:
    def rank() -> bool:
        mesh = build_mesh(2, 1, CPU)
        agreement, store = Agreement(mesh), dist.distributed_c10d._get_default_store()
        if mesh.rank == 1:
            store.wait(["rank 0 went on"])  # if rank 0 waited for this rank, neither would continue
        agreement(stop=True, save=False)
        if mesh.rank == 0:
            store.set("rank 0 went on", "")
        return agreement(stop=False, save=False) == (True, False) and agreement.close() == (False, False)

    assert run_ranks(2, rank, timeout=30.0) == [True, True]


def test_one_process_agrees_with_itself_at_once() -> None:
    agreement = Agreement(Mesh())
    assert agreement(stop=True, save=True) == (True, True)
    assert agreement(stop=False, save=False) == (False, False)
    assert agreement.close() == (False, False)


# Finding each other.


def joined(folder: Path, count: int, function: Callable[[Mesh, int], Any], **settings: Any) -> list[list[Any]]:
    """Return the messages of each of `count` processes that join each other, on the nodes settings['hosts']."""
    hosts = settings.pop("hosts", ["node"] * count)
    late = settings.pop("late", None)
    shape = {"dp": count, "timeout_seconds": 20.0} | settings

    def process(rank: int, report: Callable[[str], None]) -> None:
        if rank == late:
            time.sleep(0.5)
        ranks = Ranks(rank, count, rank, count, hosts[rank], "local", "7")
        try:
            with meet(ranks, folder, ParallelConfig(**shape), CPU) as (mesh, _):
                report(json.dumps(function(mesh, rank)))
        except UserError as error:
            report(json.dumps(str(error)))

    return [
        [json.loads(message) for message in messages_of(ended)]
        for ended in fork_processes(count, process, range(count), 60.0)
    ]


def messages_of(ended: Ended) -> list[str]:
    assert ended.code == 0, ended
    return ended.said


def add_up(mesh: Mesh, rank: int) -> list[Any]:
    number = torch.tensor([10.0**rank])
    dist.all_reduce(number, group=mesh.world)
    return [mesh.dp_rank, mesh.tp_rank, mesh.name(rank), number.item()]


def test_ranks_join_over_the_run_directory_and_leave_nothing_there(tmp_path: Path) -> None:
    def limits(mesh: Mesh, rank: int) -> list[Any]:
        groups = (mesh.dp_group, mesh.tp_group, mesh.world, mesh.control)
        times = {g._get_backend(CPU).options._timeout.total_seconds() for g in groups if g is not None}
        return [*add_up(mesh, rank), *times]

    hosts, patience = ["a", "a", "b", "b"], 20.0 + MARGIN_SECONDS  # groups give up after the watchdog
    assert joined(tmp_path, 4, limits, dp=2, tp=2, hosts=hosts) == [
        [[0, 0, "rank 0 on a", 1111.0, patience]],
        [[0, 1, "rank 1 on a", 1111.0, patience]],
        [[1, 0, "rank 2 on b", 1111.0, patience]],
        [[1, 1, "rank 3 on b", 1111.0, patience]],
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_address_of_an_earlier_attempt_is_never_taken(tmp_path: Path) -> None:
    stranger = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stranger.set("token", "another")
    for attempt, port in {"7": stranger.port, "6": 1}.items():
        stale = {"host": "127.0.0.1", "port": port, "token": "old"}
        (tmp_path / f".rendezvous-{attempt}.json").write_text(json.dumps(stale))
    sums = joined(tmp_path, 2, lambda mesh, rank: add_up(mesh, rank)[-1], late=0)
    assert sums == [[11.0], [11.0]]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_waits_in_vain_says_for_what(tmp_path: Path) -> None:
    lost = Ranks(1, 2, 0, 1, "node07", "slurm", "71-0")
    with pytest.raises(UserError) as error, meet(lost, tmp_path, ParallelConfig(dp=2, timeout_seconds=0.3), CPU):
        pass
    assert "rank 1 on node07" in str(error.value)
    assert "parallel.timeout_seconds 0.3 s" in str(error.value)
    (tmp_path / ".rendezvous-71-0.json").write_text('{"host": "127.0.0.1", "port": 1, "token": "old"}')
    with (
        pytest.raises(UserError, match=r"127\.0\.0\.1:1"),
        meet(lost, tmp_path, ParallelConfig(dp=2, timeout_seconds=0.3), CPU),
    ):
        pass


def test_a_tensor_parallel_group_over_two_nodes_is_refused_on_every_rank(tmp_path: Path) -> None:
    messages = joined(tmp_path, 4, add_up, dp=2, tp=2, hosts=["a", "b", "a", "b"])
    assert all(
        len(message) == 1 and "ranks 0 to 1 of one tensor-parallel group are on a, b" in message[0]
        for message in messages
    )


def test_torchrun_gives_the_address_and_one_rank_of_it_has_groups(tmp_path: Path) -> None:
    def process(rank: int, report: Callable[[str], None]) -> None:
        with open(tmp_path / "port", encoding="utf-8") as file:
            port = file.read()
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT=port)
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="x", TORCHELASTIC_USE_AGENT_STORE="True")
        for _ in range(2):  # torchrun's store outlives a run
            with meet(detect(), tmp_path / "missing", ParallelConfig(), CPU) as (mesh, _):
                groups = (mesh.dp_group, mesh.tp_group, mesh.world, mesh.control)
                assert all(dist.get_world_size(group) == 1 for group in groups if group is not None)
                report(f"{sum(group is not None for group in groups)} {run_on_ranks(mesh, lambda: 5)}")
            assert not dist.is_initialized()

    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun keeps one
    (tmp_path / "port").write_text(str(agent.port))
    (ended,) = fork_processes(1, process, [0])
    assert messages_of(ended) == ["4 5", "4 5"]


def test_one_process_without_a_launcher_joins_nothing(tmp_path: Path) -> None:
    with meet(Ranks(), tmp_path / "missing", ParallelConfig(), CPU) as (mesh, store):
        assert mesh == Mesh()
        assert store is None
        assert not dist.is_initialized()
