"""Records each operation of one optimizer step (`--level operations`): its inputs, its result and its caller.

In: operations that torch dispatches from the end of the previous step (for step 0: from the first call of a model with
gradients) to the end of the step, and the Python stack. Out: one record `operations`; for each operation a `CallSite`,
the line of the user's own file and whether backward, a recomputation or an optimizer called it. Of tensors only hashes
and short sketches are kept, on their device until the step is over.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch as dispatch

from .engines import watch_compiler
from .fingerprint import measure, whole
from .hooks import Hooks, working
from .placement import WRAPPERS, plain_name
from .recorder import Recorder
from .records import Pending, packed
from .replay import tensors as _tensors

MOST = 50_000  # operations recorded
BUCKETS = 16  # of a sketch
ARGUMENTS = 60  # characters of an argument
UNDEFINED = -1  # index of a value that is not looked at
MAKE_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
WRITE_ONLY = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_"),
    *("cauchy_", "log_normal_", "set_", "_foreach_copy_", "_foreach_zero_"),
}
NO_NUMBERS = ("detach", "alias", "lift_fresh")  # names of what they are given
FIRST_ALONE = (
    "all_gather_copy_in",
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "_fused_sdp",
)
# c10d: (arguments that are read, arguments that are written)
COLLECTIVES = {
    "allreduce_": ((0,), (0,)),
    "allreduce_coalesced_": ((0,), (0,)),
    "broadcast_": ((), (0,)),
    "reduce_": ((0,), (0,)),
    "allgather_": ((1,), (0,)),
    "_allgather_base_": ((1,), (0,)),
    "allgather_coalesced_": ((1,), (0,)),
    "allgather_into_tensor_coalesced_": ((1,), (0,)),
    "reduce_scatter_": ((1,), (0,)),
    "_reduce_scatter_base_": ((1,), (0,)),
    "reduce_scatter_tensor_coalesced_": ((1,), (0,)),
    "gather_": ((1,), (0,)),
    "scatter_": ((1,), (0,)),
    "alltoall_": ((1,), (0,)),
    "alltoall_base_": ((1,), (0,)),
    "send": ((0,), ()),
    "recv_": ((), (0,)),
    "recv_any_source_": ((), (0,)),
}
_WRAPPED: list[Hooks] = []  # whose module calls are wrapped


class Operations(dispatch.TorchDispatchMode):
    """Records the operations of step `at` of the process's first optimizer."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler

    def __init__(self, hooks: Hooks, recorder: Recorder, at: int) -> None:
        super().__init__()
        self.hooks, self.recorder, self.at = hooks, recorder, at
        self.active = self.over = False
        self.entries: list[dict[str, Any]] = []
        self.left_out = 0
        self.regions: dict[str, int] = {}  # calls of compiled regions
        self.unseen = 0  # operations of compiled code
        self.vectors: list[Tensor | None] = []
        self.stacks = threading.local()
        self._known: dict[tuple[Any, ...], int] = {}  # a tensor as it was written last -> index in `vectors`
        self._written: dict[int, int] = {}  # address of a storage -> number of its last write
        self._makers: dict[int, int] = {}  # address of a storage -> index of the operation that wrote it last
        self._storages: dict[int, StorageWeakRef] = {}
        self._undefined: dict[int, list[tuple[int, int]]] = {}  # address of a new storage -> bytes written since
        self._waited_for: dict[int, list[tuple[int, Tensor]]] = {}  # address -> outputs of collectives
        self._nodes: dict[int, int] = {}  # sequence number of autograd -> index of the operation that made the node
        self._names: dict[int, str] = {}
        self._pending: Pending | None = None

    # -- from when to when -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start recording in this thread, below the user's own dispatch modes."""
        self.active = True
        self._enter()

    def is_first(self) -> bool:
        """Return whether a call of a model now begins the chosen step, if that is step 0."""
        return not self.over and self.at == 0 and not any(self.recorder.steps) and torch.is_grad_enabled()

    def stepped(self, number: int, steps: int) -> None:
        """Record that optimizer `number` has made `steps` steps: start or end at the chosen one."""
        self.flush()
        if number == 0 and self.active and steps > self.at:
            self.finish()
        elif number == 0 and not self.over and not self.active and steps == self.at:
            self.begin()

    def skipped(self) -> None:
        """Discard the operations so far, because a scaler skipped the step."""
        if self.active:
            self._forget()

    def finish(self, unfinished: bool = False) -> None:
        """Stop recording. Numbers on a device are written at the next step or at the end. `unfinished`: the process
        ends within the step."""
        if not self.active:
            return
        self._leave()
        self.active, self.over = False, True
        for address in list(self._waited_for):
            self._arrived(address)
        record = {
            "opt": 0,
            "step": self.at,
            "operations": self.entries,
            "left_out": self.left_out,
            "unfinished": unfinished,
            "regions": self.regions,
            "unseen": self.unseen,
            "threads": torch.get_num_threads(),
        }
        empty = torch.zeros(2 + BUCKETS, dtype=torch.int64)
        vectors = [empty if v is None else v for v in self.vectors]
        self._pending = Pending(record, None, {"values": vectors})
        self._forget()
        if not self._pending.on_device:
            self.flush()

    def flush(self) -> None:
        """Write the record, if the step is over."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.recorder.write("operations", **pending.record, values=packed(pending.host()["values"]))

    def _forget(self) -> None:
        self.entries, self.vectors, self.regions, self.left_out, self.unseen = [], [], {}, 0, 0
        for each in (self._known, self._written, self._makers, self._waited_for, self._nodes, self._undefined):
            each.clear()
        self._storages.clear()

    def _enter(self) -> None:
        above = _popped()
        dispatch._push_mode(self)
        for mode in above:
            dispatch._push_mode(mode)

    def _leave(self) -> bool:
        modes = _popped()
        there = any(mode is self for mode in modes)
        for mode in modes:
            if mode is not self:
                dispatch._push_mode(mode)
        return there

    # -- compiled regions and modules --------------------------------------------------------------------------------

    def around(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a compiled function without this mode, and record it as one entry."""
        if not self.active and self.is_first():
            self.begin()
        if not self.active or working() or not self._leave():
            return function(*args, **kwargs)
        name = str(getattr(function, "__qualname__", "a function"))
        entry = self.hooks.guarded(self._region, name, args, kwargs)
        try:
            result = function(*args, **kwargs)
        finally:
            self._enter()
        self._known.clear()  # it may have written to any tensor
        if entry is not None:
            self.hooks.guarded(self._outputs_of, entry, [(t, False) for t in _tensors(result)])
        return result

    def _region(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        self.regions[name] = self.regions.get(name, 0) + 1
        site = call_site(bool(self.hooks.backward_depth))
        if site is None:
            return None
        return self._entry(f"compiled region {name}", site, list(_tensors((args, list(kwargs.values())))), {}, False)

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Return a context manager that assigns operations to a module."""
        stack = self._stack()
        stack.append(self._name(module))
        try:
            yield
        finally:
            stack.pop()

    def _stack(self) -> list[str]:
        if not hasattr(self.stacks, "modules"):
            self.stacks.modules = []
        modules: list[str] = self.stacks.modules
        return modules

    def _name(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            self._names = {}
            for root in (r for ref in self.recorder.roots if (r := ref()) is not None):
                for name, each in root.named_modules():
                    plain = plain_name(name)
                    self._names.setdefault(id(each), "" if plain in WRAPPERS else plain)
            self._names.setdefault(id(module), f"({type(module).__name__})")
        return self._names[id(module)]

    # -- one operation -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and not all(_is_plain_type(kind) for kind in types):
            return NotImplemented  # DTensor and its like: their own operations come here afterwards
        if not self.active or working() or _base(func) in NO_NUMBERS or getattr(func, "namespace", "") == "profiler":
            return func(*args, **kwargs)
        begun = self.hooks.guarded(self._before, func, args, kwargs)
        result = func(*args, **kwargs)
        if begun is not None:
            self.hooks.guarded(self._after, *begun, func, result)
        return result

    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Tensor]] | None:
        site = call_site(bool(self.hooks.backward_depth))
        if site is None:
            self.unseen += 1
            return None
        if len(self.entries) >= MOST:
            self.left_out += 1
            return None
        schema = getattr(func, "_schema", None)
        if schema is None:  # of higher order
            reads: list[Tensor] = list(_tensors((args, list(kwargs.values()))))
            return self._entry(str(func), site, reads, {}, False), []
        arguments = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(schema.arguments)]
        reads, writes = _read_and_written(func, arguments)
        if func.namespace == "_c10d_functional" and _base(func) == "wait_tensor":
            reads = []
        if _base(func) == "resize_" and math.prod(args[1]) > args[0].numel():  # what it adds is undefined
            reads, writes = [], []
        values = {a.name: text for a, v in arguments if (text := _as_text(v)) is not None}
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        return self._entry(str(func), site, reads, values, seeded), writes

    def _entry(
        self, name: str, site: CallSite, reads: list[Tensor], values: dict[str, str], seeded: bool
    ) -> dict[str, Any]:
        for tensor in reads:
            self._arrived(self._address(tensor))
        entry: dict[str, Any] = {
            "op": name,
            "in": [self._value(t) for t in reads],
            "of": [self._made_by(t) for t in reads],
        }
        entry |= {"shapes": [[_shape(t) for t in reads], []], "out": [], "args": values}
        modules = self._stack()
        entry |= {"module": modules[-1] if modules else "", "phase": self._phase(site)}
        entry |= {"line": site.line, "library": site.library, "started": site.started}
        if seeded:
            entry["random"] = True
        self._of_autograd(entry, site)
        self.entries.append(entry)
        return entry

    def _phase(self, site: CallSite) -> str:
        if site.role:
            return site.role
        return "forward" if torch.is_grad_enabled() else "no grad"

    def _of_autograd(self, entry: dict[str, Any], site: CallSite) -> None:
        if entry["phase"] != "backward":
            self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.entries))
            return
        node = torch._C._current_autograd_node()
        if node is None:
            return
        entry["node"] = node.name()
        leaf = node.name().endswith("AccumulateGrad")  # has no sequence number; torch 2.4 fails to return it
        forward = None if leaf else self._nodes.get(node._sequence_nr())
        if forward is not None:
            entry["forward"] = forward
            entry["module"] = self.entries[forward]["module"]
        elif (variable := getattr(node, "variable", None)) is not None:
            entry["parameter"] = self.recorder.names()[0].get(id(variable))

    def _after(self, entry: dict[str, Any], writes: list[Tensor], func: Any, result: Any) -> None:
        name, results = _base(func), list(_tensors(result))
        if name in MAKE_NOTHING or (name == "resize_" and not writes):
            for address in map(self._address, results):
                self.allocated(address)
            entry["shapes"][1] = [_shape(t) for t in results]
            return
        if name.startswith(FIRST_ALONE) and "backward" not in name:  # the others have parts that are undefined
            results = results[:1]
        returns = getattr(getattr(func, "_schema", None), "returns", ())
        viewed = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        own = {id(t) for t in writes}
        outputs = [(t, False) for t in writes] + [(t, viewed) for t in results if id(t) not in own]
        collective = getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        self._outputs_of(entry, outputs, later=collective and name != "wait_tensor")

    def _outputs_of(self, entry: dict[str, Any], tensors: list[tuple[Tensor, bool]], later: bool = False) -> None:
        at = next(i for i in range(len(self.entries) - 1, -1, -1) if self.entries[i] is entry)
        for tensor, viewed in tensors:
            address = self._address(tensor)
            if not viewed:
                self._defines(address, tensor)
                self._written[address] = self._written.get(address, 0) + 1
                self._makers[address] = at
        for tensor, viewed in tensors:
            entry["shapes"][1].append(_shape(tensor))
            if later:
                self.vectors.append(None)
                entry["out"].append(len(self.vectors) - 1)
                self._waited_for.setdefault(self._address(tensor), []).append((len(self.vectors) - 1, tensor))
            else:
                if not viewed:  # a collective of gloo copies its result at `wait`
                    self._arrived(self._address(tensor))
                entry["out"].append(self._value(tensor))

    def allocated(self, address: int) -> None:
        """Note that nothing has been written yet to the storage at an address."""
        self._renew(address)
        self._undefined[address] = []

    def _address(self, tensor: Tensor) -> int:
        if not _is_measurable(tensor) or tensor.layout != torch.strided:
            return 0
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known, now = self._storages.get(address), StorageWeakRef(storage)
        if known is None or known.cdata != now.cdata:
            self._storages[address] = now  # its number is given to no other storage while this is
            if known is not None:
                self._renew(address)
        return address

    def _renew(self, address: int) -> None:
        self._written[address] = self._written.get(address, 0) + 1
        self._makers.pop(address, None)
        self._undefined.pop(address, None)

    def _defines(self, address: int, tensor: Tensor) -> None:
        if address not in self._undefined:
            return
        begin, end = _span(tensor)
        rows: list[tuple[int, int]] = []
        for one, other in sorted([*self._undefined[address], (begin, end)]):
            if rows and one <= rows[-1][1]:
                rows[-1] = (rows[-1][0], max(rows[-1][1], other))
            else:
                rows.append((one, other))
        self._undefined[address] = rows
        if not tensor.is_contiguous() or rows == [(0, tensor.untyped_storage().nbytes())]:
            del self._undefined[address]

    def _is_undefined(self, address: int, tensor: Tensor) -> bool:
        if address not in self._undefined:
            return False
        begin, end = _span(tensor)
        return not any(one <= begin and end <= other for one, other in self._undefined[address])

    # -- values ------------------------------------------------------------------------------------------------------

    def _arrived(self, address: int) -> None:
        for index, tensor in self._waited_for.pop(address, ()):
            self.vectors[index] = _summary(tensor)

    def _value(self, tensor: Tensor) -> int:
        address = self._address(tensor)
        if not _is_measurable(tensor) or self._is_undefined(address, tensor):
            return UNDEFINED
        key = (
            address,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride() if tensor.layout == torch.strided else (id(tensor),),
            tensor.storage_offset() if tensor.layout == torch.strided else 0,
            tensor.is_conj() or tensor.is_neg(),
            self._written.get(address, 0),
        )
        if address == 0 or key not in self._known:
            self.vectors.append(_summary(tensor))
            self._known[key] = len(self.vectors) - 1
        return self._known[key]

    def _made_by(self, tensor: Tensor) -> int | str | None:
        maker = self._makers.get(self._address(tensor))
        return self.recorder.names()[0].get(id(tensor)) if maker is None else maker


def begin(hooks: Hooks, recorder: Recorder) -> None:
    """Record the operations of the step that the settings choose."""
    operations = Operations(hooks, recorder, recorder.settings.step or 0)
    recorder.operations = operations
    if not _WRAPPED:
        _WRAPPED.append(hooks)
        _wrap_call(hooks)
        _wrap_resize(hooks)
        watch_compiler(_Current(hooks).around)


class _Current:
    """The regions of the recorder that is running."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def around(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operations = _running(self.hooks)
        return function(*args, **kwargs) if operations is None else operations.around(function, args, kwargs)


def _running(hooks: Hooks) -> Operations | None:
    recorder = hooks.recorder
    return None if recorder is None else recorder.operations


def _wrap_call(hooks: Hooks) -> None:
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # first: the compiler guards whatever is looked at before
            return original(module, *args, **kwargs)
        operations = _running(hooks)
        if operations is None or operations.over:
            return original(module, *args, **kwargs)
        if not operations.active:
            if not operations.is_first() or next(module.parameters(), None) is None:
                return original(module, *args, **kwargs)
            hooks.guarded(operations.recorder.root, module)
            operations.begin()
        with operations.inside(module):
            return original(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _wrap_resize(hooks: Hooks) -> None:
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    @functools.wraps(original)
    def resize(self: Any, size: int) -> Any:
        operations = _running(hooks)
        real = self.device.type != "meta"  # the compiler's tensors without numbers have no address
        allocates = operations is not None and operations.active and size and not self.size() and real
        result = original(self, size)
        if allocates and operations is not None:
            operations.allocated(self.data_ptr())
        return result

    storage.resize_ = resize


# -- tensors and arguments -------------------------------------------------------------------------------------------


def _popped() -> list[Any]:
    modes = [m for m in dispatch._get_current_dispatch_mode_stack() if getattr(m, "_mode_key", None) is None]
    for _ in modes:
        dispatch._pop_mode()
    return modes


def _is_plain_type(kind: type) -> bool:
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _base(func: Any) -> str:
    packet = getattr(func, "overloadpacket", None)
    return str(func) if packet is None else str(packet.__name__)


def _read_and_written(func: Any, arguments: list[tuple[Any, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    name = _base(func)
    if func.namespace == "c10d" and name in COLLECTIVES:
        reads, writes = COLLECTIVES[name]
        sides = ([arguments[i][1] for i in side if i < len(arguments)] for side in (reads, writes))
        read, written = (list(_tensors(side)) for side in sides)
        return read, written
    read, written = [], []
    for argument, value in arguments:
        tensors = list(_tensors(value))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += tensors
        if not (is_written and (argument.is_out or name in WRITE_ONLY)):
            read += tensors
    return read, written


def _as_text(value: Any) -> str | None:
    if isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)[:ARGUMENTS].removeprefix("torch.")
    if isinstance(value, list | tuple) and value and all(isinstance(v, bool | int | float) for v in value):
        return repr(list(value))[:ARGUMENTS]
    return None


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _span(tensor: Tensor) -> tuple[int, int]:
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return begin * size, (begin + int(last) + 1) * size


def _is_measurable(tensor: Tensor) -> bool:
    plain = _is_plain_type(type(tensor)) and tensor.device.type != "meta" and not tensor.is_quantized
    if plain and tensor.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return plain


def _summary(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        tensor = tensor.detach().resolve_conj().resolve_neg()
        (vector,) = measure([tensor], [whole(tensor)])
        buckets = nn.functional.pad(vector[2:].view(torch.float64), (0, -(vector.numel() - 2) % BUCKETS))
        return torch.cat([vector[:2], buckets.view(-1, BUCKETS).sum(0).view(torch.int64)])


TORCH = str(Path(torch.__file__).parent) + os.sep
OWN = str(Path(__file__).parent) + os.sep
PACKAGE = str(Path(__file__).parents[1]) + os.sep if Path(__file__).parents[1].name == "lockstep_trace" else OWN
STANDARD = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
COMPILED = (f"{TORCH}_functorch{os.sep}_aot_autograd{os.sep}", f"{TORCH}_inductor{os.sep}")


class CallSite(NamedTuple):
    """`line`: file:line of the user's own file, or None. `library`: innermost file:line of an installed package other
    than torch, or None. `started`: in backward, the user's line that started it. `role`: backward, recompute, optimizer
    or an empty text."""

    line: str | None
    library: str | None
    started: str | None
    role: str


def call_site(in_backward: bool) -> CallSite | None:
    """Return the call site of the operation that is being dispatched; None if compiled code calls it."""
    line, library, started, role, engine = None, None, None, "", False
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind(name)
        if kind == "compiled":
            return None
        if in_backward and kind in ("checkpoint", "engine"):
            role = role if role in ("recompute", "backward") else {"checkpoint": "recompute"}.get(kind, "backward")
            engine = engine or kind == "engine"
        elif kind == "optimizer" and line is None and library is None:
            role = role or "optimizer"
        elif kind == "library" and library is None and not engine:
            library = f"{_short(name)}:{frame.f_lineno}"
        elif kind == "user" and engine:
            started = f"{_short(name)}:{frame.f_lineno}"
            break
        elif kind == "user" and line is None:
            line = f"{_short(name)}:{frame.f_lineno}"
            if not in_backward:
                break
        frame = frame.f_back  # type: ignore[assignment]
    if in_backward and role in ("", "optimizer"):
        role = "backward"  # a thread of a device, which has no Python frames
    return CallSite(line, library, started, role)


@functools.lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    if name.startswith(TORCH):
        rest = name[len(TORCH) :].replace(os.sep, "/")
        if name.startswith(COMPILED):
            return "compiled"
        known = {"utils/checkpoint.py": "checkpoint", "autograd/graph.py": "engine"}
        return known.get(rest, "optimizer" if rest.startswith("optim/") else "torch")
    if name.startswith((OWN, PACKAGE)):
        return "own"
    if "torchinductor_" in name:
        return "compiled"
    if any(part in name for part in PACKAGES):
        return "library"
    standard = name.startswith(("<frozen ", "<eval_with_key>", *STANDARD))
    return "standard" if standard else "user"


@functools.lru_cache(maxsize=4096)
def _short(name: str) -> str:
    for part in PACKAGES:
        if part in name:
            return name.rsplit(part, 1)[1]
    here = os.getcwd() + os.sep
    return name.removeprefix(here)
