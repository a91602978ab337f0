"""What is said of a run file that cannot be used: key, value, what is allowed, file and line.

In: pydantic's errors, or raw values. Out: text for a person.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

# What a token or key looks like; a run file that holds one is refused, so that none ends up in OUTPUT or a tracker.
_SECRET_VALUE = re.compile(
    r"(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY)"
)
_SECRET_KEY = re.compile(r"(^|_)(token|api_?key|secret|password|secret_access_key|access_key_id)$", re.IGNORECASE)


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, under dotted keys."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {k: v for key, value in values.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else key).items()}


def secret(values: Any) -> str | None:
    """The key of a value that looks like a secret, or None."""
    for key, value in flat(values).items():
        texts = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
        if any(_SECRET_VALUE.search(t) for t in texts) or (_SECRET_KEY.search(key.rpartition(".")[2]) and any(texts)):
            return key
    return None


def where(key: str, origin: str, lines: dict[str, int], overridden: dict[str, Any]) -> str:
    """File and line of a dotted key, or the command line."""
    if any(o == key or o.startswith(key + ".") or key.startswith(o + ".") for o in overridden):
        return "on the command line"
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{origin}, line {lines[key]}" if key else origin


def explain(
    error: ValidationError,
    model: type[BaseModel],
    origin: str,
    lines: dict[str, int],
    overridden: dict[str, Any],
    prefix: str = "",
    options: Sequence[type[BaseModel]] = (),
) -> str:
    """All that is wrong, a line each: key, value, what is allowed, file and line.

    `prefix`: the section whose keys were validated by themselves, and `options` what may stand in it.
    """
    rows: dict[str, str] = {}
    for item in error.errors():
        # Pydantic adds the tried member of a union (`int`, `literal['auto']`) to the location: those are not keys.
        location = [str(part) for part in item["loc"]]
        if item["type"] != "extra_forbidden" and item["type"] != "missing":
            known = _fields(model)
            while len(location) > 1 and ".".join(location) not in known and ".".join(location[:-1]) in known:
                location.pop()
        key = ".".join([prefix, *location] if prefix else location)
        if item["type"] == "extra_forbidden":
            parent, _, last = key.rpartition(".")
            siblings = [name for o in options for name in o.model_fields] or _siblings(model, parent)
            near = difflib.get_close_matches(last, siblings, 1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(siblings)}"
            message = f"unknown key {key!r}: {hint}"
        elif item["type"] == "missing":
            message = f"{key}: missing, and it has no default"
        elif item["type"] == "value_error":
            message = f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
        else:
            wanted = item["msg"][:1].lower() + item["msg"][1:]
            message = f"{key}: {item['input']!r} will not do: {wanted}"
        if key in rows and " will not do" in rows[key]:
            rows[key] += f"; or {message.partition('will not do: ')[2]}"
        else:
            rows[key] = f"{message} ({where(key, origin, lines, overridden)})"
    return "\n".join(rows.values())


def _fields(model: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel] | None]:
    found: dict[str, type[BaseModel] | None] = {}
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        section = (
            field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None
        )
        found[key] = section
        if section is not None:
            found |= _fields(section, f"{key}.")
    return found


def _siblings(model: type[BaseModel], parent: str) -> list[str]:
    depth = parent.count(".") + 1 if parent else 0
    return [
        k.rpartition(".")[2]
        for k in _fields(model)
        if k.count(".") == depth and k.startswith(f"{parent}." if parent else "")
    ]


def kind(value: Any) -> str:
    """What a value of a YAML file is, in words."""
    names = {
        dict: "a mapping",
        list: "a list",
        str: "a text",
        int: "an integer",
        float: "a number",
        bool: "true/false",
    }
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


class Yaml(yaml.SafeLoader):
    """YAML without the numbers to base 60 of its version 1.1, which read `1:4` as 64."""


def read_yaml(text: str) -> Any:
    """The value of a YAML text, as run files are read. Errors: `yaml.YAMLError`."""
    return yaml.load(text, Loader=Yaml)


_INT = "tag:yaml.org,2002:int"
Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != _INT]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml.add_implicit_resolver(
    _INT,
    re.compile(r"^(?:[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)


def lines_of(text: str) -> dict[str, int]:
    """Dotted key -> line (from 1) in the run file."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = f"{prefix}.{key.value}" if prefix else str(key.value)
                found[path] = key.start_mark.line + 1
                walk(value, path)

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        walk(root, "")
    return found
