"""Interfaces, routes and ports of this machine."""

import socket
import sys

from lockstep.distributed import network
from support.command import free_port
from support.messages import raises


def test_interfaces_and_routes() -> None:
    assert network.route_to("127.0.0.1") == "127.0.0.1"
    assert network.endpoint("[::1]:80") == ("::1", 80)
    with raises("LS7023", "'nothing0'", error=network.NetworkError):
        network.address_on("nothing0")
    if sys.platform == "linux":
        assert network.interface_to("127.0.0.1", several=False) == "lo"
        assert network.interface_to("127.0.0.1", several=True) != "lo"
    port = free_port()
    assert network.holds("127.0.0.1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not network.holds("127.0.0.1", port)
    with raises("LS7025", "127.0.0.1", str(port), "0.2", error=network.NetworkError):
        network.reach("127.0.0.1", port, 0.2, lambda text: None)
