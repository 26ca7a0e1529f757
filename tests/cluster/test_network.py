"""Addresses and interfaces of this machine."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest

from roll.cluster.network import host_address, interface_of, own_address


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("192.0.2.1") is None


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_in_a_cluster_of_ray_this_machine_is_where_its_nodes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(is_initialized=lambda: True, util=SimpleNamespace(get_node_ip_address=lambda: "10.1.2.3"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert host_address() == "10.1.2.3"
