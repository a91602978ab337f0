"""Gradient sums in tree order for ranks that each update another range of every parameter.

In: a model's parameters, and which range of each flattened parameter every rank updates (its cut), as DeepSpeed lays
them out. Out: this rank's cut of the gradient sum over all micro-batches, added in tree order, so that it is bitwise
independent of the number of ranks.

`LocalSums` sums locally and sends once per step (ZeRO stage 1). `TurnSums` sends every gradient during backward, so
that no rank ever holds a whole one (stages 2 and 3): in each turn every rank computes one micro-batch, and sibling
leaves merge at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.distributed.world import World
from lockstep.strategies.exact.exchange import Scatter, buckets
from lockstep.strategies.exact.gradient_sum import LeafGradients, Node, ReductionTree
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds
from lockstep.strategies.exact.update import Gradient, Part

Layout = Sequence[Sequence[Node]]  # by rank: the nodes of its partial sums


@dataclass(frozen=True)
class OwnedRange:
    """A range of a flattened parameter; may be empty."""

    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view [length] of a contiguous tensor."""
        return tensor.reshape(-1)[self.start : self.start + self.length]


Owned = dict[str, tuple[OwnedRange, int, int]]  # by parameter: a rank's range, index of the flat tensor, offset in it


def check_cuts(cuts: Sequence[Sequence[OwnedRange]], parameters: Mapping[str, int]) -> None:
    """Check that the ranks' cuts cover each parameter exactly. `cuts`: by rank, then by parameter; `parameters`: names
    and sizes. Errors: `AssertionError`."""
    for i, (name, size) in enumerate(parameters.items()):
        ends = [0, *sorted(each for of_rank in cuts if of_rank[i].length for each in _ends(of_rank[i])), size]
        assert ends[::2] == ends[1::2], f"{name}: the ranks' parts {ends[1:-1]} do not make up its {size} numbers"


def _ends(cut: OwnedRange) -> tuple[int, int]:
    return cut.start, cut.start + cut.length


class CutGradient(Gradient):
    """A gradient of which each rank holds a flat slice of every parameter."""

    def __init__(self, parts: Sequence[Part], names: Sequence[str], cuts: FlatCuts, world: World) -> None:
        super().__init__(parts, names, world.all_reduce)
        self._cuts = cuts

    @override
    def whole(self, world: World) -> dict[str, Tensor]:
        """Return the whole gradient by parameter name on rank 0; empty elsewhere. Collective."""
        whole = {part.name: self._cuts.assemble(part.name, part.gradient) for part in self.parts}
        return whole if world.is_main else {}


class FlatCuts:
    """This rank's shard under DeepSpeed: a view of its flat fp32 weights for each trained parameter."""

    def __init__(
        self, world: World, shapes: Mapping[str, torch.Size], flats: Sequence[Tensor], owned: Sequence[Owned]
    ) -> None:
        """`shapes`: of the trained parameters; `owned`: by rank."""
        self.world, self.shapes = world, shapes
        self.by_rank = [[each[name][0] for name in shapes] for each in owned]
        check_cuts(self.by_rank, {name: shape.numel() for name, shape in shapes.items()})
        self.own = {name: owned[world.rank][name][0] for name in shapes}
        self.parts = {}
        for name in shapes:
            cut, flat, offset = owned[world.rank][name]
            self.parts[name] = nn.Parameter(flats[flat].detach()[offset : offset + cut.length])

    def assemble(self, name: str, part: Tensor) -> Tensor:
        """Return the whole fp32 tensor of which each rank passes a part [length of its cut]. Collective."""
        bits = torch.zeros(self.shapes[name].numel(), dtype=torch.int32, device=part.device)
        self.own[name].of(bits).copy_(part.detach().contiguous().view(torch.int32))
        return self.world.all_reduce(bits).view(torch.float32).view(self.shapes[name])  # all other ranks have zero bits


class CutSums(ABC):
    """The gradient sums of a model on one rank. A step calls `start`, for each micro-batch `begin`, backward and `end`,
    then `finish`."""

    def __init__(
        self, world: World, parameters: Sequence[nn.Parameter], cuts: Sequence[Sequence[OwnedRange]], bucket: int
    ) -> None:
        """`parameters`: those that autograd accumulates into; `cuts`: by rank, then by parameter; `bucket`: approximate
        bytes per bucket. Sizes come from the cuts, because an engine may have freed the parameters' memory."""
        self.world, self.parameters, self.cuts = world, list(parameters), cuts
        self.sizes = [sum(of_rank[i].length for of_rank in cuts) for i in range(len(self.parameters))]
        like = {i: torch.empty(size, device="meta") for i, size in enumerate(self.sizes)}
        self.buckets = buckets(dict(reversed(like.items())), bucket)  # approximately in backward's order
        self.owned = [[sum(of_rank[i].length for i in b) for b in self.buckets] for of_rank in cuts]  # by rank, bucket
        self._aside = False
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, i))

    @property
    @abstractmethod
    def grad_counts(self) -> list[int]:
        """The number of this rank's micro-batches that gave each parameter a gradient."""

    def start(self, leaves: int) -> None:
        """Start a step of `leaves` micro-batches."""
        self.trees = [ReductionTree(leaves) for _ in self.buckets]  # of this rank's cuts, concatenated
        self.scatter = Scatter(leaves, self.world.rank, self.world.size, links=LinkSpeeds("flat"))

    @abstractmethod
    def begin(self, leaf: int | None) -> None:
        """Prepare a micro-batch; None: a padding micro-batch, or none."""

    @abstractmethod
    def end(self) -> None:
        """Finish a micro-batch after its backward. Collective in a turn."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context for a micro-batch that is not part of the step: its gradients are dropped. No parameter may have a
        gradient at the start."""
        self._aside = True
        yield
        self._aside = False

    def _take(self, position: int, parameter: Tensor) -> None:
        if self._aside:
            parameter.grad = None
        else:
            self._note(position, parameter)

    @abstractmethod
    def _note(self, position: int, parameter: Tensor) -> None:
        """Autograd hook: the gradient of a parameter is complete."""

    def finish(self) -> list[Tensor]:
        """Return this rank's cut of the sum of all leaves, by parameter: flat tensors, float32. Collective."""
        self.scatter.finish()
        sums: dict[int, Tensor] = {}
        for bucket, tree in zip(self.buckets, self.trees, strict=True):
            own = tree.root[0].split([self.cuts[self.world.rank][i].length for i in bucket])
            sums |= zip(bucket, own, strict=True)
        self.trees = []
        return [sums[i] for i in range(len(self.parameters))]

    def _send(self, number: int, nodes: Mapping[Node, Mapping[int, Tensor]], layout: Layout) -> None:
        """Start a bucket: send each rank its cuts of this rank's partial sums, given by node, then by position.
        Collective."""
        bucket, mine = self.buckets[number], layout[self.world.rank]
        pieces = [of_rank[i].of(nodes[node][i]) for of_rank in self.cuts for node in mine for i in bucket]
        laid = torch.cat(pieces) if pieces else torch.empty(0, device=self.parameters[0].device)
        sizes = [of_rank[number] for of_rank in self.owned]
        self.scatter.submit_flat(laid, sizes, layout, partial(self._arrived, number, sum(map(len, layout)) == 1))

    def _arrived(self, number: int, alone: bool, nodes: Mapping[Node, Tensor]) -> Iterable[None]:
        """Receive this rank's cut of a bucket's partial sums. `alone`: the receive buffer contains nothing else."""
        for node, tensor in nodes.items():
            self.trees[number].place(node, [tensor if alone else tensor.clone()])
        return ()


class LocalSums(CutSums):
    """Sums the gradients of a rank's micro-batches, contiguous leaves, and sends the partial sums once."""

    def __init__(
        self, world: World, parameters: Sequence[nn.Parameter], cuts: Sequence[Sequence[OwnedRange]], bucket: int
    ) -> None:
        self.local = LeafGradients(parameters, ())
        super().__init__(world, parameters, cuts, bucket)

    @override
    @property
    def grad_counts(self) -> list[int]:
        return self.local.grad_counts

    @override
    def start(self, leaves: int) -> None:
        super().start(leaves)
        self.local.start(leaves, None)

    @override
    def begin(self, leaf: int | None) -> None:
        assert leaf is not None, "each rank runs its own micro-batches"
        self.local.begin(leaf)

    @override
    def end(self) -> None:
        self.local.end()

    @override
    def _note(self, position: int, parameter: Tensor) -> None:
        self.local.note(position)

    @override
    def finish(self) -> list[Tensor]:
        layout = self.local.layout(self.world.size)
        for number, bucket in enumerate(self.buckets):
            nodes = {node: {i: each[i] for i in bucket} for node, each in self.local.tree.nodes.items()}
            self._send(number, nodes, layout)
            del nodes
            self.local.release(bucket)
        self.local.free()
        return super().finish()


class TurnSums(CutSums):
    """Sends every gradient during backward; in each turn every rank runs one micro-batch, neighbouring leaves."""

    def __init__(
        self, world: World, parameters: Sequence[nn.Parameter], cuts: Sequence[Sequence[OwnedRange]], bucket: int
    ) -> None:
        self._uses: list[int] = []
        self._waiting: dict[int, Tensor] = {}  # gradients by position, until their bucket is complete
        self._with_gradient: set[int] = set()  # positions with a gradient from this micro-batch
        super().__init__(world, parameters, cuts, bucket)

    @override
    @property
    def grad_counts(self) -> list[int]:
        return self._uses

    @staticmethod
    def own_leaves(leaves: int, world: World) -> range:
        """Return the micro-batches that a rank runs, one per turn."""
        return range(world.rank, leaves, world.size)

    @override
    def start(self, leaves: int) -> None:
        super().start(leaves)
        self._uses = [0] * len(self.parameters)
        self._turn = -1

    @override
    def begin(self, leaf: int | None) -> None:
        self._turn += 1
        first = self._turn * self.world.size
        leaves = self.trees[0].leaves
        self._layout = [((0, each),) if each < leaves else () for each in range(first, first + self.world.size)]
        assert self._layout[self.world.rank] == (() if leaf is None else ((0, leaf),)), "not this rank's turn"
        self._sent, self._leaf = 0, leaf
        self._with_gradient.clear()

    @override
    def _note(self, position: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._with_gradient.add(position)
        if self._leaf is not None:
            self._uses[position] += 1
            self._waiting[position] = gradient
        while self._sent < len(self.buckets) and self._with_gradient >= set(self.buckets[self._sent]):
            self._send_next()

    @override
    def end(self) -> None:
        while self._sent < len(self.buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket, nodes = self.buckets[self._sent], dict[Node, Mapping[int, Tensor]]()
        if self._leaf is not None:
            nodes[0, self._leaf] = dict(self._gradients(bucket))
        self._send(self._sent, nodes, self._layout)
        self._sent += 1

    def _gradients(self, bucket: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield and free this micro-batch's gradients of the parameters of a bucket, zero if missing."""
        for i in bucket:
            gradient = self._waiting.pop(i, None)
            yield i, torch.zeros(self.sizes[i], device=self.parameters[i].device) if gradient is None else gradient
