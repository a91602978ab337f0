"""Recovery of strategies whose ranks hold all weights, when ranks fail or join: `launch.on_rank_failure: continue`.

In: a step that a lost rank interrupted. Out: the state before it, in the new process group.
"""

from __future__ import annotations

from typing_extensions import override

from lockstep.strategies.single import ReplicatedStrategy
from lockstep.strategies.strategy import DataShard, WholeStateRecovery


class RecoveringReplicas(ReplicatedStrategy, WholeStateRecovery):
    """Replicas of the whole state on several ranks."""

    plugin = "strategies"  # a base: it has no name in a run file

    @override
    def detach_group(self) -> None:
        self.leaves.start(0, None)
        self.leaves.waiting = None
        for parameter in (*self.parameters, *self.weights.updated.values()):
            parameter.grad = None

    @override
    def attach_group(self) -> None:
        self.data_parallel = DataShard(self.world.rank, self.world.size, self.world.all_reduce)
