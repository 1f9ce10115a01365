"""A cache of objects that a process shares between its runs: open shards and the device's measured speed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Kept = TypeVar("Kept")
_STORE: ContextVar[dict[Hashable, Any]] = ContextVar("session")


@contextmanager
def session() -> Iterator[None]:
    token = _STORE.set({})
    try:
        yield
    finally:
        _STORE.reset(token)


def kept(key: Hashable, make: Callable[[], Kept]) -> Kept:
    """Return the `session`'s object for `key`, made at the first call. Without a session, make it at every call."""
    store = _STORE.get({})
    if key not in store:
        store[key] = make()
    made: Kept = store[key]
    return made
