"""From where the ranks meet to a process group: the store, the interface that peers reach this rank at, the backends.

In: a rank, the size of the job, and an address. Out: torch's default group, and a second one for decisions; or
`Unreached`, which says what this rank tried.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.redaction import one_line
from lockstep.distributed import network, secret, stores, torch_internals

CONTROL = "control"  # the group on which decisions travel


class Unreached(Exception):
    """The other ranks were not found, or not in time: one message for the user, exit status 1."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a job meet. `init_method` as torch has it: `tcp://host:port`, `env://`, `file:///path`."""

    init_method: str
    rank: int
    size: int
    several: bool  # machines
    timeout: timedelta
    shared: bool = False  # GPUs, by several ranks each: NCCL refuses that
    store: Any = None  # that the ranks meet in, where one is held for them; then `init_method` is not used

    def join(self, device: torch.device) -> dist.ProcessGroup:
        """Make the default group. Returns the group for decisions: they never wait behind gradients or for the device.
        Collective. Errors: `Unreached`."""
        # torch's flight recorder remembers the newest collectives: what a rank waits in when it does not move
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
        cuda = device.type == "cuda"
        arguments: dict[str, Any] = {"device_id": device} if cuda and not self.shared else {}
        try:
            self._choose_interface()
            torch_internals.seal_pickles(secret.from_environment())
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
            raise Unreached(self._unreached(caught)) from caught

    def compare_secrets(self, group: dist.ProcessGroup) -> None:
        """Before an object travels, which nobody could open that has another secret. Collective. Errors: `Unreached`,
        on every rank that has another one than some other rank."""
        key = secret.from_environment()
        mine = torch.frombuffer(bytearray(secret.sealed(key, "ranks", b"")), dtype=torch.uint8)
        boxes = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(boxes, mine, group=group)
        for rank, theirs in enumerate(boxes):
            if (why := secret.difference(key, "ranks", theirs.numpy().tobytes())) is not None:
                raise Unreached(
                    f"rank {self.rank} of {self.size} on {socket.gethostname()} cannot train with rank {rank}: {why}. "
                    "Set the same one for every process, or none (docs/security.md)"
                )

    @property
    def address(self) -> tuple[str, str]:
        """Host and port where the ranks meet; empty where they meet in a file."""
        if self.init_method == "env://":
            return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        host, _, port = self.init_method.partition("tcp://")[2].rpartition(":")
        return host, port

    def _store(self) -> dict[str, Any]:
        """Where `init_process_group` shall meet the others: a store, opened by rank 0 on the address it is known by."""
        host, port = self.address
        if self.store is not None:
            return {"store": self.store}
        if not host or not port:
            return {"init_method": self.init_method}
        limit_s = self.timeout.total_seconds()
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
        if self.rank or (held and self.init_method == "env://"):
            store = stores.connected(host, int(port), limit_s, limit_s)
        else:
            store = stores.opened(host, int(port), self.several, limit_s)
        return {"store": dist.PrefixStore("default_pg", store)}

    def _choose_interface(self) -> None:
        """Tell gloo and NCCL which interface the others reach this process at: the one towards where the ranks meet."""
        host, _ = self.address
        if not host or "GLOO_SOCKET_IFNAME" in os.environ:
            return
        limit_s = min(60.0, self.timeout.total_seconds())  # a container's name may take a while to be known
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
            f"rank {self.rank} of {self.size} on {socket.gethostname()} did not meet the other ranks"
            f"{f' at {host}:{port}' if host else ''} within {self.timeout.total_seconds():g} s (launch.timeout_s), "
            f"through {through}: {one_line(caught, 300)}\nIs every process running, is the address that "
            f"of rank 0, and can the others reach this interface? GLOO_SOCKET_IFNAME chooses another one"
        )
