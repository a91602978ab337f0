"""What the names of a script hold (a tokenizer, a model, rows), which split rows are of, and which columns are read.

In: a `Script` and a piece of its code. Out: words for these, None where it cannot be said.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from lockstep.tools.import_config.script import Call, Scope, Script

Kind = Literal["tokenizer", "model", "config", "rows", "trainer", "arguments", "adapter"]
CUT = "cut off train"  # the split that train_test_split makes
TOKENIZERS = ("Tokenizer", "TokenizerFast", "Processor")
_MAKERS = ("load_dataset", "load_from_disk", "concatenate_datasets", "interleave_datasets")
_WRAPPED = ("get_peft_model", "prepare_model_for_kbit_training", "prepare_model_for_int8_training")


def kind_of(script: Script, node: ast.expr | None, depth: int = 0) -> Kind | None:
    """What an expression gives."""
    if node is None or depth > 20:
        return None
    if isinstance(node, ast.Name):
        value = script.bound(node, last=True)
        if value is None:  # such as an argument of a function
            return "tokenizer" if "tokenizer" in node.id.lower() else "model" if node.id == "model" else None
        return kind_of(script, value, depth + 1)
    if isinstance(node, ast.Attribute):
        holder = kind_of(script, node.value, depth + 1)
        if node.attr in ("tokenizer", "processing_class"):
            return "tokenizer"
        return "config" if holder == "model" and node.attr == "config" else "model" if holder == "model" else None
    if isinstance(node, ast.Subscript):
        return "rows" if kind_of(script, node.value, depth + 1) == "rows" else None
    if isinstance(node, ast.IfExp):
        return kind_of(script, node.body, depth + 1) or kind_of(script, node.orelse, depth + 1)
    return _of_call(script, node, depth) if isinstance(node, ast.Call) else None


def _of_call(script: Script, node: ast.Call, depth: int) -> Kind | None:
    origin = script.origin_of(node.func)
    holder, _, name = origin.rpartition(".")
    if name in _MAKERS or holder in ("datasets.Dataset", "datasets.DatasetDict") or name == "DatasetDict":
        return "rows"
    if name in ("from_pretrained", "from_config"):
        return "tokenizer" if holder.endswith(TOKENIZERS) else "config" if holder.endswith("Config") else "model"
    if name in _WRAPPED:
        return "model"
    if is_trainer(script, name):
        return "trainer"
    if name.endswith("TrainingArguments") or name in ("SFTConfig", "DPOConfig", "RewardConfig", "CPOConfig"):
        return "arguments"
    if isinstance(node.func, ast.Attribute):
        kind = kind_of(script, node.func.value, depth + 1)
        return kind if kind in ("rows", "model") else None
    return None


def is_trainer(script: Script, name: str) -> bool:
    """Whether a class is a Trainer of transformers' or TRL's, or one of the script's own that is made of one."""
    own = script.classes.get(name)
    names = [script.origin_of(base) for base in own.bases] if own is not None else [name]
    return any(each.rpartition(".")[2].endswith("Trainer") for each in names)


def split_of(script: Script, node: ast.expr | None, depth: int = 0) -> str | None:
    """The split that rows are of, as their source calls it; CUT: what `train_test_split` has cut off train."""
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
            return CUT if name == "test" else "train"
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


# -- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column that a function reads, what stands before its texts, and the language within it."""

    name: str
    prefix: str = ""
    language: str | None = None


def column_of(script: Script, node: ast.expr | None, depth: int = 0) -> Column | None:
    """The column whose texts an expression of a mapped function gives as they are, or behind a prefix."""
    if node is None or depth > 12:
        return None
    if isinstance(node, ast.Name):
        return column_of(script, script.bound(node, last=True), depth + 1)
    if isinstance(node, ast.Subscript):
        name = script.known(node.slice)
        if not isinstance(name, str):
            return None
        outer = column_of(script, node.value, depth + 1) if isinstance(node.value, ast.Subscript) else None
        return Column(outer.name, outer.prefix, name) if outer is not None else Column(name)
    if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
        return _of_comprehension(script, node, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        prefix, column = script.known(node.left), column_of(script, node.right, depth + 1)
        return Column(column.name, prefix + column.prefix) if isinstance(prefix, str) and column is not None else None
    return None


def _of_comprehension(script: Script, node: ast.ListComp, depth: int) -> Column | None:
    """`[prefix + text for text in examples["text"]]`, `[row["en"] for row in examples["translation"]]`."""
    generator = node.generators[0]
    if not isinstance(generator.target, ast.Name):
        return None
    whole, prefix, element = column_of(script, generator.iter, depth + 1), "", node.elt
    if whole is None:
        return None
    if isinstance(element, ast.BinOp) and isinstance(element.op, ast.Add):
        before = script.known(element.left)
        if not isinstance(before, str):
            return None
        prefix, element = before, element.right
    if isinstance(element, ast.Name) and element.id == generator.target.id:
        return Column(whole.name, prefix + whole.prefix, whole.language)
    if isinstance(element, ast.Subscript) and isinstance(element.value, ast.Name):
        language = script.known(element.slice)
        if element.value.id == generator.target.id and isinstance(language, str):
            return Column(whole.name, prefix, language)
    return None


def function_of(script: Script, node: ast.expr | None) -> Scope | None:
    """The function of the script that a name or a lambda is; through functools.partial."""
    if isinstance(node, ast.Lambda):
        return node
    if isinstance(node, ast.Name):
        return script.functions.get(node.id)
    if isinstance(node, ast.Call) and script.origin_of(node.func).endswith("partial") and node.args:
        return function_of(script, node.args[0])
    return None


def calls_in(script: Script, function: Scope) -> list[Call]:
    inside = {id(node) for node in ast.walk(function)}
    return [call for call in script.calls if id(call.node) in inside]
