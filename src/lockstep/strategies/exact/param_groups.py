"""The parameter group of each weight: its rate beside the run's, its decay, its rule, and whether it is trained at all.

In: the `optim` section, `model.freeze`, and a model, which may be on the meta device. Out: one `ParamGroupSpec` for
each trained weight, by name: the same for every strategy, whatever part of the model a rank holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from lockstep.config.optim import OptimSection
from lockstep.config.run import Run, RunError
from lockstep.strategies.engines.side_effects import first_few
from lockstep.strategies.engines.writes import hooks
from lockstep.strategies.optimizers.optimizer import Weight, rule
from lockstep.tasks.task import Task

ALIGNED = 64  # bytes: where torch puts what it allocates on a CPU
_LAYER = re.compile(r"(.*?)\.(\d+)(?:\.|$)")  # the list that a layer is in, and its place there


@dataclass(frozen=True)
class ParamGroupSpec:
    """Weights that are treated alike are one parameter group."""

    scale: float  # of the run's rate
    decay: float
    kind: str  # which of the optimizer's rules


def assigned(optim: OptimSection, model: nn.Module) -> dict[str, ParamGroupSpec]:
    """Of every weight that is trained, in the model's order. Errors: `RunError` for patterns that match none."""
    exempt, cls = undecayed(model), rule(optim)
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
                f"optim.groups: {_unmatched(group.match, named)}"
                if not first
                else f"optim.groups: all weights of {group.match!r} are in a group before it; put it first"
            )
    return treated


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone: biases, and the weights of normalisation layers."""
    names = set()
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if norm or name.endswith("bias"):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def layer_factors(names: Sequence[str], embeddings: Collection[str], decay: float) -> dict[str, float]:
    """Of the rate: 1 for what comes after the layers, `decay` for the topmost layer, `decay`**2 for the one below it,
    and so on; embeddings, and what comes before the first layer, as one layer more. A stack of layers (an encoder's, a
    decoder's) counts from its own top. Errors: `RunError` where there are no layers."""
    if decay == 1.0:
        return dict.fromkeys(names, 1.0)
    places = {name: (match[1], int(match[2])) for name in names if (match := _LAYER.match(f"model.{name}"))}
    if not places:
        raise RunError("optim.layerwise_lr_decay: the model has no list of layers; use optim.groups")
    sizes: dict[str, int] = {}
    for stack, place in places.values():
        sizes[stack] = max(sizes.get(stack, 0), place + 1)
    deepest, factors, seen = max(sizes.values()), {}, False
    for name in names:
        if name in places:
            stack, place = places[name]
            factors[name], seen = decay ** (sizes[stack] - place), True
        else:
            factors[name] = decay ** (deepest + 1) if name in embeddings or not seen else 1.0
    return factors


def freeze(run: Run, model: nn.Module) -> nn.Module:
    """The model, with the weights that `model.freeze` names, and empty ones, taken out of training. Errors: `RunError`
    for a pattern that matches none, and where nothing is left."""
    named = dict(model.named_parameters())
    for parameter in named.values():
        if not parameter.numel():  # of two sizes that are equal: nothing is there to train or to save
            parameter.requires_grad_(False)
    for pattern in run.model.freeze:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise RunError(f"model.freeze: {_unmatched(pattern, named)}")
        for name in matching:
            named[name].requires_grad_(False)
    if run.model.freeze and not any(p.requires_grad for p in named.values()):
        raise RunError("model.freeze: no weight is left to train")
    return model


def _unmatched(pattern: str, named: Mapping[str, object]) -> str:
    core = pattern.strip("*.")
    near = [name for name in named if core in name] or difflib.get_close_matches(core, list(named), cutoff=0.4)
    examples = ", ".join((near or list(named))[:2])
    return (
        f"no weight that is trained is called {pattern!r}; there are {examples}, ... (* stands for any part of a name)"
    )


# -- the model --------------------------------------------------------------------------------------------------------


def make_model(task: Task, empty: bool = False) -> nn.Module:
    """The task's model, its tensors laid out in memory as their shapes say; `empty`: on the meta device.

    Sums, slices and fused updates walk through memory: the gradient of a transposed weight would be taken in another
    order than the weight. Products with one row give other last bits where a weight does not begin at a multiple of 64
    bytes, as in a file that is mapped into memory; engines that copy weights put them there.
    Errors: `RunError` for trainable weights that are not float32, unless the run asks for others, and for hooks that
    see sums of micro-batches.
    """
    wanted = torch.bfloat16 if task.run.model.trained_in_bfloat16 else torch.float32
    model = freeze(task.run, task.model(empty=True) if empty else task.model())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != wanted:
            raise RunError(f"model(): {name} is {parameter.dtype}; weights that are trained must be {wanted}")
    if names := hooks(model, after=True):
        raise RunError(
            f"model(): {first_few(names)} has a hook for after its gradient was added up "
            "(register_post_accumulate_grad_hook): it would see the sum of several micro-batches. Use register_hook"
        )
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model
