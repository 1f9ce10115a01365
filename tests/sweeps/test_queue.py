"""The queue of a launch: each unit goes to one worker, a branch waits for its trunk, and the dead are noticed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import planned_run
from isoflop.sweeps.execute import worker
from isoflop.sweeps.runs import attempts
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.queue import JOURNAL, Queue, Unit
from isoflop.train.config import DataConfig, ModelConfig, RunConfig, run_id
from isoflop.train.files import write_json
from small_runs import end_unit, is_over, until

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
    return [Unit((name,)) for name in names]


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


def test_many_processes_never_get_the_same_unit(
    sweep: SweepDirectory, forked: Callable[[Callable[[], object]], int], tmp_path: Path
) -> None:
    units = alone(*(f"run{number}" for number in range(60)))
    made = queue(sweep, units)

    def work(place: int) -> None:
        mine, got = again(made, sweep), []
        while (unit := mine.claim(place)) is not None:
            got.append(unit.name)
            end_unit(mine, unit)
        (tmp_path / f"{place}.json").write_text(json.dumps(got))

    for pid in [forked(lambda place=place: work(place)) for place in range(4)]:  # type: ignore[misc]
        os.waitpid(pid, 0)
    claimed = [json.loads((tmp_path / f"{place}.json").read_text()) for place in range(4)]
    assert sorted(name for got in claimed for name in got) == sorted(unit.name for unit in units)
    order = [unit.name for unit in units]
    assert all(got == sorted(got, key=order.index) for got in claimed)


def test_a_unit_whose_worker_was_killed_is_lost_until_it_is_settled(
    sweep: SweepDirectory, forked: Callable[[Callable[[], object]], int]
) -> None:
    units = alone("a", "b")
    launcher = queue(sweep, units)
    pid = forked(lambda: claims_and_sleeps(launcher, sweep, 3))
    until(lambda: launcher.running() == {units[0]: 3})
    assert launcher.lost() == {}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (launcher.running(), list(launcher.lost())) == ({}, [units[0]])
    other = again(launcher, sweep)
    assert other.claim(0) == units[1]
    end_unit(launcher, units[0])
    assert launcher.lost() == {}
    assert other.claim(0) is None


def test_a_branch_starts_once_its_trunk_has_saved(sweep: SweepDirectory) -> None:
    units = [*alone("trunk"), Unit(("one", "two")), *alone("free")]
    workers = queue(sweep, units, one="trunk", two="trunk")
    other = again(workers, sweep)
    assert not other.was_claimed()
    assert workers.claim(0) == units[0]
    assert other.was_claimed()
    assert other.ready() == [units[2]]
    assert other.claim(1) == units[2]  # what is ready is not held up
    end_unit(other, units[2])
    publish(sweep, "trunk", STEP - 1)
    assert other.claim(1) is None
    assert other.left() == [units[1]]
    publish(sweep, "trunk", STEP)
    assert other.claim(1) == units[1]
    assert other.running() == {units[0]: 0, units[1]: 1}


# Giving back


def test_a_line_torn_at_any_byte_costs_nothing_that_came_before(sweep: SweepDirectory) -> None:
    units = alone("a", "b")
    made = queue(sweep, units)
    made.claim(0)
    end_unit(made, units[0])
    before = (made.folder / JOURNAL).read_bytes()
    made.claim(0)
    line = (made.folder / JOURNAL).read_bytes()[len(before) :]
    for length in range(0, len(line), 7):
        (made.folder / JOURNAL).write_bytes(before + line[:length])
        reader = again(made, sweep)
        assert (reader.left(), reader.lost()) == ([units[1]], {})
        assert reader.claim(1) == units[1]
        assert again(made, sweep).running() == {units[1]: 1}
        reader.close()


# Killed between any two file operations: before each that changes one, as those that look leave what was there

POLICY = Policy(retries=5, backoff_seconds=0.0)


def planned(path: Path) -> Queue:
    """A sweep of two runs, each a unit of its own, and its queue."""
    sweep = SweepDirectory(path)
    configs = [RunConfig(model=ModelConfig(vocab_size=256), data=DataConfig(), tokens=64, seed=seed) for seed in (1, 2)]
    for config in configs:
        run = sweep.run(run_id(config))
        run.freeze(config)
        run.set_state("planned")
    names = [run_id(config) for config in configs]
    write_json(path / "plan.json", {"runs": [planned_run(name) for name in names]})
    return Queue.create(sweep, path / "jobs" / "queue", alone(*names), {})


def changes(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a file operation is about to change what is on the disk; the end of a process takes its locks away."""
    path = arguments[0] if arguments else None
    if event == "open":
        _, mode, flags = arguments
        if isinstance(path, int):
            return set(mode or "w") & set("wax+") != set()  # what was opened before is about to be written
        return bool(flags & (os.O_TRUNC | os.O_APPEND)) or (bool(flags & os.O_CREAT) and not os.path.lexists(path))
    if event == "os.remove":
        return os.path.lexists(path)
    if event == "os.mkdir":
        return not os.path.lexists(path)
    return event in ("os.rename", "os.link", "os.truncate", "os.utime")


def work(made: Queue, kill_at: int | None = None) -> int:
    """Works through a queue; killed before its n-th change of a file in the sweep. Returns how many there were."""
    operations = itertools.count()
    folder = str(made.sweep.path)

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if not event.startswith(("open", "os.")) or not arguments:
            return
        if not (isinstance(arguments[0], int) or str(arguments[0]).startswith(folder)) or not changes(event, arguments):
            return
        if next(operations) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    worker.work(str(made.sweep.path), str(made.folder), POLICY)
    return next(operations)


def trained(config: RunConfig, directory: Path, **arguments: Any) -> None:
    """In the place of a training: the first attempt finds the disk full, and a later one ends."""
    if '"attempt": 1,' in (directory / attempts.UNDER_WAY).read_text():
        raise OSError(28, "No space left on device")
    write_json(directory / "summary.json", {"val_loss": 1.0})


def check_kills(tmp_path: Path, forked: Callable[[Callable[[], object]], int], points: Iterator[int]) -> None:
    for point in points:
        made = planned(tmp_path / str(point))
        os.waitpid(forked(lambda: work(made, point)), 0)  # noqa: B023
        os.waitpid(forked(lambda: work(made)), 0)  # noqa: B023
        assert is_over(made), point
        for run in made.sweep.runs():
            assert run.state().state == "done", (point, run.state())
            tries = attempts.read(run)
            assert [attempt.attempt for attempt in tries] == list(range(1, len(tries) + 1)), point
            assert [attempt.cause for attempt in tries].index("done") == len(tries) - 1 <= 2, point


@pytest.fixture
def operations(tmp_path: Path, forked: Callable[[Callable[[], object]], int], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many changes of files it takes to go through `planned`."""
    monkeypatch.setattr("isoflop.train.loop.train", trained)
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.005)  # a worker looks once more before it takes what a dead one held
    made, answer = planned(tmp_path / "whole"), tmp_path / "operations"
    os.waitpid(forked(lambda: answer.write_text(str(work(made)))), 0)
    return int(answer.read_text())


def test_a_worker_killed_at_some_file_operations_loses_no_unit(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int], operations: int
) -> None:
    points = random.Random(0).sample(range(operations), 5)
    check_kills(tmp_path, forked, iter(points))


@pytest.mark.parametrize(
    "every", [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_a_worker_killed_at_any_file_operation_loses_no_unit(
    tmp_path: Path, forked: Callable[[Callable[[], object]], int], operations: int, every: int
) -> None:
    check_kills(tmp_path, forked, iter(range(0, operations, every)))
