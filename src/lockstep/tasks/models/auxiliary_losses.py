"""Terms that a model of transformers adds to the cross entropy of its logits when it is given labels: the loss of the
routers of a mixture of experts, and others. Lockstep computes none of them, so configs that ask for one are refused.

In: a run, and the head of its model. Out: nothing, or a `RunError` that names the entry of the config. A trial on a
small model of the same config finds the term, as in `padding.py`; the answer is kept in the cache.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from lockstep.config.run import Run, RunError
from lockstep.tasks.models import model_configs, padding, small_models

# Parts of the names of entries that decide about a term.
HINTS = ("loss", "router", "aux", "coef", "smooth", "eps", "ngram", "mtp", "nextn")
ROUTER_LOGITS = "output_router_logits"  # the entry that asks for the loss of the routers, in all families
CLASSES = 3
SHARPER = 20.0  # logits of fresh weights are nearly equal, and a term that is made of them nearly nothing
NEAR = 1e-5  # how far two losses may be apart, relative to the cross entropy
IGNORED = -100  # transformers' label for a token without a target

LossPair = tuple[float, tuple[float, ...]]  # the loss, and the cross entropies that it may be


def check(run: Run, head: str) -> None:
    """Refuse a config whose model adds a term to its loss. Errors: `RunError`."""
    if head == "embedding":  # it has no loss of its own
        return
    if head == "classification" and "problem_type" in (run.model.config or {}):
        raise RunError(
            "model.config.problem_type: the task says what is learned; leave it out, and set task.multi_label: true or "
            "task.regression: true, or neither for one label a text"
        )
    without = run.model_copy(update={"model": run.model.model_copy(update={"adapter": {}})})  # adapters add no term
    refusal = padding.kept_trial(without, head, model_configs.load_config(run), auxiliary_term)
    if refusal is not None:
        raise RunError(f"model.config.{refusal}")


def auxiliary_term(run: Run, head: str, config: Any) -> str | None:
    """What to do about a term that models of this config add; None: they add none. The text follows `model.config.`. A
    config of which no small model can be made is judged by `ROUTER_LOGITS` alone."""
    with torch.random.fork_rng([]):
        for wanted in small_models.smaller(config, head):
            try:
                losses = loss_pairs(run, head, wanted)
            except Exception:  # entries that do not fit each other any more, or inputs that the model does not take
                continue
            return None if agree(losses) else _advice(run, head, wanted, losses)
    for path, part in _parts(config):
        if model_configs.entry(part, ROUTER_LOGITS) is True:
            return _refusal(config, {f"{path}{ROUTER_LOGITS}": False}, "")
    return None


def loss_pairs(run: Run, head: str, config: Any) -> list[LossPair]:
    """The loss that a small model gives for labels of two batches, in evaluation and in training, each beside the cross
    entropies of the logits of the same forward. Errors: `ValueError` for a loss that is no number."""
    config = copy.deepcopy(config)
    if head.endswith("classification"):
        config.num_labels = CLASSES
        config.problem_type = "single_label_classification"
    model: Any = small_models.small(run, head, config, None)
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
        raise ValueError("losses that are no numbers")
    return pairs


def labels_of(head: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Labels of examples, under the names that transformers' models take them by."""
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
    """The mean over targets, for each way in which a head's labels may belong to its logits: decoders that were made
    for an encoder (BART) take labels as the next tokens already."""
    if head == "question_answering":
        ends = (outputs.start_logits, labels["start_positions"]), (outputs.end_logits, labels["end_positions"])
        return (sum(float(cross_entropy(logits.float(), wanted)) for logits, wanted in ends) / 2,)
    logits, wanted = outputs.logits.float(), labels["labels"]
    means = [float(cross_entropy(logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORED))]
    if head == "causal":
        means.append(float(cross_entropy(logits[:, :-1].flatten(0, -2), wanted[:, 1:].flatten(), ignore_index=IGNORED)))
    return tuple(means)


def agree(pairs: list[LossPair]) -> bool:
    """Whether the losses are cross entropies of one kind, but for rounding."""
    kinds = zip(*(means for _, means in pairs), strict=True)
    losses = [loss for loss, _ in pairs]
    return any(all(_near(loss, mean) for loss, mean in zip(losses, means, strict=True)) for means in kinds)


def _near(loss: float, mean: float) -> bool:
    return abs(loss - mean) <= NEAR * abs(mean)


def _advice(run: Run, head: str, config: Any, pairs: list[LossPair]) -> str:
    """The refusal, naming the entry without which the loss is the cross entropy, found by changing one at a time."""
    loss, means = next((loss, means) for loss, means in pairs if not _near(loss, means[-1]))
    seen = f" (in a trial the loss is {loss:.4f}, the cross entropy {means[-1]:.4f})"
    every: dict[str, Any] = {}
    for path, value in _candidates(config):
        if _silent(run, head, config, {path: value}):
            return _refusal(config, {path: value}, seen)
        every[path] = value
    if every and _silent(run, head, config, every):
        return _refusal(config, every, seen)
    return (
        f"model_type: {config.model_type} adds a term to the cross entropy that lockstep leaves out{seen}; take another"
    )


def _refusal(config: Any, entries: Mapping[str, Any], seen: str) -> str:
    """The text behind `model.config.`, of the entries that would do."""
    (path, value), *others = entries.items()
    given = json.dumps(_read(config, path))
    more = "".join(f", model.config.{name}: {json.dumps(each)}" for name, each in others)
    return (
        f"{path}: {given} adds a term to the loss of {config.model_type} that lockstep does not compute{seen}; set "
        f"model.config.{path}: {json.dumps(value)}{more}"
    )


def _candidates(config: Any) -> Iterator[tuple[str, Any]]:
    """Entries that may decide about a term, by path, and the value that may take it away: switches before numbers."""
    named = [
        (path + name, value)
        for path, part in _parts(config)
        for name, value in vars(part).items()
        if any(hint in name for hint in HINTS)
    ]
    yield from ((path, not value) for path, value in named if isinstance(value, bool))
    yield from ((path, type(value)(0)) for path, value in named if type(value) in (int, float) and value)


def _parts(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config and all within it, each with the path to its entries."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, f"{path}{name}.")


def _read(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = model_configs.entry(config, name)
    return config


def _silent(run: Run, head: str, config: Any, entries: Mapping[str, Any]) -> bool:
    """Whether a config with these entries adds no term."""
    other = copy.deepcopy(config)
    for path, value in entries.items():
        *outer, name = path.split(".")
        setattr(_read(other, ".".join(outer)) if outer else other, name, value)
    try:
        return agree(loss_pairs(run, head, other))
    except Exception:
        return False
