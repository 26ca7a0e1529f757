"""The nouns that travel: tasks, token logs, samples and ragged batches."""

from roll.data.batch import Batch
from roll.data.sample import Group, Sample
from roll.data.task import Message, Response, Task
from roll.data.tokenlog import TokenLog

__all__ = ["Batch", "Group", "Message", "Response", "Sample", "Task", "TokenLog"]
