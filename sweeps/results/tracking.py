"""Send a sweep to wandb: the lineage of its runs, its results as a separate run, and runs tracked offline.

Runs are sent from isoflop's files, from the server's last step on. `wandb sync` (0.31) is not used: it stops at the
torn file of a killed attempt, and waits forever for a silent server.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...train.config import RunConfig, TrackerConfig
from ...train.errors import UserError
from ...train.files import read_json, write_json
from ...train.tracker import LINEAGE, PUSHED, Tracker, is_online, logged_in, open_run, server, unreachable
from ..config import recorded
from ..runs.directory import OPEN, Busy, RunDirectory, SweepDirectory
from .scoring import evaluations
from .table import MORE, SCORES

RESULTS = ("fit/law.json", "fit/*.html", "fit/*.png", "table.csv", "plan.json", "sweep.yaml")
AT_ONCE = 8  # runs that are sent at the same time
SEND_SECONDS = 60.0  # time limit to send a run or the results; a report has some megabytes
PROVENANCE = ("isoflop_version", "git_commit", "git_dirty", "host", "command", "written")


def note_lineage(run: RunDirectory, config: RunConfig) -> None:
    """Save the code version and attempt of a run that is about to train, for its tracker to log. Errors are ignored."""
    if config.tracker.kind == "none":
        return
    sweep = run.path.parent.parent / "sweep.yaml"
    with suppress(OSError, UserError):
        state = run.state()
        attempt = {"attempt": state.attempt, "host": state.host, "job_id": state.job_id}
        write_json(run.path / LINEAGE, attempt | _code(sweep.parent, sweep.stat().st_mtime_ns))


@functools.lru_cache(maxsize=4)
def _code(sweep: Path, written: int) -> dict[str, Any]:
    """Return the version of the code that planned a sweep; cached until `written`, the time of sweep.yaml, changes."""
    settings = SweepDirectory(sweep).settings()
    return {key: settings.get(key) for key in ("isoflop_version", "git_commit", "git_dirty")}


def push_results(sweep: SweepDirectory, report: Callable[[str], None] = print, **changes: Any) -> None:
    """Send laws, report, table and all scores to wandb as a separate run, unless tracker=none or nothing has changed.

    `report` gets a line about a failure, which is not raised. `changes` override the tracker's settings.
    """
    try:
        written = sweep.settings()
        settings = replace(recorded(written).tracker, **changes)
        pushed = {"digest": None, "online": True} | (read_json(sweep.path / "fit" / PUSHED) or {})
        is_current = pushed["digest"] == _digest(sweep) and (pushed["online"] or settings.mode != "online")
        if settings.kind == "wandb" and not is_current:
            _push_results(sweep, written, settings, report)
    except Exception as error:
        # The results are on disk, so a network or quota error must not make the sweep fail.
        message = " ".join(str(error).split())
        report(f"the results were not sent to wandb ({type(error).__name__}: {message}); `isoflop sync` tries again")


def _push_results(
    sweep: SweepDirectory, written: dict[str, Any], settings: TrackerConfig, report: Callable[[str], None]
) -> None:
    import wandb

    law = read_json(sweep.path / "fit" / "law.json")
    if law is None:
        return
    before = _digest(sweep)
    run = open_run(
        settings,
        Path(settings.directory) if settings.directory else sweep.path,
        report,
        SEND_SECONDS,
        f"-{before[:6]}",
        id=results_id(sweep),
        name=f"{sweep.path.name}: fit",
        job_type="fit",
        config={**{key: written.get(key) for key in PROVENANCE}, "sweep": written.get("config")},
    )
    try:
        run.log_artifact(_artifact(sweep))
        columns, rows = score_rows(sweep)
        if rows:
            run.log({"scores": wandb.Table(columns=columns, data=rows)})
        run.summary.update({key: law.get(key) for key in ("law", "ci", "optimal", "verdict", "runs")})
    finally:
        run.finish()
    write_json(sweep.path / "fit" / PUSHED, {"digest": before, "online": is_online(run)})


def _artifact(sweep: SweepDirectory) -> Any:
    import wandb

    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in sweep.path.name)
    artifact = wandb.Artifact(f"{name}-results", type="scaling-law")
    for path in (path for pattern in RESULTS for path in sorted(sweep.path.glob(pattern))):
        artifact.add_file(str(path), name=path.name)
    summaries = [summary for run in sweep.runs() if (summary := run.summary()) is not None]
    with artifact.new_file("summaries.jsonl", mode="w") as file:
        file.writelines(json.dumps(summary) + "\n" for summary in summaries)
    return artifact


def results_id(sweep: SweepDirectory) -> str:
    written = sweep.settings()
    about = [str(sweep.path.resolve()), str(written.get("host")), str(written.get("written"))]
    return "fit-" + hashlib.sha256("\n".join(about).encode()).hexdigest()[:10]


def push_scores(run: RunDirectory, report: Callable[[str], None]) -> None:
    """Add the scores of a finished run's checkpoints to its wandb run."""
    config = run.config()
    if config.tracker.kind == "wandb":
        _push_scores(run, Tracker(config, run.run_id, run.path, report))


def _push_scores(run: RunDirectory, view: Tracker) -> None:
    records = score_records(run)
    view.add_scores(records)
    view.finish((run.summary() or {}) | (records[-1] if records else {}) if run.is_done() else None)


def score_records(run: RunDirectory) -> list[dict[str, Any]]:
    """Return a record per scored checkpoint, in order, with step, tokens, and each score as `eval/<task>/<metric>`."""
    names = [name for name in (*SCORES, *MORE) if "items" not in name and name != "chance"]
    return [
        {"step": step, "tokens": scored.get("tokens")}
        | {
            f"eval/{task}/{name}": values[name]
            for task, values in scored["tasks"].items()
            for name in names
            if values.get(name) is not None
        }
        for step, scored in evaluations(run).items()
    ]


def score_rows(sweep: SweepDirectory) -> tuple[list[str | int], list[Iterable[Any]]]:
    """Return all scores as a table: its columns, and a row per (checkpoint, task)."""
    columns: list[str | int] = ["run_id", "name", "N", "step", "tokens", "task", *SCORES]
    rows: list[Iterable[Any]] = []
    for planned in sweep.plan()["runs"]:
        for scored in evaluations(sweep.run(planned["run_id"])).values():
            for task, values in scored["tasks"].items():
                about = [planned["run_id"], planned["name"], scored.get("N_total"), scored.get("step")]
                rows.append([*about, scored.get("tokens"), task, *(values.get(name) for name in SCORES)])
    return columns, rows


def _digest(sweep: SweepDirectory) -> str:
    files = (sweep.path / "fit" / "law.json", sweep.path / "table.csv")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def sync_sweep(sweep: SweepDirectory, progress: Callable[[str], None] = print) -> int:
    """Send a sweep's new or changed runs and results to wandb. Returns the number of runs sent."""
    tracked = [run for run in sweep.runs() if run.last_metrics() and run.config().tracker.kind == "wandb"]
    if not tracked:
        raise UserError(f"{sweep.path} has nothing to send: none of its runs has trained with tracker=wandb")
    if not logged_in():
        raise UserError(f"no user is logged in at {server()}; run `wandb login` or set WANDB_API_KEY, then sync again")
    if (silence := unreachable()) is not None:
        raise UserError(f"{silence}; sync again later")
    sent, waiting = 0, list[RunDirectory]()
    for run in tracked:
        pushed = {"step": -1, "finished": None, "scores": 0} | (read_json(run.path / PUSHED) or {})
        current = {"step": pushed["step"], "finished": run.is_done(), "scores": len(evaluations(run))}
        if pushed["step"] < run.last_metrics().get("step", 0) or pushed != current:
            waiting.append(run)
    with tempfile.TemporaryDirectory(prefix="wandb-", ignore_cleanup_errors=True) as folder:
        with ThreadPoolExecutor(AT_ONCE) as pool:  # most of a run's time is waiting for the server
            runs = {pool.submit(_send, run, folder): run for run in waiting}
            try:
                for future in as_completed(runs):
                    sent += future.result()
                    end = f"was sent, {sent} of {len(waiting)}" if future.result() else "is unfinished and was skipped"
                    progress(f"run {runs[future].run_id} {end}")
            finally:
                pool.shutdown(cancel_futures=True)  # if one fails, the others would too
        push_results(sweep, _refuse, mode="online", directory=folder)
    if not waiting:
        progress("wandb already has every run")
    return sent


def _send(run: RunDirectory, folder: str) -> bool:
    """Send a run to wandb; wandb's files go to `folder`. Returns False if the run is unfinished or locked."""
    if run.state().state in OPEN:
        return False
    config = run.config()
    config.tracker.mode, config.tracker.directory = "online", folder
    try:
        with run.lock(timeout=0.0):
            _push_scores(run, Tracker(config, run.run_id, run.path, _refuse, SEND_SECONDS))
    except Busy:
        return False
    return True


def _refuse(line: str) -> None:
    """Raise a tracker's message as a UserError, to end the sync."""
    raise UserError(f"{line}, so try again later")
