"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are
the same on all ranks.
Every method is collective: every rank enters it, in the same order. A strategy keeps no schedule, step count, log
or file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lockstep.batch import StepBatch, StepResult
from lockstep.run import Run
from lockstep.tasks.task import Task
from lockstep.world import World


class Strategy(ABC):
    """One optimizer step, exactly: weights after `train_step` are those of one update with the gradient of
    `sum of losses / targets`, over all micro-batches of all ranks, clipped once, at the rate given."""

    plugin: ClassVar[str] = "strategies"
    exact: ClassVar[bool] = False  # whether it can give the same bits as `single` at every number of processes

    def __init__(self, run: Run, world: World) -> None:
        """Topology only, nothing is built and nothing communicated."""
        self.run, self.world = run, world

    @classmethod
    @abstractmethod
    def check(cls, run: Run, processes: int) -> None:
        """Refuse what cannot work, before any process starts. Errors: `RunError`."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Parameters of the whole model."""

    @abstractmethod
    def leaves(self) -> range:
        """The pieces of a step that this rank runs."""

    @abstractmethod
    def build(self, task: Task) -> None:
        """Model, wrapping, optimizer."""

    @abstractmethod
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """One update."""

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits without a gradient, in evaluation mode."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Weights (`model.NAME`) and optimizer state (`optimizer.KEY.NAME`) under the task's own parameter names;
        not copied."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, on this or another strategy."""

    @abstractmethod
    def export(self) -> dict[str, Tensor] | None:
        """Full weights under the model's own names on rank 0, None elsewhere."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give everything back."""
