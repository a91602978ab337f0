"""Accelerate as an engine: creating an `Accelerator`, preparing a model, and clearing Accelerate's process-wide state.

In: a run, and an existing process group. Out: an `Accelerator` that spans the group, released completely at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.config.sections import StrategySection
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy


class Accelerated(Strategy):
    """A strategy whose engine is Accelerate, which puts its own autocast into the model's forward."""

    needs: ClassVar[tuple[str, ...]] = ("accelerate",)
    accelerator: Any

    @override
    def close(self) -> None:
        super().close()
        release(self.accelerator)
        del self.accelerator


def only(strategy: StrategySection, name: str) -> Mapping[str, Any]:
    """Return the mapping under `name`, the only key allowed in `strategy.options`. Errors: `RunError`."""
    section = strategy.options[name]
    if not isinstance(section, Mapping):
        raise RunError("LS4020", f"strategy.options.{name}: invalid value {section!r}; expected a mapping of options")
    if others := set(strategy.options) - {name}:
        raise RunError(
            "LS4021", f"strategy.options: {', '.join(sorted(others))} cannot be combined with {name}; remove them"
        )
    return section


def accelerator(job: Job, world: World, handlers: list[Any], **options: Any) -> Any:
    """Return an `Accelerator` in the existing process group, checked to span it: with wrong environment variables,
    Accelerate silently creates worlds of one process."""
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    run = job.run
    AcceleratorState._reset_state(reset_partial_state=True)
    sharded = "fsdp_plugin" in options
    with world.variables_for_engines():
        if sharded and world.device.type == "cpu":  # Accelerate shards on GPUs only: pretend
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        low = run.precision == "bf16" and not run.model.trained_in_bfloat16
        own = {"mixed_precision": "bf16" if low else "no", "cpu": world.device.type == "cpu"}
        engine = Accelerator(kwargs_handlers=handlers, **(own | options))
    assert engine.num_processes == world.size, f"Accelerate sees {engine.num_processes} of {world.size} processes"
    assert engine.device.type == world.device.type, f"Accelerate is on {engine.device}, the run on {world.device}"
    return engine


def prepared(engine: Any, model: nn.Module, optimizer: Any) -> Any:
    """Return `engine.prepare(model, optimizer)`, after undoing an earlier engine's changes to the model."""
    vars(model).pop("_is_accelerate_prepared", None)  # in a job of one process, which has no wrapper
    if (forward := vars(model).pop("_original_forward", None)) is not None:  # wrapped in Accelerate's autocast
        model.forward = forward
    with warnings.catch_warnings():
        # torch 2.13 renamed a DistributedDataParallel option; Accelerate 1.15 uses the old name
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return engine.prepare(model, optimizer)


def release(engine: Any) -> None:
    """Release models and Accelerate's process-wide state."""
    from accelerate.state import AcceleratorState

    engine.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
