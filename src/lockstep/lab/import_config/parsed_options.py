"""Options that a script declares with argparse, and their values.

In: a `Script` and the options of its command line. Out: the value of each option: as the command line or the code gives
it, converted by its type, else its default. An option whose value is unknown is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config import enumerations
from lockstep.lab.import_config.value_bounds import FAULTS, Unknown

PARSERS = (".parse_args_into_dataclasses", ".parse_args_and_config", ".parse_json_file", ".parse_yaml_file")
_PARSES = (".parse_args", ".parse_known_args")
_ADDS_WORDS = ("sys.argv.append", "sys.argv.extend", "sys.argv.insert")
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_SWITCHES = {"store_true": True, "store_false": False}


@dataclass
class ParsedOptions:
    values: dict[str, Any] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)  # as a command line spells them


def options_of(script: Any) -> ParsedOptions:
    """Return the options of a script."""
    options = ParsedOptions()
    words = _words(script)
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call):
            continue
        if not ast.unparse(node.func).endswith(".add_argument"):
            continue
        names = [script.known(each) for each in node.args]
        flags = [name for name in names if isinstance(name, str) and name.startswith("-")]
        if not flags:
            continue
        keywords = {word.arg: word.value for word in node.keywords if word.arg is not None}
        longest = max(flags, key=len).lstrip("-").replace("-", "_")
        options.declared.add(longest)
        try:
            value = _value(script, flags, longest, keywords, words)
        except (*FAULTS, Unknown):
            continue
        name = script.known(keywords.get("dest"), longest)
        if value is not Unknown and (name not in options.values or longest in script.options):
            options.values[name] = value  # of two options for one name, the first one's default counts
    _drop_set_defaults(script, options)
    return options


def _drop_set_defaults(script: Any, options: ParsedOptions) -> None:
    """Drop the values that `parser.set_defaults(lr=1e-3)` may replace: all of them if its names are unknown."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".set_defaults"):
            for word in node.keywords:
                changed = {word.arg} if word.arg is not None else script.known(word.value, options.values)
                for name in list(changed):
                    options.values.pop(name, None)


def changes_command_line(tree: ast.Module) -> bool:
    """Return whether a script sets or extends sys.argv."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _ADDS_WORDS:
            return True
        sets = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if sets and ast.unparse(node).startswith("sys.argv"):
            return True
    return False


def _words(script: Any) -> Sequence[str] | None:
    """Return the words that the code itself parses, `parser.parse_args(["--lr", "1e-3"])`; None if they are unknown."""
    if changes_command_line(script.tree):
        return None
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(_PARSES):
            continue
        if len(node.args) > 1 or any(word.arg == "namespace" for word in node.keywords):
            return None  # an object's own attributes replace the defaults
        passed = node.args[0] if node.args else next((w.value for w in node.keywords if w.arg == "args"), None)
        words = script.known(passed, Unknown)
        if isinstance(words, list) and words:
            return [str(word) for word in words]
        if words is Unknown and passed is not None and not _is_command_line(script, passed):
            return None
    return ()


def _value(
    script: Any, flags: Sequence[str], name: str, keywords: dict[str, ast.expr], words: Sequence[str] | None
) -> Any:
    """Return the value of an option, or `Unknown`. Errors: those of its type; `Unknown`."""
    if words is None:
        return Unknown
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    action = script.known(keywords.get("action"))
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in flags:
            if action in _SWITCHES:
                return _SWITCHES[action]
            if "nargs" in keywords:
                return Unknown
            return _TYPES[kind](value if equals else words[place + 1])
    if name in script.options:
        value = script.options[name]
        return value != "" if kind == "bool" and "nargs" not in keywords else value
    if "default" not in keywords and action in _SWITCHES:
        return not _SWITCHES[action]
    if script.known(keywords.get("required")) is True:
        return Unknown
    default = script.value(keywords["default"]) if "default" in keywords else None
    if enumerations.is_member(script, kind, default):
        return default
    if isinstance(default, str) and kind != "str":  # argparse converts only texts
        return _TYPES[kind](default) if kind in _TYPES else _of_library(kind, default)
    return default


def _is_command_line(script: Any, node: ast.expr, depth: int = 0) -> bool:
    """Return whether words are those of the command line: `sys.argv[1:]`, a name of it, or an argument of a function
    that each call leaves out or gives them, `def main(argv=None)`."""
    if ast.unparse(node).startswith("sys.argv"):
        return True
    if isinstance(node, ast.IfExp | ast.BoolOp):  # argv or sys.argv[1:]
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
        return all(_is_nothing(each) or _is_command_line(script, each, depth) for each in parts)
    if not isinstance(node, ast.Name) or depth > 5:
        return False
    function = script.scopes.get(id(node))
    if isinstance(function, ast.FunctionDef) and node.id in (names := [each.arg for each in function.args.args]):
        place, passed = names.index(node.id), []
        for call in (c for c in ast.walk(script.tree) if isinstance(c, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == function.name:
                if any(isinstance(each, ast.Starred) for each in call.args) or any(
                    w.arg is None for w in call.keywords
                ):
                    return False
                passed += [*call.args[place : place + 1], *(w.value for w in call.keywords if w.arg == node.id)]
        passed += (
            function.args.defaults[place - len(names) :][:1]
            if place - len(names) >= -len(function.args.defaults)
            else []
        )
        values = script.bindings.get((id(function), node.id), [])
        own = [each for each in values if each is not None]  # argv = sys.argv[1:], if it is None
        return all(_is_nothing(each) or _is_command_line(script, each, depth + 1) for each in (*passed, *own))
    value = script.bound(node, last=True)
    return value is not None and _is_command_line(script, value, depth + 1)


def _is_nothing(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def record_assigned(script: Any, target: ast.expr, value: ast.expr, scope: Any) -> None:
    """Record the names that hold parsed options, those that hold TrainingArguments, and those that are assigned
    something else, too."""
    names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    parsed = value.value if isinstance(value, ast.Subscript) else value
    kind = ast.unparse(parsed.func) if isinstance(parsed, ast.Call) else ""
    if kind.endswith((*PARSERS, ".parse_args")):
        script.holders |= names
    if kind.endswith(PARSERS) and isinstance(parsed, ast.Call):
        script.dataclasses |= names
        passed = parsed.args[0] if parsed.args else next((w.value for w in parsed.keywords if w.arg == "args"), None)
        if kind.endswith(PARSERS[:2]) and passed is not None and not _is_command_line(script, passed):
            script.replaced |= names
        _settings(script, target, parsed, scope)
    elif not isinstance(target, ast.Attribute | ast.Subscript):
        script.replaced |= names


def record_set(script: Any, call: ast.Call) -> None:
    """Record the attribute that `setattr` sets; if its name is unknown, all of the object's are."""
    if len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
        script.set_later.add(f"{ast.unparse(call.args[0])}.{call.args[1].value!s}")
    elif call.args:
        script.opaque.add(ast.unparse(call.args[0]))


def set_elsewhere(script: Any, node: ast.Attribute) -> bool:
    """Return whether an option is set after parsing in a way that is not followed: as an attribute of another name for
    the same options, by `setattr` or by `vars`."""
    suffix, name = f".{node.attr}", ast.unparse(node.value)
    others = [each for each in script.set_later if each.endswith(suffix) and each.count(".") == 1]
    names = {each.removesuffix(suffix) for each in others} - {name} | script.opaque
    shared = any(_holds_options(script, each) for each in names)
    return name in script.opaque or (name not in script.dataclasses and shared)


def _holds_options(script: Any, name: str, depth: int = 0) -> bool:
    """Return whether a name is assigned parsed options, in any function, also by a function that parses them, or
    another name of them."""
    values_of_name = [v for (_, own), values in script.bindings.items() if own == name for v in values]
    makers = [script.functions.get(ast.unparse(v.func)) for v in values_of_name if isinstance(v, ast.Call)]
    others = {v.id for v in values_of_name if isinstance(v, ast.Name)} if depth < 5 else set()
    if any(_holds_options(script, each, depth + 1) for each in others):
        return True
    return name in script.holders or any(each is not None and ".parse_" in ast.unparse(each) for each in makers)


def _settings(script: Any, target: ast.expr, parsed: ast.Call, scope: Any) -> None:
    """Record which of the names passed by HfArgumentParser or TrlParser holds TrainingArguments or a subclass."""
    parser = parsed.func.value if isinstance(parsed.func, ast.Attribute) else parsed
    if isinstance(parser, ast.Name):
        values = [v for v in script.bindings.get((id(scope), parser.id), []) if v is not None]
        parser = values[-1] if values else parser
    if not isinstance(parser, ast.Call):
        return
    words = [word.value for word in parser.keywords if word.arg == "dataclass_types"]
    kinds = next(iter((*parser.args, *words)), None)
    names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    classes = kinds.elts if isinstance(kinds, ast.Tuple | ast.List) else [kinds]
    for name, kind in zip(names, classes, strict=False):
        if isinstance(name, ast.Name) and kind is not None and _is_settings(script, ast.unparse(kind)):
            script.settings.add(name.id)


def _is_settings(script: Any, name: str) -> bool:
    if (own := script.classes.get(name)) is not None:
        return any(_is_settings(script, ast.unparse(base)) for base in own.bases)
    return name.endswith(("TrainingArguments", "SFTConfig", "DPOConfig", "RewardConfig", "CPOConfig"))


def _of_library(kind: str, default: str) -> Any:
    """Return a default whose type is a class such as SchedulerType or Path: its text; of any other, `Unknown`."""
    last = kind.rpartition(".")[2]
    return default if last.endswith("Type") or last in ("Path", "IntervalStrategy") else Unknown
