"""What a rank saves, loads and exports.

In: the tensors that this rank updates, and its stepper. Out: its part of a checkpoint, the same loaded back, and
the weights of the export. Strategies that hold something else than whole weights have a `TrainingState` of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lockstep.distributed.sharded import Saved, WholeState, gather
from lockstep.distributed.world import World
from lockstep.strategies.exact import held_state
from lockstep.strategies.exact.loss_scale import LossScale
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.exact.trained_weights import TrainedWeights


class TrainingState:
    """What a rank saves, loads and exports: weights and the optimizer's state, under the task's parameter names. Every
    method but `own` is collective."""

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
        return held_state.tensors_to_save(self.weights.to_save(), self.stepper, self.scaling)

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load a state that `sharded_state_dict` returned on all ranks, under any strategy and any number of processes.
        Each rank reads only its own part."""
        held_state.load(saved, self.weights.to_save(), self.stepper, self.scaling)
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
