"""Side effects of a model's forward: weights, buffers, which weights are trained, plain attributes.

In: a model, and ways to call its forward. Out: `SideEffects`, by name, of each rank and of all; refusals. What was
changed is put back: a forward before training leaves no trace.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.distributed.world import World
from lockstep.strategies.engines.writes import bits_of, hooks, of_user, preserved, tensor_of, watching

SWITCHED = (
    "strategy.name: the model's forward changes requires_grad of weights, and how often it did depends on how many "
    "micro-batches a process has run. Use one process (launch.processes=1 strategy.name=single), or decide before "
    "training what is trained (model.freeze)"
)

Forward = Callable[[], None]


@dataclass(frozen=True)
class SideEffects:
    """Side effects of forward, by the names of parameters and buffers."""

    written: frozenset[str] = frozenset()  # their numbers
    moved: frozenset[str] = frozenset()  # those of them that got other memory
    replaced: frozenset[str] = frozenset()  # parameters in whose place it puts others
    switched: frozenset[str] = frozenset()  # their `requires_grad`
    hooked: frozenset[str] = frozenset()  # those on whose gradients it puts hooks
    evaluated: frozenset[str] = frozenset()  # those that it writes to in evaluation mode only
    alike: Mapping[str, str] = field(default_factory=dict)
    """Those that forward makes the same whatever the batch and however often, such as a limit on weights: a hash."""

    @property
    def per_process(self) -> frozenset[str]:
        """What each process would make something else of."""
        return self.switched | (self.written - self.alike.keys())

    def together(self, all_gather: Callable[[SideEffects], list[SideEffects]]) -> SideEffects:
        """Those of all ranks. Collective."""
        effects = all_gather(self)
        same = set.intersection(*(set(each.alike.items()) for each in effects))

        def union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
            return frozenset().union(*sets)

        return SideEffects(
            union(each.written for each in effects),
            union(each.moved for each in effects),
            union(each.replaced for each in effects),
            union(each.switched for each in effects),
            union(each.hooked for each in effects),
            union(each.evaluated for each in effects),
            dict(same),
        )


def one_process(names: Collection[str]) -> str:
    """What is said of them on one process, which trains such a model."""
    return (
        f"training changes {first_few(sorted(names))} beside the optimizer, which several processes cannot bring "
        "together: this model trains on one process only"
    )


def replacement(names: Collection[str]) -> str:
    """What is wrong with other parameters in the place of these."""
    return (
        f"forward puts another parameter in the place of {first_few(sorted(names))}, and the optimizer would go on "
        "with the one from before; write into the parameter instead (`weight.copy_(...)` under torch.no_grad())"
    )


def refusal(strategy: str, effects: SideEffects, model: nn.Module, averages: bool) -> str:
    """Why several processes cannot train a model with these side effects. `averages`: whether the strategy brings
    running statistics together."""
    weights = dict(model.named_parameters())
    shown = first_few(names := sorted(effects.per_process))
    where = "Use one process (launch.processes=1 strategy.name=single), or a model"
    if effects.switched:
        return f"{SWITCHED} (here of {first_few(sorted(effects.switched))})"
    if any(name in weights for name in names):
        return (
            f"strategy.name: training changes {shown} of the model beside the optimizer: every process would make "
            f"something else of them from its own micro-batches, and {strategy} can bring together gradients and the "
            f"running statistics of BatchNorm. {where} whose forward leaves weights alone"
        )
    return (
        f"strategy.name: training changes {shown} of the model, which are no weights: every process would make "
        f"something else of them, and {strategy} can bring together nothing but the running statistics of BatchNorm "
        f"and its like{'' if averages else ' (this strategy not even those)'}. {where} without them"
    )


def refuse_own_tensors(model: nn.Module, engine: str, instead: str) -> None:
    """For an engine that builds a model without numbers and puts other tensors in the place of its weights. Errors:
    `RunError` for what the user's modules would lose by that."""
    if names := hooks(model):
        raise RunError(
            f"{engine} would lose the hook on the gradient of {first_few(names)} (register_hook), since it puts other "
            f"tensors in the place of the model's weights. Use {instead}"
        )
    loose = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if of_user(module)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and _holds_tensor(value)
    ]
    if loose:
        raise RunError(
            f"{engine} would lose {first_few(loose)}: a tensor that a module holds and that is neither a parameter nor "
            "a buffer, such as weight.data, a constant, or what a list or a function has in it, gets no numbers. Ask "
            "for the weight itself in forward, make a buffer of a constant (register_buffer(..., persistent=False)), "
            f"or use {instead}"
        )


def refuse_writes(model: nn.Module, world: World, forward: Forward, engine: str, instead: str) -> None:
    """Refuse a model whose forward writes to trained weights, for an engine that cuts the model up and would lose it.
    Rank 0 holds the whole `model` and calls `forward` once, without a trace. Collective. Errors: `RunError`, on every
    rank."""
    names: list[str] = []
    if world.is_main and any(of_user(module) for module in model.modules()):
        with suppress(Exception):  # it fails again in the trial step, with more to say
            effects, weights = effects_of(model.train(), [forward], ()), dict(model.named_parameters())
            touched = effects.written | effects.evaluated
            names = sorted(name for name in touched if name in weights and weights[name].requires_grad)
    if names := world.broadcast(names):
        raise RunError(
            f"{engine} would lose what the model's forward writes to {first_few(names)}, which is trained: it cuts the "
            f"model up. Use {instead}, or limit weights by a parametrization (torch.nn.utils.parametrize)"
        )


def _holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a value is a tensor, or has one in it: in a list or a mapping, or in what a function closes over."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        inside = [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, Mapping):
        inside = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside = [*value]
    else:
        return False
    return depth > 0 and any(_holds_tensor(each, depth - 1) for each in inside)


def _cells(function: FunctionType) -> list[Any]:
    """The variables that a function closes over, those that have a value."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            cells.append(cell.cell_contents)
    return cells


def first_few(names: Collection[str]) -> str:
    """The first few of many."""
    return ", ".join([*names][:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def effects_of(model: nn.Module, forwards: Sequence[Forward], statistics: Collection[str]) -> SideEffects:
    """The side effects of the first of some forwards, and which of them a second one shares. `statistics`: buffers that
    ranks bring together. Nothing of it is left."""
    if not forwards:
        return SideEffects()
    with preserved(model), watching(model) as writes:
        forwards[0]()
    written = frozenset({*writes.before} | writes.moved) - set(statistics)
    alike = _alike(model, written, *forwards) if written and len(forwards) > 1 else {}
    with preserved(model), watching(model) as evaluating:
        model.eval()
        try:
            forwards[0]()
        finally:
            model.train()
    return SideEffects(
        written,
        frozenset(writes.moved),
        frozenset(writes.replaced),
        frozenset(writes.switched),
        frozenset(writes.hooked),
        frozenset(evaluating.before.keys() - written - set(statistics)),
        alike,
    )


def _alike(model: nn.Module, names: Collection[str], first: Forward, second: Forward) -> dict[str, str]:
    """Those tensors of which either forward, and one after the other, makes the same numbers, begun from large ones,
    with a hash of these numbers. None where forward fails on large numbers."""
    made: dict[str, set[str]] = {name: set() for name in names}
    try:
        for turns in ((first,), (second,), (first, second)):
            with preserved(model, names):
                for name in names:
                    _enlarge(tensor_of(model, name))
                for forward in turns:
                    forward()
                for name in names:
                    numbers = bits_of(tensor_of(model, name)).cpu().numpy().tobytes()
                    made[name].add(hashlib.sha256(numbers).hexdigest())
    except Exception:
        return {}
    return {name: hashes.pop() for name, hashes in made.items() if len(hashes) == 1}


@torch.no_grad()
def _enlarge(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        spread = torch.linspace(-1000, 1000, tensor.numel(), device=tensor.device).view(tensor.shape)
        tensor.copy_(tensor.float() * 1000 + spread)
