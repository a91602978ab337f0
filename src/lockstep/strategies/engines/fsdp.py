"""FSDP internals: options, blocks, and a reduce-scatter in tree order.

In: a run; a model before and after `fully_shard`. Out: an error that names the key, or the choice between the two
classes of `fsdp2.py`; the same model, whose gradients all ranks reduce in the same order; which weights had one.

FSDP puts its own autograd node between a block and its inputs, to learn when the block's gradients are complete. If an
input is used more than once in the block, and also outside of it (an attention's input that is added to its output; an
encoder's output that every decoder layer reads), the block's terms are then summed first, which is not the order of a
model without FSDP. Therefore inputs are hidden from FSDP's hooks, which see a single scalar instead, the gate. Of the
nodes whose gradients are complete, autograd runs the one created last. The gate's node is created before all of the
block's, and so runs after all of them, and before the nodes of everything computed before the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from typing_extensions import override

from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, ModelSection, StrategySection
from lockstep.data.job import Job
from lockstep.distributed.hardware import share_gpus
from lockstep.strategies.engines import layers, tensor_plans
from lockstep.strategies.exact import training_state
from lockstep.strategies.exact.exchange import Exchange, Scatter
from lockstep.strategies.exact.gradient_sum import ReductionTree, share
from lockstep.strategies.exact.reduce_schedule import links
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.distributed.world import World


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEP, MICRO_BATCH = "step", "micro_batch"
INSTEAD = f"strategy.options.gather={STEP}, under which every rank has the whole weights, or strategy.name=ddp"
_GATHER = {STEP: STEP, MICRO_BATCH: MICRO_BATCH, "piece": MICRO_BATCH}
_FSDP = {  # options of FSDP itself
    "replicate",
    "tensor_parallel",
    "reshard_after_forward",
    "cpu_offload",
    "param_dtype",
    "reduce_dtype",
    "blocks",
}


def gather_option(strategy: StrategySection, launch: LaunchSection) -> str | None:
    """Return `step` or `micro_batch`; None if it depends on the memory of the machines. FSDP options imply FSDP;
    without `exact` the two sum in different orders, so memory may not decide."""
    options = strategy.options
    if "gather" in options:
        return _GATHER.get(str(options["gather"]), MICRO_BATCH)  # `check_options` refuses other values
    if _FSDP & set(options) or not strategy.exact:
        return MICRO_BATCH
    return STEP if share_gpus(launch) else None


def check_not_shared(launch: LaunchSection) -> None:
    """Refuse FSDP on GPUs shared by several ranks, because its collectives would use gloo. Errors: `RunError`."""
    if share_gpus(launch):
        raise RunError(
            "LS4073",
            "launch.processes_per_gpu: FSDP gathers and reduces on separate CUDA streams, which gloo does not order; "
            f"remove launch.processes_per_gpu, or use strategy.name=fsdp2 with strategy.options.gather={STEP} and no "
            "option of FSDP's",
        )


def check_options(job: Job) -> None:
    """Refuse options that cannot work. Errors: `RunError`."""
    run, processes = job.run, job.processes
    options = run.strategy.options
    if unknown := set(options) - _FSDP - {"gather"}:
        raise RunError(
            "LS4070",
            f"strategy.options: fsdp2 has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(_FSDP | {'gather'}))}",
        )
    if options.get("gather", STEP) not in list(_GATHER):
        raise RunError(
            "LS4071", f"strategy.options.gather: invalid value {options['gather']!r}; expected {STEP} or {MICRO_BATCH}"
        )
    gather = gather_option(run.strategy, run.launch)
    if gather == STEP and (others := sorted(_FSDP & set(options))):
        raise RunError(
            "LS4072",
            f"strategy.options.{others[0]}: applies to FSDP's gather for every micro-batch, but under gather: "
            f"{STEP} every rank has the whole weights during a step. Remove it, or set "
            f"strategy.options.gather={MICRO_BATCH}",
        )
    if gather == MICRO_BATCH:
        check_not_shared(run.launch)
    own = {"tensor_parallel", "param_dtype", "reduce_dtype"} & set(options)
    if own and run.model.trained_in_bfloat16:
        raise RunError(
            "LS4074",
            f"strategy.options.{min(own)}: cannot be combined with model.dtype=bfloat16, which sets the same; "
            "remove one of them",
        )
    _check_ranks(options, processes)
    _check_kinds(options)
    if (tensor := options.get("tensor_parallel", 1)) > 1:
        _check_tensor_ranks(job, tensor)


def low_dtypes(strategy: StrategySection) -> list[str]:
    """Return the keys that set bfloat16 where `single` uses float32."""
    options = strategy.options
    return [f"strategy.options.{key}" for key in ("param_dtype", "reduce_dtype") if options.get(key) == "bf16"]


def policies(strategy: StrategySection, model: ModelSection) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return FSDP's mixed precision policies: of a block, and of the root, which returns logits."""
    if model.trained_in_bfloat16:  # shards are the masters; leaves are bfloat16, summed in float32
        return (MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),) * 2
    if not low_dtypes(strategy):  # weights and gradients are float32 already
        return (MixedPrecisionPolicy(),) * 2
    param, reduce = (DTYPES.get(str(strategy.options.get(key))) for key in ("param_dtype", "reduce_dtype"))
    logits = torch.float32 if param or reduce else None
    return MixedPrecisionPolicy(param, reduce), MixedPrecisionPolicy(param, reduce, logits)


def _check_ranks(options: dict[str, Any], processes: int) -> None:
    for key in ("replicate", "tensor_parallel"):
        if not isinstance(value := options.get(key, 1), int) or isinstance(value, bool) or value < 1:
            raise RunError(
                "LS4076", f"strategy.options.{key}: invalid value {value!r}; expected an integer >= 1 (ranks)"
            )
    replicate, tensor = options.get("replicate", 1), options.get("tensor_parallel", 1)
    if processes % (replicate * tensor):
        raise RunError(
            "LS4077",
            f"strategy.options: {processes} processes cannot be divided into {quantity(replicate, 'replica')} of a "
            f"multiple of {quantity(tensor, 'rank')}; replicate x tensor_parallel must divide the number of processes",
        )
    if replicate > 1 and replicate * tensor == processes:
        raise RunError(
            "LS4078",
            f"strategy.options.replicate: {replicate} replicas on {processes} processes leave nothing to "
            "shard; use strategy.name=ddp, or fewer replicas",
        )
    reshard, shards = options.get("reshard_after_forward", True), processes // (replicate * tensor)
    if not isinstance(reshard, bool) and (not isinstance(reshard, int) or reshard < 1 or shards % reshard):
        raise RunError(
            "LS4079",
            f"strategy.options.reshard_after_forward: invalid value {reshard!r}; expected true, false, or a "
            f"number of ranks that divides the {shards} ranks of a replica",
        )


def _check_tensor_ranks(job: Job, ranks: int) -> None:
    run = job.run
    leaves = run.strategy.tensor_leaves
    if run.strategy.exact and leaves % ranks:
        raise RunError(
            "LS4085",
            f"strategy.tensor_leaves: {leaves}, which {ranks} ranks (strategy.options.tensor_parallel) cannot share; "
            f"set it to a multiple of {ranks}, the same for every run that is to have the same bits",
        )
    if run.strategy.exact:
        tensor_plans.check(job)
        return
    if job.task.own_model:
        raise RunError(
            "LS4075",
            "strategy.options.tensor_parallel: transformers has no tensor-parallel plan for a custom model; remove it",
        )
    layers.tensor_plan(run.model, ranks)


def _check_kinds(options: dict[str, Any]) -> None:
    for key in ("param_dtype", "reduce_dtype"):
        if key in options and options[key] not in DTYPES:
            raise RunError(
                "LS4080", f"strategy.options.{key}: invalid value {options[key]!r}; expected one of {', '.join(DTYPES)}"
            )
    blocks, offload = options.get("blocks", []), options.get("cpu_offload", False)
    if not isinstance(blocks, list) or not all(isinstance(name, str) for name in blocks):
        raise RunError(
            "LS4081", f"strategy.options.blocks: invalid value {blocks!r}; expected a list of names of modules"
        )
    if not isinstance(offload, bool):
        raise RunError("LS4082", f"strategy.options.cpu_offload: invalid value {offload!r}; expected true or false")


OTHER_LAYERS = (
    "strategy.name: fsdp2 needs all ranks to run the same layers in the same order, and this model ran others for some "
    "micro-batches (it skips layers on its own); nothing was updated. Use strategy.name=ddp"
)


def other_layers() -> RunError:
    """Return the error for a model whose ranks ran different layers."""
    return RunError("LS4084", OTHER_LAYERS)


def roomy(model: nn.Module) -> nn.Module:
    """Allocate CPU memory for a model on the meta device, in place; tied weights stay tied. The system commits memory
    only when it is written."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device="cpu")
    for (first, own), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[own]
    return model


def leaves_layers_out(model: nn.Module) -> None:
    """Make a sharded transformers model skip layers as configured: if it detects FSDP, it runs all layers and uses
    their outputs."""
    for module in model.modules():
        module._is_fsdp_managed_module = False  # type: ignore[assignment]


def reshard(model: nn.Module) -> None:
    """Free every gathered weight, so that the next forward gathers what is written into shards from now on."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class OutputWrapper:
    """Shows FSDP the tensors inside a module's output of a user-defined class.

    FSDP hooks the tensors in a module's output, and gathers a block's weights for backward when one of them gets a
    gradient; it searches only lists, mappings and the like. Create it before `fully_shard` and call `hide` after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.register_forward_hook(lambda module, args, output: (output, inside(output)))

    def hide(self) -> None:
        """Remove the tensors from the output again, after FSDP's hook."""
        self.module.register_forward_hook(lambda module, args, output: output[0])


def inside(output: Any) -> list[Tensor]:
    """Return the tensors requiring gradients in attributes of objects of unknown classes, if there are no others."""
    left = _pytree.tree_leaves(output)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in left):
        return []
    tensors: list[Tensor] = []
    visited: set[int] = set()
    while left:
        thing = left.pop()
        if id(thing) in visited or isinstance(thing, type | nn.Module | Tensor):
            continue
        visited.add(id(thing))
        slots = [name for kind in type(thing).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
        attributes = [
            *getattr(thing, "__dict__", {}).values(),
            *(getattr(thing, n) for n in slots if hasattr(thing, n)),
        ]
        for leaf in _pytree.tree_leaves(attributes):
            if not isinstance(leaf, Tensor):
                left.append(leaf)
            elif leaf.requires_grad:
                tensors.append(leaf)
    return tensors


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


class OtherLayers(RuntimeError):
    """This rank would run other layers than the other ranks, which did not detect it."""


def same_order(model: nn.Module) -> None:
    """Make a sharded user-defined model raise `OtherLayers` before it gathers a block out of the order of its first
    training forward: ranks that gather different blocks at the same time crash."""
    blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    orders: list[list[nn.Module]] = []  # of the first forward, and of the current one
    under_way = [False]

    def begin(*_: Any) -> None:
        under_way[0] = model.training  # not while activations are recomputed
        if model.training:
            orders[1:] = []
            orders.append([])

    def enter(block: nn.Module, *_: Any) -> None:
        if under_way[0]:
            orders[-1].append(block)
            if orders[-1] != orders[0][: len(orders[-1])]:
                raise OtherLayers(OTHER_LAYERS)

    def end(*_: Any) -> None:
        if under_way[0] and orders[-1] != orders[0]:
            raise OtherLayers(OTHER_LAYERS)
        under_way[0] = False

    for block in blocks:
        block.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)


class Uses:
    """Counts the micro-batches that gave each parameter a gradient, and fills in zeros for parameters without one, so
    that all ranks reduce the same parameters of a block."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.counting = True  # False for padding micro-batches
        self._position = {id(p): i for i, p in enumerate(parameters)}
        self._groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in _groups_of(m)]
        for place, group in enumerate(self._groups):
            group.post_backward = self._before(place, group, group.post_backward)
        if hasattr(model, "lockstep_called_once") and torch.distributed.get_world_size() > 1:
            same_order(model)
        self.clear()

    def clear(self) -> None:
        """Start a step."""
        self.counts, self._order = [0] * len(self._position), 0

    def _before(self, place: int, group: Any, post_backward: Any) -> Any:
        """Return FSDP's `post_backward` of a block, preceded by filling in missing gradients."""

        def filled(*unused: Any) -> None:
            self._order = (31 * self._order + place + 1) % 65521  # below 2^16: squares of sums are exact in float64
            for part, own in _unsharded(group):
                if own.grad is None:
                    own.grad = torch.zeros_like(own, dtype=own.grad_dtype)
                else:
                    self.counts[self._position[id(part.sharded_param)]] += self.counting
            post_backward(*unused)

        return filled

    def check_reduced(self) -> None:
        """Check after a backward that FSDP reduced all gradients. Errors: `RunError`."""
        for group in self._groups:
            for part, own in _unsharded(group):
                if own.grad is not None:
                    raise RunError(
                        "LS4083",
                        f"strategy.name: fsdp2 cannot train {part._param_fqn}: FSDP finds no tensor in the model's "
                        "output, so it cannot tell when the gradient is ready. Return tensors, a dataclass or a "
                        "mapping of them, or use strategy.name=ddp",
                    )

    def switched(self) -> bool:
        """Whether the model changed `requires_grad` of a gathered weight."""
        parts = (part for group in self._groups for part in group.fsdp_params if hasattr(part, "_unsharded_param"))
        return any(part._unsharded_param.requires_grad != part.sharded_param.requires_grad for part in parts)

    def signature(self) -> list[int]:
        """Return two numbers that identify the order in which this rank reduced its blocks."""
        return [self._order, self._order**2]

    @staticmethod
    def compare_orders(sums: Sequence[float], ranks: int) -> None:
        """Compare the order of blocks on all ranks, by the sums of their signatures. Errors: `RunError`, on every rank,
        if the orders differ: ranks gathered and reduced different blocks together."""
        if ranks * sums[1] != sums[0] ** 2:  # the variance is 0 only if all are equal
            raise other_layers()


def sums_in_float32(model: nn.Module) -> None:
    """Make gradients of gathered bfloat16 weights float32, like `held_state.sums_in_float32` for whole ones: otherwise
    the terms of a weight used twice in a micro-batch (tied embeddings) would be summed in bfloat16."""

    def widen(module: FSDPModule, _: Any) -> None:
        for group in _groups_of(module):
            training_state.sums_in_float32(own for _, own in _unsharded(group))

    for module in model.modules():
        if isinstance(module, FSDPModule):
            hooked: Any = module
            hooked.register_forward_pre_hook(widen)  # after FSDP's hook, which gathers


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    return [group for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]) if group is not None]


def _unsharded(group: Any) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield, for each gathered trainable parameter, FSDP's entry and the whole parameter that backward writes to."""
    for part in group.fsdp_params:
        if hasattr(part, "_unsharded_param") and part._unsharded_param.requires_grad:
            yield part, part._unsharded_param


# -- parts of tensors ------------------------------------------------------------------------------------------------


def cuts(tensor: Tensor) -> int:
    """Return the number of shards of a tensor; each shard is on world size / shards ranks."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


class _Sealed:
    """The hidden arguments of a block. Not a dataclass: FSDP searches those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


def gate(block: nn.Module) -> None:
    """Hide the inputs of a wrapped block from FSDP; does nothing to blocks that Accelerate left unwrapped."""
    if not isinstance(block, FSDPModule):
        return
    gates: list[Tensor] = []  # of the current forward

    def seal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = next(block.parameters()).device
        return (_Sealed(args, kwargs), torch.full((), -0.0, device=device, requires_grad=True)), {}

    def unseal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sealed, number = args
        gates.append(number)
        return sealed.args, sealed.kwargs

    def close(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Add minus zero to every output that requires a gradient, which changes no bits. All outputs, because an input
        that is passed on (T5's position biases) would otherwise trigger FSDP again when the block has finished."""
        number = gates.pop()
        leaves, spec = _pytree.tree_flatten(output)
        leaves = [x + number if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
        return _pytree.tree_unflatten(leaves, spec)

    fsdp = next(iter(block._forward_pre_hooks))  # FSDP puts its hook before all others
    block.register_forward_pre_hook(unseal, prepend=True, with_kwargs=True)
    hooks: Any = block._forward_pre_hooks  # an OrderedDict, contrary to its annotation
    hooks.move_to_end(fsdp, last=False)
    block.register_forward_pre_hook(seal, prepend=True, with_kwargs=True)
    block.register_forward_hook(close, prepend=True)


class ShardedRanks(Protocol):
    """The interface of a strategy that shards its weights: its ranks, and its position in a step."""

    run: Run
    world: World
    mesh: Any  # the DeviceMesh
    replica: int  # index of this rank's replica
    replicas: int
    shard: int  # index of this rank within its replica
    shards: int
    turn: int  # of the step: each rank runs one micro-batch per turn
    last: bool  # whether this turn is the step's last one


class TreeScatter(ReduceScatter):
    """FSDP's reduce-scatter of one block in tree order: every rank receives its slice of each rank's leaf and adds them
    in tree order. FSDP gets zeros, and in the last turn the sum of all leaves."""

    def __init__(self, strategy: ShardedRanks) -> None:
        self.strategy = strategy

    def start(self, leaves: int) -> None:
        self.tree, self.calls = ReductionTree(leaves), 0

    @override
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ours = self.strategy
        self.calls += 1
        block = share(self.tree.leaves, ours.replica, ours.replicas)
        first = block.start + ours.turn * ours.shards
        turn = range(first, min(first + ours.shards, block.stop))
        layout = (*(((0, leaf),) for leaf in turn), *((),) * (ours.shards - len(turn)))
        how = links(ours.run.strategy, ours.world, group)
        scatter = Scatter(self.tree.leaves, ours.shard, ours.shards, group, how, layout)
        slots = input_tensor.view(ours.shards, -1)  # [W, N]
        scatter.submit(dict.fromkeys(layout[ours.shard], slots), slots)
        for node, part in scatter.finish()[0].items():
            self.tree.place(node, [part])
        output_tensor.zero_()
        if not ours.last:
            return
        if self.calls != ours.turn + 1:  # a micro-batch did not run this block
            raise other_layers()
        if ours.replicas > 1:
            copies = ours.mesh.get_group(ours.world.mesh_axis("replicate"))
            how = links(ours.run.strategy, ours.world, copies)
            exchange = Exchange(self.tree.leaves, ours.replica, ours.replicas, copies, how)
            exchange.submit(self.tree.nodes)
            root = exchange.finish()[0][0]
        else:
            root = self.tree.root[0]
        if ours.replica == 0:  # FSDP sums over replicas: the others contribute zeros
            output_tensor.copy_(root)
        self.tree.nodes = {}
