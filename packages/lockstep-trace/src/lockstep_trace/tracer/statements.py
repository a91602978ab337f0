"""Finds statements of the user's script that have no effect: a method that is named but not called, a result that is
dropped, a context manager that is not entered.

In: the executed files of the script's folder. Out: [kind, text, place]. Reads only the source, at the end of a run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST, LARGEST = 24, 1 << 18  # files, bytes of each
# methods that are no property; and those that are a method if their owner has another method, which the script calls
METHODS = ("zero_grad", "backward", "set_epoch", "requires_grad_", "detach_")
OF_OWNERS = {"eval": ("parameters", "state_dict"), "train": ("parameters", "state_dict"), "step": ("zero_grad",)}
CONTEXTS = ("no_grad", "inference_mode", "enable_grad", "autocast", "no_sync")
# methods of tensors that return a new one; with an underscore they would change it
RETURNING = (
    "clamp",
    "clip",
    "mul",
    "div",
    "add",
    "sub",
    "lerp",
    "masked_fill",
    "neg",
    "addcmul",
)


def without_effect() -> list[list[str]]:
    """Return the statements without effect in the script and in modules of its folder."""
    script = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0].endswith(".py") else None
    if script is None or not script.is_file() or "site-packages" in script.parts:
        return []
    names = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
    inside = [Path(n) for n in names if isinstance(n, str) and n.endswith(".py") and Path(n).parent == script.parent]
    rows = []
    paths = [p for p in dict.fromkeys([script, *inside]) if p.is_file() and p.stat().st_size <= LARGEST][:MOST]
    texts = {p: p.read_text(encoding="utf-8", errors="replace") for p in paths}
    every = "\n".join(texts.values())
    for path, text in texts.items():
        if "# %%" not in text and "# In[" not in text:  # cells of a notebook show values
            try:
                rows += [[kind, ast.unparse(node), f"{path.name}:{node.lineno}"] for kind, node in _of(text, every)]
            except (SyntaxError, ValueError, RecursionError):
                continue
    return rows[:8]


def _of(text: str, every: str) -> Iterator[tuple[str, ast.expr]]:
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = {n.name for n in functions if any("property" in ast.unparse(d) for d in n.decorator_list)}
    unused = [n for n in functions if n in tree.body and len(re.findall(rf"\b{n.name}\b", every)) == 1]
    trials = (ast.Try, ast.With)  # a script may test that a name exists in `try` or `with suppress(...)`
    skipped = {id(n) for f in unused for n in ast.walk(f)}
    skipped |= {id(n) for f in ast.walk(tree) if isinstance(f, trials) and _tries(f) for n in f.body}
    for loop in ast.walk(tree):
        parameters, body = _parameters(loop), getattr(loop, "body", None)
        rows = [n for part in (body, getattr(loop, "orelse", None)) if isinstance(part, list) for n in part]
        calls = {ast.unparse(n.value.func) for n in rows if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)}
        for each in (n for row in rows for n in (ast.walk(row) if parameters else [row])):
            value = each.value if isinstance(each, ast.Expr) and id(each) not in skipped else None
            kind = None if value is None else _kind(value, parameters, text)
            if value is None or kind is None or getattr(value, "attr", "") in own or ast.unparse(value) in calls:
                continue  # in `calls`: another statement of the block calls it
            yield kind, value
    yield from _suspects(tree, text)


NOT_ADDITIVE = re.compile(
    r"(f1|roc_auc|precision|recall)_score|corrcoef|(spearman|pearson)r|(exp|sqrt)\((?!-).*(loss|mse|nll)"
)
SEVERAL, SHARES = (
    re.compile(r"load(?!ers)|batch|\bdl\b|window|chunk|split\("),
    re.compile(r"sigmoid|softmax|expit|prob"),
)
HELD_OUT, MODEL = (
    re.compile(r"valid(ation)?|val|test|dev|eval"),
    re.compile(r"(self\.)?\w*(model|net|clf|head|ddp)\w*\("),
)
LOOPS, RIGHT = (ast.For, ast.While), re.compile(r"right|correct|hit|match|n_ok|\bok\b|\btp\b|acc")


def _suspects(tree: ast.Module, text: str) -> Iterator[tuple[str, ast.expr]]:
    nodes = list(ast.walk(tree))
    loops = [n for n in nodes if isinstance(n, LOOPS)]
    inside = {id(n): loop for loop in loops for row in loop.body for n in ast.walk(row)}
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    owner = {id(n): f for f in functions for n in ast.walk(f)}
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    for n in nodes:
        if isinstance(n, ast.AugAssign) or (isinstance(n, ast.Call) and ast.unparse(n.func).endswith(".append")):
            over = ast.unparse(getattr(inside.get(id(n)), "iter", n))
            name = re.escape(
                ast.unparse(n.target if isinstance(n, ast.AugAssign) else getattr(n.func, "value", n.func))
            )
            averaged = rf"mean\({name}\b|sum\({name}\) */|\b{name}\)?\.mean\(|\b{name} */|tensor\({name}\)\.mean"
            several = SEVERAL.search(over) and not re.search(r"batch_size=1\b", text) and re.search(averaged, text)
            if id(n) in inside and several and NOT_ADDITIVE.search(ast.unparse(n)) and not _folds(inside[id(n)]):
                yield "mean of batches", n.value if isinstance(n, ast.AugAssign) else n
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and id(n) not in inside:
            name = ast.unparse(n.targets[0])
            computes = [c for c in calls if ast.unparse(c.func) == f"{name}.compute"]
            again = [c for c in computes if id(c) in inside or _recurs(owner.get(id(c)), calls, inside)]
            owned = {id(k.value) for k in nodes if isinstance(k, ast.Attribute)}
            uses = [u for u in nodes if isinstance(u, ast.Name | ast.Attribute) and ast.unparse(u) == name]
            if (
                again
                and all(id(u) in owned or u is n.targets[0] for u in uses)  # what takes the metric may reset it
                and f"{name}.update(" in text
                and f"{name}.reset" not in text
                and len(re.findall(rf"\b{re.escape(name)}\s*=[^=]", text)) == 1
            ):
                kinds = [k for k in nodes if isinstance(k, ast.ClassDef) and k.name == ast.unparse(n.value.func)]
                own = [ast.unparse(f) for k in kinds for f in k.body if getattr(f, "name", "") == "compute"]
                if not any(re.search(r"self\.(\w+ =|reset|clear)", each) for each in own):
                    yield "never reset", again[0]
    for loop in loops:
        yield from _piled_up(loop)
    scopes: list[ast.FunctionDef | ast.Module] = [*functions, tree]
    for f in scopes:
        yield from _orders(f)
        if re.search("BCEWithLogits|cross_entropy_with_logits", text):
            yield from _thresholds(f, tree, text)
    yield from _codes(calls, functions)
    yield from _aliases(loops, nodes)
    constants = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    settings = {ast.unparse(t) for n in constants for t in n.targets}
    for scope in (*functions, None):
        yield from _numbers_in_terms([n for n in nodes if owner.get(id(n)) is scope], settings)


def _folds(loop: Any) -> bool:
    """Return whether a loop goes over train and test parts (KFold.split gives both), or fits a model in each round."""
    each = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
    names = [n for n in ast.walk(loop.target) if isinstance(n, ast.Name)] if each else []
    if "split(" in each and len(names) - ("enumerate(" in each) > each.count("split("):
        return True
    return any(FITS.search(ast.unparse(row)) for row in loop.body)


FITS = re.compile(r"(optim\.|\b)(Adam\w*|SGD|RMSprop|LBFGS)\(|\.fit\(|(?<![.\w])(train|fit)\w*\(")
NUMBERS = ("args", "cfg", "config", "hparams", "torch", "math")  # owners of settings and of functions
EMPTY, CUT = re.compile(r"\[\]|list\(\)|(collections\.)?deque\(.*"), re.compile(r"\.(item|detach)\(\)")
IN_PLACE = re.compile(r"(copy|fill|zero|add|sub|mul|div|clamp|lerp|normal|uniform|masked_fill|index_copy|scatter)_")


def _aliases(loops: list[Any], nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield appends of one object that each round of a loop changes in place, so that all entries of the list are its
    last state. A name that the loop assigns is another object each time; a block that leaves the loop appends once."""
    sets = [n for n in nodes if isinstance(n, ast.Assign) and EMPTY.fullmatch(ast.unparse(n.value))]
    lists = {ast.unparse(t) for n in sets for t in n.targets}
    for loop in loops:
        rows = [n for row in loop.body for n in ast.walk(row)]
        names = [n for n in (*rows, *ast.walk(getattr(loop, "target", loop))) if isinstance(n, ast.Name)]
        stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        calls = [n for n in rows if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        parts = [n.value for n in rows if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        parts += [n.func.value for n in calls if isinstance(n.func, ast.Attribute) and IN_PLACE.fullmatch(n.func.attr)]
        changed = {n.id for n in parts if isinstance(n, ast.Name)} - stored
        blocks = [getattr(n, part, None) for n in (loop, *rows) for part in ("body", "orelse")]
        for block in (b for b in blocks if isinstance(b, list) and not isinstance(b[-1:][0] if b else None, ENDS)):
            for call in (row.value for row in block if isinstance(row, ast.Expr) and isinstance(row.value, ast.Call)):
                owner, _, name = ast.unparse(call.func).rpartition(".")
                values = getattr(call.args[0], "elts", call.args) if call.args and name == "append" else []
                if owner in lists and any(isinstance(v, ast.Name) and v.id in changed for v in values):
                    yield "aliases", call


ENDS = (ast.Break, ast.Return)


def _numbers_in_terms(nodes: list[ast.AST], settings: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield summands of a loss that have no gradient. Excluded are summands with names that may be parameters, and
    constants that are subtracted, such as the entropy of a teacher."""
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(".backward")]
    losses = set()
    for value in (v for c in calls for v in (getattr(c.func, "value", c), *c.args)):
        inner = value.args[0] if isinstance(value, ast.Call) and value.args else value  # scaler.scale(loss)
        losses.add(ast.unparse(inner.left if isinstance(inner, ast.BinOp) else inner))
    for n in nodes:
        targets = getattr(n, "targets", [getattr(n, "target", n)])
        if not isinstance(n, ast.Assign | ast.AugAssign) or ast.unparse(targets[0]) not in losses:
            continue
        terms = list(_summands(n.value))
        rest = [t for t in terms if not _is_number(t, settings)]
        if rest or (isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)):
            yield from (("number in a term", t) for t in terms if t not in rest and CUT.search(ast.unparse(t)))


def _summands(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [*_summands(value.left), *_summands(value.right)]
    return [value]


def _is_number(value: ast.expr, settings: set[str]) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_number(value.left, settings) and _is_number(value.right, settings)
    if isinstance(value, ast.Call):
        inner = getattr(value.func, "value", None)
        cut = isinstance(value.func, ast.Attribute) and value.func.attr in ("item", "detach")
        return cut or (inner is not None and all(_is_number(v, settings) for v in (inner, *value.args)))
    name = ast.unparse(value)
    return isinstance(value, ast.Constant) or name.split(".")[0] in NUMBERS or name.isupper() or name in settings


def _recurs(function: ast.FunctionDef | None, calls: list[ast.Call], inside: dict[int, Any]) -> bool:
    name = "" if function is None else function.name
    sites = [c for c in calls if ast.unparse(c.func).rpartition(".")[2] == name]
    return len(sites) > 1 or any(id(c) in inside for c in sites)


def _piled_up(loop: ast.For | ast.While) -> Iterator[tuple[str, ast.expr]]:
    rows = [n for row in loop.body for n in ast.walk(row)]
    inner = {id(n) for each in rows if isinstance(each, LOOPS) for row in each.body for n in ast.walk(row)}
    plus = [n.target for n in rows if isinstance(n, ast.AugAssign) and id(n) in inner]
    added = {t.id for t in plus if isinstance(t, ast.Name)}
    sets = [n for n in rows if isinstance(n, ast.Assign | ast.AnnAssign | ast.For)]
    targets = [t for n in sets for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
    left = added - {ast.unparse(e) for t in targets for e in ast.walk(t)}
    for n in rows:
        if not isinstance(n, ast.BinOp) or not isinstance(n.op, ast.Div) or id(n) in inner:
            continue
        one, other = ({ast.unparse(e) for e in ast.walk(side)} & left for side in (n.left, n.right))
        if one and other and not one & other and all(RIGHT.search(name) for name in one):
            yield "never reset", n


def _orders(scope: ast.FunctionDef | ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for body in [scope.body, *(n.body for n in ast.walk(scope) if isinstance(n, ast.For))]:
        plain = [n for row in body if isinstance(row, ast.Assign | ast.Return) for n in _replaced(row)]
        picks = [n for n in plain if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Call)]
        orders: dict[str, dict[str, ast.expr]] = {}
        for n in picks:
            if re.search(r"perm(utation)?\(", ast.unparse(n.slice)):
                orders.setdefault(ast.unparse(n.slice), {}).setdefault(ast.unparse(n.value), n)
        yield from (("two orders", list(rows.values())[1]) for rows in orders.values() if len(rows) > 1)


def _replaced(row: ast.Assign | ast.Return) -> list[ast.expr]:
    """Return the values that a statement returns, or the entries of a name that it assigns to the same name."""
    values = row.value.elts if isinstance(row.value, ast.Tuple) else [v for v in [row.value] if v is not None]
    if isinstance(row, ast.Return):
        return values
    target = row.targets[0]
    names = list(target.elts) if isinstance(target, ast.Tuple) else [target]
    pairs = zip(values, names, strict=False)
    return [v for v, n in pairs if isinstance(v, ast.Subscript) and ast.unparse(v.value) == ast.unparse(n)]


def _given_as_logits(tree: ast.Module, text: str) -> set[str]:
    """Return the models whose outputs are passed to a loss that expects logits. Empty if a class returns probabilities
    in evaluation mode."""
    nodes = list(ast.walk(tree))
    classes = [ast.unparse(n) for n in nodes if isinstance(n, ast.ClassDef)]
    if any("self.training" in each and SHARES.search(each) for each in classes):
        return set()
    sets = [n for n in nodes if isinstance(n, ast.Assign)]
    losses = {ast.unparse(n.targets[0]) for n in sets if "BCEWithLogits" in ast.unparse(n.value)}
    models = set()
    for call in (n for n in nodes if isinstance(n, ast.Call) and n.args):
        name = ast.unparse(call.func)
        if name in losses or "cross_entropy_with_logits" in name or "BCEWithLogitsLoss()" in name:
            first = ast.unparse(call.args[0])
            values = [ast.unparse(n.value) for n in sets if first in map(ast.unparse, n.targets)] or [first]
            models |= {v.partition("(")[0] for v in values if MODEL.match(v)}
    return models


def _thresholds(scope: ast.FunctionDef | ast.Module, tree: ast.Module, text: str) -> Iterator[tuple[str, ast.expr]]:
    rows = list(ast.walk(scope))
    models = _given_as_logits(tree, text)
    for n in rows:
        if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Gt) and ast.unparse(n.comparators[0]) == "0.5":
            name = ast.unparse(n.left)
            own = [a for a in rows if isinstance(a, ast.Assign) and name in map(ast.unparse, a.targets)]
            values = [ast.unparse(a.value) for a in own] if isinstance(n.left, ast.Name) else [name]
            called = {v.partition("(")[0] for v in values}
            if values and called <= models and all(MODEL.match(v) and not SHARES.search(v + name) for v in values):
                yield "logits above", n


def _codes(calls: list[ast.Call], functions: list[ast.FunctionDef]) -> Iterator[tuple[str, ast.expr]]:
    coders = {f.name: n for f in functions for n in ast.walk(f) if isinstance(n, ast.DictComp) and _numbers(n)}
    sites: dict[str, list[ast.Call]] = {}
    for call in calls:
        name = ast.unparse(call.func)
        sites.setdefault("fit_transform" if name.endswith(".fit_transform") else name, []).append(call)
    for name, each in sites.items():
        if name in coders or name == "fit_transform":
            texts = [ast.unparse(call) for call in each]
            trained = {t for t in texts if "train" in t}  # the same of another part
            pairs = [(c, HELD_OUT.sub("train", t)) for c, t in zip(each, texts, strict=True) if t not in trained]
            yield from [("codes", c) for c, t in pairs if t in trained][:1]


def _numbers(node: ast.DictComp) -> bool:
    over = ast.unparse(node.generators[0].iter)
    return over.startswith("enumerate(") and ("set(" in over or "unique" in over)


def _tries(node: ast.Try | ast.With) -> bool:
    if isinstance(node, ast.Try):
        return bool(node.handlers) and len(node.body) == 1
    return any(word in ast.unparse(i.context_expr) for i in node.items for word in ("suppress", "raises"))


def _parameters(loop: ast.AST) -> set[str]:
    return set(_taken(loop.target, loop.iter)) if isinstance(loop, ast.For) else set()


def _taken(target: ast.expr, source: ast.expr) -> Iterator[str]:
    if isinstance(source, ast.Subscript):
        yield from _taken(target, source.value)
    if isinstance(source, ast.ListComp | ast.GeneratorExp) and ast.unparse(source.elt) == ast.unparse(target):
        yield from _taken(target, source.generators[0].iter)
    if not isinstance(source, ast.Call):
        return
    name, parts = ast.unparse(source.func).rpartition(".")[2], getattr(target, "elts", [])
    if name == "zip":
        for part, each in zip(parts, source.args, strict=False):
            yield from _taken(part, each)
    elif name in ("list", "tuple", "reversed", "filter") and source.args:
        yield from _taken(target, source.args[-1])
    elif name == "enumerate" and len(parts) == 2:
        yield from _taken(parts[1], source.args[0])
    elif name == "parameters" and isinstance(target, ast.Name):
        yield target.id
    elif name == "named_parameters" and len(parts) == 2 and isinstance(parts[1], ast.Name):
        yield parts[1].id


def _kind(value: ast.expr, parameters: set[str], text: str) -> str | None:
    if isinstance(value, ast.Attribute):
        calls = [f"{ast.unparse(value.value)}.{other}(" for other in OF_OWNERS.get(value.attr, ())]
        return "method" if value.attr in METHODS or any(call in text for call in calls) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    name, owner = value.func.attr, value.func.value
    if name in CONTEXTS and ast.unparse(owner).split(".")[0] == "torch":
        return "context"
    if isinstance(owner, ast.Attribute) and owner.attr in ("data", "grad"):
        owner = owner.value
    of_layer = isinstance(owner, ast.Attribute) and owner.attr in ("weight", "bias") and owner is not value.func.value
    named = of_layer or (isinstance(owner, ast.Name) and owner.id in parameters)
    out = any(keyword.arg == "out" for keyword in value.keywords)
    return "result" if name in RETURNING and named and not out else None
