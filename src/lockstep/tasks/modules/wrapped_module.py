"""Wrap the user's module: its forward takes a batch and returns the sum of its losses.

In: a `torch.nn.Module` and its user functions. Out: the same module, with unchanged weight names, which also accepts a
`Bundle`. The loss is computed inside `forward`, so its inputs never leave the module. The export is `model.safetensors`
and, in `config.json`, the name of the code that builds the module: nothing is pickled.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import ModelOutput

from lockstep._version import __version__
from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.tasks.modules import dataset
from lockstep.tasks.modules.dataset import Bundle, OwnCode

COUNT = "if items have different numbers of targets, set task.targets, a function that returns an item's number"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Computed(ModelOutput):
    """Output of a wrapped module. In evaluation, `logits` holds the loss, then sum and count of each metric."""

    loss: Tensor | None = None  # float32 scalar: summed over targets
    logits: Tensor | None = None  # float64 [1 + 2 x metrics]; uint8 JSON for generated texts


@dataclass(frozen=True)
class Calling:
    """How to call a model and its user functions."""

    code: OwnCode
    loss: Callable[[Any, Any], Any]
    loss_kind: str  # "sum", "mean", or "each": one number per target
    metrics: Callable[[Any, Any], Any] | None
    metric_kinds: Mapping[str, str]  # name -> "sum", "mean", "each", or "pair"
    generate: Callable[[Any, Any], Any] | None
    names: tuple[str, ...] | None  # argument names of `forward`; None: any

    def arguments(self, batch: Any) -> tuple[Arguments, Any]:
        """Split a batch into the model's arguments and the loss function's input. Errors: `RunError`."""
        loss_inputs = batch
        if type(batch) in (list, tuple):  # not a namedtuple
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
        """Convert the user's loss to the sum over targets: float32 scalar. Errors: `RunError`."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise RunError(
                "LS3252", f"task.loss: expected a tensor of floats, but the function returned {kind_of(value)}"
            )
        if self.loss_kind == "each":
            if self.code.task.options.get("targets") is None and value.numel() != bundle.targets:
                raise RunError(
                    "LS3253",
                    f"task.loss: it returned {value.numel()} numbers for a batch of {bundle.examples} examples; "
                    f"expected {bundle.targets}; {COUNT}",
                )
            loss_total = value.float().sum()
        elif value.numel() != 1:
            raise RunError("LS3254", f"task.loss: it returned a single number in the trial, and now {kind_of(value)}")
        else:
            loss_total = value.float().reshape(()) * (bundle.targets if self.loss_kind == "mean" else 1)
        return nothing(loss_total) if bundle.blank else loss_total

    def measured(self, outputs: Any, loss_inputs: Any, bundle: Bundle) -> list[Any]:
        """Sum and count of each metric, concatenated. Errors: `RunError`."""
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
    """A zero that depends on `tensor`, so that every rank runs backward, even if the loss is not finite."""
    return torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, 0)


def kind_of(value: Any) -> str:
    """Describe the type of a value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def names_of(model: nn.Module) -> tuple[str, ...] | None:
    """Argument names of `forward`; None if it accepts any keyword."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


class Adapted(nn.Module):
    """Mixin placed before the user's class: `forward` takes the usual arguments, or a bundle."""

    calling: Calling

    def forward(self, *arguments: Any, lockstep_batch: Bundle | None = None, **named: Any) -> Any:
        """The user's own output, or a `Computed` for a bundle."""
        if lockstep_batch is None:
            return super().forward(*arguments, **named)
        return computed(self, super().forward, self.lockstep_calling, lockstep_batch)  # type: ignore[arg-type]


def computed(model: nn.Module, forward: Callable[..., Any], calling: Calling, bundle: Bundle) -> Computed:
    """Run a batch through the user's `forward`, loss and metrics."""
    if bundle.asks == "generate":
        return generated(model, forward, calling, bundle)
    (arguments, named), loss_inputs = calling.arguments(bundle.batch)
    return finished(calling, forward(*arguments, **named), loss_inputs, bundle, model.training)


def finished(calling: Calling, outputs: Any, loss_inputs: Any, bundle: Bundle, training: bool) -> Computed:
    """Compute the loss from the outputs of the user's model, and the metrics unless the model is training."""
    if isinstance(calling.loss, nn.Module) and isinstance(outputs, Tensor):  # it may hold class weights
        calling.loss.to(outputs.device)
    loss = calling.summed(calling.loss(outputs, loss_inputs), bundle)
    if training:
        return Computed(loss=loss)
    numbers = [loss.detach(), *calling.measured(outputs, loss_inputs, bundle)]
    logits = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=loss.device) for n in numbers])
    return Computed(loss=loss, logits=logits)


def generated(model: nn.Module, forward: Callable[..., Any], calling: Calling, bundle: Bundle) -> Computed:
    """Output of the user's `generate` for a batch, as JSON in a byte tensor, because strategies return only tensors."""
    assert calling.generate is not None
    with dataset.user_call(calling.code.task, "generate"):
        written = calling.generate(PlainOutputs(model, forward), bundle.batch)
        text = json.dumps([rows if isinstance(rows, dict) else {"written": str(rows)} for rows in written], default=str)
    device = next(model.parameters()).device
    return Computed(logits=torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device))


class PlainOutputs:
    """The user's model as passed to `generate`: it bypasses the hooks of engines, which already surround the call."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self.__model, self.__forward = model, forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__model, name)


def adapt(model: nn.Module, calling: Calling) -> nn.Module:
    """Make the model accept a bundle too, in place. Errors: `RunError`."""
    kind = type(model)
    try:
        model.__class__ = type(kind.__name__, (Adapted, kind), {"__module__": kind.__module__})
    except TypeError as error:
        raise RunError("LS3256", f"task.model: {kind.__name__} cannot take this adapter: {error}") from error
    model.lockstep_calling = calling  # type: ignore[assignment]
    return model


WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write(folder: Path, weights: Mapping[str, Tensor], build: str, arguments: Mapping[str, Any]) -> None:
    """Write an export. Tied weights are stored under each of their names."""
    save_file({n: t.detach().cpu().clone().contiguous() for n, t in weights.items()}, folder / WEIGHTS)
    config = {"library": "lockstep", "version": __version__, "model": build, "model_arguments": dict(arguments)}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> nn.Module:
    """Load the trained model of an export, in evaluation mode. Imports and runs the code that `config.json` names.
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
        raise RunError(error.code, f"{folder}: {error.message}; its code must be importable (PYTHONPATH)") from error
    fill(model, folder)
    return model.eval()


def fill(model: nn.Module, folder: Path) -> None:
    """Load the weights of an export into a model. Errors: `RunError`."""
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError, SafetensorError) as error:  # missing, of another model, damaged
        raise RunError(
            "LS3258", f"{folder / WEIGHTS} does not belong to this model: {' '.join(str(error).split())[:300]}"
        ) from error
