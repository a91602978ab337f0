"""`key=value` words and dotted keys, as they are laid over a run file.

In: words of a command line, or a mapping. Out: dotted key -> value, and nested mappings with these set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lockstep.config import error_messages as messages
from lockstep.config.errors import RunError
from lockstep.config.sections import SHORT, at_length

KEY = re.compile(r"\w+(\.\w+)*")  # of a run file, dotted


def overrides_of(given: Sequence[str] | Mapping[str, Any]) -> messages.Overrides:
    """Overrides as dotted key -> value. Errors: `RunError` for what is no key, or no `key=value`."""
    if not isinstance(given, Mapping):
        return messages.Overrides(map(_override, given))
    for key in given:
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise RunError(f"{key!r} is no key of a run file; a key inside a section is written optim.learning_rate")
    found = messages.Overrides(given)
    found.place = "in the overrides"
    return found


def override_of(key: str, text: str) -> str:
    """The `key=value` that gives a key this text, where YAML might read a number, a date or a mapping."""
    return f"{key}={text if messages.read_yaml(text) == text else json.dumps(text)}"


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not KEY.fullmatch(key):
        raise RunError(f"{text!r} is not key=value, for example optim.learning_rate=3e-5")
    try:
        return key, messages.read_yaml(value)
    except yaml.YAMLError as error:
        raise RunError(f"the value of {key} is not valid YAML: {messages.yaml_fault(error)}") from None


def copied(values: Any) -> Any:
    return {k: copied(v) for k, v in values.items()} if isinstance(values, dict) else values


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. What stands for a section (`strategy=fsdp2`) sets its main key, and leaves its others."""
    if (long := at_length(key, value)) is not value:
        key, value = f"{key}.{SHORT[key]}", long[SHORT[key]]
    *parents, last = key.split(".")
    for parent in parents:
        inner = at_length(parent, values.get(parent))
        values[parent] = values = inner if isinstance(inner, dict) else {}
    values[last] = value
