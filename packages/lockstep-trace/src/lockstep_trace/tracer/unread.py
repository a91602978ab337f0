"""Finds numbers that a script computes from parameters or gradients between calls of models, and that nobody reads.

In: torch's functions from a backward or step to the next call of a model, backward or step, at a few early steps. Out:
(what, line, count). A mode of torch's functions sees them; it changes none, and is used while no other mode is, nothing
was compiled, and one process trains.
"""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .call_sites import kind_of, short_name

WINDOWS = range(2, 8)  # steps
COMPUTE = {"add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv", "lerp", "clamp", "clip"}
COMPUTE |= {"clamp_min", "clamp_max", "addcmul", "addcdiv", "where", "masked_fill", "nan_to_num", "radd", "rmul"}
WRITTEN = "weights", "gradients"


class UnreadResults(TorchFunctionMode):
    """Results of elementwise functions of parameters or their gradients, and whether anything reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[Any]] = []  # [weak reference, function, line, of what, dropped, read]
        self._of: dict[int, tuple[weakref.ref[Any], str]] = {}  # tensors by id: what they are computed from
        self._results: dict[int, list[Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._look(getattr(func, "__name__", ""), list(_tensors((args, kwargs))), result)
        except Exception:
            self.rows = []  # the script's call has succeeded
        return result

    def _look(self, name: str, tensors: list[Tensor], result: Any) -> None:
        for tensor in tensors:
            row = self._results.get(id(tensor))
            if row is not None and row[0]() is tensor:
                row[-1] = True
        if not isinstance(result, Tensor) or result.numel() < 2 or any(result is t for t in tensors):
            return
        of = next((o for t in tensors if t.shape == result.shape and (o := self._origin(t))), "")
        if not of:
            return
        getter, name = name == "__get__", name.strip("_")
        if getter and type(tensors[0]) is nn.Parameter and result.data_ptr() != tensors[0].data_ptr():
            of = WRITTEN[1]
        self._of[id(result)] = weakref.ref(result), of
        if name in COMPUTE and (frame := _caller()) is not None:
            line = f"{short_name(frame.f_code.co_filename)}:{frame.f_lineno}"
            row = [weakref.ref(result), name, line, of, drops(frame.f_code, frame.f_lasti), False]
            self.rows.append(row)
            self._results[id(result)] = row

    def _origin(self, tensor: Tensor) -> str:
        if type(tensor) is nn.Parameter:
            return WRITTEN[0]
        ref, of = self._of.get(id(tensor), (None, ""))
        return of if ref is not None and ref() is tensor else ""

    def unread(self) -> list[list[Any]]:
        """Return [function, line, of what, whether its code drops it, count] of a line's results, two or more, of which
        none was read and all but the last are gone."""
        lines: dict[tuple[Any, ...], list[list[Any]]] = {}
        for row in self.rows:
            lines.setdefault(tuple(row[1:5]), []).append(row)
        counts = [(key, [r for r in rows if r[0]() is not None], rows) for key, rows in lines.items()]
        dropped = [
            (k, rows) for k, alive, rows in counts if len(alive) < 2 <= len(rows) and not any(r[-1] for r in rows)
        ]
        return [[*key, len(rows)] for key, rows in dropped]


def _caller() -> Any:
    """Return the frame of the user's own file, if it calls a function of torch itself."""
    frame: Any = sys._getframe(3)
    while frame is not None and kind_of(frame.f_code.co_filename) == "torch":
        frame = frame.f_back
    return frame if frame is not None and kind_of(frame.f_code.co_filename) == "user" else None


@functools.lru_cache
def drops(code: Any, at: int) -> bool:
    """Return whether code drops the result of its instruction at a place, or stores it in a local name that is read by
    no later instruction."""
    later = [i for i in dis.get_instructions(code) if i.offset > at]
    if not later or later[0].opname == "POP_TOP":
        return bool(later)
    name, local = later[0].argval, later[0].opname == "STORE_FAST"
    return local and not any("LOAD" in i.opname and (i.argval == name or _pair(i.argval, name)) for i in later)


def _pair(argument: Any, name: str) -> bool:
    return isinstance(argument, tuple) and name in argument  # two loads in one instruction, from Python 3.13 on


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


class UnreadWindow:
    """The mode of this process while it is on."""

    def __init__(self) -> None:
        self.mode: UnreadResults | None = None

    def open(self) -> None:
        """Begin to look, if nothing else does."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        compiled = dynamo is not None and bool(dynamo.counters.get("frames"))
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.mode is None and not (compiled or several or torch._C._len_torch_function_stack()):
            self.mode = UnreadResults()
            self.mode.__enter__()

    def close(self) -> list[list[Any]]:
        """End it and return what was not read."""
        mode, self.mode = self.mode, None
        if mode is None:
            return []
        count = torch._C._len_torch_function_stack()
        above = [torch._C._pop_torch_function_stack() for _ in range(count)]
        for each in reversed(above):
            if each is not mode:
                torch._C._push_on_torch_function_stack(each)
        return mode.unread() if any(each is mode for each in above) else []
