"""Optional abilities of strategies, one class each: a strategy inherits from the classes of its abilities.

In: a strategy or its class. Out: how its state survives the loss of a rank; test with `isinstance` or `issubclass`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from lockstep.config.sections import StrategySection
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.strategy import Strategy


class WholeStateRecovery(Strategy):
    """A strategy with the full state on every rank, so that surviving ranks can continue in a new process group after a
    failure: `launch.on_rank_failure: continue`."""

    plugin = "strategies"  # a base: it has no name in a run file

    @abstractmethod
    def detach_group(self) -> None:
        """Drop everything that belongs to the process group: the wrapper and pending messages. Keeps the state between
        two updates."""

    @abstractmethod
    def attach_group(self) -> None:
        """Use a new process group, whose ranks all have the full state. Collective."""


class ShardedRecovery(Strategy):
    """A strategy with sharded state that surviving ranks can reshard after a failure: `launch.on_rank_failure:
    continue`. Its `state` tells what this rank holds after an interrupted step: the state before the update or the one
    after it. `training/recovery/reshard.py` does the rest.
    """

    plugin = "strategies"  # a base: it has no name in a run file
    supports_reshard: ClassVar[bool] = True  # False if an engine cannot be built twice in a process
    build_empty = False  # whether to build it without weights, because a state is loaded next

    @classmethod
    def fit_options(cls, section: StrategySection, processes: int) -> Mapping[str, Any]:
        """Return `strategy.options` that fit this number of processes."""
        return section.options

    @classmethod
    def survives_rank_failure(cls, section: StrategySection) -> bool:
        """Whether the state of the surviving ranks is consistent."""
        return cls.gives_bits(section)

    def axis(self, name: str) -> str:
        """Return a mesh axis name that is unique to this process group. Torch caches by mesh and treats equal-looking
        meshes as one, although this rank's index may differ between them."""
        return name if self.world.members is None else f"{name}_{self.world.members.generation.number}"

    @override
    def set_optimizer(self, optimizer: Stepper) -> None:
        super().set_optimizer(optimizer)
        if self.world.members is not None and self.state.has_copies:
            self.update.barrier = lambda: self.world.barrier()

    def discard(self) -> None:
        """Release everything, also after an interrupted step; another strategy replaces this one. It is unusable
        afterwards."""
        self.__dict__.clear()
