"""Stop runs of a tune that can no longer win (`grid.stop_hopeless`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ...train.files import read_json_lines
from ...train.flops import count_parameters
from ..prepare import configuration
from ..runs.directory import RunDirectory, SweepDirectory
from ..runs.membership import members

if TYPE_CHECKING:
    from ...fit.curves.hopeless import Trial

LEAST_CHANCE = 0.02  # probability to win below which a run is stopped; measured, see docs/decisions.md
LOOKS = 20  # checks of a run, evenly spread over its tokens: each further one could fall below by luck


def trial_of(run: RunDirectory) -> Trial:
    """Return a run's training loss over its steps, from metrics.jsonl, and its validation loss if it is done."""
    from ...fit.curves.hopeless import Trial  # fit brings pandas, and the trainer torch; planning does without
    from ...train.job.progress import SMOOTHING

    config, summary = run.config(), run.summary() if run.is_done() else None
    lines = read_json_lines(run.path / "metrics.jsonl")
    records = {one["step"]: one["smoothed_loss"] for one in lines if {"step", "smoothed_loss"} <= one.keys()}
    steps, smoothed = np.array(sorted(records.items()), dtype=float).reshape(-1, 2).T
    # The mean of the steps since the last record, which is all that the smoothed loss has learned since then.
    weights = SMOOTHING ** np.diff(steps, prepend=0.0)
    loss = (smoothed - weights * np.concatenate([smoothed[:1], smoothed[:-1]])) / (1 - weights)
    cell = (count_parameters(config.model).N_active, config.D)
    return Trial(cell, steps / config.steps, loss, summary["val_loss"] if summary is not None else None)


class Judge:
    """Finds the runs that can no longer win, and asks their workers to stop."""

    def __init__(self, sweep: SweepDirectory) -> None:
        self._sweep = sweep
        self._finished: dict[str, Trial] = {}
        self._looks: dict[str, int] = {}  # of a run, so far

    @classmethod
    def of(cls, sweep: SweepDirectory) -> Judge | None:
        """Return a Judge of a sweep's runs if its grid sets `stop_hopeless`, else None."""
        grid = configuration(sweep).grid
        return cls(sweep) if grid is not None and grid.stop_hopeless else None

    def stop_hopeless(self, running: Iterable[str]) -> None:
        from ...fit.curves.hopeless import chance_to_win

        for name in running:
            run = self._sweep.run(name)
            tokens = run.last_metrics().get("tokens")
            look = 0 if tokens is None else int(LOOKS * tokens / run.config().D)
            if look <= self._looks.get(name, 0) or run.cancel_asked() is not None:
                continue
            self._looks[name] = look
            for one in members(self._sweep):
                if one.run_id not in self._finished and one.is_done():
                    self._finished[one.run_id] = trial_of(one)
            chance = chance_to_win(trial_of(run), list(self._finished.values()))
            if chance is not None and chance.probability < LEAST_CHANCE:
                message = f"probability {chance.probability:.2g} at {100 * chance.share:.0f} % of its steps"
                run.log(f"it can no longer win: {message}, expected final loss {chance.loss:.4f}")
                run.ask_cancel(f"grid.stop_hopeless, because it can no longer win: {message}", chance.loss)
