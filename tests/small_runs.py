"""Small runs on a CPU, planned in a folder, for tests of training and of workers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps.runs import lease
from isoflop.sweeps.runs.directory import RunDirectory, now_on
from isoflop.sweeps.runs.journal import ENDS_AS, Adopted, Planned, Started, State
from isoflop.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
    run_id,
)
from isoflop.train.files import read_json_lines

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]  # types of fixtures, with short names
# The sweep of the fixture `smoke`: no tracker, no benchmarks, a stated rate instead of a trial, few steps, one worker,
# and no preflight, which test_preflight.py tests.
SMOKE = ("+grid=smoke", "cluster=local", "tracker=none", "evaluate=none", "cluster.flops_per_second=1e11",
         "tuning.min_batch=4", "tuning.min_steps=16", "cluster.jobs=1", "cluster.threads_per_job=1",
         "preflight=false")  # fmt: skip


def forty_steps(data: DataConfig) -> RunConfig:
    """Return the config of a run of 40 steps on a corpus of the fixture `small_corpus`."""
    return RunConfig(
        model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256), data=data,
        optimizer=OptimizerConfig(batch_size=4), schedule=ScheduleConfig(warmup_tokens=128),
        parallel=ParallelConfig(device="cpu"), tracker=TrackerConfig(kind="none"), tokens=40 * 64, log_every=5,
        validations=2,
    )  # fmt: skip


CLOCK = ("seconds", "tokens_per_s", "mfu", "matmul_peak")


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in CLOCK}


def logged_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the values of each logged step. A step that was logged twice must have the same values both times."""
    lines: dict[int, dict[str, Any]] = {}
    for line in map(without_clock, read_json_lines(folder / "metrics.jsonl")):
        assert lines.setdefault(line["step"], line) == line
    return lines


def assert_same_run(folder: Path, reference: Path) -> None:
    """Check that two directories hold the same run, trained in two ways: equal bits, except for clocks."""
    assert logged_steps(folder) == logged_steps(reference)  # float equality of every number of every line
    assert_same_end(folder, reference)


def assert_same_end(folder: Path, reference: Path) -> None:
    """Check that the summaries and final checkpoints of two runs have equal bits, except for clocks."""
    summaries = [without_clock(json.loads((path / "summary.json").read_text())) for path in (folder, reference)]
    assert summaries[0] == summaries[1]
    checkpoint, reference_checkpoint = (path / summaries[0]["checkpoint"] for path in (folder, reference))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoint / name).read_bytes() == (reference_checkpoint / name).read_bytes()
    # The random-number state and the smoothed losses too.
    states = [
        without_clock(json.loads((path / "trainer.json").read_text())) for path in (checkpoint, reference_checkpoint)
    ]
    assert states[0] == states[1]


def stop_after(steps: int) -> Callable[[], bool]:
    """Return a `should_stop` that is true from call number `steps` on."""
    calls = iter(range(1, 1 << 30))
    return lambda: next(calls) >= steps


def planned(folder: Path, config: RunConfig) -> RunDirectory:
    """Create the directory of a planned run in a sweep's folder."""
    run = RunDirectory(folder / "runs" / run_id(config))
    run.freeze(config)
    run.write_event(Planned)
    return run


def set_state(run: RunDirectory, state: str, **changes: Any) -> State:
    """Write an event that sets a run's state; fields not in `changes` keep their value, except the reason."""
    run.path.mkdir(parents=True, exist_ok=True)
    values = asdict(run.record().state) | {"reason": None, "since": now_on(run.path)} | changes
    return run.write_event(Adopted, state=State(**{**values, "state": state})).state


def end(run: RunDirectory, cause: str, host: str | None = "node1", job: str = "7", reason: str = "a test") -> None:
    """Write a whole attempt on a run, from its start to its end."""
    run.write_event(Started, attempt=run.record().next_attempt, host=host, job_id=job, machine="far")
    lease.conclude(run, lease.Ending(ENDS_AS.get(cause, "failed"), None if cause == "done" else reason, cause))


def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until a condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder, without lock files."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((".lock", ".doctor")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the signal handlers after a block that replaces them, as a worker does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
