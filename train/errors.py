"""The one exception that means "the user's input was wrong"."""


class UserError(Exception):
    """Bad input. The message is one sentence: the field, the value, and what would be accepted.

    Commands print it without a traceback and leave with exit code 2.
    """
