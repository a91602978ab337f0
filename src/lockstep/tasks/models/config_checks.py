"""Checks of `model.config` by trials on small models of the same config, as in `padding.py`; answers are cached.

In: the section `model`, and the head. Out: notes, or a `RunError` that names the entry of the config:
- Entries without effect (dropout in a family that has none) get a note. Models that differ only in the entry are
  drawn from one seed and run on the same examples. Sizes are not tried, as some matter only for long texts.
- Terms that a model adds to the cross-entropy of its logits when it is given labels (the router loss of a mixture of
  experts) are refused, because lockstep computes none; so are operations unsupported by portable arithmetic.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.batch import IGNORED
from lockstep.distributed.step_timer import quiet_profiler
from lockstep.tasks.models import heads, model_configs, padding

if TYPE_CHECKING:
    from lockstep.distributed import portable
    from lockstep.tasks.models import small_models
else:  # for `exact: portable`; for trials that are not in the cache
    (portable,) = lazy("lockstep.distributed", "portable")
    (small_models,) = lazy("lockstep.tasks.models", "small_models")

# Entries that lockstep sets itself -> what decides them. `vocab_size` of a model from scratch adds room.
SET_HERE = {
    "pad_token_id": "the tokenizer decides",
    "use_cache": "it is off in training, and on in the export",
    "num_labels": "the task decides",
    "id2label": "the task decides",
    "label2id": "the task decides",
    "transformers_version": "the installed version decides",
}
OF_SCRATCH = {"bos_token_id": "the tokenizer decides", "eos_token_id": "the tokenizer decides"}
# Parts of the names of entries that may matter only for texts or numbers larger than a trial's.
CONDITIONAL = ("max", "min", "limit", "clip", "clamp", "cap", "position", "window", "chunk", "token_id", "rope")
DROPOUT = "drop"
OTHER_RATES = (0.0, 0.9)  # of dropout
# Model types that add sinusoidal positions, of size 0.7, to token embeddings that start at 0.02, unless scaled.
UNSCALED = ("marian", "pegasus")
_HALF, _DRAWS = 0.5, 8  # share of the layers that a trial leaves out, and how often it draws them
# Entries reported elsewhere, or read by more than the model itself; `output_router_logits` is refused if it acts.
NOT_TRIED = {*SET_HERE, *OF_SCRATCH, "model_type", "problem_type", "is_encoder_decoder", "output_router_logits"}


def notes(section: ModelSection, head: str | None) -> list[str]:
    """Notes on entries that have no effect or were replaced by other values.

    `head`: None for a model that is not from transformers. Errors: `RunError` if the cache cannot be written."""
    if head is None or not section.config or not heads.of(head).reads_texts:
        return []
    config = model_configs.load_config(section)
    entries = dict(_flat(section.config, config))
    reasons = SET_HERE | (OF_SCRATCH if section.type is not None else {})
    messages = [
        f"model.config.{path} has no effect: {reasons[name]}"
        for path in entries
        if (name := path.rpartition(".")[2]) in reasons
    ]
    if not type(config).__module__.startswith("transformers."):
        return messages
    for path, value in entries.items():
        actual = _at(config, path)
        if isinstance(value, bool | int | float) and isinstance(actual, bool | int | float) and actual != value:
            messages.append(f"model.config.{path}: the config of {config.model_type} changes {value} to {actual}")
    if any(_is_tried(path, value) for path, value in entries.items()):
        without = section.model_copy(update={"adapter": {}})
        trial = padding.kept_trial(without, head, config, inert, section.config)
        messages += [f"model.config.{path} has no effect on this {config.model_type}" for path in (trial or "").split()]
    return messages


def unscaled_embeddings(section: ModelSection) -> list[str]:
    """Note on a model from scratch whose token embeddings are small beside its positions. Measured: a marian of width
    128 had the loss of a language model after 2,000 steps, as if without a source text; scaled, it translated."""
    if section.type not in UNSCALED or "scale_embedding" in section.config:
        return []
    return [
        f"the config of {section.type} has scale_embedding: false: from scratch its token embeddings are about 35 "
        "times smaller than its positions, and a small model may not learn to read its source text; set "
        "model.config.scale_embedding=true, or false to drop this note"
    ]


def longrope_limit(section: ModelSection, head: str | None) -> int | None:
    """Tokens beyond which a text makes the model's LongRoPE compute its whole batch with the factors of long texts;
    None for a model without LongRoPE."""
    if head is None or not heads.of(head).reads_texts:
        return None
    limits = []
    for part in model_configs.texts(model_configs.load_config(section)):
        parameters = model_configs.entry(part, "rope_parameters") or {}
        for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
            if each.get("rope_type") == "longrope":
                limits.append(int(each["original_max_position_embeddings"]))
    return min(limits, default=None)


def inert(section: ModelSection, head: str, config: Any, written: Mapping[str, Any]) -> str | None:
    """Paths in `model.config` that have no effect, space-separated; None if each one that can be tried has
    one."""
    with torch.random.fork_rng([]):
        entries = [(path, value) for path, value in _flat(written, config) if _is_tried(path, value)]
        return " ".join(path for path, value in entries if not acts(section, head, path, value)) or None


def acts(section: ModelSection, head: str, path: str, value: Any) -> bool:
    """Whether changing an entry changes the model or its outputs; True if that cannot be tried."""
    first_print: bytes | None = None
    compared = False
    for other in (value, *others(section, path, value)):
        try:
            print_ = _print(section, head, path, other)
        except Exception:  # an invalid combination of values, or a model that cannot be tried
            if first_print is None:
                return True
            continue
        if first_print is None:
            first_print = print_
        elif print_ != first_print:
            return True
        else:
            compared = True
    return not compared


def others(section: ModelSection, path: str, value: Any) -> Iterator[Any]:
    """Alternative values of an entry: the config's value without it, and values that reveal a rate or a switch."""
    usual = _at(model_configs.load_config(_with(section, path, None)), path)
    if usual != value and usual is not None:
        yield usual
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        rates = OTHER_RATES if DROPOUT in path else (value * 2 + 0.1, value * 100 + 7.0)
        yield from (type(usual)(rate) if isinstance(usual, int) else rate for rate in rates if rate != value)


def _print(section: ModelSection, head: str, path: str, value: Any) -> bytes:
    """Hash of the weights and outputs of a small model with this value of an entry. Errors: any that an untryable model
    raises."""

    def attempt(variant: Any) -> bytes:
        if head.endswith("classification"):
            variant.num_labels = CLASSES
        return _computed(small_models.small(section, head, variant, section.attention), head)

    config = model_configs.load_config(_with(section, path, {"value": value}))
    return small_models.tried(config, head, attempt)


def _computed(model: nn.Module, head: str) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().double().numpy().tobytes())
    for training in (False, True):
        for batch in small_models.BATCHES[:2]:
            torch.manual_seed(0)
            with torch.no_grad():
                outputs = model.train(training)(**small_models.examples(head, *batch))[0]
            digest.update(outputs.double().numpy().tobytes())
    return digest.digest()


def _with(section: ModelSection, path: str, other: Mapping[str, Any] | None) -> ModelSection:
    """The section with another value of an entry, or without it if None."""

    def changed(entries: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        first, *rest = names
        if rest:
            return {**entries, first: changed(entries[first], rest)}
        others = {key: value for key, value in entries.items() if key != first}
        return others if other is None else others | {first: other["value"]}

    entries = changed(section.config, path.split("."))
    return section.model_copy(update={"config": entries})


def _flat(entries: Mapping[str, Any], config: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by path; nested configs are flattened."""
    for key, value in entries.items():
        part = model_configs.entry(config, key)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            yield from _flat(value, part, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _at(config: Any, path: str) -> Any:
    """The entry at a path."""
    for name in path.split("."):
        config = model_configs.entry(config, name)
    return config


def _is_tried(path: str, value: Any) -> bool:
    """Whether a trial can show that an entry has no effect."""
    name = path.rpartition(".")[2]
    if name in NOT_TRIED or any(part in name for part in CONDITIONAL):
        return False
    return isinstance(value, bool | float | str) or (type(value) is int and DROPOUT in name)


# Parts of the names of entries that may control a loss term.
HINTS = ("loss", "router", "aux", "coef", "smooth", "eps", "ngram", "mtp", "nextn")
ROUTER_LOGITS = "output_router_logits"  # enables the router loss, in all families
CLASSES = 3
SHARPER = 20.0  # logits of initial weights are nearly equal, so a term computed from them is nearly zero
NEAR = 1e-5  # tolerance of losses, relative to the cross-entropy


def check_portable(section: ModelSection, head: str) -> None:
    """Refuse a text model that uses operations unsupported by `strategy.exact: portable`. Errors: `RunError`."""
    name = padding.kept_trial(section, head, model_configs.load_config(section), unportable_operation, portable.REFUSED)
    if name is not None:
        raise portable.unportable(name)


def unportable_operation(section: ModelSection, head: str, config: Any, operations: Collection[str]) -> str | None:
    """Name of an unsupported operation; None if there is none or no small model of this config can be built."""
    refused = {*operations} - {portable.FLASH}  # disabled by portable arithmetic

    def attempt(variant: Any) -> str | None:
        model = small_models.small(section, head, variant, None)
        quiet_profiler()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            small_models.computed(model, head, small_models.examples(head, *small_models.BATCHES[0]))
        called = {entry.key.removeprefix("aten::") for entry in profile.key_averages()}
        return min(called & refused, default=None)

    with suppress(Exception):
        return small_models.tried(config, head, attempt)
    return None


def check_masked(section: ModelSection, head: str) -> None:
    """Refuse a model that does not predict each token at its own position. Errors: `RunError`."""
    config = model_configs.load_config(section)
    if config.is_encoder_decoder:
        raise RunError(
            "LS3065",
            f"model: masked tokens are predicted from all others, and {config.model_type} has a decoder, which reads "
            "only those before; choose an encoder such as bert",
        )
    if (positions := padding.kept_trial(section, head, config, other_positions)) is not None:
        raise RunError(
            "LS3066",
            f"model: this {config.model_type} has logits of {positions} positions for a text of any length; choose "
            "another model",
        )


def other_positions(section: ModelSection, head: str, config: Any) -> str | None:
    """Number of positions of the logits if it is not that of the tokens; None also if no small model can be built."""

    def attempt(variant: Any) -> str | None:
        inputs = small_models.examples(head, *small_models.BATCHES[0])
        with torch.no_grad():
            logits = small_models.small(section, head, variant, None)(**inputs)[0]
        return None if logits.shape[1] == inputs["input_ids"].shape[1] else str(logits.shape[1])

    with suppress(Exception):
        return small_models.tried(config, head, attempt)
    return None


def rejected_types(section: ModelSection, head: str, config: Any) -> str | None:
    """The error of a model that has no embedding for token type 1; None if it has one or ignores types, and if no small
    model can be built."""

    def attempt(variant: Any) -> str | None:
        inputs = small_models.examples(head, *small_models.BATCHES[0])
        model = small_models.small(section, head, variant, None)
        with torch.no_grad():
            model(**inputs)
            try:
                model(**inputs, **small_models.typed(inputs))
            except IndexError as error:
                return small_models.brief(error)
        return None

    with suppress(Exception):
        return small_models.tried(config, head, attempt)
    return None


def fails_without_layers(section: ModelSection, head: str, config: Any) -> str | None:
    """What a model of this config raises in training when it leaves out layers, as text that follows `model.config.`;
    None if nothing, or if no small model can be built."""
    inputs = small_models.examples(head, *small_models.BATCHES[0])
    for name in model_configs.LAYERDROP:
        if (getattr(config, name, None) or 0) <= 0:
            continue

        def attempt(variant: Any, name: str = name) -> Any:
            for each in model_configs.LAYERDROP:
                if getattr(variant, each, None):
                    setattr(variant, each, _HALF if each == name else 0.0)
            small_models.computed(model := small_models.small(section, head, variant, None), head, inputs)
            return model.train()

        with suppress(Exception):  # such a small model computes nothing without layers left out, either
            model = small_models.tried(config, head, attempt)
            with torch.random.fork_rng([]):
                for seed in range(_DRAWS):
                    torch.manual_seed(seed)
                    try:
                        model(**inputs)
                    except Exception as error:
                        return (
                            f"{name}: transformers' {config.model_type} fails when it leaves out a layer in training "
                            f"({small_models.brief(error)}); set it to 0"
                        )
    return None


LossPair = tuple[float, tuple[float, ...]]  # the loss, and the cross-entropies it may equal


def check(section: ModelSection, head: str) -> None:
    """Refuse a config whose model adds a term to its loss, or fails when it leaves out layers at random. Errors:
    `RunError`."""
    if model_configs.leaves_out_layers(config := model_configs.load_config(section)) is not None:
        without = section.model_copy(update={"adapter": {}})
        if (failure := padding.kept_trial(without, head, config, fails_without_layers)) is not None:
            raise RunError("LS3112", f"model.config.{failure}")
    if head == "embedding":  # it has no loss of its own
        return
    if head == "classification" and "problem_type" in (section.config or {}):
        raise RunError(
            "LS3110",
            "model.config.problem_type: the task decides the problem type; remove it, and set "
            "task.multi_label: true or task.regression: true, or neither for one label per text",
        )
    without = section.model_copy(update={"adapter": {}})  # adapters add no term
    refusal = padding.kept_trial(without, head, model_configs.load_config(section), auxiliary_term)
    if refusal is not None:
        raise RunError("LS3111", f"model.config.{refusal}")


def auxiliary_term(section: ModelSection, head: str, config: Any) -> str | None:
    """How to remove a loss term that models of this config add, as text that follows `model.config.`; None if they add
    none. If no small model can be built, `ROUTER_LOGITS` alone decides."""
    try:
        variant, losses = small_models.tried(
            config, head, lambda variant: (variant, loss_pairs(section, head, variant))
        )
    except Exception:  # or the model rejects the inputs
        for path, part in _parts(config):
            if model_configs.entry(part, ROUTER_LOGITS) is True:
                return _refusal(config, {f"{path}{ROUTER_LOGITS}": False}, "")
        return None
    with torch.random.fork_rng([]):
        return None if agree(losses) else _advice(section, head, variant, losses)


def loss_pairs(section: ModelSection, head: str, config: Any) -> list[LossPair]:
    """Losses of a small model for two labeled batches, in evaluation and training mode, each with the cross-entropies
    of the same forward's logits. Errors: `ValueError` if a loss is not a number."""
    config = copy.deepcopy(config)
    if head.endswith("classification"):
        config.num_labels = CLASSES
        config.problem_type = "single_label_classification"
    model: Any = small_models.small(section, head, config, None)
    pairs = []
    with torch.no_grad():
        if (last := model.get_output_embeddings()) is not None:
            last.weight *= SHARPER
        for training, batch in product((False, True), small_models.BATCHES[:2]):
            inputs = small_models.examples(head, *batch)
            labels = labels_of(head, inputs)
            torch.manual_seed(0)
            outputs = model.train(training)(**inputs, **labels)
            pairs.append((float(outputs.loss), cross_entropies(head, outputs, labels)))
    if not all(math.isfinite(number) for loss, means in pairs for number in (loss, *means)):
        raise ValueError("losses that are not finite")
    return pairs


def labels_of(head: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Labels for examples, under the argument names of transformers' models."""
    ids, lengths = inputs["input_ids"], inputs["attention_mask"].sum(1)
    if head == "classification":
        return {"labels": torch.arange(len(ids)) % CLASSES}
    if head == "question_answering":
        return {"start_positions": lengths // 3, "end_positions": lengths // 2}
    if head == "token_classification":
        ids = ids % CLASSES
    mask = inputs["attention_mask"]
    if head == "seq2seq":
        ids, mask = inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
    return {"labels": ids.masked_fill(mask == 0, IGNORED)}


def cross_entropies(head: str, outputs: Any, labels: Mapping[str, Tensor]) -> tuple[float, ...]:
    """Mean cross-entropy over targets for each possible alignment of labels and logits: decoders of encoder-decoder
    families (BART) take labels that are already shifted."""
    if head == "question_answering":
        ends = (outputs.start_logits, labels["start_positions"]), (outputs.end_logits, labels["end_positions"])
        return (sum(float(cross_entropy(logits.float(), targets)) for logits, targets in ends) / 2,)
    logits, targets = outputs.logits.float(), labels["labels"]
    means = [float(cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED))]
    if head == "causal":
        means.append(
            float(cross_entropy(logits[:, :-1].flatten(0, -2), targets[:, 1:].flatten(), ignore_index=IGNORED))
        )
    return tuple(means)


def agree(pairs: list[LossPair]) -> bool:
    """Whether all losses equal cross-entropies of one alignment, within rounding."""
    kinds = zip(*(means for _, means in pairs), strict=True)
    losses = [loss for loss, _ in pairs]
    return any(all(_near(loss, mean) for loss, mean in zip(losses, means, strict=True)) for means in kinds)


def _near(loss: float, mean: float) -> bool:
    return abs(loss - mean) <= NEAR * abs(mean)


def _advice(section: ModelSection, head: str, config: Any, pairs: list[LossPair]) -> str:
    """The refusal text. It names the entry without which the loss is the cross-entropy, identified by changing one
    entry at a time."""
    loss, means = next((loss, means) for loss, means in pairs if not _near(loss, means[-1]))
    measured = f" (in a trial the loss is {loss:.4f}, the cross entropy {means[-1]:.4f})"
    every: dict[str, Any] = {}
    for path, value in _candidates(config):
        if _silent(section, head, config, {path: value}):
            return _refusal(config, {path: value}, measured)
        every[path] = value
    if every and _silent(section, head, config, every):
        return _refusal(config, every, measured)
    return (
        f"model_type: {config.model_type} adds a term to the cross entropy that lockstep does not "
        f"compute{measured}; use another"
    )


def _refusal(config: Any, entries: Mapping[str, Any], measured: str) -> str:
    """The text after `model.config.` that names the entries to set."""
    (path, value), *others = entries.items()
    current = json.dumps(_at(config, path))
    more = "".join(f", model.config.{name}: {json.dumps(each)}" for name, each in others)
    return (
        f"{path}: {current} adds a term to the loss of {config.model_type} that lockstep does not compute{measured}; "
        f"set model.config.{path}: {json.dumps(value)}{more}"
    )


def _candidates(config: Any) -> Iterator[tuple[str, Any]]:
    """Entries that may control a loss term, by path, with a value that may disable it: switches before numbers."""
    named = [
        (path + name, value)
        for path, part in _parts(config)
        for name, value in vars(part).items()
        if any(hint in name for hint in HINTS)
    ]
    yield from ((path, not value) for path, value in named if isinstance(value, bool))
    yield from ((path, type(value)(0)) for path, value in named if type(value) in (int, float) and value)


def _parts(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and its nested configs, each with the path prefix of its entries."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, f"{path}{name}.")


def _silent(section: ModelSection, head: str, config: Any, entries: Mapping[str, Any]) -> bool:
    """Whether a config with these entries adds no loss term."""
    other = copy.deepcopy(config)
    for path, value in entries.items():
        *outer, name = path.split(".")
        setattr(_at(other, ".".join(outer)) if outer else other, name, value)
    try:
        return agree(loss_pairs(section, head, other))
    except Exception:
        return False
