"""Detects optimizer attributes that torch does not read, and state that shares memory with a gradient.

In: an optimizer before a step. Out: a number, or names of states.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import placement


def unread_rate(optimizer: Any) -> float | None:
    """Return the number in an attribute `lr` of a torch optimizer, which reads only the rates of its groups."""
    value = vars(optimizer).get("lr") if type(optimizer).__module__.startswith("torch.optim") else None
    return float(value) if isinstance(value, int | float) else None


def shared_with_gradients(optimizer: Any) -> list[str]:
    """Return the names of states that share memory with the gradient of every parameter that has both."""
    rows: dict[str, list[bool]] = {}
    for parameter, state in optimizer.state.items():
        grad: Any = getattr(parameter, "grad", None)
        if not isinstance(state, dict) or not placement.is_plain_tensor(grad):
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and placement.is_plain_tensor(value) and value.shape == grad.shape:
                rows.setdefault(str(name), []).append(value.data_ptr() == grad.data_ptr() != 0)
    return sorted(name for name, shared in rows.items() if all(shared))
