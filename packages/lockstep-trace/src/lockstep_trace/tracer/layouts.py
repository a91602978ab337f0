"""Stores the description of an optimizer's parameters in the trace, and the last measurement of their weights.

In: an optimizer's parameters and their names. Out: a `SketchedLayout`, and the values of a `layout` record whenever the
parameters change. Also finds the optimizers inside a wrapper, as in ZeroRedundancyOptimizer, Accelerate, Lightning,
DeepSpeed and Lookahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import placement
from .fingerprint import width_of
from .layers import thawed


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
