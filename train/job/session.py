"""What a process makes once for all runs that it trains: opened shards, and the device's measured speed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Kept = TypeVar("Kept")
_STORE: ContextVar[dict[Hashable, Any]] = ContextVar("session")


@contextmanager
def session() -> Iterator[None]:
    """While the block runs, `kept` makes each thing once."""
    token = _STORE.set({})
    try:
        yield
    finally:
        _STORE.reset(token)


def kept(key: Hashable, make: Callable[[], Kept]) -> Kept:
    """What `make` gave for this key earlier in the session, or gives now."""
    store = _STORE.get({})
    if key not in store:
        store[key] = make()
    made: Kept = store[key]
    return made
