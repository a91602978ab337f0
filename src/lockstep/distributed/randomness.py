"""Random numbers that depend only on seed, step and micro-batch; detection of generators with another seed.

In: a seed and a position in the run. Out: the generators of Python, numpy and torch, seeded; the private generators of
a task and its model, which no step seeds and no guarantee covers (`verify` and the start of a run list them).

CPU dropout masks (`bernoulli_`) are drawn in bulk: torch draws one by one, which takes 7 % of a step. One number from
torch's generator seeds numpy's SFC64, so a mask remains a pure function of the state of torch's generator.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.library import Library


@cache
def draw_wide() -> Library:
    """Draw CPU dropout masks with numpy's SFC64 from now on, in this process, for every tensor. A second call does
    nothing. Keep the returned library: the replacement ends with it."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        library.impl("bernoulli_.float", bernoulli, "CPU")
    return library


def bernoulli(tensor: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill with 1 with probability `p` (to 2^-32), else 0, in place."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    limit = round(p * 2**32) - 2**31
    if limit == 2**31:
        return tensor.fill_(1)
    count = tensor.numel()
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    words = np.random.SFC64(seed).random_raw(-(-count // 2)).view(np.int32)
    torch.lt(torch.from_numpy(words)[:count].view(tensor.shape), limit, out=tensor)
    return tensor


UNCOVERED = "not seeded per micro-batch, so their random numbers may differ at another number of processes"
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_LIBRARIES = {"lockstep", "torch", "transformers", "tokenizers", "peft", "numpy", "datasets", "pyarrow", "builtins"}
_DEPTH = 4  # depth of nested objects that are searched


def seed_everything(seed: int, *place: int) -> None:
    """Seed Python's, numpy's and torch's global generators (on every device) from `(seed, *place)`.

    Micro-batch k of step t runs with `place = (t, k)`, and is collated with `(t, k, 1)` if a task's `collate` draws
    numbers; batch b of an evaluation has `(-1, b)`, and samples printed for the user `(-2,)`.
    """
    draw_wide()
    seed_libraries(mix(seed, *place))


def seed_libraries(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # `torch.manual_seed` records the stack for each device type not in use: 5 % of a small micro-batch on a CPU
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def mix(*numbers: int) -> int:
    """Hash several numbers to one well-mixed 63-bit number."""
    return int(mixed(*numbers)) >> 1


def own_generators(task: Any, model: nn.Module) -> list[str]:
    """List private generators, such as `task.dice (random's Random)`: in attributes of the task and of the model's
    modules, and in the modules that define their classes. Generators that a function creates when called are not
    detected."""
    visited: set[int] = set()
    generators = list(_within(task, "task", visited, _DEPTH))
    for name, module in model.named_modules():
        generators += _within(module, f"model.{name}" if name else "model", visited, _DEPTH)
    homes = {kind.__module__ for holder in (task, *model.modules()) for kind in type(holder).__mro__}
    for home in sorted(h for h in homes if not _of_library(h) and h in sys.modules):
        for name, value in vars(sys.modules[home]).items():
            generators += _within(value, f"{home}.{name}", visited, 1)
    return generators


def _of_library(module: str) -> bool:
    return module.split(".")[0] in _LIBRARIES


def _within(value: Any, where: str, visited: set[int], depth: int) -> Iterator[str]:
    """Yield the generators that `value` is or contains."""
    if id(value) in visited:
        return
    if isinstance(value, _KINDS):
        visited.add(id(value))
        yield f"{where} ({type(value).__module__.split('.')[0]}'s {type(value).__qualname__})"
        return
    if depth == 0 or isinstance(value, type):
        return
    if isinstance(value, Mapping):
        parts = {f"{where}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{where}[{i}]": part for i, part in enumerate(value[:100])}
    elif isinstance(value, nn.Module) or not _of_library(type(value).__module__) or where == "task":
        attributes = getattr(value, "__dict__", {})
        parts = {f"{where}.{name}": part for name, part in attributes.items() if not name.startswith("_modules")}
    else:
        return
    visited.add(id(value))
    for place, part in parts.items():
        yield from _within(part, place, visited, depth - 1)


# -- hashes of integers: SplitMix (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195), equal in every process, on
#    every machine and with every library version

_STEP = np.uint64(0x9E3779B97F4A7C15)


def mixed(*numbers: Any) -> np.ndarray:
    """Hash several numbers to one, elementwise for arrays: uint64. Inputs are taken modulo 2^64."""
    with np.errstate(over="ignore"):
        state: Any = _STEP
        for number in numbers:
            one = np.uint64(number % 2**64) if isinstance(number, int) else np.asarray(number).astype(np.uint64)
            state = _finished(np.asarray(state + one + _STEP))
    return state


def _finished(state: np.ndarray) -> np.ndarray:
    """SplitMix's finalizer; overflow is intended."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
