"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are the
same on all ranks.
Every method is collective: all ranks call it, in the same order. A strategy keeps no schedule, step count, log or file.
`exact/update.py` holds the code most strategies share; `abilities.py` holds one class per optional ability.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.data.batch import StepBatch, StepResult
from lockstep.distributed.sharded import Saved, WholeState, gather
from lockstep.distributed.step_timer import StepTimer
from lockstep.distributed.world import World, sum_in_place
from lockstep.strategies.engines.side_effects import SideEffects
from lockstep.strategies.exact import held_state
from lockstep.strategies.exact.gradient import LossScale
from lockstep.strategies.exact.gradient import NotFinite as NotFinite
from lockstep.strategies.exact.reduction import share
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.observer import StepObserver
from lockstep.strategies.optimizers import optimizer as optimizers
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


class WeightFormats(Flag):
    """Weight formats, besides float32, that a strategy can train."""

    NONE = 0
    BFLOAT16 = auto()  # weights in bfloat16 with float32 master weights
    BFLOAT16_ALONE = auto()  # weights in bfloat16 without master weights
    FOUR_BITS = auto()  # frozen weights in 4 bits with an adapter


class Strategy(ABC):
    """One optimizer step over all ranks: `train_step` updates the weights once, with the gradient of `sum of losses /
    targets` over all micro-batches of all ranks, clipped once, at the given learning rate."""

    plugin: ClassVar[str] = "strategies"
    exact: ClassVar[bool] = False  # whether it can be bitwise equal to `single` at every number of processes
    needs: ClassVar[tuple[str, ...]] = ()  # import names of packages beyond the core; pip extras have the same names
    weight_formats: ClassVar[WeightFormats] = WeightFormats.NONE
    chooses_links: ClassVar[bool] = True  # whether `strategy.all_reduce` applies to its exact sums
    runs_whole_model: ClassVar[bool] = False  # whether a rank's forward runs the whole model, with all its weights
    flat_parts: ClassVar[bool] = False  # whether an engine passes flattened parts of tensors to the optimizer
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

    @classmethod
    @abstractmethod
    def check(cls, run: Run, processes: int) -> None:
        """Refuse options that cannot work, before any process starts. Errors: `RunError`."""

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check_prepared(cls, run: Run, processes: int) -> None:
        """Refuse problems that only a trial of the model with the data reveals, before any process starts. Errors:
        `RunError`."""

    @classmethod
    def resolve_class(cls, run: Run) -> type[Strategy]:
        """Return the class that implements these options, for a name that covers several engines."""
        return cls

    @classmethod
    def gives_bits(cls, run: Run) -> bool:
        """Whether this run is bitwise equal to `single`, and not just equal within rounding."""
        return cls.exact and run.strategy.exact and not cls.inexact_options(run)

    @classmethod
    def inexact_options(cls, run: Run) -> list[str]:
        """Return the keys of options that make results differ from `single`; `strategy.exact` refuses them."""
        return []

    @classmethod
    def rounding(cls, run: Run) -> float:
        """Return the relative tolerance of loss, norm and gradients against `single`, for runs that are not bitwise
        reproducible. float32 sums in two different orders differ by much less."""
        return 1e-4

    @classmethod
    def bytes_held(cls, run: Run, processes: int, state: float | None = None) -> dict[str, float]:
        """Return the bytes per model parameter that a process holds between two micro-batches: `weights`, and for
        trained parameters `gradients`, `optimizer`, `average`. Values are means over processes;
        docs/reference/strategies.md derives them.
        `state`: bytes of optimizer state, if known more precisely than from the optimizer's rule.
        """
        state = optimizers.rule(run.optim).bytes_held() if state is None else state
        bytes_of = {"weights": 4.0, "gradients": 4.0, "optimizer": state}
        if run.model.trained_in_bfloat16:
            bytes_of |= {"weights": 2.0, "optimizer": bytes_of["optimizer"] + 4.0 * held_state.keeps_masters(run)}
        return bytes_of if run.average.ema is None else bytes_of | {"average": 4.0}

    @classmethod
    def partial_sums(cls, run: Run, processes: int) -> float:
        """Return the peak of additional bytes per trained parameter that a process holds while it sums a step's
        micro-batches over the tree."""
        return 0.0

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

    def settle(self) -> None:  # noqa: B027 - most know at once
        """Wait for the last update. Errors: `NotFinite` if that update was skipped and the run stops on non-finite
        numbers."""

    @abstractmethod
    def updated_parts(self) -> list[tuple[str, Tensor]]:
        """Return this rank's part of each trained parameter, sharing its memory; sharded ones as DTensors. A tied
        parameter may occur twice."""

    def weights_changed(self) -> None:  # noqa: B027 - most update the model's own memory
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

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release all resources."""


def strategy_class(run: Run) -> type[Strategy]:
    """Return the class of a run's strategy. Errors: `PluginError`, `ImportError`."""
    cls: type[Strategy] = plugins.find("strategies", run.strategy.name)
    return cls.resolve_class(run)
