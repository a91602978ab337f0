"""Which of lockstep's metrics a script's `compute_metrics` returns: its `f1` may be the task's `macro_f1`.

In: a script, and its function. Out: `checkpoint.best` by lockstep's name, and a line for each score that the task does
not compute. The function is followed on random predictions of ours and not run; a score is lockstep's if its numbers
are the same. What is followed is a closed list of numpy, scikit-learn and evaluate.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.lab.import_config import bound_names
from lockstep.lab.import_config.kinds import function_of
from lockstep.lab.import_config.script import Script, Unknown
from lockstep.lab.import_config.table import RunDraft

_SAME = 1e-6  # scores that differ by less are the same
_OF_LOADING = ("cache_dir", "experiment_id", "keep_in_memory", "trust_remote_code", "download_mode")
_ROWS = 60  # random predictions, in which each label occurs
_DEPTH = 10  # of functions that call one another
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_METHODS = ("argmax", "sum", "mean", "astype", "flatten", "ravel", "squeeze", "item", "tolist", "copy")
_NUMPY = ("argmax", "sum", "mean", "equal", "not_equal", "logical_and", "logical_not", "array", "asarray", "maximum")
_PLAIN: Mapping[str, Callable[..., Any]] = {"float": float, "int": int, "max": max, "min": min, "sum": sum, "len": len}


class _NotFollowed(Exception):
    """A score whose code is not on the list."""


def rename_best(script: Script, function: ast.expr, draft: RunDraft) -> None:
    """Set `checkpoint.best` to lockstep's name of a classifier's score, or add a gap. Name the scores that are lost."""
    if draft.task != "classification":
        return
    scores = _scores(script, function_of(script, function))
    chosen = str(draft.keys.get("checkpoint.best", ""))
    best = chosen.removeprefix("-")
    if scores is None:
        why = f"which metric of lockstep it is was not seen: init does not follow {ast.unparse(function)}"
        if best not in ("", "loss", "accuracy") and not draft.is_given("checkpoint.best"):
            draft.unclear(f"metric_for_best_model: {best}", why, "checkpoint.best")
        elif best == "accuracy":
            draft.notes.append(
                f"metric_for_best_model: {best} is taken as the task's accuracy, over all examples; {why}"
            )
        return
    names = {name: ours for name, ours in scores.items() if ours is not None}
    lost = [name for name in scores if name not in names]
    if lost:
        draft.notes.append(
            f"not computed by the task: {', '.join(lost)}; metrics takes functions of (predictions, labels)"
        )
    if best in ("", "loss") or draft.is_given("checkpoint.best"):
        return
    if best not in scores:
        draft.unclear(f"metric_for_best_model: {best}", f"{ast.unparse(function)} has no such score", "checkpoint.best")
        return
    if best not in names:
        why = "its numbers are those of none of accuracy, macro_f1 and, of two labels, f1"
        draft.lacks(f"metric_for_best_model: {best}", why, "checkpoint.best")
        return
    comment = draft.comments.get("checkpoint.best", "")
    if names[best] != best:
        sign = "-" if chosen.startswith("-") else ""  # greater_is_better=False
        draft.set("checkpoint.best", f"{sign}{names[best]}", f"{comment}: {best} is {names[best]} here")
    if names[best] == "f1":
        draft.set("task.threshold", 0.5, f"f1 is that of the second label, as {best} of compute_metrics")


def _scores(script: Script, function: Any) -> dict[str, str | None] | None:
    """Return lockstep's name, or None, of each score of a function; None if the function is not followed."""
    import numpy as np

    counts = {script.known(word.value) for c in script.calls for word in c.node.keywords if word.arg == "num_labels"}
    number = next(iter(counts)) if len(counts) == 1 else None
    number = number if isinstance(number, int) and 1 < number < 100 else None
    same: dict[str, set[str]] = {}
    for labels in (number,) if number is not None else (2, 3):
        generator = np.random.default_rng(labels)
        for _ in range(3):
            true = np.concatenate([np.arange(labels), generator.integers(labels, size=_ROWS)])
            logits = generator.normal(size=(len(true), labels)) + np.eye(labels)[true]
            try:
                followed = _Followed(script, logits, true)
                result = followed.call(function, _Predictions(followed.prepared(), true), 0)
            except (_NotFollowed, ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
                return None
            if not isinstance(result, dict):
                return None
            ours = _of_lockstep(logits.argmax(-1), true, labels)
            for name, value in _unprefixed(result).items():
                equal = {key for key, of in ours.items() if abs(_number(value) - of) < _SAME}
                same[str(name)] = same.get(str(name), equal) & equal
    return {name: next(iter(sorted(each)), None) for name, each in same.items()}


def _unprefixed(result: dict[Any, Any]) -> dict[str, Any]:
    """Return scores by their names without `eval_`, which Trainer puts before each that does not begin with it."""
    names = sorted(map(str, result), key=lambda name: not name.startswith("eval_"))  # the others replace them
    return {name.removeprefix("eval_"): result[name] for name in names}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) or getattr(value, "ndim", 1) == 0 else float("nan")


def _of_lockstep(predicted: Any, true: Any, labels: int) -> dict[str, float]:
    """Return the metrics of the task for these predictions."""
    values = {"accuracy": float((predicted == true).mean()), "macro_f1": _averaged(true, predicted, "macro")[2]}
    return values | ({"f1": _averaged(true, predicted, "binary")[2]} if labels == 2 else {})


def _averaged(true: Any, predicted: Any, average: str | None) -> tuple[float, float, float]:
    """Return precision, recall and F1, averaged as scikit-learn does."""
    classes = sorted({*true.tolist(), *predicted.tolist()})
    counts = [
        (int(((true == c) & (predicted == c)).sum()), int((predicted == c).sum()), int((true == c).sum()))
        for c in classes
    ]
    each = [(r / max(p, 1), r / max(t, 1), 2 * r / max(p + t, 1)) for r, p, t in counts]
    if average == "binary" and len(classes) == 2:
        return each[1]
    if average == "micro":
        share = sum(r for r, _, _ in counts) / len(true)
        return share, share, share
    weights = {"macro": [1] * len(each), "weighted": [t for _, _, t in counts]}.get(str(average))
    if weights is None:
        raise _NotFollowed
    total = sum(weights)
    first, second, third = (sum(w * of[k] for w, of in zip(weights, each, strict=True)) / total for k in range(3))
    return first, second, third


class _Predictions(tuple):
    """transformers' EvalPrediction: a pair, whose parts have names."""

    predictions: Any
    label_ids: Any

    def __new__(cls, predictions: Any, label_ids: Any) -> _Predictions:
        pair = super().__new__(cls, (predictions, label_ids))
        pair.predictions, pair.label_ids = predictions, label_ids
        return pair


class _Followed:
    """Follows a function on values of ours."""

    def __init__(self, script: Script, logits: Any, true: Any) -> None:
        self.script, self.logits, self.true = script, logits, true

    def prepared(self) -> Any:
        """Return the predictions after `preprocess_logits_for_metrics`, if the Trainer has one."""
        word = "preprocess_logits_for_metrics"
        functions = [each.value for call in self.script.calls for each in call.node.keywords if each.arg == word]
        if not functions or (isinstance(functions[0], ast.Constant) and functions[0].value is None):
            return self.logits
        function: Any = function_of(self.script, functions[0])
        names = [each.arg for each in getattr(getattr(function, "args", None), "args", ())]
        if len(functions) > 1 or len(names) != 2 or getattr(function, "decorator_list", None):
            raise _NotFollowed
        values = dict(zip(names, (self.logits, self.true), strict=True))
        if isinstance(function, ast.Lambda):
            return self.value(function.body, values, 0)
        return self._body(function.body, values, 0)

    def call(self, function: Any, argument: Any, depth: int) -> Any:
        if not isinstance(function, ast.FunctionDef | ast.Lambda) or getattr(function, "decorator_list", None):
            raise _NotFollowed
        arguments = [*function.args.posonlyargs, *function.args.args]
        if len(arguments) != 1 or function.args.vararg or function.args.kwarg or depth > _DEPTH:
            raise _NotFollowed
        names = {arguments[0].arg: argument}
        if isinstance(function, ast.Lambda):
            return self.value(function.body, names, depth)
        return self._body(function.body, names, depth)

    def _body(self, lines: list[Any], names: dict[str, Any], depth: int) -> Any:
        for line in lines:
            if isinstance(line, ast.Return) and line.value is not None:
                return self.value(line.value, names, depth)
            if isinstance(line, ast.Assign) and len(line.targets) == 1:
                self._bind(line.targets[0], self.value(line.value, names, depth), names)
            elif isinstance(line, ast.If) and _is_guard(line.test, [*line.body, *line.orelse]):
                result = self._body(line.body if self.value(line.test, names, depth) else line.orelse, names, depth)
                if result is not None:
                    return result
            elif not (isinstance(line, ast.Expr) and (isinstance(line.value, ast.Constant) or _prints(line.value))):
                raise _NotFollowed
        return None

    def _bind(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(value) == len(target.elts):
            for each, part in zip(target.elts, value, strict=True):
                self._bind(each, part, names)
        else:
            raise _NotFollowed

    def value(self, node: ast.expr, names: dict[str, Any], depth: int) -> Any:
        """Evaluate an expression. Errors: `_NotFollowed`, and those of its operators."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return names[node.id] if node.id in names else self._outside(node)
        if isinstance(node, ast.Tuple):
            return tuple(self.value(each, names, depth) for each in node.elts)
        if isinstance(node, ast.Dict):
            return self._mapping(node, names, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            value = self.value(node.operand, names, depth)
            return -value if isinstance(node.op, ast.USub) else not value
        if isinstance(node, ast.BinOp | ast.Compare):
            return self._of_two(node, names, depth)
        if isinstance(node, ast.IfExp) and _is_guard(node.test, [node.body, node.orelse]):
            return self.value(node.body if self.value(node.test, names, depth) else node.orelse, names, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, names, depth)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant | ast.UnaryOp):
            return self.value(node.value, names, depth)[self.value(node.slice, names, depth)]
        if isinstance(node, ast.Call):
            return self._called(node, names, depth)
        raise _NotFollowed

    def _mapping(self, node: ast.Dict, names: dict[str, Any], depth: int) -> dict[Any, Any]:
        whole: dict[Any, Any] = {}
        for key, of in zip(node.keys, node.values, strict=True):
            value = self.value(of, names, depth)
            whole |= value if key is None else {self.value(key, names, depth): value}
        return whole

    def _of_two(self, node: ast.BinOp | ast.Compare, names: dict[str, Any], depth: int) -> Any:
        kind = type(node.op if isinstance(node, ast.BinOp) else node.ops[0])
        if kind not in _BINARY or (isinstance(node, ast.Compare) and len(node.ops) > 1):
            raise _NotFollowed
        right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
        return _BINARY[kind](self.value(node.left, names, depth), self.value(right, names, depth))

    def _outside(self, node: ast.Name) -> Any:
        if (value := self.script.known(node, Unknown)) is Unknown:
            raise _NotFollowed
        return value

    def _attribute(self, node: ast.Attribute, names: dict[str, Any], depth: int) -> Any:
        holder = self.value(node.value, names, depth)
        if isinstance(holder, _Predictions) and node.attr in ("predictions", "label_ids"):
            return getattr(holder, node.attr)
        if node.attr in ("shape", "size"):
            return getattr(holder, node.attr)
        raise _NotFollowed

    def _called(self, node: ast.Call, names: dict[str, Any], depth: int) -> Any:
        origin = self.script.origin_of(node.func)
        library, _, name = origin.rpartition(".")
        self._is_once(node.func)
        if isinstance(node.func, ast.Name) and node.func.id in self.script.functions:
            if len(node.args) != 1 or node.keywords:
                raise _NotFollowed
            function = function_of(self.script, node.func)
            return self.call(function, self.value(node.args[0], names, depth), depth + 1)
        if origin == "isinstance":
            return isinstance(self.value(node.args[0], names, depth), tuple) and ast.unparse(node.args[1]) == "tuple"
        loaded = (
            self._loaded(node.func.value, names) if isinstance(node.func, ast.Attribute) and name == "compute" else None
        )
        if any(word.arg is None for word in node.keywords) or any(isinstance(each, ast.Starred) for each in node.args):
            raise _NotFollowed
        words = {
            str(word.arg): ast.unparse(word.value) if word.arg == "dtype" else self.value(word.value, names, depth)
            for word in node.keywords
        }
        if loaded is not None:
            return self._computed(loaded, [self.value(each, names, depth) for each in node.args], words)
        if isinstance(node.func, ast.Attribute) and library != "numpy" and not library.startswith("sklearn"):
            return self._method(node, names, depth, words)
        values = [self.value(each, names, depth) for each in node.args]
        if library == "numpy" and name in _NUMPY:
            import numpy as np

            return getattr(np, name)(*values, **words)
        if library.startswith("sklearn"):
            return self._of_sklearn(name, values, words)
        if origin == "round" and len(values) == 2 and values[1] > 2 and not words:
            return values[0]
        if origin in _PLAIN and not words and (origin not in ("max", "min") or _bounds_counts(node.args)):
            return _PLAIN[origin](*values)
        raise _NotFollowed

    def _is_once(self, function: ast.expr) -> None:
        """Raise if the name of an imported function is assigned again."""
        root = bound_names.root_of(function)
        if root in self.script.imports and any(name == root for _, name in self.script.bindings):
            raise _NotFollowed

    def _method(self, node: ast.Call, names: dict[str, Any], depth: int, words: dict[str, Any]) -> Any:
        import numpy as np

        assert isinstance(node.func, ast.Attribute)
        holder = self.value(node.func.value, names, depth)
        if node.func.attr not in _METHODS or not isinstance(holder, np.ndarray | np.generic):
            raise _NotFollowed
        if node.func.attr == "astype":
            return holder if holder.dtype != bool else holder.astype(int)
        if "dim" in words:  # torch's name
            words["axis"] = words.pop("dim")
        return getattr(holder, node.func.attr)(*(self.value(each, names, depth) for each in node.args), **words)

    def _loaded(self, node: ast.expr, names: dict[str, Any]) -> list[str] | None:
        """Return the scores of `evaluate.load("f1")`, of `evaluate.combine([...])` and of GLUE's."""
        value = self.script.bound(node, last=True) if isinstance(node, ast.Name) and node.id not in names else node
        if not isinstance(value, ast.Call):
            return None
        origin, first = self.script.origin_of(value.func), self.script.known(value.args[0]) if value.args else None
        if origin == "evaluate.combine" and isinstance(first, list):
            return [str(each) for each in first]
        if origin not in ("evaluate.load", "datasets.load_metric") or not isinstance(first, str):
            return None
        if first == "glue":
            task = self.script.known(value.args[1]) if len(value.args) > 1 else None
            return {"mrpc": ["accuracy", "f1"], "qqp": ["accuracy", "f1"]}.get(
                str(task), ["accuracy"] if task not in ("cola", "stsb") else ["other"]
            )
        plain = len(value.args) == 1 and {word.arg for word in value.keywords} <= {*_OF_LOADING}
        return [first] if plain else ["other"]

    def _computed(self, scores: list[str], values: list[Any], words: dict[str, Any]) -> dict[str, Any]:
        predicted, true = words.pop("predictions"), words.pop("references")
        if values:
            raise _NotFollowed
        result: dict[str, Any] = {}
        for name in scores:
            own = words if name != "accuracy" else {}
            result[name] = self._of_sklearn(f"{name}_score", [true, predicted], own)
        return result

    def _of_sklearn(self, name: str, values: list[Any], words: dict[str, Any]) -> Any:
        """Return a score of scikit-learn; not a number if it is none of lockstep's."""
        values += [words.pop(each) for each in ("y_true", "y_pred") if each in words]
        if words.pop("zero_division", 0) not in (0, "warn"):
            raise _NotFollowed
        if len(values) != 2:
            raise _NotFollowed
        true, predicted = values
        if name == "accuracy_score" and not words:
            return float((true == predicted).mean())
        several = name == "precision_recall_fscore_support"
        average = words.pop("average", None if several else "binary")
        place = {"precision_score": 0, "recall_score": 1, "f1_score": 2}.get(name)
        if words or (place is None and not several):
            return float("nan")
        of = _averaged(true, predicted, average)
        return (*of, None) if several else of[place]  # type: ignore[index]


def _is_guard(test: ast.expr, branches: list[Any]) -> bool:
    """Return whether a condition is decided by no prediction: whether there are several outputs, or a division by zero
    whose result is 0. Of any other one only the branch of our predictions would be followed."""
    if isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance":
        return True
    limit = test.comparators[0] if isinstance(test, ast.Compare) else ast.Constant(0)
    zeros = (each for line in branches for each in ast.walk(line) if isinstance(each, ast.Constant))
    return isinstance(limit, ast.Constant) and limit.value == 0 and any(each.value == 0 for each in zeros)


def _bounds_counts(values: list[ast.expr]) -> bool:
    """Return whether `max` and `min` keep a divisor from 0, and no score in bounds."""
    numbers = [each.value for each in values if isinstance(each, ast.Constant)]
    return len(numbers) == len(values) - 1 and all(
        isinstance(each, int | float) and (each >= 1 or 0 <= each < _SAME) for each in numbers
    )


def _prints(node: ast.expr) -> bool:
    """Return whether a line prints, and calls no method that may change an array."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("print", "logger.info", "logging.info"):
        return False
    calls = [each.func for part in node.args for each in ast.walk(part) if isinstance(each, ast.Call)]
    return all(not isinstance(each, ast.Attribute) or each.attr in _METHODS for each in calls)
