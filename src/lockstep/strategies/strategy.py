"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are the
same on all ranks.
Every method is collective: all ranks call it, in the same order. A strategy keeps no schedule, step count, log or file.
`exact/update.py` holds the code most strategies share; `abilities.py` holds one class per optional ability.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.run import Run
from lockstep.data.batch import StepBatch, StepResult
from lockstep.distributed.sharded import Saved, WholeState, gather
from lockstep.distributed.step_timer import StepTimer
from lockstep.distributed.world import World, sum_in_place
from lockstep.strategies.engines.side_effects import SideEffects
from lockstep.strategies.exact.norm_and_clip import LossScale
from lockstep.strategies.exact.norm_and_clip import NotFinite as NotFinite
from lockstep.strategies.exact.reduction_tree import share
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.job import Job, StrategyRules
from lockstep.strategies.job import WeightFormats as WeightFormats
from lockstep.strategies.observer import StepObserver
from lockstep.tasks.models import inference
from lockstep.tasks.models.inference import Decoding
from lockstep.tasks.task import Task


@dataclass(frozen=True)
class DataShard:
    """This rank's position in data parallelism. Ranks with the same `rank` process the same examples together (pipeline
    stages, tensor parallel ranks)."""

    rank: int
    size: int
    sum: Callable[[Tensor], Tensor]  # over the ranks that work on different examples, in place; collective


def summing(group: dist.ProcessGroup) -> Any:
    """Return a function that sums a tensor over the ranks of a group, in place."""

    return lambda tensor: sum_in_place(tensor, group)


class Strategy(StrategyRules):
    """One optimizer step over all ranks: `train_step` updates the weights once, with the gradient of `sum of losses /
    targets` over all micro-batches of all ranks, clipped once, at the given learning rate."""

    plugin: ClassVar[str] = "strategies"
    waits_inside: ClassVar[tuple[str, ...]] = ("reduction", "overlapped")
    """Phases of a step (`StepTimer`) in which this rank also waits for other ranks."""

    task: Task
    model: nn.Module  # this rank's part of the model, under the task's parameter names
    data_parallel: DataShard
    statistics: Statistics | None = None  # the model's running statistics, if the strategy reduces them
    effects: SideEffects = SideEffects()  # side effects of forward, recorded by `dry_run`
    remarks: tuple[str, ...] = ()  # for the user, at the start of a run
    observer: StepObserver | None = None  # observes every `train_step`; of the same class on every rank

    def __init__(self, run: Run, world: World) -> None:
        """Record the topology; build nothing and communicate nothing."""
        self.run, self.world = run, world
        self.phases = StepTimer(world.device)
        self.data_parallel = DataShard(world.rank, world.size, world.sum)
        self.scaling = LossScale(world.device) if run.precision == "fp16" else None

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""

    @property
    @abstractmethod
    def trained_count(self) -> int:
        """Number of trained parameters: all, unless the run uses an adapter or some are frozen."""

    def own_micro_batches(self) -> Iterable[int]:
        """Return the indices of the micro-batches that this rank runs in a step, ascending."""
        return share(self.run.micro_batches, self.data_parallel.rank, self.data_parallel.size)

    def autocast(self, enabled: bool = True) -> torch.autocast:
        """Return a context for bf16 or fp16 if the run uses it; weights, gradients and moments stay fp32."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.run.precision)
        use_autocast = enabled and low is not None and not self.run.model.trained_in_bfloat16
        return torch.autocast(self.world.device.type, low or torch.bfloat16, use_autocast)

    @abstractmethod
    def build(self, task: Task) -> None:
        """Build the model, its wrapper and the optimizer."""

    @abstractmethod
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """Run one step: all micro-batches, one update."""

    @abstractmethod
    def dry_run(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        """Run a trial step that leaves no trace, so that running out of memory shows before training. `then`: called
        while optimizer state exists. Collective. Errors: `RunError` if forward changes state that would differ between
        ranks."""

    def settle(self) -> None:
        """Wait for the last update. Errors: `NotFinite` if that update was skipped and the run stops on non-finite
        numbers."""

    @abstractmethod
    def updated_parts(self) -> list[tuple[str, Tensor]]:
        """Return this rank's part of each trained parameter, sharing its memory; sharded ones as DTensors. A tied
        parameter may occur twice."""

    def weights_changed(self) -> None:
        """Copy the tensors that the optimizer updates into the model after they changed. Collective."""

    def averaged(self) -> AbstractContextManager[bool]:
        """Return a context in which the model has the weights to evaluate and export, if they differ from the trained
        ones. Yields whether they differ."""
        return nullcontext(False)

    def exported(self) -> dict[str, Tensor] | None:
        """Return `export()` of the evaluated weights. Collective."""
        with self.averaged() as other:
            weights = self.export()
            return {n: t.clone() for n, t in weights.items()} if other and weights is not None else weights

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits in evaluation mode, without gradients."""

    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        """Generate tokens, int64 [B, N]. Each rank passes its own inputs. Collective."""
        assert (how.beams, how.temperature) == (1, 0), "`checked` refuses what is not greedy"
        return inference.by_forward(self.forward, lambda count: self.data_parallel.sum(count.float()), inputs, how)

    @abstractmethod
    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights (`model.NAME`) and the optimizer state (`optimizer.KEY.NAME`) under
        the task's parameter names, without copies where possible.

        A sharded tensor is a DTensor: each rank of its mesh has its shard. Any other tensor is whole: replicated
        (bitwise equal on every rank), or on the only rank that holds or gathered it. All ranks together have the full
        state, with the same names and shapes after every step.
        """

    @abstractmethod
    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load what all ranks' `sharded_state_dict` returned together, from any strategy and any number of processes.
        Each rank reads only its own part."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full state on rank 0; other ranks return what they hold without gathering."""
        return gather(self.sharded_state_dict(), self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what rank 0's `state_dict` returned; every rank needs all of it. For small models and tests."""
        self.load_sharded_state_dict(WholeState(state))

    @abstractmethod
    def export(self) -> dict[str, Tensor] | None:
        """Return the full weights under the model's own names on rank 0, None elsewhere."""

    def close(self) -> None:
        """Release all resources."""


def make_strategy(job: Job, world: World) -> Strategy:
    """Return the job's strategy, not built yet."""
    assert issubclass(job.strategy, Strategy), job.strategy
    return job.strategy(job.run, world)
