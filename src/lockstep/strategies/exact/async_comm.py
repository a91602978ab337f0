"""Messages under way: buckets that go through the stages of a plan while the caller goes on computing.

In: a plan's stages and a rank's tensors. Out: the same messages, in the same order between any two ranks, whatever else
the ranks are doing in between; and every rank's slot on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.transfers import on_device
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds, ReduceSchedule, ReduceStage, plan

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

Bucket = Iterator[None]  # starts messages, yields while they travel, waits for them, starts the next ones


class InFlight:
    """Buckets under way. Every rank adds as many in the same order, and so takes all of them further in the same order:
    no message overtakes another, as NCCL needs it."""

    def __init__(self) -> None:
        self._under_way: list[Bucket] = []

    def add(self, bucket: Bucket) -> None:
        """Start a bucket, and take those before it a stage further. Collective."""
        started = self._further([bucket])
        self._under_way = self._further(self._under_way) + started

    def finish(self) -> None:
        """Take all of them to their end. Collective."""
        while self._under_way:
            self._under_way = self._further(self._under_way)

    @staticmethod
    def _further(buckets: list[Bucket]) -> list[Bucket]:
        """Those that are not at their end after one stage more."""
        return [bucket for bucket in buckets if next(bucket, bucket) is None]


class PendingSend:
    """Tensors to and from other ranks of a group, started together; kept alive until `wait` is through."""

    def __init__(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """With whom in the group, and what: contiguous; nobody sends what is empty."""
        self._kept = [tensor for _, tensor in [*sends, *receives]]
        operations = [
            dist.P2POp(how, tensor, group=group, group_peer=peer)
            for how, each in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in each
            if tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._kept = []


def gather_in_stages(
    own: Tensor, schedule: ReduceSchedule, rank: int, group: dist.ProcessGroup | None, then: Callable[[Tensor], None]
) -> Bucket:
    """Every rank's slot to every rank, from the last stage of a plan back to the first: the ranks that a stage has sent
    rows to give them back whole. `then` is given all slots [W, N], in the plan's order of this rank."""
    total = own.new_empty(len(schedule.layout), own.numel())
    before: dict[int, tuple[ReduceStage, int]] = {}  # by height, with the row where begins what the rank held before it
    first = 0
    for stage in schedule.stages(rank):
        before[stage.height] = (stage, first)
        first += stage.own_rows.start
    total[first] = own
    del own  # maybe all that was received with it
    for height in range(schedule.height, 0, -1):
        if height not in before:
            yield
            continue
        stage, first = before[height]
        whole = total[first + stage.own_rows.start : first + stage.own_rows.stop]
        sent = PendingSend(
            [(peer, whole) for peer, _ in stage.receives],
            [(peer, total[first + rows.start : first + rows.stop]) for peer, rows in stage.sends],
            group,
        )
        yield
        sent.wait()
    then(total)


class Gather:
    """Every rank's slot to every rank, in rank order."""

    def __init__(
        self, rank: int, ranks: int, group: dist.ProcessGroup | None = None, links: LinkSpeeds | None = None
    ) -> None:
        links = links or LinkSpeeds()
        self._rank, self._ranks, self._group = rank, ranks, group
        self._plan = plan(ranks, tuple(((0, r),) for r in range(ranks)), links.hosts) if links.tree(ranks) else None

    def bucket(self, own: Tensor, then: Callable[[Tensor], None]) -> Bucket:
        """A flat tensor of as many numbers on each rank. `then` is given those of all [W, N]."""
        if self._plan is None:
            total = own.new_empty(self._ranks, own.numel())
            total[self._rank] = own
            work = all_gather(total.view(-1), total[self._rank], group=self._group, async_op=True)
            yield
            work.wait()
            then(total)
        else:
            places = places_of(self._plan.order(self._rank), own.device)
            yield from gather_in_stages(
                own, self._plan, self._rank, self._group, lambda total: then(total.index_select(0, places))
            )


def places_of(order: Sequence[int], device: torch.device) -> Tensor:
    """Where each slot is, of slots in some order."""
    return on_device(sorted(range(len(order)), key=order.__getitem__), device)
