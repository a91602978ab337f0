"""Describes an optimizer's parameters, and how a model's layers are created: one object several times in a list, layers
created in a forward pass, layers whose units are all equal, and parameters with gradients that no called model has
registered (in a Python list or dictionary).

In: an optimizer's parameters and their names; models, and losses before backward. Out: a `SketchedLayout`, and the
values of a `layout` record whenever the parameters change; facts for a model's or a step's record. Also finds
optimizers inside a wrapper, and the schedulers of each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from . import placement, width_of
from .graph import LAYERS, inputs_of, name_of, nodes_of, walk


@dataclass
class SketchedLayout:
    """An optimizer's parameters as last recorded."""

    signature: tuple[Any, ...]
    number: int
    sketches: list[Tensor] | None = None  # of the weights after the last step
    versions: list[tuple[int, int]] | None = None  # (version, address) of the weights then


class Layouts:
    """The layouts of all optimizers, by optimizer number. `write`: writes a record."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._by_optimizer: dict[int, SketchedLayout] = {}
        self._count = 0

    def get(self, number: int) -> SketchedLayout | None:
        """Return the last layout of an optimizer, or None before its first step."""
        return self._by_optimizer.get(number)

    def of(
        self,
        optimizer: Any,
        number: int,
        parameters: Sequence[tuple[Any, int]],
        named: tuple[dict[int, str], list[list[str]]],
        roots: Sequence[nn.Module],
    ) -> SketchedLayout:
        """Return the layout of an optimizer, and record it if it is new. `parameters`: (parameter, group number).
        `named`: names by id, and groups of tied names."""
        names, ties = named
        known = self._by_optimizer.get(number)
        signature = (
            *((placement.key(p), p.dtype, tuple(p.shape), p.device, p.requires_grad) for p, _ in parameters),
            tuple(map(tuple, ties)),
            tuple(placement.name_of(p, names) for p, _ in parameters),
        )
        if known is not None and known.signature == signature:
            return known
        layout = self._by_optimizer[number] = SketchedLayout(signature, self._count)
        self._count += 1
        meshes = [m for p, _ in parameters if (m := placement.mesh_of(p)) is not None]
        self._write(
            "layout",
            id=layout.number,
            opt=number,
            optimizer=getattr(optimizer, "kind", type(optimizer).__name__),
            own=not type(optimizer).__module__.startswith("torch.optim"),
            parameters=[
                _row(p, group, names, f"?{type(optimizer).__name__}{number}.{i}")
                for i, (p, group) in enumerate(parameters)
            ],
            ties=ties,
            untied=_untied(roots),
            thawed=thawed(roots, {id(getattr(p, "source", p)) for p, _ in parameters}),
            mesh=max(meshes, key=lambda m: len(m["sizes"]), default=None),  # a layer may use only a part of the mesh
            models=[type(r).__name__ for r in roots],
        )
        return layout


def _row(parameter: Any, group: int, names: dict[int, str], unnamed: str) -> dict[str, Any]:
    _, block, partial = placement.local(parameter)
    return {
        "name": placement.name_of(parameter, names) or unnamed,
        "held": id(getattr(parameter, "source", parameter)) in names,
        "shape": list(block.shape),
        "offset": list(block.offset),
        "size": list(block.size),
        "width": width_of(block.shape),
        "dtype": placement.dtype_name(parameter),
        "device": parameter.device.type,
        "group": group,
        "trained": parameter.requires_grad,
        "partial": partial,
    }


def _untied(roots: Sequence[nn.Module]) -> bool:
    for root in roots:
        module: Any
        for module in root.modules():
            config = getattr(module, "config", None)
            if getattr(config, "tie_word_embeddings", False) and hasattr(module, "get_output_embeddings"):
                one, other = module.get_input_embeddings(), module.get_output_embeddings()
                weights = [getattr(m, "weight", None) for m in (one, other)]
                if not getattr(module, "_tied_weights_keys", None):
                    return False  # the model has nothing to tie
                return all(w is not None for w in weights) and weights[0] is not weights[1]
    return False


DEPTH = 6  # max. nested wrappers


def nested(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds in its attributes, outermost first."""
    rows = [] if optimizer is None else [optimizer]
    for _ in range(DEPTH):
        known = {id(row) for row in rows}
        new = {id(o): o for row in rows for o in _attributes(row) if id(o) not in known and is_optimizer(o)}
        if not new:
            break
        rows += new.values()
    return rows


def inside(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer and of those that it holds."""
    return {id(row) for row in nested(optimizer)}


def is_optimizer(value: Any) -> bool:
    """Return whether a value is a torch optimizer, or has parameter groups and a `step` like one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, torch.nn.Module) or not callable(getattr(type(value), "step", None)):
        return False
    return isinstance(getattr(value, "param_groups", None), list)


def stepping(optimizer: Any) -> Any:
    """Return the outermost optimizer whose step torch's hooks see, or the innermost one if they see none."""
    rows = nested(optimizer)
    hooked = (row for row in rows if getattr(getattr(type(row), "step", None), "hooked", False))
    return next(hooked, rows[-1])


def parameters_of(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _attributes(value: Any) -> Iterator[Any]:
    for attribute in list(getattr(value, "__dict__", {}).values()):
        yield attribute
        if isinstance(attribute, list | tuple) and len(attribute) < 64:
            yield from attribute
        elif isinstance(attribute, Mapping) and type(attribute) is dict and len(attribute) < 64:
            yield from attribute.values()


# -- layers ------------------------------------------------------------------------------------------------------------


UNITS_AT = 4  # step before which units are compared
BORN = 256  # remembered parameters created in forward passes
TRANSPOSED = ("T", "Transpose", "View")
WITH_UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def repeated(root: nn.Module) -> list[tuple[str, str, int]]:
    """Return (name, class, count) of module lists whose entries are all one layer with parameters."""
    rows = []
    for name, module in root.named_modules():
        entries = list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        first = entries[0] if len(entries) > 1 else None
        if first is not None and all(e is first for e in entries) and next(first.parameters(), None) is not None:
            rows.append((placement.plain_name(name), type(first).__name__, len(entries)))
    return rows


def odd_settings(root: nn.Module) -> list[tuple[str, str, float]]:
    """Return (kind, name, number) of layers with a setting that another library's convention would explain, and of
    modules that were given an attribute `requires_grad`, which torch does not read."""
    rows: list[tuple[str, str, float]] = []
    for name, module in root.named_modules():
        momentum, drop = getattr(module, "momentum", None), getattr(module, "p", None)
        if isinstance(module, placement.BATCH_NORM) and isinstance(momentum, float) and 0.9 <= momentum < 1:
            rows.append(("momentum", placement.plain_name(name), momentum))
        if isinstance(module, placement.DROPOUT) and isinstance(drop, float) and 0.8 <= drop < 1:
            rows.append(("dropout", placement.plain_name(name), drop))
        attribute = vars(module).get("requires_grad")
        if attribute is False and any(p.requires_grad for p in module.parameters()) and not _reads(module):
            rows.append(("frozen", placement.plain_name(name) or type(module).__name__, 0))
    return rows


def thawed(roots: Iterable[nn.Module], optimized: set[int]) -> list[tuple[str, int]]:
    """Return (name, number of parameters) of modules that were given an attribute `requires_grad` of True, which torch
    does not read, and whose parameters are all frozen and in `optimized`."""
    rows = {}
    for root in roots:
        for name, module in root.named_modules():
            parameters = list(module.parameters()) if vars(module).get("requires_grad") is True else []
            frozen = all(not p.requires_grad and id(p) in optimized for p in parameters)
            if parameters and frozen and not _reads(module):
                rows[id(module)] = placement.plain_name(name) or type(module).__name__, len(parameters)
    return list(rows.values())


def _reads(module: nn.Module) -> bool:
    codes = [f.__code__ for k in type(module).__mro__ for f in vars(k).values() if hasattr(f, "__code__")]
    return any("requires_grad" in (*c.co_varnames, *c.co_names) for c in codes if "torch/nn" not in c.co_filename)


class Born:
    """Parameters registered inside an outermost module's forward pass, until the next backward."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[weakref.ref[Any], str]] = {}

    def add(self, module: nn.Module, parameter: Any) -> None:
        if len(self._refs) < BORN:
            self._refs[id(parameter)] = weakref.ref(parameter), type(module).__name__

    def in_graph(self, loss: Any, leaves: Sequence[Any], models: Iterable[nn.Module]) -> list[str]:
        """Return the classes of unregistered layers created in the last forward passes on which a loss depends and
        whose input depends on registered parameters; forget all layers created so far.

        Layers that distort inputs at random have no such input, and a task's own layers are updated inside the forward
        pass."""
        refs, self._refs = self._refs, {}
        if not refs:
            return []
        registered = {id(p) for model in models for p in model.parameters()}
        rows = {id(p): refs[id(p)] for p in leaves if id(p) in refs and id(p) not in registered}
        uses = _uses(loss, set(rows)) if rows else {}
        kinds = set()
        for key, (ref, kind) in rows.items():
            products = [node for node in uses.get(key, ()) if name_of(node) in LAYERS]
            if ref() is None or not products or len(products) < len(uses[key]):
                continue
            others = [n for n in inputs_of(products[0]) if key not in _variables(n, 2)]
            if any(_variables(n, NODES) & registered for n in others):
                kinds.add(kind)
        return sorted(kinds)


def _uses(loss: Any, keys: set[int]) -> dict[int, list[Any]]:
    rows: dict[int, list[Any]] = {}
    for node in nodes_of(loss, NODES):
        for each in inputs_of(node) if name_of(node) not in TRANSPOSED else ():
            for key in _variables(each, 2) & keys:
                rows.setdefault(key, []).append(node)
    return rows


def _variables(node: Any, count: int) -> set[int]:
    nodes = walk([node], lambda name: count > 2 or name in TRANSPOSED, count)
    return {id(each.variable) for each in nodes if hasattr(each, "variable")}


def units_alike(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return name -> whether all rows of a layer's weight, and of its gradient, are equal, int64 [1] on its device."""
    rows: dict[str, Tensor] = {}
    for model in models:
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None) if isinstance(module, WITH_UNITS) else None
            if type(weight) is nn.Parameter and weight.requires_grad and len(weight) > 1:
                values = [weight.detach()] + ([] if weight.grad is None else [weight.grad])
                plain = placement.plain_name(f"{name}.weight" if name else "weight")
                rows[plain] = torch.stack([torch.eq(v, v[:1]).all() for v in values]).all().reshape(1).long()
    return rows


def adapters(root: nn.Module) -> list[int]:
    """Return the number of low-rank adapter matrices of a model, by peft's names, and how many of them are trained."""
    rows = [p for n, p in root.named_parameters() if ".lora_A." in n or ".lora_B." in n]
    return [len(rows), sum(p.requires_grad for p in rows)]


NODES = 4096  # nodes of a graph to visit
MOST = 64  # parameters kept
LARGEST = 1 << 16  # max. elements of a parameter whose first value is kept


class Strays:
    """Parameters of this process that are in graphs of losses but in no called model."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._bare: dict[int, tuple[str, Tensor]] = {}  # id -> (place in a model's list, first value)

    def look(self, loss: Any, models: Sequence[nn.Module]) -> list[nn.Parameter]:
        """Record unregistered parameters in the graph of a loss, and return all parameters in it; none with FSDP, whose
        graphs have other parameters than the model."""
        if any(placement.is_fsdp(model) for model in models):
            return []
        leaves = _leaves(loss)
        registered = {id(p) for model in models for p in model.parameters()} if leaves else set()
        for leaf in leaves:
            if id(leaf) not in registered and len(self._refs) < MOST:
                self._refs[id(leaf)] = weakref.ref(leaf)
                where = _place(leaf, models) if leaf.numel() <= LARGEST else ""
                if where:
                    self._bare[id(leaf)] = where, leaf.detach().clone()
        return leaves

    def with_gradients(self, optimized: set[int]) -> list[list[int]]:
        """Return the shapes of recorded parameters that have a gradient and are in no optimizer. `optimized`: ids."""
        alive = [p for key, ref in self._refs.items() if key not in optimized and (p := ref()) is not None]
        return [list(p.shape) for p in alive if p.grad is not None]

    def bare(self, optimized: set[int]) -> list[tuple[str, list[int], Tensor]]:
        """Return (place, shape, whether it has changed) of each parameter in a model's list that has a gradient and is
        in no optimizer."""
        rows = [(ref(), *self._bare[key]) for key, ref in self._refs.items() if key in self._bare]
        return [
            (where, list(p.shape), (p.detach() != first).any().reshape(1).long())
            for p, where, first in rows
            if p is not None and p.grad is not None and id(p) not in optimized and p.shape == first.shape
        ]


def _place(parameter: Any, models: Sequence[nn.Module]) -> str:
    for model in models:
        for module in model.modules():
            for name, value in vars(module).items():
                values = value.values() if isinstance(value, dict) else value
                if isinstance(value, list | tuple | dict) and any(each is parameter for each in values):
                    return f"{type(module).__name__}.{name}"
    return ""


def _leaves(loss: Any) -> list[nn.Parameter]:
    leaves = []
    for node in nodes_of(loss, NODES):
        variable = getattr(node, "variable", None)
        if type(variable) is nn.Parameter:
            leaves.append(variable)
    return leaves


# -- learning rate schedulers --------------------------------------------------------------------------------

FROM_BASE = ("LambdaLR", "OneCycleLR", "CyclicLR")  # schedulers whose rates do not depend on the previous rate


@dataclass
class Scheduler:
    """A scheduler since its creation. `foreign`: created by a trainer that decides itself when to step it."""

    ref: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    name: str
    foreign: bool = False
    stepped: bool = False
    fresh: bool = False  # stepped since the last step of any optimizer
    length: int | None = None  # steps that it is made for
    function: Any = None  # of a LambdaLR, which may be gone at the end
    number: int | None = None  # of its optimizer
    begun: list[float] = field(default_factory=list)  # rates when it was made
    resumed: bool = False  # its state was loaded, or it began later than at its first step
    counts: dict[str, int] = field(default_factory=dict)  # caller -> number of steps
    watched: dict[str, Any] = field(default_factory=dict)  # of ReduceLROnPlateau: mode, scores, rates after each


@dataclass
class Loaded:
    """An optimizer whose state was loaded: its learning rates then, and the scheduler created afterwards. `set_to`:
    rates that this scheduler set. `resumed`: rates of the scheduler's own loaded state."""

    rates: list[float]
    scheduler: str | None = None
    set_to: list[float] | None = None
    resumed: list[float] | None = None
    earlier: str | None = None  # a scheduler that was created before, was not stepped and loaded no state
    begun: list[float] | None = None  # the rates that it began with
    peaks: list[float] = field(default_factory=list)  # rates that the loaded state's schedule multiplies
    own_peaks: list[float] = field(default_factory=list)  # those of the earlier scheduler


class Schedules:
    """All schedulers of a process."""

    def __init__(self) -> None:
        self.schedulers: list[Scheduler] = []
        self._counted: dict[tuple[int, int, str], int] = {}  # (optimizer, scheduler, caller) -> count at its last step
        self._loaded: dict[int, tuple[weakref.ref[Any], Loaded]] = {}  # by id of the optimizer

    def register(self, scheduler: Any, foreign: bool) -> None:
        """Add a new scheduler, which has set the learning rates of its first step."""
        optimizer = scheduler.optimizer
        name = type(scheduler).__name__
        self.schedulers.append(Scheduler(weakref.ref(scheduler), weakref.ref(optimizer), name, foreign))
        self.schedulers[-1].begun = rates_of(optimizer)
        if (loaded := self.loaded_of(optimizer)) is not None and not foreign:
            loaded.scheduler, loaded.set_to, loaded.resumed = name, rates_of(optimizer), None

    def stepped(self, scheduler: Any, by: str, counted: bool) -> None:
        """Record a step of a scheduler. `counted`: not part of another scheduler's step."""
        known = next((s for s in self.schedulers if s.ref() is scheduler), None)
        if known is None:
            known = Scheduler(weakref.ref(scheduler), weakref.ref(scheduler.optimizer), type(scheduler).__name__, True)
            self.schedulers.append(known)
        for each in self.schedulers:
            each.stepped = each.stepped or each.optimizer() is scheduler.optimizer
        known.fresh = True
        if not known.counts and getattr(scheduler, "last_epoch", 0) > 0:  # `last_epoch`, or set by hand
            known.resumed = True
        if counted:
            known.counts[by] = known.counts.get(by, 0) + 1
            known.length = known.length or length_of(scheduler)
            known.function = (getattr(scheduler, "lr_lambdas", None) or [None])[0]

    def watches(self, scheduler: Any, score: Any, steps: list[int]) -> None:
        """Record a score that ReduceLROnPlateau received, and the rate after it."""
        known = next((s for s in self.schedulers if s.ref() is scheduler), None)
        if known is not None:
            row = known.watched or {"mode": scheduler.mode, "scores": [], "rates": [], "steps": []}
            known.watched = row
            row["scores"].append(float(score))
            row["rates"].append(rates_of(scheduler.optimizer)[0])
            row["steps"].append(list(steps))

    def lengths(self, steps: list[int]) -> list[dict[str, Any]]:
        """Return name, length, number of steps and optimizer of each scheduler that has a length and was stepped.
        `steps`: of each optimizer."""
        for each in self.schedulers:
            if each.number is not None and not each.length and ends_at(each.function, steps[each.number]):
                each.length = steps[each.number]
        return [
            {"name": s.name, "length": s.length, "count": sum(s.counts.values()), "opt": s.number}
            | {"resumed": s.resumed}
            for s in self.schedulers
            if s.length and s.number is not None and s.counts
        ]

    def since(self, optimizer: Any, number: int) -> dict[str, int]:
        """Return name -> number of steps of an optimizer's schedulers since the optimizer's last step."""
        if not self.schedulers:
            return {}
        members, rows = inside(optimizer), {}
        for i, each in enumerate(self.schedulers):
            if not members & inside(each.optimizer()):
                continue
            each.number = number
            for by, count in each.counts.items():
                key = (number, i, by)
                new, self._counted[key] = count - self._counted.get(key, 0), count
                if new:
                    name = f"{each.name} by {by}" if by else each.name
                    while name in rows:  # two schedulers of one class
                        name = f"{name}'"
                    rows[name] = new
        return rows

    def elsewhere(self, optimizer: Any) -> list[str]:
        """Return the schedulers stepped since the last step of any optimizer whose optimizer is another object with
        parameters of this one."""
        fresh = [each for each in self.schedulers if each.fresh]
        if not fresh:
            return []
        members, own = inside(optimizer), parameters_of(optimizer)
        names = []
        for each in fresh:
            other = each.optimizer()
            if other is not None and not members & inside(other) and own & parameters_of(other):
                names.append(each.name)
            each.fresh = False
        return names

    def idle(self, optimizer: Any) -> list[tuple[int, str]]:
        """Return (number, name) of an optimizer's schedulers that were never stepped."""
        idle = [
            (i, each)
            for i, each in enumerate(self.schedulers)
            if not each.stepped and not each.foreign and each.ref() is not None
        ]
        members = inside(optimizer) if idle else set()
        return [(i, each.name) for i, each in idle if members & inside(each.optimizer())]

    def loads(self, optimizer: Any) -> None:
        """Record that an optimizer's state was loaded, unless the state is empty (no steps yet)."""
        if optimizer.state:
            peaks = [float(g["initial_lr"]) for g in optimizer.param_groups if "initial_lr" in g]
            row = weakref.ref(optimizer), Loaded(rates_of(optimizer), peaks=peaks)
            self._loaded[id(optimizer)] = row

    def resumes(self, scheduler: Any) -> None:
        """Record that a scheduler's state was loaded."""
        for each in self.schedulers:
            each.resumed = each.resumed or each.ref() is scheduler
        loaded = self.loaded_of(getattr(scheduler, "optimizer", None))
        if loaded is not None and loaded.scheduler == type(scheduler).__name__:
            loaded.resumed = [float(rate) for rate in getattr(scheduler, "_last_lr", None) or []]

    def loaded_of(self, optimizer: Any) -> Loaded | None:
        ref, loaded = self._loaded.get(id(optimizer), (None, None))
        return loaded if ref is not None and ref() is optimizer else None

    def pop_loaded(self, optimizer: Any) -> dict[str, Any] | None:
        """Return and forget the record of a loaded optimizer at its first step after loading, or None."""
        loaded = self.loaded_of(optimizer)
        if loaded is None:
            return None
        del self._loaded[id(optimizer)]
        members = inside(optimizer)
        own = [s for s in self.schedulers if members & inside(s.optimizer())]
        if loaded.scheduler is None and len(own) == 1 and not (own[0].counts or own[0].resumed or own[0].foreign):
            known = own[0].ref()
            fresh = known is not None and getattr(known, "last_epoch", 1) == 0
            loaded.earlier = own[0].name if fresh and own[0].name in FROM_BASE else None
            loaded.begun = own[0].begun
            loaded.own_peaks = [float(rate) for rate in getattr(known, "base_lrs", None) or []]
        return dict(vars(loaded))


def length_of(scheduler: Any) -> int | None:
    """Return the number of steps in a scheduler's schedule, or None if it is not stated."""
    if type(scheduler).__name__ in ("CosineAnnealingLR", "OneCycleLR", "PolynomialLR", "LinearLR"):
        length = next((v for n in ("T_max", "total_steps", "total_iters") if (v := getattr(scheduler, n, None))), None)
    elif type(scheduler).__name__ == "SequentialLR":
        last = length_of(scheduler._schedulers[-1])
        length = None if last is None else scheduler._milestones[-1] + last
    else:  # transformers' schedules
        partial = next((f for f in getattr(scheduler, "lr_lambdas", None) or [] if hasattr(f, "keywords")), None)
        length = None if partial is None else partial.keywords.get("num_training_steps")
    return int(length) if isinstance(length, int | float) and length > 0 else None


MOST_CALLS = 10_000
NUMERIC = ("max", "min", "float", "int", "abs", "round", "math", "cos", "sin", "pi", "exp", "sqrt", "pow", "log")


def ends_at(function: Any, step: int) -> bool:
    """Return whether the function of a LambdaLR falls to 0, or to its last value, at a step. Only a function of
    numbers is called."""
    if type(function) is not FunctionType or step < 3:
        return False
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    known = [function.__globals__.get(name) for name in function.__code__.co_names if name not in NUMERIC]
    if not all(isinstance(value, int | float) for value in [*cells, *known]):
        return False
    try:
        *earlier, before, at = (float(function(n)) for n in range(max(step - MOST_CALLS, 1), step + 1))
        stays = all(float(function(n)) == at for n in (step + 1, 2 * step))
    except Exception:  # it may not be defined there
        return False
    return (abs(at) < 1e-12 or stays) and min(
        before, *earlier
    ) > at + 1e-9  # at 0 for the first time, unlike a function with cycles


def rates_of(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def unread_rate(optimizer: Any) -> float | None:
    """Return the number in an attribute `lr` of a torch optimizer, which reads only the rates of its groups."""
    value = vars(optimizer).get("lr") if type(optimizer).__module__.startswith("torch.optim") else None
    return float(value) if isinstance(value, int | float) else None
