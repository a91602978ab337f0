"""Functions that fire, typer or click turn into a command, written as plain calls.

In: the tree of a script, and the options of its command line. Out: the same tree with `main(lr=3e-5)` in the place of
`fire.Fire(main)`, `typer.run(main)`, `app()` or click's `main()`: the values are those of the command line, else the
defaults that the options declare. A command that is declared in any other way stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = (
    "default",
    "type",
    "help",
    "show_default",
    "is_flag",
    "required",
    "metavar",
    "hidden",
    "show_choices",
    "min",
    "max",
)
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "str": str}
Function = ast.FunctionDef


def write_calls(tree: ast.Module, options: Mapping[str, Any]) -> set[str] | None:
    """Replace the call that starts a command. Returns the names of its options, or None if there is no such command."""
    imports = _imports(tree)
    if not {"fire", "typer", "click"} & {each.partition(".")[0] for each in imports.values()}:
        return None
    functions = {each.name: each for each in tree.body if isinstance(each, Function)}
    apps = set(_apps(tree, imports))
    for node in [each for each in ast.walk(tree) if isinstance(each, ast.Expr)]:
        call = node.value
        if not isinstance(call, ast.Call):
            continue
        function = functions.get(_started(call, functions, imports, apps))
        if function is not None and _is_only(function, functions, imports, apps):
            values = _values(function, imports, options)
            written = ast.unparse(call)
            node.value = ast.copy_location(ast.Call(ast.Name(function.name, ast.Load()), [], values), call)
            node.value.written = written  # type: ignore[attr-defined]
            function.decorator_list = [each for each in function.decorator_list if not _declares(each, imports, apps)]
            for line in tree.body:
                if (
                    isinstance(line, ast.Assign)
                    and _origin(imports, getattr(line.value, "func", None)) == "typer.Typer"
                ):
                    line.value = ast.copy_location(ast.Constant(None), line.value)
            ast.fix_missing_locations(tree)
            spec = function.args
            return (
                {*options} if spec.kwarg else {each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
            )
    return None


def _imports(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {each.asname or each.name: f"{base}{each.name}" for each in node.names}
    return names


def _origin(imports: Mapping[str, str], node: ast.AST | None) -> str:
    """Return the dotted name of a function of a library: click.option."""
    first, dot, rest = (ast.unparse(node) if node is not None else "").partition(".")
    return f"{imports.get(first, first)}{dot}{rest}"


def _apps(tree: ast.Module, imports: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of `app = typer.Typer()`."""
    for line in (each for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)):
        if _origin(imports, line.value.func) == "typer.Typer":  # type: ignore[attr-defined]
            yield from (each.id for each in line.targets if isinstance(each, ast.Name))


def _started(call: ast.Call, functions: Mapping[str, Function], imports: Mapping[str, str], apps: set[str]) -> str:
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


def _is_command(node: ast.expr, imports: Mapping[str, str], apps: set[str]) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    holder, _, method = ast.unparse(function).rpartition(".")
    return _origin(imports, function) == "click.command" or (holder in apps and method == "command")


def _declares(node: ast.expr, imports: Mapping[str, str], apps: set[str]) -> bool:
    """Return whether a decorator makes a command or declares one of its options."""
    function = node.func if isinstance(node, ast.Call) else node
    return _is_command(node, imports, apps) or _origin(imports, function) in ("click.option", "click.argument")


def _is_only(function: Function, functions: Mapping[str, Function], imports: Mapping[str, str], apps: set[str]) -> bool:
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


def _values(function: Function, imports: Mapping[str, str], options: Mapping[str, Any]) -> list[ast.keyword]:
    """Return the arguments that the command line or an option's declaration gives."""
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    plain = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    defaults = dict(zip(plain[len(plain) - len(spec.defaults) :], spec.defaults, strict=True))
    defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
    declared: dict[str, ast.expr | None] = {}
    for name, default in defaults.items():
        if isinstance(default, ast.Call) and _origin(imports, default.func) in ("typer.Option", "typer.Argument"):
            declared[name] = _of_typer(default)
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and _origin(imports, each.func) in ("click.option", "click.argument"):
            name, value = _of_click(each, names)
            declared[name] = value
    words: dict[str, ast.expr] = {name: each for name, each in declared.items() if each is not None}
    words |= {
        name: ast.Constant(options[name]) for name in names if isinstance(options.get(name), str | int | float | bool)
    }
    return [ast.keyword(name, ast.copy_location(each, function)) for name, each in words.items() if name in names]


def _of_typer(call: ast.Call) -> ast.expr | None:
    """Return the default of `typer.Option(default, "--name")`; None if it must be given or is computed."""
    words = {word.arg: word.value for word in call.keywords}
    if {"envvar", "callback", "default_factory", "parser", "click_type", None} & words.keys():
        return None
    value = call.args[0] if call.args else words.get("default")
    return None if isinstance(value, ast.Constant) and value.value is ... else value


def _of_click(call: ast.Call, names: list[str]) -> tuple[str, ast.expr | None]:
    """Return the argument that an option of click sets, and its default; None if it must be given or is computed."""
    flags = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
    plain = [each for each in flags if not each.startswith("-")]
    longest = max(
        (each.partition("/")[0] for each in flags), key=lambda each: (each.startswith("--"), len(each)), default=""
    )
    name = (plain[0] if plain else longest.lstrip("-").replace("-", "_")).lower()
    words = {word.arg: word.value for word in call.keywords}
    if (
        name not in names
        or not words.keys() <= {*_PLAIN}
        or ast.unparse(words.get("required", ast.Constant(False))) != "False"
    ):
        return name, None
    switch = any("/" in each for each in flags) or "is_flag" in words
    value = words.get("default", ast.Constant(False if switch else None))
    kind = _TYPES.get(ast.unparse(words["type"])) if "type" in words else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and kind is not None:
        try:
            value = ast.copy_location(ast.Constant(kind(value.value)), value)
        except ValueError:
            return name, None
    return name, value
