"""Hugging Face Accelerate as the engine: it wraps model and optimizer (`prepare`) and runs backward.

In: this rank's micro-batches. Out: the same update on every rank. The difference from `ddp.py` is who wraps and who
calls backward. Accelerate averages over processes and divides by accumulation steps behind one's back; here it does
neither, because the loss is divided once, by the targets of the whole step, and `hooked.py` sums.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from torch import Tensor, nn

from lockstep.batch import MicroBatch
from lockstep.run import Run, RunError
from lockstep.strategies.hooked import Hooked
from lockstep.strategies.strategy import require
from lockstep.world import World


class HFAccelerate(Hooked):
    """`strategy.options` are those of Accelerate's `DistributedDataParallelKwargs` (`bucket_cap_mb`,
    `static_graph`, ...)."""

    needs = ("accelerate",)

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        require(cls.needs, "strategy.name: hf_accelerate")
        from accelerate import DistributedDataParallelKwargs

        known = {field.name for field in dataclasses.fields(DistributedDataParallelKwargs)}
        known -= {"dim", "comm_hook", "comm_wrapper", "comm_state_option"}  # the hook is the exact reduction
        if unknown := set(run.strategy.options) - known:
            raise RunError(
                f"strategy.options: hf_accelerate has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(known))} (of Accelerate's DistributedDataParallelKwargs)"
            )

    def wrap(self) -> nn.Module:
        from accelerate import DistributedDataParallelKwargs

        options: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        options |= self.run.strategy.options
        self.accelerator = accelerator(self.run, self.world, [DistributedDataParallelKwargs(**options)])
        model, self.optimizer = prepared(self.accelerator, self.model, self.optimizer)
        self.primed = not (options.get("static_graph") and self.world.size > 1)
        return model

    def run_piece(self, micro: MicroBatch, divisor: float) -> Tensor:
        loss = self.task.loss_sum(self.wrapped(**micro.inputs), micro.targets)
        with self.autocast(False):
            self.accelerator.backward(loss / divisor)
        return loss.detach()

    def close(self) -> None:
        super().close()
        release(self.accelerator)
        del self.accelerator


def accelerator(run: Run, world: World, handlers: list[Any], **options: Any) -> Any:
    """An `Accelerator` in the process group that is there, checked to span it: under the wrong variables Accelerate
    silently makes worlds of one process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with world.variables_for_engines():
        found = Accelerator(
            cpu=world.device.type == "cpu",
            mixed_precision="bf16" if run.precision == "bf16" else "no",
            kwargs_handlers=handlers,
            **options,
        )
    assert found.num_processes == world.size, f"Accelerate sees {found.num_processes} of {world.size} processes"
    assert found.device.type == world.device.type, f"Accelerate is on {found.device}, the run on {world.device}"
    return found


def prepared(engine: Any, model: nn.Module, optimizer: Any) -> Any:
    """`engine.prepare(model, optimizer)`."""
    with warnings.catch_warnings():
        # torch 2.13 renamed an option of DistributedDataParallel, Accelerate 1.15 knows its old name only
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return engine.prepare(model, optimizer)


def release(found: Any) -> None:
    """Let go of models and of Accelerate's process-wide state."""
    from accelerate.state import AcceleratorState

    found.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
