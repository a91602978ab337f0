"""Inline a training loop that is spread over methods and closures.

In: the tree of a script that computes gradients in a method, or in a function called by another function's loop, or
that creates its Trainer in a method. Out: an equivalent tree. Attributes of classes that are instantiated once become
dotted names (`trainer.model`); calls of the script's own methods and functions become their statements, with their
original lines. Anything that cannot be inlined stays a call, so that a reader of the tree sees every statement that
runs.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
LARGEST = 20_000  # maximum number of statements after inlining
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_UNSURE = ast.BoolOp | ast.IfExp | _COMPREHENSIONS  # nodes whose parts may be evaluated never, or several times


class NotInlined(Exception):
    """The script cannot be inlined, or would become too large."""


def needs_inlining(tree: ast.Module) -> bool:
    """Return whether backward() is called in a method, or in a function without a loop around it."""
    for function, method in _functions_of(tree, False):
        for node in _own(function.body):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "backward":
                loops = [each for each in _own(function.body) if isinstance(each, ast.For | ast.While)]
                if method or not any(node in ast.walk(loop) for loop in loops):
                    return True
    return False


def holds_trainer(tree: ast.Module) -> bool:
    """Return whether a Trainer is created in a method of a class."""
    calls = (each for function, method in _functions_of(tree, False) if method for each in _own(function.body))
    return any(isinstance(each, ast.Call) and ast.unparse(each.func).endswith("Trainer") for each in calls)


def written_out(tree: ast.Module, trains: str = "backward") -> ast.Module | None:
    """Return the inlined tree, or None if the script cannot be inlined. `trains`: name of the method that trains."""
    scopes = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, Function | ast.ClassDef))]
    if any(isinstance(n, ast.Match) for n in ast.walk(tree)) or any(map(_says_twice, scopes)):
        return None
    writer = _Writer(deepcopy(tree))
    try:
        body = writer.module()
    except (NotInlined, RecursionError):
        return None
    nodes = [n for line in body for n in ast.walk(line)]
    if any(isinstance(n, ast.Name) and n.id in writer.instances for n in nodes):
        return None  # an object is passed on as a whole, to where its methods are not followed
    if not any(isinstance(n, ast.Call) and _method_of(n) == trains for n in nodes):
        return None  # nothing calls the function that trains
    return ast.fix_missing_locations(ast.Module(_without_copies(body), []))


def _method_of(call: ast.Call) -> str:
    """Return the last name of what is called, also of an attribute that was written out: `exp.trainer.train`."""
    return ast.unparse(call.func).rpartition(".")[2]


@dataclass
class _Frame:
    """The names of an inlined function."""

    outer: _Frame | None = None
    names: dict[str, ast.expr] = field(default_factory=dict)  # name -> the expression that replaces it
    functions: dict[str, _Closure] = field(default_factory=dict)

    def name(self, text: str) -> ast.expr | None:
        return self.names.get(text, self.outer.name(text) if self.outer is not None else None)

    def function(self, text: str) -> _Closure | None:
        if text in self.functions:
            return self.functions[text]
        return self.outer.function(text) if self.outer is not None and text not in self.names else None


@dataclass(frozen=True)
class _Closure:
    """A function, its enclosing names, and the object bound to its first argument."""

    node: Function
    frame: _Frame
    instance: str | None = None


class _Writer:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        self.taken: set[str] = set()  # names already used in the function that receives the statements
        self.classes = _classes(tree)
        self.instances: dict[str, ast.ClassDef] = {}  # name of an object -> its class
        self.same: dict[str, str] = {}  # alias -> object
        self.lifted: dict[str, ast.stmt] = {}  # functions that stay functions
        self.stack: list[Function] = []
        self.count = 0
        self.stored = Counter(n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_store(n))

    def module(self) -> list[ast.stmt]:
        top = _Frame()
        for line in self.tree.body:
            if isinstance(line, Function):
                top.functions[line.name] = _Closure(line, top)
        body = [each for line in self.tree.body for each in self.statement(line, top)]
        return [*body, *self.lifted.values()]

    # -- statements ----------------------------------------------------------------------------------------------------

    def statement(self, node: ast.stmt, frame: _Frame) -> list[ast.stmt]:
        self.count += 1
        if self.count > LARGEST:
            raise NotInlined
        out: list[ast.stmt] = []
        if isinstance(node, Function):
            frame.functions.setdefault(node.name, _Closure(node, frame))
            return [self._registered(node, each, frame) for each in node.decorator_list if _registers(each)]
        if isinstance(node, ast.ClassDef):
            return [] if node.name in self.classes else [node]
        if isinstance(node, ast.Global | ast.Nonlocal):
            return []
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return self._assigned(node, frame)
        new = _shallow(node)
        if isinstance(node, ast.Expr):
            new.value = self.expression(node.value, frame, out)
            return out if isinstance(new.value, ast.Name | ast.Constant) and out else [*out, new]
        for name, value in ast.iter_fields(node):
            setattr(new, name, self._part(node, name, value, frame, out))
        return [*out, new]

    def _registered(self, node: Any, decorator: ast.expr, frame: _Frame) -> ast.stmt:
        """Return the call that a decorator is, for `@optimizer.register_step_post_hook` of a function that is gone."""
        call = ast.Call(self.expression(decorator, frame, None), [ast.Constant(node.name)], [])
        vars(call)["written"] = ast.unparse(decorator)
        return _placed(ast.Expr(call), decorator)

    def _part(self, node: ast.stmt, name: str, value: Any, frame: _Frame, out: list[ast.stmt]) -> Any:
        """Inline a field of a statement. Its expressions are evaluated before the statement, except the test of
        `while`."""
        once = [] if isinstance(node, ast.While) else out
        hoisted = None if isinstance(node, ast.While) else once
        if isinstance(value, ast.expr):
            return self.expression(value, frame, hoisted)
        if not isinstance(value, list):
            return value
        parts: list[Any] = []
        for each in value:
            if isinstance(each, ast.stmt):
                parts += self.statement(each, frame)
            elif isinstance(each, ast.expr):
                parts.append(self.expression(each, frame, hoisted))
            elif isinstance(each, ast.withitem | ast.ExceptHandler | ast.match_case):
                new = _shallow(each)
                for inner, own in ast.iter_fields(each):
                    setattr(new, inner, self._part(node, inner, own, frame, out))
                parts.append(new)
            else:
                parts.append(each)
        return parts or ([ast.Pass(lineno=node.lineno, col_offset=0)] if name == "body" else parts)

    def _assigned(self, node: ast.Assign | ast.AnnAssign, frame: _Frame) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        targets = [
            self.expression(t, frame, None) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        single = targets[0] if len(targets) == 1 else None
        kind = self._class_of(node.value, frame)
        if kind is not None and isinstance(single, ast.Name):
            self._make(kind, node.value, single.id, frame, out)  # type: ignore[arg-type]
            return out
        value = self.expression(node.value, frame, out)  # type: ignore[arg-type]
        if isinstance(single, ast.Name) and isinstance(value, ast.Name) and value.id in self.instances:
            if "." in single.id and self.stored[single.id.rpartition(".")[2]] != 1:
                raise NotInlined  # it may be another object at run time
            self.same[single.id] = value.id
            return out
        pairs = _pairs(single, value)
        if pairs is not None:
            by_call = isinstance(node.value, ast.Call)
            return [*out, *(_copied(t, v, node, by_call or "." in t.id) for t, v in pairs)]
        new = _shallow(node)
        new.value = value
        if isinstance(node, ast.Assign):
            new.targets = targets
        else:
            new.target = targets[0]
            new.simple = 0
        return [*out, new]

    # -- expressions ---------------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr, frame: _Frame, out: list[ast.stmt] | None) -> ast.expr:
        """Inline calls in an expression. `out`: receives the statements of inlined calls; None if no call may be
        inlined here."""
        if isinstance(node, ast.Name):
            return self._name(node, frame)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, frame, out)
        if isinstance(node, ast.Call):
            return self._call(node, frame, out)
        if isinstance(node, ast.Lambda):
            inner = _Frame(frame, {a.arg: ast.Name(a.arg, ast.Load()) for a in _arguments(node.args)})
            new = _shallow(node)
            new.body = self.expression(node.body, inner, None)
            return new
        if isinstance(node, _COMPREHENSIONS):
            names = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
            frame = _Frame(frame, {name: ast.Name(name, ast.Load()) for name in names})
        inside = None if isinstance(node, _UNSURE) else out
        new = _shallow(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(new, name, self.expression(value, frame, inside))
            elif isinstance(value, list):
                setattr(new, name, [self._inner(each, frame, inside) for each in value])
        return new

    def _inner(self, node: Any, frame: _Frame, out: list[ast.stmt] | None) -> Any:
        if isinstance(node, ast.expr):
            return self.expression(node, frame, out)
        if isinstance(node, ast.keyword | ast.comprehension):
            new = _shallow(node)
            for name, value in ast.iter_fields(node):
                if isinstance(value, ast.expr):
                    setattr(new, name, self.expression(value, frame, out))
                elif isinstance(value, list):
                    setattr(new, name, [self.expression(each, frame, out) for each in value])
            return new
        return node

    def _name(self, node: ast.Name, frame: _Frame) -> ast.expr:
        closure = frame.function(node.id) if isinstance(node.ctx, ast.Load) else None
        if closure is not None:
            return self._lift(closure, node)
        replacement = frame.name(node.id)
        if replacement is None:
            return _shallow(node) if node.id not in self.same else _placed(_name_of(self.same[node.id]), node, node.id)
        new = _placed(deepcopy(replacement), node, node.id)
        if isinstance(new, ast.Name):
            new.id = self.same.get(new.id, new.id)
            new.ctx = node.ctx
        return new

    def _attribute(self, node: ast.Attribute, frame: _Frame, out: list[ast.stmt] | None) -> ast.expr:
        holder = self.expression(node.value, frame, out)
        if isinstance(holder, ast.Name) and holder.id in self.instances:
            method = self._method(holder.id, node.attr)
            if method is not None and isinstance(node.ctx, ast.Load):
                return self._lift(method, node)
            text = f"{holder.id}.{node.attr}"
            return _placed(ast.Name(self.same.get(text, text), node.ctx), node, ast.unparse(node))
        new = _shallow(node)
        new.value = holder
        return new

    def _call(self, node: ast.Call, frame: _Frame, out: list[ast.stmt] | None) -> ast.expr:
        if out is not None and (kind := self._class_of(node, frame)) is not None:
            return _placed(_name_of(self._make(kind, node, None, frame, out)), node)
        closure = self._callee(node, frame, out)
        new = _shallow(node)
        new.args = [self.expression(each, frame, out) for each in node.args]
        new.keywords = [self._inner(each, frame, out) for each in node.keywords]
        if closure is not None and out is not None and self._can_inline(closure, new):
            result = self._inline(closure, new, out)
            vars(result)["written"] = ast.unparse(node)
            return result
        new.func = self.expression(node.func, frame, out)
        return new

    def _callee(self, node: ast.Call, frame: _Frame, out: list[ast.stmt] | None) -> _Closure | None:
        if isinstance(node.func, ast.Name):
            return frame.function(node.func.id)
        if not isinstance(node.func, ast.Attribute):
            return None
        if isinstance(node.func.value, ast.Call):  # Trainer(config).train()
            if self._class_of(node.func.value, frame) is None or out is None:
                return None
            node.func.value = self.expression(node.func.value, frame, out)
        holder = self.expression(node.func.value, frame, None)
        if isinstance(holder, ast.Name) and holder.id in self.instances:
            return self._method(holder.id, node.func.attr)
        return None

    # -- classes -------------------------------------------------------------------------------------------------------

    def _class_of(self, node: ast.expr | None, frame: _Frame) -> ast.ClassDef | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and frame.name(node.func.id) is None:
            return self.classes.get(node.func.id)
        return None

    def _lineage(self, kind: ast.ClassDef) -> list[ast.ClassDef]:
        """A class and its base classes in the script, nearest first."""
        bases = [self.classes[b.id] for b in kind.bases if isinstance(b, ast.Name) and b.id in self.classes]
        return [kind, *(each for base in bases for each in self._lineage(base))]

    def _method(self, instance: str, name: str) -> _Closure | None:
        for kind in self._lineage(self.instances[instance]):
            for line in kind.body:
                if isinstance(line, Function) and line.name == name:
                    return _Closure(line, self._top(), None if _is_static(line) else instance)
        return None

    def _top(self) -> _Frame:
        top = _Frame()
        for line in self.tree.body:
            if isinstance(line, Function):
                top.functions[line.name] = _Closure(line, top)
        return top

    def _make(self, kind: ast.ClassDef, call: ast.expr, name: str | None, frame: _Frame, out: list[ast.stmt]) -> str:
        """Inline the creation of an object: the attributes of its class, then the statements of its `__init__`."""
        instance = name or self._unique(kind.name.lower())
        assert isinstance(call, ast.Call)
        self.instances[instance] = kind
        for each in reversed(self._lineage(kind)):
            for line in each.body:
                if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
                    target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                    value = self.expression(line.value, self._top(), out)
                    attribute = _placed(
                        ast.Name(f"{instance}.{ast.unparse(target)}", ast.Store()), target, ast.unparse(target)
                    )
                    out.append(ast.copy_location(ast.Assign([attribute], value), line))
        start = self._method(instance, "__init__")
        new = _shallow(call)
        new.args = [self.expression(each, frame, out) for each in call.args]
        new.keywords = [self._inner(each, frame, out) for each in call.keywords]
        if start is None:
            if call.args or call.keywords:
                raise NotInlined
        elif self._can_inline(start, new):
            self._inline(start, new, out)
        else:
            raise NotInlined
        return instance

    # -- functions -----------------------------------------------------------------------------------------------------

    def _can_inline(self, closure: _Closure, call: ast.Call) -> bool:
        """Return whether a function is a straight list of statements with one return at its end, and its arguments are
        plain."""
        node, spec = closure.node, closure.node.args
        if isinstance(node, ast.AsyncFunctionDef) or spec.vararg or spec.kwarg or node in self.stack:
            return False
        if any(not (isinstance(d, ast.Name) and d.id == "staticmethod") for d in node.decorator_list):
            return False
        if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
            return False
        for each in _own(node.body):
            if isinstance(each, ast.Yield | ast.YieldFrom | ast.Await):
                return False
            if isinstance(each, ast.Return) and each is not node.body[-1]:
                return False
        return self._bound(closure, call) is not None

    def _bound(self, closure: _Closure, call: ast.Call) -> dict[str, ast.expr | None] | None:
        """Map parameters to arguments (None: use the default). Returns None if they do not fit."""
        spec = closure.node.args
        plain = [*spec.posonlyargs, *spec.args][1 if closure.instance is not None else 0 :]
        names = [a.arg for a in (*plain, *spec.kwonlyargs)]
        if len(call.args) > len(plain):
            return None
        values: dict[str, ast.expr | None] = dict(zip(names, call.args, strict=False))
        for word in call.keywords:
            if word.arg not in names or word.arg in values:
                return None
            values[str(word.arg)] = word.value
        defaults = self._defaults(closure)
        for name in names:
            if name not in values:
                if name not in defaults:
                    return None
                values[name] = None
        return values

    def _defaults(self, closure: _Closure) -> dict[str, ast.expr]:
        spec = closure.node.args
        plain = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(plain[::-1], spec.defaults[::-1], strict=False))
        words = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        return defaults | {a.arg: value for a, value in words if value is not None}

    def _inline(self, closure: _Closure, call: ast.Call, out: list[ast.stmt]) -> ast.expr:
        node = closure.node
        inner = _Frame(closure.frame)
        stored = _locals(node)
        if closure.instance is not None:
            inner.names[_arguments(node.args)[0].arg] = _name_of(closure.instance)
        defaults = self._defaults(closure)
        for name, value in (self._bound(closure, call) or {}).items():
            argument = self.expression(defaults[name], closure.frame, out) if value is None else value
            if isinstance(argument, ast.Name | ast.Constant) and name not in stored:
                inner.names[name] = argument
                continue
            own = self._unique(name)
            inner.names[name] = _name_of(own)
            out.append(_copied(_placed(ast.Name(own, ast.Store()), call, name), argument, call))
        for name in sorted(stored - inner.names.keys()):
            inner.names[name] = _name_of(self._unique(name))
        for each in node.body:
            if isinstance(each, Function):
                inner.names.pop(each.name, None)
                inner.functions[each.name] = _Closure(each, inner)
        self.stack.append(node)
        result: ast.expr = ast.copy_location(ast.Constant(None), call)
        for line in node.body:
            if not isinstance(line, ast.Return):
                out += self.statement(line, inner)
            elif line.value is not None:
                result = self.expression(line.value, inner, out)
        self.stack.pop()
        return result

    def _lift(self, closure: _Closure, at: ast.expr) -> ast.expr:
        """Turn a method or closure into a top-level function without its object."""
        node = closure.node
        name = node.name if closure.instance is None else f"{closure.instance}.{node.name}"
        if name not in self.lifted:
            new = _shallow(node)
            self.lifted[name] = new
            new.name, new.args = name, deepcopy(node.args)
            parameters = [*new.args.posonlyargs, *new.args.args]
            inner = _Frame(closure.frame, {n: ast.Name(n, ast.Load()) for n in _locals(node)})
            if closure.instance is not None:
                inner.names[parameters[0].arg] = _name_of(closure.instance)
                (new.args.posonlyargs or new.args.args).pop(0)
            inner.names |= {a.arg: ast.Name(a.arg, ast.Load()) for a in _arguments(new.args)}
            self.stack.append(node)
            new.body = [each for line in node.body for each in self._within(line, inner)]
            self.stack.pop()
        return _placed(_name_of(name), at, ast.unparse(at))

    def _within(self, line: ast.stmt, frame: _Frame) -> list[ast.stmt]:
        """Rewrite a statement of a function that stays one; calls in it stay calls."""
        if isinstance(line, Function):
            return [line]
        new = _shallow(line)
        for name, value in ast.iter_fields(line):
            setattr(new, name, self._unfollowed(value, frame))
        return [new]

    def _unfollowed(self, value: Any, frame: _Frame) -> Any:
        if isinstance(value, ast.expr):
            return self.expression(value, frame, None)
        if isinstance(value, ast.stmt):
            return self._within(value, frame)[0]
        if isinstance(value, list):
            return [self._unfollowed(each, frame) for each in value]
        if isinstance(value, ast.AST):
            new = _shallow(value)
            for name, inner in ast.iter_fields(value):
                setattr(new, name, self._unfollowed(inner, frame))
            return new
        return value

    def _unique(self, name: str) -> str:
        own, number = name, 2
        while own in self.taken or (own != name and own in self.used):
            own, number = f"{name}_{number}", number + 1
        self.taken.add(own)
        return own


# -- what can be inlined -----------------------------------------------------------------------------------------------


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Classes that are instantiated once and whose methods use their object only through its attributes."""
    kinds = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    calls = Counter(n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    named = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
    of_bases = Counter(b.id for kind in kinds.values() for b in kind.bases if isinstance(b, ast.Name))
    stored = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_store(n)}
    plain = {name: kind for name, kind in kinds.items() if kind in tree.body and _is_plain(kind)}
    while True:
        out = {
            name
            for name, kind in plain.items()
            if any(not (isinstance(b, ast.Name) and (b.id in plain or b.id == "object")) for b in kind.bases)
            or calls[name] > 1
            or named[name] != calls[name] + of_bases[name]
            or any(isinstance(line, Function) and line.name in stored for line in kind.body)
        }
        if not out:
            return plain
        plain = {name: kind for name, kind in plain.items() if name not in out}


def _says_twice(body: Sequence[ast.AST]) -> bool:
    """Return whether a function's name is bound a second time in the same scope."""
    nodes = list(_own(body))
    functions = Counter(n.name for n in nodes if isinstance(n, Function))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and _is_store(n)}
    return any(count > 1 or name in stored for name, count in functions.items())


def _is_plain(kind: ast.ClassDef) -> bool:
    if kind.decorator_list or kind.keywords or not any(isinstance(line, Function) for line in kind.body):
        return False
    for line in kind.body:
        if isinstance(line, Function):
            if (line.name.startswith("__") and line.name != "__init__") or not _uses_attributes(line):
                return False
        elif isinstance(line, ast.Assign | ast.AnnAssign):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if len(targets) != 1 or not isinstance(targets[0], ast.Name):
                return False
        elif not isinstance(line, ast.Pass) and not (
            isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
        ):
            return False
    return True


def _uses_attributes(method: Function) -> bool:
    """Return whether a method uses its object only as `self.ATTRIBUTE`, and has no decorators that change its
    binding."""
    if any(not (isinstance(d, ast.Name) and d.id == "staticmethod") for d in method.decorator_list):
        return False
    names = _arguments(method.args)
    if _is_static(method) or not names:
        return _is_static(method)
    holders = {id(n.value) for n in ast.walk(method) if isinstance(n, ast.Attribute) and not n.attr.startswith("__")}
    alone = [n for n in ast.walk(method) if isinstance(n, ast.Name) and n.id == names[0].arg and id(n) not in holders]
    supers = [n for n in ast.walk(method) if isinstance(n, ast.Name) and n.id in ("super", "vars", "locals", "globals")]
    return not alone and not supers


def _is_static(method: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)


def _functions_of(node: ast.AST, method: bool) -> Iterator[tuple[Function, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child, method
            yield from _functions_of(child, False)
        else:
            yield from _functions_of(child, method or isinstance(child, ast.ClassDef))


def _own(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Nodes of a function, without those of nested functions."""
    for node in body:
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            yield from _own(list(ast.iter_child_nodes(node)))


def _locals(function: Function) -> set[str]:
    outside = {name for n in _own(function.body) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    comprehended = {
        id(n) for each in _own(function.body) if isinstance(each, ast.comprehension) for n in ast.walk(each.target)
    }
    names = {
        n.id for n in _own(function.body) if isinstance(n, ast.Name) and _is_store(n) and id(n) not in comprehended
    }
    return names - outside


def _arguments(spec: ast.arguments) -> list[ast.arg]:
    return [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *(a for a in (spec.vararg, spec.kwarg) if a is not None)]


def _is_store(node: Any) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _registers(decorator: ast.expr) -> bool:
    """Return whether a decorator may hand its function to an object: all but names, such as `staticmethod`."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Attribute) and function.attr.startswith("register")


# -- nodes -------------------------------------------------------------------------------------------------------------


def _shallow(node: Any) -> Any:
    """Copy a node shallowly, so that a tree contains no node twice."""
    new = type(node)(**dict(ast.iter_fields(node)))
    if (written := getattr(node, "written", None)) is not None:
        new.written = written
    return ast.copy_location(new, node)


def _name_of(text: str) -> ast.Name:
    return ast.Name(text, ast.Load())


def _placed(node: Any, at: ast.AST, written: str | None = None) -> Any:
    """Give a node the position of another one. `written`: its text in the script."""
    for each in ast.walk(node):
        ast.copy_location(each, at)
    if isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and written not in (None, node.id)):
        vars(node)["written"] = written
    return node


def _pairs(target: ast.expr | None, value: ast.expr) -> list[tuple[ast.Name, ast.expr]] | None:
    """Split `a, b = x, y` into two assignments, if neither reads what the other sets."""
    if isinstance(target, ast.Name):
        return [(target, value)] if isinstance(value, ast.Name) else None
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)) or len(target.elts) != len(value.elts):
        return None
    if not all(isinstance(t, ast.Name) for t in target.elts) or any(isinstance(v, ast.Starred) for v in value.elts):
        return None
    names = {t.id for t in target.elts if isinstance(t, ast.Name)}
    if any(isinstance(n, ast.Name) and n.id in names for v in value.elts for n in ast.walk(v)):
        return None
    return list(zip(target.elts, value.elts, strict=True))  # type: ignore[arg-type]


def _copied(target: ast.expr, value: ast.expr, at: ast.AST, handed_on: bool = True) -> ast.stmt:
    """Assign a value to a name. `handed_on`: to or by a function, or to an object."""
    new = ast.copy_location(ast.Assign([target], value), at)
    vars(new)["handed_on"] = handed_on
    return new


def _without_copies(body: list[ast.stmt]) -> list[ast.stmt]:
    """Remove `a = b` if both names are assigned once, by replacing b with a."""
    whole = ast.Module(body, [])
    while True:
        stores = Counter(n.id for n in ast.walk(whole) if isinstance(n, ast.Name) and _is_store(n))
        copies = [
            n
            for n in ast.walk(whole)
            if isinstance(n, ast.Assign)
            and getattr(n, "handed_on", False)
            and isinstance(n.targets[0], ast.Name)
            and isinstance(n.value, ast.Name)
            and stores[n.targets[0].id] == 1
            and stores[n.value.id] == 1
        ]
        if not copies:
            return whole.body
        copy = copies[0]
        old, new = copy.targets[0].id, copy.value.id  # type: ignore[attr-defined]
        for node in ast.walk(whole):
            if isinstance(node, ast.Name) and node.id == old:
                _placed(node, node, getattr(node, "written", old))
                node.id = new
            for name, value in ast.iter_fields(node):
                if isinstance(value, list) and copy in value:
                    rest = [each for each in value if each is not copy]
                    setattr(node, name, rest or [ast.copy_location(ast.Pass(), copy)])
