"""The two ways a run ends badly, by who can mend it."""


class UserError(Exception):
    """Something the user wrote or asked for cannot work: exit status 2, the message alone, nothing created or lost.

    The message names the thing, the value it got, and what to write instead.
    """


class RunError(Exception):
    """The run itself failed after it had started: exit status 1, the first cause first."""
