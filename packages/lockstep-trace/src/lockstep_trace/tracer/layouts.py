"""Stores the description of an optimizer's parameters in the trace, and the last measurement of their weights.

In: an optimizer's parameters and their names. Out: a `SketchedLayout`, and the values of a `layout` record whenever the
parameters change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
