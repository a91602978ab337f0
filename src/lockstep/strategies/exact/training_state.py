"""The weights that a rank trains, and what it saves, loads and exports of them and of the optimizer's state.

In: a model, and its stepper. Out: parameter name -> tensor that this rank updates: a whole weight, or a part of it
(`ShardedWeights` in `fsdp2.py`); its part of a checkpoint, `model.NAME`, `optimizer.KEY.NAME` and, with fp16,
`scaling.KEY`; the same loaded back; and the weights of the export. Strategies that hold something else than whole
weights have a `TrainingState` of their own.

With `model.dtype: bfloat16`, the optimizer updates a float32 master of each weight, and the weight is the rounded
master: an update is often smaller than a bfloat16 weight's last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.data.job import Job, WeightFormats
from lockstep.distributed.sharded import Saved, WholeState, gather
from lockstep.distributed.world import World
from lockstep.strategies.exact.precision import LossScale
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.exact.update import Gradient, Part
from lockstep.tasks.models import storage_dtype


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name, detached."""
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def tensors_to_save(
    tensors: Mapping[str, Tensor],
    stepper: Stepper,
    scaling: LossScale | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that a rank saves: `tensors`, and the optimizer state of the parameters `names` (default: all
    that it steps)."""
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return state | stepper.saved(names) | dict(scaling.state() if scaling else {})


def load_tensors(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    stepper: Stepper,
    scaling: LossScale | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Read into the tensors, and create the optimizer state from what is saved. Collective."""
    targets = {f"model.{name}": tensor for name, tensor in tensors.items()}
    saved.read(targets | stepper.places(saved, names) | dict(scaling.state() if scaling else {}))


def sums_in_float32(parameters: Iterable[Tensor]) -> None:
    """Make `.grad` of bfloat16 parameters float32, so that bfloat16 gradients accumulate in float32."""
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def check_masters(job: Job) -> None:
    """Refuse conflicting options of bfloat16 weights. Errors: `RunError`."""
    run, formats = job.run, job.strategy.facts.weight_formats
    if not run.model.trained_in_bfloat16:
        if not run.optim.master_weights:
            raise RunError(
                "LS4160",
                "optim.master_weights: false needs weights in bfloat16; set model.dtype=bfloat16, or "
                "master_weights=true",
            )
        return
    name = run.strategy.name
    if run.precision != "bf16":
        raise RunError(
            "LS4161",
            f"model.dtype: bfloat16 weights need precision=bf16, and precision is {run.precision}; set precision=bf16",
        )
    if WeightFormats.BFLOAT16 not in formats:
        raise RunError(
            "LS4162",
            f"model.dtype: {name} supports float32 weights only with these options; use strategy.name=ddp or "
            "fsdp2 (DeepSpeed's own option is bf16: {enabled: true})",
        )
    if not run.strategy.exact:
        raise RunError(
            "LS4163",
            "strategy.exact: with strategy.exact=false the gradients of bfloat16 weights would be summed in "
            "bfloat16; set strategy.exact=true",
        )
    if not run.optim.master_weights and WeightFormats.BFLOAT16_ALONE not in formats:
        raise RunError(
            "LS4164",
            f"optim.master_weights: {name} always keeps master weights with these options; set it to true, or "
            "use strategy.name=ddp, or fsdp2 with strategy.options.gather=step",
        )


class TrainedWeights:
    """The weights of a rank that holds each of them as forward reads it."""

    def __init__(self, model: nn.Module, masters: bool = False) -> None:
        """`masters`: the optimizer updates float32 copies."""
        self.model = model
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._read = self.own_parts()  # tensors that forward reads, for what this rank updates
        self._masters = masters
        self.updated = {n: nn.Parameter(p.detach().float()) for n, p in self._read.items()} if masters else self._read

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return storage_dtype.parameters(self.model)

    @property
    def trained_count(self) -> int:
        """Number of trained parameters: all, unless the run uses an adapter or some are frozen."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def own_parts(self) -> dict[str, nn.Parameter]:
        """Return this rank's part of each trained weight, sharing its memory."""
        return self.named

    def to_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a weight, gradient or moment, as a DTensor if it is sharded."""
        return tensor

    def gradient(self, gradients: Sequence[Tensor]) -> Gradient:
        """Return the gradient of a step from this rank's parts, in the order of `updated`."""
        updated = zip(self.updated.items(), gradients, strict=True)
        return Gradient([Part(name, p, g) for (name, p), g in updated], list(self.named))

    @torch.no_grad()
    def changed(self) -> None:
        """Copy the updated tensors to those that forward reads, with rounding. Collective if ranks update parts."""
        if self._masters:
            for master, place in zip(self.updated.values(), self._read.values(), strict=True):
                place.copy_(master)

    def updated_parts(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that this rank updates, sharing their memory; sharded ones as DTensors. A tied weight may
        occur twice."""
        return [(name, self.to_dtensor(name, tensor.detach())) for name, tensor in self.updated.items()]

    def to_save(self) -> dict[str, Tensor]:
        """Return this rank's weights and buffers; float32 masters in place of the weights they belong to."""
        return tensors_of(self.model) | (dict(self.updated_parts()) if self._masters else {})

    def loaded(self) -> None:
        """Make forward read the tensors of `to_save` after they were loaded. Collective, as `changed`."""
        if self._masters:
            self.changed()


class TrainingState:
    """The state that a rank saves, loads and exports: weights and the optimizer's state, under the task's parameter
    names. Every method but `own` is collective."""

    needs_all_ranks: ClassVar[bool] = False  # whether `own` is collective, too

    def __init__(self, weights: TrainedWeights, stepper: Stepper, scaling: LossScale | None, world: World) -> None:
        self.weights, self.stepper, self.scaling, self.world = weights, stepper, scaling, world

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights (`model.NAME`) and the optimizer state (`optimizer.KEY.NAME`), without
        copies where possible.

        A sharded tensor is a DTensor: each rank of its mesh has its shard. Any other tensor is whole: replicated
        (bitwise equal on every rank), or on the only rank that holds or gathered it. All ranks together have the full
        state, with the same names and shapes after every step.
        """
        return tensors_to_save(self.weights.to_save(), self.stepper, self.scaling)

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load a state that `sharded_state_dict` returned on all ranks, under any strategy and any number of processes.
        Each rank reads only its own part."""
        load_tensors(saved, self.weights.to_save(), self.stepper, self.scaling)
        self.weights.loaded()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full state on rank 0; other ranks return what they hold without gathering."""
        return gather(self.sharded_state_dict(), self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what rank 0's `state_dict` returned; every rank needs all of it. For small models and tests."""
        self.load_sharded_state_dict(WholeState(state))

    def export(self) -> dict[str, Tensor] | None:
        """Return the full weights under the model's own names on rank 0, None elsewhere."""
        weights = self.weights.model.state_dict()
        return {name: tensor.detach() for name, tensor in weights.items()} if self.world.is_main else None

    def own(self) -> dict[str, Tensor]:
        """Return `sharded_state_dict`, also after an interrupted step."""
        return self.sharded_state_dict()

    @property
    def part(self) -> tuple[int, int]:
        """Index of this rank's shard, and the number of shards; ranks with the same index hold the same shard."""
        return self.world.rank, self.world.size

    @property
    def has_copies(self) -> bool:
        """Whether several ranks hold each shard and update it independently."""
        whole = any(self.stepper.rule.whole(group) for group in self.stepper.param_groups)
        return self.world.size > self.part[1] and not whole
