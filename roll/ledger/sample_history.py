"""A sample's history: its records in the ledger, and which of them count in the lineage of the final weights.

Sample "17.3" belongs to group "17".
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from roll.config.errors import RunError
from roll.ledger.log import HEADER_BYTES, ROLLED_BACK, Transition, is_whole


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A transition in a sample's history: its task, and whether it counts in the lineage of the final weights."""

    transition: Transition
    task: str | None
    counts: bool


def group_of(sample: str) -> str:
    """The group in a sample's name."""
    return sample.rpartition(".")[0] or sample


def read_records(file: IO[bytes], record: Path, offsets: bytes) -> list[tuple[int, Transition]]:
    """The records that begin at the given offsets."""
    found = []
    for (offset,) in struct.iter_unpack("<q", offsets):
        file.seek(offset)
        line = file.readline()[:-1]
        if not is_whole(line):
            raise RunError(f"{record} was changed while it was read: ask again")
        found.append((offset, _decode(line)))
    return found


def _decode(line: bytes) -> Transition:
    fields = json.loads(line[HEADER_BYTES:])
    if b"\\ud" in line:
        fields = json.loads(json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace"))
    return Transition(**fields)


def history_of(records: list[tuple[int, Transition]]) -> list[HistoryEntry]:
    """A sample's records, each with whether it counts.

    Each transition follows the one that was current; a rollback makes the transition current that was so at its position.
    The last current transition counts, and so do all that it follows, directly or not.
    """
    offsets = [offset for offset, _ in records]
    current = -1
    follows: list[int] = []
    currents = [current]
    tasks: list[str | None] = []
    for number, (_, transition) in enumerate(records):
        follows.append(current)
        task = transition.info.get("task") if transition.state == "queued" else None
        tasks.append(str(task) if task is not None else tasks[current] if current >= 0 else None)
        is_rollback = transition.state == ROLLED_BACK
        current = currents[bisect_left(offsets, transition.info["position"])] if is_rollback else number
        currents.append(current)
    counting = set()
    while current >= 0:
        counting.add(current)
        current = follows[current]
    return [HistoryEntry(transition, tasks[number], number in counting) for number, (_, transition) in enumerate(records)]
