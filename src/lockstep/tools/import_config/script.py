"""A Python script as far as it can be read without running it: its calls, and what their arguments are.

In: the text, and options of a command line. Out: a `Script`. A value is known where it is a literal, a name that is
given one once, a default of argparse or of a dataclass, or made of such; everything else is `Unknown`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError
from lockstep.tools.import_config.operators import COMPARISONS, DTYPES, ENUMERATIONS, FUNCTIONS, OPERATORS

_PARSERS = ("parse_args_into_dataclasses", "parse_args_and_config", "parse_json_file", "parse_yaml_file")
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_CHANGING = ("update", "append", "extend", "insert", "pop", "remove", "setdefault", "clear")
LONGEST = 76  # characters of a piece of code that is shown


class Unknown(Exception):
    """A value that is known when the script runs."""


@dataclass(frozen=True)
class Call:
    """A call, at its place."""

    node: ast.Call
    name: str  # its last part: from_pretrained
    origin: str  # as imported: transformers.AutoTokenizer.from_pretrained
    condition: str | None = None  # code that decides whether it is called, where that is not known

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def receiver(self) -> ast.expr | None:
        """What a method is called on."""
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    def __str__(self) -> str:
        return f"line {self.line}: {shown(self.node)}"


@dataclass
class Arguments:
    """Those of a call: known ones by name, and the code of the others."""

    known: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, ast.expr] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)  # **these, whose names are not known


def shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class Script:
    """A script and its names. `options`: of its command line, by name. Errors: `RunError` for what is no Python."""

    def __init__(self, path: Path, text: str, options: Mapping[str, Any] | None = None) -> None:
        self.path, self.options = path, dict(options or {})
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise RunError(f"--from: {path}, line {error.lineno}: {error.msg}") from None
        self.imports: dict[str, str] = {}
        self.functions: dict[str, Scope] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.bindings: dict[tuple[int, str], list[ast.expr | None]] = {}  # scope and name -> values; None: any
        self.scopes: dict[int, Scope | None] = {}  # node -> the function that it stands in
        self._set_later: set[str] = set()  # attributes that the script sets itself: args.lr
        self.started: Scope | None = None  # the function that fire makes a command of
        self._parsed: dict[str, Any] = {}  # argparse's options and their defaults
        self._namespaces: set[str] = set()  # names that parse_known_args gives them to
        self._dataclasses: set[str] = set()  # names that hold options that a parser of dataclasses has read
        self._evaluating: set[int] = set()
        self._bind(self.tree, None, True)
        self._parse_options()
        self.calls: list[Call] = list(self._calls(self.tree.body, None))

    # -- names ---------------------------------------------------------------------------------------------------------

    def _bind(self, node: ast.AST, scope: Scope | None, sure: bool) -> None:
        """`sure`: it is no branch that might not be taken."""
        for child in ast.iter_child_nodes(node):
            self.scopes[id(child)] = scope
            inner, surely = scope, sure
            if isinstance(child, ast.Import | ast.ImportFrom):
                base = f"{child.module}." if isinstance(child, ast.ImportFrom) and child.module else ""
                for alias in child.names:
                    local = alias.asname or (alias.name if base else alias.name.partition(".")[0])
                    self.imports[local] = f"{base}{alias.name}" if base or alias.asname else local
            elif isinstance(child, ast.ClassDef):
                self.classes[child.name] = child
            elif isinstance(child, Scope):
                if not isinstance(child, ast.Lambda):
                    self.functions[child.name] = child
                inner = child
                for argument in (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs):
                    self._add(argument.arg, inner, None)
                surely = True
            elif isinstance(child, ast.If) and "__name__" not in ast.unparse(child.test):
                surely = False
            self._assigned(child, scope, sure)
            self._bind(child, inner, surely)

    def _assigned(self, node: ast.AST, scope: Scope | None, sure: bool) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, node.value, scope, sure)
                if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(".parse_known_args"):
                    self._namespaces.add(ast.unparse(getattr(target, "elts", [target])[0]))
                if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(_PARSERS):
                    self._dataclasses |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._target(node.target, node.value, scope, sure)
        elif isinstance(node, ast.AugAssign | ast.For | ast.comprehension | ast.NamedExpr):
            self._target(node.target, None, scope, sure)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            self._target(node.func.value, None, scope, sure)  # a mapping or list that is not what it was
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._target(node.optional_vars, node.context_expr, scope, sure)

    def _target(self, target: ast.expr, value: ast.expr | None, scope: Scope | None, sure: bool) -> None:
        if isinstance(target, ast.Name):
            self._add(target.id, scope, value)
            if not sure:  # what it holds afterwards is not known
                self._add(target.id, scope, None)
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            same = len(values) == len(target.elts)
            for index, inner in enumerate(target.elts):
                self._target(inner, values[index] if same else None, scope, sure)

        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self._add(target.value.id, scope, None)
        elif isinstance(target, ast.Attribute):
            self._set_later.add(ast.unparse(target))

    def _add(self, name: str, scope: Scope | None, value: ast.expr | None) -> None:
        self.bindings.setdefault((id(scope), name), []).append(value)

    def bound(self, node: ast.Name, last: bool = False) -> ast.expr | None:
        """The one expression that a name stands for; `last`: the latest before this place. None: not known."""
        scope = self.scopes.get(id(node))
        while True:
            values = self.bindings.get((id(scope), node.id))
            if values is not None:
                if last:
                    before = [v for v in values if v is not None and v.lineno <= node.lineno and not _within(node, v)]
                    return before[-1] if before else None
                return values[0] if len(values) == 1 else None
            if scope is None:
                return None
            scope = self.scopes.get(id(scope))

    def origin_of(self, node: ast.expr) -> str:
        """A dotted name with what it was imported from: transformers.Trainer."""
        text = ast.unparse(node)
        first, dot, rest = text.partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}"

    # -- values --------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """Errors: `Unknown`."""
        if id(node) in self._evaluating:
            raise Unknown
        self._evaluating.add(id(node))
        try:
            return self._value(node)
        except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, SyntaxError, MemoryError):
            raise Unknown from None
        finally:
            self._evaluating.discard(id(node))

    def known(self, node: ast.expr | None, otherwise: Any = None) -> Any:
        """The value, or `otherwise` where it is not known."""
        try:
            return otherwise if node is None else self.value(node)
        except Unknown:
            return otherwise

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            whole: dict[Any, Any] = {}
            for key, value in zip(node.keys, node.values, strict=True):
                whole |= self.value(value) if key is None else {self.value(key): self.value(value)}
            return whole
        if isinstance(node, ast.UnaryOp):
            inner = self.value(node.operand)
            return not inner if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
        if isinstance(node, ast.BoolOp):
            return self._of_several(node)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(p.value if isinstance(p, ast.FormattedValue) else p)) for p in node.values)
        if isinstance(node, ast.Subscript):
            return self.value(node.value)[self.value(node.slice)]
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in FUNCTIONS:
            named = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
            return FUNCTIONS[name](*(self.value(each) for each in node.args), **named)
        raise Unknown

    def _of_several(self, node: ast.BoolOp) -> Any:
        """`a and b` and `a or b`; one that decides it is enough."""
        decisive = isinstance(node.op, ast.Or)
        values = [self.known(each, Unknown) for each in node.values]
        for value in values:
            if value is not Unknown and bool(value) is decisive:
                return value
        if Unknown in values:
            raise Unknown
        return values[-1]

    def _compared(self, node: ast.Compare) -> bool:
        left, right = self.value(node.left), self.value(node.comparators[0])
        return bool(COMPARISONS[type(node.ops[0])](left, right))

    def _named(self, node: ast.Name) -> Any:
        if node.id == "__name__":
            return "__main__"
        if self.started is not None and self._is_argument(node, self.started):
            return self._default(self.started, node.id)
        if (value := self.bound(node)) is None:
            raise Unknown
        return self.value(value)

    def _is_argument(self, node: ast.Name, function: Scope) -> bool:
        scope = self.scopes.get(id(node))
        return scope is function and self.bindings.get((id(function), node.id)) == [None]

    def _default(self, function: Scope, name: str) -> Any:
        if name in self.options:
            return self.options[name]
        arguments = function.args.args
        given = dict(zip([a.arg for a in arguments[::-1]], function.args.defaults[::-1], strict=False))
        if name not in given:
            raise Unknown
        return self.value(given[name])

    def _attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node) in self._set_later:
            raise Unknown
        origin = self.origin_of(node)
        if origin.startswith("torch.") and node.attr in DTYPES:
            return DTYPES[node.attr]
        if origin.split(".")[-2].endswith(ENUMERATIONS):
            return node.attr.lower()
        if isinstance(node.value, ast.Name) and node.value.id in self._dataclasses:
            return self._of_dataclasses(node.attr)
        if isinstance(node.value, ast.Name):
            holder = self.bound(node.value)
            if self._is_options(node.value, holder):
                return self._parsed[node.attr]
            name = ast.unparse(holder.func) if isinstance(holder, ast.Call) else node.value.id
            if name in self.classes:
                return self._of_class(self.classes[name], node.attr, holder)
        raise Unknown

    def _of_dataclasses(self, name: str) -> Any:
        """What the command line gives, else the default of the script's own dataclass."""
        if name in self.options:
            return self.options[name]
        for kind in self.classes.values():
            if any(isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == name for line in kind.body):
                return self._of_class(kind, name, None)
        raise Unknown

    def _is_options(self, name: ast.Name, holder: ast.expr | None) -> bool:
        """Whether a name holds what argparse has read; a function's argument of such a name does, too."""
        if name.id in self._namespaces:
            return True
        if isinstance(holder, ast.Call):
            made = self.functions.get(ast.unparse(holder.func))  # a function of the script's own that reads them
            inside = made is not None and (
                ".parse_args(" in (text := ast.unparse(made)) or ".parse_known_args(" in text
            )
            return inside or ast.unparse(holder.func).endswith(".parse_args")
        scoped = [v for (_, n), values in self.bindings.items() if n == name.id for v in values if v is not None]
        return len(scoped) == 1 and isinstance(scoped[0], ast.Call) and self._is_options(name, scoped[0])

    def _of_class(self, kind: ast.ClassDef, name: str, holder: ast.expr | None) -> Any:
        """A default of a dataclass, or an attribute of a class."""
        if isinstance(holder, ast.Call):
            given = {word.arg: word.value for word in holder.keywords}
            if name in given:
                return self.value(given[name])
            if holder.args or None in given:
                raise Unknown
        for line in kind.body:
            target = line.target if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [None])[0]
            if isinstance(target, ast.Name) and target.id == name and getattr(line, "value", None) is not None:
                value = line.value  # type: ignore[attr-defined]
                if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                    value = next((w.value for w in value.keywords if w.arg == "default"), value)
                return self.value(value)
        raise Unknown

    def _parse_options(self) -> None:
        """Defaults of argparse, with what the command line gives instead; fire's are those of its function."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) in ("fire.Fire", "Fire") and node.args and isinstance(node.args[0], ast.Name):
                self.started = self.functions.get(node.args[0].id)
            if not ast.unparse(node.func).endswith(".add_argument"):
                continue
            words = [self.known(each) for each in node.args]
            flags = [word for word in words if isinstance(word, str) and word.startswith("-")]
            if not flags:
                continue
            named = {word.arg: word.value for word in node.keywords}
            longest = max(flags, key=len).lstrip("-").replace("-", "_")
            name = self.known(named.get("dest"), longest)
            if longest in self.options:
                self._parsed[name] = self.options[longest]
                continue
            action = self.known(named.get("action"))
            if "default" not in named and action in ("store_true", "store_false"):
                self._parsed[name] = action == "store_false"
            elif self.known(named.get("required")) is not True:
                try:
                    self._parsed[name] = self.value(named["default"]) if "default" in named else None
                except Unknown:
                    continue

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _calls(self, body: list[Any], condition: str | None) -> Iterator[Call]:
        """In their order, without those of branches that are known not to be taken."""
        for node in body:
            if isinstance(node, ast.If):
                yield from self._calls([node.test], condition)
                taken = self.known(node.test, Unknown)
                unsure = condition or (f"if {shown(node.test)}" if taken is Unknown else None)
                if taken is Unknown or taken:
                    yield from self._calls(node.body, unsure)
                if taken is Unknown or not taken:
                    yield from self._calls(node.orelse, unsure)
                continue
            yield from self._calls(list(ast.iter_child_nodes(node)), condition)
            if isinstance(node, ast.Call):
                origin = self.origin_of(node.func)
                yield Call(node, origin.rpartition(".")[2], origin, condition)

    def arguments(self, call: Call, names: tuple[str, ...] = ()) -> Arguments:
        """`names`: of its positional arguments."""
        given = Arguments()
        words: list[tuple[str | None, ast.expr]] = list(zip(names, call.node.args, strict=False))
        words += [(word.arg, word.value) for word in call.node.keywords]
        for name, node in words:
            if name is None:
                whole = self.known(node)
                if isinstance(whole, dict):
                    given.known |= whole
                else:
                    given.more.append(f"**{shown(node)}")
                continue
            given.nodes[name] = node
            try:
                given.known[name] = self.value(node)
            except Unknown:
                given.unknown[name] = shown(node)
        return given


def _within(inner: ast.AST, outer: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))
