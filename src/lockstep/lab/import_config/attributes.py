"""Attributes that a script sets: of arguments, of a model and its config, of a tokenizer, of weights.

In: a `Reading` of a script. Out: each assignment becomes a setting, a key of the run file, a gap with its line, or
nothing if it does not affect training. An assignment under an unknown condition is a gap if it affects training.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config import loading, trainer
from lockstep.lab.import_config.kinds import Kind, is_trainer, kind_of
from lockstep.lab.import_config.loading import RUNS, Reading
from lockstep.lab.import_config.script import Assignment, Unknown
from lockstep.lab.import_config.table import NAMES, decides

_SAVED = "tokenizers are used as saved"


def read(at: Reading) -> None:
    """Read all attribute assignments in order."""
    for each in at.script.assignments():
        if not isinstance(each.target, ast.Attribute):
            continue
        if each.condition is None:
            _setting(each, each.target, at)
            continue
        before = len(at.draft.gaps), dict(at.draft.keys), dict(at.arguments)
        _setting(each, each.target, at)
        if len(at.draft.gaps) == before[0] and (at.draft.keys, at.arguments) != before[1:]:
            why = f"it is set only {each.condition}, a condition that is known only when the script runs"
            at.draft.unclear(str(each), why, *sorted(at.draft.keys.keys() - before[1].keys()))


def _setting(each: Assignment, target: ast.Attribute, at: Reading) -> None:
    value = at.script.known(each.value, Unknown)
    kind = _kind(target, at)
    if target.attr == "requires_grad":
        at.draft.lacks(str(each), "model.freeze names the weights that are not trained", "model.freeze")
    elif isinstance(target.value, ast.Attribute) and target.value.attr == "generation_config" and kind == "model":
        why = "it affects generation, not training; the export has the model's own"
        at.draft.drop(str(each), None, why)
    elif kind in ("arguments", "tokenizer") and (late := _lateness(each, at)):
        if late != "trained" and not (kind == "tokenizer" and target.attr in NAMES["tokenizer_fields"]):
            why = "it is set after the Trainer is made, which may have used the value before: set it before"
            at.draft.unclear(str(each), why)
    elif kind == "arguments":
        _argument(each, target.attr, value, at)
    elif kind == "config":
        _config(each, target.attr, at)
    elif kind == "tokenizer":
        _tokenizer(each, target.attr, value, at)
    elif kind == "model" and target.attr not in NAMES["model_fields"]:
        at.draft.unclear(str(each), "its effect on the model is unknown")


def _lateness(each: Assignment, at: Reading) -> str:
    """Return `made` or `trained` if an assignment stands after the line that makes the Trainer, or that trains, in the
    same function; else nothing."""
    script, late = at.script, ""
    for call in script.calls:
        same = script.scopes.get(id(call.node)) is script.scopes.get(id(each.node))
        if not same or script.order.get(id(call.node), 0) > script.order.get(id(each.node), 0):
            continue
        if is_trainer(script, call.name):
            late = late or "made"
        elif call.name == "train" and kind_of(script, call.receiver) == "trainer" and call.condition is None:
            late = "trained"
    return late


def _kind(target: ast.Attribute, at: Reading) -> Kind | None:
    """Kind of the object that has the attribute. A tokenizer is recognised even after passing through code that is not
    followed."""
    kind = kind_of(at.script, target.value)
    if kind is None and target.attr in NAMES["tokenizer_fields_alone"]:
        return "tokenizer"
    return kind


def _argument(each: Assignment, name: str, value: Any, at: Reading) -> None:
    if value is Unknown:
        unknown_setting(at, name, str(each))
        return
    at.arguments[name] = value
    at.draft.read.append(f"{each} -> {name}")


def unknown_setting(at: Reading, name: str, where: str) -> None:
    """Record a field of TrainingArguments or a subclass whose value is unknown."""
    row = (trainer.TABLE | trainer.TRL).get(name)
    deciding = row is None or row.decides or (bool(row.here) and decides(row.here))
    by = (row.here,) if row is not None and row.here else ()
    at.draft.unclear(where, f"{RUNS}; a default is used", *by, decides=deciding)


def _config(each: Assignment, name: str, at: Reading) -> None:
    if name in ("id2label", "label2id") and each.value is not None:
        loading.named_labels(at, name, each.value, str(each), at.draft.task)
    elif name in NAMES["config_token_ids"]:
        _token_id(each, at)
    elif name not in NAMES["config_fields"]:
        at.draft.lacks(str(each), "model.config sets entries of the model's own config", "model.config")


def _token_id(each: Assignment, at: Reading) -> None:
    """Set a token id in the model's config. Language models do not use these ids; other models find the end of a text
    by them."""
    of_tokenizer = isinstance(each.value, ast.Attribute) and each.value.attr in NAMES["config_token_ids"]
    if not of_tokenizer and at.draft.task not in ("language_modeling", "masked_language_modeling", "preference"):
        why = "lockstep takes ids of special tokens from the tokenizer"
        at.draft.lacks(str(each), why, "tokenizer.source")


def _tokenizer(each: Assignment, name: str, value: Any, at: Reading) -> None:
    if name == "chat_template" and isinstance(value, str):
        at.draft.set("task.chat_template", value, f"line {each.node.lineno}")
        at.draft.read.append(f"{each} -> task.chat_template")
    elif name == "model_max_length" and (at.mapped or {"max_length", "max_seq_length"} & at.arguments.keys()):
        return  # the length is read from the tokenizer's calls, from TRL's arguments, or with this one
    elif name == "padding_side":
        loading.pads(at, value, str(each))
    elif name not in NAMES["tokenizer_fields"]:
        at.draft.lacks(str(each), _SAVED, "tokenizer.source")
