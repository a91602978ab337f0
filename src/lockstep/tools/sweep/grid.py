"""Values of run-file keys, combined: what `lockstep sweep` tries and what `lockstep bench --over` compares.

In: `key=value,value` words, or mappings read from YAML. Out: overrides, a mapping of dotted keys for each combination.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError

Overrides = dict[str, Any]  # dotted key of the run file -> value


def parse(words: Sequence[str]) -> dict[str, list[Any]]:
    """`optim.learning_rate=1e-5,3e-5` words as key -> values. A value is YAML; a comma inside brackets or quotes does
    not separate. Errors: `RunError`."""
    found: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise RunError(f"--over: {word!r} is not key=value,value, for example optim.learning_rate=1e-5,3e-5")
        try:
            values = messages.read_yaml(f"[{text}]")
        except yaml.YAMLError as error:
            raise RunError(f"--over: the values of {key} are not valid YAML: {' '.join(str(error).split())}") from None
        if not values:
            raise RunError(f"--over: {key} has no values; give them as {key}=value,value")
        if key in found:
            raise RunError(f"--over: {key} is given twice; give all its values in one place")
        found[key] = values
    return found


def product(over: Mapping[str, Sequence[Any]]) -> list[Overrides]:
    """Every combination, the last key's values changing fastest; one empty combination of no keys."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def format_value(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).replace("\n...", "").strip()
