"""The journal of a run: events in any order fold into a record that keeps the rules of a run's life."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps.runs import journal
from isoflop.sweeps.runs.attempts import CAUSES
from isoflop.sweeps.runs.directory import RunDirectory
from isoflop.sweeps.runs.journal import (
    ENDS_AS,
    JOURNAL,
    OLD_LINES,
    OLD_OPEN,
    VIEW,
    Cancelled,
    Event,
    Failed,
    Planned,
    Queued,
    Reset,
    RunRecord,
    Scoring,
    Started,
    State,
    Stopped,
    append,
    fold,
    read_record,
)
from small_runs import Patch

NEW = RunRecord(State("planned"))


def random_event(rng: random.Random, at: float) -> Event:
    """Return a random event, whose attempt number may be inconsistent."""
    number, cause = rng.randint(1, 6), rng.choice(CAUSES)
    kinds: list[Event] = [
        Planned(at=at), Queued(at=at), Failed(at=at, reason="enough"), Cancelled(at=at, reason="by ann"),
        Reset(at=at, by="ann"), Scoring(at=at),
        *[Started(at=at, attempt=number, host="node1", job_id="7", steps=100, flops_per_step=2.0)] * 4,
        *[Stopped(at=at, attempt=number, state=ENDS_AS.get(cause, "failed"), cause=cause, ended=at, last_step=5)] * 4,
    ]  # fmt: skip
    return rng.choice(kinds)


def test_random_events_keep_every_rule_of_a_runs_life() -> None:
    rng, ended = random.Random(0), 0
    for _ in range(3000):
        events = [random_event(rng, float(at)) for at in range(1, rng.randint(2, 30))]
        record = NEW
        for event in events:
            before, record = record, fold([event], record)
            numbers = [attempt.attempt for attempt in record.attempts]
            assert numbers == sorted(set(numbers)), "each attempt ends once"
            assert record.attempts[: len(before.attempts)] == before.attempts or isinstance(event, Stopped)
            assert (record.open is None) or record.open.attempt > max(numbers, default=0)
            assert (record.state.state == "running") == (record.open is not None)
            assert record.state.attempt >= before.state.attempt
            if before.state.state == "done":
                assert record.state.state in ("done", "planned"), "only the doctor plans a finished run again"
                assert record.state.state == "done" or isinstance(event, Planned)
            if before.open is not None and not isinstance(event, Stopped):
                assert record.open == before.open, "only its end ends an attempt"
            assert (record.budget > before.budget) == (isinstance(event, Reset) and before.open is None)
            assert fold([event], record).attempts == record.attempts, "an end that is written twice counts once"
        assert fold(events, NEW) == record, "one fold equals many"
        ended += len(record.attempts)
    assert ended > 1000


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: Patch) -> None:
    append(tmp_path, Planned(at=1.0))
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"event":"star')  # torn by a kill
    assert append(tmp_path, Started(at=2.0, attempt=1)).open is not None
    before = (tmp_path / JOURNAL).read_bytes()
    assert before.count(b"\n") == 2

    def write_half(descriptor: int, data: bytes, offset: int) -> int:
        return os.pwritev(descriptor, [data[: len(data) // 2]], offset)

    monkeypatch.setattr(os, "pwrite", write_half)  # a full disk
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        append(tmp_path, Stopped(at=3.0, attempt=1, state="done", cause="done", ended=3.0))
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_a_view_that_cannot_be_written_misleads_no_reader(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    append(tmp_path, Planned(at=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_json", full)
        append(tmp_path, Queued(at=2.0))
    assert RunDirectory(tmp_path).state() == read_record(tmp_path).state == State("queued", since=2.0)
    append(tmp_path, Started(at=3.0, attempt=1))
    view = (tmp_path / VIEW).read_bytes()
    append(tmp_path, Stopped(at=4.0, attempt=1, state="failed", cause="killed", ended=4.0))
    (tmp_path / VIEW).write_bytes(view)  # a kill between the event and its view leaves the view of the event before
    os.utime(tmp_path / VIEW, (0, 0))
    assert RunDirectory(tmp_path).state().state == "failed"
    append(tmp_path, Scoring(at=5.0))
    assert json.loads((tmp_path / VIEW).read_text()) == asdict(read_record(tmp_path).state)


def test_lines_that_are_torn_damaged_or_there_twice_are_left_out(tmp_path: Path) -> None:
    for number in (1, 2):
        append(tmp_path, Started(at=number, attempt=number))
        append(tmp_path, Stopped(at=number, attempt=number, state="failed", cause="killed", ended=number))
    record, path = read_record(tmp_path), tmp_path / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    damage = b'\xff\xfe\n[1]\n{}\n3\n{"event":"vanished","at":1.0}\n{"event":"started","at":1.0,"attempt":-1}\n'
    path.write_bytes(damage + b"".join(lines + lines[:2]) + lines[0][:9])
    assert read_record(tmp_path).attempts == record.attempts
    assert [journal.read_event(line) is None for line in path.read_bytes().splitlines()].count(True) == 7


OLD = {
    "attempt": 1, "began": 10.0, "ended": 20.0, "seconds": 10.0, "host": "node1", "job_id": "7_0", "cause": "killed",
    "reason": "gone", "first_step": 0, "last_step": 8, "saved_step": 5, "flops": 16.0, "flops_wasted": 6.0,
}  # fmt: skip
OLD_START = {
    "attempt": 2, "began": 30.0, "host": "node2", "job_id": "8", "steps": 100, "begins": 0, "first_step": 5,
    "metrics_bytes": 3, "flops_per_step": 2.0, "gpus": 1.0, "share": 0.5, "machine": "far",
}  # fmt: skip


@pytest.mark.parametrize("start", [json.dumps(OLD_START), "", None])
def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, start: str | None) -> None:
    lines = [json.dumps(OLD), json.dumps({"event": "retry", "by": "ann", "at": 25.0}), '{"attempt": 9, "beg']
    (tmp_path / OLD_LINES).write_text("\n".join(lines))
    if start is not None:  # after a power cut only state.json is left of the attempt
        (tmp_path / OLD_OPEN).write_text(start)
    state = State("running", 2, "node2", "8", 30.0)
    (tmp_path / VIEW).write_text(json.dumps(asdict(state)))
    before = read_record(tmp_path)
    assert before.open is not None
    assert (before.state, before.open.attempt, before.open.host, before.open.at) == (state, 2, "node2", 30.0)
    assert (before.budget, before.recent, len(before.attempts)) == (1, [], 1)
    stop = Stopped(at=41.0, attempt=2, state="failed", cause="lost", ended=40.0, last_step=9, saved_step=5)
    assert append(tmp_path, stop).state.state == "failed"
    (tmp_path / VIEW).unlink()
    (tmp_path / OLD_OPEN).unlink(missing_ok=True)
    record = read_record(tmp_path)
    assert [(attempt.attempt, attempt.cause, attempt.budget) for attempt in record.attempts] == [
        (1, "killed", 0),
        (2, "lost", 1),
    ]
    assert record.attempts[1].flops == (8.0 if start else 0.0)
    assert record.next_attempt == 3
