"""Generators of random numbers that a task or a model keeps for itself: no step seeds them, so no promise covers them.

In: a task and its model. Out: where such generators are, for `lockstep verify` and the start of a run to name.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

UNCOVERED = "not seeded for every micro-batch, so what they draw may differ at another number of processes"
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_LIBRARIES = {"lockstep", "torch", "transformers", "tokenizers", "peft", "numpy", "datasets", "pyarrow", "builtins"}
_DEPTH = 4  # objects within objects that are looked into


def own_generators(task: Any, model: nn.Module) -> list[str]:
    """Where generators of their own are, such as `task.dice (random's Random)`: in attributes of the task and of the
    model's modules, and in the modules that define the task's and the model's classes. Those that a function makes for
    itself when it is called are not seen."""
    seen: set[int] = set()
    found = list(_within(task, "task", seen, _DEPTH))
    for name, module in model.named_modules():
        found += _within(module, f"model.{name}" if name else "model", seen, _DEPTH)
    homes = {kind.__module__ for holder in (task, *model.modules()) for kind in type(holder).__mro__}
    for home in sorted(h for h in homes if not _of_library(h) and h in sys.modules):
        for name, value in vars(sys.modules[home]).items():
            found += _within(value, f"{home}.{name}", seen, 1)
    return found


def _of_library(module: str) -> bool:
    return module.split(".")[0] in _LIBRARIES


def _within(value: Any, where: str, seen: set[int], depth: int) -> Iterator[str]:
    """The generators that `value` is or holds."""
    if id(value) in seen:
        return
    if isinstance(value, _KINDS):
        seen.add(id(value))
        yield f"{where} ({type(value).__module__.split('.')[0]}'s {type(value).__qualname__})"
        return
    if depth == 0 or isinstance(value, type):
        return
    if isinstance(value, Mapping):
        parts = {f"{where}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{where}[{i}]": part for i, part in enumerate(value[:100])}
    elif isinstance(value, nn.Module) or not _of_library(type(value).__module__) or where == "task":
        held = getattr(value, "__dict__", {})
        parts = {f"{where}.{name}": part for name, part in held.items() if not name.startswith("_modules")}
    else:
        return
    seen.add(id(value))
    for place, part in parts.items():
        yield from _within(part, place, seen, depth - 1)
