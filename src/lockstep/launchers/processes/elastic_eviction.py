"""Eviction: a machine that computed wrongly leaves a job that goes on (`sdc_check.on_difference: evict`).

In: where the machines of the job meet. Out: the others form again at once and wait for one machine fewer; this one is
not let in again, and keeps what the job needs of it until the job is over: the store, and the lock of OUTPUT.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp

from lockstep.config.errors import STOPPED
from lockstep.config.run import RunError
from lockstep.distributed.stores import Sealed
from lockstep.launchers.processes.elastic_rendezvous_state import Backend


class Leaving:
    """This part of `ElasticRendezvous`."""

    _node: Any
    _job: Sealed
    _kept: Backend
    _inner: DynamicRendezvousHandler
    _call: Callable[[Callable[[], Any]], Any]
    limits: Any
    num_nodes_waiting: Callable[[], int]
    is_closed: Callable[[], bool]
    end: Callable[[int, str], None]

    def leave(self) -> None:
        """This machine leaves, and is not let in again."""
        inner: Any = self._inner
        self._call(lambda: self._job.add(f"excluded/{self._node.host}", 1))
        self._call(lambda: self._kept.exclude(self._node.host))
        inner._stop_heartbeats()
        until = inner._get_deadline(timedelta(seconds=10))
        self._call(lambda: inner._op_executor.run(_RendezvousExitOp(), until))

    def refuse(self) -> None:
        """Errors: `RunError`, if this machine has left the job."""
        if self._call(lambda: self._job.check([f"excluded/{self._node.host}"])):
            raise RunError(f"{self._node.host} was taken out of this job, because it computed wrongly (guard)")

    def hold(self, asked: Callable[[], bool]) -> None:
        """After `leave`: keep the store, and OUTPUT, where they are this machine's to keep, until the job is over.
        `asked`: whether somebody here wants it to stop."""
        inner: Any = self._inner
        seen = time.monotonic()
        while (self._node.holds or self._node.place == 0) and not self.is_closed():
            if self.num_nodes_waiting() or inner._state_holder.state.participants:
                seen = time.monotonic()
            elif time.monotonic() - seen > self.limits.join:
                return  # nobody is left
            if asked():
                self.end(STOPPED, "stopped on request")
            time.sleep(0.5)
        time.sleep(2)  # until the last of them has read that
