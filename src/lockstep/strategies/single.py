"""One process does all the work: the plainest reading of the interface, and what every other strategy is compared with.

In: all micro-batches of a step. Out: one update. No communication.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.config.run import RunError
from lockstep.strategies.job import Job
from lockstep.strategies.replicated import ReplicatedStrategy


class Single(ReplicatedStrategy):
    """A strategy for one process: the gradient sum is the root of its own reduction tree."""

    chooses_links = False

    @classmethod
    def check(cls, job: Job) -> None:
        run, processes = job.run, job.processes
        if processes > 1:
            raise RunError(
                "LS4260",
                f"strategy.name: single supports one process only, and this job has {processes}; use "
                "strategy.name=ddp, or launch.processes=1",
            )
        if run.strategy.options:
            raise RunError(
                "LS4261", f"strategy.options: single has no options; remove {', '.join(run.strategy.options)}"
            )

    def reduce(self) -> list[Tensor]:
        return self.leaves.tree.root if self.run.strategy.exact else self.leaves.pop_all()
