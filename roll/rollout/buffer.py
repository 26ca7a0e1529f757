"""Finished groups that wait to be trained on, as a checkpoint holds them.

    buffer/part-3.safetensors    tokens of the samples that rollout worker 3 has: columns of their logs, one after another
    buffer/part-3.jsonl          the same samples, a line each: everything else of them but their tasks

What the controller knows of a group is JSON in the checkpoint's state. What always holds: a file is whole or absent; a
sample that is read back has the columns, to the bit, and the verdict that it was written with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.numpy

from roll.data.batch import LOGGED, token_block
from roll.data.sample import Group, Sample
from roll.data.task import Response, Task
from roll.data.tokenlog import TokenLog
from roll.run.files import atomic_open, atomic_write

_FIELDS = (
    *(
        "id",
        "group",
        "temperature",
        "state",
        "reason",
        "priority",
        "tries",
        "kills",
        "ended",
        "turns",
        "oldest",
        "newest",
    ),
    *("tokens", "response_tokens", "finish", "reward", "parts", "seconds"),
)


def state_of(group: Group, part: int) -> dict[str, Any]:
    """What the controller knows of a group whose tokens will be in that part."""
    said = {name: getattr(group, name) for name in ("index", "epoch", "priority", "version")}
    return {**said, "task": group.task.id, "part": part, "samples": [_said_of(sample) for sample in group.samples]}


def group_of(state: dict[str, Any], task: Task) -> Group:
    samples = [_sample_of(said, task) for said in state["samples"]]
    return Group(state["index"], task, samples, state["epoch"], state["priority"], state["version"])


def write_part(folder: Path, part: int, samples: Sequence[Sample]) -> None:
    """Writes samples with their tokens into a checkpoint's folder."""
    tokens, lines = _files(folder, part)
    tokens.parent.mkdir(exist_ok=True)
    columns = token_block(samples)
    atomic_write(tokens, safetensors.numpy.save({name: columns.column(name) for name in LOGGED}))
    with atomic_open(lines) as file:  # last: where it is, the tokens are
        for sample in samples:
            response = None if sample.response is None else asdict(sample.response)
            said = {**_said_of(sample), "logged": len(sample.log), "response": response}
            file.write(json.dumps(said).encode() + b"\n")


def read_part(folder: Path, part: int, tasks: dict[int, Task]) -> Iterator[Sample]:
    """The samples of these groups, by the groups' indices; none if nothing was written."""
    tokens, lines = _files(folder, part)
    if not lines.is_file():
        return
    columns, start = safetensors.numpy.load(tokens.read_bytes()), 0
    for line in lines.read_bytes().splitlines():
        said = json.loads(line)
        span, response = slice(start, start + said.pop("logged")), said.pop("response")
        start = span.stop
        if said["group"] in tasks:
            sample = _sample_of(said, tasks[said["group"]])
            sample.log = TokenLog.of_columns(**{name: column[span] for name, column in columns.items()})
            sample.response = None if response is None else Response(**response)
            yield sample


def _said_of(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in _FIELDS}


def _sample_of(said: dict[str, Any], task: Task) -> Sample:
    return Sample(task=task, **said, entered_s=time.time())  # the time in between is nobody's


def _files(folder: Path, part: int) -> tuple[Path, Path]:
    return folder / "buffer" / f"part-{part}.safetensors", folder / "buffer" / f"part-{part}.jsonl"
