"""A module of the user's as lockstep runs it: a batch goes in, the sum of its losses comes out.

In: a `torch.nn.Module` and the functions beside it. Out: the same module, with the same names of weights, which also
takes a `Bundle`. The loss is computed inside of `forward`: what the user's loss wants to see never leaves it. Its
export is `model.safetensors` and, in `config.json`, the name of the code that makes it: nothing is pickled.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import ModelOutput

from lockstep._version import __version__
from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.tasks.modules import dataset
from lockstep.tasks.modules.dataset import Bundle

COUNT = "where items hold different numbers of targets, give task.targets, which says how many one holds"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Computed(ModelOutput):
    """The output of a wrapped module. In evaluation `logits` hold the loss, then sum and count of each metric."""

    loss: Tensor | None = None  # float32 scalar: summed over targets
    logits: Tensor | None = None  # float64 [1 + 2 x metrics]; of what was generated: uint8, JSON


@dataclass(frozen=True)
class Calling:
    """How a model and the functions beside it are called."""

    run: Run
    loss: Callable[[Any, Any], Any]
    loss_kind: str  # "sum", "mean", or "each": one number a target
    metrics: Callable[[Any, Any], Any] | None
    metric_kinds: Mapping[str, str]  # name -> "sum", "mean", "each", or "pair"
    generate: Callable[[Any, Any], Any] | None
    names: tuple[str, ...] | None  # of what `forward` takes by name; None: anything

    def arguments(self, batch: Any) -> tuple[Arguments, Any]:
        """What the model is given of a batch, and what the loss is. Errors: `RunError`."""
        loss_inputs = batch
        if type(batch) in (list, tuple):  # and none with names for its parts
            if len(batch) != 2:
                raise RunError(
                    "LS3250",
                    f"task.data: a batch is a sequence of {len(batch)} values; expected a pair (the model sees the "
                    "first, the loss the second), a mapping, or one tensor",
                )
            batch, loss_inputs = batch
        if not isinstance(batch, Mapping):
            return ((batch,), {}), loss_inputs
        arguments = {str(k): v for k, v in batch.items() if self.names is None or k in self.names}
        if not arguments:
            raise RunError(
                "LS3251",
                f"task.model: forward takes {', '.join(self.names or ())}, but a batch has the keys "
                f"{', '.join(batch)}; arguments are passed by these names",
            )
        return ((), arguments), loss_inputs

    def summed(self, value: Any, bundle: Bundle) -> Tensor:
        """What the user's loss gave, as the sum over targets: float32 scalar. Errors: `RunError`."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise RunError(
                "LS3252", f"task.loss: expected a tensor of floats, but the function returned {kind_of(value)}"
            )
        if self.loss_kind == "each":
            if self.run.task.options.get("targets") is None and value.numel() != bundle.targets:
                raise RunError(
                    "LS3253",
                    f"task.loss: it returned {value.numel()} numbers for a batch of {bundle.examples} examples; "
                    f"expected {bundle.targets}; {COUNT}",
                )
            loss_total = value.float().sum()
        elif value.numel() != 1:
            raise RunError(
                "LS3254", f"task.loss: it returned one number for the batches of the trial, and now {kind_of(value)}"
            )
        else:
            loss_total = value.float().reshape(()) * (bundle.targets if self.loss_kind == "mean" else 1)
        return nothing(loss_total) if bundle.blank else loss_total

    def measured(self, outputs: Any, loss_inputs: Any, bundle: Bundle) -> list[Any]:
        """Sum and count of each metric, one after the other. Errors: `RunError`."""
        if self.metrics is None:
            return []
        values = self.metrics(outputs, loss_inputs)
        if not isinstance(values, Mapping) or {*values} != {*self.metric_kinds}:
            raise RunError(
                "LS3255",
                f"task.metrics: expected a mapping with {', '.join(self.metric_kinds)}, but the function "
                f"returned {values!r}",
            )
        numbers: list[Any] = []
        for name, kind in self.metric_kinds.items():
            value = values[name]
            if kind == "pair":
                numbers += value
            elif kind == "each":
                numbers += [value.double().sum(), value.numel()]
            else:
                numbers += [value * (bundle.examples if kind == "mean" else 1), bundle.examples]
        return numbers


def nothing(tensor: Tensor) -> Tensor:
    """A zero that hangs on `found`, so that every rank's backward runs, also through a loss that is no number."""
    return torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, 0)


def kind_of(value: Any) -> str:
    """The kind of a value, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def names_of(model: nn.Module) -> tuple[str, ...] | None:
    """The arguments of `forward`; None where it takes any name."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


class Adapted(nn.Module):
    """Goes in front of the user's class: its `forward` is called as ever, or with a bundle."""

    calling: Calling

    def forward(self, *arguments: Any, lockstep_batch: Bundle | None = None, **named: Any) -> Any:
        """The user's own, or a `Computed`."""
        if lockstep_batch is None:
            return super().forward(*arguments, **named)
        return computed(self, super().forward, self.lockstep_calling, lockstep_batch)  # type: ignore[arg-type]


def computed(model: nn.Module, forward: Callable[..., Any], calling: Calling, bundle: Bundle) -> Computed:
    """One batch through the user's `forward` and the functions beside it."""
    if bundle.asks == "generate":
        return generated(model, forward, calling, bundle)
    (arguments, named), loss_inputs = calling.arguments(bundle.batch)
    return finished(calling, forward(*arguments, **named), loss_inputs, bundle, model.training)


def finished(calling: Calling, outputs: Any, loss_inputs: Any, bundle: Bundle, training: bool) -> Computed:
    """Compute the loss from the outputs of the user's model, and the metrics unless the model is training."""
    if isinstance(calling.loss, nn.Module) and isinstance(outputs, Tensor):  # it may hold weights of classes
        calling.loss.to(outputs.device)
    loss = calling.summed(calling.loss(outputs, loss_inputs), bundle)
    if training:
        return Computed(loss=loss)
    numbers = [loss.detach(), *calling.measured(outputs, loss_inputs, bundle)]
    logits = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=loss.device) for n in numbers])
    return Computed(loss=loss, logits=logits)


def generated(model: nn.Module, forward: Callable[..., Any], calling: Calling, bundle: Bundle) -> Computed:
    """What the user's `generate` makes of a batch, as JSON in bytes: every strategy hands out tensors."""
    assert calling.generate is not None
    with dataset.user_call(calling.run, "generate"):
        written = calling.generate(PlainOutputs(model, forward), bundle.batch)
        text = json.dumps([rows if isinstance(rows, dict) else {"written": str(rows)} for rows in written], default=str)
    device = next(model.parameters()).device
    return Computed(logits=torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device))


class PlainOutputs:
    """The user's model for their own `generate`: called past the hooks of engines, which are around it already."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self.__model, self.__forward = model, forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__model, name)


def adapt(model: nn.Module, calling: Calling) -> nn.Module:
    """The model itself, which now takes a bundle too. Errors: `RunError`."""
    kind = type(model)
    try:
        model.__class__ = type(kind.__name__, (Adapted, kind), {"__module__": kind.__module__})
    except TypeError as error:
        raise RunError("LS3256", f"task.model: {kind.__name__} cannot take this adapter: {error}") from error
    model.lockstep_calling = calling  # type: ignore[assignment]
    return model


WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write(folder: Path, weights: Mapping[str, Tensor], build: str, arguments: Mapping[str, Any]) -> None:
    """Tied weights are written under each of their names."""
    save_file({n: t.detach().cpu().clone().contiguous() for n, t in weights.items()}, folder / WEIGHTS)
    config = {"library": "lockstep", "version": __version__, "model": build, "model_arguments": dict(arguments)}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> nn.Module:
    """The trained model of an export, in evaluation mode: the code that `config.json` names is imported and run.
    Errors: `RunError`."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        build, arguments = config["model"], config["model_arguments"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(
            "LS3257", f"{folder} holds no model of the task module; from_pretrained loads those of transformers"
        ) from None
    try:
        model = plugins.attribute(build)(**arguments)
    except plugins.PluginError as error:
        raise RunError(
            error.code, f"{folder}: {error.message}; its code has to be where Python finds it (PYTHONPATH)"
        ) from error
    fill(model, folder)
    return model.eval()


def fill(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of an export. Errors: `RunError`."""
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError) as error:
        raise RunError(
            "LS3258", f"{folder / WEIGHTS} does not belong to this model: {' '.join(str(error).split())[:300]}"
        ) from error
