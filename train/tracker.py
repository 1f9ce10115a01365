"""Tracking with wandb, a copy of metrics.jsonl. A failure of wandb never stops a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from .config import RunConfig, TrackerConfig, to_dict
from .files import read_json, read_json_lines, write_json
from .flops import count_parameters, flops_6nd, flops_exact
from .schedule import trunk_steps

# Files of a run directory that the tracker and the launcher share.
LINEAGE = "lineage.json"  # origin of the run: sweep, commit, attempt
PUSHED = "wandb.json"  # the data that the server has confirmed

AXES = ("step", "tokens", "flops")  # x axes of the curves; all other metrics are shown in sections
SECTIONS = ("train", "val", "eval", "experts", "speed")

# Short compared with the grace period of a preempted job. Chosen by hand.
ANSWER_SECONDS = 3.0  # for the server's first answer, before a run starts
INIT_SECONDS = 15.0
FINISH_SECONDS = 10.0


class Tracker:
    """A stream of a run's numbers to wandb, offline if not logged in. Its first failure is reported and disables it."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        directory: Path,
        report: Callable[[str], None],
        seconds: float | None = None,
    ) -> None:
        """Start a wandb run and send the lines of metrics.jsonl. `finish` waits at most `seconds` for the server."""
        self._report, self._directory = report, directory
        self._run: Any = None
        self._sent, self._scores = 0, 0  # newest step sent; number of checkpoints whose scores were sent
        if config.tracker.kind == "wandb":
            self._guard("starting", lambda: self._start(config, run_id, seconds or FINISH_SECONDS))

    def _start(self, config: RunConfig, run_id: str, seconds: float) -> None:
        settings = config.tracker
        folder = Path(settings.directory) if settings.directory else self._directory
        counts = vars(count_parameters(config.model))
        size = {**counts, "D": config.D, "flops_6nd": flops_6nd(config), "flops_exact": flops_exact(config)}
        branch_step = None if config.parent is None else trunk_steps(config)
        # The run's sweep, and the trunk and step that it branches from.
        lineage = {"sweep": settings.group, "parent": config.parent, "branch_step": branch_step}
        lineage |= read_json(self._directory / LINEAGE) or {}
        self._run = open_run(
            settings,
            folder,
            self._report,
            seconds,
            id=run_id,
            name=config.name or run_id,
            job_type="train",
            config={**to_dict(config), "size": size, "lineage": lineage},
        )
        for axis in AXES:
            self._run.define_metric(axis, hidden=True)
        for section in SECTIONS:
            self._run.define_metric(f"{section}/*", step_metric="tokens")
        # Online, wandb skips steps that the server already has. Its summary names a step, but may be ahead of the data.
        for record in metrics(self._directory):
            self._send(record)

    def log(self, record: dict[str, Any]) -> None:
        """Send one line of metrics, unless its step is already sent."""
        if self._run is not None:
            self._guard("logging", lambda: self._send(record))

    def _send(self, record: dict[str, Any]) -> None:
        if record["step"] > self._sent:
            self._run.log(in_sections(record), step=record["step"])
            self._sent = record["step"]

    def add_scores(self, scores: list[dict[str, Any]]) -> None:
        """Send benchmark scores: a dict of `step`, `tokens` and `eval/<task>/<metric>` per checkpoint.

        Call it after all training lines. Sending a score again changes nothing.
        """
        for record in scores:
            if self._run is not None:
                self._guard("logging", lambda: self._run.log(record, step=self._sent + record["step"]))  # noqa: B023
        self._scores = len(scores)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Send the final numbers and close; without a summary the run counts as unfinished."""
        if self._run is not None:
            run, self._run = self._run, None
            self._guard("finishing", lambda: self._finish(run, summary))

    def _finish(self, run: Any, summary: dict[str, Any] | None) -> None:
        run.summary.update(summary or {})
        run.finish(exit_code=1 if summary is None else 0)
        if is_online(run):
            pushed = {"step": self._sent, "finished": summary is not None, "scores": self._scores}
            write_json(self._directory / PUSHED, pushed)

    def _guard(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            # A tracker must never stop a run. Anything can fail: network, quota or a change of the API.
            self._run = None
            message = " ".join(str(error).split())
            with suppress(OSError):  # a disk too full for the log
                self._report(
                    f"wandb failed while {what} ({type(error).__name__}: {message}); metrics.jsonl has every line, and "
                    "`isoflop sync` sends them later"
                )


def in_sections(record: dict[str, Any]) -> dict[str, Any]:
    """Rename metrics for wandb's sections: `val_bpb` to `val/bpb`, block 0 of `load_max` to `experts/load_max/0`."""
    named = {}
    for name, value in record.items():
        section, _, rest = name.partition("_")
        if name in AXES:
            named[name] = value
        elif isinstance(value, list):
            named |= {f"experts/{name}/{block}": number for block, number in enumerate(value)}
        elif section in ("train", "val"):
            named[f"{section}/{rest}"] = value
        else:
            named[f"{'speed' if name in ('seconds', 'tokens_per_s', 'mfu') else 'train'}/{name}"] = value
    return named


def open_run(
    settings: TrackerConfig,
    folder: Path,
    report: Callable[[str], None],
    seconds: float,
    offline_suffix: str = "",
    **about: Any,
) -> Any:
    """Start a wandb run. With mode `auto`, report a server that does not answer and start the run offline.

    Args:
        folder: Where wandb keeps its files.
        seconds: How long the run's `finish()` waits for the server before it raises TimeoutError.
        offline_suffix: Appended to an offline run's id, because an offline run cannot be resumed.
        about: Further arguments of `wandb.init`, among them `id`.
    """
    import wandb

    requested = settings.mode if settings.mode != "auto" else os.environ.get("WANDB_MODE", "")
    mode = requested or ("online" if logged_in() else "offline")
    if mode == "online" and (problem := unreachable()) is not None:
        if requested:
            raise ConnectionError(problem)
        report(f"{problem}; the run continues offline, and `isoflop sync` sends its data later")
        mode = "offline"
    folder.mkdir(parents=True, exist_ok=True)
    about["id"] += offline_suffix if mode == "offline" else ""
    _service()
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        dir=str(folder),
        mode=cast(Any, mode),
        resume="allow" if mode == "online" else None,
        reinit="create_new",  # a worker trains run after run
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=seconds,
            finish_timeout_raises=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
        **about,
    )


def is_online(run: Any) -> bool:
    return bool(run.settings.mode == "online")


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl by rising step; only the last line of a repeated step."""
    records = read_json_lines(directory / "metrics.jsonl")
    lines = {line["step"]: line for line in records if isinstance(line.get("step"), int)}
    return [lines[step] for step in sorted(lines)]


def logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc
    from urllib.parse import urlsplit

    host = urlsplit(server()).hostname or ""
    file = os.environ.get("NETRC") or str(Path.home() / ".netrc")
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def server() -> str:
    return str(_service().settings.base_url)


def _service() -> Any:
    """Return wandb's service object, shared by all runs of this process; its `settings.base_url` is the server."""
    import wandb

    return wandb.setup(wandb.Settings(silent=True))


def unreachable() -> str | None:
    """Return a short reason why wandb's server cannot be reached; None if it answers, even with an error."""
    from http.client import HTTPException
    from ssl import SSLError
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        urlopen(Request(server(), method="HEAD"), timeout=ANSWER_SECONDS).close()
    except HTTPError:
        return None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", None), SSLError):
            return None  # wandb has its own settings for certificates
        return f"wandb's server {server()} does not answer ({error})"
    return None
