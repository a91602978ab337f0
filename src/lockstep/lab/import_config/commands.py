"""Functions that fire, typer or click turn into a command, written as plain calls.

In: the tree of a script, and the options of its command line. Out: the same tree with `main(lr=3e-5)` in the place of
`fire.Fire(main)`, `typer.run(main)`, `app()` or click's `main()`: the values are those of the command line, else the
defaults that the options declare. A command that is declared in any other way stays as it is.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.lab.import_config.parsed_options import changes_command_line

Function = ast.FunctionDef
Imports = Mapping[str, str]
# Arguments of typer.Option and click.option that change no value; of Typer() and command() likewise.
_PLAIN = {"default", "type", "help", "show_default", "is_flag", "required", "metavar", "hidden", "show_choices", "min"}
_PLAIN |= {"max", "rich_help_panel", "show_envvar", "case_sensitive", "exists", "file_okay", "dir_okay", "readable"}
_OF_COMMANDS = {
    "name",
    "help",
    "short_help",
    "epilog",
    "no_args_is_help",
    "hidden",
    "add_help_option",
    "add_completion",
}
_OF_COMMANDS |= {"pretty_exceptions_enable", "pretty_exceptions_show_locals", "pretty_exceptions_short"}
_OF_COMMANDS |= {"rich_markup_mode", "rich_help_panel", "deprecated", "options_metavar"}
_SETTINGS = {"help_option_names", "show_default", "max_content_width", "terminal_width"}  # of context_settings
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "str": str, "INT": int, "FLOAT": float, "STRING": str}
_RANGES = {"IntRange": int, "FloatRange": float, "Choice": str, "Path": str}
_SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_GENERIC = ("Optional", "Union", "List", "list", "Tuple", "tuple", "Literal")
_OTHERS = ("list", "tuple", "dict", "Any", "Path", "pathlib.Path")


@dataclass
class _Option:
    """An option of a command. `flags`: as a command line spells them. `default`: None if it must be given."""

    flags: tuple[str, ...]
    default: ast.expr | None = None
    kind: Any = None  # converts a value; None: it stays as it is
    understood: bool = True
    plain: ast.expr | None = None  # the default that the function itself has


def write_calls(tree: ast.Module, options: Mapping[str, Any]) -> set[str] | None:
    """Replace the call that starts a command. Returns the names of its options, or None if there is no such command."""
    imports = _imports(tree)
    if not {"fire", "typer", "click"} & {each.partition(".")[0] for each in imports.values()}:
        return None
    functions = {each.name: each for each in tree.body if isinstance(each, Function)}
    apps = set(_apps(tree, imports))
    if changes_command_line(tree) or not _registers_once(tree, imports, apps):
        return None
    for node in [each for each in ast.walk(tree) if isinstance(each, ast.Expr)]:
        call = node.value
        if not isinstance(call, ast.Call):
            continue
        function = functions.get(_started(call, functions, imports, apps))
        if function is not None and _is_only(function, functions, imports, apps):
            declared = _declared(function, tree, imports, _origin(imports, call.func) in ("fire.Fire",))
            values = _values(function, declared, options)
            stored = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            if any(stored[n.id] > 1 for v in values for n in ast.walk(v.value) if isinstance(n, ast.Name)):
                return None  # a default is the value of a name before it is assigned again
            written = ast.unparse(call)
            node.value = ast.copy_location(ast.Call(ast.Name(function.name, ast.Load()), [], values), call)
            node.value.written = written  # type: ignore[attr-defined]
            function.decorator_list = [each for each in function.decorator_list if not _declares(each, imports, apps)]
            for line in (each for each in tree.body if isinstance(each, ast.Assign)):
                if _origin(imports, getattr(line.value, "func", None)) == "typer.Typer":
                    line.value = ast.copy_location(ast.Constant(None), line.value)
            ast.fix_missing_locations(tree)
            return {*options} if function.args.kwarg else {flag for each in declared.values() for flag in each.flags}
    return None


def _imports(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {each.asname or each.name: f"{base}{each.name}" for each in node.names}
    return names


def _origin(imports: Imports, node: ast.AST | None) -> str:
    """Return the dotted name of a function of a library: click.option."""
    first, dot, rest = (ast.unparse(node) if node is not None else "").partition(".")
    return f"{imports.get(first, first)}{dot}{rest}"


def _apps(tree: ast.Module, imports: Imports) -> Iterator[str]:
    """Yield the names of `app = typer.Typer()`."""
    for line in (each for each in tree.body if isinstance(each, ast.Assign)):
        call = line.value
        if isinstance(call, ast.Call) and _origin(imports, call.func) == "typer.Typer" and _is_plain(call):
            yield from (each.id for each in line.targets if isinstance(each, ast.Name))


def _registers_once(tree: ast.Module, imports: Imports, apps: set[str]) -> bool:
    """Return whether apps are used for one command only, and started: `@app.command()` and `app()`."""
    uses = Counter(each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    decorators = [each for n in ast.walk(tree) if isinstance(n, Function) for each in n.decorator_list]
    commands = Counter(ast.unparse(getattr(each, "func", each)).partition(".")[0] for each in decorators)
    started = Counter(
        each.func.id for each in ast.walk(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
    )
    return all(uses[app] == commands[app] + started[app] and commands[app] == started[app] == 1 for app in apps)


def _is_plain(call: ast.Call) -> bool:
    """Return whether the arguments of Typer() or command() change no value of an option."""
    for word in call.keywords:
        if word.arg == "context_settings":
            keys = word.value.keys if isinstance(word.value, ast.Dict) else [None]
            if not {getattr(key, "value", None) for key in keys} <= _SETTINGS:
                return False
        elif word.arg not in _OF_COMMANDS:
            return False
    return all(isinstance(each, ast.Constant) for each in call.args)


def _started(call: ast.Call, functions: Mapping[str, Function], imports: Imports, apps: set[str]) -> str:
    """Return the name of the function that a call starts as a command."""
    name, arguments = _origin(imports, call.func), [*call.args, *(word.value for word in call.keywords)]
    if name in ("fire.Fire", "typer.run"):
        only = call.args[0] if len(arguments) == len(call.args) == 1 else None
        return only.id if isinstance(only, ast.Name) else ""
    if name in apps and not arguments:
        commands = [
            each.name for each in functions.values() if any(_is_command(d, imports, apps) for d in each.decorator_list)
        ]
        return commands[0] if len(commands) == 1 else ""
    decorated = functions[name].decorator_list if name in functions and not arguments else []
    return name if any(_is_command(each, imports, set()) for each in decorated) else ""


def _is_command(node: ast.expr, imports: Imports, apps: set[str]) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    holder, _, method = ast.unparse(function).rpartition(".")
    if isinstance(node, ast.Call) and not _is_plain(node):
        return False
    return _origin(imports, function) == "click.command" or (holder in apps and method == "command")


def _declares(node: ast.expr, imports: Imports, apps: set[str]) -> bool:
    """Return whether a decorator makes a command or declares one of its options."""
    function = node.func if isinstance(node, ast.Call) else node
    return _is_command(node, imports, apps) or _origin(imports, function) in ("click.option", "click.argument")


def _is_only(function: Function, functions: Mapping[str, Function], imports: Imports, apps: set[str]) -> bool:
    """Return whether a command has no group, callback or context around it that also runs."""
    for each in functions.values():
        for by in each.decorator_list:
            name = ast.unparse(by.func if isinstance(by, ast.Call) else by)
            groups = name.rpartition(".")[0] in apps and not _is_command(by, imports, apps)
            if groups or (
                _origin(imports, ast.parse(name, mode="eval").body).startswith("click.")
                and not _declares(by, imports, apps)
            ):
                return False
    return not function.args.vararg


# -- options -----------------------------------------------------------------------------------------------------------


def _declared(function: Function, tree: ast.Module, imports: Imports, by_fire: bool) -> dict[str, _Option]:
    """Return the options of a command, by the arguments that they set."""
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    plain = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    defaults = dict(zip(plain[len(plain) - len(spec.defaults) :], spec.defaults, strict=True))
    defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
    if by_fire:
        return {name: _Option((name,), defaults.get(name), _literal, plain=defaults.get(name)) for name in names}
    of_click = [d for d in function.decorator_list if isinstance(d, ast.Call) and _declares(d, imports, set())]
    of_click = [d for d in of_click if not _is_command(d, imports, set())]
    declared: dict[str, _Option] = {}
    for each in of_click:
        name, option = _of_click(each)
        option.understood &= name not in declared
        declared[name] = option
    if any(_is_command(d, imports, set()) for d in function.decorator_list):
        return {name: option for name, option in declared.items() if name in names}
    enums = {n.name for n in tree.body if isinstance(n, ast.ClassDef) and "Enum" in "".join(map(ast.unparse, n.bases))}
    for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
        declared[argument.arg] = _of_typer(argument, defaults.get(argument.arg), imports, enums)
    return declared


def _values(function: Function, declared: Mapping[str, _Option], options: Mapping[str, Any]) -> list[ast.keyword]:
    """Return the arguments that the command line or an option's declaration gives. One that is not understood loses
    its default, so that it has no value."""
    words: dict[str, ast.expr] = {}
    for name, option in declared.items():
        value: ast.expr | None = option.default
        for flag in option.flags:
            if isinstance(options.get(flag), str | int | float | bool):
                value = ast.Constant(options[flag])
        if option.understood and isinstance(value, ast.Constant) and value.value is not None and option.kind:
            try:
                value = ast.copy_location(ast.Constant(option.kind(value.value)), value)
            except (ValueError, TypeError, KeyError, OverflowError):
                value = None
        if option.understood and value is not None:
            words |= {} if value is option.plain else {name: value}
        else:
            _drop_default(function.args, name)
    return [ast.keyword(name, ast.copy_location(each, function)) for name, each in words.items()]


def _drop_default(spec: ast.arguments, name: str) -> None:
    """Replace the default of an argument by a call, whose value is known only when the script runs."""
    plain = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    for names, values in (
        (plain[len(plain) - len(spec.defaults) :], spec.defaults),
        ([each.arg for each in spec.kwonlyargs], spec.kw_defaults),
    ):
        for place, value in enumerate(values):
            if names[place] == name and value is not None and not isinstance(value, ast.Call):
                values[place] = ast.copy_location(ast.Call(ast.Name("input", ast.Load()), [], []), value)


def _literal(value: Any) -> Any:
    """Return a value of a command line as fire reads it: a literal, else a text."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _switch(value: Any) -> bool:
    return value if isinstance(value, bool) else _SWITCHES[str(value).lower()]


def _of_typer(argument: ast.arg, default: ast.expr | None, imports: Imports, enums: set[str]) -> _Option:
    """Return an option that `typer.Option(default, "--name")` declares, or the type of an argument."""
    option, kind = _Option((argument.arg,), default, plain=default), argument.annotation
    calls = [default] if isinstance(default, ast.Call) else []
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value).rpartition(".")[2] == "Annotated":
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        kind, calls = parts[0], [*calls, *parts[1:]]  # type: ignore[list-item]
    option.understood = len(calls) < 2 and all(isinstance(each, ast.Call) for each in calls)
    for call in calls if option.understood else ():
        words = {word.arg: word.value for word in call.keywords}
        inside = call is default
        if inside:
            option.default = call.args[0] if call.args else words.get("default")
        if isinstance(option.default, ast.Constant) and option.default.value is ...:
            option.default = None
        flags = [each.value for each in call.args[inside:] if isinstance(each, ast.Constant)]
        option.flags = _spelled(list(map(str, flags))) or option.flags
        declares = _origin(imports, call.func) in ("typer.Option", "typer.Argument")
        simple = len(flags) == len(call.args[inside:]) and not isinstance(option.default, ast.Lambda)
        option.understood = declares and simple and words.keys() <= _PLAIN
    if kind is not None:
        option.kind, known = _converter(kind, enums)
        option.understood &= known
    return option


def _converter(kind: ast.expr, enums: set[str]) -> tuple[Any, bool]:
    """Return what converts a value to a type, or None, and whether the type is understood."""
    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
        kind = ast.parse(kind.value, mode="eval").body
    text = ast.unparse(kind)
    if text in ("int", "float", "str", "bool"):
        return _TYPES.get(text, _switch), True
    if isinstance(kind, ast.BinOp):
        parts: list[ast.expr] = [kind.left, kind.right]
    elif isinstance(kind, ast.Subscript) and ast.unparse(kind.value).rpartition(".")[2] in _GENERIC:
        if ast.unparse(kind.value).endswith("Literal"):
            return None, True
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    else:
        return None, text in _OTHERS or text in enums or text == "None"
    each = [_converter(part, enums) for part in parts if ast.unparse(part) != "None"]
    several = isinstance(kind, ast.Subscript) and not ast.unparse(kind.value).endswith(("Optional", "Union"))
    return (each[0][0] if len(each) == 1 and not several else None), all(known for _, known in each)


def _spelled(flags: list[str]) -> tuple[str, ...]:
    """Return flags as the options of a command line are named: `--n-epochs` is n_epochs."""
    return tuple(each.partition("/")[0].lstrip("-").replace("-", "_") for each in flags if each.startswith("--"))


def _of_click(call: ast.Call) -> tuple[str, _Option]:
    """Return the argument that an option of click sets, and the option. The first long flag names it."""
    flags = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
    plain = [each for each in flags if not each.startswith("-")]
    first = [*_spelled(flags), *(each.lstrip("-") for each in flags), ""][0]
    name = (plain[0] if plain else first).lower()
    words = {word.arg: word.value for word in call.keywords}
    option = _Option(_spelled(flags) or (name,))
    option.understood = len(flags) == len(call.args) and words.keys() <= _PLAIN
    required = "required" in words and ast.unparse(words["required"]) != "False"
    switch = any("/" in each for each in flags) or "is_flag" in words
    default = words.get("default", ast.Constant(False if switch else None))
    option.default = None if required else default
    kind = words.get("type")
    if kind is None:
        value = getattr(default, "value", None)
        option.kind = _switch if switch or isinstance(value, bool) else type(value)
        option.kind = option.kind if option.kind in (_switch, int, float) else None
    else:
        of_range = isinstance(kind, ast.Call) and "clamp" not in ast.unparse(kind)
        last = ast.unparse(kind.func if isinstance(kind, ast.Call) else kind).rpartition(".")[2]
        option.kind = _RANGES.get(last) if of_range else _TYPES.get(last)
        option.kind = _switch if last in ("bool", "BOOL") else option.kind
        option.understood &= option.kind is not None
    return name, option
