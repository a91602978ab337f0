"""Several data sources for one run file, which `lockstep init` was given together: `data.sources`.

In: each source as `shapes.py` recognised it, a look at its columns, and the task as it was told from the first. Out:
one `data` section, in which sources whose columns are called otherwise rename them, and one look at all; or a
`RunError` that names the source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.data_sources import OWN, OneSource
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.tools.init import fit
from lockstep.tools.init.columns import Look
from lockstep.tools.init.prompts import Prompter

_BY_HAND = "write it by hand: data.sources: [{source: ..., rename: {...}}, ...] (docs/run-file.md)"


def together(
    parts: Sequence[tuple[DataSection, Look]], task: dict[str, Any], talk: Prompter
) -> tuple[DataSection, Look, dict[str, Any]]:
    """The `data` section, a look at all of them, and the task. Errors: `RunError`."""
    first = parts[0][1]
    for _, found in parts:  # of files of lines, wherever among them they are
        if task["name"] == "language_modeling" and found.plain and "document" not in task:
            task = task | {"document": "line" if found.sizes["train"] > 1 else "file"}
    columns = _columns(task, first)
    entries, characters = [], dict(first.characters)
    for name, (section, found) in zip(_names([section for section, _ in parts]), parts, strict=True):
        rename = _rename(columns, task, found, talk)
        for ours in columns:
            theirs = found.characters.get(rename.get(ours, ours), 0)
            characters[ours] = max(characters.get(ours, 0), theirs)
        own = {key: getattr(section, key) for key in OWN if key in section.model_fields_set}
        given = {key: value for key, value in own.items() if value not in (None, {})}
        entries.append(OneSource.model_validate({"name": name, **given} | ({"rename": rename} if rename else {})))
    sizes: Counter[str] = Counter()
    for _, found in parts:
        sizes.update(found.sizes)
    source = ", ".join(entry.name for entry in entries)
    look = replace(first, source=source, sizes=dict(sizes), characters=characters, lacking={})
    return DataSection.model_validate({"sources": entries}), look, task


def _columns(task: dict[str, Any], first: Look) -> list[str]:
    """Those that the task reads, as the first source calls them."""
    if first.plain:
        return ["text"]
    there = {*first.kinds, *first.languages}
    return [value for key, value in task.items() if key not in ("name", "document") and value in there]


def _rename(columns: list[str], task: dict[str, Any], found: Look, talk: Prompter) -> dict[str, str]:
    """What the task's columns are called here, where otherwise. Errors: `RunError`."""
    there = {"text"} if found.plain else {*found.kinds, *found.languages}
    if not (missing := [column for column in columns if column not in there]):
        return {}
    fitted = fit.fit(task["name"], found) or fit.Fit({})
    key_of = {value: key for key, value in task.items() if key != "name"}
    known: dict[str, str] = {}
    for ours in missing:
        theirs = "text" if found.plain else fitted.keys.get(key_of.get(ours, "text"))
        if theirs is not None and theirs not in columns:
            known[ours] = theirs
    # of two languages nothing says which is which
    if task["name"] == "translation" or len(known) < len(missing):
        raise RunError(
            f"--data: {found.source} has no column {missing[0]!r}, and nothing says which of its columns is that one; "
            f"it has {found.described()}. Rename it there, or {_BY_HAND}"
        )
    told = ", ".join(f"{ours} is called {theirs}" for ours, theirs in known.items())
    talk.console.say(f"{found.source}: {told}")
    for key, why in fitted.doubts.items():
        talk.note(f"{found.source}: task.{key}: {fitted.keys.get(key)}; {why}")
    return known


def _names(sections: Sequence[DataSection]) -> list[str]:
    """What metrics call them: their files, with the folder where that is not enough to tell them apart."""
    places = []
    for section in sections:
        train = section.train[0] if isinstance(section.train, list) else section.train
        places.append(Path(section.source or train or "source"))
    plain = [_word(place.name.split(".")[0]) for place in places]
    names = [
        name if plain.count(name) == 1 else _word(f"{place.absolute().parent.name}_{name}")
        for place, name in zip(places, plain, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, 1)]


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_") or "source"
