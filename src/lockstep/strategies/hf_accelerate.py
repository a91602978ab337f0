"""Hugging Face Accelerate as the engine: it wraps model and optimizer (`prepare`) and runs backward.

In: this rank's micro-batches. Out: the same update on every rank. Unlike in `ddp.py`, Accelerate wraps the model and
calls backward. By default Accelerate averages over processes and divides by accumulation steps; here it does neither,
because the loss is divided once, by the targets of the whole step, and `engines/hooked_ddp.py` sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.plugins import require
from lockstep.config.run import RunError
from lockstep.config.sections import LaunchSection, StrategySection
from lockstep.data.batch import MicroBatch
from lockstep.data.job import Job
from lockstep.strategies.engines.accelerated import Accelerated, accelerator, prepared, release
from lockstep.strategies.engines.hooked_ddp import Hooked, WrapperRecovery
from lockstep.strategies.strategy import Strategy


class AcceleratorRecovery(WrapperRecovery):
    """Recovery of Accelerate: creates another `Accelerator` in the new process group."""

    strategy: HFAccelerate

    @override
    def detach_group(self) -> None:
        release(self.strategy.accelerator)
        super().detach_group()


class HFAccelerate(Accelerated, Hooked):
    """`strategy.options` are those of Accelerate's `DistributedDataParallelKwargs` (`bucket_cap_mb`, `static_graph`,
    ...), or one mapping: `fsdp` with the fields of its `FullyShardedDataParallelPlugin` (FSDP2), or `deepspeed` with
    `zero_stage` and a DeepSpeed config for its `DeepSpeedPlugin`."""

    facts = dataclasses.replace(Hooked.facts, engine_casts=True)
    recovery = AcceleratorRecovery

    @override
    @classmethod
    def resolve_class(cls, section: StrategySection, launch: LaunchSection) -> type[Strategy]:
        if "fsdp" in section.options:
            from lockstep.strategies.engines.accelerated_sharding import AcceleratedFSDP2

            return AcceleratedFSDP2
        if "deepspeed" in section.options:
            from lockstep.strategies.engines.accelerated_sharding import AcceleratedZero

            return AcceleratedZero
        return cls

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        require(cls.needs, "strategy.name: hf_accelerate")
        from accelerate import DistributedDataParallelKwargs

        known = {field.name for field in dataclasses.fields(DistributedDataParallelKwargs)}
        known -= {"dim", "comm_hook", "comm_wrapper", "comm_state_option"}  # the exact reduction is the hook
        if unknown := set(job.run.strategy.options) - known:
            raise RunError(
                "LS4200",
                f"strategy.options: hf_accelerate has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(known))} (of Accelerate's "
                "DistributedDataParallelKwargs), fsdp and deepspeed",
            )

    @override
    def wrap(self) -> nn.Module:
        from accelerate import DistributedDataParallelKwargs

        options: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        options |= self.run.strategy.options
        self.accelerator = accelerator(self.job, self.world, [DistributedDataParallelKwargs(**options)])
        model, self.update.optimizer = prepared(self.accelerator, self.model, self.update.stepper)
        self.overlap.primed = not (options.get("static_graph") and self.world.size > 1)
        return model

    @override
    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        with self.phases("forward"):
            loss = self.totals.loss_sum(self.task, self.wrapped(**self.inputs_of(micro)), micro, self.observer)
        with self.phases("overlapped" if self.travelling else "backward"), self.precision.autocast(False):
            self.accelerator.backward(self.precision.scaled(loss / divisor))
        return loss.detach()
