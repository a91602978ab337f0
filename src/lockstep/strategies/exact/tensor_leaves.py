"""The leaves of a matrix product: a layer computed in a fixed number of parts, whose sums do not depend on the ranks.

In: the inputs and weights of a layer's tensor-parallel products (`strategy.tensor_leaves`). Out: results that are
bitwise equal at every number of tensor ranks that divides the number of leaves. A column-parallel product is split
along its outputs and returns `Leaves`: one activation per leaf. Later operations run leaf by leaf, one call each on
tensors of the same shapes on any rank, so the number of ranks cannot change the choice of kernels. A row-parallel
product is split along its inner dimension and ends the leaves: its partial products are added over the tree of
`gradient_sum.py`. In backward, gradients of tensors that all leaves read (a layer's input, a norm's weight) are added
over the same tree, and gradients of sharded weights are those of their leaves.

Letters: L leaves, of which a rank computes L/R.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.distributed.randomness import mix
from lockstep.strategies.exact.exchange import Exchange
from lockstep.strategies.exact.gradient_sum import ReductionTree, share
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds, all_gather
from lockstep.strategies.exact.training_state import ALIGNED


class LeafRanks:
    """The tensor-parallel ranks, and which leaves are this rank's: contiguous ones, equally many per rank."""

    def __init__(
        self,
        count: int,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        links: LinkSpeeds | None = None,
    ) -> None:
        self.count, self.rank, self.size, self.group, self._links = count, rank, size, group, links
        self.own = share(count, rank, size)
        self._read: tuple[weakref.ref[Tensor], Leaves] | None = None  # the input of the layer's products

    def sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of all ranks' leaves in tree order, in float32 or wider. Collective."""
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        tree = ReductionTree(self.count)
        for leaf, tensor in zip(self.own, tensors, strict=True):
            # The tree writes only into the left one of two siblings: only that one must be a copy.
            tree.add(leaf, [tensor.to(wide, copy=not leaf % 2, memory_format=torch.contiguous_format)])
        if self.size == 1:
            return tree.root[0]
        exchange = Exchange(self.count, self.rank, self.size, self.group, self._links)
        exchange.submit(tree.nodes)
        return exchange.finish()[0][0].clone()

    def all_gather(self, own: Tensor) -> Tensor:
        """Concatenate tensors of one shape of all ranks along their first dimension. Collective."""
        if self.size == 1:
            return own
        every = own.new_empty(self.size * len(own), *own.shape[1:])
        all_gather(every, own.contiguous(), group=self.group)
        return every

    def spread(self, tensor: Tensor, dtype: torch.dtype) -> Leaves:
        """Return a whole tensor as `Leaves`; products that read the same tensor share the result."""
        if self._read is not None:
            read, leaves = self._read
            if read() is tensor and leaves.dtype == dtype and leaves.tracked == _tracked(tensor):
                return leaves
        leaves = Leaves.of(_Spread.apply(tensor, self, dtype), self, _tracked(tensor))
        self._read = weakref.ref(tensor), leaves
        return leaves

    def close(self) -> None:
        """Forget the cached input: the layer's products are done with it."""
        self._read = None


def _tracked(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


class _Spread(torch.autograd.Function):
    """Passes a tensor to each leaf; its gradient is the sum of the leaves' gradients."""

    @override
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: LeafRanks, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.dtype = ranks, tensor.dtype
        read = tensor.to(dtype)
        return tuple(read.view_as(read) for _ in ranks.own)

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.sum(gradients).to(ctx.dtype), None, None


class _TreeSum(torch.autograd.Function):
    """Sums partial products over the tree."""

    @override
    @staticmethod
    def forward(ctx: Any, ranks: LeafRanks, *products: Tensor) -> Tensor:
        ctx.dtype, ctx.count = products[0].dtype, len(products)
        return ranks.sum(products)

    @override
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[gradient.to(ctx.dtype)] * ctx.count


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightCut:
    """Describes which part of a weight belongs to a leaf."""

    dim: int  # the dimension to split
    parts: int = 1  # matrices side by side along it, such as fused query, key and value; each is split
    holding: str = "own"  # a rank's part: its "own" leaves, an equal share of "rows", or "all"

    def leaf(self, weight: Tensor, index: int, count: int) -> Tensor:
        """Return one leaf of a weight that holds `count` leaves: a view [..., parts, width, ...]."""
        return weight.unflatten(self.dim, (self.parts, count, -1)).select(self.dim + 1, index)


class _Cut(torch.autograd.Function):
    """Splits a weight into this rank's leaves, each in its own contiguous memory, because the last bits of a product
    may depend on memory layout. Backward assembles the weight's gradient from those of the leaves."""

    @override
    @staticmethod
    def forward(ctx: Any, weight: Tensor, cut: WeightCut, ranks: LeafRanks, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.cut, ctx.ranks, ctx.dtype, ctx.rows = cut, ranks, weight.dtype, len(weight)
        whole = ranks.all_gather(weight) if cut.holding == "rows" else weight
        ctx.shape, first = whole.shape, 0
        count = len(ranks.own) if cut.holding == "own" else ranks.count
        if cut.holding != "own":
            first = ranks.own.start
        ctx.count = count
        leaves = (cut.leaf(whole, first + i, count).flatten(cut.dim, cut.dim + 1) for i in range(len(ranks.own)))
        return tuple(_laid_out(leaf.to(dtype)) for leaf in leaves)

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cut, ranks = ctx.cut, ctx.ranks
        leaves = list(gradients)
        if len(leaves) < ctx.count:  # the other leaves are on other ranks
            leaves = list(ranks.all_gather(torch.stack(leaves)))
        whole = leaves[0].new_empty(ctx.shape, dtype=ctx.dtype)
        for i, gradient in enumerate(leaves):
            cut.leaf(whole, i, ctx.count).copy_(gradient.unflatten(cut.dim, (cut.parts, -1)))
        if cut.holding == "rows":
            whole = whole[ranks.rank * ctx.rows : (ranks.rank + 1) * ctx.rows].contiguous()
        return whole, None, None, None


def _laid_out(leaf: Tensor) -> Tensor:
    if leaf.is_contiguous() and leaf.data_ptr() % ALIGNED == 0:
        return leaf
    return leaf.clone(memory_format=torch.contiguous_format)


def cut_weight(weight: Tensor, cut: WeightCut, ranks: LeafRanks, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return this rank's leaves of a weight, in the dtype of the products. Collective if ranks hold rows."""
    leaves: Sequence[Tensor] = _Cut.apply(weight, cut, ranks, dtype)
    return leaves


# -- activations -----------------------------------------------------------------------------------------------------

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (input, weight, bias) -> output


def column_product(
    product: Product, ranks: LeafRanks, inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None
) -> Leaves:
    """Compute a product that is split along its outputs: one call per leaf."""
    if isinstance(inputs, Leaves):
        raise RunError(
            "LS4300", "strategy.tensor_leaves: this model splits an already split activation; remove the key"
        )
    dtype = weights[0].dtype if inputs.is_floating_point() else inputs.dtype
    whole = [inputs] * len(weights) if not inputs.is_floating_point() else ranks.spread(inputs, dtype).leaves
    own = biases if biases is not None else [None] * len(weights)
    products = [product(x, w, b) for x, w, b in zip(whole, weights, own, strict=True)]
    return Leaves.of(products, ranks, any(map(_tracked, products)))


def row_product(
    product: Product, ranks: LeafRanks, inputs: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """Compute a product that is split along its inner dimension: one call per leaf, summed over the tree, with the bias
    added once. Collective."""
    if not isinstance(inputs, Leaves):
        raise RunError(
            "LS4301",
            "strategy.tensor_leaves: this model calls a split layer in a way that its plan does not "
            "describe; remove the key",
        )
    if inputs.tracked and torch.is_grad_enabled() and not all(leaf.requires_grad for leaf in inputs.leaves):
        raise RunError(
            "LS4302",
            "strategy.tensor_leaves: an operation of this model drops the gradient of leaves; remove the key",
        )
    ranks.close()
    pairs = zip(inputs.leaves, weights, strict=True)
    products = [product(leaf.to(weight.dtype), weight, None) for leaf, weight in pairs]
    total: Tensor = _TreeSum.apply(ranks, *products)
    if bias is not None:
        total = total + bias
    return total.to(products[0].dtype)


class Leaves(Tensor):
    """An activation as this rank's leaves. Every torch function runs once per leaf, with whole tensors passed to each
    call; a whole tensor that requires a gradient is spread, so that its gradient is summed over the tree.

    It is a `Tensor`, because models check for one, with the shape, dtype and device of one leaf. It has no memory of
    its own; reading it is an error.
    """

    leaves: tuple[Tensor, ...]
    ranks: LeafRanks
    tracked: bool  # whether they require a gradient

    @staticmethod
    def of(leaves: Sequence[Tensor], ranks: LeafRanks, tracked: bool) -> Leaves:
        """Wrap one tensor per leaf of this rank."""
        wrapped = torch.empty(0).as_subclass(Leaves)
        wrapped.leaves, wrapped.ranks, wrapped.tracked = tuple(leaves), ranks, tracked
        return wrapped

    @override
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS or (name == "__setitem__" and not isinstance(args[0], Leaves)):
            raise RunError(
                "LS4303",
                f"strategy.tensor_leaves: this model reads the values of a leaf ({name}); remove the key",
            )
        tensors = list(_within((args, kwargs)))
        leaves = [each for each in tensors if isinstance(each, Leaves)]
        ranks = leaves[0].ranks
        shared = {
            id(each): _Spread.apply(each, ranks, each.dtype)
            for each in tensors
            if not isinstance(each, Leaves) and _tracked(each)
        }
        tracked = bool(shared) or any(each.tracked for each in leaves)
        calls = ((_leaf_of(args, i, shared), _leaf_of(kwargs, i, shared)) for i in range(len(ranks.own)))
        if not _draws(name, args, kwargs):
            return _together([func(*a, **k) for a, k in calls], ranks, tracked)
        with _drawing(ranks, leaves[0].leaves[0].device) as begin:
            results = []
            for leaf, (a, k) in zip(ranks.own, calls, strict=True):
                begin(leaf)
                results.append(func(*a, **k))
        return _together(results, ranks, tracked)

    @override
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the function that stands for "none" there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RunError(
            "LS4304", f"strategy.tensor_leaves: this model's {func} cannot be computed leaf by leaf; remove the key"
        )


# Functions that turn a tensor into a Python value, which would differ between ranks.
_READS = {
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
}
_DROPOUTS = {"dropout", "dropout_", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
_RANDOM = {"bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like", "multinomial", "normal_", "uniform_"}
_ATTENTION = {"scaled_dot_product_attention": ("dropout_p", 4), "attention": ("dropout", 5)}


def _draws(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function draws random numbers."""
    if name in _DROPOUTS:
        return bool(kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True)))
    if name in _ATTENTION:
        key, place = _ATTENTION[name]
        return bool(kwargs.get(key, args[place] if len(args) > place else 0.0))
    return name in _RANDOM


@contextmanager
def _drawing(ranks: LeafRanks, device: torch.device) -> Iterator[Callable[[int], None]]:
    """A context in which each leaf draws its own random numbers, independent of its rank. Yields a function to call
    before each leaf. Afterwards the generator is in the same state on every rank."""
    seed = int(torch.randint(2**63 - 1, (), generator=torch.default_generator))
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
    before = generator.get_state()

    def begin(leaf: int) -> None:
        generator.manual_seed(mix(seed, leaf))

    try:
        yield begin
    finally:
        generator.set_state(before)


def _within(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _within(each)
    elif isinstance(value, dict):
        yield from _within(list(value.values()))


def _leaf_of(value: Any, index: int, shared: dict[int, tuple[Tensor, ...]]) -> Any:
    """Return the arguments for one leaf."""
    if isinstance(value, Leaves):
        return value.leaves[index]
    if isinstance(value, Tensor):
        return shared[id(value)][index] if id(value) in shared else value
    if type(value) in (tuple, list):
        return type(value)(_leaf_of(each, index, shared) for each in value)
    if type(value) is dict:
        return {key: _leaf_of(each, index, shared) for key, each in value.items()}
    return value


def _together(results: list[Any], ranks: LeafRanks, tracked: bool) -> Any:
    """Combine the results of all leaves: tensors into `Leaves`; of anything else (a shape) the first."""
    first = results[0]
    if isinstance(first, Tensor):
        return Leaves.of(results, ranks, tracked)
    if isinstance(first, tuple | list) and any(isinstance(each, Tensor) for each in first):
        return type(first)([_together(list(each), ranks, tracked) for each in zip(*results, strict=True)])
    return first
