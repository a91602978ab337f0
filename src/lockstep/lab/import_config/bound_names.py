"""Names that statements bind besides `name = value`, and attributes that a class sets again.

In: nodes of a script. Out: the names, so that no reader takes the first value of a name for its only one.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

CHANGING = (
    "update",
    "append",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "clear",
    "sort",
    "reverse",
)
_OF_ENTRIES = ("get", "values", "items", "setdefault", "dict", "list", "copy")  # calls that return what a mapping holds
_BLOCKS = ast.If | ast.For | ast.While | ast.With | ast.Try
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def of_node(node: ast.AST) -> set[str]:
    """Return the names that one node binds without a target: an import, a definition, `except E as name`, a pattern."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).partition(".")[0] for each in node.names}
    if isinstance(node, ast.MatchMapping):
        return {node.rest} if node.rest else set()
    if isinstance(node, _FUNCTION | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return {node.name} if node.name else set()
    return set()


def within(node: ast.AST) -> set[str]:
    """Return the names that a node binds in any way, also deletes."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    return names.union(*map(of_node, ast.walk(node)))


def targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets in the head of `for` and `with`."""
    if isinstance(node, ast.For | ast.AsyncFor):
        return [node.target]
    return [each.optional_vars for each in getattr(node, "items", ()) if each.optional_vars is not None]


def record_elsewhere(script: Any) -> None:
    """Mark names as unknown that are also bound by an import, a definition, a pattern or an `except` clause, or that a
    function declares global and assigns. A function whose name is bound a second time is ambiguous."""
    methods = {id(line) for kind in ast.walk(script.tree) if isinstance(kind, ast.ClassDef) for line in kind.body}
    defined: Counter[tuple[int, str]] = Counter()
    for node in ast.walk(script.tree):
        scope, names = script.scopes.get(id(node)), of_node(node) if id(node) not in methods else set()
        if isinstance(node, ast.Global | ast.Nonlocal):
            names = {each for each in node.names if (id(scope), each) in script.bindings}
            scope = None if isinstance(node, ast.Global) else _enclosing(script, scope, names)
        if isinstance(node, _FUNCTION) and id(node) not in methods:
            script.namesakes.setdefault(node.name, []).append(node)
            defined[id(scope), node.name] += 1
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = _changed_by(script.functions.get(node.func.id), node)
        for values in (script.bindings.get((id(scope), name), []) for name in names):
            values.append(None)
    shared = changed_through_others(script)
    for values in (values for (_, name), values in script.bindings.items() if name in shared):
        values.append(None)
    script.ambiguous |= {name for (of, name), n in defined.items() if n > 1 or (of, name) in script.bindings}


def _enclosing(script: Any, scope: Any, names: set[str]) -> Any:
    """Return the function around another one that has the names which `nonlocal` declares."""
    while scope is not None:
        scope = script.scopes.get(id(scope))
        if any((id(scope), each) in script.bindings for each in names):
            break
    return scope


def _is_container(node: Any) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("dict", "list")
    return is_call or isinstance(node, ast.Dict | ast.List)


def changed_through_others(script: Any) -> set[str]:
    """Return the names of mappings and lists that are changed under another name: after `other = name`, in a display
    that holds the name, or in a loop over such a display."""
    others: list[tuple[set[str], set[str]]] = []
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For):
            heads = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.iter if isinstance(node, ast.For) else node.value
            own = {each.id for head in heads for each in ast.walk(head) if isinstance(each, ast.Name)}
            others.append((own, _objects_in(value)))
    changed = set(changed_in(script.tree))
    _record_set_by_vars(script, changed)
    names = _changed_inside(script.tree)
    while more := {each for own, objects in others if own & (changed | names) for each in objects} - names:
        names |= more
    return {name for (_, name), values in script.bindings.items() if name in names and any(map(_is_container, values))}


def _changed_inside(tree: ast.AST) -> set[str]:
    """Return the names of mappings of which an entry is deleted, or changed where a call returns it:
    `config.get("train")["lr"] = 1`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Delete):
            names |= {_root(each) for each in node.targets if isinstance(each, ast.Subscript)}
        holder: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            holder = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            holder = node.func.value
        if holder is not None and any(isinstance(each, ast.Call) for each in ast.walk(holder)):
            names.add(_root(holder))
    return names - {""}


def _record_set_by_vars(script: Any, changed: set[str]) -> None:
    """Record objects whose attributes are set through another name for `vars(args)` or `args.__dict__`."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Assign) or not {ast.unparse(each) for each in node.targets} & changed:
            continue
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "vars" and value.args:
            script.opaque.add(ast.unparse(value.args[0]))
        elif isinstance(value, ast.Attribute) and value.attr == "__dict__":
            script.opaque.add(ast.unparse(value.value))


def _objects_in(node: ast.AST | None) -> set[str]:
    """Return the names that a value is or is an entry of, or that its displays hold."""
    in_entries = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _OF_ENTRIES
    if in_entries or isinstance(node, ast.Name | ast.Subscript):
        return {name} if (name := _root(node)) else set()
    if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.IfExp | ast.BoolOp):
        inner = node.values if isinstance(node, ast.Dict) else ast.iter_child_nodes(node)
        return set().union(*map(_objects_in, inner))
    return set()


def _changed_by(function: Any, call: ast.Call) -> set[str]:
    """Return the names of arguments that a function of the script changes in place: `options["lr"] = 1`."""
    if not isinstance(function, _FUNCTION):
        return set()
    own = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    passed = dict(zip(own, call.args, strict=False)) | {word.arg: word.value for word in call.keywords if word.arg}
    changed = set(changed_in(function))
    return {root for name, node in passed.items() if name in changed and (root := _root(node))}


def changed_in(node: ast.AST) -> list[str]:
    """Return the names of mappings and lists that a statement changes."""
    names = []
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript | ast.Attribute) and not isinstance(each.ctx, ast.Load):
            names.append(_root(each))
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in CHANGING:
            names.append(_root(each.func.value))
    return [name for name in names if name]


def _root(node: ast.AST | None) -> str:
    """Return the name of the mapping, list or object that an expression is a part of: `list(config.values())[0]`."""
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            node = node.args[0] if node.args else node.func
        else:
            node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_set_again(kind: ast.ClassDef, name: str, value: Any, passed: bool) -> bool:
    """Return whether an attribute has another value than that of its line in the class: two lines set it, or a method
    does. `passed`: whether it is an argument of the class, so that `self.name = name` in `__init__` keeps it."""
    lines = [line for line in kind.body if not isinstance(line, _FUNCTION)]
    names = [each for line in lines for each in ast.walk(line) if isinstance(each, ast.Name)]
    if sum(each.id == name and not isinstance(each.ctx, ast.Load) for each in names) > 1:
        return True
    if any(isinstance(line, _BLOCKS) and name in within(line) for line in lines):
        return True
    filling = (f"self.{name} is None", f"not self.{name}")
    for method in (line for line in kind.body if isinstance(line, _FUNCTION)):
        plainly: set[int] = set()
        for each in ast.walk(method):
            plain = passed and method.name == "__init__" and each in method.body
            if plain and isinstance(each, ast.Assign) and ast.unparse(each) == f"self.{name} = {name}":
                plainly |= set(map(id, each.targets))
            elif isinstance(each, ast.If) and value and ast.unparse(each.test) in filling:
                plainly |= {id(node) for line in each.body for node in ast.walk(line)}
            elif isinstance(each, ast.Attribute) and each.attr == name and id(each) not in plainly | _loads(method):
                return True
    return False


def _loads(method: ast.AST) -> set[int]:
    nodes = (each for each in ast.walk(method) if isinstance(each, ast.Attribute))
    return {id(each) for each in nodes if isinstance(each.ctx, ast.Load)}


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def root_of(node: ast.AST) -> str:
    """Return the first name of a dotted expression."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
