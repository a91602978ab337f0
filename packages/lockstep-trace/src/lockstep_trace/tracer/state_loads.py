"""Detects state_dicts with none of the model's keys, loaded with `strict=False`: they change nothing.

In: a module, the argument and the result of `load_state_dict`. Out: `empty load` records, when the module is called
with weights that nothing has changed since.

Tracks optimizer states that were saved or read in this process and that a later optimizer did not load.

In: calls of `Optimizer.state_dict` and `load_state_dict`, results of `torch.load`. Out: the states that an optimizer
could have continued from, at its first step.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn

from .versions import version


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
