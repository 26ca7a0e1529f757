"""Addresses and interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

_ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation: the route to it reveals this machine's own address; nothing is sent."""
_SIOCGIFADDR = 0x8915


def host_address() -> str:
    """The address at which other machines reach this one; in a Ray cluster, this node's address."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        found: str = ray.util.get_node_ip_address()
        return found
    return own_address()


def own_address(destination: str = _ELSEWHERE) -> str:
    """This machine's source address on the route to `destination`; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))  # on a UDP socket, connect only selects a route and sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address; None if it cannot be found."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
