"""Checks that a ledger balances: every draw was trained on once, or finally dropped with a reason, or will come again.

A *draw* is a task of an epoch, as the task sampler issued it; a group is issued for it, and another one whenever the draw
was returned. A group ends in one of three ways, which the ledger shows:

- *trained*: at least one sample is `trained`. The other samples of the group ended on their own, each with its own reason
  (its grader died, it was dropped alone, it was the baseline).
- *drawn again*: at least one sample is `dropped` with a reason that begins with one of `AGAIN`, and none is trained:
  `cut` and `surplus` (the step was full without it), `resumed` (it was in flight at the checkpoint that the run resumed
  from) and `ended` (it was in flight when the run stopped). The draw was returned to the task sampler: it has a later
  group, or the sampler still holds it.
- *final*: everything else. All samples are `dropped` or `failed`, each with a reason: no signal, too few that could be
  judged, stale, a solve rate, a quarantine, its tries used up, a policy's request, a skipped update. The draw has no
  later group, and the sampler does not hold it.

So all groups of a draw but the last were drawn again, and the last is trained, final, or drawn again and held by the
sampler. A group that was added has no draw, and never comes again.

Only the file is read, with an independent replay: a sample's path is its records, without those after the position that a
`rolled_back` record names.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zlib import crc32

from roll.rollout.lifecycle import ENDS, MOVES
from roll.scheduler.rollout_result import NOT_FINITE

AGAIN = ("cut:", "surplus:", "resumed:", "ended:")
End = Literal["trained", "again", "final", "open"]
DrawKey: TypeAlias = tuple[str, int]
"""Task and epoch."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its offset."""

    offset: int
    sample: str
    state: str
    reason: str
    info: Mapping[str, Any]

    @property
    def group(self) -> int:
        return int(self.sample.partition(".")[0])


def entries(path: Path) -> Iterator[Entry]:
    """All records of a ledger, up to a half-written one."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or int(line[:8], 16) != crc32(line[9:-1]):
                return
            said = json.loads(line[9:])
            yield Entry(offset, said["sample"], said["state"], said.get("reason", ""), said.get("info", {}))
            offset += len(line)


@dataclass
class SampleStory:
    """The lineage of the final weights: each sample's path, and the maximum number of groups in flight."""

    extra: frozenset[str] = frozenset()
    """Tasks that are not in the task sampler: their groups were added."""
    paths: dict[str, list[Entry]] = field(default_factory=dict)
    volume: int = 0
    """The maximum number of groups of draws that were in flight at once, in any lineage."""
    _open: Counter[int] = field(default_factory=Counter)
    """Samples of each group that have not ended."""
    _added: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path, extra: frozenset[str] = frozenset(), until: int | None = None) -> SampleStory:
        """Replays the ledger, or its first `until` bytes."""
        story = cls(extra)
        for entry in entries(path):
            if until is not None and entry.offset >= until:
                break
            story._enter(entry)
        return story

    def _enter(self, entry: Entry) -> None:
        path = self.paths.setdefault(entry.sample, [])
        before = _is_open(path)
        if entry.info.get("task") in self.extra:
            self._added.add(entry.group)
        elif "task" in entry.info:
            self._added.discard(entry.group)
        if entry.state == "rolled_back":
            while path and path[-1].offset >= entry.info["position"]:
                path.pop()
            if not path:
                del self.paths[entry.sample]
        else:
            path.append(entry)
        self._open[entry.group] += _is_open(path) - before
        if not self._open[entry.group]:
            del self._open[entry.group]
        if "task" in entry.info:
            self.volume = max(self.volume, len(self._open.keys() - self._added))

    def groups(self) -> dict[int, list[list[Entry]]]:
        """The paths of each group's samples, groups in the order they were issued."""
        found: dict[int, list[list[Entry]]] = defaultdict(list)
        for path in self.paths.values():
            found[path[0].group].append(path)
        return dict(sorted(found.items()))

    def states(self) -> dict[str, tuple[str, str]]:
        """Current state and reason of every sample."""
        return {sample: (path[-1].state, path[-1].reason) for sample, path in self.paths.items()}


def _is_open(path: list[Entry]) -> bool:
    return bool(path) and path[-1].state not in ENDS


def end_of(paths: list[list[Entry]]) -> End:
    """How a group ended."""
    lasts = [path[-1] for path in paths]
    if any(last.state not in ENDS for last in lasts):
        return "open"
    if any(last.state == "trained" for last in lasts):
        return "trained"
    return "again" if any(last.state == "dropped" and last.reason.startswith(AGAIN) for last in lasts) else "final"


def invalid_paths(story: SampleStory) -> list[str]:
    """Samples with a transition that is not in `MOVES`, without a reason for their end, with a reason of several lines,
    or trained on twice."""
    wrong = []
    for sample, path in story.paths.items():
        states = ["new", *(entry.state for entry in path)]
        for before, after in pairwise(states):
            if after not in MOVES[before]:
                wrong.append(f"sample {sample} went from {before} to {after}: {states}")
        if states.count("trained") > 1:
            wrong.append(f"sample {sample} was trained on twice")
        if path[-1].state in ("dropped", "failed") and not path[-1].reason:
            wrong.append(f"sample {sample} is {path[-1].state} without a reason")
        wrong += [f"sample {sample} has a reason of many lines: {e.reason}" for e in path if "\n" in e.reason]
    return wrong


def wrong_baselines(story: SampleStory) -> list[str]:
    """Greedy samples that were trained on, that did not end as the baseline of a group in an update, or that did although
    the group was in none."""
    wrong = []
    for group, paths in story.groups().items():
        taken = any(path[-1].state == "trained" or path[-1].reason == NOT_FINITE for path in paths)
        for last in (path[-1] for path in paths if path[0].info.get("greedy")):
            ended_so = last.state == "dropped" and last.reason.startswith("baseline:")
            if ended_so != taken:
                wrong.append(f"the greedy sample of group {group} is {last.state}: {last.reason}")
    return wrong


def too_old(story: SampleStory, most: int, masked: bool) -> list[str]:
    """Samples that were trained on more than `most` versions after their first token; if old tokens are masked, those of
    groups in which no token counts."""
    wrong = []
    for group, paths in story.groups().items():
        newest = []
        for path in paths:
            if path[-1].state != "trained":
                continue
            version = path[-1].info["version"] - 1
            drawn = next(entry for entry in reversed(path) if entry.state == "scoring").info["versions"]
            newest.append(drawn[1] >= version - most)
            if not masked and version - drawn[0] > most:
                wrong.append(f"sample {path[0].sample} of versions {drawn} was trained on at version {version}")
        if newest and not any(newest):
            wrong.append(f"no token of group {group} is new enough")
    return wrong


def unbalanced(story: SampleStory, draws: Mapping[int, DrawKey], held: list[DrawKey]) -> list[str]:
    """Violations of the balance: `draws` has the draw of each group, `held` the draws that the task sampler will issue
    again. Groups that are not in `draws` were added."""
    groups = story.groups()
    wrong = [f"group {group} of {draws[group]} is not on record" for group in draws if group not in groups]
    ends: dict[DrawKey, list[tuple[int, End]]] = defaultdict(list)
    for group, paths in groups.items():
        end = end_of(paths)
        if end == "open":
            wrong.append(f"group {group} has not ended: {[path[-1].state for path in paths]}")
        if group in draws:
            ends[draws[group]].append((group, end))
            task = paths[0][0].info["task"]
            if task != draws[group][0]:
                wrong.append(f"group {group} is of task {task}, but was drawn for {draws[group]}")
    for draw, of_draw in ends.items():
        wrong += _wrong_ends(draw, of_draw, held.count(draw))
    return wrong + [f"{draw} is to come again, but was never issued" for draw in held if draw not in ends]


def _wrong_ends(draw: DrawKey, ends: list[tuple[int, End]], held: int) -> Iterator[str]:
    *earlier, (last, end) = ends
    for group, other in earlier:
        if other != "again":
            yield f"{draw} came again in group {last} though its group {group} is {other}: {ends}"
    if held != (end == "again"):
        yield f"{draw} is held {held} times by the order, and its last group {last} is {end}: {ends}"


def held_by(order: Mapping[str, Any]) -> list[DrawKey]:
    """The draws that a task sampler will issue again, from its saved state."""
    gathered = [(task, epoch) for task, epoch in order.get("gathered", ())]
    return gathered + (held_by(order["base"]) if "base" in order else returned_to(order))


def returned_to(order: Mapping[str, Any]) -> list[DrawKey]:
    """The draws that a task sampler issues before any new one."""
    return returned_to(order["base"]) if "base" in order else [(task, epoch) for task, epoch in order["returned"]]


def ahead_of(order: Mapping[str, Any]) -> list[DrawKey]:
    """The draws that a task sampler has drawn from its base and not issued yet."""
    here = [(task, epoch) for _, task, epoch in order.get("waiting", ())]
    return here + (ahead_of(order["base"]) if "base" in order else [])


def ground_of(order: Mapping[str, Any]) -> int:
    """The number of draws that a task sampler has made from its base."""
    return ground_of(order["base"]) if "base" in order else sum(order["drawn"].values())


def wrong_epochs(draws: Mapping[int, DrawKey], order: Mapping[str, Any], tasks: list[str]) -> list[str]:
    """Draws that were lost or duplicated between the sampler's base, where every task comes once per epoch, and the
    groups."""
    count, ahead = ground_of(order), ahead_of(order)
    given = set(draws.values())
    whole, rest = divmod(count, len(tasks))
    wrong = [f"{draw} was given out and is yet to come" for draw in ahead if draw in given]
    found = given | set(ahead)
    for epoch in range(whole):
        wrong += [f"task {task} is missing in epoch {epoch}" for task in tasks if (task, epoch) not in found]
    if len(found) != count:
        wrong.append(f"{count} draws were made, and {len(found)} are known")
    if sum(epoch == whole for _, epoch in found) != rest:
        wrong.append(f"epoch {whole} has {rest} draws, and others are known")
    return wrong
