"""The way of a run from the command to its first step: which files it passes, as a Mermaid picture.

In: nothing; the built-in run is started as one process in a folder of its own. Out: on stdout the picture of
docs/explanation/internals.md, or with `--count` the figures of benchmarks/log.md. Every call is looked at until the
first step of training calls `train_step`, and for the figures until its optimizer step. The files of the functions on
the stack are the way, from the command down; the files that these call with the run, its plan, the job or the session
are its stops.

    python benchmarks/way.py [--count]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lockstep

ROOT = f"{Path(lockstep.__file__).parent}{os.sep}"
_TRACE = importlib.util.find_spec("lockstep_trace")  # not imported: a script that imports it is traced
GROUND = str(_TRACE and _TRACE.origin).removesuffix("__init__.py")
CARRIERS = ("Run", "LaunchPlan", "Job", "Session")  # types that are followed
FIRST = ["output=out", "steps=2", "launch.processes=1", "launch.device=cpu", "strategy.name=single"]


class Call(NamedTuple):
    """A call of a lockstep function with a run, a plan, a job or a session."""

    file: str
    function: str
    frame: FrameType
    caller: FrameType | None  # nearest caller within lockstep


class Way(NamedTuple):
    """Files on the stack of the first step, from the command down, and the files that they call."""

    files: list[tuple[str, str]]  # file, and its entry function
    stops: list[tuple[str, str, str]]  # file on the way, called file, and function


class Reached(BaseException):
    """Raised at the first step: later calls are not recorded."""


class Reading:
    """What somebody would have to open: each file of lockstep's in which a function is called up to the first optimizer
    step, the functions, and how often the next call is in another file. Calls while a module is imported count only if
    they are of named functions."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.moves, self._last = 0, ""

    def count(self, code: CodeType) -> None:
        if code.co_name.startswith("<") or not code.co_flags & inspect.CO_NEWLOCALS:  # comprehensions, class bodies
            return
        self.functions.add((code.co_filename, code.co_qualname))
        self.moves += code.co_filename != self._last
        self._last = code.co_filename

    @property
    def files(self) -> int:
        return len({file for file, _ in self.functions})


def ours(frame: FrameType | None) -> FrameType | None:
    """Return the frame, or its nearest caller, within lockstep."""
    while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
        frame = frame.f_back
    return frame


def stack(frame: FrameType | None) -> list[FrameType]:
    """Frames within lockstep, newest first."""
    found = []
    while (frame := ours(frame)) is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def carries(frame: FrameType) -> bool:
    """Return whether a call passes a run, a plan, a job or a session; methods of these classes are left out."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = [type(frame.f_locals.get(name)).__name__ for name in names]
    return any(kind in CARRIERS for kind in kinds) and not (names[0] == "self" and kinds[0] in CARRIERS)


def follow(command: Callable[[], Any], reading: Reading | None = None) -> tuple[list[Call], list[FrameType]]:
    """Record the calls until the first step of `training/loop.py`, and the stack there, newest frame first. With
    `reading`, go on to the optimizer step."""
    calls: list[Call] = []
    reached: list[FrameType] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith((ROOT, GROUND)):
            return
        if reading is not None:
            reading.count(frame.f_code)
        file, function = frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_name
        if reached or not frame.f_code.co_filename.startswith(ROOT):
            if reached and function == "optimizer_step":
                sys.setprofile(None)
                raise Reached
            return
        if function == "train_step":
            frames = stack(frame)
            if any(each.f_code.co_filename.endswith("training/loop.py") for each in frames):
                reached.extend(frames)
                if reading is None:
                    sys.setprofile(None)
                    raise Reached
        if not function.startswith("<") and carries(frame):
            calls.append(Call(file, function, frame, ours(frame.f_back)))

    sys.setprofile(look)
    try:
        command()
    except Reached:
        pass
    finally:
        sys.setprofile(None)
    if not reached:
        raise SystemExit("the run ended before its first step")
    return calls, reached


def file_of(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(ROOT)


def way_of(calls: list[Call], frames: list[FrameType]) -> Way:
    """Include functions called within the same file: a reader stays on the page."""
    files: list[tuple[str, str]] = []
    for frame in reversed(frames):
        if not files or files[-1][0] != file_of(frame):
            files.append((file_of(frame), frame.f_code.co_name))
    pages = {file for file, _ in files}
    on_page = {id(frame) for frame in frames}
    stops: list[tuple[str, str, str]] = []
    for call in calls:
        if id(call.frame) in on_page or call.caller is None or id(call.caller) not in on_page:
            continue
        caller = file_of(call.caller)
        if call.file == caller:
            on_page.add(id(call.frame))
        elif (caller, call.file) not in [stop[:2] for stop in stops]:
            stops.append((caller, call.file, call.function))
    return Way(files, [stop for stop in stops if stop[1] not in pages])


def built_in(folder: str, reading: Reading | None = None) -> tuple[list[Call], list[FrameType]]:
    """Start the built-in run in an empty folder, in this process."""
    from lockstep.cli import main

    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return follow(lambda: main(["train", *FIRST]), reading)


def picture(way: Way) -> str:
    """Draw the way in Mermaid: files from the command down to the step, and the files that each calls."""

    def node(file: str, function: str) -> str:
        name = file.removesuffix(".py").replace("/", "_")
        return f'{name}["{file}<br>{function}"]'

    lines = ["flowchart TD"]
    for (above, entry), (below, function) in itertools.pairwise(way.files):
        lines.append(f"    {node(above, entry)} ==> {node(below, function)}")
    first: dict[str, str] = {}
    for caller, file, function in way.stops:
        lines.append(f"    {node(caller, dict(way.files)[caller])} --> {node(file, first.setdefault(file, function))}")
    return "\n".join(lines)


def figures(calls: list[Call], way: Way, reading: Reading) -> str:
    """Figures for benchmarks/log.md."""
    entered, files = 0, list[str]()
    last = ""
    for call in calls:
        entered += call.file != last
        last = call.file
        files += [call.file] if call.file not in files else []
    modules = sum(name.partition(".")[0] in ("lockstep", "lockstep_trace") for name in sys.modules)
    passed = {file for file, _ in way.files} | {file for _, file, _ in way.stops}
    return (
        f"on the way to the first step: {len(way.files)} files from the command down, {len(passed)} with those that "
        f"they call\nall calls with the run, its plan, the job or the session: {len(calls)} calls, {len(files)} files, "
        f"{entered} times into a file, of which {entered - len(files)} into one that was left before\n"
        f"up to the first optimizer step: {reading.files} files, {len(reading.functions)} functions, {reading.moves:,} "
        f"times into another file; {modules} modules of lockstep's imported"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="figures instead of the picture")
    counting = parser.parse_args().count
    with tempfile.TemporaryDirectory() as place:
        reading = Reading() if counting else None
        seen, at_the_step = built_in(place, reading)
        way = way_of(seen, at_the_step)
        print(picture(way) if reading is None else figures(seen, way, reading))
    sys.stdout.flush()
    os._exit(0)  # abandon the run
