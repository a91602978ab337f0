"""The model and the weights that a rank trains, their moving average, and what it saves, loads and exports of them.

In: a task, which builds the model, and a stepper. Out: parameter name -> tensor that this rank updates: a whole weight,
or a part of it (`ShardedWeights` in `fsdp2.py`); its part of a checkpoint, `model.NAME`, `optimizer.KEY.NAME` and, with
fp16, `scaling.KEY`; the same loaded back; and the weights of the export. Strategies that hold something else than whole
weights have a `TrainingState` of their own.

With `model.dtype: bfloat16`, the optimizer updates a float32 master of each weight, and the weight is the rounded
master: an update is often smaller than a bfloat16 weight's last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.config.sections import ModelSection
from lockstep.data.job import Job, WeightFormats
from lockstep.distributed.sharded import Saved, WholeState, gather
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import World
from lockstep.strategies.engines.side_effects import first_few, hooks
from lockstep.strategies.exact.precision import LossScale
from lockstep.strategies.exact.stepper import Stepper, unmatched
from lockstep.strategies.exact.update import Gradient, Part, WeightUpdate
from lockstep.tasks.models import storage_dtype
from lockstep.tasks.task import Task

ALIGNED = 64  # bytes: alignment of torch's CPU allocator


def make_model(task: Task, empty: bool = False) -> nn.Module:
    """Build the task's model with contiguous, aligned tensors; `empty`: on the meta device.

    Sums, slices and fused updates walk through memory, so a transposed weight's gradient would be summed in another
    order. Products with a single row differ in their last bits if a weight does not start at a multiple of 64 bytes, as
    in a memory-mapped file; engines that copy weights align them.
    Errors: `RunError` for trainable weights that are not float32 (or the run's dtype), and for hooks that would see
    sums of micro-batches.
    """
    dtype = torch.bfloat16 if task.run.model.trained_in_bfloat16 else torch.float32
    model = freeze(task.run.model, task.model(empty=True) if empty else task.model())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            raise RunError("LS4174", f"model(): {name} is {parameter.dtype}; weights that are trained must be {dtype}")
    if names := hooks(model, after=True):
        raise RunError(
            "LS4175",
            f"model(): {first_few(names)} has a hook that runs after gradient accumulation "
            "(register_post_accumulate_grad_hook), which would see the sum of several micro-batches; use "
            "register_hook instead",
        )
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model


def freeze(section: ModelSection, model: nn.Module) -> nn.Module:
    """Freeze the weights that match `model.freeze`, and empty ones; return the model. Errors: `RunError` for a pattern
    without a match, or if no trainable weight remains."""
    named = dict(model.named_parameters())
    for parameter in named.values():
        if not parameter.numel():  # nothing to train or save
            parameter.requires_grad_(False)
    for pattern in section.freeze:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise RunError("LS4172", f"model.freeze: {unmatched(pattern, named)}")
        for name in matching:
            named[name].requires_grad_(False)
    if section.freeze and not any(p.requires_grad for p in named.values()):
        raise RunError("LS4173", "model.freeze: every weight is frozen, so nothing is left to train; freeze fewer")
    return model


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
            f"model.dtype: {name} supports float32 weights only with these options; use strategy.name=ddp or fsdp2"
            + (
                " (DeepSpeed's own option is bf16: {enabled: true})"
                if name.startswith(("zero", "hf_accelerate"))
                else ""
            ),
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


class AverageSource(Protocol):
    """The parts of a strategy that an average of its weights reads."""

    run: Run
    weights: TrainedWeights
    state: TrainingState
    update: WeightUpdate


class Averaged:
    """The state of a strategy plus the average of its weights, if the run has one: a `ShardedState`.

    Each rank averages the weights that it updates, in float32: in checkpoints as `ema.NAME`, and in place of the
    weights for evaluation and export. The average is elementwise, in operations that round once each (no fused
    multiply-add, whose use depends on an element's position in its tensor), so it is bitwise equal under any sharding.
    """

    def __init__(self, strategy: AverageSource) -> None:
        """Start the average at the present weights."""
        run = strategy.run
        self.section, self.strategy = run.average, strategy
        parts = strategy.weights.updated_parts() if run.average.ema is not None else []
        self.averages = [(name, part, torch.zeros_like(part)) for name, part in parts]
        for _, part, mean in self.averages:
            local(mean).copy_(local(part))

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """Update the average after update number `updates`."""
        if not self.averages:
            return
        weight = 1 - self.section.decay(updates)
        for _, part, mean in self.averages:
            own = local(mean)
            own.add_((local(part) - own).mul_(weight))

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the average and the weights; a second call swaps them back. Collective."""
        if self.section.ema is None:
            return
        for _, part, mean in self.averages:
            weights = local(part).clone()
            local(part).copy_(local(mean))
            local(mean).copy_(weights)
        self.strategy.weights.changed()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. After an error they stay there: failing ranks do not
        wait for each other. Collective."""
        self.exchange()
        yield
        self.exchange()

    # -- for checkpoints ---------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Tensor]:
        return self.strategy.state.sharded_state_dict() | {f"ema.{name}": mean for name, _, mean in self.averages}

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load weights and average."""
        self.strategy.state.load_sharded_state_dict(saved)
        if self.section.ema is not None:
            saved.read({f"ema.{name}": mean for name, _, mean in self.averages})
            first = {name: mean for name, _, mean in reversed(self.averages)}  # a tied weight may be held twice
            for name, _, mean in self.averages:
                if mean is not first[name]:
                    local(mean).copy_(local(first[name]))


def optimizer_average(strategy: AverageSource) -> AbstractContextManager[bool]:
    """Return a context in which the model has the weights to evaluate and export, if the optimizer averages those that
    it trains. Yields whether they differ."""
    return strategy.update.stepper.averaged(strategy.weights.changed)


def export_averaged(strategy: AverageSource) -> dict[str, Tensor] | None:
    """Return `export()` of the evaluated weights. Collective."""
    with optimizer_average(strategy) as other:
        weights = strategy.state.export()
        return {n: t.clone() for n, t in weights.items()} if other and weights is not None else weights


def check_average(job: Job) -> None:
    """Refuse averages that cannot be computed, or a second average. Errors: `RunError`."""
    run = job.run
    if run.average.summary and job.optimizer.averages:
        raise RunError(
            "LS4150",
            f"average: {run.optim.name} evaluates and exports its own average; remove average, or use another "
            "optim.name",
        )
    if run.average.ema is None:
        return
    if job.strategy.facts.flat_parts:  # its engine hides the tensors that it updates
        raise RunError(
            "LS4151",
            f"average.ema: DeepSpeed does not expose the weights that {run.strategy.name} updates; use "
            "strategy.name=fsdp2, which shards the average too, or average.last",
        )
    if not run.optim.master_weights:
        raise RunError(
            "LS4152",
            "average.ema: without optim.master_weights there are no float32 weights to average; set "
            "optim.master_weights=true",
        )
