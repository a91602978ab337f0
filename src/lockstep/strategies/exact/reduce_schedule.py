"""The communication schedule of partial sums: who sends what to whom, stage by stage, for any number of ranks.

In: the partial sums that each rank holds, and each rank's host. Out: a `ReduceSchedule`, which the strategies execute
(`exchange.py`) and `benchmarks/exchange_table.py` counts; and buckets that pass through its stages while the caller
keeps computing, in the same order between any two ranks.

Ranks are grouped like the leaves of the tree: neighbours first, within a host, then hosts. A vector is divided into
slots, one per rank. Each stage merges the groups within a larger group: two ranks that hold the same slots keep one
half each and send the other half. So a rank sends half of its data, then a quarter, and the large messages stay on its
host; log2(W) stages instead of W - 1 messages. The grouping does not change a bit, because only siblings of the one
tree are ever added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.sections import StrategySection
from lockstep.distributed.torch_internals import by_host, on_device
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import Node, merged

AT_ONCE = 8  # maximum number of ranks of one host that exchange directly


@dataclass(frozen=True)
class LinkSpeeds:
    """Inputs to the choice of schedule: the user's option, and the hosts of a group's ranks."""

    all_reduce: str = "auto"  # `strategy.all_reduce`
    hosts: tuple[str, ...] = ()  # host of each rank; empty: all on one

    def tree(self, ranks: int) -> bool:
        """Whether to reduce in stages: between hosts, and if one all-to-all would need many messages."""
        if self.all_reduce == "auto":
            return ranks > AT_ONCE or len(set(self.hosts)) > 1
        return self.all_reduce == "hierarchical"


def links(strategy: StrategySection, world: World, group: dist.ProcessGroup | None = None) -> LinkSpeeds:
    """Return the `LinkSpeeds` of a group, by default of all ranks."""
    ranks = range(world.size) if group is None else dist.get_process_group_ranks(group)
    return LinkSpeeds(strategy.all_reduce, tuple(world.hosts[rank] for rank in ranks))


@dataclass(frozen=True, eq=False)
class RankGroup:
    """A group of ranks that together hold every slot of their sum exactly once."""

    ranks: range
    nodes: tuple[Node, ...]  # the partial sums after merging
    parts: tuple[RankGroup, ...]  # subgroups; empty for one rank
    height: int  # stages until it is merged

    def answers(self, other: range, rank: int) -> int:
        """Return the rank of this group that sends to `rank` of the neighbouring group `other`: the one at the same
        position; if this group is larger, one of several in turn."""
        at = rank - other.start
        places = range(at % len(self.ranks), len(self.ranks), len(other))
        return self.ranks[places[at % len(places)]]


@dataclass(frozen=True)
class ReduceStage:
    """One rank's work when the parts of a group merge. Rows are slots, numbered within those that the rank holds
    before; a message contains all `nodes` of its sender's part."""

    height: int
    nodes: tuple[Node, ...]  # the partial sums that the rank holds before
    own_rows: slice  # rows that it continues with
    sends: tuple[tuple[int, slice], ...]  # (receiver, rows)
    receives: tuple[tuple[int, tuple[Node, ...]], ...]  # (sender, partial sums), with the rows that this rank keeps

    @property
    def rows(self) -> int:
        return self.own_rows.stop - self.own_rows.start


class ReduceSchedule:
    """The communication schedule of one group of ranks. `layout`: the partial sums that each rank has, in leaf order;
    may be empty."""

    def __init__(self, leaves: int, layout: tuple[tuple[Node, ...], ...], hosts: tuple[str, ...] = ()) -> None:
        self.leaves, self.layout, self._hosts = leaves, layout, hosts
        self._above: dict[RankGroup, RankGroup] = {}
        self._row_shares: dict[tuple[RankGroup, RankGroup], Mapping[int, list[int]]] = {}
        self._rows: dict[tuple[RankGroup, int], tuple[int, ...]] = {}
        self._stages: dict[int, tuple[ReduceStage, ...]] = {}
        self._alone: dict[int, RankGroup] = {}
        self.root = self._grouped(range(len(layout)))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The partial sums after the last stage: the root if every leaf is included."""
        return self.root.nodes

    @property
    def height(self) -> int:
        """Number of stages, the same on every rank; ranks without work in a stage idle."""
        return self.root.height

    def order(self, rank: int) -> tuple[int, ...]:
        """Return the order of the slots on this rank, in which every message is contiguous."""
        return self._slots(self._alone[rank], rank)

    def stages(self, rank: int) -> tuple[ReduceStage, ...]:
        """Return one rank's stages, first to last. A gather runs them in reverse, with sends and receives swapped."""
        if rank not in self._stages:
            planned: list[ReduceStage] = []
            part = self._alone[rank]
            while part is not self.root:
                group = self._above[part]
                planned.append(self._stage(group, part, rank))
                part = group
            self._stages[rank] = tuple(planned)
        return self._stages[rank]

    def _stage(self, group: RankGroup, part: RankGroup, rank: int) -> ReduceStage:
        sends: list[tuple[int, slice]] = []
        at, own_rows = 0, slice(0, 0)
        for other in group.parts:
            for peer in self._peers(part, other).get(rank, ()):
                rows = slice(at, at := at + len(self._slots(group, peer)))
                if peer == rank:
                    own_rows = rows
                else:
                    sends.append((peer, rows))
        others = [other for other in group.parts if other is not part]
        receives = [(other.answers(part.ranks, rank), other.nodes) for other in others]
        return ReduceStage(group.height, part.nodes, own_rows, tuple(sends), tuple(receives))

    def _slots(self, group: RankGroup, rank: int) -> tuple[int, ...]:
        """The slots that a rank holds after its group has merged."""
        if group is self.root:
            return (rank,)
        if (group, rank) not in self._rows:
            above = self._above[group]
            slots = [
                self._slots(above, peer) for other in above.parts for peer in self._peers(group, other).get(rank, ())
            ]
            self._rows[group, rank] = tuple(chain.from_iterable(slots))
        return self._rows[group, rank]

    def _peers(self, part: RankGroup, other: RankGroup) -> Mapping[int, list[int]]:
        """Map each rank of `part` to the ranks of `other` (or to itself) that continue with its data."""
        if part is other:
            return {rank: [rank] for rank in part.ranks}
        if (part, other) not in self._row_shares:
            shares: dict[int, list[int]] = {}
            for peer in other.ranks:
                shares.setdefault(part.answers(other.ranks, peer), []).append(peer)
            self._row_shares[part, other] = shares
        return self._row_shares[part, other]

    # -- groups ------------------------------------------------------------------------------------------------------

    def _grouped(self, ranks: range) -> RankGroup:
        if len(ranks) == 1:
            group = RankGroup(ranks, merged(self.layout[ranks.start], self.leaves), (), 0)
            self._alone[ranks.start] = group
            return group
        parts = tuple(self._grouped(part) for part in self._cut(ranks))
        nodes = merged(chain.from_iterable(part.nodes for part in parts), self.leaves)
        group = RankGroup(ranks, nodes, parts, 1 + max(part.height for part in parts))
        self._above |= dict.fromkeys(parts, group)
        return group

    def _cut(self, ranks: range) -> list[range]:
        """Split ranks: between two hosts, as close to the middle as possible; on one host into halves with the fewest
        partial sums left; a few ranks into single ones."""
        hosts = self._hosts
        between = [r for r in ranks[1:] if hosts[r] != hosts[r - 1]] if hosts else []
        if not between and len(ranks) <= AT_ONCE:
            return [range(rank, rank + 1) for rank in ranks]
        middle = (ranks.start + ranks.stop) / 2
        between = between or [int(middle), int(middle + 0.5)]
        near = min(abs(cut - middle) for cut in between)
        cut = min((c for c in between if abs(c - middle) == near), key=lambda c: self._left(ranks, c))
        return [range(ranks.start, cut), range(cut, ranks.stop)]

    def _left(self, ranks: range, cut: int) -> int:
        """The number of partial sums left in the two halves."""
        halves = (range(ranks.start, cut), range(cut, ranks.stop))
        return sum(len(merged(chain.from_iterable(self.layout[rank] for rank in half), self.leaves)) for half in halves)


@lru_cache(maxsize=64)
def plan(leaves: int, layout: tuple[tuple[Node, ...], ...], hosts: tuple[str, ...] = ()) -> ReduceSchedule:
    """Return the schedule of a layout, cached; creating one takes longer than a step of a small model."""
    return ReduceSchedule(leaves, layout, hosts)


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

Bucket = Iterator[None]  # starts messages, yields while they travel, waits for them, starts the next ones


class InFlight:
    """Buckets in flight. All ranks enqueue the same buckets in the same order, so messages never overtake each other,
    as NCCL requires."""

    def __init__(self) -> None:
        self._under_way: list[Bucket] = []

    def add(self, bucket: Bucket) -> None:
        """Start a bucket, and advance the earlier ones by a stage. Collective."""
        started = self._further([bucket])
        self._under_way = self._further(self._under_way) + started

    def finish(self) -> None:
        """Complete all buckets. Collective."""
        while self._under_way:
            self._under_way = self._further(self._under_way)

    @staticmethod
    def _further(buckets: list[Bucket]) -> list[Bucket]:
        """Advance by one stage; return the buckets that are not complete."""
        return [bucket for bucket in buckets if next(bucket, bucket) is None]


class PendingSend:
    """Point-to-point messages to and from other ranks of a group, started together; `wait` completes them and frees
    their buffers."""

    def __init__(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Start the messages. `sends`, `receives`: (peer in the group, contiguous tensor); empty tensors are not
        sent."""
        self._arrivals: list[tuple[Tensor, Tensor]] = []  # (destination, receive buffer in host memory)
        if any(by_host(tensor, group) for _, tensor in [*sends, *receives]):
            sends = [(peer, tensor.cpu()) for peer, tensor in sends]
            hosts = [(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in receives]
            self._arrivals = [(tensor, host) for (_, tensor), (_, host) in zip(receives, hosts, strict=True)]
            receives = hosts
        self._buffers = [tensor for _, tensor in [*sends, *receives]]
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
        for tensor, host in self._arrivals:
            tensor.copy_(host)
        self._buffers, self._arrivals = [], []


def gather_in_stages(
    own: Tensor, schedule: ReduceSchedule, rank: int, group: dist.ProcessGroup | None, then: Callable[[Tensor], None]
) -> Bucket:
    """All-gather every rank's slot by running the stages of a schedule in reverse: each rank returns the completed rows
    to the ranks it received from. `then` receives all slots [W, N], in this rank's order of the schedule."""
    total = own.new_empty(len(schedule.layout), own.numel())
    before: dict[int, tuple[ReduceStage, int]] = {}  # by height, with the first row that the rank held before it
    first = 0
    for stage in schedule.stages(rank):
        before[stage.height] = (stage, first)
        first += stage.own_rows.start
    total[first] = own
    del own  # may free a whole receive buffer
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
    """All-gather of every rank's slot over all ranks of the job, in rank order."""

    def __init__(self, rank: int, ranks: int, links: LinkSpeeds) -> None:
        self._rank, self._ranks = rank, ranks
        self._plan = plan(ranks, tuple(((0, r),) for r in range(ranks)), links.hosts) if links.tree(ranks) else None

    def bucket(self, own: Tensor, then: Callable[[Tensor], None]) -> Bucket:
        """Gather a flat tensor of equal size from each rank. `then` receives all of them [W, N]."""
        if self._plan is None:
            total = own.new_empty(self._ranks, own.numel())
            total[self._rank] = own
            work = all_gather(total.view(-1), total[self._rank], async_op=True)
            yield
            work.wait()
            then(total)
        else:
            places = places_of(self._plan.order(self._rank), own.device)
            yield from gather_in_stages(
                own, self._plan, self._rank, None, lambda total: then(total.index_select(0, places))
            )


def places_of(order: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each slot in `order`."""
    return on_device(sorted(range(len(order)), key=order.__getitem__), device)
