"""Stores that processes meet in: opened on one address only, reached within a time, and with sealed values.

In: a host, a port and the job's secret. Out: torch's `TCPStore`s, and `Sealed`, which looks like one. torch's protocol
has no authentication: whoever reaches the port can write, delete and count, but nothing that was written without the
secret is parsed, and no pickle that came without it is loaded.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.distributed import network, secret


def opened(host: str, port: int, several: bool, timeout_s: float) -> TCPStore:
    """A store on the address that `host` has here; on every address only where several machines shall reach it and the
    name leads to the loopback on this one. Port 0: any. Errors: `NetworkError`."""
    address = network.address_of(host)
    inside = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    everywhere = several and inside
    try:
        listener = _listener(("::" if ":" in address else "0.0.0.0") if everywhere else address, port)
    except OSError as caught:
        raise network.NetworkError(f"{host}:{port} cannot be opened here: {caught.strerror}") from None
    port = int(listener.getsockname()[1])
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def connected(host: str, port: int, limit_s: float, timeout_s: float) -> TCPStore:
    """A store that another process holds, once it answers. Errors: `NetworkError` after `limit_s`."""
    network.answers(host, port, limit_s)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Sealed:
    """A store whose values bear the job's seal. `room` tells equal keys of different jobs apart. Counters (`add`) bear
    none. Errors: `RendezvousStateError` for what was not written with the job's secret."""

    def __init__(self, store: Any, room: str, key: str) -> None:
        self._store, self._room, self._secret = store, room, key

    def within(self, prefix: str) -> Sealed:
        """Keys of their own."""
        return Sealed(dist.PrefixStore(prefix, self._store), f"{self._room}/{prefix}", self._secret)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        return self._open(key, self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """The value that the key has now; b"" where it has none and one was expected."""
        before = self._seal(key, expected) if expected else b""
        value = self._store.compare_set(key, before.decode(), self._seal(key, desired).decode())
        return self._open(key, value) if value else b""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._open(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(list(keys), [self._seal(key, value) for key, value in zip(keys, values, strict=True)])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def _seal(self, key: str, value: str | bytes) -> bytes:
        return secret.sealed(
            self._secret, f"{self._room}/{key}", value.encode() if isinstance(value, str) else bytes(value)
        )

    def _open(self, key: str, message: bytes) -> bytes:
        try:
            return secret.opened(self._secret, f"{self._room}/{key}", message)
        except secret.ForgedError as caught:
            raise RendezvousStateError(str(caught)) from None
