"""The sum of gradients between ranks: collectives that add in the order of the reduction tree.

In: each rank's partial sums of the tree (`gradient_sum.py`), bucket by bucket. Out: the sum over ranks, or this
rank's slot of it, with the same bits for any number of ranks. Called by the strategies: `allreduce.py`,
`sharded_optimizer.py`, `pipeline.py`, `engines/hooked_ddp.py` and `engines/zero_sums.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.torch_internals import on_device
from lockstep.strategies.exact.gradient_sum import Node, ReductionTree, layout_of
from lockstep.strategies.exact.reduce_schedule import (
    Bucket,
    InFlight,
    LinkSpeeds,
    PendingSend,
    ReduceStage,
    all_gather,
    gather_in_stages,
    plan,
)


class Scatter:
    """Reduce-scatter in tree order: each rank gets its slot of the sum of partial nodes over ranks, bucket by bucket,
    while the caller keeps computing.

    A bucket goes through one all-to-all (each rank gets its slot of all partial nodes) and a sum in tree order; or,
    depending on `links`, through the stages of a `ReduceSchedule`, each with its own sum in tree order. Both send
    (W-1)/W of its bytes per rank, like a ring reduce-scatter (more if shares are not whole subtrees).
    `layout`: each rank's partial nodes, if not those of its equal share. `then` receives the slots of each bucket by
    node (the root if every leaf is included); it may return further messages.
    """

    def __init__(
        self,
        leaves: int,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None = None,
        links: LinkSpeeds | None = None,
        layout: tuple[tuple[Node, ...], ...] | None = None,
        then: Callable[[dict[Node, Tensor]], Iterable[None]] | None = None,
    ) -> None:
        self._rank, self._ranks, self._group, self._leaves = rank, ranks, group, leaves
        self._layout, links = layout or layout_of(leaves, ranks), links or LinkSpeeds()
        self.plan = plan(leaves, self._layout, links.hosts) if links.tree(ranks) else None
        self._travelling = InFlight()
        self._sums: list[dict[Node, Tensor]] = []
        self._then = then or self._keep

    def submit(
        self, nodes: Mapping[Node, Tensor], like: Tensor | None = None, order: tuple[int, ...] | None = None
    ) -> None:
        """Start a bucket. `nodes`: for each of this rank's partial nodes the slots of all ranks, [W, N], which the
        scatter owns from now on; `like` is a tensor of that shape if this rank may have no nodes. `order`: the ranks
        that the rows are for, if not 0, 1, 2, ... Collective."""
        like = next(iter(nodes.values())) if like is None else like
        if self.plan is not None:
            self._travelling.add(self._in_stages(nodes, like, order))
            return
        mine = [nodes[node] for node in self._layout[self._rank]]
        laid = like.new_empty(0)
        if mine:
            laid = mine[0] if len(mine) == 1 else torch.stack(mine, 1)
        self.submit_flat(laid.view(-1), [like.shape[1]] * self._ranks)

    def submit_flat(
        self,
        laid: Tensor,
        sizes: Sequence[int],
        layout: Sequence[Sequence[Node]] | None = None,
        then: Callable[[dict[Node, Tensor]], Iterable[None]] | None = None,
    ) -> None:
        """Start a bucket that goes through one all-to-all. `laid`: flat tensor with, rank by rank, that rank's slot of
        each of this rank's partial nodes; `sizes`: elements per node for each rank. `layout` and `then` override the
        scatter's for this bucket. Collective."""
        self._travelling.add(self._at_once(laid, sizes, layout or self._layout, then or self._then))

    def finish(self) -> list[dict[Node, Tensor]]:
        """Return this rank's slot of every bucket's sums [N], in the order of `submit`. Collective."""
        self._travelling.finish()
        sums, self._sums = self._sums, []
        return sums

    def _keep(self, nodes: dict[Node, Tensor]) -> Iterable[None]:
        """Store copies of the slots, so that the receive buffer can be freed."""
        self._sums.append({node: tensor.clone() for node, tensor in nodes.items()})
        return ()

    def _at_once(
        self,
        laid: Tensor,
        sizes: Sequence[int],
        layout: Sequence[Sequence[Node]],
        then: Callable[[dict[Node, Tensor]], Iterable[None]],
    ) -> Bucket:
        own, arriving = sizes[self._rank], [node for nodes in layout for node in nodes]
        received, work = laid, None
        if self._ranks > 1:
            received = laid.new_empty(len(arriving) * own)
            work = dist.all_to_all_single(
                received,
                laid,
                [len(nodes) * own for nodes in layout],
                [len(layout[self._rank]) * size for size in sizes],
                group=self._group,
                async_op=True,
            )
        yield
        if work is not None:
            work.wait()
        del laid, work
        tree = ReductionTree(self._leaves)
        for node, part in zip(arriving, received.view(len(arriving), own), strict=True):
            tree.place(node, [part])
        yield from then({node: tensors[0] for node, tensors in tree.nodes.items()})

    def _in_stages(self, nodes: Mapping[Node, Tensor], like: Tensor, order: tuple[int, ...] | None) -> Bucket:
        assert self.plan is not None
        own = self.plan.order(self._rank)
        partials = {node: in_order(tensor, order or tuple(range(self._ranks)), own) for node, tensor in nodes.items()}
        del nodes
        stages = {stage.height: stage for stage in self.plan.stages(self._rank)}
        for height in range(1, self.plan.height + 1):
            if height in stages:
                partials = yield from self._in_stage(stages[height], partials, like)
            else:
                yield  # other ranks are busy in this stage
        following = self._then({node: tensor[0] for node, tensor in partials.items()})
        del partials
        yield from following

    def _in_stage(
        self, stage: ReduceStage, partials: dict[Node, Tensor], like: Tensor
    ) -> Generator[None, None, dict[Node, Tensor]]:
        """Add up the partial sums of one stage. Returns, for each node, the rows that this rank continues with."""
        sends = [(peer, _together([partials[node][rows] for node in stage.nodes])) for peer, rows in stage.sends]
        receives = [(peer, like.new_empty(len(nodes), stage.rows, like.shape[1])) for peer, nodes in stage.receives]
        sent = PendingSend([(peer, tensor) for peer, tensor in sends if tensor is not None], receives, self._group)
        yield
        sent.wait()
        tree = ReductionTree(self._leaves)
        for node in stage.nodes:
            tree.place(node, [partials[node][stage.own_rows]])
        for (_, theirs), (_, parts) in zip(stage.receives, receives, strict=True):
            for node, part in zip(theirs, parts, strict=True):
                tree.place(node, [part])
        return {node: tensors[0] for node, tensors in tree.nodes.items()}


def in_order(rows: Tensor, has: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return rows reordered from `has` to `order`; the tensor itself if the orders are equal."""
    if has == order:
        return rows
    places = dict(zip(has, range(len(has)), strict=True))
    return rows.index_select(0, on_device([places[slot] for slot in order], rows.device))


def _together(parts: list[Tensor]) -> Tensor | None:
    """Return one message; a single partial node needs no copy."""
    if len(parts) > 1:
        return torch.stack(parts)
    return parts[0] if parts else None


class Exchange:
    """All-reduce in tree order: a `Scatter` of equal slots, then an all-gather, or the stages in reverse. Sends 2
    (W-1)/W of the bytes per rank, like a ring all-reduce. The gather of a bucket is issued after the next bucket has
    begun, in the same order on every rank."""

    def __init__(
        self,
        leaves: int,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None = None,
        links: LinkSpeeds | None = None,
        layout: tuple[tuple[Node, ...], ...] | None = None,
    ) -> None:
        self._rank, self._ranks, self._group = rank, ranks, group
        self._scatter = Scatter(leaves, rank, ranks, group, links, layout, self._gather)
        # The order of the slots in a bucket: the one that needs no copy on most ranks.
        self._order = tuple(range(ranks)) if self._scatter.plan is None else self._scatter.plan.order(0)
        self._shapes: list[list[torch.Size]] = []
        self._gathering: list[tuple[Tensor, dist.Work]] = []
        self._gathered: list[Tensor] = []

    def submit(self, nodes: Mapping[Node, list[Tensor]]) -> None:
        """Start a bucket: this rank's partial nodes, each a list of tensors of the same shapes, which are copied.
        Collective."""
        like = next(iter(nodes.values()))
        self._shapes.append([t.shape for t in like])
        chunk = max(1, -(-sum(t.numel() for t in like) // self._ranks))
        laid = {node: like[0].new_empty(self._ranks, chunk) for node in nodes}
        for node, tensors in nodes.items():
            flatten_into(tensors, laid[node].view(-1))
        self._scatter.submit(laid, order=self._order)

    def _gather(self, nodes: dict[Node, Tensor]) -> Iterable[None]:
        (own,) = nodes.values()
        if (plan := self._scatter.plan) is not None:
            has, order = plan.order(self._rank), self._order
            return gather_in_stages(
                own, plan, self._rank, self._group, lambda total: self._gathered.append(in_order(total, has, order))
            )
        total = own.new_empty(self._ranks, own.numel())
        total[self._rank] = own  # frees the receive buffer
        work = all_gather(total.view(-1), total[self._rank], group=self._group, async_op=True)
        self._gathering.append((total, work))
        return ()

    def finish(self) -> list[list[Tensor]]:
        """Return the summed tensors of every bucket, in the order of `submit`. Collective."""
        self._scatter.finish()
        for total, work in self._gathering:
            work.wait()
            self._gathered.append(total)
        done = [unflatten(total.view(-1), shapes) for shapes, total in zip(self._shapes, self._gathered, strict=True)]
        self._shapes, self._gathering, self._gathered = [], [], []
        return done


def flatten_into(tensors: Iterable[Tensor], into: Tensor) -> None:
    """Copy tensors into a flat one, end to end; zero the rest."""
    at = 0
    for tensor in tensors:
        into[at : at + tensor.numel()].copy_(tensor.reshape(-1))
        at += tensor.numel()
    into[at:].zero_()


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of a flat tensor with these shapes."""
    parts = flat[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def buckets(tensors: Mapping[int, Tensor], cap_bytes: int) -> list[list[int]]:
    """Group the positions of tensors, in their order, into buckets of about `cap_bytes`."""
    groups: list[list[int]] = [[]]
    size = 0
    for i, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        groups[-1].append(i)
        if size >= cap_bytes:
            groups.append([])
            size = 0
    return [g for g in groups if g]


def all_reduce_flat(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Sum tensors over ranks with one plain all-reduce per bucket of `groups`, which cover all positions; equal within
    rounding. Collective."""
    summed: dict[int, Tensor] = {}
    for positions in groups:
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        dist.all_reduce(flat, group=group)
        summed |= zip(positions, unflatten(flat, [tensors[i].shape for i in positions]), strict=True)
    return [summed[i] for i in range(len(tensors))]
