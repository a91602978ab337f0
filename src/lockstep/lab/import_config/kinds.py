"""Kinds of values in a script: whether an expression is a tokenizer, a model, rows or a Trainer, and of which split.

In: a `Script` and an expression. Out: its kind, its split, the function behind it. A name has the kind of the value
that was assigned to it last before the line where it is read.
"""

from __future__ import annotations

import ast
import copy
from typing import Literal

from lockstep.lab.import_config.script import DTYPES, Scope, Script, Unknown

Kind = Literal["tokenizer", "model", "config", "rows", "trainer", "arguments", "adapter"]
CUT = "cut off train"  # the split from train_test_split
TOKENIZERS = ("Tokenizer", "TokenizerFast", "Processor")
COPIES = ("unique", "to_pandas", "to_dict", "to_list")  # methods of rows that return other objects
_TENSORS = (
    "argmax",
    "argmin",
    "softmax",
    "log_softmax",
    "sigmoid",
    "squeeze",
    "unsqueeze",
    "detach",
    "mean",
    "sum",
    "eq",
    "topk",
)
_MAKERS = ("load_dataset", "load_from_disk", "concatenate_datasets", "interleave_datasets")
_OTHER_TYPES = {"float16", "half", "bfloat16", "float64", "double", "dtype"}
_WRAPPED = ("get_peft_model", "prepare_model_for_kbit_training", "prepare_model_for_int8_training")


def kind_of(script: Script, node: ast.expr | None, depth: int = 0) -> Kind | None:
    """Return what an expression evaluates to: a tokenizer, a model, rows or something else."""
    if node is None or depth > 20:
        return None
    if isinstance(node, ast.Name):
        if node.id in script.settings:
            return "arguments"
        value = script.bound(node, last=True)
        if value is None:  # for example an argument of a function
            if "tokenizer" in node.id.lower():
                return "tokenizer"
            return "model" if node.id == "model" else None
        return kind_of(script, value, depth + 1)
    if isinstance(node, ast.Attribute):
        holder = kind_of(script, node.value, depth + 1)
        if node.attr in ("tokenizer", "processing_class"):
            return "tokenizer"
        if holder == "trainer" and node.attr == "model":
            return "model"
        if holder != "model":
            return None
        return "config" if node.attr == "config" else "model"
    if isinstance(node, ast.Subscript):
        return "rows" if kind_of(script, node.value, depth + 1) == "rows" else None
    if isinstance(node, ast.IfExp):
        parts = [each for each in (node.body, node.orelse) if script.known(each, Unknown) is not None]
        kinds = {kind_of(script, each, depth + 1) for each in parts}
        return kinds.pop() if len(kinds) == 1 else None
    return _of_call(script, node, depth) if isinstance(node, ast.Call) else None


def _of_call(script: Script, node: ast.Call, depth: int) -> Kind | None:
    origin = script.origin_of(node.func)
    holder, _, name = origin.rpartition(".")
    if name in _MAKERS or holder in ("datasets.Dataset", "datasets.DatasetDict") or name == "DatasetDict":
        return "rows"
    if name in ("from_pretrained", "from_config"):
        if holder.endswith(TOKENIZERS):
            return "tokenizer"
        return "config" if holder.endswith("Config") else "model"
    if name in _WRAPPED:
        return "model"
    if origin.startswith("peft.") and name.endswith("Config"):
        return "adapter"
    if is_trainer(script, name):
        return "trainer"
    if name.endswith("TrainingArguments") or name in ("SFTConfig", "DPOConfig", "RewardConfig", "CPOConfig"):
        return "arguments"
    if isinstance(node.func, ast.Attribute) and name not in COPIES:
        kind = kind_of(script, node.func.value, depth + 1)
        return kind if kind in ("rows", "model") else None
    function = script.functions.get(name) if isinstance(node.func, ast.Name) else None
    returns = [each for each in ast.walk(function) if isinstance(each, ast.Return)] if function is not None else []
    return kind_of(script, returns[0].value, depth + 1) if len(returns) == 1 else None


def is_trainer(script: Script, name: str, depth: int = 0) -> bool:
    """Return whether a class is a Trainer of transformers or TRL, or a subclass in the script."""
    if depth > 10:
        return False
    if (own := script.classes.get(name)) is None:
        return name.rpartition(".")[2].endswith("Trainer")
    return any(is_trainer(script, script.origin_of(base), depth + 1) for base in own.bases)


def split_of(script: Script, node: ast.expr | None, depth: int = 0) -> str | None:
    """Return the split of rows, by its source's name; CUT: the held-out part of `train_test_split`."""
    if node is None or depth > 30:
        return None
    if isinstance(node, ast.Name):
        return split_of(script, script.bound(node, last=True), depth + 1)
    if isinstance(node, ast.IfExp):
        return split_of(script, node.body, depth + 1)
    if isinstance(node, ast.Subscript):
        name = script.known(node.slice)
        inner = split_of(script, node.value, depth + 1)
        if inner == CUT:
            return "train" if name == "train" else CUT
        return name if isinstance(name, str) else None
    if isinstance(node, ast.Call):
        name = script.origin_of(node.func).rpartition(".")[2]
        if name == "load_dataset":
            split = next((word.value for word in node.keywords if word.arg == "split"), None)
            value = script.known(split)
            return value if isinstance(value, str) else None
        if name == "train_test_split":
            return CUT
        if isinstance(node.func, ast.Attribute):
            return split_of(script, node.func.value, depth + 1)
    return None


def function_of(script: Script, node: ast.expr | None) -> Scope | None:
    """Return the script's function behind a name, lambda or functools.partial."""
    if isinstance(node, ast.Lambda):
        return node
    if isinstance(node, ast.Name):
        return script.functions.get(node.id) if node.id not in script.ambiguous else None
    if isinstance(node, ast.Call) and script.origin_of(node.func).endswith("partial") and node.args:
        return function_of(script, node.args[0])
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
        return _own_method(script, node)
    return None


def _own_method(script: Script, node: ast.Attribute) -> Scope | None:
    """Return the method behind `self.name`, without its first parameter; None if another one may be called."""
    holders = [kind for kind in script.classes.values() if any(each is node for each in ast.walk(kind))]
    methods = [f for kind in holders for f in kind.body if isinstance(f, ast.FunctionDef) and f.name == node.attr]
    bases = {ast.unparse(base) for kind in script.classes.values() for base in kind.bases}
    set_again = any(
        isinstance(each, ast.Attribute) and each.attr == node.attr and not isinstance(each.ctx, ast.Load)
        for each in ast.walk(script.tree)
    )
    if len(holders) != 1 or len(methods) != 1 or holders[0].name in bases or set_again:
        return None
    method = copy.copy(methods[0])
    if method.decorator_list or [each.arg for each in method.args.args[:1]] != ["self"]:
        return None
    method.args = copy.copy(method.args)
    method.args.args = method.args.args[1:]
    return method


def narrows(script: Script, call: ast.Call) -> bool:
    """Return whether `x.to(...)` may cast a module: to a dtype that is neither float32 nor one of whole numbers."""
    words = [word.value for word in call.keywords if word.arg != "device"]
    if isinstance(call.func, ast.Attribute) and _is_tensor(script, call.func.value):
        return False
    if any(isinstance(each, ast.Starred) for each in call.args) or any(word.arg is None for word in call.keywords):
        return True
    for each in (*call.args, *words):
        value = (script.bound(each, last=True) or each) if isinstance(each, ast.Name) else each
        names = {ast.unparse(inner).rpartition(".")[2] for inner in ast.walk(value)}
        if names & _OTHER_TYPES or script.known(each) in ("float16", "bfloat16", "float64"):
            return True
    return False


def _is_tensor(script: Script, node: ast.expr | None, depth: int = 0) -> bool:
    """Return whether an expression is a result of tensors and no module: `out.logits.argmax(-1)`, `a == b`."""
    if isinstance(node, ast.Name) and depth < 10:
        return _is_tensor(script, script.bound(node), depth + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _TENSORS
    return isinstance(node, ast.Compare | ast.BinOp) or (isinstance(node, ast.Attribute) and node.attr == "logits")


def casts(script: Script, node: ast.Call) -> bool:
    """Return whether `x.to(...)` changes the dtype and not only the device."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "to":
        return False
    for each in (*node.args, *(word.value for word in node.keywords if word.arg in (None, "dtype", "other"))):
        last = script.origin_of(each).rpartition(".")[2] if isinstance(each, ast.Attribute) else ""
        if last in (*DTYPES, "float64", "double", "dtype") or script.known(each) in DTYPES.values():
            return True
    return any(word.arg in (None, "dtype", "other") for word in node.keywords)
