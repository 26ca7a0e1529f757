"""Parses device specifications: `auto`, `cpu`, `0-7`, `0,2,4`, `node1:0-3`, `cpu:0-1`.

Numbers count the devices of the named node: its GPUs, or its cores if it has none; after `cpu:` always its cores. Without
a node they count through all nodes in order, so `0-15` is every GPU of two nodes with eight each. A node name applies to
all numbers up to the next name: `node1:0-3,8` is five devices of node1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from roll.config.errors import UserError
from roll.devices.inventory import Device, Inventory, Kind

Choice = Literal["auto", "cpu"]
FORMS = "auto, cpu, or numbers such as 0-7, 0,2,4, node1:0-3 or cpu:0-1"
CORES = "cpu"
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Term:
    """A range of numbers as written. `node` is empty for all nodes; `cores`: counts cores even if there are GPUs."""

    node: str
    cores: bool
    first: int
    last: int


def parse_devices(text: str, inventory: Inventory, setting: str, *, cores: bool = False) -> Choice | tuple[Device, ...]:
    """The devices that a text names, in order, all of one kind and each once; `auto` and `cpu` are returned as they are.

    `cores` is for roles that run only on cores: their numbers count cores even if there are GPUs.
    """
    stripped = text.strip()
    if stripped == "auto":
        return "auto"
    if stripped == "cpu":
        return "cpu"
    found: dict[Device, None] = {}
    for term in _terms(stripped, setting):
        for device in _devices_of(term, inventory, setting, text, cores):
            if device in found:
                raise UserError(
                    f"{setting} is {text!r}, which names {inventory.name(device)} twice: write every device once"
                )
            found[device] = None
    if len({device.kind for device in found}) > 1:
        raise UserError(
            f"{setting} is {text!r}, which mixes GPUs and CPU cores: write devices of one kind; "
            f"{describe_devices(inventory)}"
        )
    return tuple(sorted(found))


def format_devices(devices: Iterable[Device], inventory: Inventory) -> str:
    """The shortest text that `parse_devices` reads as these devices."""
    several = len(inventory.nodes) > 1
    parts = []
    for (node, kind), members in groupby(sorted(devices), key=lambda device: (device.node, device.kind)):
        names = [inventory.nodes[node].name] if several else []
        if kind != inventory.nodes[node].kind:
            names.append(CORES)
        parts.append(":".join([*names, format_ranges([device.index for device in members])]))
    return ",".join(parts)


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs: 0, 1, 2, 5 → `0-2,5`."""
    pieces = []
    for _, members in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in members]
        pieces.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(pieces)


def describe_devices(inventory: Inventory, *, cores: bool = False) -> str:
    """A sentence with the valid numbers: `there are 2 devices here: 0-1 (cpu cores)`."""
    several = len(inventory.nodes) > 1
    total, parts = 0, []
    for node in inventory.nodes:
        kind: Kind = "cpu" if cores else node.kind
        total += node.count(kind)
        numbers = format_ranges(range(node.count(kind)))
        parts.append(f"{node.name}:{numbers} ({_kind_name(kind)})" if several else f"{numbers} ({_kind_name(kind)})")
    devices = "is 1 device" if total == 1 else f"are {total} devices"
    return f"there {devices} here: {', '.join(parts)}"


def _kind_name(kind: Kind) -> str:
    return "gpus" if kind == "gpu" else "cpu cores"


def _terms(text: str, setting: str) -> Iterable[Term]:
    node, cores = "", False
    for item in text.split(","):
        *names, numbers = item.strip().split(":")
        found = _NUMBERS.fullmatch(numbers.strip())
        if found is None or len(names) > 2 or "" in names:
            raise UserError(f"{setting} is {text!r}, and {item.strip()!r} in it is no device: write {FORMS}")
        if names:
            cores = names[-1] == CORES
            named = names[:-1] if cores else names
            if len(named) > 1:
                raise UserError(f"{setting} is {text!r}, and {item.strip()!r} in it names two nodes: write {FORMS}")
            node = named[0] if named else ""
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise UserError(
                f"{setting} is {text!r}, and the range {numbers.strip()!r} in it runs backwards: write {last}-{first}"
            )
        yield Term(node, cores, first, last)


def _devices_of(term: Term, inventory: Inventory, setting: str, text: str, cores: bool) -> Iterable[Device]:
    nodes = range(len(inventory.nodes))
    if term.node:
        found = inventory.find(term.node)
        if found is None:
            known = ", ".join(node.name for node in inventory.nodes)
            raise UserError(f"{setting} is {text!r}, but there is no node {term.node!r}: the nodes are {known}")
        nodes = range(found, found + 1)
    counted = term.cores or cores
    kinds: dict[int, Kind] = {number: "cpu" if counted else inventory.nodes[number].kind for number in nodes}
    total = sum(inventory.nodes[number].count(kind) for number, kind in kinds.items())
    if term.last >= total:
        nodes_named = Inventory(tuple(inventory.nodes[number] for number in nodes)) if term.node else inventory
        available = describe_devices(nodes_named, cores=counted).replace(
            " here:", f" on {term.node}:" if term.node else " here:"
        )
        raise UserError(f"{setting} is {text!r}, but there is no device {term.last}: {available}")
    start = 0
    for number, kind in kinds.items():
        count = inventory.nodes[number].count(kind)
        for index in range(max(term.first - start, 0), min(term.last - start + 1, count)):
            yield Device(number, kind, index)
        start += count
