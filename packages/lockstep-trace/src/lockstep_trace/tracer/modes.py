"""Decides whether a model is in training mode, by its dropout and batch norm modules; records evaluations, and the
functions that draw random numbers in them.

In: outermost modules, calls of `Module.train`, and forward passes. Out: a model's mode, and how many batch norms with
frozen weights update their statistics; one record per evaluation; `noise` records. If the generator's state changed in
a forward pass in evaluation mode, the next one runs under a mode that names the functions and changes no number.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import placement
from .inputs import CallInputs, hash_of
from .placement import BATCH_NORM, DROPOUT, deciding, is_plain_tensor, unwrapped
from .records import hexed

_THREAD = threading.local()
ALONE, EFFECTIVE = "alone", "effective"
LOOKS = 16  # at the weights of a frozen batch norm


class FrozenNorms:
    """Batch norms put into evaluation mode by a call on themselves or on a part of the model. `ALONE`: no forward pass
    has run in that mode yet. `EFFECTIVE`: a training forward pass has."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[nn.Module, tuple[str, weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )
        self._first: weakref.WeakKeyDictionary[nn.Module, tuple[Tensor | None, int]] = weakref.WeakKeyDictionary()

    def switched(self, norm: nn.Module, mode: bool, outermost: nn.Module) -> None:
        """Record a change of mode. `outermost`: the module that the script called `train` or `eval` on."""
        state, origin = self._states.get(norm, (None, None))
        if not mode and state is None:
            self._states[norm] = (ALONE, weakref.ref(outermost))
        elif mode and origin is not None and (outermost is norm or origin() is outermost):
            del self._states[norm]

    def forward(self, root: nn.Module, norms: Iterable[nn.Module], gradients: bool) -> None:
        """Record a forward of a model. A mode that an evaluation used first, or that was set on the whole model, does
        not count as freezing."""
        if not self._states:
            return
        for norm in norms:
            state, origin = self._states.get(norm, (None, None))
            if state == ALONE and origin is not None and not norm.training:
                inside = root.training and any(m is origin() for m in root.modules() if m is not root)
                if gradients and inside:
                    self._states[norm] = (EFFECTIVE, origin)
                else:
                    del self._states[norm]

    def undone(self, root: nn.Module, norms: Iterable[nn.Module]) -> tuple[int, int]:
        """Return how many batch norms with frozen weights update their statistics in this forward pass, and how many of
        these had been put into evaluation mode. Weights that follow another network's (momentum encoders) are not
        frozen."""
        frozen = [m for m in norms if m.training and _frozen(m) and self._stays(m)]
        before = [m for m in frozen if (row := self._states.get(m)) is not None and row[1]() is not root]
        return len(frozen), len(before)

    def _stays(self, norm: Any) -> bool:
        """Return whether a weight is what it was in the first forward; looked at a few times."""
        weight = (norm.bias if norm.weight is None else norm.weight).detach()
        if norm not in self._first:
            self._first[norm] = weight.clone(), 0
        first, looks = self._first[norm]
        if first is not None and looks < LOOKS:
            self._first[norm] = first if torch.equal(first, weight) else None, looks + 1
        return self._first[norm][0] is not None


def _frozen(norm: Any) -> bool:
    weights = [p for p in (norm.weight, norm.bias) if p is not None]
    return norm.running_mean is not None and bool(weights) and not any(p.requires_grad for p in weights)


def install(hooks: Any) -> None:
    """Wrap `Module.train`, which `eval` calls, too."""
    original = nn.Module.train

    @functools.wraps(original)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if torch.compiler.is_compiling() or hooks.recorder is None:
            return original(self, mode)
        outermost = getattr(_THREAD, "outermost", None)
        if outermost is not None and outermost[1] != mode:
            outermost = None  # an overridden `train` that leaves a part in another mode
        if isinstance(self, BATCH_NORM):
            hooks.guarded(hooks.recorder.norms.switched, self, mode, self if outermost is None else outermost[0])
        before, _THREAD.outermost = getattr(_THREAD, "outermost", None), outermost or (self, mode)
        try:
            return original(self, mode)
        finally:
            _THREAD.outermost = before

    nn.Module.train = train  # type: ignore[method-assign, assignment]


class UnusedNorms:
    """Copies whose weights change between evaluations, and whose batch norms keep their first statistics."""

    def __init__(self) -> None:
        self._hashes: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()

    def look(self, module: nn.Module) -> Tensor | None:
        """Return [number of batch norms, whether all have their first statistics, whether the first weight has changed
        since the last look], None for a model in training mode, or without batch norms."""
        norms: list[Any] = [m for m in module.modules() if isinstance(m, BATCH_NORM) and m.running_mean is not None]
        first = next(module.parameters(), None)
        if first is None or not is_plain_tensor(first.detach()) or not norms or any(m.training for m in norms):
            return None
        now = hash_of(first)[0]
        before = self._hashes.get(module, now)
        self._hashes[module] = now
        initial = [(m.running_mean == 0).all() & (m.running_var == 1).all() for m in norms]
        return torch.stack([now.new_tensor(len(norms)), torch.stack(initial).all().long(), (now != before).long()])


class ModelModes:
    """Modes of models. The modules that decide are looked up once per model."""

    def __init__(self) -> None:
        self._deciding: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()

    def trains(self, module: nn.Module) -> bool:
        """Return whether a model is in training mode."""
        return any(m.training for m in self._decide(module))

    def mode(self, module: nn.Module) -> dict[str, Any]:
        """Return the model's mode, and [in training mode, total] for its dropout and batch norm modules."""
        dropout = [m for m in self._decide(module) if isinstance(m, DROPOUT)]
        norms = [m for m in self._decide(module) if isinstance(m, BATCH_NORM)]
        counts = {k: [sum(m.training for m in ms), len(ms)] for k, ms in (("dropout", dropout), ("norms", norms))}
        return {"root": unwrapped(module).training, **counts}

    def norms(self, module: nn.Module) -> list[nn.Module]:
        """Return a model's batch norms."""
        return [m for m in self._decide(module) if isinstance(m, BATCH_NORM)]

    def _decide(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._deciding:
            self._deciding[module] = [weakref.ref(m) for m in deciding(module)]
        return [m for ref in self._deciding[module] if (m := ref()) is not None]


# -- evaluations -------------------------------------------------------------------------------------------------------


CHECKED = 64  # first calls whose generator state is compared
NAMED = 2  # calls that run under the mode
DRAWS = ("bernoulli", "native_dropout", "_fused_dropout")
ATTENTION = "scaled_dot_product_attention"


class EvaluationNoise:
    """Records the functions that draw random numbers in evaluation mode. `write`: writes a record."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._checked = self._named = 0
        self._drew: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._states: list[Any] = []

    def begin(self, module: nn.Module) -> Any:
        """Return the mode to call a module in, or None."""
        self._states = []
        if self._checked >= CHECKED or any(m.training for m in module.modules()) or not _plain(module):
            return None
        self._checked += 1
        if module in self._drew and self._named < NAMED:
            self._named += 1
            return _Naming()
        if module not in self._drew:
            self._states = _states(module)
        return None

    def end(self, module: nn.Module, mode: Any) -> None:
        if self._states and any(not torch.equal(a, b) for a, b in zip(self._states, _states(module), strict=True)):
            self._drew.add(module)
        for (kind, stated, where), count in mode.rows.items() if mode is not None else ():
            about = {"of": kind, "stated": stated, "where": where, "count": count}
            self._write("noise", model=type(placement.unwrapped(module)).__name__, **about)


def _plain(module: nn.Module) -> bool:
    kinds = (type(m).__name__ for m in module.modules())
    if any(kind in ("OptimizedModule", "ScriptModule", "RecursiveScriptModule") for kind in kinds):
        return False
    return not placement.is_fsdp(module) and not any(placement.is_dtensor(p) for p in module.parameters())


def _states(module: nn.Module) -> list[Any]:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    return states


class _Naming(TorchDispatchMode):
    """Counts dropout calls by (function, whether its `training` argument is passed, file and line)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, bool, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        attends = ATTENTION.removesuffix("_attention") in name and _dropout_of(func, args, kwargs or {}) > 0
        if name.rstrip("_") in DRAWS or attends:
            row = _caller(attends)
            if row is not None:
                self.rows[row] = self.rows.get(row, 0) + 1
        return func(*args, **(kwargs or {}))


def _dropout_of(func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    names = [a.name for a in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    return float(values.get("dropout_p") or 0.0)


def _caller(attends: bool) -> tuple[str, bool, str] | None:
    frame: Any = sys._getframe(2)
    kind = "attention" if attends else ""
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if module == "torch.nn.functional" and "dropout" in code.co_name:
            kind = "dropout"
        elif not module.startswith(("torch.", "lockstep_trace")):
            call = _call(frame)
            if not kind and call is not None and ATTENTION in ast.dump(call.func):
                kind = "attention"
            if not kind:
                return None
            stated = call is None or len(call.args) > 2 or any(k.arg in ("training", None) for k in call.keywords)
            where = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            return kind, kind == "dropout" and stated, where
        elif module.startswith("torch.nn.modules"):
            return None
        frame = frame.f_back
    return None


def _call(frame: Any) -> ast.Call | None:
    positions = [*frame.f_code.co_positions()]
    first, last, begin, end = positions[frame.f_lasti // 2]
    if None in (first, last, begin, end):
        return None
    lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
    lines[-1] = lines[-1].encode()[:end].decode()
    lines[0] = lines[0].encode()[begin:].decode()
    try:
        tree = ast.parse("".join(lines).strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None
    return tree.body if isinstance(tree.body, ast.Call) else None


HASHES = 200_000  # max. hashes recorded per evaluation


@dataclass(frozen=True)
class Setting:
    """Properties that stay the same during an evaluation. `trained`: an optimizer holds the model's parameters.
    `between`: between a forward pass and its backward."""

    model: str
    loader: str | None
    training: bool
    trained: bool
    between: bool


@dataclass
class Evaluation:
    """One evaluation. `active`: modules whose output is currently random. `optimizers`: numbers of those that hold the
    model's parameters."""

    setting: Setting
    active: list[str]
    mode: dict[str, Any]
    optimizers: list[int]
    hashes: list[Tensor] = field(default_factory=list)
    known: list[Tensor] = field(default_factory=list)  # without labels
    count: int = 0
    ranges: list[Tensor] = field(default_factory=list)  # `inputs.ranges` of first calls
    looks: int = 0
    drawn: list[int] = field(default_factory=list)  # state of the generator at the first call
    unused_norms: Tensor | None = None  # `UnusedNorms.look`

    def add(self, batch: CallInputs) -> None:
        """Count a batch, and store its hashes."""
        self.count += len(batch.hashes)
        if self.count <= HASHES:
            self.hashes.append(batch.hashes)
            self.known.append(batch.hashes if batch.unlabelled is None else batch.unlabelled)

    def record(self) -> dict[str, Any]:
        """Return the values of the record. Reads device data."""
        examples = hexed(self.hashes)
        same = all(a is b for a, b in zip(self.known, self.hashes, strict=True))
        return {
            "model": self.setting.model,
            "loader": self.setting.loader,
            "training": self.setting.training,
            "active": self.active,
            "trained": self.setting.trained,
            "between": self.setting.between,
            "mode": self.mode,
            "optimizers": self.optimizers,
            "drawn": self.drawn,
            "known": examples if same else hexed(self.known),
            "unused_norms": [] if self.unused_norms is None else self.unused_norms.tolist(),
            "ranges": [r.tolist() for r in self.ranges],
            "count": self.count,
            "examples": examples,
        }
