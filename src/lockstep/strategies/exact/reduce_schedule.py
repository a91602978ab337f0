"""The messages that bring partial sums together: who sends what to whom, stage by stage, at any number of ranks.

In: the partial sums that each rank holds, and which host each rank is on. Out: a `ReduceSchedule`, from which the
strategies send and receive (`reduction.py`) and `benchmarks/exchange_table.py` counts; and buckets that go through its
stages while the caller goes on computing, in the same order between any two ranks.

Ranks are grouped like the leaves of the tree: neighbours first, within a host, then hosts. A vector is cut into slots,
one a rank. A stage brings the groups within a group together: of two ranks that held the same slots each keeps the half
that it will answer for and sends the other half. So a rank sends half of what it holds, then a quarter, and the large
pieces stay on its host; log2(W) stages instead of W - 1 messages. Which partial sums are added where does not change a
bit: only siblings of the one tree ever are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.run import Run
from lockstep.distributed.torch_internals import by_host, on_device
from lockstep.distributed.world import World

Node = tuple[int, int]  # (level, index): the sum of the leaves [index * 2^level, (index + 1) * 2^level) that exist

AT_ONCE = 8  # ranks of one host that send to each other directly


@dataclass(frozen=True)
class LinkSpeeds:
    """The schedule by which sums travel between the ranks of a process group."""

    all_reduce: str = "auto"  # as `strategy.all_reduce` says
    hosts: tuple[str, ...] = ()  # of each rank; none: all on one

    def tree(self, ranks: int) -> bool:
        """Whether they travel in stages: between hosts, and where one all-to-all would be many messages."""
        if self.all_reduce == "auto":
            return ranks > AT_ONCE or len(set(self.hosts)) > 1
        return self.all_reduce == "hierarchical"


def links(run: Run, world: World, group: dist.ProcessGroup | None = None) -> LinkSpeeds:
    """The speeds of the links between the ranks of a group, by default of all ranks."""
    ranks = range(world.size) if group is None else dist.get_process_group_ranks(group)
    return LinkSpeeds(run.strategy.all_reduce, tuple(world.hosts[rank] for rank in ranks))


def lift(node: Node, leaves: int) -> Node:
    """Raise a partial sum to the level at which it has a sibling, or to the root: where the sibling covers no leaf, a
    node is its parent already."""
    level, index = node
    while (1 << level) < leaves <= (index ^ 1) << level:
        level, index = level + 1, index >> 1
    return level, index


def sibling(node: Node) -> Node:
    """The other child of its parent."""
    return node[0], node[1] ^ 1


def parent(node: Node) -> Node:
    """The node that it makes with its sibling."""
    return node[0] + 1, node[1] >> 1


def merged(nodes: Iterable[Node], leaves: int) -> tuple[Node, ...]:
    """Merge siblings among partial sums as far as possible, in leaf order."""
    nodes_after: set[Node] = set()
    for node in nodes:
        node = lift(node, leaves)
        while sibling(node) in nodes_after:
            nodes_after.remove(sibling(node))
            node = lift(parent(node), leaves)
        nodes_after.add(node)
    return tuple(sorted(nodes_after, key=lambda node: node[1] << node[0]))


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks that together hold every slot of the sum of what they hold, each slot once."""

    ranks: range
    nodes: tuple[Node, ...]  # the partial sums that they come to
    parts: tuple[RankGroup, ...]  # the groups that it is made of; none for one rank
    height: int  # stages until it has come together

    def answers(self, other: range, rank: int) -> int:
        """The rank of this group that holds what `rank`, of another group beside it, will answer for: that of the same
        place, and where this group is larger one of several by turns."""
        at = rank - other.start
        places = range(at % len(self.ranks), len(self.ranks), len(other))
        return self.ranks[places[at % len(places)]]


@dataclass(frozen=True)
class ReduceStage:
    """One rank's work when the parts of a group come together. Rows are slots, counted within those that the rank
    holds before; a message is of all `nodes` of its sender's part."""

    height: int
    nodes: tuple[Node, ...]  # the partial sums that the rank holds before
    own_rows: slice  # rows that it goes on with
    sends: tuple[tuple[int, slice], ...]  # to whom, which rows
    receives: tuple[tuple[int, tuple[Node, ...]], ...]  # sender and partial sums; as many rows as this rank keeps

    @property
    def rows(self) -> int:
        return self.own_rows.stop - self.own_rows.start


class ReduceSchedule:
    """The communication schedule of one group of ranks. `layout`: the partial sums that each rank has, in leaf order;
    maybe none."""

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
        """The result of all ranks' partial sums: the root, where every leaf is there."""
        return self.root.nodes

    @property
    def height(self) -> int:
        """Stages, the same on every rank; one that has nothing to do in a stage waits for its turn."""
        return self.root.height

    def order(self, rank: int) -> tuple[int, ...]:
        """The slots as the rank lays them out: then every message is one piece of memory."""
        return self._slots(self._alone[rank], rank)

    def stages(self, rank: int) -> tuple[ReduceStage, ...]:
        """One rank's stages, from the first to the last. To gather, it goes back: it sends what it received and
        receives what it sent."""
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
        """The slots that a rank holds when its group has come together."""
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
        """For each rank of `part` the ranks of `other` (or the rank itself) that continue with what it holds."""
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
        """Between two hosts, as near to the middle as can be; on one host in halves, where fewest partial sums are
        left, and a few ranks into single ones."""
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
        """The number of partial sums of two halves."""
        halves = (range(ranks.start, cut), range(cut, ranks.stop))
        return sum(len(merged(chain.from_iterable(self.layout[rank] for rank in half), self.leaves)) for half in halves)


@lru_cache(maxsize=64)
def plan(leaves: int, layout: tuple[tuple[Node, ...], ...], hosts: tuple[str, ...] = ()) -> ReduceSchedule:
    """The schedule of a layout, from a cache; making one takes longer than a step of a small model."""
    return ReduceSchedule(leaves, layout, hosts)


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
        """Start the messages. `sends`, `receives`: peers in the group, and contiguous tensors; empty ones are not
        sent."""
        self._arrivals: list[tuple[Tensor, Tensor]] = []  # where it is wanted, and the host's memory that it comes to
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
    """Every rank's slot to every rank of the job, in rank order."""

    def __init__(self, rank: int, ranks: int, links: LinkSpeeds) -> None:
        self._rank, self._ranks = rank, ranks
        self._plan = plan(ranks, tuple(((0, r),) for r in range(ranks)), links.hosts) if links.tree(ranks) else None

    def bucket(self, own: Tensor, then: Callable[[Tensor], None]) -> Bucket:
        """A flat tensor of as many numbers on each rank. `then` is given those of all [W, N]."""
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
    """Where each slot is, of slots in some order."""
    return on_device(sorted(range(len(order)), key=order.__getitem__), device)
