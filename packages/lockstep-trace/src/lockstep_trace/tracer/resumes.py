"""Tracks optimizer states that were saved or read in this process and that a later optimizer did not load.

In: calls of `Optimizer.state_dict` and `load_state_dict`, results of `torch.load`. Out: the states that an optimizer
could have continued from, at its first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
