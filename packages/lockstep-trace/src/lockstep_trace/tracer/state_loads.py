"""Detects state_dicts with none of the model's keys, loaded with `strict=False`: they change nothing.

In: a module, the argument and the result of `load_state_dict`. Out: `empty load` records, when the module is called
with weights that nothing has changed since.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

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
