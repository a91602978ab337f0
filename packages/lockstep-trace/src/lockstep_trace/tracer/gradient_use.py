"""Tracks gradients that no optimizer reads: cleared before the next backward, or clipped only after the step.

In: calls around backward, `zero_grad`, clipping and steps. Out: counts in `Since`, and a mark on the clipping's record.
A gradient counts as cleared only if nothing holds the tensor any more, or `zero_grad` wrote zeros into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import placement
from .versions import GradientVersion, gradient_versions, has_gradient, untouched


class GradientUse:
    """Tracks which gradients of this process are read by an optimizer."""

    def __init__(self) -> None:
        self.zeroed = False  # `zero_grad` was called since the last backward
        self.zeroed_before = False  # and before it
        self._late: list[tuple[dict[str, Any], list[GradientVersion]]] = []  # clipped before any backward of a step

    def before_backward(self, after: Sequence[GradientVersion]) -> bool:
        """Return whether all gradients of the last backward, `after`, were cleared. Forgets what was clipped."""
        for clip, rows in self._late:
            if "used" not in clip and all(self._cleared(row) for row in rows):
                clip["unused"] = True
        self._late = []
        cleared = bool(after) and all(self._cleared(row) for row in after)
        self.zeroed_before, self.zeroed = self.zeroed, False
        return cleared

    def _cleared(self, row: GradientVersion) -> bool:
        parameter, grad, _ = row[0](), row[1](), row[2]
        if parameter is None:
            return False
        if not has_gradient(row):
            return grad is None  # else the script keeps it
        return self.zeroed and parameter.grad is grad and untouched(row) is None

    def has_clipped(self, clip: dict[str, Any], parameters: Sequence[Any]) -> None:
        """Remember a clipping that follows a step, or that precedes any backward."""
        if not clip["backwards"]:
            clip["all"] = sum(1 for p in parameters if p.requires_grad)
            self._late.append((clip, gradient_versions(parameters)))

    def stepped(self, parameters: Sequence[Any]) -> None:
        """Mark clippings whose gradients a step reads."""
        if self._late:
            own = {id(p) for p in parameters}
            for clip, rows in self._late:
                if any(id(row[0]()) in own and has_gradient(row) for row in rows):
                    clip["used"] = True


class Leaks:
    """Gradients that a loss leaves in the parameters of an optimizer, while another one steps by that loss."""

    def __init__(self) -> None:
        self.looks = LEAKS
        self._marks: dict[int, list[Any]] = {}  # by optimizer, before or after the last backward
        self._losses: dict[int, list[Loss]] = {}  # since its gradients were cleared
        self._left: dict[int, Tensor] = {}  # whether gradients before a backward are not zero
        self._notes: dict[int, tuple[str, Tensor]] = {}
        self._delayed: dict[
            int, tuple[int, Loss]
        ] = {}  # by optimizer: one that stepped by its first loss, its last one

    def before_backward(self, optimizers: Mapping[int, Any]) -> None:
        for number, optimizer in optimizers.items() if len(optimizers) > 1 and self.looks else ():
            now = _marks(optimizer)
            if self._marks.get(number) != now:  # cleared, or written to
                self._losses[number] = []
                self._notes.pop(number, None)
            self._marks[number] = now
            if any(loss.stepped for loss in self._losses.get(number, ())):
                self._left[number] = torch.stack([p.grad.any() for p in _with_gradients(optimizer)]).any()

    def after_backward(self, optimizers: Mapping[int, Any]) -> None:
        marks = {n: _marks(o) for n, o in optimizers.items()} if self._marks and self.looks else {}
        reached = {n for n, now in marks.items() if self._marks.get(n) != now}
        loss = Loss(reached)
        for number in reached:
            losses = self._losses.setdefault(number, [])
            others = next((each.stepped - reached for each in losses if each.stepped - reached), None)
            if others and number in self._left:
                self._notes[number] = f"leak {number} {min(others)}", self._left[number]
            losses.append(loss)
        self._marks, self._left = marks, {}

    def stepped(self, number: int) -> list[tuple[str, Tensor]]:
        """Return notes on the gradients of an optimizer's step, and whether they hold."""
        for other, losses in self._losses.items():
            for loss in losses:
                if other != number and number in loss.reached:
                    loss.stepped.add(number)
        losses, self._losses[number] = self._losses.get(number, []), []
        note = self._notes.pop(number, None)
        for other, (by, last) in list(self._delayed.items()):
            if by == number and any(loss is last for loss in losses):
                del self._delayed[other]  # it steps by each loss, and the other one seldom
        row = self._delayed.pop(number, None)
        if note is None and row is not None and self.looks:
            note = f"leak {number} {row[0]}", torch.ones(())
        if earlier := {o for loss in losses[:-1] for o in loss.stepped - losses[-1].stepped - {number}}:
            self._delayed[number] = min(earlier), losses[-1]
        self.looks -= note is not None
        return [] if note is None else [note]


@dataclass
class Loss:
    """A backward: the optimizers that it reached, and those stepped since."""

    reached: set[int]
    stepped: set[int] = field(default_factory=set)


LEAKS = 8  # steps with such gradients that are looked at


def _with_gradients(optimizer: Any) -> list[Any]:
    return [row[0]() for row in gradient_versions(p for g in optimizer.param_groups for p in g["params"])]


def _marks(optimizer: Any) -> list[Any]:
    rows = gradient_versions(p for group in optimizer.param_groups for p in group["params"])
    return [(id(p()), id(grad()), count) for p, grad, count in rows]


def shared_with_gradients(optimizer: Any) -> list[str]:
    """Return the names of states that share memory with the gradient of every parameter that has both."""
    rows: dict[str, list[bool]] = {}
    for parameter, state in optimizer.state.items():
        grad: Any = getattr(parameter, "grad", None)
        if not isinstance(state, dict) or not placement.is_plain_tensor(grad) or grad.layout != torch.strided:
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and placement.is_plain_tensor(value) and value.shape == grad.shape:
                rows.setdefault(str(name), []).append(value.data_ptr() == grad.data_ptr() != 0)
    return sorted(name for name, shared in rows.items() if all(shared))
