"""The report's section on what the runs cost: planned against used, what was wasted and why, and how the estimate held.

Special here: the numbers come as a plain mapping, which `costs.json` of a sweep is. What is None in it, such as a
price, is left out of the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formatting import amount, percent, scientific, text
from .page import Page, cell, table

WORDS = {
    "killed": "process killed", "hung": "hung", "node": "node failed", "lost": "job vanished", "disk": "disk full",
    "trunk": "trunk not there yet", "memory": "out of memory",
    "preempted": "preempted", "time_limit": "time limit", "cancelled": "cancelled",
    "diverged": "diverged", "input": "bad input", "error": "error",
}  # fmt: skip


def what_it_cost(page: Page, books: Mapping[str, Any] | None) -> None:
    """Adds the section; nothing where nobody kept books.

    Args:
        page: the report.
        books: `unit` (of hours), `runs`, `done`; `planned`, `used`, `useful`, `wasted`, each {hours, dollars, flops};
            `causes`: {name: {attempts, hours, flops}}; `attempts`, `retries`, `retry_budget`; `measured_runs`; `error`
            of the estimate, {runs, ratio, low, high} as actual over planned, and `errors`, the same by width;
            `cluster_hours`, `overhead_hours` and `scoring_hours` by the scheduler's clock.
    """
    if books is None:
        return
    page.add(f"<h2>What it cost</h2><p>{text(' '.join(_sentences(books)))}</p>")
    page.add(f'<div class="scroll">{_spent(books)}</div>')
    if books["errors"]:
        page.add(f'<h3>How the estimate held</h3><p class="caption">{_source(books)}</p>')
        page.add(f'<div class="scroll">{_held(books)}</div>')


def _sentences(books: Mapping[str, Any]) -> list[str]:
    used, planned, wasted = books["used"], books["planned"], books["wasted"]
    said = [
        f"{books['done']} of {books['runs']} runs are done, in {books['attempts']} attempts: {amount(used['hours'])} "
        f"{books['unit']}, where {amount(planned['hours'])} were planned for all."
    ]
    if wasted["hours"] > 0:
        share = percent(wasted["hours"] / used["hours"]).replace(" ", "\u00a0")  # which must not break the line
        said.append(f"{share} of that was wasted: nothing that was kept stands on it.")
    else:
        said.append("Nothing was wasted.")
    if books["retries"]:
        said.append(f"{books['retries']} of {books['retry_budget']} retries were used.")
    if books["cluster_hours"] is not None:
        said.append(
            f"The scheduler counts {amount(books['cluster_hours'])} {books['unit']} for these jobs, "
            f"{amount(books['overhead_hours'])} more for their start and for waiting."
        )
    if books["scoring_hours"] is not None:
        said.append(f"Scoring took {amount(books['scoring_hours'])} {books['unit']}.")
    return said


def _spent(books: Mapping[str, Any]) -> str:
    priced = books["used"]["dollars"] is not None
    per_hour = books["used"]["dollars"] / books["used"]["hours"] if priced and books["used"]["hours"] else 0.0

    def row(name: str, hours: float, flops: float, attempts: str = "", kind: str = "") -> str:
        dollars = cell(f"${hours * per_hour:,.2f}") if priced else ""
        cells = cell(attempts) + cell(amount(hours)) + dollars + cell(scientific(flops))
        return f"<tr{kind}><td>{text(name)}</td>{cells}</tr>"

    rows = [row("planned", books["planned"]["hours"], books["planned"]["flops"])]
    rows.append(row("used", books["used"]["hours"], books["used"]["flops"], str(books["attempts"])))
    for name in ("useful", "wasted"):
        rows.append(row(f"of that {name}", books[name]["hours"], books[name]["flops"]))
    for name, lost in books["causes"].items():
        said = f"{lost['attempts']}" if lost["attempts"] else ""
        rows.append(row(WORDS.get(name, name), lost["hours"], lost["flops"], said, ' class="part"'))
    head = ["", "attempts", books["unit"], *(["dollars"] if priced else []), "FLOPs, exact"]
    return table(head, rows)


def _source(books: Mapping[str, Any]) -> str:
    known = books["measured_runs"]
    source = f"from {known} runs of past sweeps on such a device" if known else "from an assumed speed of this device"
    return text(
        f"Training time over its estimate, {source}; 1 is as planned. The range holds the middle half of the runs."
    )


def _held(books: Mapping[str, Any]) -> str:
    rows = [_error_row(f"width {width}", error) for width, error in books["errors"].items()]
    rows.append(_error_row("all, together", books["error"]))
    return table(("", "runs", "actual / planned", "middle half"), rows)


def _error_row(name: str, error: Mapping[str, Any]) -> str:
    cells = (
        cell(str(error["runs"])) + cell(f"{error['ratio']:.2f}") + cell(f"{error['low']:.2f} to {error['high']:.2f}")
    )
    return f"<tr><td>{text(name)}</td>{cells}</tr>"
