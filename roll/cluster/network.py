"""Addresses and interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

_ELSEWHERE = "192.0.2.1"
"""An address kept for documentation: asking the way there tells the address of this machine, and sends nothing."""
_SIOCGIFADDR = 0x8915


def host_address() -> str:
    """Where other machines reach this one: in a cluster of Ray, where its nodes do."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        found: str = ray.util.get_node_ip_address()
        return found
    return own_address()


def own_address(destination: str = _ELSEWHERE) -> str:
    """This machine's address on the way to another: the one at which others reach it. 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))  # of a datagram socket: chooses the way, sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface whose address that is; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
