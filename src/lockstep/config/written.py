"""What a person wrote in a run file and its overrides, apart from what was filled in: no message may treat a default as
if somebody had chosen it.

In: the raw mappings, or a `Run` in which every default was filled in. Out: the dotted keys that were written, and
messages that say of each other key that it is a default.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from lockstep.config.errors import RunError, appended, uncoded

# The key that a message is about stands first in its line: `data.max_length: ...`, `micro_batches (8) is ...`.
_HEAD = re.compile(r"([a-z_]\w*(?:\.\w+)*)(?=:| \(| has | is | needs | cannot )")
_PLACE = re.compile(r"\((?:[^()]+, line \d+|on the command line|in the overrides)\)$")
_SAYS_SO = re.compile(r"\bmissing\b|\bnot set\b|\bno default\b|\bby default\b|\bdefault of\b")


class WrittenKeys(frozenset[str]):
    """Dotted keys that a person wrote."""

    def has(self, key: str) -> bool:
        """Whether `key`, or a key within it, was written. A section is written if any of its keys is."""
        return key in self or any(name.startswith(f"{key}.") for name in self)


def keys_of(*mappings: Mapping[str, Any]) -> WrittenKeys:
    """The keys of nested mappings as a person wrote them."""
    return WrittenKeys(key for mapping in mappings for key in _flat(mapping))


def _flat(values: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(values, Mapping) or not values:
        yield prefix
        return
    for key, value in values.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def is_resolved(values: Mapping[str, Any], sections: Mapping[str, Any]) -> bool:
    """Whether every default is filled in, as in OUTPUT/run.yaml: each of a run's `sections` and keys is there."""
    return sections.keys() <= values.keys()


def changed(run: Any) -> WrittenKeys:
    """The keys of a run whose values are not their defaults: all that can be told of one that was filled in."""
    return WrittenKeys(_changed(run, ""))


def _changed(section: BaseModel, prefix: str) -> Iterator[str]:
    defaults = defaults_of(section, prefix)
    values = {name: getattr(section, name) for name in type(section).model_fields}
    for key, value in (values | (section.__pydantic_extra__ or {})).items():
        if isinstance(value, BaseModel) and prefix == "":
            yield from _changed(value, f"{key}.")
        elif value != defaults.get(key):
            yield from _flat(value, f"{prefix}{key}")


def defaults_of(section: BaseModel, prefix: str) -> dict[str, Any]:
    """The defaults of a section's keys, with those of the plug-in that it names."""
    from lockstep.config import plugins

    fields = dict(type(section).model_fields)
    kind = {"task.": "tasks", "optim.": "optimizers", "launch.": "launchers"}.get(prefix)
    if kind is not None:
        name = str(getattr(section, "name", ""))
        if "." not in name:  # a class of the user's own is not imported for this
            fields |= plugins.find(kind, name).Options.model_fields  # type: ignore[attr-defined]
    return {
        key: field.get_default(call_default_factory=True) for key, field in fields.items() if not field.is_required()
    }


def with_defaults_named(text: str, run: Any) -> str:
    """The message, in which each line that is about a key which nobody wrote says that its value is the default."""
    return "\n".join(_named(line, run) for line in text.split("\n"))


def _named(line: str, run: Any) -> str:
    bare = uncoded(line)
    head = _HEAD.match(bare)
    if head is None or _SAYS_SO.search(bare) or _PLACE.search(bare):
        return line
    key = head.group(1)
    known, value = value_of(run, key)
    if not known or run.wrote(key) or value is None or value == {}:
        return line
    text = str(value).lower() if isinstance(value, bool) else value
    what = "its defaults hold" if isinstance(value, BaseModel) else f"{text} is its default"
    return appended(line, f" ({key} is not set; {what})")


def value_of(run: Any, key: str) -> tuple[bool, Any]:
    """Whether a run has a dotted key, and its value."""
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
    """Nested values without dotted keys, or sections."""
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
    """A context whose `RunError`s say of each key that they are about, and that nobody wrote, that it is a default."""
    try:
        yield
    except RunError as error:
        if (text := with_defaults_named(str(error), run)) == str(error):
            raise
        raise RunError.read(text).with_traceback(error.__traceback__) from error.__cause__


def applies(note: str, run: Any) -> bool:
    """Whether a note is about something that a person wrote: a default that has no effect is not worth a note."""
    head = _HEAD.match(uncoded(note))
    return (
        head is None or "has no effect" not in note or not value_of(run, head.group(1))[0] or run.wrote(head.group(1))
    )
