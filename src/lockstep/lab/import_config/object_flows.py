"""Where the objects of a training go in a script: a model, an optimizer, a tokenizer, a Trainer, rows.

In: a `Script`. Out: a gap with its line for each place where such an object leaves the expressions that the other
readers follow (names, attributes, methods, arguments of known functions): in a display, a lambda, a class, an argument
of a function that is not followed; for each call that reaches names or attributes by a computed name; and for what
`shared_memory.py` finds. What stands after the training is not looked at.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import Any

from lockstep.lab.import_config import bound_names, shared_memory
from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.kinds import is_trainer, kind_of
from lockstep.lab.import_config.library_names import is_library
from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft

_WHY = "it may be changed there, which init does not follow: use it under its own name"
_COMPUTED = "what it reaches is known only when the script runs: write out the name"
_DEPTH = 12  # of names that are assigned from one another
_STRICT = ("tokenizer", "model", "config", "trainer", "arguments", "adapter")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_DISPLAYS = ast.List | ast.Tuple | ast.Set | ast.Dict
_PLAIN = (  # parents that read an object and keep no second way to it
    *(ast.Expr, ast.FormattedValue, ast.Compare, ast.UnaryOp, ast.Assert, ast.withitem, ast.If, ast.While, ast.For),
    *(ast.comprehension, ast.Return, ast.AugAssign),
)


def refuse(script: Script, draft: RunDraft) -> None:
    """Add the gaps; a line that is refused already is not named again."""
    flows = _Flows(script)
    for node, why in sorted(flows.unfollowed(), key=lambda each: each[0].lineno):  # type: ignore[attr-defined]
        line = f"line {node.lineno}:"  # type: ignore[attr-defined]
        if not any(gap.name.startswith(line) and gap.decides for gap in draft.gaps):
            draft.unclear(f"{line} {code_of(node)}", why)
    shared_memory.refuse(script, draft, flows.kind, flows.later)


class _Flows:
    """One pass over a script. `passed`: functions' arguments that one of their calls gives an object of a training."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.parents = {id(c): node for node in ast.walk(script.tree) for c in ast.iter_child_nodes(node)}
        self.later = set(self._after_training())
        self.kinds: dict[int, str | None] = {}
        self.passed: dict[tuple[int, str], str] = {}
        for _ in range(3):  # a function hands it on to another one
            before = len(self.passed)
            self._pass_on()
            self.kinds.clear()
            if len(self.passed) == before:
                break

    def unfollowed(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield each place and the reason."""
        for node in ast.walk(self.script.tree):
            if id(node) in self.later or not isinstance(node, ast.expr):
                continue
            if isinstance(node, ast.Call) and self._reflects(node):
                yield node, _COMPUTED
            elif isinstance(node, ast.Attribute) and node.attr in NAMES["reflecting_attributes"]:
                library = root_of(node) in self.script.imports and isinstance(node.value, ast.Name | ast.Attribute)
                if (library or self.kind(node.value) is not None) and not self._is_name(node):
                    yield self._whole(node), _COMPUTED
            elif isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
                continue
            elif self._is_called_there(node) or (
                (kind := self.kind(node)) is not None and not self._follows(node, kind)
            ):
                yield self._whole(node), _WHY

    def _is_called_there(self, node: ast.expr) -> bool:
        """Return whether a method of an object of the training is given to a function that calls it:
        `map(model.requires_grad_, [False])`."""
        if not isinstance(node, ast.Attribute) or self.kind(node.value) not in _STRICT:
            return False
        if node.attr in NAMES["observing_of_parts"]:
            return False
        parent = self.parents.get(id(node))
        word = parent.arg if isinstance(parent, ast.keyword) else None
        call = self.parents.get(id(parent)) if isinstance(parent, ast.keyword) else parent
        if not isinstance(call, ast.Call) or node is call.func:
            return False
        if self.kind(node.value) == "tokenizer" and node.attr in NAMES["tokenizer_methods"]:
            return False
        name = self.script.origin_of(call.func).rpartition(".")[2]
        return word in _CALLED or (name in _CALLING and word is None and node is call.args[0])

    # -- what is an object of the training -----------------------------------------------------------------------------

    def kind(self, node: ast.expr, depth: int = 0) -> str | None:
        """Return the kind of an object of the training that an expression is; None for values and other objects."""
        if id(node) not in self.kinds:
            self.kinds[id(node)] = None  # for names that are assigned from themselves
            self.kinds[id(node)] = self._kind_of(node, depth)
        return self.kinds[id(node)]

    def _kind_of(self, node: ast.expr, depth: int) -> str | None:
        if depth > _DEPTH:
            return None
        if isinstance(node, ast.Name):
            return self._named(node, depth)
        if isinstance(node, ast.Attribute):
            of = self.kind(node.value, depth + 1)
            if of in ("model", "trainer", "optimizer") and node.attr in NAMES[f"{of}_objects"]:
                return {"args": "arguments", "config": "config"}.get(node.attr, of)
            return None
        if isinstance(node, ast.Subscript):
            of = self.kind(node.value, depth + 1)
            split = isinstance(node.slice, ast.Constant) and str(node.slice.value).startswith(_SPLITS)
            return of if (of == "rows" and split) or of == "optimizer" else None
        return self._called(node, depth) if isinstance(node, ast.Call) else None

    def _named(self, node: ast.Name, depth: int) -> str | None:
        scope = self.script.scopes.get(id(node))
        while True:
            if (id(scope), node.id) in self.passed:
                return self.passed[id(scope), node.id]
            values = self.script.bindings.get((id(scope), node.id))
            if values is not None or scope is None:
                break
            scope = self.script.scopes.get(id(scope))
        last = self.script.bound(node, last=True)
        known = [last] if last is not None else [each for each in values or () if each is not None]
        kinds = [self.kind(each, depth + 1) for each in known]
        usual = kind_of(self.script, node) if not known else None
        return next((each for each in kinds if each is not None), usual if usual in _STRICT else None)

    def _called(self, node: ast.Call, depth: int) -> str | None:
        origin = self.script.origin_of(node.func)
        name = origin.rpartition(".")[2]
        if name in NAMES["optimizers"] or "lr_scheduler." in origin or name == "GradScaler":
            return "optimizer"
        if name.startswith("get_") and "schedule" in name:
            return "optimizer"
        if name in ("DataLoader", "Accelerator"):
            return name
        if isinstance(node.func, ast.Attribute) and self.kind(node.func.value, depth + 1) == "model":
            return "model" if name in NAMES["model_returns"] else None
        kind = kind_of(self.script, node)
        if kind is not None and not (isinstance(node.func, ast.Attribute) and kind == "rows" and name in _OF_ROWS):
            return kind
        own = self.script.classes.get(name) if isinstance(node.func, ast.Name) else None
        return "model" if own is not None and self._is_module(own) else None

    def _is_module(self, kind: ast.ClassDef) -> bool:
        return any(ast.unparse(base).rpartition(".")[2] in ("Module", "LightningModule") for base in kind.bases)

    def _pass_on(self) -> None:
        for call in self.script.calls:
            function = self._function(call.node)
            if function is None:
                continue
            partial = call.name == "partial"
            own = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            pairs = list(zip(own, call.node.args[1:] if partial else call.node.args, strict=False))
            pairs += [(word.arg, word.value) for word in call.node.keywords if word.arg]
            for name, value in pairs:
                if (kind := self.kind(value)) is not None:
                    self.passed.setdefault((id(function), name), kind)

    def _function(self, call: ast.Call) -> Any:
        """Return the function of the script that a call, or a `partial`, gives arguments to."""
        node = call.func
        if self.script.origin_of(node).rpartition(".")[2] == "partial" and call.args:
            node = call.args[0]
        function = self.script.functions.get(node.id) if isinstance(node, ast.Name) else None
        return function if isinstance(function, _FUNCTION) else None

    # -- where it may be -----------------------------------------------------------------------------------------------

    def _follows(self, node: ast.expr, kind: str) -> bool:
        """Return whether an object stands in a place that is on the list."""
        parent = self.parents.get(id(node))
        data = kind in ("rows", "DataLoader")
        if isinstance(parent, ast.Attribute | ast.Subscript):
            return node is parent.value
        if isinstance(parent, ast.Assign | ast.AnnAssign):
            return self._assigns(parent, data)
        if isinstance(parent, ast.keyword):
            call = self.parents.get(id(parent))
            return isinstance(call, ast.Call) and self._takes(call, node, kind)
        if isinstance(parent, ast.Starred):
            return self._follows(parent, kind)
        if isinstance(parent, ast.Call):
            return node is parent.func or self._takes(parent, node, kind)
        if isinstance(parent, ast.IfExp):
            return node is parent.test or self._follows(parent, kind)
        if isinstance(parent, ast.BoolOp):
            return self._decides(parent)
        if isinstance(parent, ast.BinOp):
            return data
        if isinstance(parent, _DISPLAYS):
            return self._displayed(parent, kind)
        if isinstance(parent, ast.Lambda):
            above = self.parents.get(id(parent))
            return isinstance(above, ast.keyword) and above.arg == "model_init"
        if isinstance(parent, ast.arguments):
            return data or kind == "tokenizer"
        return isinstance(parent, _PLAIN)

    def _assigns(self, node: ast.Assign | ast.AnnAssign, data: bool) -> bool:
        """Return whether an assignment gives an object a name, and not an entry of a mapping or a class."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        above = self.parents.get(id(node))
        entries = any(isinstance(each, ast.Subscript) for each in targets)
        return (not entries or (data and self.kind(targets[0].value) == "rows")) and not (  # type: ignore[attr-defined]
            isinstance(above, ast.ClassDef)
        )

    def _decides(self, node: ast.expr) -> bool:
        """Return whether a value is only a condition."""
        parent = self.parents.get(id(node))
        if isinstance(parent, ast.BoolOp | ast.UnaryOp):
            return self._decides(parent)
        return isinstance(parent, ast.If | ast.While | ast.IfExp | ast.Assert) and node is parent.test

    def _displayed(self, node: ast.expr, kind: str) -> bool:
        """Return whether a display is taken apart at once, returned, or given to a function of a library."""
        parent = self.parents.get(id(node))
        if isinstance(parent, _DISPLAYS):
            return self._displayed(parent, kind)
        if isinstance(parent, ast.Attribute):  # {"train": rows}.items()
            return kind in ("rows", "DataLoader") and self._reads(node, True)
        if isinstance(parent, ast.Assign) and isinstance(node, ast.Tuple):
            return all(isinstance(each, ast.Tuple | ast.List) for each in parent.targets)
        if isinstance(parent, ast.Return):
            function = self.script.scopes.get(id(parent))
            return isinstance(node, ast.Tuple) or getattr(function, "name", "").endswith(_OF_LIGHTNING)
        if isinstance(parent, ast.Call | ast.keyword):
            call = self.parents.get(id(parent)) if isinstance(parent, ast.keyword) else parent
            return isinstance(call, ast.Call) and self._is_known(call)
        data = kind in ("rows", "DataLoader")
        if isinstance(parent, ast.Assign) and all(isinstance(each, ast.Name) for each in parent.targets):
            uses = list(self._uses(parent.targets[0].id))  # type: ignore[attr-defined]
            return all((data and self._reads(each, True)) or self._is_unpacked(each) for each in uses) and (
                data or bool(uses)
            )
        return data and self._reads(node, True)

    def _is_unpacked(self, node: ast.expr) -> bool:
        """Return whether a mapping is only what a function of a library is called with: `Trainer(**more)`."""
        word = self.parents.get(id(node))
        call = self.parents.get(id(word)) if isinstance(word, ast.keyword) and word.arg is None else None
        return isinstance(call, ast.Call) and self._is_known(call)

    def _uses(self, name: str) -> Iterator[ast.Name]:
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                yield node

    def _reads(self, node: ast.expr, whole: bool) -> bool:
        """Return whether a display of rows or loaders (`whole`), or a part of one, is only measured, printed or gone
        through."""
        parent = self.parents.get(id(node))
        if isinstance(parent, ast.Subscript):
            return node is parent.value and isinstance(parent.ctx, ast.Load) and self._reads(parent, False)
        if isinstance(parent, ast.comprehension | ast.For):
            names = bound_names.names_in(parent.target)
            inside = ast.walk(self.parents[id(parent)] if isinstance(parent, ast.comprehension) else parent)
            uses = [each for each in inside if isinstance(each, ast.Name) and each.id in names]
            parts = [each for each in uses if isinstance(each.ctx, ast.Load)]
            return node is parent.iter and (not whole or all(self._reads(each, False) for each in parts))
        if isinstance(parent, ast.Attribute):
            above = self.parents.get(id(parent))
            if parent.attr in ("items", "keys", "values") and isinstance(above, ast.Call):
                return self._reads(above, whole)
            return parent.attr in ("num_rows", "column_names", "shape", "features")
        if isinstance(parent, ast.Call) and node is not parent.func:
            name = self.script.origin_of(parent.func).rpartition(".")[2]
            if name in ("enumerate", "tqdm"):
                return self._reads(parent, whole)
            return name in ("print", "len", "sum", "str", "info", "concatenate_datasets", "interleave_datasets", "fit")
        return isinstance(parent, ast.FormattedValue | ast.Compare | ast.Expr)

    def _takes(self, call: ast.Call, node: ast.expr, kind: str) -> bool:
        """Return whether a call may be given an object: it is followed, or of a library."""
        data = kind in ("rows", "DataLoader")
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in self.script.functions:
            return True
        if name in self.script.classes:
            inherits = is_trainer(self.script, name) or self._inherits(self.script.classes[name])
            return data or kind == "tokenizer" or inherits
        if name == "dict" and node not in call.args:
            return self._displayed(call, kind)
        if name and hasattr(builtins, name):
            copied = data and name in NAMES["copying_builtins"] and node in call.args
            return name in NAMES["reading_builtins"] or copied
        if self._is_known(call):
            return True
        if self.script.origin_of(call.func).rpartition(".")[2] == "partial":
            return self._function(call) is not None and node is not call.args[0]
        if isinstance(call.func, ast.Name):
            return self.script.bound(call.func, last=True) is not None and kind != "model"
        if not isinstance(call.func, ast.Attribute):
            return False
        holder = call.func.value
        inherits = isinstance(holder, ast.Call) and ast.unparse(holder.func) == "super"
        itself = isinstance(holder, ast.Name) and holder.id in ("self", "cls")
        return inherits or itself or self.kind(holder) is not None or call.func.attr in NAMES["taking_methods"]

    def _inherits(self, kind: ast.ClassDef) -> bool:
        """Return whether a class has a base, whose reader looks at it: a Trainer, a callback, a module, a data set."""
        return any(ast.unparse(base) != "object" for base in kind.bases)

    def _is_known(self, call: ast.Call) -> bool:
        """Return whether a call is of a library that does not only hand on what it is given."""
        origin = self.script.origin_of(call.func)
        root = root_of(call.func)
        if root not in self.script.imports or origin.startswith(tuple(NAMES["handing_on"])):
            return is_trainer(self.script, origin.rpartition(".")[2])
        listed = any(origin.startswith(f"{each}.") for each in NAMES["unrelated_libraries"])
        return is_library(origin) or listed

    # -- computed names ------------------------------------------------------------------------------------------------

    def _reflects(self, call: ast.Call) -> bool:
        """Return whether a call reaches names or attributes in a way that is not followed."""
        name = self.script.origin_of(call.func)
        if name in self.script.functions:
            return False
        if name in ("globals", "locals", "vars") and not call.args:
            return not self._only_listed(call)
        if name in ("getattr", "setattr", "delattr", "vars", "hasattr") and call.args:
            return name != "hasattr" and self._by_name(call, name)
        return name in NAMES["reflecting_calls"]

    def _by_name(self, call: ast.Call, name: str) -> bool:
        holder, parent = call.args[0], self.parents.get(id(call))
        of_library = isinstance(holder, ast.Name | ast.Attribute) and root_of(holder) in self.script.imports
        reached = self.kind(holder) is not None or of_library
        if name != "getattr":
            return reached and not (name != "vars" and of_library and self.script.origin_of(holder) in _SWITCHES)
        if len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            return str(call.args[1].value) in NAMES["reflecting_attributes"]
        return reached and (not of_library or (isinstance(parent, ast.Call) and parent.func is call))

    def _only_listed(self, call: ast.Call) -> bool:
        """Return whether `globals()` is only read: `{k: globals()[k] for k in names}`, `'x' in locals()`."""
        parent = self.parents.get(id(call))
        if isinstance(parent, ast.Subscript):
            return isinstance(parent.ctx, ast.Load) and isinstance(self.parents.get(id(parent)), ast.DictComp)
        if isinstance(parent, ast.Attribute) and parent.attr in ("items", "keys", "copy"):
            return isinstance(self.parents.get(id(self.parents.get(id(parent)))), ast.comprehension)
        listed = isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("print", "list", "sorted", "len")
        return listed or isinstance(parent, ast.Compare | ast.comprehension)

    def _is_name(self, node: ast.Attribute) -> bool:
        """Return whether code is `model.__class__.__name__`."""
        above = self.parents.get(id(node))
        return node.attr == "__class__" and isinstance(above, ast.Attribute) and above.attr in _NAMES

    # -- places --------------------------------------------------------------------------------------------------------

    def _whole(self, node: ast.AST) -> ast.AST:
        """Return the smallest expression around a place that names it well: the call or the display."""
        parent = self.parents.get(id(node))
        while isinstance(parent, ast.keyword | ast.Starred | ast.Attribute | ast.Subscript | ast.Call | _DISPLAYS):
            node, parent = parent, self.parents.get(id(parent))
            if isinstance(node, ast.Call | ast.Dict | ast.List):
                break
        return node if hasattr(node, "lineno") else self.parents[id(node)]

    def _after_training(self) -> Iterator[int]:
        """Yield the nodes of the statements after the one that trains, in the body of the script or of a function that
        is called once."""
        calls = [each for each in self.script.calls if each.receiver is not None]
        trains = [
            each
            for each in calls
            if each.name in ("fit", "backward")
            or (each.name == "train" and kind_of(self.script, each.receiver) == "trainer")
        ]
        if not trains:
            return
        for call in trains[-1:]:
            node: Any = call.node
            while (above := self.parents.get(id(node))) is not None:
                if isinstance(above, ast.Module | _FUNCTION) and isinstance(node, ast.stmt):
                    for line in above.body[above.body.index(node) + 1 :]:
                        if not isinstance(line, _FUNCTION | ast.ClassDef) and "__name__" not in ast.unparse(line)[:40]:
                            yield from map(id, ast.walk(line))
                if isinstance(above, _FUNCTION):
                    return
                node = above


_OF_LIGHTNING = ("configure_optimizers", "dataloader")  # methods whose displays another reader looks at
_CALLED = ("key", "function", "func", "target", "default_factory")  # arguments that are called
_CALLING = ("map", "filter", "iter", "defaultdict", "reduce", "partial", "starmap", "Thread", "agent")
_SPLITS = ("train", "val", "dev", "test", "unsupervised")
_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")
_SWITCHES = ("torch.backends.cudnn", "torch.backends.cuda.matmul", "torch.backends.cuda")
_OF_ROWS = ("unique", "to_pandas", "keys", "column_names", "features", "get", "append", "to_dict", "to_list", "iter")
