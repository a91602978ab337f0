"""Records the calls of outermost modules in a checked step, and repeats them on copies of the models.

In: a module's inputs before a call, its output after it, the loss before backward. Out: `ModuleCall`s, with copies of
the inputs, random states and gradients of the outputs; the outputs and gradients of a repeated call. `Isolation`
restores what a forward may change outside of its model.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import placement
from .fingerprint import measure, whole
from .gradient_history import written
from .inputs import wrapped
from .placement import is_dtensor

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
OUR_HOOKS = ("torch.", "accelerate.")  # hooks from these packages belong to a module, and write to nothing else


@dataclass
class Replay:
    """Results of a repeated call. `watched`: (module, operation or "", output) in the order in which they ended.
    `dropped`: (module, output) of each operation that dropped elements with torch's generators."""

    output: Any
    floats: list[Tensor]
    watched: list[tuple[str, str, Tensor]] = field(default_factory=list)
    dropped: list[tuple[str, Tensor]] = field(default_factory=list)


class Isolation(TorchFunctionMode):
    """Restores what operations of a repeated forward write to outside of its copies: tensors of closures, and
    generators passed to operations. `watched`: if set, operations directly inside the module `inside` are added."""

    def __init__(self, own: Sequence[Tensor], inside: str | None, stack: list[str]) -> None:
        super().__init__()
        self.own = {_storage(t) for t in own}
        self.alive = list(own)  # storages stay distinct while they are alive
        self.inside, self.stack = inside, stack
        self.watched: list[tuple[str, str, Tensor]] = []
        self.dropped: list[tuple[str, Tensor]] = []
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and id(generator) not in self.generators:
            self.generators[id(generator)] = (generator, generator.get_state())
        targets = [kwargs.get("out")]
        if args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name[:3] == "__i"):
            targets.append(args[0])
        for target in targets:
            if isinstance(target, Tensor) and _storage(target) not in self.own and id(target) not in self.written:
                self.written[id(target)] = (target, target.detach().clone())
        foreign = {s for t in tensors((args, kwargs)) if (s := _storage(t)) not in self.own}
        before = args[0].detach().clone() if name in DROPOUT and args and isinstance(args[0], Tensor) else None
        result = func(*args, **kwargs)
        if before is not None and isinstance(result, Tensor) and not torch.equal(before, result.detach()):
            self.dropped.append((self.stack[-1] if self.stack else "", result.detach().clone()))
        for tensor in tensors(result):
            if (storage := _storage(tensor)) not in self.own and storage not in foreign:  # not a view of a closure's
                self.own.add(storage)
                self.alive.append(tensor)
            if self.inside is not None and self.stack[-1:] == [self.inside] and tensor.is_floating_point():
                self.watched.append((self.inside, name, tensor.detach()))
        return result

    def restore(self) -> None:
        with torch.no_grad():
            for target, value in self.written.values():
                target.data.copy_(value)
        for generator, state in self.generators.values():
            generator.set_state(state)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or inside of vmap
        return id(tensor)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed devices that are initialized later
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile. Errors: `NotRecomputable` for wrappers that
    communicate or hold shards."""
    while True:
        names = {t.__name__ for t in type(module).__mro__}
        if "DistributedDataParallel" in names:
            if getattr(module, "mixed_precision", None) is not None:
                raise NotRecomputable("DistributedDataParallel casts the parameters")
            module = module.module  # type: ignore[assignment]
        elif "OptimizedModule" in names:
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def is_compiled(module: nn.Module) -> bool:
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in module.modules()
    )


def require_plain(module: nn.Module) -> None:
    """Check that a copy of the module computes alone and without side effects. Errors: `NotRecomputable`."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise NotRecomputable("hooks on all modules are registered")
    for name, inner in module.named_modules():
        names = {t.__name__ for t in type(inner).__mro__}
        if names & {"FSDPModule", "FullyShardedDataParallel", "DataParallel", "DistributedDataParallel"}:
            raise NotRecomputable(f"{name or 'the model'} is wrapped in {type(inner).__name__}, which communicates")
        if "forward" in vars(inner) and "_original_forward" not in vars(inner):
            raise NotRecomputable(f"the forward of {name or 'the model'} was replaced")
        for kind in HOOKS:
            for hook in getattr(inner, kind, {}).values():
                owner = getattr(hook, "__module__", None) or type(hook).__module__
                if not str(owner).startswith(OUR_HOOKS):
                    raise NotRecomputable(f"{name or 'the model'} has a hook of the script's own")
    if any(placement.is_dtensor(p) for p in module.parameters()):
        raise NotRecomputable("parameters are sharded (DTensor)")


def copied(call: ModuleCall) -> nn.Module:
    """Return a copy of a call's model with the present weights and the buffers and modes of the call. Errors:
    `NotRecomputable`."""
    if call.reason:
        raise NotRecomputable(call.reason)
    inner = unwrapped(call.module)
    require_plain(inner)
    if any(getattr(p, "device", None) == torch.device("meta") for p in inner.parameters()):
        raise NotRecomputable("parameters are on the meta device")
    # deepcopy fails for tensors with a graph, such as an auxiliary loss that the module keeps
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in attribute_tensors(inner) if not t.is_leaf}
    try:
        twin = copy.deepcopy(inner, memo)
    except Exception as error:  # a module may hold anything
        raise NotRecomputable(f"{type(inner).__name__} cannot be copied: {type(error).__name__}: {error}") from None
    originals = dict(zip(call.module.modules(), call.modes, strict=False))
    for module, original in zip(twin.modules(), inner.modules(), strict=True):
        module.training = originals.get(original, module.training)
        if "_original_forward" in vars(module):  # Accelerate's; it refers to the original module
            vars(module).pop("forward", None)
    prefix = next((n for n, m in call.module.named_modules() if m is inner), "")
    at_call = {n.removeprefix(f"{prefix}.") if prefix else n: b for n, b in call.buffers.items()}
    with torch.no_grad():
        for name, buffer in twin.named_buffers():
            if name in at_call and at_call[name].shape == buffer.shape:
                buffer.copy_(at_call[name])
    return twin


def attribute_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of a module and of those inside, other than parameters and buffers."""
    return [t for m in module.modules() for t in tensors([v for k, v in vars(m).items() if not k.startswith("_")])]


@contextlib.contextmanager
def _named(twin: nn.Module, stack: list[str], watched: list[tuple[str, str, Tensor]] | None) -> Iterator[None]:
    handles = []

    def begin(name: str) -> Any:
        return lambda module, args: stack.append(name)

    def end(name: str) -> Any:
        def ended(module: nn.Module, args: Any, output: Any) -> None:
            if stack:
                stack.pop()
            if watched is not None:
                watched.extend((name, "", t.detach()) for t in floats(output)[:1])

        return ended

    for name, module in twin.named_modules():
        handles += [
            module.register_forward_pre_hook(begin(name)),
            module.register_forward_hook(end(name), always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(
    twin: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    call: ModuleCall,
    gradients: bool = False,
    modules: bool = False,
    inside: str | None = None,
    seed: int | None = None,
    autocast: bool = True,
) -> Replay:
    """Call a copy. `modules`: watch the outputs of modules. `inside`: watch the operations of this module. `seed`: of
    random numbers instead of the call's state. Errors: `NotRecomputable` if the forward fails."""
    stack: list[str] = []
    watched: list[tuple[str, str, Tensor]] | None = [] if modules else None
    args, kwargs = mapped(inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad and gradients))
    args, kwargs = _placed(call.module, args, kwargs)
    own = [*twin.parameters(), *twin.buffers(), *tensors((args, kwargs)), *attribute_tensors(twin)]
    guard = Isolation(own, inside, stack)
    call.random.restore()
    if seed is not None:
        _seed(seed)
    try:
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(gradients))
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                dtype = (
                    call.autocast[1] if autocast and call.autocast is not None and call.autocast[0] == kind else None
                )
                contexts.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
                )
            contexts.enter_context(_named(twin, stack, watched))
            contexts.enter_context(guard)
            output = twin(*args, **kwargs)
    except Exception as error:  # of the script's forward
        raise NotRecomputable(f"the repeated forward fails: {type(error).__name__}: {str(error)[:200]}") from error
    finally:
        guard.restore()
    passed = {id(t) for t in floats((args, kwargs))}
    outputs = [t for t in floats(output) if id(t) not in passed]
    return Replay(output, outputs, guard.watched if inside is not None else watched or [], guard.dropped)


def _placed(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    devices = getattr(module, "device_ids", None)
    if not devices:
        return args, kwargs
    on_device: tuple[Any, Any] = mapped((args, kwargs), lambda t: t.to(torch.device("cuda", int(devices[0]))))
    return on_device


def rounding_of(call: ModuleCall) -> float:
    """Return the largest relative difference of repeated outputs that rounding explains."""
    if call.autocast:
        return 2e-2
    return max((ROUNDING.get(p.dtype, 1e-4) for p in call.module.parameters()), default=1e-4)


def require_reproduced(call: ModuleCall) -> None:
    """Check that a repeated forward has the outputs of training. Errors: `NotRecomputable`."""
    if reproduced(call, run(copied(call), (call.args, call.kwargs), call)) > rounding_of(call):
        raise NotRecomputable("repeated outputs differ from those of training: the forward depends on a state")


def reproduced(call: ModuleCall, result: Replay) -> float:
    """Return the largest relative difference between recorded and repeated outputs. Errors: `NotRecomputable` if
    their number or shapes differ."""
    if len(result.floats) != len(call.outputs):
        raise NotRecomputable("the repeated forward returned different outputs")
    largest = 0.0
    for row, tensor in zip(call.outputs, result.floats, strict=True):
        again = measure([tensor.detach()], [whole(tensor)])[0]
        if again.shape != row.sketch.shape:
            raise NotRecomputable("the repeated forward returned outputs of different shapes")
        if not torch.equal(again, row.sketch):
            one, other = row.sketch[2:].view(torch.float64), again[2:].view(torch.float64)
            size = max(float(one.norm()), float(other.norm()))
            largest = max(largest, float((one - other).norm()) / size if size else 0.0, 1e-16)
    return largest


def gradients(twin: nn.Module, call: ModuleCall, number: int, autocast: bool = True) -> tuple[dict[int, Tensor], float]:
    """Recompute what one backward adds to the gradients of a call's parameters: id of the parameter -> gradient, and
    how far the repeated outputs are from the recorded ones. Errors: `NotRecomputable`.

    The gradient that arrived at each output replaces the one computed inside, because the loss may use an output and
    another one computed from it."""
    result = run(twin, (call.args, call.kwargs), call, gradients=True, autocast=autocast)
    distance = reproduced(call, result)
    fired, seeds = arrived_at(call, number)
    arrived = {i: g.to(result.floats[i].dtype) for i, g in fired.items()}
    for i in fired:
        if result.floats[i].requires_grad:
            result.floats[i].register_hook(lambda _, value=arrived[i]: value)
    twins = [p for p in twin.parameters() if p.requires_grad]
    roots = [result.floats[i] for i in seeds if result.floats[i].requires_grad]
    if not roots:
        raise NotRecomputable("the repeated forward has no graph")
    try:
        parts = torch.autograd.grad(roots, twins, [arrived[i] for i in seeds], allow_unused=True)
    except Exception as error:  # of a function of the script's
        raise NotRecomputable(f"the repeated backward fails: {str(error)[:200]}") from error
    inner = unwrapped(call.module)
    ids = [id(p) for p in inner.parameters() if p.requires_grad]
    if len(ids) != len(twins):
        raise NotRecomputable("requires_grad of parameters changed during the call")
    return {key: g.detach() for key, g in zip(ids, parts, strict=True) if g is not None}, distance


def arrived_at(call: ModuleCall, number: int) -> tuple[dict[int, Tensor], list[int]]:
    """Return the gradients that arrived at outputs in a backward, by index, and the outputs from which the loss is
    computed. Errors: `NotRecomputable`."""
    fired = {i: row.gradients[number] for i, row in enumerate(call.outputs) if number in row.gradients}
    seeds = [i for i in call.seeds.get(number, []) if i in fired]
    if not seeds and len(fired) != 1:
        raise NotRecomputable("the loss depends on several outputs in an unknown way")
    return fired, seeds or list(fired)


CALLS = 64  # max. calls of a checked step
NODES = 50_000  # max. nodes of a graph to visit between a loss and the outputs of calls
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
            tensor.register_hook(_keeping(weakref.ref(call), weakref.ref(row), backward))


def _keeping(
    call_of: weakref.ref[ModuleCall], row_of: weakref.ref[CallOutput], backward: Callable[[], int | None]
) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        number, call, row = backward(), call_of(), row_of()
        if call is None or row is None:  # the graph holds this hook, and the row the graph
            return
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
