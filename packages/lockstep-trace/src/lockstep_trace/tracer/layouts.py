"""Describes an optimizer's parameters, and how a model's layers are created: one object several times in a list, layers
created in a forward pass, layers whose units are all equal, and parameters with gradients that no called model has
registered (in a Python list or dictionary).

In: an optimizer's parameters and their names; models, and losses before backward. Out: a `SketchedLayout`, and the
values of a `layout` record whenever the parameters change; facts for a model's or a step's record. Units are compared
once; only the graphs of a model's first losses are searched. Also finds the optimizers inside a wrapper, as in
ZeroRedundancyOptimizer, Accelerate, Lightning, DeepSpeed and Lookahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        entries = list(module) if isinstance(module, nn.ModuleList) else []
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
