"""The learning rate factor, weight decay and optimizer rule of every trained weight, by name, under every strategy.

In: the `optim` section and a model, possibly on the meta device. Out: one `ParamGroupSpec` per trained weight, or torch
parameter groups made of them. Biases (including tables of relative positions) and norms have no weight decay.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.config.sections import OptimSection
from lockstep.strategies.optimizers.optimizer import Weight, rule

_WRAPPERS = ("modules_to_save", "default")  # name parts that peft inserts for trained copies of a module


def without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: weights of modules whose class name contains "norm", and parameters
    named "bias" or in a module named so (`relative_attention_bias.weight`, `lstm.bias_ih_l0`)."""
    return {name for name, module in _owned(model) if _is_norm(module) or is_bias(name)}


def is_bias(name: str) -> bool:
    """Whether the name of a parameter, or of its module, contains "bias". List indices are skipped."""
    words = [word for word in name.split(".") if not word.isdigit() and word not in _WRAPPERS]
    return any("bias" in word.lower() for word in words[-2:])


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each parameter and the module that holds it."""
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            yield (f"{prefix}.{name}" if prefix else name), module


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)


_LAYER = re.compile(r"(.*?)\.(\d+)(?:\.|$)")  # the list of layers, and the layer's index in it


@dataclass(frozen=True)
class ParamGroupSpec:
    """The settings of one parameter group."""

    scale: float  # factor of the run's learning rate
    decay: float
    kind: str  # which of the optimizer's rules


def assigned(optim: OptimSection, model: nn.Module) -> dict[str, ParamGroupSpec]:
    """Return the parameter group of every trained weight, in the model's order. Errors: `RunError` for patterns without
    a match."""
    exempt, cls = without_decay(model), rule(optim)
    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    factors = layer_factors(list(named), {n for n, p in named.items() if id(p) in embeddings}, optim.layerwise_lr_decay)
    treated, matched = {}, set()
    for name, p in named.items():
        group = next((group for group in optim.groups if fnmatchcase(name, group.match)), None)
        scale, decay = factors[name], optim.weight_decay
        if group is not None:
            matched.add(group.match)
            if group.learning_rate is not None:
                scale = group.learning_rate / optim.learning_rate
            decay = decay if group.weight_decay is None else group.weight_decay
        weight = Weight(name, tuple(p.shape), id(p) in embeddings, _LAYER.match(f"model.{name}") is not None)
        treated[name] = ParamGroupSpec(scale, 0.0 if name in exempt else decay, cls.kind(weight))
    for group in optim.groups:
        if group.match not in matched:
            first = any(fnmatchcase(name, group.match) for name in named)
            raise RunError(
                "LS4170",
                f"optim.groups: {unmatched(group.match, named)}"
                if not first
                else f"optim.groups: all weights of {group.match!r} are in an earlier group; move this group before it",
            )
    return treated


def layer_factors(names: Sequence[str], embeddings: Collection[str], decay: float) -> dict[str, float]:
    """Return the learning rate factor of each weight: 1 after the last layer, `decay` in the topmost layer, `decay`**2
    in the one below, and so on; embeddings and weights before the first layer count as one more layer. Each stack of
    layers (encoder, decoder) counts from its own top. Errors: `RunError` if there are no layers."""
    if decay == 1.0:
        return dict.fromkeys(names, 1.0)
    places = {name: (match[1], int(match[2])) for name in names if (match := _LAYER.match(f"model.{name}"))}
    if not places:
        raise RunError("LS4171", "optim.layerwise_lr_decay: the model has no list of layers; use optim.groups")
    sizes: dict[str, int] = {}
    for stack, place in places.values():
        sizes[stack] = max(sizes.get(stack, 0), place + 1)
    deepest, factors, after_first_layer = max(sizes.values()), {}, False
    for name in names:
        if name in places:
            stack, place = places[name]
            factors[name], after_first_layer = decay ** (sizes[stack] - place), True
        else:
            factors[name] = decay ** (deepest + 1) if name in embeddings or not after_first_layer else 1.0
    return factors


def groups(
    optim: OptimSection, named: Iterable[tuple[str, Tensor]], treated: Mapping[str, ParamGroupSpec]
) -> list[dict[str, Any]]:
    """Return torch parameter groups: first the section's default settings, with and without decay. Frozen parameters
    are in no group."""
    members: dict[ParamGroupSpec, list[tuple[str, Tensor]]] = {ParamGroupSpec(1.0, optim.weight_decay, ""): []}
    members.setdefault(ParamGroupSpec(1.0, 0.0, ""), [])
    for name, parameter in named:
        if parameter.requires_grad:
            members.setdefault(treated[name], []).append((name, parameter))
    return [
        {
            "params": [parameter for _, parameter in params],
            "names": [name for name, _ in params],
            "lr": optim.learning_rate,
            "scale": how.scale,
            "weight_decay": how.decay,
            "kind": how.kind,
        }
        for i, (how, params) in enumerate(members.items())
        if params or (i == 0 and not any(members.values()))  # torch requires one group
    ]


def state_bytes(optim: OptimSection, model: nn.Module) -> float:
    """Return the mean bytes of optimizer state per trained parameter, from the model's shapes."""
    cls, total, count = rule(optim), 0, 0
    for group in groups(optim, model.named_parameters(), assigned(optim, model)):
        for parameter in group["params"]:
            state = cls.begin(group, torch.empty(parameter.shape, device="meta"))
            total += sum(each.numel() * each.element_size() for each in state.values() if each.dim())
            count += parameter.numel()
    return total / max(1, count)


def unmatched(pattern: str, named: Mapping[str, object]) -> str:
    """Return why a pattern of weight names is refused: no name in `named` matches; similar names are given."""
    core = pattern.strip("*.")
    near = [name for name in named if core in name] or difflib.get_close_matches(core, list(named), cutoff=0.4)
    examples = ", ".join((near or list(named))[:2])
    return (
        f"no trainable weight is called {pattern!r}; examples of trainable weights: {examples} (* stands for any "
        "part of a name)"
    )
