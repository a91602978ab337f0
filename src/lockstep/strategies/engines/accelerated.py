"""Accelerate as an engine: what strategies need of it, and where it keeps state of the whole process.

In: a run, and a process group that is there. Out: an `Accelerator` that spans it, and later nothing of it any more.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lockstep.config.run import Run, RunError
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy


class Accelerated(Strategy):
    """A strategy whose engine is Accelerate, which puts an autocast of its own into the model's forward."""

    needs: ClassVar[tuple[str, ...]] = ("accelerate",)
    accelerator: Any

    def close(self) -> None:
        super().close()
        release(self.accelerator)
        del self.accelerator


def only(run: Run, name: str) -> Mapping[str, Any]:
    """The mapping that is the whole of `strategy.options`. Errors: `RunError`."""
    section = run.strategy.options[name]
    if not isinstance(section, Mapping):
        raise RunError("LS4020", f"strategy.options.{name}: invalid value {section!r}; expected a mapping of options")
    if others := set(run.strategy.options) - {name}:
        raise RunError(
            "LS4021", f"strategy.options: {', '.join(sorted(others))} cannot be combined with {name}; remove them"
        )
    return section


def accelerator(run: Run, world: World, handlers: list[Any], **options: Any) -> Any:
    """An `Accelerator` in the process group that is there, checked to span it: under the wrong variables Accelerate
    silently makes worlds of one process."""
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    sharded = "fsdp_plugin" in options
    with world.variables_for_engines():
        if sharded and world.device.type == "cpu":  # Accelerate shards on GPUs only, unless it takes CPUs for them
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        low = run.precision == "bf16" and not run.model.trained_in_bfloat16
        own = {"mixed_precision": "bf16" if low else "no", "cpu": world.device.type == "cpu"}
        engine = Accelerator(kwargs_handlers=handlers, **(own | options))
    assert engine.num_processes == world.size, f"Accelerate sees {engine.num_processes} of {world.size} processes"
    assert engine.device.type == world.device.type, f"Accelerate is on {engine.device}, the run on {world.device}"
    return engine


def prepared(engine: Any, model: nn.Module, optimizer: Any) -> Any:
    """`engine.prepare(model, optimizer)`; what an engine before it did to the model itself is undone."""
    vars(model).pop("_is_accelerate_prepared", None)  # in a job of one process, where nothing was wrapped
    if (forward := vars(model).pop("_original_forward", None)) is not None:  # under its own autocast
        model.forward = forward
    with warnings.catch_warnings():
        # torch 2.13 renamed an option of DistributedDataParallel, Accelerate 1.15 knows its old name only
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return engine.prepare(model, optimizer)


def release(engine: Any) -> None:
    """Let go of models and of Accelerate's process-wide state."""
    from accelerate.state import AcceleratorState

    engine.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
