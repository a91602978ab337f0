"""Tracks the keys that the user wrote, as opposed to defaults, so that no message treats a default as a user's choice.

In: the raw mappings, or a `Run` with every default filled in. Out: the dotted keys that were written, and messages that
mark other keys as defaults.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from lockstep.config.errors import RunError, appended, uncoded

# A message starts with its key: `data.max_length: ...`, `micro_batches (8) is ...`.
_HEAD = re.compile(r"([a-z_]\w*(?:\.\w+)*)(?=:| \(| has | is | needs | cannot )")
_PLACE = re.compile(r"\((?:[^()]+, line \d+|on the command line|in the overrides)\)$")
_SAYS_SO = re.compile(r"\bmissing\b|\bnot set\b|\bno default\b|\bby default\b|\bdefault of\b|\bits default is\b")
# The same of another key: `launch.gpus is not set` says nothing about `launch.processes`.
_OF_ANOTHER = re.compile(r"([a-z_]\w*\.\w+(?:\.\w+)*) is (?:missing|not set)\b")


class WrittenKeys(frozenset[str]):
    """Dotted keys that the user wrote."""

    def has(self, key: str) -> bool:
        """Return whether `key` was written. A section is written if any of its keys is."""
        return key in self or any(name.startswith(f"{key}.") for name in self)


def keys_of(*mappings: Mapping[str, Any]) -> WrittenKeys:
    """Return the dotted keys of nested mappings."""
    return WrittenKeys(key for mapping in mappings for key in _flat(mapping))


def _flat(values: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(values, Mapping) or not values:
        if prefix:
            yield prefix
        return
    for key, value in values.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def is_resolved(values: Mapping[str, Any], sections: Mapping[str, Any]) -> bool:
    """Return whether every top-level key in `sections` is present, as in OUTPUT/run.yaml."""
    return sections.keys() <= values.keys()


def changed(run: Any) -> WrittenKeys:
    """Return the keys whose values differ from their defaults: the best guess for a run with defaults filled in."""
    return WrittenKeys(_changed(run, ""))


_HEADER = "# keys that you wrote; all others are defaults. Valid while the lines below have the SHA-256"


def header(body: str, keys: Iterable[str]) -> str:
    """Return a comment line for a run file with every default filled in. It lists the keys that the user wrote."""
    return f"{_HEADER} {_hash(body)}: {json.dumps(sorted(keys))}\n"


def of_file(text: str) -> tuple[WrittenKeys, bool]:
    """Return the keys that the `header` of a run file lists, and whether the file is unchanged since."""
    line, _, body = text.partition("\n")
    if not line.startswith(_HEADER):
        return WrittenKeys(), False
    digest, _, keys = line.removeprefix(_HEADER).strip().partition(": ")
    try:
        listed = json.loads(keys)
    except (ValueError, RecursionError):
        return WrittenKeys(), False
    if not isinstance(listed, list) or not all(isinstance(key, str) for key in listed):
        return WrittenKeys(), False
    return WrittenKeys(listed), digest == _hash(body)


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _changed(section: BaseModel, prefix: str) -> Iterator[str]:
    defaults = defaults_of(section, prefix)
    values = {name: getattr(section, name) for name in type(section).model_fields}
    for key, value in (values | (section.__pydantic_extra__ or {})).items():
        if isinstance(value, BaseModel) and prefix == "":
            yield from _changed(value, f"{key}.")
        elif value != defaults.get(key):
            yield from _flat(value, f"{prefix}{key}")


def defaults_of(section: BaseModel, prefix: str) -> dict[str, Any]:
    """Return key -> default of a section, including the keys of its plug-in."""
    from lockstep.config import plugins

    fields = dict(type(section).model_fields)
    kind = {"task.": "tasks", "optim.": "optimizers", "launch.": "launchers"}.get(prefix)
    if kind is not None:
        name = str(getattr(section, "name", ""))
        if "." not in name:  # user classes are not imported for this
            fields |= plugins.options_of(kind, name).model_fields
    return {
        key: field.get_default(call_default_factory=True) for key, field in fields.items() if not field.is_required()
    }


def with_defaults_named(text: str, run: Any) -> str:
    """Return a message with a note on each line about a key that the user did not write: its value is the default."""
    return "\n".join(_named(line, run) for line in text.split("\n"))


def _named(line: str, run: Any) -> str:
    bare = uncoded(line)
    head = _HEAD.match(bare)
    if head is None or _PLACE.search(bare):
        return line
    key = head.group(1)
    if _SAYS_SO.search(_OF_ANOTHER.sub(lambda other: other[0] if other[1] == key else "", bare)):
        return line
    known, value = value_of(run, key)
    if not known or run.wrote(key) or value is None or value == {}:
        return line
    text = str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, BaseModel):
        return appended(line, f" (the run file sets no key of {key})")
    return appended(line, f" ({key} is not set; {text} is its default)")


def value_of(run: Any, key: str) -> tuple[bool, Any]:
    """Return whether a run has a dotted key, and its value."""
    value: Any = run
    for name in key.split("."):
        if isinstance(value, BaseModel) and (
            name in type(value).model_fields or name in (value.__pydantic_extra__ or {})
        ):
            value = getattr(value, name)
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return False, None
    return True, value


def without(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a copy of nested values without some dotted keys or sections."""
    left = copy.deepcopy(dict(values))
    for key in keys:
        *parents, last = key.split(".")
        inner = left
        for parent in parents:
            inner = inner.get(parent, {})
        inner.pop(last, None)
    return left


@contextmanager
def naming_defaults(run: Any) -> Iterator[None]:
    """Context manager that applies `with_defaults_named` to `RunError`s."""
    try:
        yield
    except RunError as error:
        if (text := with_defaults_named(str(error), run)) == str(error):
            raise
        raise RunError.read(text).with_traceback(error.__traceback__) from error.__cause__


@contextmanager
def naming_lowered(notes: Iterable[str]) -> Iterator[None]:
    """Context manager that adds to `RunError`s the `notes` about the keys that they name and whose defaults gave way
    (`data.max_length is 64, because ...`)."""
    try:
        yield
    except RunError as error:
        text = str(error)
        reasons = [note for note in notes if re.search(rf"(?<![\w.]){re.escape(note.partition(' ')[0])}\b", text)]
        if not reasons:
            raise
        text = appended(text, f" ({'; '.join(reasons)})")
        raise RunError.read(text).with_traceback(error.__traceback__) from error.__cause__


def applies(note: str, run: Any) -> bool:
    """Return whether to show a note: a default without effect is not worth one."""
    head = _HEAD.match(uncoded(note))
    return (
        head is None or "has no effect" not in note or not value_of(run, head.group(1))[0] or run.wrote(head.group(1))
    )
