"""A moving average of the weights, beside a strategy: each rank averages what it updates.

In: the parts of the weights that a rank updates, after every step. Out: their exponential moving average, float32, in
checkpoints under `ema.NAME`, and in the weights' place while the model is evaluated and when it is exported.

Every number is averaged by itself, in operations that round once each (no fused multiply-add, which a kernel uses or
not depending on where in its tensor a number lies). So the average has the same bits however the weights are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.config.run import Run, RunError
from lockstep.distributed.sharded import Saved, local
from lockstep.strategies.optimizers import optimizer as optimizers

if TYPE_CHECKING:
    from lockstep.strategies.strategy import Strategy


class Averaged:
    """The state of a strategy with the average of its weights, where the run asks for one: a `ShardedState`."""

    def __init__(self, run: Run, strategy: Strategy) -> None:
        """The average begins with the weights as they are."""
        self.section, self.strategy = run.average, strategy
        parts = strategy.updated_parts() if run.average.ema is not None else []
        self.averages = [(name, part, torch.zeros_like(part)) for name, part in parts]
        for _, part, mean in self.averages:
            local(mean).copy_(local(part))

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """After so many updates."""
        if not self.averages:
            return
        weight = 1 - self.section.decay(updates)
        for _, part, mean in self.averages:
            own = local(mean)
            own.add_((local(part) - own).mul_(weight))

    @torch.no_grad()
    def exchange(self) -> None:
        """The average in the weights' place and the weights in its own; once more, and both are where they were.
        Collective."""
        if self.section.ema is None:
            return
        for _, part, mean in self.averages:
            weights = local(part).clone()
            local(part).copy_(local(mean))
            local(mean).copy_(weights)
        self.strategy.weights_changed()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. An error leaves them there: ranks that fail do not
        wait for each other. Collective."""
        self.exchange()
        yield
        self.exchange()

    # -- as a checkpoint wants it ------------------------------------------------------------------------------------

    def gives_bits(self, run: Run) -> bool:
        return self.strategy.gives_bits(run)

    def sharded_state_dict(self) -> dict[str, Tensor]:
        return self.strategy.sharded_state_dict() | {f"ema.{name}": mean for name, _, mean in self.averages}

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Weights and average, whichever of them was where."""
        self.strategy.load_sharded_state_dict(saved)
        if self.section.ema is not None:
            saved.read({f"ema.{name}": mean for name, _, mean in self.averages})
            first = {name: mean for name, _, mean in reversed(self.averages)}  # a tied weight may be held twice
            for name, _, mean in self.averages:
                if mean is not first[name]:
                    local(mean).copy_(local(first[name]))


def check(run: Run, flat_parts: bool) -> None:
    """Errors: `RunError`, where there is nothing to average, or something else is already. `flat_parts`: the strategy's
    engine keeps what it updates to itself."""
    if run.average.summary and optimizers.rule(run.optim).averages:
        raise RunError(
            "LS4150",
            f"average: {run.optim.name} evaluates and exports its own average; remove average, or use another "
            "optim.name",
        )
    if run.average.ema is None:
        return
    if flat_parts:
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
