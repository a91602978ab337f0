"""Recovery of a strategy's state after the loss of a rank: `launch.on_rank_failure: continue`.

In: a strategy whose step a lost rank interrupted. Out: the state before that step or after it, in a new process group.
`ReplicaRecovery` is for ranks that hold the whole state. With `ShardRecovery`, another strategy is built for the
surviving ranks, from the shards that they hold (`training/recovery/reshard.py`). A strategy names one of them in
`recovery`; otherwise a lost rank ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from torch import nn

from lockstep.config.sections import StrategySection
from lockstep.data.job import Job
from lockstep.distributed.world import DataShard, World
from lockstep.strategies.exact.gradient_sum import LeafGradients
from lockstep.strategies.exact.training_state import TrainedWeights


class Replicated(Protocol):
    """What recovery reads of a strategy whose ranks hold the whole state."""

    world: World
    data_parallel: DataShard
    parameters: list[nn.Parameter]
    weights: TrainedWeights
    leaves: LeafGradients


class ReplicaRecovery:
    """Recovery of a `ReplicatedStrategy`: the surviving ranks keep it."""

    of_shards: ClassVar[bool] = False

    def __init__(self, strategy: Replicated) -> None:
        self.strategy = strategy

    def detach_group(self) -> None:
        """Drop everything that belongs to the process group: the wrapper and pending messages. Keeps the state between
        two updates."""
        strategy = self.strategy
        strategy.leaves.start(0, None)
        strategy.leaves.waiting = None
        for parameter in (*strategy.parameters, *strategy.weights.updated.values()):
            parameter.grad = None

    def attach_group(self) -> None:
        """Use a new process group, whose ranks all have the full state. Collective."""
        strategy = self.strategy
        shard, world = strategy.data_parallel, strategy.world
        strategy.data_parallel = replace(shard, rank=world.rank, size=world.size)


class ShardRecovery:
    """Recovery of a strategy with sharded state. `state` tells what this rank holds after an interrupted step: the
    state before the update or the one after it."""

    of_shards: ClassVar[bool] = True
    rebuilds: ClassVar[bool] = True  # False if an engine cannot be built twice in a process

    @classmethod
    def survives(cls, job: Job) -> bool:
        """Whether the state of the surviving ranks is consistent."""
        return job.same_bits

    @classmethod
    def fit_options(cls, section: StrategySection, processes: int) -> Mapping[str, Any]:
        """Return `strategy.options` that fit this number of processes."""
        return section.options
