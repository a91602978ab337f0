"""Records the random number generators of data loader workers, which may draw the same numbers.

In: a data loader whose pass begins. Out: one record per worker at its end, with hashes of the generators' states at its
start, after its first examples and at its end: torch's, numpy's, Python's, and those in the data set. Only for forked
workers, where nothing has to be pickled.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import random
import sys
import zlib
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import torch

LOOKED_AT = 300  # max. objects of a data set to search


def watched(loader: Any, write: Callable[..., None], name: str) -> Any:
    """Return the `worker_init_fn` that records a loader's workers in a new pass, or None if that is not possible."""
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    if loader.num_workers < 2 or method != "fork" or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None  # workers may shuffle a stream alike on purpose, to take a share each
    return functools.partial(_begin, loader.worker_init_fn, write, name)


def _begin(init: Any, write: Callable[..., None], loader: str, number: int) -> None:
    if init is not None:
        init(number)
    info = torch.utils.data.get_worker_info()
    if info is None:
        return
    try:
        before = states(info.dataset)
        first: dict[str, str] = {}
        _after_first(info.dataset, first)
        Finalize(None, _end, (write, loader, number, info.dataset, before, first), exitpriority=100)
    except Exception as error:
        write("error", text=f"{type(error).__name__}: {error}", stack="")


def _after_first(data: Any, first: dict[str, str]) -> None:
    kind: Any = type(data)
    name = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    original = getattr(kind, name)

    @functools.wraps(original)
    def get(self: Any, index: Any) -> Any:
        value = original(self, index)
        if self is data and not first:
            first.update(states(data))
        return value

    setattr(kind, name, get)


def _end(
    write: Callable[..., None], loader: str, number: int, data: Any, before: dict[str, str], first: dict[str, str]
) -> None:
    after = states(data)
    rows = {name: [state, after[name]] for name, state in before.items() if name in after}
    write("worker", loader=loader, number=number, generators=rows, first=first)


def states(data: Any = None) -> dict[str, str]:
    """Return name -> hash of generator states: `torch`, `numpy`, `random`, and `dataset.PATH` for a data set's own."""
    digests = {"torch": _hash(bytes(torch.random.get_rng_state().tolist())), "random": _hash(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        digests["numpy"] = _hash(numpy.random.get_state())
    visited: set[int] = set()
    waiting = [("dataset", data, 0)]
    while waiting and len(visited) < LOOKED_AT:
        path, value, depth = waiting.pop(0)
        if id(value) in visited:
            continue
        visited.add(id(value))
        state = _state(value, numpy)
        if state is not None:
            digests[path] = _hash(state)
        elif depth < 4:
            waiting += [(f"{path}.{key}", inner, depth + 1) for key, inner in _inside(value)]
    return digests


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple) and len(value) <= 16:
        return [(str(i), inner) for i, inner in enumerate(value)]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) and not isinstance(value, type) else []


def _state(value: Any, numpy: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist() if value.device.type == "cpu" else None
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state()
    return None


def _hash(state: Any) -> str:
    return f"{zlib.crc32(pickle.dumps(state)):08x}"
