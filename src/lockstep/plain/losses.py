"""The loss of a padded batch, as the field writes it, through a model of transformers.

In: a model, examples. Out: the sum of the losses over targets, and how many targets there are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from lockstep.plain.examples import IGNORED

SMALL = 1e-4  # of the loss: what a model adds to the cross entropy, from which on it is more than rounding


def batch_loss(job: Any, model: nn.Module, examples: list[dict], step: int = 0) -> tuple[Tensor, float]:
    """The sum over targets, float32 with a graph, and the number of targets, with their weights. `job`: a `Plain`."""
    name = job.run["task"]["name"]
    device = next(model.parameters()).device
    return {"classification": _classification, "language_modeling": _next_tokens}[name](job, model, examples, device)


def padded(examples: list[dict], name: str, fill: int, device: Any) -> Tensor:
    """A list of every example, padded on the right: int64 [B, T]."""
    longest = max(len(example[name]) for example in examples)
    return torch.tensor([[*e[name], *[fill] * (longest - len(e[name]))] for e in examples], device=device)


def inputs_of(job: Any, examples: list[dict], device: Any) -> dict[str, Tensor]:
    """What a model reads."""
    found = {"input_ids": padded(examples, "input_ids", job.tokenizer.pad_token_id, device)}
    ones = [{"mask": [1] * len(example["input_ids"])} for example in examples]
    found["attention_mask"] = padded(ones, "mask", 0, device)
    if "token_type_ids" in examples[0]:
        found["token_type_ids"] = padded(examples, "token_type_ids", 0, device)
    if "position_ids" in examples[0]:
        # where texts are read by themselves: positions that begin anew say so, and transformers asks for no mask then
        found["position_ids"] = padded(examples, "position_ids", 0, device)
        del found["attention_mask"]
    return found


def _classification(job: Any, model: nn.Module, examples: list[dict], device: Any) -> tuple[Tensor, float]:
    task = job.run["task"]
    logits = model(**inputs_of(job, examples, device)).logits.float()  # [B, C]
    labels = torch.tensor([example["labels"] for example in examples], device=device)
    weight = None if job.class_weights is None else torch.tensor(job.class_weights, device=device).float()
    smooth, gamma = task["label_smoothing"], task["focal_gamma"]
    if task["regression"]:
        errors = logits - labels.float()
        return (errors.abs() if task["loss"] == "mae" else errors.square()).sum(), labels.numel()
    if task["multi_label"]:
        soft = labels.float() * (1 - smooth) + smooth / 2
        losses = binary_cross_entropy_with_logits(logits, soft, pos_weight=weight, reduction="none")
        if task["loss"] == "focal":
            losses = losses * (1 - torch.where(labels > 0, logits.sigmoid(), (-logits).sigmoid())) ** gamma
        return losses.sum(), labels.numel()
    count = float(len(labels) if weight is None else weight.double()[labels].sum())
    if task["loss"] == "focal":
        true = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
        losses = cross_entropy(logits, labels, reduction="none") * (1 - true) ** gamma
        return (losses if weight is None else losses * weight[labels]).sum(), count
    return cross_entropy(logits, labels, weight, reduction="sum", label_smoothing=smooth), count


def _next_tokens(job: Any, model: nn.Module, examples: list[dict], device: Any) -> tuple[Tensor, float]:
    """Cross entropy of each token after those before it, and what the model itself adds to it."""
    inputs, wanted = inputs_of(job, examples, device), padded(examples, "next", IGNORED, device)
    return _tokens(model(**inputs).logits, wanted)


def _tokens(logits: Tensor, wanted: Tensor, smoothing: float = 0.0) -> tuple[Tensor, float]:
    """Cross entropy of [B, T, V] against [B, T], summed over what is not IGNORED."""
    flat = logits.float().flatten(0, 1)
    total = cross_entropy(flat, wanted.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    return total, int((wanted != IGNORED).sum())


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every probability of dropout is 0 in here: of modules, of numbers that modules keep, of the config."""
    kept: list[tuple[Any, str, Any]] = []
    holders = [*model.modules(), *({id(c): c for m in model.modules() if (c := getattr(m, "config", None))}.values())]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            drops = "drop" in name or (name == "p" and type(holder).__module__ == nn.Dropout.__module__)
            if drops and isinstance(value, float) and value:
                kept.append((holder, name, value))
                setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)
