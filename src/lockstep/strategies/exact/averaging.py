"""A moving average of the weights, alongside a strategy: each rank averages the weights that it updates.

In: the parts of the weights that a rank updates, after every step. Out: their exponential moving average in float32: in
checkpoints as `ema.NAME`, and in place of the weights for evaluation and export.

The average is elementwise, in operations that round once each (no fused multiply-add, whose use depends on an element's
position in its tensor). It is therefore bitwise equal under any sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.distributed.sharded import Saved, local

if TYPE_CHECKING:
    from lockstep.strategies.strategy import Strategy


class Averaged:
    """The state of a strategy plus the average of its weights, if the run has one: a `ShardedState`."""

    def __init__(self, strategy: Strategy) -> None:
        """Start the average at the present weights."""
        run = strategy.run
        self.section, self.strategy = run.average, strategy
        parts = strategy.weights.updated_parts() if run.average.ema is not None else []
        self.averages = [(name, part, torch.zeros_like(part)) for name, part in parts]
        for _, part, mean in self.averages:
            local(mean).copy_(local(part))

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """Update the average after update number `updates`."""
        if not self.averages:
            return
        weight = 1 - self.section.decay(updates)
        for _, part, mean in self.averages:
            own = local(mean)
            own.add_((local(part) - own).mul_(weight))

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the average and the weights; a second call swaps them back. Collective."""
        if self.section.ema is None:
            return
        for _, part, mean in self.averages:
            weights = local(part).clone()
            local(part).copy_(local(mean))
            local(mean).copy_(weights)
        self.strategy.weights.changed()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. After an error they stay there: failing ranks do not
        wait for each other. Collective."""
        self.exchange()
        yield
        self.exchange()

    # -- for checkpoints ---------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Tensor]:
        return self.strategy.state.sharded_state_dict() | {f"ema.{name}": mean for name, _, mean in self.averages}

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load weights and average."""
        self.strategy.state.load_sharded_state_dict(saved)
        if self.section.ema is not None:
            saved.read({f"ema.{name}": mean for name, _, mean in self.averages})
            first = {name: mean for name, _, mean in reversed(self.averages)}  # a tied weight may be held twice
            for name, _, mean in self.averages:
                if mean is not first[name]:
                    local(mean).copy_(local(first[name]))


def optimizer_average(strategy: Strategy) -> AbstractContextManager[bool]:
    """Return a context in which the model has the weights to evaluate and export, if the optimizer averages those that
    it trains. Yields whether they differ."""
    return strategy.update.stepper.averaged(strategy.weights.changed)


def exported(strategy: Strategy) -> dict[str, Tensor] | None:
    """Return `export()` of the evaluated weights. Collective."""
    with optimizer_average(strategy) as other:
        weights = strategy.state.export()
        return {n: t.clone() for n, t in weights.items()} if other and weights is not None else weights


def check(job: Job) -> None:
    """Refuse averages that cannot be computed, or a second average. Errors: `RunError`."""
    run = job.run
    if run.average.summary and job.optimizer.averages:
        raise RunError(
            "LS4150",
            f"average: {run.optim.name} evaluates and exports its own average; remove average, or use another "
            "optim.name",
        )
    if run.average.ema is None:
        return
    if job.strategy.facts.flat_parts:  # its engine hides the tensors that it updates
        raise RunError(
            "LS4151",
            f"average.ema: DeepSpeed does not expose the weights that {run.strategy.name} updates; use "
            "strategy.name=fsdp2, which shards the average too, or average.last",
        )
    if not run.optim.master_weights:
        raise RunError(
            "LS4152",
            "average.ema: without optim.master_weights there are no float32 weights to average; set "
            "optim.master_weights=true",
        )
