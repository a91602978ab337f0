"""Simulate a step without hardware: tensors with shapes but no data, and a process group with only this rank. Every
operation is recorded.

In: a strategy, built and stepped inside of `without_numbers`. Out: a `Ledger`: live bytes by kind, their peak and its
place; the work of every operation; the messages that would have been sent. Small integer tensors (token ids, masks,
lengths, used rows of an embedding) keep their data, because they determine shapes. `Products` records real steps: each
kind of matrix product and attention, with a way to repeat it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on tensors without data
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lockstep.distributed.torch_internals import values_of
from lockstep.strategies.engines import zero_config

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, TRAVELLING, ENGINE = "activations", "communication", "buffers"
_OWNED = (WEIGHTS, GRADIENTS, OPTIMIZER)
_PRIVATE_SDPA = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Op:
    """A group of identical operations, with the same duration."""

    phase: str
    flops: int  # of matrix products and attention; else 0
    bytes: int  # read and written


@dataclass(frozen=True)
class SimulatedSend:
    """A group of identical collectives on this rank."""

    phase: str
    name: str
    group: tuple[int, ...]  # participating ranks
    bytes: int  # size of the whole gathered or summed tensor; else the bytes that this rank sends
    to: int | None = None  # destination rank of a point-to-point message


@dataclass
class Peak:
    """The peak of live memory."""

    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    micro_batch: int = 0  # of this rank, counted from 1; 0 if a schedule mixes them
    op: str = ""


class Storages(TorchDispatchMode):
    """Counts live storages created by operations, each once at its current size. For tensors with data it counts the
    memory of a real run."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()  # live bytes
        self.peak = Peak()
        self.phase, self.micro_batch, self.kind = "build", 0, ACTIVATIONS
        self._alive: dict[int, tuple[int, str]] = {}  # storage -> bytes, kind

    @property
    def alive(self) -> int:
        """Live bytes."""
        return sum(self.kinds.values())

    def restart(self) -> None:
        """Restart the search for the peak."""
        self.peak, self.micro_batch = Peak(self.alive, dict(self.kinds), self.phase, 0), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:  # its operations on local tensors are dispatched separately
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> None:
        """Record an operation."""
        travelling = func.namespace == "c10d"
        for tensor in tree_leaves((args, kwargs, out) if travelling else out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.count(tensor, TRAVELLING if travelling else None, func._schema.name)

    def count(self, tensor: Tensor, kind: str | None = None, op: str = "") -> None:
        """Count the storage of a tensor as live. `kind`: its new kind; a kind that the strategy keeps is never replaced
        by one that it does not."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.is_sparse:
            tensor = values_of(tensor)
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        before = self._alive.get(key)
        if before is None:
            weakref.finalize(storage, self._gone, key).atexit = False
        known = self.kind if before is None else before[1]
        if kind is not None and (known not in _OWNED or kind in _OWNED):
            known = kind
        if before != (size, known):
            self._put(key, size, known, op)

    def _put(self, key: int, size: int, kind: str, op: str) -> None:
        old, was = self._alive.get(key, (0, kind))
        self.kinds[was] -= old
        self.kinds[kind] += size
        self._alive[key] = (size, kind)
        if size > old and self.alive > self.peak.bytes:
            self.peak = Peak(self.alive, dict(self.kinds), self.phase, self.micro_batch, op)

    def _gone(self, key: int) -> None:
        size, kind = self._alive.pop(key, (0, self.kind))
        self.kinds[kind] -= size

    def resized(self, storage: Any) -> None:
        """Update a resized storage: FSDP frees gathered weights by resizing their storage to 0."""
        if storage._cdata in self._alive:
            self._put(storage._cdata, storage.nbytes(), self._alive[storage._cdata][1], "resize_")

    def __enter__(self) -> Any:
        plain, mine = torch.UntypedStorage.resize_, self

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            mine.resized(storage)
            return result

        self._plain_resize = plain
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
        super().__exit__(*error)


class Ledger(Storages):
    """Records the memory of tensors without data, and work and messages while `recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.ops: Counter[Op] = Counter()
        self.sent: Counter[SimulatedSend] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = _on_the_cpu(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fake = any(isinstance(t, FakeTensor) for t in tensors)
        if fake and func is torch.ops.aten._local_scalar_dense.default:  # checks such as "is it finite?"
            if tensors[0].dtype is torch.bool:
                return False
            return 0.0 if tensors[0].is_floating_point() else 0
        out = _computed(func, args, kwargs, tensors, fake)
        self.note(func, args, kwargs, out)
        if self.recording:
            self._record(func, args, kwargs, out, tensors)
        return out

    def _record(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any, tensors: list[Tensor]) -> None:
        if func.namespace == "c10d":
            sent = _message(self.phase, func, args, tensors)
            if sent is not None:
                self.sent[sent] += 1
            return
        if func.namespace == "prim":  # queries of a tensor's device
            return
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            size = 0  # a view
        elif "empty" in func._schema.name:
            size = 0  # uninitialized memory
        else:
            size = sum(_size(t) for t in tensors) + sum(_size(t) for t in results)
        self.ops[Op(self.phase, _flops(func, args, kwargs, out), size)] += 1


def _size(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.numel() * tensor.element_size()


def _flops(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOP as torch counts them; attention on a CPU is counted the same way."""
    name = func._schema.name.partition("::")[2]
    if name.startswith(_PRIVATE_SDPA):
        backward = name.endswith("backward")
        query, key, value = (t.shape for t in (args[1:4] if backward else args[:3]))
        return int(sdpa_flop_count(query, key, value) * (2.5 if backward else 1))
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _on_the_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `cpu:0`, Accelerate's name of the CPU, which is another device than `cpu` for tensors without data."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cpu":
        return dict(kwargs)
    return {**kwargs, "device": torch.device("cpu")}


def _computed(func: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor], fake: bool) -> Any:
    """Compute an operation's result, with data if all its inputs have data."""
    name = func._schema.name
    if fake and func is torch.ops.aten.nonzero.default:  # positions of non-finite losses: none
        with unset_fake_temporarily():
            return torch.empty(0, tensors[0].dim(), dtype=torch.int64)
    if fake and "sparse_coo" in name:  # its rows are known and determine sizes
        with unset_fake_temporarily():
            plain = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, FakeTensor) else a for a in args]
            return func(*plain, **kwargs)
    # uninitialized copy of a tensor without data
    if name == "aten::empty_like" and tensors[0].is_meta and tensors[0].is_floating_point():
        device = kwargs.get("device") or tensors[0].device
        return torch.empty_strided(tensors[0].shape, tensors[0].stride(), dtype=tensors[0].dtype, device=device)
    dtype = kwargs.get("dtype")
    whole = name == "aten::arange" or (dtype is not None and not dtype.is_floating_point)
    if not fake and (tensors or whole):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _message(phase: str, func: Any, args: tuple, tensors: list[Tensor]) -> SimulatedSend | None:
    name = func._schema.name.partition("::")[2].strip("_")
    groups = [dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)]
    if not groups or name in ("barrier", "monitored_barrier", "recv"):
        return None
    ranks = tuple(dist.get_process_group_ranks(groups[0]))
    to = ranks[args[2]] if name == "send" else None
    if name == "alltoall_base":
        size = _size(tensors[1])
    elif name in ("allgather", "reduce_scatter"):  # lists of tensors, one per rank
        size = sum(_size(t) for t in tree_leaves(args[name == "reduce_scatter"]))
    else:  # a gather's output, or a scatter's input
        size = max(_size(t) for t in tensors)
    return SimulatedSend(phase, name, ranks, size, to) if len(ranks) > 1 else None


def _is_group(thing: Any) -> bool:
    return "ProcessGroup" in str(thing._type())


# -- tensors of a strategy ---------------------------------------------------------------------------------------------


@contextmanager
def without_numbers(ledger: Ledger, needs: Collection[str] = ()) -> Iterator[None]:
    """Context in which new tensors have no data and `ledger` records all operations. `needs`: packages that the
    strategy uses."""
    with FakeTensorMode(allow_non_fake_inputs=True), ledger, nobody_disagrees("deepspeed" in needs):
        yield


@contextmanager
def nobody_disagrees(deepspeed: bool, device: str = "cpu") -> Iterator[None]:
    """Skip the check in which DeepSpeed's stage 3 compares executed modules between ranks."""
    if not deepspeed:
        yield
        return
    zero_config.prepare_import(device)
    from deepspeed.runtime.zero import partitioned_param_coordinator

    with patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None):
        yield


def join(rank: int, ranks: int) -> None:
    """Form a fake process group of `ranks` ranks in which only `rank` exists: collectives send nothing and never
    wait."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


class _Settled:
    """Replacement of `Module._apply` for a model without data: torch's would replace parameters that other objects
    hold."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, change: Any, recurse: bool = True) -> nn.Module:
        model = self._model()
        assert model is not None
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    with torch.no_grad():
                        new = change(parameter)
                    same = new.dtype == parameter.dtype and new.device.type == parameter.device.type
                    own = parameter if same else nn.Parameter(new, parameter.requires_grad)
                    replaced[id(parameter)] = own, parameter
                module._parameters[name] = replaced[id(parameter)][0]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = change(buffer)
        return model


def emptied(empty: Any, device: torch.device | None = None) -> nn.Module:
    """Create a model with `empty` on the meta device, and move it to the CPU or `device` without data; tied weights
    stay tied."""
    with _disable_current_modes():
        model: nn.Module = empty()
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in replaced:
                    room = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    replaced[id(parameter)] = nn.Parameter(room, parameter.requires_grad), parameter
                module._parameters[name] = replaced[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    model._apply = _Settled(model)  # type: ignore[method-assign]
    return model


def on_meta(empty: Any) -> nn.Module:
    """Create a model with `empty` and leave it on the meta device."""
    with _disable_current_modes():
        model: nn.Module = empty()
    return model


def kept_by(strategy: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, tensor) for all tensors that a strategy keeps between steps."""
    tensors = [*strategy.model.parameters(), *strategy.model.buffers()]
    yield from ((WEIGHTS, t) for t in tensors)
    yield from ((WEIGHTS, t.ds_tensor) for t in tensors if hasattr(t, "ds_tensor"))  # DeepSpeed's shards
    optimizer = getattr(strategy.update.optimizer, "optimizer", strategy.update.optimizer)
    own = {t.untyped_storage()._cdata for t in tensors if not isinstance(t, DTensor)}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, DTensor) and p.untyped_storage()._cdata not in own:
                yield OPTIMIZER, p
    for state in optimizer.state.values():
        yield from ((OPTIMIZER, value) for value in state.values() if isinstance(value, Tensor))


def summed_by(strategy: Any) -> Iterator[Tensor]:
    """Yield gradients, and partial sums that are not yet reduced with those of other ranks."""
    yield from (p.grad for p in strategy.model.parameters() if p.grad is not None)
    holders = [strategy, getattr(strategy, "leaves", None), *_listed(strategy, "scatters"), *_listed(strategy, "held")]
    for tree in (getattr(holder, "tree", None) for holder in holders):
        for tensors in (tree.nodes if tree is not None else {}).values():
            yield from tensors


def _listed(strategy: Any, name: str) -> list[Any]:
    value = getattr(strategy, name, None)
    return list(value) if isinstance(value, list) else []


@dataclass
class Product:
    """A group of identical products."""

    flops: int  # of one product
    call: tuple[Any, Any, Any]  # a torch function and its arguments, with stand-ins for the tensors
    count: int = 0

    @property
    def work(self) -> int:
        """FLOP of all products in the group."""
        return self.flops * self.count

    def again(self) -> Callable[[], Any]:
        """Return a function that computes one product again. Its tensors are filled first, because products of
        arbitrary memory contents (denormals) may be slow."""
        func, args, kwargs = self.call
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
        return lambda: func(*args, **kwargs)


class Products(TorchDispatchMode):
    """Records matrix products computed inside of this context."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Product] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            name = f"{func} {tree_map(_layout_key, (args, kwargs))}"
            if name not in self.products:
                flops = int(count(*args, **(kwargs or {}), out_val=out))
                self.products[name] = Product(flops, (func, tree_map(_like, args), tree_map(_like, kwargs or {})))
            self.products[name].count += 1
        return out


def _layout_key(thing: Any) -> Any:
    return (tuple(thing.shape), thing.stride(), str(thing.dtype)) if isinstance(thing, Tensor) else thing


def _like(thing: Any) -> Any:
    """Return a tensor of the same layout with its own memory."""
    return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype) if isinstance(thing, Tensor) else thing
