"""`lockstep init --from FILE`: another system's file becomes a commented run file.

In: its path, the data where they are named, overrides. Out: a run file that loads; what has no counterpart is listed in
it and said, with why.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection
from lockstep.tools.starter import columns, fit, guesses, shapes, sheet, starter
from lockstep.tools.starter.columns import Look
from lockstep.tools.starter.moving import reading
from lockstep.tools.starter.moving.table import Moved, only_its_own
from lockstep.tools.starter.talk import Ask, Talk
from lockstep.track.console import Console

FILL_IN = "FILL-IN"  # where nothing says what the data or the model are
_INTERVALS = ("evaluate.every", "checkpoint.every")
_PLACES = ("data.source", "data.train", "data.validation", "data.test", "model.source", "tokenizer.source")


def move(
    path: Path, origin: Path, flags: dict[str, str | None], overrides: list[str], force: bool, ask: Ask | None
) -> int:
    """The whole command. Errors: `RunError`; then nothing was written."""
    starter.free(path, force)
    talk, given = Talk(ask, Console(True)), starter.keys_of(overrides)
    found, moved = reading.read(origin), Moved()
    for key, (value, told) in found.ours.items():
        moved.set(key, value, told)
    moved.left += found.left
    asked = given.get("launch.processes")
    found.source.move(found.keys, moved, asked if isinstance(asked, int) else None)
    only_its_own(moved)
    talk.console.say(f"{origin}: {found.source.called}, {len(found.keys)} key(s)")
    names = {"data": "data.source", "task": "task.name", "model": "model.source"}
    for key, value in {**{names[flag]: text for flag, text in flags.items() if text is not None}, **given}.items():
        moved.set(key, value, "")
    looked = _look(moved, flags["data"] is not None, talk)
    _fit(moved, looked, talk)
    if moved.keys.get("model.source") == guesses.SCRATCH:
        _from_scratch(moved, looked)
    _settle(path, moved, looked, talk)
    run = _written(path, origin, found.source.called, moved, talk)
    for name, why in moved.left:
        talk.console.say(f"no counterpart: {name} ({why})")
    told = "; what has no counterpart is listed in it, too" if moved.left else ""
    talk.console.say(f"wrote {path}: {run.task.name}{told}")
    empty = [key for key, value in moved.keys.items() if value == FILL_IN]
    first = f"fill in {' and '.join(empty)}; then " if empty else ""
    talk.console.say(f"next: {first}lockstep plan {path}; lockstep train {path}")
    return 0


def _look(moved: Moved, wanted: bool, talk: Talk) -> Look | None:
    """A look at the data, where they are here. Errors: `RunError` of data that were given on the command line."""
    own = {key.partition(".")[2]: value for key, value in moved.keys.items() if key.startswith("data.")}
    source = own.get("source")
    if source is None and "train" not in own:
        return None
    if not wanted and not (source is not None and Path(str(source)).expanduser().exists()):
        return None
    try:
        section = shapes.recognised(DataSection(**own), talk)
        looked = columns.look(section)
    except ValueError as error:
        raise RunError(f"data: {error}") from None
    for key in ("source", "train", "validation", "test", "layout", "columns", "separator", "quote"):
        value = getattr(section, key)
        if value is None:
            moved.keys.pop(f"data.{key}", None)
        elif key in section.model_fields_set or value != DataSection.model_fields[key].default:
            moved.set(f"data.{key}", value, moved.told.get(f"data.{key}", ""))
    return looked


def _fit(moved: Moved, looked: Look | None, talk: Talk) -> None:
    """The task and its columns: as the file says, or as the data are."""
    if "task.name" not in moved.keys:
        if looked is None:
            moved.set("task.name", fit.TASKS[0], "(to be filled in, with its columns)")
            talk.note("nothing says which task it is: classification is written, to be filled in")
        else:
            name, found = fit.guess(looked)
            moved.set("task.name", name, "(by the columns of the data)")
            _columns(moved, found, talk)
    elif looked is not None and moved.keys["task.name"] in fit.TASKS:
        there = list(looked.languages or looked.kinds)
        if not any(k.startswith("task.") and str(v) in there for k, v in moved.keys.items()):
            if (other := fit.fit(moved.keys["task.name"], looked)) is None:
                raise RunError(
                    f"--data: {looked.source} seems to have no columns for {moved.keys['task.name']}; it has "
                    f"{looked.described()}. Name them: task.text=... task.label=..., or another --task"
                )
            for key in ("task.text", "task.prompt", "task.response", "task.messages"):
                moved.keys.pop(key, None)
            _columns(moved, other, talk)
    if "." in (task := str(moved.keys["task.name"])):
        return
    known = {"name", *plugins.find("tasks", task).Options.model_fields}  # type: ignore[attr-defined]
    if task == "language_modeling" and "data.max_length" in moved.keys:
        moved.keys.setdefault("task.block_size", moved.keys.pop("data.max_length"))
    for key in [k for k in moved.keys if k.startswith("task.") and k.partition(".")[2] not in known]:
        moved.drop(moved.told.get(key) or key, moved.keys.pop(key), f"the task {task} has no such key")


def _columns(moved: Moved, found: fit.Fit, talk: Talk) -> None:
    for key, column in found.keys.items():
        moved.keys.setdefault(f"task.{key}", column)
    for key, why in found.doubts.items():
        talk.note(f"task.{key}: {found.keys.get(key)}; {why}")


def _from_scratch(moved: Moved, looked: Look | None) -> None:
    """A small model, instead of one of that name."""
    del moved.keys["model.source"]
    if "model.adapter" in moved.keys:
        moved.drop("adapter", moved.keys.pop("model.adapter"), "a model from scratch is trained as a whole")
    length = int(moved.keys.get("task.block_size") or moved.keys.get("data.max_length") or 128)
    rows = looked.sizes["train"] if looked is not None else 0
    for section, values in guesses.scratch(str(moved.keys["task.name"]), length, rows).items():
        for key, value in values.items():
            moved.keys.setdefault(f"{section}.{key}", value)


def _settle(path: Path, moved: Moved, looked: Look | None, talk: Talk) -> None:
    """What depends on other keys: names, paths, lengths, and intervals that were shares of an epoch or of the run."""
    for note in moved.notes:
        talk.note(note)
    if "data.source" not in moved.keys and "data.train" not in moved.keys:
        moved.set("data.source", FILL_IN, "(to be filled in: the file does not say)")
    if not {"model.source", "model.type"} & moved.keys.keys():
        moved.set("model.source", FILL_IN, "(to be filled in: the file does not say)")
    for key in _PLACES:
        if key in moved.keys:
            moved.keys[key] = starter.local(path, moved.keys[key])
    moved.keys.setdefault("name", path.stem)
    moved.keys["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", str(moved.keys["name"])).lstrip("._-") or "run"
    if moved.keys.get("steps") is not None:
        moved.keys.pop("epochs", None)
    batch = int(moved.keys.get("batch_size", 128))
    if int(moved.keys.get("micro_batches", 8)) > batch:
        moved.set("micro_batches", batch, "no more than examples a step")
    epoch = total = None
    if looked is not None:
        rows = looked.sizes["train"] * (0.9 if "validation" not in looked.sizes else 1)
        epoch, total = guesses.steps_of({"batch_size": batch, **moved.keys}, round(rows))
    total = total if total is not None else moved.keys.get("steps")
    for key in _INTERVALS:
        _interval(moved, key, epoch, total)
        if total is not None and isinstance(every := moved.keys.get(key), int) and every > total:
            talk.note(f"{key} is {moved.keys[key]}, and the run has about {total} steps: it never comes due")
    for key in ("checkpoint.best", "evaluate.patience"):
        if moved.keys.get(key) and not moved.keys.get("evaluate.every"):
            moved.drop(key, moved.keys.pop(key), "it needs evaluations: set evaluate.every")


def _interval(moved: Moved, key: str, epoch: int | None, total: int | None) -> None:
    """An interval in steps; a share of an epoch, or of the run, where that many steps are known."""
    value = moved.keys.get(key)
    if isinstance(value, float) and value < 1:
        share, whole = value, total
    elif isinstance(value, str) and value.endswith(" epoch"):  # 1/4 epoch
        share, whole = 1 / int(value.partition("/")[2].split()[0]), epoch
    else:
        return
    told = moved.told.get(key, "")
    if whole is None:
        del moved.keys[key]
        moved.drop(told, None, f"{key} counts steps, which are known with the data: give them with --data")
    else:
        moved.set(key, max(1, round(whole * share)), f"{told}, about: of {whole} steps")


def _written(path: Path, origin: Path, called: str, moved: Moved, talk: Talk) -> Run:
    """The file; a value that will not do here is listed as one without a counterpart. Errors: `RunError`."""
    while True:
        filled: dict[str, Any] = {}
        for key, value in moved.keys.items():
            starter.set_key(filled, key, value)
        told = {key: f"+{text}" if text[:1] == "(" else f"+from {text}" for key, text in moved.told.items() if text}
        filled = {key: _name_first(filled[key]) for key in Run.model_fields if filled.get(key) not in (None, {})}
        try:
            return starter.checked(path, sheet.write(filled, _header(origin, called, moved, talk), told), planned=False)
        except RunError as error:
            wrong = [line for line in str(error).splitlines() if line.partition(":")[0] in moved.told]
            if not wrong:
                raise
            for line in wrong:
                key, _, why = line.partition(": ")
                moved.drop(moved.told.pop(key) or key, moved.keys.pop(key), why.partition(f" ({path}")[0])


def _name_first(value: Any) -> Any:
    return {k: value[k] for k in sorted(value, key=lambda k: k != "name")} if isinstance(value, dict) else value


def _header(origin: Path, called: str, moved: Moved, talk: Talk) -> list[str]:
    lines = [f"From {origin.name} ({called}), by `lockstep init --from`.", *(f"Note: {note}." for note in talk.notes)]
    if moved.left:
        lines += ["", "No counterpart here:", *(f"  {name} ({why})" for name, why in moved.left)]
    return [*lines, "", "All keys: `lockstep schema`. The tables: docs/coming-from.md."]
