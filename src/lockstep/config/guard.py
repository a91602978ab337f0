"""How often training checks its own arithmetic: the section `guard` of the run file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lockstep.config.sections import Section, Steps


class GuardSection(Section):
    every: Steps = Field(
        0,
        description="steps between those in which one micro-batch is computed a second time, by another rank, and the "
        "weights of all ranks are compared, bit for bit; 0: never",
    )
    on_difference: Literal["stop", "retry"] = Field(
        "stop",
        description="before the update; stop: save the state before the step and end; retry: compute the step once "
        "more, and stop if it differs again",
    )


TAKEN = "single, allreduce, ddp, hf_accelerate, hf_trainer, or fsdp2 with gather: step"


def refused(guard: GuardSection, strategy: Any) -> str | None:
    """Why a run of this strategy cannot be guarded; None: as far as its keys say, it can."""
    name, options = strategy.name, strategy.options
    parts = name.startswith("zero") or name == "pipeline" or {"fsdp", "deepspeed"} & set(options)
    if not guard.every or not (parts or options.get("gather") == "micro_batch"):
        return None
    return (
        f"guard.every: {name} holds parts of the model with these options, and what a rank computed cannot be computed "
        f"again by another; guard takes {TAKEN}"
    )
