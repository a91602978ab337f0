"""Local paths of a run file are found from the folder that it lies in, so that it means the same from any folder.

In: the keys of a run file, as read, and where it lies. Out: the same keys; what is there beside the file has its path
from the folder that the command was started in. What is not there is left as it was written: a path from that folder,
as on the command line, or the name of something on the Hub.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from lockstep.config.sections import at_length

# Section -> its keys that may name local files or folders.
PATHS = {
    "data": ("source", "train", "validation", "test"),
    "model": ("source",),
    "tokenizer": ("source",),
}


def beside(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """A new mapping. OUTPUT/run.yaml, whose paths were found before, stays as it is."""
    folder = file.parent
    output = values.get("output")
    if folder == Path() or (isinstance(output, str) and folder.resolve() == Path(output).expanduser().resolve()):
        return values
    found = dict(values)
    for section, keys in PATHS.items():
        if isinstance(given := at_length(section, values.get(section)), dict):
            there = _there(given, keys, folder)
            if isinstance(sources := given.get("sources"), list):  # of a mixture
                there["sources"] = [
                    each | _there(each, keys, folder) if isinstance(each, dict) else _found(each, folder)
                    for each in sources
                ]
            if there != {key: given[key] for key in there}:
                found[section] = given | there
    return found


def _there(given: dict[str, Any], keys: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Those of the keys that name what is there."""
    if given.get("source") is not None:
        keys = ("source",)  # what else there is are splits of it, or files in it
    return {key: _found(given[key], folder) for key in keys if key in given}


def _found(value: Any, folder: Path) -> Any:
    """A path, or a list of them."""
    if isinstance(value, list):
        return [_found(each, folder) for each in value]
    if not isinstance(value, str) or not value or value.startswith("~") or os.path.isabs(value):
        return value
    path = folder / value
    try:
        there = path.exists() or (any(mark in value for mark in "*?[") and glob.glob(str(path)))
    except (OSError, ValueError):  # too long for a path, or with characters that none has: the section says so
        return value
    return os.path.normpath(path) if there else value
