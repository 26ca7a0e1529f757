"""The data types that processes exchange: tasks, token logs, samples and ragged batches.

Types that need NumPy are imported when first used: graders start often, and need only tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.lazy import lazily
from roll.data.task import Message, Response, Task

if TYPE_CHECKING:
    from roll.data.batch import Batch
    from roll.data.chat import Chat
    from roll.data.sample import Group, Sample
    from roll.data.tokenlog import TokenLog

__all__ = ["Batch", "Chat", "Group", "Message", "Response", "Sample", "Task", "TokenLog"]

__getattr__ = lazily(
    __name__,
    {
        "roll.data.batch": ("Batch",),
        "roll.data.chat": ("Chat",),
        "roll.data.sample": ("Group", "Sample"),
        "roll.data.tokenlog": ("TokenLog",),
    },
)
