"""How far a task is, how fast it goes and how long it takes: a line every few seconds, from answers as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from .answers import Store

SECONDS = 10.0  # between two lines


class Meter:
    """A store of answers that counts what passes through it.

    Args:
        answers: where answers are looked up and kept.
        say: called with a line of text.
        seconds: between two lines; a task that takes less says nothing here.
        clock: seconds that pass.
    """

    def __init__(
        self, answers: Store, say: Callable[[str], None], seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._answers, self._say, self._seconds, self._clock = answers, say, seconds, clock
        self.begin("")

    def begin(self, name: str) -> None:
        """A new task; what it looks up is what it asks for."""
        self._name, self._total, self._found, self._new = name, 0, 0, 0
        self._start = self._said = self._clock()

    def get(self, key: str) -> Any | None:
        """What the store says."""
        answer = self._answers.get(key)
        self._total += 1
        self._found += answer is not None
        return answer

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Into the store, and perhaps a line."""
        batch = list(pairs)
        self._answers.put(batch)
        self._new += len(batch)
        now = self._clock()
        if batch and now - self._said >= self._seconds:
            self._said = now
            self._say(self._line(now))

    def _line(self, now: float) -> str:
        # What was there from an earlier evaluation took no time, so it does not count towards the rate.
        rate = self._new / max(now - self._start, 1e-9)
        done = self._found + self._new
        left = (self._total - done) / rate
        return f"{self._name}: {done:,} of {self._total:,} requests, {rate:.3g} a second, {_in_words(left)} left"


def _in_words(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
