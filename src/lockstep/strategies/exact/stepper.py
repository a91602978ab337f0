"""The optimizer of every strategy: it updates whole weights, or the parts that a rank holds.

It is a torch optimizer around a rule (`strategies/optimizers/`), whose updates are bitwise equal under any sharding.
`assigned` decides each weight's learning rate factor, decay and rule by its name, under every strategy; biases
(including tables of relative positions) and norms have no weight decay. `config/schedules.py` decides the rate of a
step.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.config.sections import OptimSection
from lockstep.distributed.sharded import Saved, fill, whole
from lockstep.distributed.torch_internals import is_dtensor, local
from lockstep.strategies.optimizers.optimizer import State, Weight, rule


def build(optim: OptimSection, model: nn.Module) -> Stepper:
    """Return the stepper of a model; each step sets its learning rate."""
    return Stepper(optim, groups(optim, model.named_parameters(), assigned(optim, model)))


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` unchanged: the `to_dtensor` for parameters that are whole, or already DTensors."""
    return tensor


class Stepper(torch.optim.Optimizer):
    """Torch optimizer that applies a rule to whole tensors, or to this rank's parts of them."""

    def __init__(
        self, optim: OptimSection, parts: list[dict[str, Any]], to_dtensor: Callable[[str, Tensor], Tensor] = as_it_is
    ) -> None:
        """`parts`: parameter groups. `to_dtensor`: (parameter name, this rank's local part of it, of its gradient or of
        a moment) -> the DTensor."""
        super().__init__(parts, {})
        self.rule, self.to_dtensor = rule(optim), to_dtensor

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Collective if tensors that need whole updates are sharded."""
        for group in self.param_groups:
            if self.rule.whole(group) and self._cut(group):
                self._bring_together(group)
                continue
            for portion in _portions(group["params"]):
                states = [self.begun(group, p) for p in portion]
                self._update(group, portion, [p.grad for p in portion], states)

    def begun(self, group: Mapping[str, Any], p: Tensor) -> State:
        """Return the state of a parameter that this rank updates, created on first use."""
        state: State = self.state[p]
        if not state:
            state.update(self.rule.begin(group, p.detach()))
        return state

    def _update(
        self,
        group: Mapping[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[State],
    ) -> None:
        if self.rule.whole(group):
            wide = [weight.float().contiguous() for weight in weights]
            self.rule.update(group, wide, [local(g).float().contiguous() for g in gradients], states)
            for weight, updated in zip(weights, wide, strict=True):
                if updated is not weight:
                    weight.copy_(updated)
            return
        keys = list(states[0])
        numbers = {key: [state[key] for state in states] for key in keys if key in self.rule.counters}
        moments = {key: [state[key] for state in states] for key in keys if key not in numbers}
        with aligned(weights, gradients, *moments.values()) as (parts, slopes, *columns):
            lists = numbers | dict(zip(moments, columns, strict=True))
            own: list[State] = [{key: lists[key][i] for key in keys} for i in range(len(parts))]
            self.rule.update(group, parts, slopes, own)

    # -- whole tensors, each rank holding a part ---------------------------------------------------------------------

    def _cut(self, group: Mapping[str, Any]) -> bool:
        """Whether this group's parameters are sharded (scalars never are)."""
        named = zip(group["names"], group["params"], strict=True)
        return any(is_dtensor(self.to_dtensor(name, p.detach())) for name, p in named)

    def _rounds(self, group: Mapping[str, Any]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the group's parameters in rounds of one per rank: the first is rank 0's to update, and so on. Sorted by
        size, so that a round's parameters are of similar size."""
        named = list(zip(group["names"], group["params"], strict=True))
        size = {name: self.to_dtensor(name, p.detach()).numel() for name, p in named}
        named.sort(key=lambda each: -size[each[0]])
        ranks = dist.get_world_size()
        return (named[i : i + ranks] for i in range(0, len(named), ranks))

    def _bring_together(self, group: Mapping[str, Any]) -> None:
        """Gather each whole tensor and its gradient on the rank that updates it, and broadcast the result.
        Collective."""
        rank = dist.get_rank()
        for turn in self._rounds(group):
            weight = None
            for owner, (name, p) in enumerate(turn):
                if p.grad is None:  # on every rank
                    continue
                brought = whole(self.to_dtensor(name, p.detach())), whole(self.to_dtensor(name, p.grad))
                if owner == rank:
                    weight, gradient = brought
            if weight is not None:
                own = turn[rank][1]
                if not self.state[own]:
                    self.state[own].update(self.rule.begin(group, weight))
                self._update(group, [weight], [gradient], [self.state[own]])
            for owner, (name, p) in enumerate(turn):
                if p.grad is None:
                    continue
                place = self.to_dtensor(name, p.detach())
                updated = (
                    weight
                    if owner == rank and weight is not None
                    else torch.empty(place.shape, dtype=p.dtype, device=p.device)
                )
                dist.broadcast(updated, owner)
                fill(place, updated)

    def _state_entries(self) -> Iterator[tuple[str, Tensor, Mapping[str, Any], Tensor | None]]:
        """Yield (name, parameter, group, `like`) for each parameter whose state this rank keeps; `like` has the whole
        shape if a sharded parameter is updated whole, else None."""
        for group in self.param_groups:
            if self.rule.whole(group) and self._cut(group):
                for turn in self._rounds(group):
                    if (rank := dist.get_rank()) < len(turn):
                        name, p = turn[rank]
                        yield name, p, group, torch.zeros(self.to_dtensor(name, p.detach()).shape, device=p.device)
            else:
                for name, p in zip(group["names"], group["params"], strict=True):
                    yield name, p, group, None

    # -- state -------------------------------------------------------------------------------------------------------

    def saved(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return `optimizer.KEY.NAME` of these parameters (default: all) as this rank saves it: a tensor that only it
        holds, a replicated one, or its part of a DTensor. Parameters without an update yet get their initial state, so
        that the names are the same after every step."""
        tensors: dict[str, Tensor] = {}
        for name, p, group, like in self._state_entries():
            if names is None or name in names:
                state: State = self.state[p]
                if not state:
                    state.update(self.rule.begin(group, p.detach() if like is None else like))
                tensors |= self._under_names(name, state, like is None)
        return tensors

    def places(self, saved: Saved, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Allocate the optimizer state that is in `saved`, install it as the parameters' state, and return its tensors
        to read into."""
        tensors: dict[str, Tensor] = {}
        for name, p, group, like in self._state_entries():
            if names is None or name in names:
                state = self.rule.begin(group, p.detach() if like is None else like)
                state = {key: value for key, value in state.items() if f"optimizer.{key}.{name}" in saved}
                if state:
                    self.state[p] = state
                    tensors |= self._under_names(name, state, like is None)
        return tensors

    def _under_names(self, name: str, state: State, cut: bool) -> dict[str, Tensor]:
        return {
            f"optimizer.{key}.{name}": self.to_dtensor(name, value) if cut and key not in self.rule.counters else value
            for key, value in state.items()
        }

    @contextmanager
    def averaged(self, changed: Callable[[], None]) -> Iterator[bool]:
        """A context in which the parameters have the weights to evaluate and export, if the rule averages; yields
        whether they do. Calls `changed` (collective) whenever the values change. An error leaves them swapped, because
        the other ranks do not wait for the failing one."""
        if not self.rule.averages or not self.state:
            yield False
            return
        trained_parts: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"] if self.state[p]):
                part = local(p.detach())
                trained_parts.append((part, part.clone()))
                part.copy_(self.rule.evaluated(part.float(), {key: local(v) for key, v in self.state[p].items()}))
        changed()
        yield True
        with torch.no_grad():
            for part, trained in trained_parts:
                part.copy_(trained)
        changed()


WIDENED = 2**24  # elements of bfloat16 weights without masters that one update widens to float32


def _portions(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters that have a gradient, in lists to update together: all at once, or fewer if they must be
    widened to float32."""
    remaining = [p for p in parameters if p.grad is not None]
    while remaining and remaining[0].dtype != torch.float32:
        numbers = itertools.accumulate(local(p).numel() for p in remaining)
        count = max(1, sum(number <= WIDENED for number in numbers))
        yield remaining[:count]
        remaining = remaining[count:]
    if remaining:
        yield remaining


LINE = 16  # float32 elements per iteration of the fused CPU kernels


@contextmanager
def aligned(*lists: Sequence[Tensor | None]) -> Iterator[list[list[Tensor]]]:
    """A context with copies of this rank's local tensors, each padded to whole `LINE`s; writes into them are copied
    back.

    On a CPU, torch's fused kernels round a tensor's last `numel % LINE` numbers differently from the rest, so results
    would depend on the sharding. Tensors of odd sizes are few and small. bfloat16 weights are float32 in here and
    rounded at the end.
    """
    parts = [[local(tensor) for tensor in tensors] for tensors in lists]
    padded = [[_padded(part) for part in group] for group in parts]
    yield padded
    for group, widened in zip(parts, padded, strict=True):
        for part, wide in zip(group, widened, strict=True):
            if wide is not part:
                part.copy_(wide[: part.numel()].view_as(part))


def _padded(part: Tensor) -> Tensor:
    part = part.float()
    if part.numel() % LINE == 0 or part.device.type != "cpu":
        return part
    return torch.nn.functional.pad(part.reshape(-1), (0, -part.numel() % LINE))


def set_rate(optimizer: torch.optim.Optimizer, rate: float, used: Tensor | None = None) -> None:
    """Set the learning rate of every group to `rate` times the group's scale. `used`: a bool scalar on the device; if
    it is false, the next step leaves weights and state unchanged, and the host does not have to wait for the value."""
    skipped = None if used is None else (~used).float()
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
        group["skipped"] = skipped


_WRAPPERS = ("modules_to_save", "default")  # name parts that peft inserts for trained copies of a module


# -- what applies to each weight -------------------------------------------------------------------------------------


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
    layered, of_embeddings = _layered(model, named), {n for n, p in named.items() if id(p) in embeddings}
    factors = layer_factors(list(named), layered, of_embeddings, optim.layerwise_lr_decay)
    treated, matched = {}, set()
    for name, p in named.items():
        group = next((group for group in optim.groups if fnmatchcase(name, group.match)), None)
        scale, decay = factors[name], optim.weight_decay
        if group is not None:
            matched.add(group.match)
            if group.learning_rate is not None:
                scale = group.learning_rate / optim.learning_rate
            decay = decay if group.weight_decay is None else group.weight_decay
        weight = Weight(name, tuple(p.shape), id(p) in embeddings, name in layered)
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


def check_weights(optim: OptimSection, model: nn.Module) -> None:
    """Refuse patterns that match nothing, and an optimizer without a weight. Errors: `RunError`."""
    rule(optim).check_weights({name: how.kind for name, how in assigned(optim, model).items()})


def _layered(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """List of layers and index in it of each weight in one. The head of a transformers model is none, even if it is an
    `nn.Sequential` (ResNet)."""
    whole: Any = model
    whole = whole.get_base_model() if hasattr(whole, "get_base_model") else whole  # within an adapter
    base = whole.base_model if hasattr(whole, "base_model_prefix") else whole
    body = {id(p) for p in base.parameters()}
    matches = {name: _LAYER.match(f"model.{name}") for name, p in named.items() if base is whole or id(p) in body}
    return {name: (match[1], int(match[2])) for name, match in matches.items() if match}


def layer_factors(
    names: Sequence[str], places: Mapping[str, tuple[str, int]], embeddings: Collection[str], decay: float
) -> dict[str, float]:
    """Return the learning rate factor of each weight: 1 after the last layer, `decay` in the topmost layer, `decay`**2
    in the one below, and so on; embeddings and weights before the first layer count as one more layer. Each stack of
    layers (encoder, decoder) counts from its own top. Errors: `RunError` if there are no layers."""
    if decay == 1.0:
        return dict.fromkeys(names, 1.0)
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
