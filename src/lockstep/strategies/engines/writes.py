"""Writes of a model's forward, and the model as it was before them.

In: a model. Out: the parameters and buffers that operations of its forward write to, by name; and everything put back.

A write is seen when it happens, not by its result: a teacher that equals its student stays the same until the student
learns, and a limit on weights does nothing until a weight exceeds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_ENGINES = frozenset(["accelerate", "builtins", "deepspeed", "lockstep", "torch"])
_LIBRARIES = _ENGINES | {"peft", "transformers", "transformers_modules"}
_PLAIN = (bool, int, float, str, type(None))  # attributes of these types are put back
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Writes(TorchDispatchMode):
    """Notes which known tensors operations write to, and keeps a copy of each from before."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # storage -> name
        self.known: dict[int, _Known] = {}  # by the tensor's id
        self.before: dict[str, tuple[Tensor, Tensor]] = {}  # name -> its memory, and a copy of what was there
        self.moved: set[str] = set()
        self.replaced: set[str] = set()
        self.switched: set[str] = set()
        self.hooked: set[str] = set()

    def know(self, module: nn.Module, path: str) -> None:
        """Watch the memory of a module's own tensors. An engine may show others after a while."""
        for last, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or id(tensor) in self.known or is_functorch_wrapped_tensor(tensor):
                continue  # what torch.func puts there for a call is no tensor of the module's
            name = f"{path}.{last}".lstrip(".")
            self.names.setdefault(_storage(tensor), name)
            known = self.known[id(tensor)] = _Known(name, module, last, tensor)
            if known.plain_parameter and any(each.plain_parameter for each in self.of(name) if each is not known):
                self.replaced.add(name)

    def of(self, name: str) -> list[_Known]:
        return [each for each in self.known.values() if each.name == name]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (
            isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        ):  # FSDP gathers by operations of its own
            for place, name in _written(func):
                for tensor in _pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(name)):
                    if isinstance(tensor, Tensor):
                        self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        name = self.names.get(_storage(tensor))
        if name is not None and name not in self.before:
            held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            memory = torch.empty(0, dtype=held.dtype, device=held.device).set_(held.untyped_storage())
            self.before[name] = memory, memory.clone()

    def look(self) -> None:
        """What became of the tensors since they became known."""
        for known in self.known.values():
            now, own = known.module._parameters.get(known.last, known.tensor), known.tensor
            self.moved |= {known.name} if _storage(own) != _storage(known.memory) else set()
            self.switched |= {known.name} if own.requires_grad != known.trained else set()
            self.hooked |= {known.name} if set(own._backward_hooks or ()) - known.hooks else set()
            if id(now) not in self.known and not isinstance(now, DTensor):
                self.replaced.add(known.name)

    def restore(self) -> None:
        """Put back what was there."""
        for memory, copy in self.before.values():
            if memory.untyped_storage().nbytes() == copy.untyped_storage().nbytes():  # FSDP frees what it has gathered
                memory.copy_(copy)
        for known in self.known.values():
            if known.name in self.moved and not isinstance(known.tensor, DTensor):
                known.tensor.data = known.memory


class _Known:
    """A tensor of a module, and how it was."""

    def __init__(self, name: str, module: nn.Module, last: str, tensor: Tensor) -> None:
        self.name, self.module, self.last = name, module, last
        self.tensor, self.memory = tensor, tensor.detach()
        self.trained, self.hooks = tensor.requires_grad, set(tensor._backward_hooks or ())
        self.plain_parameter = isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor)


def _storage(tensor: Tensor) -> int:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if held.is_sparse else held.untyped_storage()._cdata


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@contextmanager
def watching(model: nn.Module) -> Iterator[Writes]:
    """Writes of the model's own forward and nothing else. They are undone at the end. A module may gather its weights
    when it is called: they are looked for then."""
    writes, paths = Writes(), {module: name for name, module in model.named_modules()}

    def know(module: nn.Module, *_: Any) -> None:
        for name, part in module.named_modules():  # BigBird puts others in their place for short texts
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
    """The weights with hooks of the user's on their gradients, by name; `after`: on what gradients are added up to."""
    kind = "_post_accumulate_grad_hooks" if after else "_backward_hooks"
    return [name for name, p in model.named_parameters() if getattr(p, kind, None)]


# -- everything as it was --------------------------------------------------------------------------------------------


@contextmanager
def preserved(model: nn.Module, written: Collection[str] = ()) -> Iterator[set[str]]:
    """At the end buffers, the weights that are `written`, which weights are trained, and plain attributes and hooks of
    the user's modules are what they were. Yields the names of the tensors that had changed, complete at the end: also
    of frozen weights that are not `written`, which are not put back."""
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
    """A parameter or buffer as it is now."""

    def __init__(self, model: nn.Module, name: str) -> None:
        holder, _, self.last = name.rpartition(".")
        self.name, self.module, self.tensor = name, model.get_submodule(holder), tensor_of(model, name)
        self.memory, self.copy = self.tensor.detach(), self.tensor.detach().clone()

    def restore(self) -> bool:
        """Put it back. Returns whether it had changed."""
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
    """Attributes of a module that are no parameters, buffers or modules: a count of calls, a queue, a moving average in
    a plain tensor. Those of kinds that are not known here are left alone."""

    def __init__(self, module: nn.Module) -> None:
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        self.module, self.names = module, set(own)
        self.kept = {name: put_back for name, value in own.items() if (put_back := _kept(value)) is not None}

    def restore(self) -> None:
        own = vars(self.module)
        for name in [n for n in own if n not in self.names | _OF_EVERY_MODULE and _kept(own[n]) is not None]:
            del own[name]  # made meanwhile
        own.update({name: put_back() for name, put_back in self.kept.items()})


def _kept(value: Any, depth: int = 4) -> Callable[[], Any] | None:
    """What gives a value back with the contents it has now; None for a kind of value that cannot be kept."""
    if type(value) in _PLAIN:
        return lambda: value
    if type(value) in (Tensor, nn.Parameter) and not value.is_meta and not value.is_sparse:
        copy = value.detach().clone()
        return lambda: _with_numbers(value, copy)
    if type(value) not in (list, dict, set, deque) or depth == 0:
        return None
    if isinstance(value, dict):
        inside = {key: _kept(each, depth - 1) or partial(_itself, each) for key, each in value.items()}
        return lambda: _filled(value, {key: put_back() for key, put_back in inside.items()})
    parts = [_kept(each, depth - 1) or partial(_itself, each) for each in value]
    return lambda: _filled(value, [put_back() for put_back in parts])


def _itself(value: Any) -> Any:
    return value


def _filled(container: Any, contents: Any) -> Any:
    """The list, queue, set or mapping, with these contents instead of its own."""
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
    """The bytes of a tensor. Numbers that are not finite do not mislead a comparison of bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape."""
    return first.shape == second.shape and torch.equal(bits_of(first), bits_of(second))
