"""A Python script, read without running it: its calls, their arguments, the values of its names.

In: the text, and options of a command line. Out: a `Script`. A value is known if it is a literal, a name that is
assigned once, a default of argparse or of a dataclass, or computed from such values by operators and a few plain
functions; anything else is `Unknown`.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError
from lockstep.lab.import_config import bound_names, commands, constant_files, enumerations, parameters
from lockstep.lab.import_config.collected_values import COLLECTING, OF_MAPPINGS, collected, entries_of
from lockstep.lab.import_config.parsed_options import options_of, record_assigned, record_set, set_elsewhere
from lockstep.lab.import_config.value_bounds import FAULTS, affordable, bounded
from lockstep.lab.import_config.value_bounds import Unknown as Unknown

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_MOST = 10_000  # statements of a script: the time to read it grows with their square
LONGEST = 76  # characters of a piece of code in a message


@dataclass(frozen=True)
class Call:
    """A call in the script."""

    node: ast.Call
    name: str  # last part of its name: from_pretrained
    origin: str  # imported name: transformers.AutoTokenizer.from_pretrained
    condition: str | None = None  # code of the condition, if its value is unknown

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def receiver(self) -> ast.expr | None:
        """The object that a method is called on."""
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    def __str__(self) -> str:
        return f"line {self.line}: {code_of(self.node)}"


@dataclass(frozen=True)
class Assignment:
    """One target of an assignment and its value (None: an unknown part of a value)."""

    node: ast.Assign | ast.AnnAssign
    target: ast.expr
    value: ast.expr | None
    condition: str | None  # code of the condition, if its value is unknown

    def __str__(self) -> str:
        return f"line {self.node.lineno}: {code_of(self.node)}"


@dataclass
class Arguments:
    """Arguments of a call: known values by name, and the code of the others."""

    known: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, ast.expr] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)  # **mappings with unknown keys


class _AsWritten(ast.NodeTransformer):
    """Restores names and calls that inlining has replaced."""

    def visit(self, node: ast.AST) -> Any:
        written = getattr(node, "written", None)
        return self.generic_visit(node) if written is None else ast.Name(written, ast.Load())


def code_of(node: ast.AST) -> str:
    """Code of a node on one line, with the script's own names even in an inlined tree."""
    if any(getattr(each, "written", None) is not None for each in ast.walk(node)):
        names = isinstance(node, ast.Name | ast.Constant)
        node = _AsWritten().visit(deepcopy(node)) if names else _AsWritten().generic_visit(deepcopy(node))
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class Script:
    """A script and its names. `options`: command-line options by name. `tree`: the parsed text, if available. Errors:
    `RunError` if the text is not valid Python."""

    def __init__(
        self, path: Path, text: str, options: Mapping[str, Any] | None = None, tree: ast.Module | None = None
    ) -> None:
        self.path, self.text, self.options = path, text, dict(options or {})
        try:
            self.tree = _parsed(text, path) if tree is None else tree
            self.constants = constant_files.write_out(self.tree, path) if tree is None else []  # imports that are read
            command = commands.write_calls(self.tree, self.options)
        except SyntaxError as error:
            raise RunError("LS8230", f"--from: {path}, line {error.lineno}: {error.msg}") from None
        except ValueError as error:  # for example a NUL
            raise RunError("LS8551", f"--from: {path} cannot be parsed as Python: {error}") from None
        if (count := sum(isinstance(each, ast.stmt) for each in ast.walk(self.tree))) > _MOST:
            raise RunError(
                "LS8553",
                f"--from: {path} has {count:,} statements, and init reads at most {_MOST:,}: remove code that does not "
                "train, or write the run file without --from",
            )
        self.imports: dict[str, str] = {}
        self.functions: dict[str, Scope] = {}
        self.namesakes: dict[str, list[Any]] = {}  # name -> all functions of this name that are not methods
        self.ambiguous: set[str] = set()  # functions whose name is bound again in the same scope
        self.classes: dict[str, ast.ClassDef] = {}
        self.bindings: dict[tuple[int, str], list[ast.expr | None]] = {}  # scope and name -> values; None: unknown
        self.scopes: dict[int, Scope | None] = {}  # node -> its enclosing function
        self.order: dict[int, int] = {}  # node -> its position in the tree
        self.set_later: set[str] = set()  # attributes that the script sets: args.lr
        self._parsed: dict[str, Any] = {}  # options of argparse and their defaults
        self._declared: set[str] = set()  # options as a command line spells them
        self._namespaces: set[str] = set()  # names that hold parsed options
        self.dataclasses: set[str] = set()  # names that hold options parsed into dataclasses
        self.holders: set[str] = set()  # names that are assigned parsed options, in any function
        self.settings: set[str] = set()  # names that hold parsed TrainingArguments
        self.replaced: set[str] = set()  # names of parsed options that are assigned something else, too
        self.opaque: set[str] = set()  # names whose attributes are set in a way that is not followed
        self._evaluating: set[int] = set()
        self._values: dict[int, Any] = {}  # what was evaluated: a name that is used twice is not evaluated twice
        self.here: dict[str, Any] | None = None  # at one place: name or args.name -> its value, or `Unknown`
        self._bind(self.tree, None, True)
        bound_names.record_elsewhere(self)
        parsed = options_of(self)
        self._parsed, self._declared = parsed.values, parsed.declared
        self._declared |= command or set()
        parameters.bind(self)
        self._values.clear()  # values cached before the options were known
        self.calls: list[Call] = list(self._calls(self.tree.body, None))

    # -- names ---------------------------------------------------------------------------------------------------------

    def _bind(self, node: ast.AST, scope: Scope | None, sure: bool) -> None:
        """Record the bindings in a node. `sure`: not in a branch that may be skipped."""
        for child in ast.iter_child_nodes(node):
            self.scopes[id(child)] = scope
            self.order[id(child)] = len(self.order)
            inner, surely = scope, sure
            if isinstance(child, ast.Import | ast.ImportFrom):
                base = f"{child.module}." if isinstance(child, ast.ImportFrom) and child.module else ""
                for alias in child.names:
                    local = alias.asname or (alias.name if base else alias.name.partition(".")[0])
                    self.imports[local] = f"{base}{alias.name}" if base or alias.asname else local
            elif isinstance(child, ast.ClassDef):
                self.classes[child.name] = child
            elif isinstance(child, Scope):
                if isinstance(node, ast.ClassDef) and not isinstance(child, ast.Lambda):
                    self.functions.setdefault(child.name, child)
                elif not isinstance(child, ast.Lambda):
                    self.functions[child.name] = child
                inner, more = child, filter(None, (child.args.vararg, child.args.kwarg))
                for argument in (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs, *more):
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
                record_assigned(self, target, node.value, scope)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._target(node.target, node.value, scope, sure)
        elif isinstance(node, ast.AugAssign | ast.For | ast.comprehension | ast.NamedExpr):
            self._target(node.target, None, scope, sure)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in bound_names.CHANGING
        ):
            self._target(
                ast.Subscript(node.func.value, ast.Constant(0)), None, scope, sure
            )  # a mapping that is changed
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            record_set(self, node)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._target(node.optional_vars, node.context_expr, scope, sure)

    def _target(self, target: ast.expr, value: ast.expr | None, scope: Scope | None, sure: bool) -> None:
        if isinstance(target, ast.Starred):
            target, value = target.value, None
        if isinstance(target, ast.Name):
            self._add(target.id, scope, value)
            if not sure:  # its later value is unknown
                self._add(target.id, scope, None)
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            same = len(values) == len(target.elts) and not any(isinstance(v, ast.Starred) for v in values)
            for index, inner in enumerate(target.elts):
                self._target(inner, values[index] if same else None, scope, sure)
        elif isinstance(target, ast.Subscript):
            holder = target.value
            while isinstance(holder, ast.Subscript):  # settings["optimizer"]["lr"] = ...
                holder = holder.value
            if isinstance(holder, ast.Attribute) and holder.attr == "__dict__":
                self.opaque.add(ast.unparse(holder.value))
            elif isinstance(holder, ast.Call) and ast.unparse(holder.func) == "vars" and holder.args:
                self.opaque.add(ast.unparse(holder.args[0]))
            self._target(holder, None, scope, sure)
        elif isinstance(target, ast.Attribute):
            self.set_later.add(ast.unparse(target))

    def _add(self, name: str, scope: Scope | None, value: ast.expr | None) -> None:
        scope = None if "." in name else scope  # an attribute in inlined code
        self.bindings.setdefault((id(scope), name), []).append(value)

    def bound(self, node: ast.Name, last: bool = False) -> ast.expr | None:
        """Return the only expression assigned to a name; `last`: the last one before this line. None if unknown."""
        scope = self.scopes.get(id(node))
        while True:
            values = self.bindings.get((id(scope), node.id))
            if values is not None:
                if last:
                    before = [v for v in values if v is not None and self._is_before(v, node)]
                    return before[-1] if before else None
                return values[0] if len(values) == 1 else None
            if scope is None:
                return None
            scope = self.scopes.get(id(scope))

    def _is_before(self, value: ast.expr, node: ast.expr) -> bool:
        places = [self.order.get(id(each)) for each in (value, node)]
        known = places[0] is not None and places[1] is not None
        earlier = self.order[id(value)] < self.order[id(node)] if known else value.lineno <= node.lineno
        return earlier and not any(each is node for each in ast.walk(value))

    def origin_of(self, node: ast.expr) -> str:
        """Return a dotted name with its import: transformers.Trainer."""
        text = ast.unparse(node)
        first, dot, rest = text.partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}"

    # -- values --------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression. Errors: `Unknown`, also for a value larger than any setting."""
        if id(node) in self._evaluating:
            raise Unknown
        if id(node) not in self._values:
            self._evaluating.add(id(node))
            try:
                self._values[id(node)] = bounded(self._value(node))
            except (*FAULTS, Unknown):
                self._values[id(node)] = Unknown
            finally:
                self._evaluating.discard(id(node))
        value = self._values[id(node)]
        if value is Unknown:
            raise Unknown
        return copy(value)

    def known(self, node: ast.expr | None, otherwise: Any = None) -> Any:
        """Return the value of an expression, or `otherwise` if it is unknown."""
        try:
            return otherwise if node is None else self.value(node)
        except Unknown:
            return otherwise

    def known_here(self, node: ast.expr) -> Any:
        """Return the value of an expression with the values of names in `here`, or `Unknown`."""
        before, self._values = self._values, {}
        try:
            return self.known(node, Unknown)
        finally:
            self._values = before

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
            return _UNARY[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.BinOp):
            return self._of_two(node)
        if isinstance(node, ast.BoolOp):
            return self._of_several(node)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._formatted, node.values))
        if isinstance(node, ast.Subscript):
            return self.value(node.value)[self.value(node.slice)]
        if isinstance(node, ast.Call | ast.DictComp | ast.ListComp):
            return self._computed(node) if isinstance(node, ast.Call) else collected(self, node)
        raise Unknown

    def _of_two(self, node: ast.BinOp) -> Any:
        if isinstance(node.op, ast.Mod) and self.value(node.right) == 1:
            return 0  # of a whole number
        if type(node.op) not in OPERATORS:
            raise Unknown
        left, right = self.value(node.left), self.value(node.right)
        affordable(node.op, left, right)
        return OPERATORS[type(node.op)](left, right)

    def _computed(self, node: ast.Call) -> Any:
        """Evaluate a call of a plain function, or of a method of a text."""
        if (name := ast.unparse(node.func)) in FUNCTIONS and name not in self.functions:
            keywords = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
            return FUNCTIONS[name](*(self.value(each) for each in node.args), **keywords)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _OF_TEXTS:
            text = self.value(node.func.value)
            if isinstance(text, str) and not node.keywords:
                return getattr(text, node.func.attr)(*map(self.value, node.args))
        if isinstance(node.func, ast.Attribute) and node.func.attr in OF_MAPPINGS and not node.args:
            return entries_of(self.value(node.func.value), node.func.attr)
        raise Unknown

    def _formatted(self, part: ast.expr) -> str:
        """Evaluate a part of an f-string."""
        if not isinstance(part, ast.FormattedValue):
            return str(self.value(part))
        if part.conversion != -1:  # !r, !s or !a
            raise Unknown
        form = "" if part.format_spec is None else self.value(part.format_spec)
        if any(len(digits) > 2 for digits in re.findall(r"\d+", form)):  # a width of millions
            raise Unknown
        return format(self.value(part.value), form)

    def _of_several(self, node: ast.BoolOp) -> Any:
        """Evaluate `a and b` or `a or b`; one deciding operand is enough."""
        decisive = isinstance(node.op, ast.Or)
        values = [self.known(each, Unknown) for each in node.values]
        for value in values:
            if value is not Unknown and bool(value) is decisive:
                return value
        if Unknown in values:
            raise Unknown
        return values[-1]

    def _compared(self, node: ast.Compare) -> bool:
        enumerations.refuse_text(self, node)
        left, right = self.value(node.left), self.value(node.comparators[0])
        return bool(COMPARISONS[type(node.ops[0])](left, right))

    def _named(self, node: ast.Name) -> Any:
        if node.id == "__name__":
            return "__main__"
        if self.here is not None and node.id in self.here:
            if (here := self.here[node.id]) is Unknown:
                raise Unknown
            return here
        if (value := self.bound(node)) is None:
            raise Unknown
        return self.value(value)

    def _attribute(self, node: ast.Attribute) -> Any:
        text = ast.unparse(node)
        if self.here is not None and text in self.here:
            if (here := self.here[text]) is Unknown:
                raise Unknown
            return here
        if text in self.set_later and self.here is None:
            raise Unknown
        if isinstance(node.value, ast.Name) and set_elsewhere(self, node):
            raise Unknown
        origin = self.origin_of(node)
        if origin.startswith("torch.") and node.attr in DTYPES:
            return DTYPES[node.attr]
        if (enumeration := origin.split(".")[-2]).endswith(ENUMERATIONS) and enumeration not in self.classes:
            return node.attr.lower()
        if isinstance(node.value, ast.Name) and node.value.id in self.dataclasses:
            if node.value.id in self.replaced:
                raise Unknown
            return self._of_dataclasses(node.attr)
        if node.attr in enumerations.PARTS and (part := enumerations.part_of(self, node)) is not Unknown:
            return part
        if isinstance(node.value, ast.Name):
            holder = self.bound(node.value)
            if self._is_options(node.value, holder):
                return self._parsed[node.attr]
            name = ast.unparse(holder.func) if isinstance(holder, ast.Call) else node.value.id
            if not isinstance(holder, ast.Call) and any(own == name for _, own in self.bindings):
                raise Unknown  # the name of a class is bound again
            if name in self.classes:
                return self._of_class(self.classes[name], node.attr, holder)
        raise Unknown

    def _of_dataclasses(self, name: str) -> Any:
        """Return an option from the command line, else the default in the script's dataclass."""
        for kind in self.classes.values():
            if any(isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == name for line in kind.body):
                if name not in self.options:
                    return self._of_class(kind, name, None)
                if bound_names.is_set_again(kind, name, self.options[name], True):
                    raise Unknown
        if name in self.options:
            return self.options[name]
        raise Unknown

    def is_option(self, node: ast.Attribute) -> bool:
        """Return whether an attribute is an option that argparse has parsed."""
        return isinstance(node.value, ast.Name) and self._is_options(node.value, self.bound(node.value))

    def is_parsed(self, node: ast.expr) -> bool:
        """Return whether a name holds options that were parsed into a dataclass."""
        return isinstance(node, ast.Name) and node.id in self.dataclasses

    def _is_options(self, name: ast.Name, holder: ast.expr | None) -> bool:
        """Return whether a name holds options parsed by argparse; so does a function argument of the same name."""
        if name.id in self._namespaces:
            return True
        if isinstance(holder, ast.Call):
            maker = self.functions.get(ast.unparse(holder.func))  # a function of the script that parses them
            inside = maker is not None and (
                ".parse_args(" in (text := ast.unparse(maker)) or ".parse_known_args(" in text
            )
            return inside or ast.unparse(holder.func).endswith(".parse_args")
        scoped = [v for (_, n), values in self.bindings.items() if n == name.id for v in values if v is not None]
        return len(scoped) == 1 and isinstance(scoped[0], ast.Call) and self._is_options(name, scoped[0])

    def _of_class(self, kind: ast.ClassDef, name: str, holder: ast.expr | None) -> Any:
        """Return a default of a dataclass, or an attribute of a class."""
        words = holder.keywords if isinstance(holder, ast.Call) else []
        arguments = {word.arg: word.value for word in words}
        value = self.value(arguments[name]) if name in arguments else self._of_line(kind, name, holder, arguments)
        if bound_names.is_set_again(kind, name, value, name in arguments):
            raise Unknown
        return value

    def _of_line(self, kind: ast.ClassDef, name: str, holder: ast.expr | None, arguments: Mapping[Any, Any]) -> Any:
        if isinstance(holder, ast.Call) and (holder.args or None in arguments):
            raise Unknown
        for line in kind.body:
            target = line.target if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [None])[0]
            if isinstance(target, ast.Name) and target.id == name and getattr(line, "value", None) is not None:
                value = line.value  # type: ignore[attr-defined]
                if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                    value = next((w.value for w in value.keywords if w.arg == "default"), value)
                return self.value(value)
        raise Unknown

    def unread_options(self) -> list[str]:
        """Return command-line options that the script's parsers do not declare, if all parsers are known."""
        if self.dataclasses or self._namespaces:
            return []
        return [name for name in self.options if name not in self._declared]

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _calls(self, body: list[Any], condition: str | None) -> Iterator[Call]:
        """Collect calls in order, without branches that are known to be skipped."""
        for node in body:
            if isinstance(node, ast.If):
                yield from self._calls([node.test], condition)
                taken = self.known(node.test, Unknown)
                unsure = condition or (f"if {code_of(node.test)}" if taken is Unknown else None)
                if taken is Unknown or taken:
                    yield from self._calls(node.body, unsure)
                if taken is Unknown or not taken:
                    yield from self._calls(node.orelse, unsure)
                continue
            if isinstance(node, ast.IfExp):
                taken = self.known(node.test, Unknown)
                unsure = condition or (f"if {code_of(node.test)}" if taken is Unknown else None)
                yield from self._calls([node.test], condition)
                parts = ((node.body, taken is Unknown or taken), (node.orelse, taken is Unknown or not taken))
                yield from (call for part, read in parts if read for call in self._calls([part], unsure))
                continue
            yield from self._calls(list(ast.iter_child_nodes(node)), condition)
            if isinstance(node, ast.Call):
                origin = self.origin_of(node.func)
                yield Call(node, origin.rpartition(".")[2], origin, condition)

    def assignments(self, body: list[Any] | None = None, condition: str | None = None) -> Iterator[Assignment]:
        """Yield assignments in order, without branches that are known to be skipped."""
        for node in self.tree.body if body is None else body:
            if isinstance(node, ast.If):
                taken = self.known(node.test, Unknown)
                unsure = condition or (f"if {code_of(node.test)}" if taken is Unknown else None)
                yield from self.assignments(node.body if taken is Unknown or taken else [], unsure)
                yield from self.assignments(node.orelse if taken is Unknown or not taken else [], unsure)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for part, value in _parts(target, node.value):
                        yield Assignment(node, part, value, condition)
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                unsure = condition if isinstance(node, ast.stmt) else condition or "in a branch"
                yield from self.assignments(list(ast.iter_child_nodes(node)), unsure)

    def keywords(self, call: ast.Call) -> list[tuple[str | None, ast.expr]]:
        """Return the keyword arguments of a call, those of `**dict(a=b)` or of a name for it as well; None: unknown."""
        words: list[tuple[str | None, ast.expr]] = []
        for word in call.keywords:
            value = self.bound(word.value) if isinstance(word.value, ast.Name) else word.value
            plain = isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and "dict" not in self.functions
            if word.arg is None and plain and isinstance(value, ast.Call) and not value.args:
                words += [(each.arg, each.value) for each in value.keywords]
            else:
                words.append((word.arg, word.value))
        return words

    def arguments(self, call: Call, names: tuple[str, ...] = ()) -> Arguments:
        """Return the arguments of a call. `names`: of its positional arguments."""
        arguments = Arguments()
        plain = [node for node in call.node.args if not isinstance(node, ast.Starred)]
        starred = [node for node in call.node.args if isinstance(node, ast.Starred)]
        arguments.more += [code_of(node) for node in (*(plain[len(names) :] if names else ()), *starred)]
        words: list[tuple[str | None, ast.expr]] = list(zip(names, plain, strict=False))
        words += self.keywords(call.node)
        for name, node in words:
            if name is None:
                whole = self.known(node)
                if isinstance(whole, dict):
                    arguments.known |= whole
                else:
                    arguments.more.append(f"**{code_of(node)}")
                continue
            arguments.nodes[name] = node
            try:
                arguments.known[name] = self.value(node)
            except Unknown:
                arguments.unknown[name] = code_of(node)
        return arguments


OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Any] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
FUNCTIONS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "len": len, "max": max, "min": min}
_OF_TEXTS = ("split", "rsplit", "lower", "upper", "strip", "startswith", "endswith", "replace", "isdigit")
FUNCTIONS |= COLLECTING
FUNCTIONS |= {"Path": str, "pathlib.Path": str, "os.path.join": lambda *parts: "/".join(parts), "dict": dict}
ENUMERATIONS = ("Strategy", "Type", "Names")  # IntervalStrategy.EPOCH means epoch
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}
COMPARISONS: dict[type, Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _parsed(text: str, path: Path) -> ast.Module:
    """Return the tree of a text that Python's compiler takes as well, which finds more than its parser. Errors: those
    of both."""
    tree = ast.parse(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(text, str(path), "exec", dont_inherit=True)
    return tree


def _parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Split `a, b = 1, 2` into its targets, each with its value."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    values: list[Any] = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    whole = len(values) == len(target.elts) and not any(isinstance(each, ast.Starred) for each in values)
    for part, own in zip(target.elts, values if whole else [None] * len(target.elts), strict=True):
        if own is None:
            yield part, None
        else:
            yield from _parts(part, own)
