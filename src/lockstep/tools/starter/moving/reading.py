"""A file of another system's -> which system's, and its keys. A Python file is parsed, and never run.

In: a path. Out: `Read`, or a `RunError` that says what can be read.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import errors as messages
from lockstep.config.run import RunError
from lockstep.tools.starter.moving import axolotl, engines, llama_factory, sagemaker, trainer
from lockstep.tools.starter.moving.table import Moved

Move = Callable[[Mapping[str, Any], Moved, int | None], None]


@dataclass(frozen=True)
class Source:
    """A system whose files can be read."""

    called: str
    table: frozenset[str]  # its keys
    marks: frozenset[str]  # keys that no other system has: one of them is enough
    move: Move


SOURCES = {
    "accelerate": Source(
        "accelerate config",
        frozenset(engines.ACCELERATE),
        frozenset({"compute_environment", "distributed_type"}),
        engines.move_accelerate,
    ),
    "deepspeed": Source(
        "DeepSpeed",
        frozenset(engines.DEEPSPEED),
        frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}),
        engines.move_deepspeed,
    ),
    "axolotl": Source("axolotl", frozenset(axolotl.TABLE), frozenset({"base_model"}), axolotl.move),
    "llama_factory": Source(
        "LLaMA-Factory",
        frozenset(llama_factory.TABLE),
        frozenset({"finetuning_type", "stage", "cutoff_len", "dataset_dir"}),
        llama_factory.move,
    ),
    "trainer": Source(
        "TrainingArguments",
        frozenset(trainer.TABLE),
        frozenset({"per_device_train_batch_size", "num_train_epochs", "output_dir", "learning_rate"}),
        trainer.move,
    ),
}
SAGEMAKER = Source(sagemaker.CALLED, frozenset(sagemaker.TABLE), frozenset(), sagemaker.move)
_TASKS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForSeq2SeqLM": "translation",
    "ForConditionalGeneration": "translation",
    "ForCausalLM": "language_modeling",
}


@dataclass
class Read:
    """What a file holds."""

    source: Source
    keys: dict[str, Any]
    ours: dict[str, tuple[Any, str]] = field(default_factory=dict)  # keys of a run file, and where they were seen
    left: list[tuple[str, str]] = field(default_factory=list)  # what was seen and cannot be read, and why


def read(path: Path) -> Read:
    """Errors: `RunError`."""
    if path.suffix in (".bin", ".pt", ".pkl"):
        raise RunError(
            f"--from: {path} is pickled, and is not opened. In the script that wrote it: "
            'open("training_args.json", "w").write(args.to_json_string()); then --from training_args.json'
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--from: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".py":
        return _script(path, text)
    try:
        keys = json.loads(text) if path.suffix == ".json" else messages.read_yaml(text)
    except json.JSONDecodeError as error:
        raise RunError(f"--from: {path}, line {error.lineno}: {error.msg}") from None
    except yaml.YAMLError as error:
        raise RunError(f"--from: {path} is not valid YAML: {messages.yaml_fault(error)}") from None
    if not isinstance(keys, dict):
        raise RunError(f"--from: {path} must hold a mapping of keys, it holds {messages.kind(keys)}")
    keys = {str(name): value for name, value in keys.items()}
    return Read(_source_of(path, keys), keys)


def _source_of(path: Path, keys: Mapping[str, Any]) -> Source:
    """The system that has a key of its own among these."""
    for source in SOURCES.values():
        if source.marks & keys.keys():
            return source
    known = ", ".join(source.called for source in SOURCES.values())
    raise RunError(f"--from: {path} has no key by which it would be known as a file of {known}")


# -- Python ----------------------------------------------------------------------------------------------------------


def _script(path: Path, text: str) -> Read:
    """The one call of `TrainingArguments`, and what models and data sets the file names."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise RunError(f"--from: {path}, line {error.lineno}: {error.msg}") from None
    if (estimator := sagemaker.arguments(tree, str(path))) is not None:
        return Read(SAGEMAKER, estimator)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [c for c in calls if _name(c).endswith(("TrainingArguments", "SFTConfig"))]
    if len(found) != 1:
        places = ", ".join(str(call.lineno) for call in found)
        raise RunError(
            f"--from: {path} "
            + (f"calls TrainingArguments on lines {places}; leave one" if found else "has no call of TrainingArguments")
        )
    constants = _constants(tree)
    given = Read(SOURCES["trainer"], {})
    for word in found[0].keywords:
        if word.arg is None:
            given.left.append((f"**{ast.unparse(word.value)}", "what it holds is known when the script runs"))
            continue
        try:
            given.keys[word.arg] = _value(word.value, constants)
        except ValueError:
            why = "its value is known when the script runs; a default is taken where there is one"
            given.left.append((f"{word.arg}: {ast.unparse(word.value)[:60]}", why))
            given.keys[word.arg] = None
    if found[0].args:
        given.keys.setdefault("output_dir", _text(found[0].args[0], constants))
    for call in calls:
        _seen(call, constants, given)
    return given


def _seen(call: ast.Call, constants: Mapping[str, Any], given: Read) -> None:
    """Models and data sets that are loaded by name."""
    name = _name(call)
    first = _text(call.args[0], constants) if call.args else None
    where = f"line {call.lineno}"
    if name == "from_pretrained" and isinstance(call.func, ast.Attribute) and first is not None:
        loaded = ast.unparse(call.func.value)
        task = next((task for ending, task in _TASKS.items() if loaded.endswith(ending)), None)
        if task is not None:
            given.ours.setdefault("task.name", (task, f"{loaded}, {where}"))
            given.ours.setdefault("model.source", (first, f"{loaded}, {where}"))
    elif name == "load_dataset" and first is not None:
        second = _text(call.args[1], constants) if len(call.args) > 1 else None
        if first in ("csv", "json", "text", "parquet"):
            given.left.append((f"load_dataset({first!r}, ...)", f"{where}: name its files, --data FILE"))
        else:
            given.ours.setdefault("data.source", (first, f"load_dataset, {where}"))
            if second is not None:
                given.ours.setdefault("data.config", (second, f"load_dataset, {where}"))


def _name(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that are given one literal value, once."""
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    values = {}
    for name, given in found.items():
        if len(given) == 1:
            try:
                values[name] = ast.literal_eval(given[0])
            except ValueError:
                continue
    return values


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """A literal, a name of one, or a product of them. Errors: `ValueError`."""
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0].endswith(("Strategy", "Type", "Names")):
        return node.attr.lower()  # IntervalStrategy.EPOCH
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
        left, right = _value(node.left, constants), _value(node.right, constants)
        if isinstance(left, int | float) and isinstance(right, int | float) and right:
            product = isinstance(node.op, ast.Mult)
            return left * right if product else left / right if isinstance(node.op, ast.Div) else left // right
    return ast.literal_eval(node)


def _text(node: ast.expr, constants: Mapping[str, Any]) -> str | None:
    try:
        value = _value(node, constants)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
