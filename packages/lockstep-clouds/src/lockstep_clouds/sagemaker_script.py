"""Convert calls of the sagemaker package's estimators to keys of `launch`.

In: a Python file that calls `HuggingFace`, `PyTorch`, `Estimator` or `ModelTrainer` with literals; it is parsed, never
run. Out: launch settings, and what has no counterpart. The training itself is in the script that the estimator names;
of its hyperparameters, fields of TrainingArguments are converted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config import key_aliases
from lockstep.config.error_messages import keys_of, secret
from lockstep.config.key_aliases import foreign_keys
from lockstep.config.run import Run, RunError
from lockstep.lab.import_config import trainer
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import NAMES, RunDraft, number, read_table
from lockstep_clouds import aws
from lockstep_trace.coded import quantity

CALLED = "an estimator of SageMaker"
TABLE = read_table("sagemaker")

# Path in ModelTrainer's configs -> argument of older estimators.
NEWER = {path: name for name, row in foreign_keys("sagemaker").items() for path in row.get("newer", ())}
# Usual argument names of scripts for these estimators -> field of TrainingArguments.
_USUAL = {
    "epochs": "num_train_epochs",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "lr": "learning_rate",
    "model_name": "model_name_or_path",
    "model_id": "model_name_or_path",
}
_DDP = ("torch_distributed", "pytorchddp", "Torchrun", "dataparallel")


@dataclass(frozen=True)
class Unread:
    """An expression that is not a literal: its value is known only when the script runs."""

    text: str


# -- the file --------------------------------------------------------------------------------------------------------


def read(script: Script) -> tuple[str, Callable[[RunDraft, int | None], None]] | None:
    """Return the converter, or None if the script creates no estimator. Errors: `RunError` if it creates several."""
    values = arguments(script)
    if values is None:
        return None
    return f"{CALLED}, {quantity(len(values), 'key')}", lambda draft, processes: move(values, draft, processes)


def arguments(script: Script) -> dict[str, Any] | None:
    """Return the arguments of a script's one estimator by their names in `TABLE` (others by their own), with `inputs`
    from `fit`; None if it creates none. Errors: `RunError` if it creates several."""
    makers = [
        call for call in script.calls if call.name in NAMES["estimators"] and call.origin.startswith("sagemaker.")
    ]
    if not makers:
        return None
    if len(makers) > 1:
        lines = ", ".join(str(call.line) for call in makers)
        raise RunError("LS7398", f"--from: {script.path} creates estimators on lines {lines}; keep only one")
    values: dict[str, Any] = {}
    for word in makers[0].node.keywords:
        value = _read(script, word.value)
        if word.arg is None:
            values |= value if isinstance(value, dict) else {f"**{ast.unparse(word.value)}": value}
        elif isinstance(value, dict) and any(path.startswith(f"{word.arg}.") for path in NEWER):
            values |= {f"{word.arg}.{name}": inner for name, inner in value.items() if name}
        else:
            values[word.arg] = value
    fits = [call for call in script.calls if call.name in ("fit", "train") and call.receiver is not None]
    for call in fits[:1]:
        nodes = script.arguments(call, ("inputs",)).nodes
        if (node := nodes.get("inputs", nodes.get("input_data_config"))) is not None:
            values["inputs"] = _read(script, node)
    return {NEWER.get(name, name): value for name, value in values.items()}


def _read(script: Script, node: ast.expr, depth: int = 0) -> Any:
    """Evaluate a literal, including mappings, lists and config objects created in place (a config's class has the key
    ""); else `Unread`."""
    if isinstance(node, ast.Name) and depth < 20 and (value := script.bound(node)) is not None:
        return _read(script, value, depth + 1)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _read(script, value, depth) for key, value in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.List | ast.Tuple):
        return [_read(script, each, depth) for each in node.elts]
    if isinstance(node, ast.Call) and not node.args and all(word.arg for word in node.keywords):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name[:1].isupper():
            return {"": name} | {str(word.arg): _read(script, word.value, depth) for word in node.keywords}
    value = script.known(node, Unread)
    return Unread(ast.unparse(node)) if value is Unread else value


# -- translation -----------------------------------------------------------------------------------------------------


def move(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> None:
    """Convert the result of `arguments`: all of `launch`, and known hyperparameters."""
    draft.set("launch.name", "sagemaker", "the estimator")
    read = {}
    for name, value in theirs.items():
        row = TABLE.get(name)
        if isinstance(value, Unread):
            here = f"; set {row.here}" if row is not None and row.here else ""
            draft.drop(f"{name}={value.text}", None, f"its value is known only when the script runs{here}")
        elif row is None:
            draft.drop(name, _plain(value), "unknown argument")
        elif row.joined:
            read[name] = value
        elif row.here:
            draft.set(row.here, value, name)
        elif value not in (None, False, row.default):
            draft.drop(name, _plain(value), row.how)
    _where(read, draft)
    _times(read, draft)
    _extra(read, draft)
    _distribution(read.get("distribution"), draft)
    _hyperparameters(read.get("hyperparameters"), draft, processes)


def _where(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Convert the instance, its container and its packages."""
    instance = theirs.get("instance_type")
    if instance in ("local", "local_gpu"):
        draft.set("launch.name", "local", f"instance_type {instance}")
        for key in [key for key in draft.keys if key.startswith("launch.") and key != "launch.name"]:
            draft.drop(draft.comments.pop(key), draft.keys.pop(key), "applies only to jobs in the cloud")
    elif instance is not None:
        draft.set("launch.instance", instance, "instance_type")
    for name in ("pytorch_version", "framework_version"):
        version = ".".join(str(theirs.get(name) or "").split(".")[:2])
        if version in aws.TAGS:
            draft.set("launch.pytorch", version, name)
        elif version:
            draft.drop(name, theirs[name], f"launch.pytorch is one of {', '.join(aws.TAGS)}; the default is used")
    for name, key in (("environment", "launch.environment"), ("inputs", "launch.inputs")):
        pairs, unread = _pairs(name, theirs.get(name))
        for left in [left for left, right in pairs.items() if secret({"launch": {name: [f"{left}={right}"]}})]:
            del pairs[left]
            draft.drop(
                f"{name}: {left}", None, "a secret: store it in AWS Secrets Manager and name it in launch.secrets"
            )
        if pairs:
            draft.set(key, [f"{left}={right}" for left, right in pairs.items()], name)
        for text in unread:
            draft.drop(f"{name}: {text}", None, f"its value is known only when the script runs; set {key}")


def _pairs(name: str, value: Any) -> tuple[dict[str, str], list[str]]:
    """Parse a mapping, channels or one address as name -> text; also return what could not be read."""
    if isinstance(value, str):
        value = {"training": value}  # as `fit` interprets it
    elif isinstance(value, list):
        value = {
            str(each.get("channel_name")): each.get("data_source") if isinstance(each, dict) else each
            for each in value
            if isinstance(each, dict)
        }
    known, unread = {}, []
    for left, right in (value or {}).items() if isinstance(value, dict) else ():
        if isinstance(right, dict):  # TrainingInput, S3DataSource
            right = right.get("s3_data") or right.get("s3_uri")
        if isinstance(right, str | int | float) and (name != "inputs" or str(right).startswith("s3://")):
            known[str(left)] = str(right)
        elif left:
            unread.append(f"{left}={right.text if isinstance(right, Unread) else right}")
    return known, unread


def _times(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Convert time limits: AWS uses seconds, and its waiting time includes the training."""
    seconds = number(theirs.get("max_run"))
    if seconds is not None:
        draft.set("launch.max_hours", seconds / 3600, f"max_run {seconds:g} s")
    if (whole := number(theirs.get("max_wait"))) is not None:
        rest = max(0.0, whole - (seconds if seconds is not None else 24 * 3600))
        draft.set("launch.wait_hours", rest / 3600, f"max_wait {whole:g} s, less max_run")


def _extra(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Pass fields to AWS's API unchanged."""
    extra: dict[str, Any] = {}
    names = []
    for name, row in TABLE.items():
        value, path = theirs.get(name), row.how.split(": ")  # VpcConfig: Subnets
        if row.here != "launch.extra" or value in (None, [], {}, False):
            continue
        if _has_unread(value):
            draft.drop(name, None, f"its value is known only when the script runs; set launch.extra.{'.'.join(path)}")
            continue
        if name == "tags":
            value = [{part.capitalize(): text for part, text in tag.items() if part} for tag in value]
        inner = extra
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
        names.append(name)
    if extra:
        draft.set("launch.extra", extra, ", ".join(names))


def _has_unread(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_has_unread(each) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Unread)


def _distribution(value: Any, draft: RunDraft) -> None:
    """Convert the distribution setting: lockstep starts its own ranks."""
    if not value:
        return
    kinds = str(_plain(value))
    if any(name in kinds for name in _DDP) and "modelparallel" not in kinds:
        draft.set("strategy.name", "ddp", f"distribution {kinds[:40]}")
    else:
        draft.drop("distribution", kinds, "set strategy.name; `lockstep list` shows the strategies")


def _hyperparameters(value: Any, draft: RunDraft, processes: int | None) -> None:
    if not isinstance(value, dict):
        return
    known, ours = {}, keys_of(Run)
    for name, each in value.items():
        plain = name.replace("-", "_")
        field = _USUAL.get(plain, plain)
        if field in trainer.TABLE and field not in known and not _has_unread(each):
            known[field] = each
            if field != plain:
                draft.notes.append(f"hyperparameters: {name} is read as {field} of TrainingArguments")
        else:
            why = key_aliases.place(name, ours) or "an argument of the script"
            draft.drop(f"hyperparameters: {name}", _plain(each), why, decides=True)
    if known:
        trainer.move(known, draft, processes)


def _plain(value: Any) -> Any:
    """Format a value for a message."""
    if isinstance(value, Unread):
        return value.text
    if isinstance(value, dict):
        inside = {name: _plain(each) for name, each in value.items() if name}
        return f"{value['']}({inside or ''})" if "" in value else inside
    return [_plain(each) for each in value] if isinstance(value, list) else value
