"""A sweep's status for people: one table, what needs attention first, and the same live.

Special here:
- where the runs are more than fit, those that wait and those that are done are a line of counts;
- without a terminal there is no live display: `--watch` then prints JSON, a line a look, or the table again and again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..runs.directory import OPEN, SweepDirectory
from ..terminal import console, describe, short
from .status import Row, sweep_status

PERIOD_SECONDS = 2.0  # between two looks
ROWS = 60  # that a file or a pipe gets
# In the order in which people look at them.
ORDER = ("running", "failed", "diverged", "preempted", "cancelled", "queued", "planned", "done")
FOLDED = ("done", "planned", "queued")  # counted instead of shown, in this order, where there are more than fit
STYLES = {"failed": "red", "diverged": "red", "running": "cyan", "preempted": "yellow", "done": "green"}
COLUMNS = ("run", "state", "N", "D", "step", "loss", "tok/s", "MFU", "ETA", "try", "where", "note")


def print_status(status: dict[str, Any], everything: bool = False) -> None:
    """The status as a table; of a large sweep what needs attention, unless `everything`."""
    out = console()
    out.print(render(status, None if everything else _room(out)))


def watch(sweep: SweepDirectory, as_json: bool = False, everything: bool = False) -> None:
    """Looks every two seconds, until every run has ended for good or Ctrl-C is pressed."""
    out, status = console(), sweep_status(sweep)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        live = None
        if out.is_terminal and not as_json:
            live = stack.enter_context(Live(console=out, auto_refresh=False, vertical_overflow="crop"))
        while True:
            if as_json:
                print_json(status)
            elif live is not None:
                live.update(render(status, None if everything else _room(out)), refresh=True)
            else:
                print_status(status, everything)
            if not any(row["state"] in OPEN or row["again"] for row in status["runs"]):
                return
            time.sleep(PERIOD_SECONDS)
            status = sweep_status(sweep, status)


def print_json(status: dict[str, Any]) -> None:
    """The status on one line; a thousand runs with line breaks would take Python's slow encoder a second."""
    print(json.dumps(status, allow_nan=False), flush=True)


def _room(out: Console) -> int:
    """Lines for runs and their reasons."""
    return max(10, out.height - 8) if out.is_terminal else ROWS


def render(status: dict[str, Any], room: int | None) -> RenderableType:
    """What a status looks like in so many lines of runs; None: as many as there are."""
    shown, hidden = fold(status["runs"], room)
    shown.sort(key=lambda row: ORDER.index(row["state"]))
    counts = ", ".join(f"{count} {state}" for state, count in status["states"].items())
    table = Table(title=f"{status['sweep']}: {counts}", title_justify="left", box=box.SIMPLE)
    cells = [_cells(row) for row in shown]
    for number, column in enumerate(COLUMNS):
        words = column in ("where", "note")  # what gives way on a narrow terminal
        width = None if words else max([len(column), *(len(row[number]) for row in cells)])
        left = words or column in ("run", "state")
        table.add_column(column, justify="left" if left else "right", no_wrap=True, min_width=width)
    for row, of_run in zip(shown, cells, strict=True):
        table.add_row(*map(Text, of_run), style=STYLES.get(row["state"]))  # text: a name may have [brackets]
    lines = [_why(state, reason, runs) for (state, reason), runs in _reasons(shown).items()]
    if hidden:
        lines.append(f"not shown: {', '.join(f'{n} {state}' for state, n in hidden.items())}; --all shows every run")
    lines += _totals(status)
    return Group(table, *(Text(line, overflow="fold") for line in lines))


def fold(rows: list[Row], room: int | None) -> tuple[list[Row], dict[str, int]]:
    """The rows that fit in so many lines, and how many of each state do not; so does every reason.

    Where even those that neither wait nor are done are too many, half the room is for what went wrong.
    """
    left = list(rows)
    for state in FOLDED:
        if room is not None and _lines(left) > room:
            left = [row for row in left if row["state"] != state]
    if room is not None and _lines(left) > room:
        wrong = [row for row in left if row["state"] in ("failed", "diverged")]
        right = [row for row in left if row not in wrong]
        half = max(room // 2, room - _lines(right))
        kept = _first(wrong, half)
        left = _first(right, room - _lines(kept)) + kept
    counts = Counter(row["state"] for row in rows)
    counts.subtract(row["state"] for row in left)
    return left, {state: counts[state] for state in ORDER if counts[state]}


def _lines(rows: list[Row]) -> int:
    return len(rows) + len(_reasons(rows))


def _first(rows: list[Row], room: int) -> list[Row]:
    """As many rows as fit."""
    return next((rows[:count] for count in range(min(room, len(rows)), 0, -1) if _lines(rows[:count]) <= room), [])


def _reasons(rows: list[Row]) -> dict[tuple[str, str], list[str]]:
    """The runs of each state and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["reason"]:
            found.setdefault((row["state"], row["reason"]), []).append(row["run_id"])
    return found


def _why(state: str, reason: str, runs: list[str]) -> str:
    if len(runs) == 1:
        return f"{runs[0]} {state}: {reason}"
    return f"{len(runs)} runs {state}: {reason} ({', '.join(runs[:3])}{', …' if len(runs) > 3 else ''})"


def _totals(status: dict[str, Any]) -> list[str]:
    hours, unit = (status["gpu_hours"], "GPU") if status["gpu_hours"] else (status["core_hours"], "core")
    words = [f"{hours:.3g} {unit}-hours so far"] if hours else []
    if status["retries"]:
        words.append(f"{status['retries']} retries")
    if status["eta_seconds"] is not None:
        words.append(f"the last run ends in about {describe(status['eta_seconds'])}")
    lines = [", ".join(words)] if words else []
    if status["report"]:
        lines.append(f"report: {status['report']}")
    return lines


def _cells(row: Row) -> list[str]:
    def say(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    places = (row["host"], row["job_id"], row["mesh"])
    return [
        row["run_id"],
        row["state"],
        short(row["N_total"]),
        short(row["D"]),
        f"{row['step']}/{row['steps']}",
        say(row["loss"], "{:.4f}"),
        short(row["tokens_per_s"]) if row["tokens_per_s"] else "",
        say(row["mfu"], "{:.1%}"),
        describe(row["eta_seconds"]) if row["eta_seconds"] is not None else "",
        str(row["attempt"] or ""),
        " ".join(str(place) for place in places if place) if row["state"] != "planned" else "",
        _note(row),
    ]


def _note(row: Row) -> str:
    words = []
    if row["silent"]:
        words.append(f"no sign of life for {describe(row['heartbeat_age'])}")
    elif row["heartbeat_age"] is not None:
        words.append(f"alive {describe(row['heartbeat_age'])} ago")
    if row["waits"]:
        words.append(f"waits: {row['waits']}")
    if row["retries"]:
        words.append(f"retried {row['retries']}x")
    if row["cancel_asked"]:
        words.append("to be cancelled")
    return ", ".join(words)
