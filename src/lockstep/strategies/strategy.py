"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are
the same on all ranks.
Every method is collective: every rank enters it, in the same order. A strategy keeps no schedule, step count, log
or file. What most strategies share is in `exact/update.py`; what only some can do is a class each in `abilities.py`.
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
from lockstep.distributed.world import World
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
class DataParallel:
    """Which part of the data this rank works on. Ranks with the same `rank` work on the same examples together (the
    stages of a pipeline, the parts of a tensor)."""

    rank: int
    size: int
    sum: Callable[[Tensor], Tensor]  # over the ranks that work on different examples, in place; collective


def summing(group: dist.ProcessGroup) -> Any:
    """A sum over the ranks of a group, in place."""

    def add(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    return add


class WeightFormats(Flag):
    """Formats of a model's weights, beside float32, that a strategy can train with."""

    NONE = 0
    BFLOAT16 = auto()  # weights in bfloat16, beside float32 master weights
    BFLOAT16_ALONE = auto()  # weights in bfloat16 without master weights
    FOUR_BITS = auto()  # frozen weights in 4 bits beside an adapter


class Strategy(ABC):
    """One optimizer step, exactly: weights after `train_step` are those of one update with the gradient of
    `sum of losses / targets`, over all micro-batches of all ranks, clipped once, at the rate given."""

    plugin: ClassVar[str] = "strategies"
    exact: ClassVar[bool] = False  # whether it can give the same bits as `single` at every number of processes
    needs: ClassVar[tuple[str, ...]] = ()  # packages beyond the core, as they are imported; extras have their names
    weight_formats: ClassVar[WeightFormats] = WeightFormats.NONE
    chooses_links: ClassVar[bool] = True  # whether its exact sums travel as `strategy.all_reduce` says
    flat_parts: ClassVar[bool] = False  # whether an engine hands the optimizer parts of tensors laid end to end
    waits_inside: ClassVar[tuple[str, ...]] = ("reduction", "overlapped")
    """Phases of a step (`StepTimer`) in which this rank also waits for other ranks."""

    task: Task
    model: nn.Module  # what this rank holds of the model, under the task's own parameter names
    data_parallel: DataParallel
    statistics: Statistics | None = None  # the model's running statistics, where the strategy brings them together
    effects: SideEffects = SideEffects()  # what forward changes by itself, once `dry_run` has looked
    observer: StepObserver | None = None  # listens to every `train_step`; the same kind on every rank

    def __init__(self, run: Run, world: World) -> None:
        """Topology only, nothing is built and nothing communicated."""
        self.run, self.world = run, world
        self.phases = StepTimer(world.device)
        self.data_parallel = DataParallel(world.rank, world.size, world.sum)
        self.scaling = LossScale(world.device) if run.precision == "fp16" else None

    @classmethod
    @abstractmethod
    def check(cls, run: Run, processes: int) -> None:
        """Refuse what cannot work, before any process starts. Errors: `RunError`."""

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check_prepared(cls, run: Run, processes: int) -> None:
        """Refuse what only a try of the model with the data shows, before any process starts. Errors: `RunError`."""

    @classmethod
    def resolve_class(cls, run: Run) -> type[Strategy]:
        """The class that does the work under these options, where one name stands for several engines."""
        return cls

    @classmethod
    def gives_bits(cls, run: Run) -> bool:
        """Whether this run ends with the bits of `single`, rather than equal to rounding."""
        return cls.exact and run.strategy.exact and not cls.inexact_options(run)

    @classmethod
    def inexact_options(cls, run: Run) -> list[str]:
        """The keys of options that compute in another way than `single` does, and so are refused where
        `strategy.exact` is set."""
        return []

    @classmethod
    def rounding(cls, run: Run) -> float:
        """The relative tolerance of loss, norm and gradients beside those of `single`, where bits are not promised.
        Sums of float32 in two orders stay well below this."""
        return 1e-4

    @classmethod
    def bytes_held(cls, run: Run, processes: int, state: float | None = None) -> dict[str, float]:
        """Bytes that a process holds for each parameter of the model between two micro-batches: `weights`, and of those
        that are trained `gradients`, `optimizer`, `average`; a mean over processes, the sums of
        docs/reference/strategies.md.
        `state`: of the optimizer's alone, where it is known better than its rule says."""
        state = optimizers.rule(run.optim).bytes_held() if state is None else state
        bytes_of = {"weights": 4.0, "gradients": 4.0, "optimizer": state}
        if run.model.trained_in_bfloat16:
            bytes_of |= {"weights": 2.0, "optimizer": bytes_of["optimizer"] + 4.0 * held_state.keeps_masters(run)}
        return bytes_of if run.average.ema is None else bytes_of | {"average": 4.0}

    @classmethod
    def partial_sums(cls, run: Run, processes: int) -> float:
        """Bytes for each trained parameter that a process holds besides, at most, while the micro-batches of a step are
        added over the tree."""
        return 0.0

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Parameters of the whole model."""

    @property
    @abstractmethod
    def trained_count(self) -> int:
        """Those of them that are trained: all, but with an adapter, or where a model has frozen some."""

    def own_micro_batches(self) -> Iterable[int]:
        """The micro-batches of a step that this rank runs, ascending."""
        return share(self.run.micro_batches, self.data_parallel.rank, self.data_parallel.size)

    def autocast(self, enabled: bool = True) -> torch.autocast:
        """bf16 or fp16 where the run asks for it; weights, gradients and moments stay fp32."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.run.precision)
        use_autocast = enabled and low is not None and not self.run.model.trained_in_bfloat16
        return torch.autocast(self.world.device.type, low or torch.bfloat16, use_autocast)

    @abstractmethod
    def build(self, task: Task) -> None:
        """Model, wrapping, optimizer."""

    @abstractmethod
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """One update."""

    @abstractmethod
    def dry_run(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        """A step before all others, leaving no trace: memory that does not suffice is found here. `then`: what is tried
        while there is a state of the optimizer. Collective. Errors: `RunError` when forward changes what each rank
        would keep for itself."""

    def settle(self) -> None:  # noqa: B027 - most know at once
        """Wait for the last update. Errors: `NotFinite`, where it was not made and the run says to stop then."""

    @abstractmethod
    def updated_parts(self) -> list[tuple[str, Tensor]]:
        """This rank's part of each trained parameter, in memory; DTensors of parts; tied ones maybe repeated."""

    def weights_changed(self) -> None:  # noqa: B027 - most update the model's own memory
        """Copy new values of what the optimizer updates into the model. Collective."""

    def averaged(self) -> AbstractContextManager[bool]:
        """A context in which the model is the one that is evaluated and exported, where that differs from the one that
        is trained."""
        return nullcontext(False)

    def exported(self) -> dict[str, Tensor] | None:
        """`export`, of what was evaluated. Collective."""
        with self.averaged() as other:
            weights = self.export()
            return {n: t.clone() for n, t in weights.items()} if other and weights is not None else weights

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits without a gradient, in evaluation mode."""

    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        """The tokens that the model writes, int64 [B, N]. Every rank gives inputs of its own. Collective."""
        assert (how.beams, how.temperature) == (1, 0), "`checked` refuses what is not greedy"
        return inference.by_forward(self.forward, lambda count: self.data_parallel.sum(count.float()), inputs, how)

    @abstractmethod
    def sharded_state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the weights (`model.NAME`) and the optimizer state (`optimizer.KEY.NAME`) under the
        task's own parameter names, not copied where it need not be.

        A DTensor where the strategy cuts tensors: each rank of its mesh has its part. Otherwise a whole tensor: on
        every rank where the strategy keeps copies (the same bits on each), on one where only that one holds or has
        gathered it. All ranks together hold everything, and the same names and shapes at every call after a step.
        """

    @abstractmethod
    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Take over what all ranks' `sharded_state_dict` gave together, on this or another strategy at this or another
        number of processes. Each rank reads what it will hold; none is given all of it."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state, whole on rank 0; on other ranks what is there without gathering it."""
        return gather(self.sharded_state_dict(), self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what rank 0's `state_dict` gave; every rank is given all of it. For small models, and tests."""
        self.load_sharded_state_dict(WholeState(state))

    @abstractmethod
    def export(self) -> dict[str, Tensor] | None:
        """Full weights under the model's own names on rank 0, None elsewhere."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give everything back."""


def strategy_class(run: Run) -> type[Strategy]:
    """The class a run's strategy is of. Errors: `PluginError`, `ImportError`."""
    cls: type[Strategy] = plugins.find("strategies", run.strategy.name)
    return cls.resolve_class(run)
