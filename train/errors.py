"""The exceptions by which a run ends that callers tell apart. Without torch."""


class UserError(Exception):
    """Bad input. The message is one sentence: the field, the value, and what would be accepted.

    Commands print it without a traceback and leave with exit code 2.
    """


class Stopped(Exception):
    """The run was asked to stop; a checkpoint of where it was is on disk."""


class Diverged(Exception):
    """The loss is not a number or left its band; the message says which, where, and by how much."""


class OutOfMemory(Exception):
    """A micro-batch does not fit; `goes_on` says that the next start uses a smaller one."""

    def __init__(self, message: str, goes_on: bool = False) -> None:
        super().__init__(message)
        self.goes_on = goes_on


def counted(number: int, one: str, many: str | None = None) -> str:
    """For a message: 1 run, 2 runs."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


COLLECTIVE = (Stopped, Diverged)  # all ranks raise them at the same step, so none has to tell the others
