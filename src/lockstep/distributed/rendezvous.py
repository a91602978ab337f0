"""The rendezvous of ranks: the store they meet in, the network interface for their peers, the process groups.

In: a rank, the size of the job, an address, and the job's secret. Out: torch's default group, and a second one for
decisions; or `Unreached`, which describes the attempt. A store listens on one address only, connects within a time
limit, and is `Sealed`: torch's protocol has no authentication, so anyone who reaches the port can write, delete and
count, but nothing written without the secret is parsed, and no pickle sent without it is loaded.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.config.errors import CodedError, RunError
from lockstep.config.redaction import one_line
from lockstep.distributed import network, torch_internals


def open_store(host: str, port: int, several: bool, timeout_s: float) -> TCPStore:
    """Open a store on the address that `host` resolves to here; on all addresses only if several machines need it and
    the name resolves to the loopback on this one. Port 0: any. Errors: `NetworkError`."""
    address = network.address_of(host)
    inside = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    everywhere = several and inside
    try:
        every = "::" if ":" in address else "0.0.0.0"
        listener = _listener(every if everywhere else address, port)
    except OSError as caught:
        raise network.NetworkError(
            "LS7040", f"{host}:{port} cannot be opened on this machine: {caught.strerror}"
        ) from None
    port = int(listener.getsockname()[1])
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_alone(backend: str) -> None:
    """Create the default group of a job of one process, for engines that require one. Errors: `RunError`."""
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as caught:
        raise RunError(
            "LS7043",
            "strategy: needs a network interface even for one process, and none can be used "
            f"({one_line(caught, 120)}); bring up the loopback interface (ip link set lo up), or train with "
            "strategy=single",
        ) from caught


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


def connect_store(host: str, port: int, limit_s: float, timeout_s: float) -> TCPStore:
    """Connect to a store of another process, waiting until it answers. Errors: `NetworkError` after `limit_s`."""
    network.answers(host, port, limit_s)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Sealed:
    """A store with signed values. `namespace`: distinguishes equal keys of different jobs. Counters (`add`) are not
    signed. Errors: `RendezvousStateError` for values not written with the job's secret."""

    def __init__(self, store: Any, namespace: str, key: str) -> None:
        self._store, self._namespace, self._secret = store, namespace, key

    def within(self, prefix: str) -> Sealed:
        """Return a view with prefixed keys."""
        return Sealed(dist.PrefixStore(prefix, self._store), f"{self._namespace}/{prefix}", self._secret)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        return self._open(key, self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Compare and set; return the key's value afterwards. A missing key is set only if `expected` is empty;
        otherwise torch's stores return `expected`."""
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
        return network.seal(
            self._secret, f"{self._namespace}/{key}", value.encode() if isinstance(value, str) else bytes(value)
        )

    def _open(self, key: str, message: bytes) -> bytes:
        try:
            return network.unseal(self._secret, f"{self._namespace}/{key}", message)
        except network.ForgedError as caught:
            raise RendezvousStateError(str(caught)) from None


CONTROL = "control"  # description of the group for decisions


class Unreached(CodedError):
    """The other ranks were not reached, or not in time: one message for the user, exit status 1."""


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of a job's ranks. `init_method` as in torch: `tcp://host:port`, `env://`, `file:///path`."""

    init_method: str
    rank: int
    size: int
    several: bool  # several machines
    timeout: timedelta
    shared: bool = False  # several ranks per GPU, which NCCL refuses
    store: Any = None  # existing store to use instead of `init_method`

    def join(self, device: torch.device) -> dist.ProcessGroup:
        """Create the default group. Returns the group for decisions, which never wait behind gradients or for the
        device. Collective. Errors: `Unreached`."""
        # size of torch's flight recorder, which tells the collective that a hanging rank waits in
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
        cuda = device.type == "cuda"
        arguments: dict[str, Any] = {"device_id": device} if cuda and not self.shared else {}
        try:
            self._choose_interface()
            torch_internals.seal_pickles(network.secret_from_environment())
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda and not self.shared else "gloo",
                **self._store(),
                rank=self.rank,
                world_size=self.size,
                timeout=self.timeout,
                **arguments,
            )
            control = dist.new_group(backend="gloo", timeout=self.timeout, group_desc=CONTROL)
            assert control is not None
            return control
        except (RuntimeError, network.NetworkError) as caught:
            raise Unreached("LS7042", self._unreached(caught)) from caught

    def compare_secrets(self, group: dist.ProcessGroup) -> None:
        """Check that all ranks have the same secret, before any object is sent. Collective. Errors: `Unreached`, on
        every rank whose secret differs from some other rank's."""
        key = network.secret_from_environment()
        mine = torch.frombuffer(bytearray(network.seal(key, "ranks", b"")), dtype=torch.uint8)
        boxes = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(boxes, mine, group=group)
        for rank, theirs in enumerate(boxes):
            if (why := network.secret_difference(key, "ranks", theirs.numpy().tobytes())) is not None:
                raise Unreached(
                    "LS7041",
                    f"rank {self.rank} of {self.size} on {socket.gethostname()} cannot train with rank {rank}: "
                    f"{why}. Set the same secret for every process, or none (reference/security on the site)",
                )

    @property
    def address(self) -> tuple[str, str]:
        """Host and port of the meeting point; empty if it is a file."""
        if self.init_method == "env://":
            return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        host, _, port = self.init_method.partition("tcp://")[2].rpartition(":")
        return host, port

    def _store(self) -> dict[str, Any]:
        """Return the store arguments for `init_process_group`; rank 0 opens the store."""
        host, port = self.address
        if self.store is not None:
            return {"store": self.store}
        if not host or not port:
            return {"init_method": self.init_method}
        limit_s = self.timeout.total_seconds()
        agent_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds it
        if self.rank or (agent_holds_store and self.init_method == "env://"):
            store = connect_store(host, int(port), limit_s, limit_s)
        else:
            store = open_store(host, int(port), self.several, limit_s)
        return {"store": dist.PrefixStore("default_pg", store)}

    def _choose_interface(self) -> None:
        """Set the network interface of gloo and NCCL to the one that routes to the meeting point."""
        host, _ = self.address
        if not host or "GLOO_SOCKET_IFNAME" in os.environ:
            return
        limit_s = min(60.0, self.timeout.total_seconds())  # DNS may learn a container's name late
        interface = network.patiently(lambda: network.interface_to(host, several=self.several), limit_s)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            if interface != "lo":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)

    def _unreached(self, caught: Exception) -> str:
        host, port = self.address
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        address = network.interfaces().get(name or "")
        through = f"{name} ({address or 'which has no address here'})" if name else "an interface it chose itself"
        return (
            f"rank {self.rank} of {self.size} on {socket.gethostname()} did not reach the other ranks"
            f"{f' at {host}:{port}' if host else ''} within {self.timeout.total_seconds():g} s (launch.timeout_s), "
            f"through {through}: {one_line(caught, 300)}\nIs every process running, is the address that "
            f"of rank 0, and can the others reach this interface? GLOO_SOCKET_IFNAME chooses another one"
        )
