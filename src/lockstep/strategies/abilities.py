"""What only some strategies can do, an ability a class: a strategy inherits from those that it has.

In: the class of a strategy, or a strategy. Out: whether it chooses by memory, or cuts its state anew for other ranks:
`isinstance`, or `issubclass` before there is a strategy. Ranks that hold the whole state each are in `native.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from lockstep.config.run import Run
from lockstep.data.batch import MicroBatch
from lockstep.strategies.exact.update import GradientUpdate
from lockstep.strategies.strategy import Strategy


class ChoosesByMemory(Strategy):
    """An option that is not given depends on the memory of the machines."""

    plugin = "strategies"  # a base: it has no name in a run file
    summary_suffix: ClassVar[str] = ""  # the choice, after the name in the opening lines

    @classmethod
    def needs_memory_to_resolve(cls, run: Run) -> bool:
        """Whether the option is not given."""
        return False

    @classmethod
    def resolve_options(cls, run: Run, processes: int, parameters: int, trained: int, memory: int) -> Run:
        """The run with that option. `parameters`: of the model, and those of them that are trained; `memory`: bytes of
        the device that has least of it, for one process. Never changes bits."""
        return run


class Recomputes(GradientUpdate):
    """A rank can compute any micro-batch of a step once more, with the bits of the step's own: `sdc_check`."""

    plugin = "strategies"  # a base: it has no name in a run file
    recomputes_together: ClassVar[bool] = False  # whether `recompute` is collective

    @classmethod
    def recomputes(cls, run: Run) -> bool:
        """Whether it can under these options."""
        return True

    @abstractmethod
    def recompute(self, step: int, micro: MicroBatch, targets: float) -> None:
        """Compute a micro-batch once more beside its step, on any rank, while no parameter has a `.grad`. The observer
        hears of its gradient, which nothing keeps."""

    @abstractmethod
    def replicated_weights(self) -> list[Tensor]:
        """The weights that every rank has a full copy of."""

    @abstractmethod
    def replicated_state(self) -> list[Tensor]:
        """The part of the state that every rank has a full copy of. Collective."""


class ShardedRecovery(GradientUpdate):
    """Ranks share the state out, and those that are left after a failure cut it anew: `launch.on_rank_failure:
    continue`. It says what this rank holds of a step that was broken off, and whether that is the state before the
    update or the one after it; `training/elastic/reshard.py` does the rest.

    Where several ranks hold the same part, one more message makes the update atomic: no rank makes it before all have
    what it needs. A rank that lost contact and has not made it, while another one has, makes it late."""

    plugin = "strategies"  # a base: it has no name in a run file
    supports_reshard: ClassVar[bool] = True  # False where an engine cannot be built a second time in a process
    state_needs_all_ranks: ClassVar[bool] = False  # whether a rank can read what it holds with the others' help only
    build_empty = False  # whether it is built without weights, which are about to be read
    deferred_update: Callable[[], Any] | None = None  # makes an update that was broken off before; not collective
    update_incomplete = False  # whether an update was broken off while it was made

    @classmethod
    def fit_options(cls, run: Run, processes: int) -> Run:
        """The run with options that suit so many processes, where those of the run file do not."""
        return run

    @classmethod
    def survives_rank_failure(cls, run: Run) -> bool:
        """Whether what those that are left hold fits together."""
        return cls.gives_bits(run)

    @property
    def part_of_state(self) -> tuple[int, int]:
        """Which part of the state this rank holds, and of how many: ranks of the same part hold the same."""
        return self.world.rank, self.world.size

    @property
    def keeps_copies(self) -> bool:
        """Whether several ranks hold each part, and update it by themselves."""
        whole = any(self.stepper.rule.whole(group) for group in self.stepper.param_groups)
        return self.world.size > self.part_of_state[1] and not whole

    def axis(self, name: str) -> str:
        """The name of a mesh's axis. Torch keeps what it has worked out of a mesh and takes another one that looks the
        same for it, in which this rank had another number: so no two groups of ranks have the same names."""
        return name if self.world.members is None else f"{name}_{self.world.members.generation.number}"

    def own_state(self) -> dict[str, Tensor]:
        """`sharded_state_dict`, also where a step was broken off. Not collective."""
        return self.sharded_state_dict()

    def apply_gradient(self, *arguments: Any) -> Tensor | bool:
        make = partial(super().apply_gradient, *arguments)
        if self.world.members is not None and self.keeps_copies:
            self.deferred_update = make
            self.world.barrier()
        self.deferred_update, self.update_incomplete = None, True
        used = make()
        self.update_incomplete = False
        return used

    def discard(self) -> None:
        """Let go of everything, of a step that was broken off, too: another strategy takes its place. It cannot be used
        any more."""
        self.__dict__.clear()

    def apply_deferred_update(self) -> None:
        """The update that others have made."""
        assert self.deferred_update is not None
        make, self.deferred_update = self.deferred_update, None
        make()
