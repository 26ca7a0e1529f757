"""Renders a plan as tables: devices as columns and stages as rows, then roles, step sizes and memory items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from roll.devices.inventory import Device
from roll.devices.memory import FULL, RUNTIME, DeviceMemory, host
from roll.devices.plan import Plan
from roll.devices.residency import NEEDS, Stage
from roll.devices.spec import format_devices, runs
from roll.strategy.offload import Residency


@dataclass(frozen=True)
class Resident:
    """A worker on the devices of a column, in one stage."""

    role: str
    rank: int
    level: Residency
    bytes: int


@dataclass(frozen=True)
class Column:
    """Devices that hold the same roles at the same residency in every stage; their ranks may differ."""

    pools: tuple[DeviceMemory, ...]
    devices: tuple[Device, ...]
    cells: tuple[tuple[tuple[Resident, ...], ...], ...]
    """The workers on each device, for each stage."""


COLUMN_CHARS = 22
"""Width of a column: `actor_infer[10-15]:` and its frame."""


def render_plan(plan: Plan, width: int = 100) -> list[Table | Text]:
    """The output of `roll plan` for a terminal with `width` characters."""
    engines = plan.map.kind != "trainer only"
    summary = Text((f"Layout: trainer and engines are {plan.map.kind}. " if engines else "") + plan.why)
    tables = [render_roles(plan), render_sizes(plan), *render_ranks(plan), render_memory(plan), render_disk(plan)]
    return [*render_map(plan, width), summary, *tables]


def render_map(plan: Plan, width: int) -> list[Table]:
    """Devices as columns and stages as rows; several tables if not all columns fit."""
    found = columns(plan)
    fit = max((width - len("│ reference │")) // COLUMN_CHARS, 1)
    return [_map_table(plan, found[first : first + fit], found) for first in range(0, len(found), fit)]


def _map_table(plan: Plan, some: list[Column], all_columns: list[Column]) -> Table:
    table = Table("stage", *(title(plan, column) for column in some), show_lines=True)
    for number, stage in enumerate(plan.stages.stages):
        table.add_row(stage, *(_cell(stage, column.cells[number], len(some) > 2) for column in some))
    table.add_row("peak", *(_peak(plan, column, all_columns) for column in some))
    return table


def render_roles(plan: Plan) -> Table:
    table = Table("role", "workers", "devices", "threads", "how")
    for role, how in plan.roles:
        placed = plan.map.roles[role]
        threads = sorted({place.threads for place in placed.places})
        table.add_row(role, str(len(placed.workers)), Text(_where(plan, role)), "–".join(map(str, threads)), Text(how))
    return table


def render_sizes(plan: Plan) -> Table:
    table = Table("size", "value")
    for size in plan.sizes:
        table.add_row(*map(Text, size))
    return table


def render_ranks(plan: Plan) -> list[Table]:
    """The memory items of one rank of each sharded role in its fullest stage."""
    sharded = {role: placed for role, placed in plan.map.roles.items() if placed.mesh is not None}
    if not sharded:
        return []
    table = Table("sharded role", "mesh", "fullest in", "part of a rank", "MiB")
    for role, placed in sharded.items():
        pool, name = _pool(plan, placed.workers[0][0]), placed.places[0].name
        parts = {s: [p for p in plan.memory.parts[pool, s] if p.worker == name] for s in plan.stages.stages}
        stage = max(parts, key=lambda stage: sum(part.bytes for part in parts[stage]))
        said, mesh, when = role, str(placed.mesh), str(stage)
        for part in parts[stage]:
            table.add_row(said, mesh, when, part.what, _mib(part.bytes))
            said = mesh = when = ""
        total = sum(part.bytes for part in parts[stage])
        table.add_row("", "", "", f"each of {len(placed.places)}", Text(_mib(total), style="bold"))
        table.add_section()
    return [table]


def render_memory(plan: Plan) -> Table:
    """The items of every memory in its fullest stage."""
    table = Table("memory", "fullest in", "role", "part", "MiB")
    for pools in _alike(plan):
        pool = pools[0]
        stage, total = plan.memory.peak(pool)
        name, when = _names(plan, pools), str(stage)
        for (role, what), size in _merged(plan, pool, stage):
            table.add_row(name, when, role, what, _mib(size))
            name = when = ""
        table.add_row("", "", "", Text(f"of {_mib(pool.capacity)} MiB"), Text(_mib(total), style="bold"))
        table.add_section()
    return table


def render_disk(plan: Plan) -> Table:
    """What the run will write to disk; everything but checkpoints is an upper estimate."""
    writes = plan.writes
    table = Table("written to disk", "about")
    kept = f"{writes.checkpoints} × {human(writes.checkpoint_bytes)}"
    table.add_row(f"checkpoints, {kept} kept", human(writes.checkpoints * writes.checkpoint_bytes))
    for what, size in writes.lasting:
        table.add_row(what, f"up to {human(size)}")
    table.add_row("all, and a checkpoint being written", Text(f"up to {human(writes.peak_bytes)}", style="bold"))
    return table


def columns(plan: Plan) -> list[Column]:
    """One column for each run of equal devices."""
    made: list[Column] = []
    for device in _devices(plan):
        cells = tuple(_residents(plan, device, stage) for stage in plan.stages.stages)
        pool = _pool(plan, device)
        if made and _alike_columns(made[-1], device, pool, cells):
            last = made[-1]
            pools = last.pools if pool in last.pools else (*last.pools, pool)
            joined = tuple((*many, one) for many, one in zip(last.cells, cells, strict=True))
            made[-1] = Column(pools, (*last.devices, device), joined)
        else:
            made.append(Column((pool,), (device,), tuple((cell,) for cell in cells)))
    return made


def title(plan: Plan, column: Column) -> str:
    """`gpu0-7`, `cpu0-1`, `node1:gpu0`; `cpu` for all cores of a node."""
    first, count = column.devices[0], len(column.devices)
    node = f"node{first.node}:" if len(plan.map.inventory.nodes) > 1 else ""
    whole = first.kind == "cpu" and count == plan.map.inventory.nodes[first.node].cores and not _pinned(plan, first)
    return f"{node}cpu" if whole else f"{node}{first.kind}{runs([device.index for device in column.devices])}"


def _pinned(plan: Plan, device: Device) -> bool:
    """Whether a worker with a model is pinned to this core."""
    return any(
        place.cores and device in worker
        for placed in plan.map.roles.values()
        if placed.strategy
        for worker, place in zip(placed.workers, placed.places, strict=True)
    )


def _devices(plan: Plan) -> list[Device]:
    """Devices of the roles with a model."""
    return sorted({device for role in plan.map.roles.values() if role.strategy for device in role.devices})


def _pool(plan: Plan, device: Device) -> DeviceMemory:
    for pool in plan.memory.pools:
        if pool.node == device.node and pool.gpu == (device.index if device.kind == "gpu" else None):
            return pool
    raise AssertionError(f"{device} has no memory")


def _residents(plan: Plan, device: Device, stage: Stage) -> tuple[Resident, ...]:
    sizes = _sizes(plan, _pool(plan, device), stage)
    there = []
    for placed in plan.map.roles.values():
        for worker, place in zip(placed.workers, placed.places, strict=True):
            if placed.strategy and device in worker:
                size = sizes[place.name]
                level = plan.stages.level(stage, place.role, place.rank)
                if size or level != "none":
                    there.append(Resident(place.role, place.rank, level, size))
    return tuple(there)


def _sizes(plan: Plan, pool: DeviceMemory, stage: Stage) -> Counter[str]:
    """Bytes per worker name in a pool."""
    sizes: Counter[str] = Counter()
    for part in plan.memory.parts[pool, stage]:
        if part.what != RUNTIME:
            sizes[part.worker] += part.bytes
    return sizes


def _alike_columns(column: Column, device: Device, pool: DeviceMemory, cells: tuple[tuple[Resident, ...], ...]) -> bool:
    last = column.devices[-1]
    if (last.node, last.kind, last.index + 1) != (device.node, device.kind, device.index):
        return False
    if pool.capacity != column.pools[-1].capacity:
        return False
    ranks = device.kind == "cpu"  # cores of one worker form one column, cores of two workers form two
    return [_signature(many[-1], ranks) for many in column.cells] == [_signature(cell, ranks) for cell in cells]


def _signature(cell: tuple[Resident, ...], ranks: bool) -> list[tuple[str, int, Residency, int]]:
    return [(one.role, one.rank if ranks else 0, one.level, one.bytes) for one in cell]


def _cell(stage: Stage, devices: tuple[tuple[Resident, ...], ...], narrow: bool) -> Text:
    """The workers on each device of a column: `actor_infer[1-7]: all, 3.1 GiB`."""
    lines, between = [], "\n  " if narrow else " "
    for position, one in enumerate(devices[0]):
        ranks = sorted({cell[position].rank for cell in devices})
        level = "idle" if one.level == "none" else one.level
        said = f"{one.role}[{runs(ranks)}]:{between}{level}, {human(one.bytes)}"
        lines.append(Text(said, style="bold" if one.role in NEEDS[stage] else ""))
    return Text("\n").join(lines) if lines else Text("–")


def _peak(plan: Plan, column: Column, all_columns: list[Column]) -> Text:
    """The peak of a column's memory; all cores of a node share one memory."""
    pool = column.pools[0]
    need = plan.memory.peak(pool)[1]
    shared = sum(pool in other.pools for other in all_columns) > 1
    style = "bold red" if need > FULL * pool.capacity else "green"
    share = f" ({need / pool.capacity:.0%})" if pool.capacity else ""
    return Text(f"{'all of the node: ' if shared else ''}{human(need)} of {human(pool.capacity)}{share}", style=style)


def _where(plan: Plan, role: str) -> str:
    """The devices of a role as a config would name them, or `cpu` for workers that are not pinned to cores."""
    placed = plan.map.roles[role]
    inventory = plan.map.inventory
    if placed.on_gpus or any(place.cores for place in placed.places):
        kind = "gpu " if placed.on_gpus else "cpu "
        return kind + format_devices(placed.devices, inventory)
    nodes = sorted({device.node for device in placed.devices})
    return "cpu" if len(inventory.nodes) == 1 else f"cpu of node{runs(nodes)}"


def _alike(plan: Plan) -> Iterable[tuple[DeviceMemory, ...]]:
    """Runs of pools whose fullest stage has the same items."""
    made: list[list[DeviceMemory]] = []
    for pool in plan.memory.pools:
        if made and (pool.gpu is None) == (made[-1][0].gpu is None) and _look(plan, pool) == _look(plan, made[-1][0]):
            made[-1].append(pool)
        else:
            made.append([pool])
    return [tuple(pools) for pools in made]


def _look(plan: Plan, pool: DeviceMemory) -> tuple[object, ...]:
    stage, _ = plan.memory.peak(pool)
    return pool.capacity, pool.gpu is None or pool.node, stage, tuple(_merged(plan, pool, stage))


def _merged(plan: Plan, pool: DeviceMemory, stage: Stage) -> list[tuple[tuple[str, str], int]]:
    """The items of a pool, summed over the workers of each role."""
    total: dict[tuple[str, str], int] = {}
    for part in plan.memory.parts[pool, stage]:
        key = part.role, part.what
        total[key] = total.get(key, 0) + part.bytes
    return [item for item in total.items() if item[1]]


def _names(plan: Plan, pools: tuple[DeviceMemory, ...]) -> str:
    if pools[0].gpu is None:
        nodes = [pool.node for pool in pools]
        return host(plan.map.inventory, nodes[0]).name if len(nodes) == 1 else f"node{runs(nodes)} memory"
    indices = [pool.gpu for pool in pools if pool.gpu is not None]
    return f"{pools[0].name.removesuffix(str(indices[0]))}{runs(indices)}"


def human(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
