"""The two kinds of failure of a run, by who can fix it. Messages go to screens and logs, so secrets are removed."""

from typing import Any


class _RedactedError(Exception):
    def __init__(self, *args: Any) -> None:
        from roll.config.secrets import KNOWN  # which raises them

        super().__init__(*(KNOWN.redact(arg) if isinstance(arg, str) else arg for arg in args))


class UserError(_RedactedError):
    """Something the user wrote or asked for cannot work: exit status 2, the message alone, nothing created or lost.

    The message names the thing, the value it got, and what to write instead.
    """


class RunError(_RedactedError):
    """The run itself failed after it had started: exit status 1, the first cause first."""
