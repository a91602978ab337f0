"""Which runs may share micro-batches unevenly (`launch.rebalance_every`)."""

from __future__ import annotations

from typing import Any

from lockstep.config.guard import TAKEN, holds_parts


def unsupported_reason(every: int, strategy: Any) -> str | None:
    """Why a run of this strategy cannot; None: as far as its keys say, it can."""
    if not every:
        return None
    if holds_parts(strategy):
        return (
            f"launch.rebalance_every: {strategy.name} holds parts of the model with these options, and its ranks work "
            f"on micro-batches together, or on as many each; it takes {TAKEN}"
        )
    if not strategy.exact:
        return "launch.rebalance_every: without strategy.exact other shares are other bits; set strategy.exact=true"
    return None
