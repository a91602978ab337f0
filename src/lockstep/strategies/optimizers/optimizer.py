"""The interface of an optimizer: the rule that updates a weight and its state.

In: the optimizer's own keys of the run file; then plain float32 tensors and their gradients. Out: the same tensors,
updated in place. A rule does not know about ranks: `exact/stepper.py` passes whole tensors, or parts if the rule
supports any part. Does not import torch at the top, so that a run file can be checked without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.config.sections import OptimSection
from lockstep.data.job import Job, OptimizerRules, optimizer_class

if TYPE_CHECKING:
    import torch
    from torch import Tensor

State = dict[str, "Tensor"]
GroupOf = Mapping[str, Any]  # settings of a group: lr, weight_decay, kind


@dataclass(frozen=True)
class Weight:
    """Facts about a weight, for decisions before it exists."""

    name: str
    shape: tuple[int, ...]
    embedding: bool  # weight of an `nn.Embedding`
    in_layer: bool  # within a list of layers, unlike embeddings, heads and poolers


class Optimizer(OptimizerRules, ABC):
    """Base class of optimizers, one file each; `Options` types the optimizer's own keys in the run file."""

    plugin: ClassVar[str] = "optimizers"
    extra: ClassVar[str] = ""  # the pip extra that installs them

    any_part: ClassVar[bool] = False
    """Whether the rule is elementwise. Then each rank updates its own part of a tensor, and `update` must give an
    element the same bits wherever in its tensor it lies: use torch's fused AdamW and SGD, or single additions,
    multiplications, divisions and roots, which IEEE 754 rounds in one way (`add_` with `alpha`, `lerp_` and `addcmul_`
    may round once or twice, depending on the element's position). If False, whole tensors are gathered on one rank,
    which updates them."""

    heeds_skipped: ClassVar[bool] = False
    """Whether `update` changes nothing if the group's `skipped`, a float scalar on the device, is 1. Otherwise the host
    waits for the GPU in every step, to learn whether the step is skipped."""
    counters: ClassVar[tuple[str, ...]] = ("step",)  # scalar keys of the state

    usual_schedule: ClassVar[str] = "linear"  # default of `optim.schedule`
    warms_from_one: ClassVar[bool] = False
    """Whether warm-up starts at 1 / warmup_steps and reaches the full rate in its last step, as in the optimizer's
    library."""

    def check(self, optim: OptimSection) -> None:
        """Refuse conflicting options. Errors: `RunError`."""

    def kind(self, weight: Weight) -> str:
        """Return which of the optimizer's rules updates a weight, if it has several: the group's `kind`."""
        return ""

    def check_weights(self, kinds: Mapping[str, str]) -> None:
        """Refuse a model without a weight for the optimizer's own rule. `kinds`: trained weight -> `kind`. Errors:
        `RunError`."""

    def whole(self, group: GroupOf) -> bool:
        """Whether weights of this group are updated as whole tensors."""
        return not self.any_part

    @abstractmethod
    def begin(self, group: GroupOf, like: Tensor) -> State:
        """Return the state before the first update. `like`: the weight, or this rank's part of it; for a group of whole
        tensors, a tensor of the same shape and device with other values. The state consists of tensors shaped like the
        weight and of `counters` (for whole tensors, any tensors), in dtypes that a checkpoint can store."""

    @abstractmethod
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        """Update the weights in place: float32; flattened and zero-padded with `any_part`. The update of a weight must
        not depend on the other weights of the list. The gradients may be overwritten."""

    def evaluated(self, weight: Tensor, state: State) -> Tensor:
        """Return the weight to evaluate and export, if the rule `averages`."""
        return weight


def rule(section: OptimSection) -> Optimizer:
    """Return the optimizer of the `optim` section, with its options. Errors: `PluginError`."""
    cls: Any = optimizer_class(section.name)
    return cls(cls.Options.model_validate(section.options))


def check(job: Job) -> None:
    """Refuse unsupported combinations before any process starts. Errors: `RunError`."""
    run, cls, name = job.run, rule(job.run.optim), job.run.optim.name
    plugins.require(cls.packages, f"optim.name: {name}", cls.extra)
    cls.check(run.optim)
    if "." in name:  # a user-defined class
        _refuse_wrong_keys(cls, run.optim)
    if job.strategy.facts.flat_parts and (not cls.any_part or cls.averages):
        why = "exports averaged weights" if cls.any_part else "updates whole tensors"
        raise RunError(
            "LS4220",
            f"optim.name: {name} {why}, but under {run.strategy.name} DeepSpeed holds shards of flattened ones; use "
            "strategy.name=fsdp2, or optim.name=adamw, lion or sgd",
        )
    key = "strategy.options.fsdp" if "fsdp" in run.strategy.options else "strategy.options"
    options = run.strategy.options.get("fsdp", run.strategy.options)
    offloads = isinstance(options, Mapping) and options.get("cpu_offload")
    if offloads and not cls.any_part and run.launch.device != "cpu":
        raise RunError(
            "LS4221",
            f"{key}.cpu_offload: {name} updates whole tensors, which are gathered on the device; "
            "remove it, or use optim.name=adamw, lion or sgd",
        )


def _refuse_wrong_keys(rule: Optimizer, optim: OptimSection) -> None:
    """Run one update on the meta device, without computation. Errors: `RunError` for a state key that `begin` does not
    create, and for state that a strategy would lose."""
    import torch

    for shape in ((8, 8), (8,)):
        weight, gradient = (torch.zeros(shape, device="meta") for _ in range(2))
        kind = rule.kind(Weight("weight", shape, False, True))
        group = {"lr": optim.learning_rate, "weight_decay": optim.weight_decay, "kind": kind}
        group |= {"scale": 1.0, "skipped": None, "params": [weight], "names": ["weight"]}
        state = rule.begin(group, weight)
        begun = dict(state)
        try:
            with torch.no_grad():
                rule.update(group, [weight], [gradient], [state])
        except KeyError as error:
            raise RunError(
                "LS4222",
                f"optim.name: {optim.name}: update reads the key {error}, which is neither in the state "
                f"that begin creates ({', '.join(begun) or 'empty'}) nor in the group ({', '.join(group)})",
            ) from error
        except (RuntimeError, NotImplementedError):  # it needs values, which meta tensors lack
            return
        if rule.any_part and (lost := [key for key in state if state[key] is not begun.get(key)]):
            raise RunError(
                "LS4223",
                f"optim.name: {optim.name}: update replaces the tensor under the key {lost[0]!r} of the "
                "state, which would be lost; create all tensors of the state in begin, and write into them in "
                "place in update",
            )


def zeros(like: Tensor) -> Tensor:
    """Return float32 zeros, shaped and sharded like a weight."""
    import torch

    return torch.zeros_like(like, dtype=torch.float32)


def by_torch(
    kind: type[torch.optim.Optimizer],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[State],
    **options: Any,
) -> None:
    """Update once with an optimizer class of torch, or of another library with the same interface. `states`: its state
    of each weight, under its own keys."""
    optimizer = kind(list(weights), **options)
    for weight, gradient, state in zip(weights, gradients, states, strict=True):
        weight.grad = gradient
        optimizer.state[weight] = state
    optimizer.step()
    for weight in weights:
        weight.grad = None
