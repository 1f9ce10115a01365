"""wandb beside metrics.jsonl. The file is the truth and wandb a view of it, so nothing here can stop a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from .config import RunConfig, to_dict


class Tracker:
    """Streams numbers to wandb; the first failure is reported once and turns it off.

    Online when logged in, else offline; the wandb run id is the run_id, so a resumed run goes on in the same place.
    """

    def __init__(self, config: RunConfig, run_id: str, directory: Path, report: Callable[[str], None]) -> None:
        self._report = report
        self._run: Any = None
        if config.tracker.kind == "wandb":
            self._guard("starting", lambda: self._start(config, run_id, directory))

    def _start(self, config: RunConfig, run_id: str, directory: Path) -> None:
        import wandb

        settings = config.tracker
        mode = settings.mode if settings.mode != "auto" else os.environ.get("WANDB_MODE", "")
        mode = mode or ("online" if _logged_in() else "offline")
        name = config.name or run_id
        folder = Path(settings.directory) if settings.directory else directory
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.project, entity=settings.entity, group=settings.group, id=run_id, name=name,
            mode=cast(Any, mode), dir=str(folder), config=to_dict(config), resume="allow" if mode == "online" else None,
            reinit="create_new",  # beside the runs of this process that go on, those of an ensemble
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=30, disable_git=True, x_disable_meta=True,
                x_disable_stats=True,
            ),
        )  # fmt: skip

    def log(self, record: dict[str, Any]) -> None:
        """Sends one line of metrics; its step is the trainer's."""
        if self._run is not None:
            self._guard("logging", lambda: self._run.log(record, step=record["step"]))

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Sends the final numbers and closes."""
        if self._run is not None:
            run, self._run = self._run, None
            self._guard("finishing", lambda: (run.summary.update(summary or {}), run.finish()))

    def _guard(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            # A tracker must never cost a run: networks, quotas and API changes are not the science.
            self._report(f"wandb failed while {what} ({type(error).__name__}: {error}); going on without it")
            self._run = None


def _logged_in() -> bool:
    """Whether wandb would find credentials without asking for them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc
    from urllib.parse import urlsplit

    import wandb

    host = urlsplit(wandb.Settings().base_url).hostname or ""
    file = os.environ.get("NETRC") or str(Path.home() / ".netrc")
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
