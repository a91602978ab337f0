"""Error messages about run files: key, value, allowed values, file and line. Also reads and writes YAML.

In: pydantic's errors, or raw values. Out: text for the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lockstep.config import plugins
from lockstep.config.errors import CodedError, RunError, appended, coded, uncoded
from lockstep.config.lazy import lazy
from lockstep.config.redaction import holds_secret, kept_secret
from lockstep_trace import redaction

if TYPE_CHECKING:
    from lockstep.config import key_aliases
else:  # to suggest a key for an unknown one
    (key_aliases,) = lazy("lockstep.config", "key_aliases")


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one mapping of dotted key -> value."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {k: v for key, value in values.items() for k, v in flat(value, f"{prefix}.{key}" if prefix else key).items()}


def secret(values: Any) -> str | None:
    """Return the key of a value that looks like a secret, or None.

    A run file with a secret is rejected, so that no secret reaches OUTPUT or a tracker. `launch.secrets` holds names of
    secrets, not secrets."""
    of_environment = redaction.secrets_in_environment()
    for key, value in flat(values).items():
        leaves = list(_leaves(key.rpartition(".")[2], value))
        if key == "launch.secrets":
            leaves = [("", str(text).partition("=")[2] or text) for _, text in leaves]
        texts = [key, *(inner for inner, _ in leaves), *(text for _, text in leaves if isinstance(text, str))]
        if any(holds_secret(text, of_environment) for text in texts) or any(starmap(kept_secret, leaves)):
            return redaction.printable(key)
    return None


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for every scalar in nested containers; items of a list have the list's key.

    Handles sets, bytes and paths, too. The item after `--name` in a list also has the key `--name`."""
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


def secret_in(key: str) -> RunError:
    """Return the error for a run that contains a secret."""
    return RunError(
        "LS1118",
        f"{key} looks like a secret. Secrets come from the environment only (HF_TOKEN, WANDB_API_KEY, ...): remove it, "
        "and revoke it if the file was shared",
    )


class Overrides(dict[str, Any]):
    """Overrides, dotted key -> value, and their origin (`place`) for messages."""

    place = "on the command line"


def where(key: str, origin: str, lines: dict[str, int], overridden: dict[str, Any]) -> str:
    """Return file and line of a dotted key, or the origin of the overrides.

    An error of a section (or of the whole run, key "") that contains an overridden key is attributed to the override;
    `fair` corrects this if the file alone causes the error."""
    if any(o == key or o.startswith(f"{key}.") or key.startswith(f"{o}.") or not key for o in overridden):
        return getattr(overridden, "place", Overrides.place)
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return f"{origin}, line {lines[key]}" if key else origin


def fair(errors: str, alone: str) -> str:
    """Return `errors`, with each line that also occurs without overrides (`alone`) replaced by the one that names the
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
    """Convert a pydantic error into a `RunError` with one line per key: value, allowed values, file and line.

    `prefix`: section that was validated separately. `options`: the models of its keys.
    """
    known = {f"{prefix}.{name}": field for o in options for name, field in o.model_fields.items()} or _described(model)
    rows: dict[str, list[str]] = {}
    for item in error.errors():
        # Pydantic adds list indices and union members (`int`, `list[str]`) to locations: those are not keys.
        location, inside = [*([prefix] if prefix else []), *(str(part) for part in item["loc"])], None
        if item["type"] != "extra_forbidden":
            depth = next((n for n in range(len(location), 0, -1) if ".".join(location[:n]) in known), len(location))
            location, inside = location[:depth], location[-1] if depth < len(location) else None
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
            entry = _entry(inside, known.get(key))
            expectation = _expectation(dict(item), None if entry else known.get(key))
            message = coded("LS1002", f"{key}{entry}: invalid value {_as_given(item['input'])}; {expectation}")
        if key not in rows:
            rows[key] = [message]
            continue
        before, invalid, further = uncoded(message).partition("; expected ")
        if invalid and uncoded(rows[key][0]).endswith(f"; expected {further}"):  # of another entry of a list
            continue
        if _LEAVE_OUT in further:  # said once, at the end
            default = further[further.index(_LEAVE_OUT) :]
            rows[key] = [text.replace(default, "") for text in rows[key]]
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


_LEAVE_OUT = "; leave the key out for its default,"


def _expectation(item: dict[str, Any], field: FieldInfo | None) -> str:
    """Describe the value that pydantic expected, in the vocabulary of run files."""
    if item["input"] is None and ":" in str(item["loc"][-1]):  # {label:integer} is one key without a value
        return f"expected a space behind the colon of {item['loc'][-1]!r}"
    if item["input"] is None and field is not None and not field.is_required():
        default = field.get_default(call_default_factory=True)
        return f"{_expected(item, field)}{_LEAVE_OUT} {_written(default)}"
    return _expected(item, field)


def _entry(inside: Any, field: FieldInfo | None) -> str:
    """Return `.name` for an error in the entry `inside` of a mapping that is a key's value, else an empty text."""
    whole, *parts = _members(field)
    kinds = [whole] if get_origin(whole) is dict else [each for each in parts if each is not type(None)]
    is_mapping = [get_origin(each) for each in kinds] == [dict]
    return f".{inside}" if is_mapping and isinstance(inside, str) and re.fullmatch(r"[\w-]+", inside) else ""


def _as_given(value: Any) -> str:
    """A value of a run file as YAML has it, texts in quotes."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _written(value: Any) -> str:
    """A value of the schema as a run file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


_PATTERNS = {  # pattern of a key -> what it requires
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "of letters, digits, dots, underscores and dashes, the first a letter or digit",
    r"^[^\x00-\x1f\x7f]*$": "without control characters",
    r"^[^\x00-\x1f\x7f]+$": "without control characters",
}


def _unquoted(value: Any) -> str:
    """Return why a value that was meant as a text is none."""
    if isinstance(value, bool):
        return ": YAML reads yes, no, on and off as true or false unless they are in quotes"
    return ": YAML reads it as a number unless it is in quotes" if isinstance(value, int | float) else ""


def _expected(item: dict[str, Any], field: FieldInfo | None) -> str:
    kind, context = str(item["type"]), item.get("ctx") or {}
    if kind == "literal_error":
        return f"expected {context['expected']}"
    pattern = next((each.pattern for each in field.metadata if getattr(each, "pattern", None)), None) if field else None
    if kind == "string_pattern_mismatch" or (kind == "string_type" and pattern):
        description = f" ({field.description})" if field is not None and field.description else ""
        pattern = str(context.get("pattern", pattern))
        shape = _PATTERNS.get(pattern, f"that matches {pattern}")
        return f"expected a text {shape}{description}{_unquoted(item['input'])}"
    if kind in ("too_long", "too_short", "missing"):
        most, least = context.get("max_length"), context.get("min_length")
        exact = next((len(get_args(a)) for a in _members(field) if get_origin(a) is tuple), None)
        if exact is most is least is None:
            return "values are missing"
        bound = f"at least {least}" if most is None else f"at most {most}"
        return f"expected {bound if exact is None else exact} value{'s' * (1 not in (exact, most, least))}"
    if kind.startswith(("greater_than", "less_than")):
        return (
            f"expected {'a number' if field is None else _KINDS.get(_plain(field), 'a number')} "
            + (str(item["msg"]).partition("should be ")[2])
        )
    kind_words = _KINDS.get(kind.partition("_")[0])
    if any(str(part).startswith("list[") for part in item["loc"]):  # the member of a union that was tried
        kind_words = "a list of texts"
    if kind_words is None:
        return str(item["msg"])[:1].lower() + str(item["msg"])[1:]
    return f"expected {kind_words}{_unquoted(item['input']) if kind == 'string_type' else ''}"


def _members(field: FieldInfo | None) -> list[Any]:
    """The types of a key's values."""
    kind = None if field is None else field.annotation
    return [kind, *get_args(kind)]


def _plain(field: FieldInfo) -> str:
    return "int" if "int" in str(field.annotation) else "float"


def _described(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return dotted key -> field, including the keys inside sections."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        fields[f"{prefix}{name}"] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= _described(field.annotation, f"{prefix}{name}.")
    return fields


_SECTIONS = {"tasks": "task", "launchers": "launch", "optimizers": "optim"}


def keys_of(model: type[BaseModel]) -> dict[str, str]:
    """Return every dotted key of a run file, plug-ins' keys included -> the plug-ins that have it ("": always valid).
    Imports tasks, launchers and optimizers, but no torch."""
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


def value_text(value: Any) -> str:
    """Return a key's value as messages that compare two of them write it."""
    return "not set" if value is None else repr(value)


def kind(value: Any) -> str:
    """Name the type of a YAML value for messages."""
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
    """Safe YAML loader without base-60 integers (YAML 1.1 reads `1:4` as 64).

    Duplicate keys, recursive aliases, more than `MOST_LEVELS` levels and more than `MOST_VALUES` values are errors."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # node id -> (values, levels), aliases followed

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self._depth += 1
        if self._depth > MOST_LEVELS:
            raise _fault(event.start_mark, f"nested more than {MOST_LEVELS} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _fault(event.start_mark, f"the alias {event.anchor!r} refers to itself")
            return node
        _check_keys(node)
        inner = [self._sizes[id(each)] for each in _inner(node)]
        values, levels = 1 + sum(v for v, _ in inner), 1 + max((n for _, n in inner), default=0)
        if values > MOST_VALUES or levels > MOST_LEVELS:
            raise _fault(
                event.start_mark, f"its aliases expand to more than {MOST_VALUES} values or {MOST_LEVELS} levels"
            )
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
    """Reject duplicate keys of a mapping, one of whose values would be lost. Errors: `yaml.YAMLError`."""
    first_nodes: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        first = first_nodes.setdefault((key.tag, str(key.value)), key)
        if first is not key:
            line = first.start_mark.line + 1
            raise _fault(key.start_mark, f"the key {key.value!r} occurs twice, first on line {line}")


def _fault(mark: yaml.Mark | Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def yaml_fault(error: Exception) -> str:
    """Describe a YAML error, with line and column."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    if "'\\t'" in problem:
        return f"line {mark.line + 1}, column {mark.column + 1}: a tab; YAML is indented with spaces"
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {f'{context}, ' if context else ''}{problem}"


def read_yaml(text: str) -> Any:
    """Parse a YAML text by the rules of run files. Errors: `yaml.YAMLError`."""
    return yaml.load(text, Loader=Yaml)


def dump_yaml(value: Any, **options: Any) -> str:
    """Dump a value as YAML, escaping all non-ASCII characters if it contains terminal control or bidirectional ones.
    `options`: of `yaml.safe_dump`."""
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
    """Parse a YAML text and return (value, {dotted key: line}), lines from 1. Errors: `yaml.YAMLError`."""
    loader = Yaml(text)
    try:
        root = loader.get_single_node()
        lines = _lines(root)  # before merge keys are resolved in place
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
