"""Keys that a user wrote, and keys that a message wrongly treats as written.

Independent of lockstep's code: a message may begin with a key only if it was written, or if the message calls it a
default or missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import plugins
from lockstep.config.run import Run

_ABOUT = re.compile(
    r"(?:lockstep: |note: |this would fail: )*([a-z_]+(?:\.[a-z_]\w*)*)(?::| \(|,? has | is | cannot | needs )"
)
_SAYS_SO = ("default", "missing", "is not set", "sets no key of", "placeholder")
_SHORT = {"task": "name", "data": "source", "model": "source", "tokenizer": "source", "optim": "name"}
_SHORT |= {"strategy": "name", "launch": "name", "track": "to"}


@cache
def known_keys() -> frozenset[str]:
    """Every dotted key of a run file, including those of tasks, optimizers and launchers, and the sections."""
    names = set(Run.model_fields)
    for section, field in Run.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        names |= {f"{section}.{name}" for name in inner}
    for section, kind in (("task", "tasks"), ("optim", "optimizers"), ("launch", "launchers")):
        for plugin in plugins.names(kind):
            options: Any = plugins.find(kind, plugin).Options  # type: ignore[attr-defined]
            names |= {f"{section}.{name}" for name in options.model_fields}
    return frozenset(names)


def _flat(values: Any, prefix: str) -> Iterator[str]:
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield f"{prefix}.{_SHORT[prefix]}" if prefix in _SHORT else prefix


def keys_written(file: Path | None, words: Iterable[str]) -> set[str]:
    """Keys in a run file, if readable, and in the words of a command line."""
    keys: set[str] = set()
    if file is not None and file.is_file():
        try:
            values = yaml.safe_load(file.read_text())
        except (yaml.YAMLError, UnicodeDecodeError):
            return set(known_keys())  # the message is about the file
        keys |= set(_flat(values, "")) if isinstance(values, Mapping) else set()
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if equals or word.startswith("--"):
            keys |= set(_flat(yaml.safe_load(value) if value else None, key)) | {key}
    return keys


def accused(text: str, written: set[str] | Sequence[str]) -> list[str]:
    """Return the lines about a key that the user did not write and that the line does not call a default."""
    found = []
    for line in text.splitlines():
        about = _ABOUT.match(line.strip())
        if about is None or about[1] not in known_keys():
            continue
        key, said = about[1], " ".join(line.split())
        for other in known_keys() - {key}:  # what is said of another key says nothing of this one
            said = said.replace(f"{other} is not set", "").replace(f"{other} is missing", "")
        if any(word in said for word in _SAYS_SO):
            continue
        if not any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in written):
            found.append(line)
    return found
