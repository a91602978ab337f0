"""Follows values over time: loaded weights until they are used, saved optimizer states, state kept from batch to batch,
updates, copies of a trained model, and parameters that a script without an optimizer writes to.

In: loads, calls and steps, `state_dict`, `load_state_dict`, `torch.load`, losses and gradients. Out: `fact` and `empty
load` records, notes as in `evidence.py`; the states that an optimizer could have continued from; [name, distance,
update] of each copy that no optimizer holds: its distance from the trained model, and the model's from the previous
step; steps of `ByHand`, a stand-in for an optimizer.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from . import placement
from .gradient_history import version
from .graph import KINDS, name_of, nodes_of
from .inputs import tensors_of, wrapped
from .placement import is_plain_tensor

SAMPLE, ALIKE = 64, 0.5  # numbers of a matrix that are compared; correlation of a matrix with itself
PART = 4096  # numbers of a parameter whose updates are looked at
LARGE = 1 << 20  # numbers of a state
READ = 512  # matrices of checkpoints
EVERY, LAST = 4, 40  # steps whose updates are looked at


def _sample(parameter: Any, most: int = SAMPLE) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)][:most].clone()


class LoadedWeights:
    """Matrices that a checkpoint wrote, until their model is called, and layers that it did not have."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loaded: list[tuple[weakref.ref[Any], tuple[Tensor, Tensor]]] = []
        self._read: list[Tensor] = []  # samples of matrices of checkpoints
        self._drawn: Tensor | None = None  # state of the generator at the first load
        self._known: dict[int, weakref.ref[Any]] = {}  # loaded or trained, or a part that a library adds to a body
        self._new: dict[int, weakref.ref[Any]] = {}  # not in the state, and trainable when it was loaded

    def loaded(self, module: nn.Module, missing: Iterable[str]) -> None:
        """Record that a state was loaded, without the names in `missing`."""
        absent, body = set(missing), f"{getattr(module, 'base_model_prefix', '')}."
        if getattr(module, "base_model", None) is module:  # a pooler that nobody calls
            body = ""
        named = {n: p for n, p in module.named_parameters() if is_plain_tensor(p) and p.device.type != "meta"}
        now = {id(p) for p in named.values()}
        self._loaded = [row for row in self._loaded if id(row[0]()) not in now]
        there = [p for n, p in named.items() if n not in absent]
        self._drawn = torch.get_rng_state() if not self._loaded else self._drawn
        self._loaded += [(weakref.ref(p), _look(p)) for p in there if p.dim() > 1 and p.numel() >= SAMPLE]
        self.knows([*there, *(p for n, p in named.items() if n.startswith(body))])
        self._new |= {id(p): weakref.ref(p) for n, p in named.items() if n in absent and p.requires_grad}

    def knows(self, parameters: Iterable[Any]) -> None:
        """Record parameters that are not random."""
        self._known |= {id(p): weakref.ref(p) for p in parameters}

    def called(self, module: nn.Module) -> None:
        """Record whether other numbers were written over the matrices of a model that is called."""
        if not self._loaded:
            return
        own = {id(p) for p in module.parameters()}
        rows = [(p, before) for ref, before in self._loaded if (p := ref()) is not None and id(p) in own]
        self._loaded = [row for row in self._loaded if id(row[0]()) not in own]
        on_cpu = all(p.device.type == "cpu" for p, _ in rows)
        if not rows or (on_cpu and self._drawn is not None and torch.equal(self._drawn, torch.get_rng_state())):
            return  # nothing was drawn: other weights, and no initialization
        over = [p for p, before in rows if _is_other(before, _look(p)) and not self._is_copy(p)]
        if 2 * sum(p.numel() for p in over) > sum(p.numel() for p, _ in rows) and 2 * len(over) > len(rows):
            self._write("fact", fact="load overwritten", argument=f"{len(over)} of {len(rows)}")

    def reads(self, result: Any) -> None:
        """Record the matrices of a checkpoint that was read."""
        tensors = (t for _, t in tensors_of(result) if t.dim() > 1 and t.numel() >= SAMPLE and t.is_floating_point())
        self._read += [_sample(t).cpu() for t in itertools.islice(tensors, READ - len(self._read))]

    def _is_copy(self, parameter: Any) -> bool:
        """Return whether a matrix is that of another checkpoint, or of another loaded or trained model."""
        own = _sample(parameter).cpu()
        others = (q for r in self._known.values() if (q := r()) is not None and q is not parameter)
        alike = (_sample(q).cpu() for q in others if q.shape == parameter.shape and q.device.type != "meta")
        return any(torch.equal(t.to(own.dtype), own) for t in itertools.chain(self._read, alike) if len(t) == len(own))

    def stepped(self, models: Sequence[nn.Module]) -> None:
        """Record layers that a loaded state lacks and that were frozen after the load, if loaded ones are frozen, too.
        Excluded are layers frozen when the model was created (fixed projections), and layers with a copy."""
        for root in models:
            named = {n: p for n, p in root.named_parameters() if p.dim() > 1 and n.endswith("weight")}
            frozen = {n for n, p in named.items() if not p.requires_grad}
            known = {n for n, p in named.items() if id(p) in self._known and self._known[id(p)]() is p}
            kinds = {n: (*n.split(".")[-2:], *p.shape) for n, p in named.items()}
            alike = Counter(kinds.values())
            lacked = {n for n in frozen - known if id(named[n]) in self._new and self._new[id(named[n])]() is named[n]}
            new = [n for n in lacked if "original_module" not in n and alike[kinds[n]] == 1]
            if new and known & frozen:
                self._write("fact", fact="new and frozen", argument=", ".join(sorted(new)[:3]))
                return


def _look(parameter: Any) -> tuple[Tensor, Tensor]:
    """Return a sample of a parameter, and sums that do not change if it is transposed or its rows are reordered."""
    flat = parameter.detach().reshape(-1)
    return _sample(parameter), torch.stack([flat.double().sum(), flat.double().square().sum()])


def _is_other(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> bool:
    if torch.allclose(before[1], after[1], rtol=1e-6, atol=1e-6):
        return False
    one, other = (t.to("cpu", torch.float64) for t in (before[0], after[0]))
    if len(one) != len(other) or torch.equal(one, other) or one.std() == 0:
        return False
    return bool(other.std() == 0 or torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < ALIKE)


def lost_updates(optimizer: Any, parameters: Sequence[Any], step: int) -> Callable[[], Tensor] | None:
    """Return a function that tells, after a step, whether most 16-bit weights with a gradient are unchanged. None if
    there are none, or the step is not looked at."""
    own = type(optimizer).__module__.startswith("torch.optim")
    half = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16) and is_plain_tensor(p)]
    half = [p for p in half if p.grad is not None and p.grad.layout == torch.strided and p.dim()]
    if not own or not half or step % EVERY != EVERY // 2 or step > LAST:
        return None
    rates = [(float(g.get("lr") or 0), float(g.get("initial_lr") or g.get("lr") or 0)) for g in optimizer.param_groups]
    if not all(rate and 2 * rate >= base for rate, base in rates):  # a warm-up
        return None
    before = [(_sample(p, PART), _sample(p.grad, PART) != 0) for p in half]

    def lost() -> Tensor:
        rows = [(there & (_sample(p, PART) == b), there) for p, (b, there) in zip(half, before, strict=True)]
        same, all_ = (torch.stack([row[i].sum() for row in rows]).sum() for i in (0, 1))
        return same > 0.5 * all_

    return lost


def accumulates() -> bool:
    """Return whether Accelerate is accumulating gradients: an optimizer that it knows makes no step then."""
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return (getattr(kind, "_shared_state", None) or {}).get("sync_gradients") is False


def unset_accumulation() -> int | None:
    """Return the setting `gradient_accumulation_steps` in reach of the script's function that calls `accumulate` of an
    Accelerator, if that accumulates one micro-batch; else None."""
    frame: Any = sys._getframe(1)
    for _ in range(16 if "accelerate" in sys.modules else 0):
        if frame is None:
            break
        if "accumulate" in frame.f_code.co_names and "site-packages" not in frame.f_code.co_filename:
            values = {**frame.f_globals, **frame.f_locals}
            values |= getattr(values.get("self"), "__dict__", {})
            known = [v for v in values.values() if type(v).__name__ == "Accelerator"]
            holders = (v for v in values.values() if hasattr(v, "__dict__") and type(v).__name__ != "Accelerator")
            settings = [values, *(vars(v) for v in holders if not isinstance(v, type))]  # a class has defaults
            counts = {n for s in settings if type(n := s.get("gradient_accumulation_steps")) is int}
            if len(known) == 1 == known[0].gradient_accumulation_steps and len(counts) == 1:
                entered = getattr(known[0], "step", 0) > 0  # counts calls of accumulate()
                return next((n for n in counts if entered and 1 < n != known[0].num_processes), None)
        frame = frame.f_back
    return None


class Carried:
    """States that the last call of each module returned besides its output."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[tuple[str | None, int], list[Tensor]]] = {}

    def returned(self, module: nn.Module, result: Any, at: tuple[str | None, int], rows: int) -> None:
        """Keep the states of a result that belong to examples. `at`: pass and batch of the loader. `rows`: examples."""
        rest = result[1:] if isinstance(result, tuple | list) else ()
        tensors = [t for _, t in tensors_of(rest) if t.dim() > 1 and rows in t.shape[:-1] and rows > 1]
        states = [t.detach() for t in tensors if not wrapped(t) and 0 < t.numel() < LARGE]
        self._states[id(module)] = at, [t for t in states if t.is_floating_point()]

    def taken(self, module: nn.Module, args: Any, at: tuple[str | None, int]) -> bool:
        """Return whether a call with another batch of the same pass takes a state of the module's last call."""
        before, states = self._states.pop(id(module), (at, []))
        addresses = {(t.data_ptr(), t.shape) for t in states}
        plain = (t for _, t in tensors_of(args) if states and not wrapped(t))
        taken = any((t.data_ptr(), t.shape) in addresses for t in plain)
        return taken and before[0] == at[0] is not None and before != at


def prefix_between(keys: Sequence[str], own: Sequence[str]) -> str | None:
    """Return the prefix, with its dot, that all names of one list have before those of the other, or None."""
    longer, shorter = sorted((keys, own), key=lambda names: max(map(len, names)), reverse=True)
    prefix = longer[0].removesuffix(shorter[0])
    same = len(keys) == len(own) and prefix.endswith(".") and {prefix + name for name in shorter} == set(longer)
    return prefix if same else None


@dataclass
class EmptyLoad:
    """A load without effect. `parameters`: (parameter, version) of the module."""

    about: dict[str, Any]
    parameters: list[tuple[weakref.ref[Any], int]] = field(default_factory=list)


class StateLoads:
    """The loads of this process that had no effect, until the module is called."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._waiting: list[EmptyLoad] = []

    def loaded(self, module: nn.Module, state: Any, result: Any, dropped: bool) -> None:
        """Record a load. `dropped`: whether the caller dropped the result."""
        own = list(module.parameters())
        missing, unexpected = getattr(result, "missing_keys", None), getattr(result, "unexpected_keys", None)
        if not own or not isinstance(state, Mapping) or missing is None or unexpected is None:
            return
        keys = module.state_dict(keep_vars=True).keys()
        if not state or len(unexpected) < len(state) or set(missing) != set(keys):
            now = {id(p) for p in own}
            self._waiting = [e for e in self._waiting if not any(id(ref()) in now for ref, _ in e.parameters)]
            return
        about = {
            "model": type(module).__name__,
            "given": len(state),
            "own": len(keys),
            "unexpected": str(unexpected[0])[:200],
            "missing": str(missing[0])[:200],
            "dropped": dropped,
            "prefixed": prefix_between(list(map(str, unexpected)), list(map(str, missing))) is not None,
        }
        self._waiting.append(EmptyLoad(about, [(weakref.ref(p), version(p)) for p in own]))

    def called(self, module: nn.Module) -> None:
        """Record the empty loads of a module that is called, if its weights are still those of the load."""
        if not self._waiting:
            return
        own = {id(p) for p in module.parameters()}
        for each in list(self._waiting):
            there = [(p, count) for ref, count in each.parameters if (p := ref()) is not None and id(p) in own]
            if there:
                self._waiting.remove(each)
                if all(version(p) == count for p, count in there):
                    self._write("empty load", **each.about)


def is_dropped(frame: FrameType) -> bool:
    """Return whether the call that a frame is executing is an expression statement, which drops its result."""
    rows = iter(dis.get_instructions(frame.f_code))
    after = next((r for r in rows if r.offset > frame.f_lasti and r.opname not in ("CACHE", "EXTENDED_ARG")), None)
    return after is not None and after.opname == "POP_TOP"


def own_loss_of_a_trainer() -> bool:
    """Return whether transformers' Trainer calls backward on a loss that the script computes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "training_step" and frame.f_globals.get("__name__") == "transformers.trainer":
            trainer = frame.f_locals.get("self")
            own = getattr(trainer, "compute_loss_func", None) or getattr(type(trainer), "compute_loss", None)
            code = getattr(own, "__code__", None)
            return code is not None and "site-packages" not in code.co_filename
        frame = frame.f_back
    return False


DEPTH = 4  # nesting of a checkpoint


@dataclass(frozen=True)
class SavedState:
    """A state after `steps` steps (None: unknown) of an optimizer of `count` parameters. `by`: the number of its
    optimizer in this process, or None if it was read from a file."""

    count: int
    steps: int | None
    by: int | None


class Resumes:
    """The saved states of this process."""

    def __init__(self) -> None:
        self._saved: dict[int | str, SavedState] = {}
        self._loaded: dict[int, tuple[weakref.ref[Any], int | None]] = {}  # by id: steps of the loaded state
        self.model_loads = 0  # since a state was read

    def saves(self, number: int, optimizer: Any, steps: int) -> None:
        """Record that an optimizer's state was taken after some of its steps."""
        if optimizer.state:
            self._saved[number] = SavedState(_count(optimizer.param_groups), steps, number)

    def reads(self, result: Any) -> None:
        """Record the optimizer states in a checkpoint that was read."""
        for i, state in enumerate(_states(result)):
            self.model_loads = 0
            self._saved[f"file {i}"] = SavedState(_count(state["param_groups"]), _steps(state["state"]), None)

    @property
    def from_file(self) -> bool:
        """Return whether a checkpoint with an optimizer's state was read."""
        return any(state.by is None for state in self._saved.values())

    def loads(self, optimizer: Any) -> None:
        """Record that an optimizer loaded a state."""
        if optimizer.state:
            self._loaded[id(optimizer)] = weakref.ref(optimizer), _steps(optimizer.state)

    def at_first_step(self, number: int, optimizer: Any) -> dict[str, Any] | None:
        """Return the known states that an optimizer could have loaded, or None if there are none."""
        ref, steps = self._loaded.get(id(optimizer), (None, None))
        if ref is not None and ref() is optimizer:
            return {"loaded": True, "states": [[steps, None]], "model_loads": self.model_loads}
        if optimizer.state:  # an optimizer that was saved and read as a whole
            return None
        count = _count(optimizer.param_groups)
        states = [[s.steps, s.by] for s in self._saved.values() if s.count == count and s.by != number and s.steps]
        return {"loaded": False, "states": states, "model_loads": self.model_loads} if states else None


def _count(groups: Any) -> int:
    return sum(len(group["params"]) for group in groups)


def _states(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if not isinstance(value, Mapping) or depth > DEPTH:
        return
    state, groups = value.get("state"), value.get("param_groups")
    if isinstance(state, Mapping) and isinstance(groups, list) and state and all("params" in g for g in groups):
        yield value
        return
    for each in list(value.values())[:64]:
        yield from _states(each, depth + 1)


def _steps(state: Any) -> int | None:
    rows = (row for row in state.values() if isinstance(row, Mapping) and "step" in row)
    step = next((row["step"] for row in rows), None)
    if isinstance(step, Tensor):
        return int(step) if step.numel() == 1 and step.device.type == "cpu" else None
    return int(step) if isinstance(step, int | float) else None


FIRST_MEASURED, LAST_MEASURED = 4, 9  # steps before which distances are measured

Pair = tuple[weakref.ref[Any], weakref.ref[Any]]  # (the copy's, the trained model's)


class Averages:
    """Copies of trained models in this process."""

    def __init__(self) -> None:
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # without gradients, in no optimizer
        self._pairs: dict[str, list[Pair]] = {}
        self._before: dict[str, list[Tensor]] = {}

    def measured(self, step: int, roots: Sequence[nn.Module], optimized: set[int]) -> list[tuple[str, Tensor]]:
        """Return (name, float64 [2]: distance, update) of each copy."""
        if step == FIRST_MEASURED - 1:
            self._pairs = _pairs(roots, [m for m in self.called if all(m is not r for r in roots)], optimized)
        rows = []
        for name, pairs in self._pairs.items() if FIRST_MEASURED - 1 <= step <= LAST_MEASURED else ():
            copies, trained = [a() for a, _ in pairs], [b() for _, b in pairs]
            if any(t is None for t in (*copies, *trained)):
                continue
            values = [t.detach() for t in trained if t is not None]
            if step >= FIRST_MEASURED:
                distance = _norm(torch._foreach_sub([t.detach() for t in copies if t is not None], values))
                rows.append((name, torch.stack([distance, _norm(torch._foreach_sub(values, self._before[name]))])))
            self._before[name] = [v.clone() for v in values]
        if step >= LAST_MEASURED:
            self._pairs, self._before = {}, {}
        return rows


def _norm(tensors: Any) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).double().norm()


def _pairs(roots: Sequence[nn.Module], others: Iterable[nn.Module], optimized: set[int]) -> dict[str, list[Pair]]:
    named = [(placement.plain_name(n), p) for root in roots for n, p in root.named_parameters()]
    named = [(n, p) for n, p in named if type(p) is nn.Parameter and p.dtype == torch.float32]
    trained = [(n, p) for n, p in named if id(p) in optimized]
    copies: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in named:
        if id(parameter) not in optimized and not parameter.requires_grad:
            part, _, rest = name.partition(".")
            copies.setdefault(part, []).append((f".{rest}", parameter))
    for other in others:
        rows = [(placement.plain_name(n), p) for n, p in other.named_parameters() if id(p) not in optimized]
        copies[type(placement.unwrapped(other)).__name__] = rows
    pairs: dict[str, list[Pair]] = {}
    for name, rows in copies.items():
        matched = [(p, _matching(n, p, trained)) for n, p in rows]
        if len(rows) > 1 and all(other is not None for _, other in matched):
            pairs[name] = [(weakref.ref(p), weakref.ref(other)) for p, other in matched]
    return pairs


def _matching(name: str, parameter: Any, trained: Sequence[tuple[str, Any]]) -> Any:
    fits = [
        p
        for n, p in trained
        if p.shape == parameter.shape
        and p.device == parameter.device
        and p.dtype == parameter.dtype
        and (f".{n.partition('.')[2]}" if name.startswith(".") else n) == name
    ]
    return fits[0] if len(fits) == 1 else None


# -- updates by hand ---------------------------------------------------------------------------------------------------


LEAVES = 4096  # nodes of a graph to visit


class ByHand:
    """Parameters that statements of the script update, as a group of an optimizer."""

    kind = "updates by hand"

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]
        self.state: dict[Any, Any] = {}
        self._rows: list[tuple[Any, Tensor, Tensor | None]] = []  # parameter, samples of it and of its gradient
        self._errors = True  # losses are all torch's functions of errors
        self.ascends = False

    def reads(self, loss: Any, models: Sequence[nn.Module]) -> bool:
        """Record the parameters that a loss depends on; return whether others of their shapes were there before."""
        nodes = list(nodes_of(loss, LEAVES))
        self._errors = bool(nodes) and name_of(nodes[0]) in KINDS
        leaves = [v for n in nodes if isinstance(v := getattr(n, "variable", None), Tensor)]
        leaves = [v for v in leaves if is_plain_tensor(v) and v.is_floating_point() and not wrapped(v) and v.numel()]
        own = {id(p) for model in models for p in model.parameters()}
        if models:  # an input may be a leaf, too
            shapes = {p.shape for model in models for p in model.parameters()}
            rows = [v for v in leaves if id(v) in own]
            leaves = rows or [v for v in leaves if v.shape in shapes]
        old = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = leaves
        anew = bool(old) and all(a is not b for a in old for b in leaves)
        return anew and sorted(map(str, (v.shape for v in old))) == sorted(map(str, (v.shape for v in leaves)))

    def arrived(self, gradients: Iterable[Tensor | None] | None = None) -> None:
        """Remember parameters and gradients after backward."""
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params] if gradients is None else [None] * len(params)
        plain = [g is not None and g.layout == torch.strided for g in grads]
        self._rows = [
            (p, _sample(p), _sample(g) if there else None) for p, g, there in zip(params, grads, plain, strict=True)
        ]

    def wrote(self) -> bool:
        """Return whether parameters have changed since; `ascends`: along their gradients, of a mean of errors."""
        rows = [(_sample(p), before, g) for p, before, g in self._rows]
        changes = [(now - before, g) for now, before, g in rows if not torch.equal(now, before)]
        known = [(d.double(), g.double()) for d, g in changes if g is not None and bool(g.any())]
        along = [bool(d.dot(g) > 0.999 * d.norm() * g.norm()) for d, g in known]
        self.ascends = self._errors and bool(along) and len(known) == len(changes) and all(along)
        self._rows = [] if changes else self._rows
        return bool(changes)


def install(hooks: Any) -> None:
    """Wrap `torch.autograd.grad`."""
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        outputs, inputs = (tuple(v) if isinstance(v, Iterator) else v for v in (outputs, inputs))
        rows, leaves = ([v] if isinstance(v, Tensor) else list(v) for v in (outputs, inputs))
        loss: Any = rows[0] if len(rows) == 1 else None
        own = recorder is not None and not (torch.compiler.is_compiling() or hooks.backward_depth)
        own = own and not recorder.optimizers_made and not kwargs.get("create_graph", args[2] if len(args) > 2 else 0)
        own = own and is_plain_tensor(loss) and loss.numel() == 1
        own = own and all(isinstance(t, Tensor) and t.is_leaf for t in leaves)
        own = own and not any(wrapped(t) for t in (loss, *leaves))
        if own:
            hooks.guarded(recorder.backward, loss, False, False)
        result = original(outputs, inputs, *args, **kwargs)
        if own:
            hooks.guarded(recorder.by_hand.arrived, result)
        return result

    torch.autograd.grad = grad


def number(value: Any) -> float | None:
    """Return a value as a number, or None."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
