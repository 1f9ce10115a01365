"""The queue of a launch: each unit goes to one worker, a branch waits for its trunk, and the dead are noticed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps.packing import Unit
from isoflop.sweeps.queue import Queue
from isoflop.sweeps.runs import SweepDirectory

STEP = 40


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    return SweepDirectory(tmp_path / "sweep")


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Runs a function in a process of its own; whatever a test comes to, none of them is left."""
    started: list[int] = []

    def fork(function: Callable[[], object]) -> int:
        if (pid := os.fork()) == 0:
            try:
                function()
            finally:
                os._exit(0)
        started.append(pid)
        return pid

    yield fork
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def alone(*names: str) -> list[Unit]:
    return [Unit("alone", (name,)) for name in names]


def queue(sweep: SweepDirectory, units: Sequence[Unit], **parents: str) -> Queue:
    """A queue where each named branch begins at STEP of its trunk."""
    return Queue.create(sweep, sweep.path / "queue", units, {name: (trunk, STEP) for name, trunk in parents.items()})


def again(queue: Queue, sweep: SweepDirectory) -> Queue:
    """As another process sees it."""
    return Queue.open(sweep, queue.folder)


def claims_and_sleeps(queue: Queue, sweep: SweepDirectory, place: int) -> None:
    mine = again(queue, sweep)
    assert mine.claim(place) is not None
    time.sleep(60)
    mine.left()  # it is still there: a queue that nobody holds on to has let go of its claims


def publish(sweep: SweepDirectory, name: str, step: int) -> None:
    """What a run leaves that has saved at a step."""
    folder = sweep.run(name).path / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_units_are_handed_out_in_order_and_once(sweep: SweepDirectory) -> None:
    units = [Unit("ensemble", ("a", "b")), *alone("c", "d")]
    first = queue(sweep, units)
    second = again(first, sweep)
    assert (first.claim(0), second.claim(1)) == (units[0], units[1])
    assert first.left() == second.left() == [units[2]]
    assert second.running() == {units[0]: 0, units[1]: 1}
    first.end(units[0])
    assert second.running() == {units[1]: 1}
    assert first.claim(0) == units[2]
    assert (first.claim(0), second.claim(1), second.left()) == (None, None, [])
    second.end(units[1])
    first.end(units[2])
    assert (first.running(), first.lost()) == ({}, [])


def test_many_processes_never_get_the_same_unit(
    sweep: SweepDirectory, forked: Callable[[Callable[[], object]], int], tmp_path: Path
) -> None:
    units = alone(*(f"run{number}" for number in range(60)))
    made = queue(sweep, units)

    def work(place: int) -> None:
        mine, got = again(made, sweep), []
        while (unit := mine.claim(place)) is not None:
            got.append(unit.name)
            mine.end(unit)
        (tmp_path / f"{place}.json").write_text(json.dumps(got))

    for pid in [forked(lambda place=place: work(place)) for place in range(4)]:  # type: ignore[misc]
        os.waitpid(pid, 0)
    claimed = [json.loads((tmp_path / f"{place}.json").read_text()) for place in range(4)]
    assert sorted(name for got in claimed for name in got) == sorted(unit.name for unit in units)
    order = [unit.name for unit in units]
    assert all(got == sorted(got, key=order.index) for got in claimed)


def test_a_unit_whose_worker_was_killed_is_lost_and_is_not_tried_again(
    sweep: SweepDirectory, forked: Callable[[Callable[[], object]], int]
) -> None:
    units = alone("a", "b")
    launcher = queue(sweep, units)
    pid = forked(lambda: claims_and_sleeps(launcher, sweep, 3))
    until(lambda: launcher.running() == {units[0]: 3})
    assert launcher.lost() == []
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (launcher.running(), launcher.lost()) == ({}, [units[0]])
    other = again(launcher, sweep)
    assert other.claim(0) == units[1]
    launcher.end(units[0])
    assert launcher.lost() == []
    assert other.claim(0) is None


def test_a_branch_starts_once_its_trunk_has_saved_and_while_that_still_trains(sweep: SweepDirectory) -> None:
    units = [*alone("trunk"), Unit("ensemble", ("one", "two")), *alone("free")]
    workers = queue(sweep, units, one="trunk", two="trunk")
    other = again(workers, sweep)
    assert workers.claim(0) == units[0]
    assert other.claim(1) == units[2]  # what is ready is not held up
    other.end(units[2])
    publish(sweep, "trunk", STEP - 1)
    assert other.claim(1) is None
    assert other.left() == [units[1]]
    publish(sweep, "trunk", STEP)
    assert other.claim(1) == units[1]
    assert other.running() == {units[0]: 0, units[1]: 1}


def test_a_branch_with_a_checkpoint_of_its_own_waits_for_nobody(sweep: SweepDirectory) -> None:
    units = alone("trunk", "branch")
    workers = queue(sweep, units, branch="trunk")
    workers.claim(0)
    publish(sweep, "branch", STEP + 5)
    assert workers.claim(1) == units[1]


def test_a_branch_whose_trunk_is_not_in_this_launch_is_ready(sweep: SweepDirectory) -> None:
    workers = queue(sweep, alone("branch"), branch="trunk")
    assert workers.claim(0) == workers.units[0]


def test_branches_of_a_trunk_that_ended_or_died_without_a_checkpoint_are_released_to_say_so(
    sweep: SweepDirectory, forked: Callable[[Callable[[], object]], int]
) -> None:
    units = alone("died", "ended", "one", "two")
    launcher = queue(sweep, units, one="died", two="ended")
    pid = forked(lambda: claims_and_sleeps(launcher, sweep, 0))
    until(lambda: launcher.running() == {units[0]: 0})
    workers = again(launcher, sweep)
    assert workers.claim(1) == units[1]
    assert workers.claim(2) is None
    workers.end(units[1])
    assert workers.claim(2) == units[3]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert workers.claim(1) is None, "the launcher has not yet said what became of it"
    launcher.end(units[0])
    assert workers.claim(1) == units[2]


def test_units_that_wait_for_each_other_hang_nobody(sweep: SweepDirectory) -> None:
    """No plan makes such; a folder that somebody edited may."""
    workers = queue(sweep, [Unit("ensemble", ("a", "x")), *alone("b")], a="b", b="a", x="a")
    assert workers.claim(0) == workers.units[0]
    assert workers.claim(1) is None
    workers.end(workers.units[0])
    assert workers.claim(1) == workers.units[1]
