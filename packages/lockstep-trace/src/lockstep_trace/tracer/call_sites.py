"""Finds where an operation was called from: the line of the user's own file, and whether backward, a recomputation or
an optimizer called it.

In: the current Python stack. Out: `CallSite`, or None inside compiled code.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

TORCH = str(Path(torch.__file__).parent) + os.sep
OWN = str(Path(__file__).parent) + os.sep
PACKAGE = str(Path(__file__).parents[1]) + os.sep if Path(__file__).parents[1].name == "lockstep_trace" else OWN
STANDARD = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
COMPILED = (f"{TORCH}_functorch{os.sep}_aot_autograd{os.sep}", f"{TORCH}_inductor{os.sep}")


class CallSite(NamedTuple):
    """`line`: file:line of the user's own file, or None. `library`: innermost file:line of an installed package other
    than torch, or None. `started`: in backward, the user's line that started it. `role`: backward, recompute, optimizer
    or an empty text."""

    line: str | None
    library: str | None
    started: str | None
    role: str


def call_site(in_backward: bool) -> CallSite | None:
    """Return the call site of the operation that is being dispatched; None if compiled code calls it."""
    line, library, started, role, engine = None, None, None, "", False
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind(name)
        if kind == "compiled":
            return None
        if in_backward and kind in ("checkpoint", "engine"):
            role = role if role in ("recompute", "backward") else {"checkpoint": "recompute"}.get(kind, "backward")
            engine = engine or kind == "engine"
        elif kind == "optimizer" and line is None and library is None:
            role = role or "optimizer"
        elif kind == "library" and library is None and not engine:
            library = f"{_short(name)}:{frame.f_lineno}"
        elif kind == "user" and engine:
            started = f"{_short(name)}:{frame.f_lineno}"
            break
        elif kind == "user" and line is None:
            line = f"{_short(name)}:{frame.f_lineno}"
            if not in_backward:
                break
        frame = frame.f_back  # type: ignore[assignment]
    if in_backward and role in ("", "optimizer"):
        role = "backward"  # a thread of a device, which has no Python frames
    return CallSite(line, library, started, role)


@functools.lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    if name.startswith(TORCH):
        rest = name[len(TORCH) :].replace(os.sep, "/")
        if name.startswith(COMPILED):
            return "compiled"
        known = {"utils/checkpoint.py": "checkpoint", "autograd/graph.py": "engine"}
        return known.get(rest, "optimizer" if rest.startswith("optim/") else "torch")
    if name.startswith((OWN, PACKAGE)):
        return "own"
    if "torchinductor_" in name:
        return "compiled"
    if any(part in name for part in PACKAGES):
        return "library"
    standard = name.startswith(("<frozen ", "<eval_with_key>", *STANDARD))
    return "standard" if standard else "user"


@functools.lru_cache(maxsize=4096)
def _short(name: str) -> str:
    for part in PACKAGES:
        if part in name:
            return name.rsplit(part, 1)[1]
    here = os.getcwd() + os.sep
    return name.removeprefix(here)
