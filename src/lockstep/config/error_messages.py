"""What is said of a run file that cannot be used: key, value, what is allowed, file and line.

In: pydantic's errors, or raw values. Out: text for a person.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lockstep.config import key_aliases, plugins, redaction
from lockstep.config.errors import CodedError, RunError, appended, coded, uncoded


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, under dotted keys."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {k: v for key, value in values.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else key).items()}


def secret(values: Any) -> str | None:
    """The key of a value that looks like a secret, or None: a run file that holds one is refused, so that none ends up
    in OUTPUT or a tracker. `launch.secrets` holds names of secrets, which are none."""
    of_environment = redaction.secrets_in_environment()
    for key, value in flat(values).items():
        leaves = list(_leaves(key.rpartition(".")[2], value))
        if key == "launch.secrets":
            leaves = [("", str(text).partition("=")[2] or text) for _, text in leaves]
        texts = [key, *(inner for inner, _ in leaves), *(text for _, text in leaves if isinstance(text, str))]
        if any(redaction.holds_secret(text, of_environment) for text in texts) or any(
            starmap(redaction.kept_secret, leaves)
        ):
            return redaction.printable(key)
    return None


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value of nested lists and mappings, with the key that it, or the list around it, has: also of what YAML and
    Python have besides (sets, bytes, paths). What follows `--name` in a list is the value of that name."""
    if isinstance(value, Mapping):
        for inner, inner_value in value.items():
            yield from _leaves(str(inner), inner_value)
    elif isinstance(value, list | tuple | set | frozenset):
        before = ""
        for inner_value in value:
            yield from _leaves(key, inner_value)
            if isinstance(inner_value, str | int | float):
                yield before, inner_value
            before = inner_value if isinstance(inner_value, str) and inner_value.startswith("--") else ""
    elif isinstance(value, bytes):
        yield key, value.decode("latin-1")
    else:
        yield key, value if value is None or isinstance(value, bool | int | float | str) else str(value)


class Overrides(dict[str, Any]):
    """Overrides, dotted key -> value, and what messages call the place where they were given."""

    place = "on the command line"


def where(key: str, origin: str, lines: dict[str, int], overridden: dict[str, Any]) -> str:
    """File and line of a dotted key, or the place of the overrides. Of what keys are together (a section, or "": the
    whole) overrides are blamed; `fair` tells those that are not to be."""
    if any(o == key or o.startswith(f"{key}.") or key.startswith(f"{o}.") or not key for o in overridden):
        return getattr(overridden, "place", Overrides.place)
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{origin}, line {lines[key]}" if key else origin


def fair(errors: str, alone: str) -> str:
    """The `errors` of a file with its overrides, in which each line that the file `alone` causes as well names the
    file."""
    of_file = {_without_place(line): line for line in alone.splitlines()}
    return "\n".join(of_file.get(_without_place(line), line) for line in errors.splitlines())


def _without_place(line: str) -> str:
    return uncoded(line).rpartition(" (")[0]


def explain(
    error: ValidationError,
    model: type[BaseModel],
    origin: str,
    lines: dict[str, int],
    overridden: dict[str, Any],
    prefix: str = "",
    options: Sequence[type[BaseModel]] = (),
) -> RunError:
    """The error of all that is wrong, a line each: key, value, what is allowed, file and line.

    `prefix`: the section whose keys were validated by themselves, and `options` what may stand in it.
    """
    known = {f"{prefix}.{name}": field for o in options for name, field in o.model_fields.items()} or _described(model)
    rows: dict[str, list[str]] = {}
    for item in error.errors():
        # Pydantic adds places in a list and the tried members of a union (`int`, `list[str]`): those are not keys.
        location = [*([prefix] if prefix else []), *(str(part) for part in item["loc"])]
        if item["type"] != "extra_forbidden":
            depth = next((n for n in range(len(location), 0, -1) if ".".join(location[:n]) in known), len(location))
            location = location[:depth]
        key = ".".join(location)
        if item["type"] == "extra_forbidden":
            parent = key.rpartition(".")[0]
            siblings = [name for o in options for name in o.model_fields] or _siblings(model, parent)
            near = key_aliases.near(key, item["input"], siblings, keys_of(model))
            message = coded("LS1000", f"unknown key {key!r}: {near}")
        elif item["type"] == "missing" and not isinstance(item["loc"][-1], int):
            message = coded("LS1001", f"{key}: missing, and it has no default")
        elif item["type"] == "value_error":
            cause = item["ctx"]["error"]
            text = f"{key}: {uncoded(str(cause))}" if key else uncoded(str(cause))
            message = coded(cause.code, text) if isinstance(cause, CodedError) else coded("LS1003", text)
        else:
            expectation = _expectation(dict(item), known.get(key))
            message = coded("LS1002", f"{key}: invalid value {item['input']!r}; {expectation}")
        if key not in rows:
            rows[key] = [message]
            continue
        before, invalid, further = uncoded(message).partition("; expected ")
        rows[key].append(f"or {further}" if invalid and "invalid value" in before else uncoded(message))
    return RunError.read(
        "\n".join(
            appended(
                first,
                f"{''.join(f' {text}' for text in dict.fromkeys(more) if text != uncoded(first))}"
                f" ({where(key, origin, lines, overridden)})",
            )
            for key, (first, *more) in rows.items()
        )
    )


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys",
    "model": "a mapping of keys",
}


def _expectation(item: dict[str, Any], field: FieldInfo | None) -> str:
    """What would do, of one of pydantic's errors, in the words of run files."""
    kind, context = str(item["type"]), item.get("ctx") or {}
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind == "string_pattern_mismatch":
        description = f" ({field.description})" if field is not None and field.description else ""
        return f"it has to match {context['pattern']}{description}"
    if kind in ("too_long", "too_short", "missing"):
        most = context.get("max_length", context.get("min_length"))
        return f"expected {most} values" if most is not None else "values are missing"
    if kind.startswith(("greater_than", "less_than")):
        return (
            f"expected {'a number' if field is None else _KINDS.get(_plain(field), 'a number')} "
            + (str(item["msg"]).partition("should be ")[2])
        )
    kind_words = _KINDS.get(kind.partition("_")[0])
    if any(str(part).startswith("list[") for part in item["loc"]):  # the member of a union that was tried
        kind_words = "a list of texts"
    return f"expected {kind_words}" if kind_words is not None else str(item["msg"])[:1].lower() + str(item["msg"])[1:]


def _plain(field: FieldInfo) -> str:
    return "int" if "int" in str(field.annotation) else "float"


def _described(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted key -> its field, sections' inner ones among them."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        fields[f"{prefix}{name}"] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= _described(field.annotation, f"{prefix}{name}.")
    return fields


_SECTIONS = {"tasks": "task", "launchers": "launch", "optimizers": "optim"}


def keys_of(model: type[BaseModel]) -> dict[str, str]:
    """Every dotted key of a run file, those of plug-ins among them -> when it is one: "" for always. Imports tasks,
    launchers and optimizers, which need no torch for it."""
    keys = dict.fromkeys(_described(model), "")
    for kind, section in _SECTIONS.items():
        for name, plugin in plugins.loadable(kind):
            for option in plugin.Options.model_fields:  # type: ignore[attr-defined]
                key = f"{section}.{option}"
                if key not in keys or keys[key]:
                    keys[key] = f"{keys[key]}, {name}" if key in keys else f"with {section}.name: {name}"
    return keys


def _siblings(model: type[BaseModel], parent: str) -> list[str]:
    depth = parent.count(".") + 1 if parent else 0
    return [
        k.rpartition(".")[2]
        for k in _described(model)
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
    """YAML without the numbers to base 60 of its version 1.1, which read `1:4` as 64; a key that is there twice is an
    error, and so is what nests or repeats itself (by aliases) without end."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # of each node, aliases followed: values in it, levels below it

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._depth += 1
        if self._depth > MOST_LEVELS:
            raise _fault(event.start_mark, f"nested more than {MOST_LEVELS} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _fault(event.start_mark, f"the alias {event.anchor!r} stands inside what it stands for")
            return node
        _check_keys(node)
        inner = [self._sizes[id(each)] for each in _inner(node)]
        values, levels = 1 + sum(v for v, _ in inner), 1 + max((n for _, n in inner), default=0)
        if values > MOST_VALUES or levels > MOST_LEVELS:
            raise _fault(event.start_mark, f"aliases make more than {MOST_VALUES} values or {MOST_LEVELS} levels of it")
        self._sizes[id(node)] = values, levels
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            # a date with a 13th month, a number of 5,000 digits, `!!bool maybe`
            text = str(node.value) if isinstance(node, yaml.ScalarNode) else node.tag
            text = repr(text) if len(text) <= 40 else f"a value of {len(text):,} characters"
            why = f": {str(error).partition(';')[0]}" if isinstance(error, ValueError) else ""
            raise _fault(node.start_mark, f"{text} cannot be read{why}") from None


MOST_LEVELS = 40
MOST_VALUES = 100_000


def _inner(node: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_keys(node: yaml.Node | None) -> None:
    """Errors: `yaml.YAMLError` when a mapping has a key twice: one of the values would be lost."""
    first_nodes: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        first = first_nodes.setdefault((key.tag, str(key.value)), key)
        if first is not key:
            line = first.start_mark.line + 1
            raise _fault(key.start_mark, f"the key {key.value!r} is there twice, first on line {line}")


def _fault(mark: yaml.Mark | Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def yaml_fault(error: Exception) -> str:
    """What is wrong with a YAML text, and on which line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    if "'\\t'" in problem:
        return f"line {mark.line + 1}, column {mark.column + 1}: a tab; YAML is indented by spaces"
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {f'{context}, ' if context else ''}{problem}"


def read_yaml(text: str) -> Any:
    """The value of a YAML text, as run files are read. Errors: `yaml.YAMLError`."""
    return yaml.load(text, Loader=Yaml)


def dump_yaml(value: Any, **options: Any) -> str:
    """A value as YAML, without characters that command a terminal or turn the direction of text: with one of those, all
    that is not ASCII is escaped. `options`: of `yaml.safe_dump`."""
    text = str(yaml.safe_dump(value, allow_unicode=True, **options))
    return text if redaction.visible(text) == text else str(yaml.safe_dump(value, **options))


_INT = "tag:yaml.org,2002:int"
Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml.add_implicit_resolver(
    _INT,
    re.compile(r"^(?:[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)


def read_yaml_with_lines(text: str) -> tuple[Any, dict[str, int]]:
    """The value of a YAML text, and dotted key -> line (from 1). Errors: `yaml.YAMLError`."""
    loader = Yaml(text)
    try:
        root = loader.get_single_node()
        lines = _lines(root)  # before merge keys are resolved, in place
        return None if root is None else loader.construct_document(root), lines
    finally:
        loader.dispose()


def _lines(root: yaml.Node | None) -> dict[str, int]:
    line_numbers: dict[str, int] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = f"{prefix}.{key.value}" if prefix else str(key.value)
                line_numbers[path] = key.start_mark.line + 1
                walk(value, path)

    walk(root, "")
    return line_numbers
