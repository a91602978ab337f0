"""Entries of `model.config` that change nothing: dropout of a family that has none, a classifier's in a language model.

In: a run, and the head of its model. Out: a note for each such entry. Small models tell: one of the run's config, and
others that differ in the entry alone, are drawn from one seed and run on the same examples, in evaluation and in
training. The answer is kept in the cache. Switches, rates and texts are tried; sizes are not, as some count for long
texts only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from lockstep.config.run import Run
from lockstep.tasks.models import heads, model_configs, padding, small_models

# Entries that lockstep sets itself, with what decides about them. `vocab_size` of a model from scratch adds room.
SET_HERE = {
    "pad_token_id": "the tokenizer decides",
    "use_cache": "it is off while training, and on in the export",
    "num_labels": "the task decides",
    "id2label": "the task decides",
    "label2id": "the task decides",
    "transformers_version": "the installed version decides",
}
OF_SCRATCH = {"bos_token_id": "the tokenizer decides", "eos_token_id": "the tokenizer decides"}
# Parts of names of entries that may count for texts or numbers larger than those of a trial.
CONDITIONAL = ("max", "min", "limit", "clip", "clamp", "cap", "position", "window", "chunk", "token_id", "rope")
DROPOUT = "drop"
OTHER_RATES = (0.0, 0.9)  # of dropout
# Entries of which something is said already, or that more than the model itself reads; `output_router_logits` is
# refused where it acts.
NOT_TRIED = {*SET_HERE, *OF_SCRATCH, "model_type", "problem_type", "is_encoder_decoder", "output_router_logits"}


def notes(run: Run, head: str | None) -> list[str]:
    """What to say of entries that change nothing, or that became other values. `head`: None for a model that is not of
    transformers. Errors: `RunError` when the cache cannot be written."""
    if head is None or not run.model.config or not heads.of(head).reads_texts:
        return []
    config = model_configs.load_config(run)
    entries = dict(_flat(run.model.config, config))
    known = SET_HERE | (OF_SCRATCH if run.model.type is not None else {})
    said = [
        f"model.config.{path} has no effect: {known[name]}"
        for path in entries
        if (name := path.rpartition(".")[2]) in known
    ]
    if not type(config).__module__.startswith("transformers."):
        return said
    for path, value in entries.items():
        made = _at(config, path)
        if isinstance(value, bool | int | float) and isinstance(made, bool | int | float) and made != value:
            said.append(f"model.config.{path}: {value} became {made}, as the config of {config.model_type} has it")
    if any(_is_tried(path, value) for path, value in entries.items()):
        without = run.model_copy(update={"model": run.model.model_copy(update={"adapter": {}})})
        given = hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()
        found = padding.kept_trial(without, head, config, inert, given)
        said += [f"model.config.{path} has no effect on this {config.model_type}" for path in (found or "").split()]
    return said


def inert(run: Run, head: str, config: Any) -> str | None:
    """Paths of the run's entries that change nothing, with blanks between them; None: every one that can be tried
    does."""
    with torch.random.fork_rng([]):
        entries = [(path, value) for path, value in _flat(run.model.config, config) if _is_tried(path, value)]
        return " ".join(path for path, value in entries if not acts(run, head, path, value)) or None


def acts(run: Run, head: str, path: str, value: Any) -> bool:
    """Whether another value of an entry makes another model, or other outputs; also where that cannot be tried."""
    seen: bytes | None = None
    compared = False
    for other in (value, *others(run, path, value)):
        try:
            print_ = _print(run, head, path, other)
        except Exception:  # a value that does not fit the others, or a model that cannot be tried
            if seen is None:
                return True
            continue
        if seen is None:
            seen = print_
        elif print_ != seen:
            return True
        else:
            compared = True
    return not compared


def others(run: Run, path: str, value: Any) -> Iterator[Any]:
    """Other values of an entry: that of the config without it, and such as would show a rate or a switch."""
    usual = _at(model_configs.load_config(_with(run, path, None)), path)
    if usual != value and usual is not None:
        yield usual
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        rates = OTHER_RATES if DROPOUT in path else (value * 2 + 0.1, value * 100 + 7.0)
        yield from (type(usual)(rate) if isinstance(usual, int) else rate for rate in rates if rate != value)


def _print(run: Run, head: str, path: str, value: Any) -> bytes:
    """A hash of the weights of a small model with this value of an entry, and of what it computes. Errors: whatever a
    model raises that cannot be tried."""
    config = model_configs.load_config(_with(run, path, {"value": value}))
    for wanted in small_models.smaller(config, head):
        if head.endswith("classification"):
            wanted.num_labels = 3
        try:
            return _computed(small_models.small(run, head, wanted, run.model.attention), head)
        except Exception as error:
            failure = error
    raise failure


def _computed(model: nn.Module, head: str) -> bytes:
    seen = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        seen.update(f"{name} {tuple(tensor.shape)}".encode())
        seen.update(tensor.detach().double().numpy().tobytes())
    for training in (False, True):
        for batch in small_models.BATCHES[:2]:
            torch.manual_seed(0)
            with torch.no_grad():
                outputs = model.train(training)(**small_models.examples(head, *batch))[0]
            seen.update(outputs.double().numpy().tobytes())
    return seen.digest()


def _with(run: Run, path: str, other: Mapping[str, Any] | None) -> Run:
    """The run with another value of an entry; None: without the entry."""

    def changed(entries: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        first, *rest = names
        if rest:
            return {**entries, first: changed(entries[first], rest)}
        left = {key: value for key, value in entries.items() if key != first}
        return left if other is None else left | {first: other["value"]}

    entries = changed(run.model.config, path.split("."))
    return run.model_copy(update={"model": run.model.model_copy(update={"config": entries})})


def _flat(entries: Mapping[str, Any], config: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by path, those of a config within the config one by one."""
    for key, value in entries.items():
        part = model_configs.entry(config, key)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            yield from _flat(value, part, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = model_configs.entry(config, name)
    return config


def _is_tried(path: str, value: Any) -> bool:
    """Whether a trial can tell of an entry that it changes nothing."""
    name = path.rpartition(".")[2]
    if name in NOT_TRIED or any(part in name for part in CONDITIONAL):
        return False
    return isinstance(value, bool | float | str) or (type(value) is int and DROPOUT in name)
