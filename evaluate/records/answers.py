"""What a model has answered so far, on disk, so that an evaluation that was killed goes on at the next request.

Special here:
- An answer belongs to one model: the first line of the file says which (checkpoint, precision, our scoring, lm-eval),
  and with another first line the file is begun anew. Within it an answer goes by a hash of its request.
- Append-only JSON lines, a batch a line, flushed at once: a kill costs the batch at hand. Floats are written so that
  they come back the same, so a resumed evaluation equals one that ran through.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from ...train.errors import UserError
from ...train.files import JsonLines, plain

Report = Callable[[str], None]


class Store(Protocol):
    """What is asked of a store of answers."""

    def get(self, key: str) -> Any | None: ...
    def put(self, pairs: Iterable[tuple[str, Any]]) -> None: ...


def key(kind: str, *parts: Any) -> str:
    """Name of a request: hex of a 16-byte BLAKE2b over the canonical JSON of its parts (strings, numbers, lists)."""
    text = json.dumps([kind, *parts], sort_keys=True, separators=(",", ":"), default=plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Memory:
    """Answers of this process alone."""

    def __init__(self) -> None:
        self._answers: dict[str, Any] = {}

    def get(self, key: str) -> Any | None:
        """The answer, or None where there is none yet."""
        return self._answers.get(key)

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Remembers a batch of answers."""
        self._answers.update(pairs)

    def __len__(self) -> int:
        return len(self._answers)


class Answers(Memory):
    """Answers in a file; see `open`."""

    def __init__(self, path: Path, lines: JsonLines, answers: dict[str, Any]) -> None:
        super().__init__()
        self.path, self._lines, self._answers = path, lines, answers

    @classmethod
    def open(cls, path: Path, header: dict[str, Any], say: Report) -> Answers:
        """Opens the file, or begins it.

        Args:
            path: the file; a last line torn by a kill is dropped, and a damaged file is moved aside.
            header: what the answers depend on beside the request; answers under another header are dropped.
            say: told of damage.

        Raises:
            UserError: the file cannot be written.
        """
        header = json.loads(json.dumps(header, default=plain))
        try:
            answers = _read(path, header, say)
            if answers is None:
                path.unlink(missing_ok=True)
            lines = JsonLines(path)
            if answers is None:
                lines.write(header)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, lines, answers or {})

    def put(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Remembers a batch of answers, JSON values, and writes them as one line.

        Raises:
            UserError: the disk is full.
        """
        batch = dict(pairs)
        self._answers.update(batch)
        if batch:
            try:
                self._lines.write(batch)
            except OSError as error:
                raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Leaves the file for the next one who opens it."""
        self._lines.close()

    def remove(self) -> None:
        """Closes and deletes the file: what it served is complete."""
        self.close()
        self.path.unlink(missing_ok=True)


def _read(path: Path, header: dict[str, Any], say: Report) -> dict[str, Any] | None:
    """The answers under this header; None where the file must be begun anew."""
    if not path.exists():
        return None
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1].splitlines()
    if not whole:  # killed while it wrote the header
        return None
    answers: dict[str, Any] = {}
    try:
        if json.loads(whole[0]) != header:
            return None
        for line in whole[1:]:
            answers.update(json.loads(line))
    except (ValueError, TypeError):
        aside = move_aside(path)
        say(f"{path} is damaged; moved to {aside.name}, asking the model again")
        return None
    return answers


def move_aside(path: Path) -> Path:
    """Renames a damaged file to `<name>.corrupt-<n>`; returns where it is now."""
    candidates = (path.with_name(f"{path.name}.corrupt-{number}") for number in range(1, 1_000_000))
    aside = next(candidate for candidate in candidates if not candidate.exists())
    os.replace(path, aside)
    return aside


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"answers cannot be written to {path} ({error.strerror or error}); free space or choose another output"
    )
