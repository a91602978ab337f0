"""How often training checks its own arithmetic: the section `sdc_check` of the run file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lockstep.config.sections import Section, Steps


class GuardSection(Section):
    section = "sdc_check"

    every: Steps = Field(
        0,
        description="steps between those in which one micro-batch is computed a second time, by another rank, and the "
        "weights of all ranks are compared, bit for bit; 0: never",
    )
    on_difference: Literal["stop", "retry", "evict"] = Field(
        "stop",
        description="before the update; stop: save the state before the step and end; retry: compute the step once "
        "more, and stop if it differs again; evict: go on without the machine that was wrong (torchrun with "
        "launch.machines as fewest:most), or on one machine without the rank (launch.on_rank_failure: continue)",
    )


TAKEN = "single, allreduce, ddp, hf_accelerate, hf_trainer, or fsdp2 with gather: step"


def unsupported_reason(guard: GuardSection, strategy: Any, launch: Any) -> str | None:
    """Why a run of this strategy and launcher cannot be guarded so; None: as far as its keys say, it can."""
    if not guard.every:
        return None
    if guard.on_difference == "evict" and fewest(launch) is None and not loses_ranks(launch):
        return (
            f"sdc_check.on_difference: evict goes on without what was wrong, which takes launch.name=torchrun with "
            "launch.machines as fewest:most and launch.on_rank_failure=restart, or, on one machine, "
            "launch.on_rank_failure=continue "
            f"under local or torchrun; launch.name={launch.name} is not given so: take stop or retry"
        )
    if not holds_parts(strategy):
        return None
    return (
        f"sdc_check.every: {strategy.name} holds parts of the model with these options, and what a rank computed "
        f"cannot be computed again by another; it takes {TAKEN}"
    )


def holds_parts(strategy: Any) -> bool:
    """Whether ranks hold parts of the model, as far as the keys say: fsdp2 may decide it by the memory there is."""
    name, options = strategy.name, strategy.options
    parts = name.startswith("zero") or name == "pipeline" or {"fsdp", "deepspeed"} & set(options)
    return bool(parts or options.get("gather") == "micro_batch")


def fewest(launch: Any) -> int | None:
    """The fewest machines that a job goes on with after one was taken out; None: none can be."""
    least, several, most = str(launch.options.get("machines", "")).partition(":")
    leave = launch.name == "torchrun" and launch.on_rank_failure == "restart" and several and least != most
    return int(least) if leave else None


def loses_ranks(launch: Any) -> bool:
    """Whether a job on one machine goes on without single ranks, as far as its keys say."""
    one = launch.name == "local" or (launch.name == "torchrun" and launch.options.get("machines", 1) in (1, "1", "1:1"))
    return bool(one and launch.on_rank_failure == "continue")
