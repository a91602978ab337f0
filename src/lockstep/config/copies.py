"""Which runs may keep copies of their state in memory (`launch.replicate_every`)."""

from __future__ import annotations

from typing import Any


def unsupported_reason(launch: Any, strategy: Any) -> str | None:
    """Why a run of this strategy cannot; None: as far as its keys say, it can."""
    if not launch.replicate_every:
        return None
    if launch.on_rank_failure != "continue":
        return (
            "launch.replicate_every: copies are for ranks that go on without a lost one; "
            "set launch.on_rank_failure=continue"
        )
    if "fsdp" in strategy.options:
        return (
            f"launch.replicate_every: {strategy.name} leaves FSDP2 to Accelerate, which lockstep does not form anew "
            "within a process, so a lost rank starts the job again; leave it out, or use strategy.name=fsdp2"
        )
    return None
