"""Take the branches that options decide, and fill in names that are assigned several times.

In: a `Script` whose options are known. Out: an equivalent one: `if args.train_file is not None:` becomes the statements
of its branch, and a name or mapping that is built in several statements is replaced, where it is read, by its value
there. A value that may be changed elsewhere is left as it is.
"""

from __future__ import annotations

import ast
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config.bound_names import changed_in, changed_through_others, within
from lockstep.lab.import_config.script import Script, Unknown

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
# their calls change no argument
_READERS = ("datasets", "transformers", "peft", "accelerate", "tokenizers", "print", "len", "logger", "logging")
_PLAIN = (str, int, float, bool, type(None))


def taken(script: Script) -> Script:
    """Return the script with decided branches taken. It is returned as it is if nothing is decided."""
    tree = deepcopy(script.tree)
    reader = _Reader(Script(script.path, script.text, script.options, tree))
    try:
        functions = [each for each in ast.walk(tree) if isinstance(each, _Function)]
        reader.outside = {name for each in functions for name in _attributes(each)}
        tree.body = reader.body(tree.body, dict.fromkeys(reader.outside, Unknown))
        setting = Counter(name for each in tree.body for name in _attributes(each))
        for line, function in [(top, n) for top in tree.body for n in ast.walk(top) if isinstance(n, _Function)]:
            names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            more = [each for each in (function.args.vararg, function.args.kwarg) if each is not None]
            own = _attributes(line)
            reader.outside = {name for name in setting if setting[name] > (name in own)} | _attributes(line, function)
            reader.forget_all()
            outside = dict.fromkeys(reader.outside, Unknown)
            function.body = reader.body(function.body, outside | {each.arg: Unknown for each in (*names, *more)})
            reader.drop_last_break(function)
            setting = setting - Counter(own) + Counter(_attributes(line)) if own else setting
    except RecursionError:
        return script
    if not reader.changed:
        return script
    return Script(script.path, script.text, script.options, ast.fix_missing_locations(tree))


@dataclass
class _Reader:
    """Follows the statements of one body in order. `env`: name -> its value here, or `Unknown`."""

    script: Script
    changed: bool = False
    elsewhere: set[str] = field(default_factory=set)  # names that an inner function changes
    outside: set[str] = field(default_factory=set)  # attributes that functions set, except the one that is read
    at_loop: dict[int, dict[str, tuple[int, str, int]]] = field(default_factory=dict)  # id of a loop -> `whole` there
    products: dict[str, tuple[int, str]] = field(default_factory=dict)  # code of a product -> its factors: number, code
    batches: dict[str, tuple[str, int]] = field(
        default_factory=dict
    )  # code of a number of steps -> loader, batches a step
    whole: dict[str, tuple[int, str, int]] = field(
        default_factory=dict
    )  # code of the total number of steps -> epochs, loader, batches per step

    def __post_init__(self) -> None:
        for function in (each for each in ast.walk(self.script.tree) if isinstance(each, _Inner)):
            for each in ast.walk(function):
                if isinstance(each, ast.Global | ast.Nonlocal):
                    self.elsewhere |= set(each.names)
        self.elsewhere |= self._changed_inside() | changed_through_others(self.script)

    def _changed_inside(self) -> set[str]:
        """Return the names of mappings and lists that a function changes without having assigned them."""
        names: set[str] = set()
        for function in (each for each in ast.walk(self.script.tree) if isinstance(each, _Function)):
            own = within(function)
            names |= {name for line in function.body for name in changed_in(line)} - own
        return names

    def drop_last_break(self, function: Any) -> None:
        """Remove `if count >= total: break` from a loop that makes one step for each batch, if the total is epochs
        times batches, so that it ends only after the last batch of the last epoch."""
        for loop in (each for each in ast.walk(function) if isinstance(each, ast.For)):
            around = self._around(function, loop)
            for place, line in enumerate(loop.body):
                ends = isinstance(line, ast.If) and len(line.body) == 1 and isinstance(line.body[0], ast.Break)
                test = line.test if isinstance(line, ast.If) and ends and not line.orelse else None
                if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.GtE) or len(test.ops) != 1:
                    continue
                count, total = test.left, ast.unparse(test.comparators[0])
                stores = [each for each in ast.walk(function) if isinstance(each, ast.Name) and _is_set(each, count)]
                counted = [each for node in loop.body[:place] for each in _of_a_step(node)]
                steps = [each for each in counted if isinstance(each, ast.AugAssign) and _is_one(each, count)]
                *whole, every = self.at_loop.get(id(loop), {}).get(total, (0, "", 1))
                if len(steps) != 1 or len(stores) != 2 or tuple(whole) != around:
                    continue
                last = every == 1 or (self._accumulates(every) and steps[0] not in loop.body)
                if last and self._starts(function, count):
                    del loop.body[place]
                    self.changed = True
                    break

    def _around(self, function: ast.AST, loop: ast.For) -> tuple[int, str] | None:
        """Return the number of epochs around a loop, and the name of the loader that it goes through."""
        outer = [each for each in ast.walk(function) if isinstance(each, ast.For) and loop in each.body]
        call = outer[0].iter if len(outer) == 1 else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "range" or len(call.args) > 2:
            return None
        first, last = [0, *map(self.script.known, call.args)][-2:]
        node: ast.expr = loop.iter
        while isinstance(node, ast.Call) and ast.unparse(node.func) in ("enumerate", "tqdm") and node.args:
            if ast.unparse(node.func) in self.script.functions:
                return None
            node = node.args[0]
        lines = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
        values = {ast.unparse(each.value) for each in lines if ast.unparse(each.targets[0]) == ast.unparse(node)}
        loader = values.pop() if len(values) == 1 else ast.unparse(node)
        loader = loader if loader.isidentifier() else ast.unparse(node)
        return (last, loader) if first == 0 and isinstance(last, int) else None

    def _accumulates(self, every: int) -> bool:
        """Return whether Accelerate makes a step of so many batches, and of those left in an epoch."""
        calls = [each for each in ast.walk(self.script.tree) if isinstance(each, ast.Call)]
        makers = [each for each in calls if ast.unparse(each.func).rpartition(".")[2] == "Accelerator"]
        words = [word.value for each in makers for word in each.keywords if word.arg == "gradient_accumulation_steps"]
        return len(makers) == len(words) == 1 and self.script.known(words[0]) == every

    def _starts(self, function: ast.AST, count: ast.expr) -> bool:
        """Return whether a counter is set to 0, once."""
        lines = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
        own = [each for each in lines if ast.unparse(each.targets[0]) == ast.unparse(count)]
        return len(own) == 1 and isinstance(own[0].value, ast.Constant) and own[0].value.value == 0

    def _product(self, line: ast.Assign, env: dict[str, Any]) -> None:
        """Record `total = epochs * batches`, and `batches = math.ceil(len(loader) / 1)`."""
        text, value = ast.unparse(line.targets[0]), line.value
        inside = value.args[0] if isinstance(value, ast.Call) and ast.unparse(value.func) == "math.ceil" else value
        every = 1
        if isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Div):
            every, divided = self._value(inside.right, env), inside.left
            inside = divided if every == 1 or (inside is not value and isinstance(every, int)) else inside
        if (of := _of_length(inside)) is not None:
            self.batches[text] = of, every
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            for one, other in ((value.left, value.right), (value.right, value.left)):
                times = self._value(one, env)
                if isinstance(times, int) and self._value(other, env) is Unknown:
                    self.products[text] = times, ast.unparse(other)
                    direct = _of_length(other)
                    steps = self.batches.get(ast.unparse(other)) if direct is None else (direct, 1)
                    if steps is not None:
                        self.whole[text] = times, *steps

    def forget_all(self) -> None:
        self.products, self.batches, self.whole = {}, {}, {}

    def _forget(self, node: ast.AST) -> None:
        """Forget the numbers of batches and steps that a statement changes, or whose loader it assigns, unless it is
        prepared by Accelerate."""
        changed = within(node) | set(changed_in(node)) | _attributes(node)
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".prepare"):
            changed -= {ast.unparse(each) for each in value.args}
        self.products = {k: v for k, v in self.products.items() if not {k, v[1]} & changed}
        self.batches = {k: v for k, v in self.batches.items() if not {k, v[0]} & changed}
        self.whole = {k: v for k, v in self.whole.items() if not {k, v[1]} & changed}

    def body(self, lines: list[ast.stmt], env: dict[str, Any]) -> list[ast.stmt]:
        """Return the statements to read. `env` is brought up to date."""
        out: list[ast.stmt] = []
        for line in lines:
            if isinstance(line, ast.If):
                out += self._branch(line, env)
            elif isinstance(line, _Inner):
                env[line.name] = Unknown
                out.append(line)
            elif isinstance(line, ast.For | ast.While | ast.With | ast.Try | ast.AsyncFor | ast.AsyncWith):
                out.append(self._block(line, env))
            elif isinstance(line, ast.Match | ast.TryStar):
                self._forget(line)
                env |= dict.fromkeys(within(line) | set(changed_in(line)) | _attributes(line), Unknown)
                out.append(line)
            else:
                env |= dict.fromkeys(self._passed(line, env), Unknown)
                self._fill(line, env)
                self._forget(line)
                self._leaf(line, env)
                out.append(line)
        return out or [ast.Pass()]

    def _branch(self, node: ast.If, env: dict[str, Any]) -> list[ast.stmt]:
        entry = "__name__" in ast.unparse(node.test)
        self._head(node.test, env)
        value = Unknown if entry else self._value(node.test, env)
        if value is not Unknown:
            self.changed = True
            chosen = node.body if value else node.orelse
            return self.body(chosen, env) if chosen else []
        one, other = (env, {}) if entry else (dict(env), dict(env))
        self._fill(node.test, env)
        before = dict(self.products), dict(self.batches), dict(self.whole)
        node.body = self.body(node.body, one)
        if not entry:
            self.products, self.batches, self.whole = before
        if node.orelse:
            node.orelse = self.body(node.orelse, other)
        if not entry:
            self._forget(node)
        for name in set() if entry else one.keys() | other.keys():
            a, b = one.get(name, Unknown), other.get(name, Unknown)
            env[name] = a if a is not Unknown and b is not Unknown and repr(a) == repr(b) else Unknown
        return [node]

    def _block(self, node: Any, env: dict[str, Any]) -> ast.stmt:
        stored = within(node) | set(changed_in(node)) | _attributes(node)
        if isinstance(node, ast.For | ast.AsyncFor):
            self._fill(node.iter, env)
        for part in (getattr(node, "iter", None), getattr(node, "test", None), *getattr(node, "items", ())):
            if part is not None:
                self._head(part, env)
        if not isinstance(node, ast.With | ast.AsyncWith):
            env |= dict.fromkeys(stored, Unknown)
            self._forget(node)
        self.at_loop[id(node)] = dict(self.whole)
        for part in ("body", "orelse", "finalbody"):
            if getattr(node, part, None):
                if part == "finalbody" or not isinstance(node, ast.Try):  # the body may have ended anywhere
                    env |= dict.fromkeys(stored if part != "body" else (), Unknown)
                setattr(node, part, self.body(getattr(node, part), env))
        for handler in getattr(node, "handlers", ()):
            handler.body = self.body(handler.body, env | dict.fromkeys(stored, Unknown))
        if not isinstance(node, ast.With | ast.AsyncWith):
            env |= dict.fromkeys(stored, Unknown)
            self._forget(node)
        return node

    def _head(self, node: ast.AST, env: dict[str, Any]) -> None:
        """Forget what the head of a block may change, before its value is taken."""
        env |= dict.fromkeys((*within(node), *changed_in(node), *self._passed(node, env)), Unknown)

    def _passed(self, line: ast.AST, env: dict[str, Any]) -> list[str]:
        """Return the names of mappings and lists that a call may change."""
        return [
            name.id
            for call in ast.walk(line)
            if isinstance(call, ast.Call) and self.script.origin_of(call.func).partition(".")[0] not in _READERS
            for each in (*call.args, *(word.value for word in call.keywords if word.arg is not None))
            for name in ast.walk(each)
            if isinstance(name, ast.Name) and isinstance(env.get(name.id), list | dict)
        ]

    def _leaf(self, line: ast.stmt, env: dict[str, Any]) -> None:
        """Bring `env` up to date with a simple statement."""
        passed: list[str] = []
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            target, value = line.targets[0], self._value(line.value, env)
            env |= dict.fromkeys((*within(line.value), *changed_in(line.value)), Unknown)
            if isinstance(target, ast.Attribute):
                env[ast.unparse(target)] = value
            if isinstance(target, ast.Name):
                shared = isinstance(line.value, ast.Name) and isinstance(value, list | dict)  # a second name of it
                env[target.id] = Unknown if shared else value
                passed += [line.value.id] if shared and isinstance(line.value, ast.Name) else []
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                holder, key = env.get(target.value.id, Unknown), self._value(target.slice, env)
                whole = isinstance(holder, dict) and value is not Unknown and isinstance(key, str)
                env[target.value.id] = {**holder, key: value} if whole else Unknown
            elif not isinstance(target, ast.Attribute):
                env |= dict.fromkeys((each.id for each in ast.walk(target) if isinstance(each, ast.Name)), Unknown)
            self._product(line, env)
        else:
            env |= dict.fromkeys(within(line), Unknown)
            env |= dict.fromkeys(changed_in(line), Unknown)
        own = self.script.functions
        called = any(isinstance(each, ast.Call) and ast.unparse(each.func) in own for each in ast.walk(line))
        env |= dict.fromkeys((*passed, *self.elsewhere, *(self.outside if called else ())), Unknown)

    def _value(self, node: ast.expr, env: dict[str, Any]) -> Any:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "math.ceil" and isinstance(node.args[0], ast.BinOp):
            whole, by = ast.unparse(node.args[0].left), ast.unparse(node.args[0].right)
            times, batches = self.products.get(whole, (0, ""))
            if isinstance(node.args[0].op, ast.Div) and batches == by:
                return times
        self.script.here = env
        try:
            return self.script.known_here(node)
        finally:
            self.script.here = None

    def _fill(self, node: ast.AST, env: dict[str, Any]) -> None:
        """Replace names that are assigned several times by their values here."""
        if isinstance(node, _Inner):  # runs later
            return
        own = dict.fromkeys(within(node), Unknown)  # also the names of comprehensions
        here = {**env, **own}
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, name, [self._filled(each, here, node) for each in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self._filled(value, here, node))
        for child in ast.iter_child_nodes(node):
            self._fill(child, here)

    def _filled(self, node: Any, env: dict[str, Any], parent: ast.AST) -> Any:
        if isinstance(node, ast.IfExp) and (decided := self._value(node.test, env)) is not Unknown:
            self.changed = True
            return node.body if decided else node.orelse
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            return node
        text = ast.unparse(node)
        value = env.get(text, Unknown)
        if (
            value is Unknown
            or not _is_plain(value)
            or (isinstance(node, ast.Name) and self.script.bound(node) is not None)
        ):
            return node
        whole = isinstance(value, list | dict)
        if whole and not (isinstance(parent, ast.keyword) or (isinstance(parent, ast.Call) and node in parent.args)):
            return node
        new = ast.parse(repr(value), mode="eval").body
        for each in ast.walk(new):
            ast.copy_location(each, node)
        new.written = text  # type: ignore[attr-defined]  # messages show the script's own name
        self.changed = True
        return new


def _of_a_step(node: ast.stmt) -> list[ast.stmt]:
    """Return a statement, or those that `if accelerator.sync_gradients:` keeps for the last batch of a step."""
    guarded = isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test).endswith(".sync_gradients")
    return node.body if isinstance(node, ast.If) and guarded else [node]


def _of_length(node: ast.expr) -> str | None:
    """Return X of `len(X)`."""
    is_length = isinstance(node, ast.Call) and ast.unparse(node.func) == "len" and len(node.args) == 1
    return node.args[0].id if isinstance(node, ast.Call) and is_length and isinstance(node.args[0], ast.Name) else None


def _is_set(node: ast.Name, count: ast.expr) -> bool:
    return not isinstance(node.ctx, ast.Load) and node.id == ast.unparse(count)


def _is_one(node: ast.AugAssign, count: ast.expr) -> bool:
    """Return whether a statement is `count += 1`."""
    one = isinstance(node.value, ast.Constant) and node.value.value == 1 and isinstance(node.op, ast.Add)
    return one and ast.unparse(node.target) == ast.unparse(count)


def _attributes(node: ast.AST, without: ast.AST | None = None) -> set[str]:
    """Return the code of the attributes that a statement sets. `without`: a function in it that is left out."""
    out = set[int]() if without is None else {id(each) for each in ast.walk(without)}
    nodes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and id(each) not in out)
    return {ast.unparse(each) for each in nodes if not isinstance(each.ctx, ast.Load)}


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written as code."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)
