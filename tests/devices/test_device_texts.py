"""What may be written as `devices`, and what is said to the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.errors import UserError
from roll.devices.inventory import Device, Inventory, Kind, this_machine
from roll.devices.spec import describe_devices, format_devices, format_ranges, parse_devices


def machines(*counts: tuple[int, int]) -> Inventory:
    """Nodes with so many cores and GPUs."""
    return Inventory.of(
        {
            "id": f"id-{n}",
            "cores": cores,
            "gpus": gpus,
            "memory_bytes": 64 << 30,
            "gpu_bytes": 80 << 30,
            "aliases": (f"host-{n}", f"10.0.0.{n}"),
        }
        for n, (cores, gpus) in enumerate(counts)
    )


CPU = machines((2, 0))
EIGHT = machines((32, 8))
TWO = machines((32, 8), (32, 8))
MIXED = machines((16, 4), (16, 0))


def gpus(node: int, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(node, "gpu", index) for index in indices)


def cores(node: int, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(node, "cpu", index) for index in indices)


@pytest.mark.parametrize(
    ("inventory", "text", "devices"),
    [
        (CPU, "0", cores(0, 0)),
        (CPU, "0-1", cores(0, 0, 1)),
        (CPU, "cpu:1", cores(0, 1)),
        (EIGHT, "0-7", gpus(0, *range(8))),
        (EIGHT, " 0 , 2,4 ", gpus(0, 0, 2, 4)),
        (EIGHT, "5,0-1", gpus(0, 0, 1, 5)),
        (EIGHT, "cpu:0-1,31", cores(0, 0, 1, 31)),
        (EIGHT, "node0:3", gpus(0, 3)),
        (EIGHT, "host-0:3", gpus(0, 3)),
        (TWO, "0-15", gpus(0, *range(8)) + gpus(1, *range(8))),
        (TWO, "7-8", gpus(0, 7) + gpus(1, 0)),
        (TWO, "node1:0-2,5", gpus(1, 0, 1, 2, 5)),
        (TWO, "10.0.0.1:0", gpus(1, 0)),
        (TWO, "node0:0-1,node1:0-1", gpus(0, 0, 1) + gpus(1, 0, 1)),
        (TWO, "node1:cpu:2", cores(1, 2)),
        (TWO, "cpu:31-32", cores(0, 31) + cores(1, 0)),
        (MIXED, "node1:0-3", cores(1, 0, 1, 2, 3)),
    ],
)
def test_numbers_name_devices(inventory: Inventory, text: str, devices: tuple[Device, ...]) -> None:
    assert parse_devices(text, inventory, "devices") == devices


def test_words_are_left_to_the_map() -> None:
    assert parse_devices("auto", TWO, "devices") == "auto"
    assert parse_devices(" cpu ", TWO, "devices") == "cpu"


def test_a_role_of_cores_counts_cores_where_there_are_gpus() -> None:
    assert parse_devices("node1:8-9", TWO, "roles.reward.devices", cores=True) == cores(1, 8, 9)


@pytest.mark.parametrize(
    ("inventory", "text", "parts"),
    [
        (CPU, "", ["devices is ''", "'' in it is no device", "write auto, cpu, or numbers such as 0-7"]),
        (CPU, "all", ["'all' in it is no device"]),
        (CPU, "0,,1", ["'' in it is no device"]),
        (CPU, "0-", ["'0-' in it is no device"]),
        (CPU, "-1", ["'-1' in it is no device"]),
        (CPU, "gpu0", ["'gpu0' in it is no device"]),
        (CPU, ":0", ["':0' in it is no device"]),
        (CPU, "a:b:c:0", ["'a:b:c:0' in it is no device"]),
        (TWO, "node0:node1:0", ["names two nodes"]),
        (CPU, "1-0", ["the range '1-0' in it runs backwards: write 0-1"]),
        (CPU, "0,0-1", ["names cpu0 twice: write every device once"]),
        (TWO, "8,node1:0", ["names node1:gpu0 twice"]),
        (CPU, "2", ["there is no device 2: there are 2 devices here: 0-1 (cpu cores)"]),
        (machines((1, 0)), "1", ["there is 1 device here: 0 (cpu cores)"]),
        (EIGHT, "0-999999999999", ["there is no device 999999999999: there are 8 devices here: 0-7 (gpus)"]),
        (EIGHT, "cpu:32", ["there are 32 devices here: 0-31 (cpu cores)"]),
        (TWO, "node1:8", ["there is no device 8: there are 8 devices on node1: 0-7 (gpus)"]),
        (TWO, "16", ["there are 16 devices here: node0:0-7 (gpus), node1:0-7 (gpus)"]),
        (TWO, "node2:0", ["there is no node 'node2': the nodes are node0, node1"]),
        (EIGHT, "0,cpu:1", ["mixes GPUs and CPU cores", "there are 8 devices here"]),
        (MIXED, "3-4", ["mixes GPUs and CPU cores", "node0:0-3 (gpus), node1:0-15 (cpu cores)"]),
    ],
)
def test_what_is_wrong_is_said(inventory: Inventory, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_devices(text, inventory, "roles.x.devices")
    assert str(caught.value).startswith(f"roles.x.devices is {text!r}")
    for part in parts:
        assert part in str(caught.value)


INVENTORIES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4).map(
    lambda counts: machines(*counts)
)


@given(INVENTORIES, st.data())
def test_what_is_formatted_is_read_back(inventory: Inventory, data: st.DataObject) -> None:
    kinds: list[Kind] = [kind for kind in ("cpu", "gpu") if inventory.devices(kind)]
    everything = inventory.devices(data.draw(st.sampled_from(kinds)))
    devices = data.draw(st.sets(st.sampled_from(everything), min_size=1))
    text = format_devices(devices, inventory)
    assert parse_devices(text, inventory, "devices") == tuple(sorted(devices))


@given(INVENTORIES, st.data())
def test_numbers_without_a_node_count_through_all_nodes(inventory: Inventory, data: st.DataObject) -> None:
    counted = [
        Device(n, node.kind, index) for n, node in enumerate(inventory.nodes) for index in range(node.count(node.kind))
    ]
    number = data.draw(st.integers(0, len(counted) - 1))
    assert parse_devices(str(number), inventory, "devices") == (counted[number],)
    with pytest.raises(UserError):
        parse_devices(str(len(counted)), inventory, "devices")


@given(st.text(alphabet="0123456789-,:cpunode ", max_size=12))
def test_any_text_is_devices_or_a_users_error(text: str) -> None:
    try:
        found = parse_devices(text, TWO, "devices")
    except UserError:
        return
    if not isinstance(found, str):
        assert len(set(found)) == len(found) > 0
        assert all(device.index < TWO.nodes[device.node].count(device.kind) for device in found)


@given(st.sets(st.integers(0, 40)))
def test_runs_name_every_number(numbers: set[int]) -> None:
    named = [
        range(int(p.split("-")[0]), int(p.split("-")[-1]) + 1) for p in format_ranges(sorted(numbers)).split(",") if p
    ]
    assert [number for run in named for number in run] == sorted(numbers)


def test_devices_have_short_names() -> None:
    assert EIGHT.name(Device(0, "gpu", 3)) == "gpu3"
    assert TWO.name(Device(1, "cpu", 3)) == "node1:cpu3"
    assert describe_devices(EIGHT, cores=True) == "there are 32 devices here: 0-31 (cpu cores)"


def test_this_machine_has_cores_and_memory() -> None:
    (node,) = this_machine().nodes
    assert node.name == "node0"
    assert node.id == ""
    assert node.cores >= 1
    assert node.memory_bytes > 1 << 28
    assert (node.gpus > 0) == (node.gpu_bytes > 0)
