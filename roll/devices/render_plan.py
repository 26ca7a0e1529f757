"""Renders a plan as tables: devices as columns and phases as rows, then roles, step sizes and memory items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from roll.devices.inventory import Device
from roll.devices.memory import FULL, RUNTIME, DeviceMemory, host
from roll.devices.plan import Plan
from roll.devices.residency import NEEDS, Phase
from roll.devices.spec import format_devices, format_ranges
from roll.strategy.offload import Residency


@dataclass(frozen=True)
class Resident:
    """A worker on the devices of a column, in one phase."""

    role: str
    rank: int
    level: Residency
    bytes: int


@dataclass(frozen=True)
class Column:
    """Devices that hold the same roles at the same residency in every phase; their ranks may differ."""

    pools: tuple[DeviceMemory, ...]
    devices: tuple[Device, ...]
    cells: tuple[tuple[tuple[Resident, ...], ...], ...]
    """The workers on each device, for each phase."""


COLUMN_CHARS = 22
"""Width of a column: `actor_infer[10-15]:` and its frame."""


def render_plan(plan: Plan, width: int = 100) -> list[Table | Text]:
    """The output of `roll plan` for a terminal with `width` characters."""
    engines = plan.map.kind != "trainer only"
    summary = Text((f"Layout: trainer and engines are {plan.map.kind}. " if engines else "") + plan.offload_reason)
    tables = [render_roles(plan), render_sizes(plan), *render_ranks(plan), render_memory(plan), render_disk(plan)]
    return [*render_map(plan, width), summary, *tables]


def render_map(plan: Plan, width: int) -> list[Table]:
    """Devices as columns and phases as rows; several tables if not all columns fit."""
    found = columns(plan)
    fit = max((width - len("│ reference │")) // COLUMN_CHARS, 1)
    return [_map_table(plan, found[first : first + fit], found) for first in range(0, len(found), fit)]


def _map_table(plan: Plan, shown: list[Column], all_columns: list[Column]) -> Table:
    table = Table("phase", *(title(plan, column) for column in shown), show_lines=True)
    for number, phase in enumerate(plan.residency.phases):
        table.add_row(phase, *(_cell(phase, column.cells[number], len(shown) > 2) for column in shown))
    table.add_row("peak", *(_peak(plan, column, all_columns) for column in shown))
    return table


def render_roles(plan: Plan) -> Table:
    table = Table("role", "workers", "devices", "threads", "how")
    for role, how in plan.roles:
        role_placement = plan.map.roles[role]
        threads = sorted({placement.threads for placement in role_placement.placements})
        table.add_row(
            role, str(len(role_placement.workers)), Text(_where(plan, role)), "–".join(map(str, threads)), Text(how)
        )
    return table


def render_sizes(plan: Plan) -> Table:
    table = Table("size", "value")
    for size in plan.sizes:
        table.add_row(*map(Text, size))
    return table


def render_ranks(plan: Plan) -> list[Table]:
    """The memory items of one rank of each sharded role in its fullest phase."""
    sharded = {role: role_placement for role, role_placement in plan.map.roles.items() if role_placement.mesh is not None}
    if not sharded:
        return []
    table = Table("sharded role", "mesh", "fullest in", "part of a rank", "MiB")
    for role, role_placement in sharded.items():
        pool, name = _pool(plan, role_placement.workers[0][0]), role_placement.placements[0].name
        parts = {s: [p for p in plan.memory.parts[pool, s] if p.worker == name] for s in plan.residency.phases}
        phase = max(parts, key=lambda phase: sum(part.bytes for part in parts[phase]))
        role_cell, mesh, when = role, str(role_placement.mesh), str(phase)
        for part in parts[phase]:
            table.add_row(role_cell, mesh, when, part.what, _mib(part.bytes))
            role_cell = mesh = when = ""
        total = sum(part.bytes for part in parts[phase])
        table.add_row("", "", "", f"each of {len(role_placement.placements)}", Text(_mib(total), style="bold"))
        table.add_section()
    return [table]


def render_memory(plan: Plan) -> Table:
    """The items of every memory in its fullest phase."""
    table = Table("memory", "fullest in", "role", "part", "MiB")
    for pools in _equal_pools(plan):
        pool = pools[0]
        phase, total = plan.memory.peak(pool)
        name, when = _names(plan, pools), str(phase)
        for (role, what), size in _merged(plan, pool, phase):
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
    columns_so_far: list[Column] = []
    for device in _devices(plan):
        cells = tuple(_residents(plan, device, phase) for phase in plan.residency.phases)
        pool = _pool(plan, device)
        if columns_so_far and _continues_column(columns_so_far[-1], device, pool, cells):
            last = columns_so_far[-1]
            pools = last.pools if pool in last.pools else (*last.pools, pool)
            joined = tuple((*many, one) for many, one in zip(last.cells, cells, strict=True))
            columns_so_far[-1] = Column(pools, (*last.devices, device), joined)
        else:
            columns_so_far.append(Column((pool,), (device,), tuple((cell,) for cell in cells)))
    return columns_so_far


def title(plan: Plan, column: Column) -> str:
    """`gpu0-7`, `cpu0-1`, `node1:gpu0`; `cpu` for all cores of a node."""
    first, count = column.devices[0], len(column.devices)
    node = f"node{first.node}:" if len(plan.map.inventory.nodes) > 1 else ""
    whole = first.kind == "cpu" and count == plan.map.inventory.nodes[first.node].cores and not _pinned(plan, first)
    return f"{node}cpu" if whole else f"{node}{first.kind}{format_ranges([device.index for device in column.devices])}"


def _pinned(plan: Plan, device: Device) -> bool:
    """Whether a worker with a model is pinned to this core."""
    return any(
        placement.cores and device in worker
        for role_placement in plan.map.roles.values()
        if role_placement.strategy
        for worker, placement in zip(role_placement.workers, role_placement.placements, strict=True)
    )


def _devices(plan: Plan) -> list[Device]:
    """Devices of the roles with a model."""
    return sorted({device for role in plan.map.roles.values() if role.strategy for device in role.devices})


def _pool(plan: Plan, device: Device) -> DeviceMemory:
    for pool in plan.memory.pools:
        if pool.node == device.node and pool.gpu == (device.index if device.kind == "gpu" else None):
            return pool
    raise AssertionError(f"{device} has no memory")


def _residents(plan: Plan, device: Device, phase: Phase) -> tuple[Resident, ...]:
    sizes = _sizes(plan, _pool(plan, device), phase)
    residents = []
    for role_placement in plan.map.roles.values():
        for worker, placement in zip(role_placement.workers, role_placement.placements, strict=True):
            if role_placement.strategy and device in worker:
                size = sizes[placement.name]
                level = plan.residency.level(phase, placement.role, placement.rank)
                if size or level != "none":
                    residents.append(Resident(placement.role, placement.rank, level, size))
    return tuple(residents)


def _sizes(plan: Plan, pool: DeviceMemory, phase: Phase) -> Counter[str]:
    """Bytes per worker name in a pool."""
    sizes: Counter[str] = Counter()
    for part in plan.memory.parts[pool, phase]:
        if part.what != RUNTIME:
            sizes[part.worker] += part.bytes
    return sizes


def _continues_column(
    column: Column, device: Device, pool: DeviceMemory, cells: tuple[tuple[Resident, ...], ...]
) -> bool:
    last = column.devices[-1]
    if (last.node, last.kind, last.index + 1) != (device.node, device.kind, device.index):
        return False
    if pool.capacity != column.pools[-1].capacity:
        return False
    ranks = device.kind == "cpu"  # cores of one worker form one column, cores of two workers form two
    return [_signature(many[-1], ranks) for many in column.cells] == [_signature(cell, ranks) for cell in cells]


def _signature(cell: tuple[Resident, ...], ranks: bool) -> list[tuple[str, int, Residency, int]]:
    return [(resident.role, resident.rank if ranks else 0, resident.level, resident.bytes) for resident in cell]


def _cell(phase: Phase, devices: tuple[tuple[Resident, ...], ...], narrow: bool) -> Text:
    """The workers on each device of a column: `actor_infer[1-7]: all, 3.1 GiB`."""
    lines, between = [], "\n  " if narrow else " "
    for position, resident in enumerate(devices[0]):
        ranks = sorted({cell[position].rank for cell in devices})
        level = "idle" if resident.level == "none" else resident.level
        text = f"{resident.role}[{format_ranges(ranks)}]:{between}{level}, {human(resident.bytes)}"
        lines.append(Text(text, style="bold" if resident.role in NEEDS[phase] else ""))
    return Text("\n").join(lines) if lines else Text("–")


def _peak(plan: Plan, column: Column, all_columns: list[Column]) -> Text:
    """The peak of a column's memory; all cores of a node share one memory."""
    pool = column.pools[0]
    peak_bytes = plan.memory.peak(pool)[1]
    shared = sum(pool in other.pools for other in all_columns) > 1
    style = "bold red" if peak_bytes > FULL * pool.capacity else "green"
    share = f" ({peak_bytes / pool.capacity:.0%})" if pool.capacity else ""
    return Text(
        f"{'all of the node: ' if shared else ''}{human(peak_bytes)} of {human(pool.capacity)}{share}", style=style
    )


def _where(plan: Plan, role: str) -> str:
    """The devices of a role as a config would name them, or `cpu` for workers that are not pinned to cores."""
    role_placement = plan.map.roles[role]
    inventory = plan.map.inventory
    if role_placement.on_gpus or any(placement.cores for placement in role_placement.placements):
        kind = "gpu " if role_placement.on_gpus else "cpu "
        return kind + format_devices(role_placement.devices, inventory)
    nodes = sorted({device.node for device in role_placement.devices})
    return "cpu" if len(inventory.nodes) == 1 else f"cpu of node{format_ranges(nodes)}"


def _equal_pools(plan: Plan) -> Iterable[tuple[DeviceMemory, ...]]:
    """Runs of pools whose fullest phase has the same items."""
    groups: list[list[DeviceMemory]] = []
    for pool in plan.memory.pools:
        if (
            groups
            and (pool.gpu is None) == (groups[-1][0].gpu is None)
            and _pool_signature(plan, pool) == _pool_signature(plan, groups[-1][0])
        ):
            groups[-1].append(pool)
        else:
            groups.append([pool])
    return [tuple(pools) for pools in groups]


def _pool_signature(plan: Plan, pool: DeviceMemory) -> tuple[object, ...]:
    phase, _ = plan.memory.peak(pool)
    return pool.capacity, pool.gpu is None or pool.node, phase, tuple(_merged(plan, pool, phase))


def _merged(plan: Plan, pool: DeviceMemory, phase: Phase) -> list[tuple[tuple[str, str], int]]:
    """The items of a pool, summed over the workers of each role."""
    total: dict[tuple[str, str], int] = {}
    for part in plan.memory.parts[pool, phase]:
        key = part.role, part.what
        total[key] = total.get(key, 0) + part.bytes
    return [item for item in total.items() if item[1]]


def _names(plan: Plan, pools: tuple[DeviceMemory, ...]) -> str:
    if pools[0].gpu is None:
        nodes = [pool.node for pool in pools]
        return host(plan.map.inventory, nodes[0]).name if len(nodes) == 1 else f"node{format_ranges(nodes)} memory"
    indices = [pool.gpu for pool in pools if pool.gpu is not None]
    return f"{pools[0].name.removesuffix(str(indices[0]))}{format_ranges(indices)}"


def human(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
