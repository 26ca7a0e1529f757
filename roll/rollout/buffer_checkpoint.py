"""The checkpoint of the buffer: ready groups that have not been trained on yet.

    buffer/part-3.safetensors    tokens of the samples of rollout worker 3: their log columns, concatenated
    buffer/part-3.jsonl          the same samples, one line each: all other fields except their tasks

The controller's data of a group is JSON in the checkpoint's state. Invariants: a file is complete or absent; a sample
that is read back has bit-identical columns and the same score.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.numpy

from roll.atomic_files import atomic_open, atomic_write
from roll.data.batch import LOG_COLUMNS, token_block
from roll.data.sample import Group, Sample
from roll.data.task import Response, Task
from roll.data.tokenlog import TokenLog
from roll.rollout.lifecycle import ENDS

_STORED_SEPARATELY = ("task", "log", "response", "entered_s")
_FIELDS = tuple(field.name for field in fields(Sample) if field.name not in _STORED_SEPARATELY)


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that a resumed run issues again, and its samples that have not ended."""

    task: str
    epoch: int
    samples: list[str]


def buffer_state(
    ready: Sequence[Group], others: Iterable[Group], part_of: Callable[[Sample], int | None]
) -> dict[str, Any]:
    """In-flight groups as JSON: the `ready` ones, each with the part that will have its tokens, and as `open` all others,
    including ready groups whose tokens were lost."""
    parts = {group.index: part_of(group.scored[0]) for group in ready}
    complete = [_state_of(group, part) for group in ready if (part := parts[group.index]) is not None]
    lost = [group for group in ready if parts[group.index] is None]
    missing = sorted([*others, *lost], key=lambda group: group.index)
    return {"ready": complete, "open": [_state_of(group, None) for group in missing]}


def samples_by_part(state: dict[str, Any]) -> dict[int, list[str]]:
    """The samples of ready groups, by the part that they will be written to."""
    parts: dict[int, list[str]] = {}
    for group in state["ready"]:
        parts.setdefault(group["part"], []).extend(sample["id"] for sample in group["samples"])
    return parts


def groups_by_part(state: dict[str, Any], tasks: Mapping[str, Task]) -> dict[int, list[Group]]:
    """The ready groups of these tasks, by the part that they are in."""
    parts: dict[int, list[Group]] = {}
    for group in state["ready"]:
        if group["task"] in tasks:
            parts.setdefault(group["part"], []).append(_group_of(group, tasks[group["task"]]))
    return parts


def unfinished_groups(state: dict[str, Any], ready: Container[int]) -> list[UnfinishedGroup]:
    """All groups of a state that are not in `ready`, in the order they were issued."""
    groups = sorted([*state["ready"], *state["open"]], key=lambda group: int(group["index"]))
    return [
        UnfinishedGroup(group["task"], group["epoch"], [s["id"] for s in group["samples"] if s["state"] not in ENDS])
        for group in groups
        if group["index"] not in ready
    ]


def unfinished_samples(state: Mapping[str, Any]) -> dict[str, str]:
    """The samples of a state that have not ended, each with its task."""
    groups = [*state.get("ready", ()), *state.get("open", ())]
    return {s["id"]: group["task"] for group in groups for s in group["samples"] if s["state"] not in ENDS}


def write_part(folder: Path, part: int, samples: Sequence[Sample]) -> None:
    """Writes samples with their tokens into a checkpoint's folder."""
    tokens, lines = _files(folder, part)
    tokens.parent.mkdir(exist_ok=True)
    columns = token_block(samples)
    atomic_write(tokens, safetensors.numpy.save({name: columns.column(name) for name in LOG_COLUMNS}))
    with atomic_open(lines) as file:  # written last: if it exists, the tokens do too
        for sample in samples:
            response = None if sample.response is None else asdict(sample.response)
            values = {**_fields_of(sample), "logged": len(sample.log), "response": response}
            file.write(json.dumps(values).encode() + b"\n")


def read_part(folder: Path, part: int, tasks: dict[int, Task]) -> Iterator[Sample]:
    """Reads the samples of these groups (`tasks` by group index); none if the part was not written."""
    tokens, lines = _files(folder, part)
    if not lines.is_file():
        return
    columns, start = safetensors.numpy.load(tokens.read_bytes()), 0
    for line in lines.read_bytes().splitlines():
        values = json.loads(line)
        span, response = slice(start, start + values.pop("logged")), values.pop("response")
        start = span.stop
        if values["group"] in tasks:
            sample = _sample_of(values, tasks[values["group"]])
            sample.log = TokenLog.from_columns(**{name: column[span] for name, column in columns.items()})
            sample.response = None if response is None else Response(**response)
            yield sample


def _state_of(group: Group, part: int | None) -> dict[str, Any]:
    values = {name: getattr(group, name) for name in ("index", "epoch", "priority", "version")}
    return {**values, "task": group.task.id, "part": part, "samples": [_fields_of(sample) for sample in group.samples]}


def _group_of(state: dict[str, Any], task: Task) -> Group:
    samples = [_sample_of(values, task) for values in state["samples"]]
    return Group(state["index"], task, samples, state["epoch"], state["priority"], state["version"])


def _fields_of(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in _FIELDS}


def _sample_of(values: dict[str, Any], task: Task) -> Sample:
    return Sample(task=task, **values, entered_s=time.time())  # the time between save and load does not count


def _files(folder: Path, part: int) -> tuple[Path, Path]:
    return folder / "buffer" / f"part-{part}.safetensors", folder / "buffer" / f"part-{part}.jsonl"
