"""The user's module, data and loss (`task: module`), called directly.

In: a run file as a mapping. Out: items by split, batches, and the sum of their losses.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from lockstep.plain.rows import SPLIT_NAMES, NotCovered


def named(task: dict, key: str, default: Any = None) -> Any:
    """Import the object that a key of the task names; a loss that is an `nn.Module` class is instantiated."""
    if not task.get(key):
        return default
    path, _, last = task[key].rpartition(".")
    attribute = getattr(importlib.import_module(path), last)
    return (
        attribute() if key == "loss" and isinstance(attribute, type) and issubclass(attribute, nn.Module) else attribute
    )


def read_splits(run: dict) -> dict[str, Subset]:
    """Return the items of each split. Without a validation split, a random share of train is held out."""
    task, splits = run["task"], named(run["task"], "data")
    if isinstance(splits, type) or not hasattr(splits, "__getitem__"):
        splits = splits(**task["data_arguments"])
    splits = dict(zip(SPLIT_NAMES, splits, strict=False)) if isinstance(splits, tuple) else splits
    splits = splits if isinstance(splits, Mapping) else {"train": splits}
    sets = {split: splits[word] for split, words in SPLIT_NAMES.items() for word in words if word in splits}
    for split, data in sets.items():  # data sets of `datasets` return tensors
        sets[split] = data if getattr(data, "format", {"type": "none"})["type"] else data.with_format("torch")
    places = {split: np.arange(min(len(data), run["data"]["limit"] or len(data))) for split, data in sets.items()}
    if "validation" not in sets:
        shuffled, sets["validation"] = np.random.default_rng(run["seed"]).permutation(places["train"]), sets["train"]
        count = max(1, round(len(shuffled) * run["data"]["validation_fraction"]))
        places |= {"validation": np.sort(shuffled[:count]), "train": np.sort(shuffled[count:])}
    return {split: Subset(data, places[split].tolist()) for split, data in sets.items()}


def build(run: dict) -> nn.Module:
    """Build the user's model."""
    model = named(run["task"], "model")(**run["task"]["model_arguments"])
    return nn.Sequential(*model) if isinstance(model, list | tuple) else model


def batch_of(run: dict, items: list[Any]) -> dict[str, Any]:
    """Return a batch with its number of targets, and its first item once and twice, to tell a mean loss from a sum."""
    collate, count = named(run["task"], "collate", default_collate), named(run["task"], "targets", lambda item: 1)
    return {
        name: (collate(each), sum(map(count, each)))
        for name, each in {"batch": items, "alone": items[:1], "twice": items[:1] * 2}.items()
    }


def batch_loss(job: Any, model: nn.Module, examples: list[dict], device: Any) -> tuple[Tensor, float]:
    """Return the summed loss of a batch, and its number of targets.

    A scalar loss is a sum if a batch of the same item twice doubles it, and a mean if that does not change it. Errors:
    `NotCovered` if neither holds."""
    (batch,) = examples
    value, count = _value(job, model, batch["batch"], device), batch["batch"][1]
    if value.numel() > 1 or count == 1:  # one value per target, or a single target, where sum and mean are equal
        return value.sum(), count if job.run["task"].get("targets") else value.numel()
    training = model.training
    try:
        with torch.no_grad():
            once, both = (float(_value(job, model.eval(), batch[key], device)) for key in ("alone", "twice"))
    except Exception as error:
        raise NotCovered(f"task.loss: the loss of a single item raises: {error}") from error
    finally:
        model.train(training)
    near = 1e-3 * abs(once)
    if abs(both - once) <= near < abs(both - 2 * once):
        return value.reshape(()) * count, count
    if abs(both - 2 * once) <= near < abs(both - once):
        return value.reshape(()), count
    raise NotCovered("task.loss: the loss of the same item twice is neither the mean nor the sum of two losses")


def _value(job: Any, model: nn.Module, batch: tuple[Any, int], device: Any) -> Tensor:
    """Return the user's loss, float32."""
    inputs, loss_inputs = batch[0] if type(batch[0]) in (list, tuple) else (batch[0], batch[0])
    loss, taken = named(job.run["task"], "loss"), inspect.signature(model.forward).parameters
    if isinstance(loss, nn.Module):
        loss.to(device)
    if not isinstance(inputs, Mapping):
        return loss(model(inputs), loss_inputs).float()
    whole = any(each.kind == each.VAR_KEYWORD for each in taken.values())
    return loss(model(**{name: each for name, each in inputs.items() if whole or name in taken}), loss_inputs).float()
