"""wandb beside metrics.jsonl. The file is the truth and wandb a view of it, so nothing here can stop a run.

Every wait for a server has a bound; what is cut off then, `isoflop sync` sends later through this same class.
"""

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

# Files of a run directory that both the tracker and whoever starts runs know.
LINEAGE = "lineage.json"  # where the run comes from: sweep, commit, attempt
PUSHED = "wandb.json"  # what the server has, as far as it has confirmed

AXES = ("step", "tokens", "flops")  # what curves are drawn against; the rest is shown in sections
SECTIONS = ("train", "val", "eval", "experts", "speed")

# Short beside the grace of a preempted job.
ANSWER_SECONDS = 3.0  # for a server to say anything at all, before a run starts
INIT_SECONDS = 15.0
FINISH_SECONDS = 10.0


class Tracker:
    """Streams numbers to wandb, online when logged in, else offline; the first failure is reported once and turns it
    off.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        directory: Path,
        report: Callable[[str], None],
        seconds: float | None = None,
    ) -> None:
        """Opens the view, and brings it up to where metrics.jsonl is; `finish` waits at most `seconds` for the
        server.
        """
        self._report, self._directory = report, directory
        self._run: Any = None
        self._sent, self._scores = 0, 0  # the newest step that the view has; checkpoints whose scores it has
        if config.tracker.kind == "wandb":
            self._guard("starting", lambda: self._start(config, run_id, seconds or FINISH_SECONDS))

    def _start(self, config: RunConfig, run_id: str, seconds: float) -> None:
        settings = config.tracker
        folder = Path(settings.directory) if settings.directory else self._directory
        counts = vars(count_parameters(config.model))
        size = {**counts, "D": config.D, "flops_6nd": flops_6nd(config), "flops_exact": flops_exact(config)}
        branch_step = None if config.parent is None else trunk_steps(config)
        # Where it comes from: its sweep, and the trunk and step that it branches from.
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
        # Online wandb leaves out the steps that the server has. Its summary would say which, but may be ahead of them.
        for record in metrics(self._directory):
            self._send(record)

    def log(self, record: dict[str, Any]) -> None:
        """Sends one line of metrics, unless the view has its step; the step is the trainer's."""
        if self._run is not None:
            self._guard("logging", lambda: self._send(record))

    def _send(self, record: dict[str, Any]) -> None:
        if record["step"] > self._sent:
            self._run.log(in_sections(record), step=record["step"])
            self._sent = record["step"]

    def add_scores(self, scores: list[dict[str, Any]]) -> None:
        """Sends lines of `step`, `tokens` and `eval/task/metric`, one per checkpoint, behind all of the training's.

        wandb takes steps in their order and each once, so a line that is sent again changes nothing.
        """
        for record in scores:
            if self._run is not None:
                self._guard("logging", lambda: self._run.log(record, step=self._sent + record["step"]))  # noqa: B023
        self._scores = len(scores)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Sends the final numbers and closes; without a summary the run is not at its end."""
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
            # A tracker must never cost a run: networks, quotas and API changes are not the science.
            self._run = None
            words = " ".join(str(error).split())
            with suppress(OSError):  # a disk too full for the log
                self._report(
                    f"wandb failed while {what} ({type(error).__name__}: {words}); metrics.jsonl has every line, and "
                    "`isoflop sync` sends it"
                )


def in_sections(record: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics as wandb shows it: `train/loss`, `val/bpb`, `speed/mfu`, `experts/load_max/0` of block 0."""
    found = {}
    for name, value in record.items():
        section, _, rest = name.partition("_")
        if name in AXES:
            found[name] = value
        elif isinstance(value, list):
            found |= {f"experts/{name}/{block}": number for block, number in enumerate(value)}
        elif section in ("train", "val"):
            found[f"{section}/{rest}"] = value
        else:
            found[f"{'speed' if name in ('seconds', 'tokens_per_s', 'mfu') else 'train'}/{name}"] = value
    return found


def open_run(
    settings: TrackerConfig,
    folder: Path,
    report: Callable[[str], None],
    seconds: float,
    offline_suffix: str = "",
    **about: Any,
) -> Any:
    """A wandb run; with mode `auto` it is offline where no server can be had, and that is reported.

    `offline_suffix`: of the id of an offline run, which cannot be resumed, where the next one is another run.
    `seconds`: that `finish()` may wait for the server, before it raises TimeoutError. Other errors are wandb's own.
    """
    import wandb

    asked = settings.mode if settings.mode != "auto" else os.environ.get("WANDB_MODE", "")
    mode = asked or ("online" if logged_in() else "offline")
    if mode == "online" and (silence := unreachable()) is not None:
        if asked:
            raise ConnectionError(silence)
        report(f"{silence}; going on offline, and `isoflop sync` sends it later")
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
    """Whether a wandb run talks to a server; it may also be offline, or WANDB_MODE=disabled."""
    return bool(run.settings.mode == "online")


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl in order, each step once: a resumed run repeats those since its checkpoint."""
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
    """The wandb process, which all runs of this one share, and the settings of environment and files."""
    import wandb

    return wandb.setup(wandb.Settings(silent=True))


def unreachable() -> str | None:
    """Why nothing can be sent, in a few words; None where the server answers, whatever it says."""
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
            return None  # whom to trust is wandb's affair
        return f"wandb's server {server()} does not answer ({error})"
    return None
