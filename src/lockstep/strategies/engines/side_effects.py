"""Side effects of a model's forward: writes to weights and buffers, `requires_grad`, plain attributes; uses of weights.

In: a model, and functions that call its forward. Out: `SideEffects`, by name, of one rank and of all; refusals. Changes
are undone: a forward before training leaves no trace.

Writes are detected when they happen, not by their result: a teacher that equals its student stays equal until the
student learns, and a limit on weights has no effect until a weight exceeds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.distributed.tensor_hashes import hash_text
from lockstep.distributed.torch_internals import is_dtensor
from lockstep.distributed.world import World

_ENGINES = frozenset(["accelerate", "builtins", "deepspeed", "lockstep", "torch"])
_LIBRARIES = _ENGINES | {"peft", "transformers", "transformers_modules"}
_PLAIN = (bool, int, float, str, type(None))  # attributes of these types are restored
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Writes(TorchDispatchMode):
    """Records which known tensors operations write to, and keeps a copy of each from before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # storage -> name
        self.known: dict[int, _Known] = {}  # by the tensor's id
        self.before: dict[str, tuple[Tensor, Tensor]] = {}  # name -> its memory, and a copy of the old contents
        self.new_memory: set[str] = set()
        self.replaced: set[str] = set()
        self.switched: set[str] = set()
        self.hooked: set[str] = set()

    def know(self, module: nn.Module, path: str) -> None:
        """Watch the memory of a module's own tensors. An engine may replace them later."""
        for last, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or id(tensor) in self.known or is_functorch_wrapped_tensor(tensor):
                continue  # a temporary of torch.func, not the module's own
            name = f"{path}.{last}".lstrip(".")
            self.names.setdefault(_storage(tensor), name)
            known = self.known[id(tensor)] = _Known(name, module, last, tensor)
            if known.plain_parameter and any(each.plain_parameter for each in self.of(name) if each is not known):
                self.replaced.add(name)

    def of(self, name: str) -> list[_Known]:
        return [each for each in self.known.values() if each.name == name]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # FSDP gathers with its own operations
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            for place, name in _written(func):
                for tensor in _pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(name)):
                    if isinstance(tensor, Tensor):
                        self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        name = self.names.get(_storage(tensor))
        if name is not None and name not in self.before:
            local = tensor._local_tensor if is_dtensor(tensor) else tensor
            memory = torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())
            self.before[name] = memory, memory.clone()

    def look(self) -> None:
        """Detect changes to the tensors since they became known."""
        for known in self.known.values():
            now, own = known.module._parameters.get(known.last, known.tensor), known.tensor
            self.new_memory |= {known.name} if _storage(own) != _storage(known.memory) else set()
            self.switched |= {known.name} if own.requires_grad != known.trained else set()
            self.hooked |= {known.name} if set(own._backward_hooks or ()) - known.hooks else set()
            if id(now) not in self.known and not is_dtensor(now):
                self.replaced.add(known.name)

    def restore(self) -> None:
        """Undo the writes."""
        for memory, copy in self.before.values():
            if memory.untyped_storage().nbytes() == copy.untyped_storage().nbytes():  # FSDP frees gathered weights
                memory.copy_(copy)
        for known in self.known.values():
            if known.name in self.new_memory and not is_dtensor(known.tensor):
                known.tensor.data = known.memory


class _Known:
    """A tensor of a module, and its original state."""

    def __init__(self, name: str, module: nn.Module, last: str, tensor: Tensor) -> None:
        self.name, self.module, self.last = name, module, last
        self.tensor, self.memory = tensor, tensor.detach()
        self.trained, self.hooks = tensor.requires_grad, set(tensor._backward_hooks or ())
        self.plain_parameter = isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)


def _storage(tensor: Tensor) -> int:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return 0 if local.is_sparse else local.untyped_storage()._cdata


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@contextmanager
def watching(model: nn.Module) -> Iterator[Writes]:
    """A context that records writes of the model's own forward only, and undoes them at the end. Weights are looked up
    when a module is called, because it may gather them then."""
    writes, paths = Writes(), {module: name for name, module in model.named_modules()}

    def know(module: nn.Module, *_: Any) -> None:
        for name, part in module.named_modules():  # BigBird replaces modules for short texts
            writes.know(part, paths.get(part, f"{paths[module]}.{name}"))

    def begin(*_: Any) -> None:
        know(model)
        writes.__enter__()

    def end(*_: Any) -> None:
        writes.__exit__(None, None, None)
        writes.look()

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]
    hooks += [module.register_forward_pre_hook(know) for module in paths]
    try:
        yield writes
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            writes.restore()


def hooks(model: nn.Module, after: bool = False) -> list[str]:
    """Return the names of weights with user hooks on their gradients; `after`: hooks that run after accumulation."""
    kind = "_post_accumulate_grad_hooks" if after else "_backward_hooks"
    return [name for name, p in model.named_parameters() if getattr(p, kind, None)]


# -- restoring state --------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module, effects: SideEffects) -> Iterator[None]:
    """A context in which the model runs in evaluation mode without gradients. Restores weights that a model changes for
    evaluation (rwkv divides them by powers of two)."""
    model.eval()
    restored = preserved(model, effects.evaluated) if effects.evaluated else nullcontext()
    with restored, torch.no_grad():
        yield
    model.train()


@contextmanager
def preserved(model: nn.Module, written: Collection[str] = ()) -> Iterator[set[str]]:
    """A context that at its end restores buffers, the weights in `written`, `requires_grad`, and plain attributes and
    hooks of user modules. Yields the names of changed tensors, complete at the end. They include frozen weights that
    are not in `written`, which are not restored."""
    weights = dict(model.named_parameters())
    tensors = [_Before(model, name) for name in [*dict(model.named_buffers()), *(n for n in written if n in weights)]]
    frozen = {name: p._version for name, p in weights.items() if not p.requires_grad and name not in written}
    flags = {name: p.requires_grad for name, p in weights.items()}
    keys = {name: set(p._backward_hooks or ()) for name, p in weights.items()}
    modules = [_Attributes(module) for module in model.modules() if of_user(module, _ENGINES)]
    changed: set[str] = set()
    try:
        yield changed
    finally:
        changed |= {each.name for each in tensors if each.restore()}
        changed |= {name for name, version in frozen.items() if weights[name]._version != version}
        for name, parameter in weights.items():
            if parameter.requires_grad != flags[name]:
                parameter.requires_grad_(flags[name])
            added = parameter._backward_hooks or {}
            for key in set(added) - keys[name]:
                del added[key]
        for module in modules:
            module.restore()


class _Before:
    """The present state of a parameter or buffer."""

    def __init__(self, model: nn.Module, name: str) -> None:
        holder, _, self.last = name.rpartition(".")
        self.name, self.module, self.tensor = name, model.get_submodule(holder), tensor_of(model, name)
        self.memory, self.copy = self.tensor.detach(), self.tensor.detach().clone()

    def restore(self) -> bool:
        """Restore the tensor. Returns whether it had changed."""
        parameter = self.last in self.module._parameters
        now = getattr(self.module, self.last)
        if now is not None and same_bits(now, self.copy) and (not parameter or now is self.tensor):
            return False
        if parameter:
            self.module._parameters[self.last] = self.tensor  # type: ignore[assignment]
            self.tensor.data = self.memory
        elif now is not None and now.shape == self.copy.shape:
            self.memory = now.detach()  # an engine may have put another tensor there
        else:
            setattr(self.module, self.last, self.copy)
            return True
        self.memory.copy_(self.copy)
        return True


class _Attributes:
    """The plain attributes of a module, other than parameters, buffers and modules: a call counter, a queue, a moving
    average in a plain tensor. Attributes of unknown types are left alone."""

    def __init__(self, module: nn.Module) -> None:
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        self.module, self.names = module, set(own)
        self.restorers = {name: put_back for name, value in own.items() if (put_back := _restorer(value)) is not None}

    def restore(self) -> None:
        own = vars(self.module)
        for name in [n for n in own if n not in self.names | _OF_EVERY_MODULE and _restorer(own[n]) is not None]:
            del own[name]  # added since
        own.update({name: put_back() for name, put_back in self.restorers.items()})


def _restorer(value: Any, depth: int = 4) -> Callable[[], Any] | None:
    """Return a function that restores a value's present contents; None for types that cannot be restored."""
    if type(value) in _PLAIN:
        return lambda: value
    if type(value) in (Tensor, nn.Parameter) and not value.is_meta and not value.is_sparse:
        copy = value.detach().clone()
        return lambda: _with_numbers(value, copy)
    if type(value) not in (list, dict, set, deque) or depth == 0:
        return None
    if isinstance(value, dict):
        inside = {key: _restorer(each, depth - 1) or partial(_itself, each) for key, each in value.items()}
        return lambda: _filled(value, {key: put_back() for key, put_back in inside.items()})
    parts = [_restorer(each, depth - 1) or partial(_itself, each) for each in value]
    return lambda: _filled(value, [put_back() for put_back in parts])


def _itself(value: Any) -> Any:
    return value


def _filled(container: Any, contents: Any) -> Any:
    """Replace the contents of a list, queue, set or mapping, and return it."""
    container.clear()
    add = container.extend if isinstance(container, list | deque) else container.update
    add(contents)
    return container


@torch.no_grad()
def _with_numbers(tensor: Tensor, copy: Tensor) -> Tensor:
    if tensor.shape != copy.shape:
        return copy
    if not same_bits(tensor, copy):
        tensor.copy_(copy)
    return tensor


def of_user(module: nn.Module, libraries: Collection[str] = _LIBRARIES) -> bool:
    return any(kind.__module__.split(".")[0] not in libraries for kind in type(module).__mro__)


def tensor_of(model: nn.Module, name: str) -> Tensor:
    holder, _, last = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(holder), last)
    return tensor


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that comparisons also work for non-finite numbers."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape."""
    return first.shape == second.shape and torch.equal(bits_of(first), bits_of(second))


SWITCHED = (
    "strategy.name: the model's forward changes requires_grad of weights, so which weights train would depend on "
    "the number of micro-batches that a process has run. Use one process (launch.processes=1 strategy.name=single), "
    "or freeze weights before training (model.freeze)"
)

Forward = Callable[[], None]


@dataclass(frozen=True)
class SideEffects:
    """Side effects of forward, by the names of parameters and buffers."""

    written: frozenset[str] = frozenset()  # values written
    new_memory: frozenset[str] = frozenset()  # written ones with new memory
    replaced: frozenset[str] = frozenset()  # replaced parameters
    switched: frozenset[str] = frozenset()  # changed `requires_grad`
    hooked: frozenset[str] = frozenset()  # hooks added to gradients
    evaluated: frozenset[str] = frozenset()  # written in evaluation mode only
    alike: Mapping[str, str] = field(default_factory=dict)
    """Tensors that forward sets to the same values for any batch and any number of calls (a limit on weights), with a
    hash."""

    @property
    def per_process(self) -> frozenset[str]:
        """Tensors and flags that would differ between processes."""
        return self.switched | (self.written - self.alike.keys())

    def together(self, all_gather: Callable[[SideEffects], list[SideEffects]]) -> SideEffects:
        """Combine the side effects of all ranks. Collective."""
        effects = all_gather(self)
        same = set.intersection(*(set(each.alike.items()) for each in effects))
        kinds = [kind.name for kind in fields(self) if kind.name != "alike"]
        return SideEffects(
            **{kind: frozenset[str]().union(*(getattr(each, kind) for each in effects)) for kind in kinds},
            alike=dict(same),
        )


def one_process(names: Collection[str]) -> str:
    """Format a note about side effects on one process, which can train such a model."""
    return (
        f"training changes {first_few(sorted(names))} outside of the optimizer, which several processes cannot "
        "combine: this model trains on one process only"
    )


def replacement(names: Collection[str]) -> str:
    """Format the error about parameters that forward replaces."""
    return (
        f"forward replaces the parameter {first_few(sorted(names))}, but the optimizer would keep updating the old "
        "one; write into the parameter instead (`weight.copy_(...)` under torch.no_grad())"
    )


def refusal(strategy: str, effects: SideEffects, model: nn.Module, averages: bool) -> str:
    """Format why several processes cannot train a model with these side effects. `averages`: whether the strategy
    reduces running statistics."""
    weights = dict(model.named_parameters())
    changed = first_few(names := sorted(effects.per_process))
    where = "Use one process (launch.processes=1 strategy.name=single), or a model"
    if effects.switched:
        return f"{SWITCHED} (changed here: {first_few(sorted(effects.switched))})"
    if any(name in weights for name in names):
        return (
            f"strategy.name: training changes {changed} of the model outside of the optimizer: every process would "
            f"compute different values from its own micro-batches, and {strategy} combines only gradients and the "
            f"running statistics of BatchNorm. {where} whose forward does not write to weights"
        )
    return (
        f"strategy.name: training changes {changed} of the model, which are not weights: every process would "
        f"compute other values, and {strategy} combines only running statistics such as "
        f"BatchNorm's{'' if averages else ' (this strategy not even those)'}. {where} without them"
    )


def refuse_own_tensors(model: nn.Module, engine: str, instead: str) -> None:
    """Refuse user modules that would lose hooks or tensors in an engine that builds a model on the meta device and
    replaces its weights. Errors: `RunError`."""
    if names := hooks(model):
        raise RunError(
            "LS4110",
            f"{engine} would lose the hook on the gradient of {first_few(names)} (register_hook), because it "
            f"replaces the model's weights by other tensors. Use {instead}",
        )
    loose = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if of_user(module)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and _holds_tensor(value)
    ]
    if loose:
        raise RunError(
            "LS4111",
            f"{engine} would lose {first_few(loose)}: tensors of a module that are neither parameters nor buffers "
            "(weight.data, constants, tensors in a list or a closure) get no values there. Read the weight itself "
            f"in forward, register constants as buffers (register_buffer(..., persistent=False)), or use {instead}",
        )


def refuse_writes(model: nn.Module, world: World, forward: Forward, engine: str, instead: str) -> None:
    """Refuse a model whose forward writes to trained weights, for an engine that splits the model and would lose the
    writes. Rank 0 has the whole `model` and calls `forward` once, without a trace. Collective. Errors: `RunError`, on
    every rank."""
    names: list[str] = []
    if world.is_main and any(of_user(module) for module in model.modules()):
        with suppress(Exception):  # it fails again in the trial step, with a better message
            effects, weights = effects_of(model.train(), [forward], ()), dict(model.named_parameters())
            touched = effects.written | effects.evaluated
            names = sorted(name for name in touched if name in weights and weights[name].requires_grad)
    if names := world.broadcast(names):
        raise RunError(
            "LS4112",
            f"{engine} splits the model, and would lose what the model's forward writes to the trained weight "
            f"{first_few(names)}. Use {instead}, or limit weights by a parametrization "
            "(torch.nn.utils.parametrize)",
        )


def _holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a value is or contains a tensor: in a list, a mapping, or a function's closure."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        inside = [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, Mapping):
        inside = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside = [*value]
    else:
        return False
    return depth > 0 and any(_holds_tensor(each, depth - 1) for each in inside)


def _cells(function: FunctionType) -> list[Any]:
    """Return the values in a function's closure."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty cell
            cells.append(cell.cell_contents)
    return cells


def first_few(names: Collection[str]) -> str:
    """Join the first few of many names."""
    return ", ".join([*names][:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def effects_of(model: nn.Module, forwards: Sequence[Forward], statistics: Collection[str]) -> SideEffects:
    """Return the side effects of the first forward, and those that the second one shares. `statistics`: buffers that
    ranks reduce. Leaves no trace."""
    if not forwards:
        return SideEffects()
    with preserved(model), watching(model) as writes:
        forwards[0]()
    written = frozenset({*writes.before} | writes.new_memory) - set(statistics)
    alike = _alike(model, written, *forwards) if written and len(forwards) > 1 else {}
    with preserved(model), watching(model) as evaluating:
        model.eval()
        try:
            forwards[0]()
        finally:
            model.train()
    return SideEffects(
        written,
        frozenset(writes.new_memory),
        frozenset(writes.replaced),
        frozenset(writes.switched),
        frozenset(writes.hooked),
        frozenset(evaluating.before.keys() - written - set(statistics)),
        alike,
    )


def _alike(model: nn.Module, names: Collection[str], first: Forward, second: Forward) -> dict[str, str]:
    """Return the tensors that both forwards, separately and in sequence, set to the same values when started from large
    ones, with a hash of these values. Empty if forward fails on large values."""
    hashes_of: dict[str, set[str]] = {name: set() for name in names}
    try:
        for turns in ((first,), (second,), (first, second)):
            with preserved(model, names):
                for name in names:
                    _enlarge(tensor_of(model, name))
                for forward in turns:
                    forward()
                for name in names:
                    hashes_of[name].add(hash_text(tensor_of(model, name)))
    except Exception:
        return {}
    return {name: hashes.pop() for name, hashes in hashes_of.items() if len(hashes) == 1}


@torch.no_grad()
def _enlarge(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        spread = torch.linspace(-1000, 1000, tensor.numel(), device=tensor.device).view(tensor.shape)
        tensor.copy_(tensor.float() * 1000 + spread)


def count_uses(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[int, int]:
    """Count how often one forward uses each weight (more than once: tied weights, shared layers, repeated embedding
    look-ups), by the weight's id. Leaves no trace in the model."""
    counts: dict[int, int] = {}

    def count(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1

    hooks = [m.register_forward_pre_hook(count) for m in model.modules()]
    training = model.training
    model.eval()  # no layer is skipped at random
    try:
        with preserved(model), watching(model), torch.no_grad():
            model(**inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return counts
