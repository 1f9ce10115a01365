"""The exceptions that callers of a run distinguish."""


class UserError(Exception):
    """Bad input. The message is one sentence: the field, the value, and what is accepted.

    Commands print it without a traceback and exit with code 2.
    """


class Stopped(Exception):
    """A request to stop ended the run; a checkpoint of its last step is on disk."""


class Diverged(Exception):
    """The loss is not finite or rose too far. The message says where, and by how much."""


class OutOfMemory(Exception):
    """A micro-batch does not fit. If `goes_on`, the next start uses a smaller one."""

    def __init__(self, message: str, goes_on: bool = False) -> None:
        super().__init__(message)
        self.goes_on = goes_on


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, such as "1 run" or "2 runs"."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


COLLECTIVE = (Stopped, Diverged)  # all ranks raise them at the same step, so no rank has to notify the others
