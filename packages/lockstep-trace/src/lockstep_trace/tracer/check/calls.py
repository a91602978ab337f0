"""Records the calls of outermost modules in a checked step: copies of their inputs, the state of all random numbers,
and the gradients that arrive at their outputs.

In: a module's inputs before a call, its output after it, the loss before backward. Out: `ModuleCall`s.
"""

from __future__ import annotations

import copy
import enum
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..fingerprint import measure, whole
from ..inputs import wrapped
from ..placement import is_dtensor
from ..versions import written

CALLS = 64  # most calls of a checked step
NODES = 50_000  # most nodes of a graph to visit between a loss and the outputs of calls
PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    slice,
    range,
    enum.Enum,
    torch.Size,
)


class NotRecomputable(Exception):
    """A call cannot be repeated on a copy; the text says why."""


@dataclass(frozen=True)
class RandomState:
    """State of all generators of random numbers that a forward may draw from."""

    cpu: Tensor
    devices: tuple[tuple[str, Any], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        devices: list[tuple[str, Any]] = []
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices.append(("cuda", torch.cuda.get_rng_state_all()))
        if torch.backends.mps.is_available():
            devices.append(("mps", torch.mps.get_rng_state()))
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
        return cls(torch.get_rng_state(), tuple(devices), random.getstate(), state)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for kind, state in self.devices:
            if kind == "cuda":
                torch.cuda.set_rng_state_all(state)
            else:
                torch.mps.set_rng_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclass
class CallOutput:
    """A floating-point tensor that a call returned. `gradients`: backward number -> gradient that arrived at it."""

    sketch: Tensor
    node: tuple[Any, int] | None  # (grad_fn, output number)
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class ModuleCall:
    """A call of an outermost module. `reason`: why it cannot be repeated, if so. `seeds`: backward number -> outputs
    from which the loss is computed outside the call."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: list[tuple[Any, int]]  # graph of the inputs that require a gradient
    random: RandomState
    autocast: tuple[str, Any] | None  # (device, dtype) inside the module
    modes: list[bool]
    buffers: dict[str, Tensor]
    versions: dict[int, tuple[int, int]]
    reason: str | None = None
    outputs: list[CallOutput] = field(default_factory=list)
    seeds: dict[int, list[int]] = field(default_factory=dict)


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors inside of tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 6 and isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner, depth + 1)
    elif depth < 6 and isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner, depth + 1)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested tuples, lists and mappings with each tensor replaced. Errors: `NotRecomputable` for
    values that cannot be copied, such as generators."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple):
        inner = [mapped(v, change) for v in value]
        return tuple(inner) if type(value) is tuple else _named_tuple(type(value), inner)
    if type(value) is list:
        return [mapped(v, change) for v in value]
    if type(value) is dict:
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, Iterator):
        raise NotRecomputable(f"an input is a {type(value).__name__}, which a call consumes")
    if isinstance(value, Mapping):
        try:
            kind: Any = type(value)
            return kind({k: mapped(v, change) for k, v in value.items()})
        except TypeError:
            raise NotRecomputable(f"an input of type {type(value).__name__} cannot be copied") from None
    try:
        return copy.deepcopy(value)
    except Exception as error:  # any class of the script's
        raise NotRecomputable(f"an input of type {type(value).__name__} cannot be copied: {error}") from None


def _named_tuple(kind: Any, values: list[Any]) -> Any:
    try:
        return kind(*values)
    except TypeError:
        raise NotRecomputable(f"an input of type {kind.__name__} cannot be copied") from None


def copied_input(tensor: Tensor) -> Tensor:
    """Return a leaf copy of an input, which requires a gradient if the input does."""
    if is_dtensor(tensor):
        raise NotRecomputable("an input is a DTensor")
    if wrapped(tensor):
        raise NotRecomputable("the model is called inside of torch.func")
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, each once."""
    unique: dict[int, Tensor] = {}
    for tensor in tensors(output):
        if (
            tensor.is_floating_point()
            and not is_dtensor(tensor)
            and not wrapped(tensor)
            and tensor.numel()
            and tensor.layout == torch.strided
        ):
            unique.setdefault(id(tensor), tensor)
    return list(unique.values())


def recorded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
    """Record a call before it is made."""
    reason: str | None = None
    copies: tuple[Any, Any] = ((), {})
    try:
        copies = mapped((args, kwargs), copied_input)
    except NotRecomputable as error:
        reason = str(error)
    sources = [node for t in tensors((args, kwargs)) if (node := graph_place(t)) is not None]
    buffers = {n: b.detach().clone() for n, b in module.named_buffers() if not is_dtensor(b)}
    versions = {id(p): written(p) for p in module.parameters()}
    modes = [m.training for m in module.modules()]
    return ModuleCall(module, *copies, sources, RandomState.now(), None, modes, buffers, versions, reason)


def graph_place(tensor: Tensor) -> tuple[Any, int] | None:
    """Return (node, output number) of a tensor in its graph, or None for a leaf."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def observe_output(call: ModuleCall, args: Any, output: Any, backward: Callable[[], int | None]) -> None:
    """Measure a call's outputs, and keep the gradients that will arrive at them. `backward`: number of the backward in
    progress, None outside of one."""
    inputs = {id(t) for t in tensors(args)}
    for tensor in floats(output):
        if id(tensor) in inputs:
            continue
        place = graph_place(tensor)
        row = CallOutput(measure([tensor], [whole(tensor)])[0], place)
        call.outputs.append(row)
        if tensor.requires_grad and place is not None:
            tensor.register_hook(_keeping(call, row, backward))


def _keeping(call: ModuleCall, row: CallOutput, backward: Callable[[], int | None]) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        number = backward()
        if number is None:
            call.reason = call.reason or "torch.autograd.grad goes through the model (a gradient penalty, for example)"
        elif gradient.layout != torch.strided or is_dtensor(gradient):
            call.reason = call.reason or "the gradient of an output is not a plain tensor"
        else:
            row.gradients[number] = gradient.detach().clone()

    return keep


def connect(calls: list[ModuleCall], losses: list[Tensor], number: int) -> tuple[dict[int, Tensor], list[Any]]:
    """Find from which outputs a loss is computed, and store them in `seeds` of their calls.

    Returns the parameters, by id, that the loss uses outside of the calls, and the nodes of torch's loss functions
    between. Errors: `NotRecomputable` if the graph is too large."""
    at = {row.node: (call, i) for call in calls for i, row in enumerate(call.outputs) if row.node is not None}
    queue = [node for loss in losses if (node := graph_place(loss)) is not None]
    outside: dict[int, Tensor] = {}
    entered: set[int] = set()
    known: set[tuple[Any, int]] = set()
    nodes: set[Any] = set()
    between: list[Any] = []
    while queue:
        place = queue.pop()
        if place in known:
            continue
        known.add(place)
        if place in at:
            call, i = at[place]
            call.seeds.setdefault(number, []).append(i)
            if id(call) not in entered:
                entered.add(id(call))
                queue += call.sources
            continue
        node = place[0]
        if node in nodes:
            continue
        nodes.add(node)
        between.append(node)
        if len(nodes) > NODES:
            raise NotRecomputable(f"the loss has more than {NODES} operations outside the model")
        if (variable := getattr(node, "variable", None)) is not None:
            outside[id(variable)] = variable
        queue += [(n, i) for n, i in node.next_functions if n is not None]
    return outside, between
